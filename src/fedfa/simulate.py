"""A whole run on one machine: build what the experiment names, play its rounds, keep its folder."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedfa.algorithms.base import Algorithm
from fedfa.augmentation import Augmentation
from fedfa.data.federate import federate
from fedfa.data.federation import Federation
from fedfa.data.profile import profile
from fedfa.data.splits import Splits
from fedfa.data.transforms import Transforms
from fedfa.engines.base import Engine
from fedfa.engines.captured import Captured
from fedfa.engines.client import Local
from fedfa.engines.crew import Recipe
from fedfa.engines.processes import Processes
from fedfa.engines.sequential import Sequential
from fedfa.errors import Damaged, UserError
from fedfa.experiment import COMPONENTS, REGISTRIES, Experiment, load
from fedfa.memory import Memory, room_on
from fedfa.peak import Peak
from fedfa.precision import arithmetic
from fedfa.registries import Reader
from fedfa.registry import nearest
from fedfa.runs import Run, clear, find_run, held, unedited
from fedfa.server import Plan, Watcher, collect_shares, first_state, play_round
from fedfa.state import ServerState
from fedfa.statistics import better
from fedfa.streams import DrawnFrom, derive
from fedfa.task import Classification, Segmentation, Task
from fedfa.threads import useful_threads
from fedfa.trackers import tracked

TRACES = 50
"""Rounds of a run, about, after which an algorithm's traces are kept."""


def run(
    experiment: str | Path | Mapping[str, Any] | Experiment,
    *,
    root: Path | str = "runs",
    watcher: Watcher | None = None,
    force: bool = False,
    **overrides: Any,
) -> Run:
    """Run an experiment and return its :class:`Run`, whose folder is made under `root`.

    The folder is named by the settings. A run that is there already and complete is returned as it is; one that was
    stopped goes on from its last checkpoint; with `force` it is deleted and started anew.

    >>> fedfa.run("digit-sites", algorithm="fedfa", rounds=5)
    """
    config = load(experiment, overrides)
    folder = Path(root) / config.title
    there = (folder / "experiment.toml").exists()
    if there and not force:
        found = unedited(find_run(folder))
        return found if found.done else play(found, watcher)
    device = find_device(config.device)
    find_engine(config, device)
    parts = Parts.build(config)  # first: what cannot be built leaves no folder behind, and deletes none
    if there:
        clear(folder)
    return play(Run.create(folder, config, facts(config, parts, device)), watcher, parts)


def resume(folder: Path | str, watcher: Watcher | None = None) -> Run:
    """Go on with a run that was stopped, from its last checkpoint, to the numbers it would have had."""
    found = find_run(folder)
    return found if found.done else play(found, watcher)


_ONE_AT_A_TIME = threading.Lock()
"""Networks are initialised from torch's global generator, and runs may be threads of one process."""


@dataclass(frozen=True)
class Parts:
    """What an experiment's config stands for."""

    federation: Federation
    task: Task
    algorithm: Algorithm
    augmentation: Augmentation
    transforms: Transforms
    model: nn.Module
    plan: Plan

    @classmethod
    def build(cls, config: Experiment) -> Parts:
        with _ONE_AT_A_TIME:
            return cls.around(config, build_federation(config))

    @classmethod
    def around(cls, config: Experiment, federation: Federation) -> Parts:
        """The parts for a federation that is at hand already."""
        algorithm: Algorithm = config.build("algorithm")
        augmentation: Augmentation = config.build("augmentation")
        transforms = Transforms(tuple(config.build_transforms()))
        model = build_model(config, federation, algorithm, augmentation)
        plan = build_plan(config, federation)
        objection = algorithm.objection(model, local_settings(config), plan.held_out)
        objection = objection or transforms.objection(federation.channels)
        if objection is not None:
            raise UserError(objection)
        task = Segmentation(config.dice) if federation.task == "segmentation" else Classification()
        return cls(federation, task, algorithm, augmentation, transforms, model, plan)


def build_federation(config: Experiment) -> Federation:
    """The experiment's data, divided among clients."""
    try:
        return federate(config.build("source"), config.build("partition"), Splits(**config.split), config.seed)
    except ImportError as error:
        raise UserError(str(error)) from None


def local_settings(config: Experiment) -> Local:
    return Local(**{name: getattr(config, name) for name in Local.__dataclass_fields__})


def build_model(
    config: Experiment, federation: Federation, algorithm: Algorithm, augmentation: Augmentation
) -> nn.Module:
    """:func:`make_network`, tried on two samples."""
    model = make_network(config, federation, algorithm, augmentation)
    x, _ = federation.batch(next(iter(federation.clients.values())).train[:2])
    with torch.no_grad():
        try:
            output = model.eval()(x)
        except (RuntimeError, ValueError) as error:
            raise UserError(f"network {config.network['name']!r} does not take {federation.name}: {error}") from None
    if output.dim() != (4 if federation.task == "segmentation" else 2):
        raise UserError(
            f"network {config.network['name']!r} puts out {tuple(output.shape)}, which is not for {federation.task}"
        )
    return model


def make_network(
    config: Experiment, federation: Federation, algorithm: Algorithm, augmentation: Augmentation
) -> nn.Module:
    """The network with its layers, initialised from the seed alone."""
    stages = iter(sorted(set(config.network.get("stages") or ())) or itertools.count(1))
    placed: list[bool] = []

    def augment(channels: int) -> nn.Module:
        own = augmentation.layer(channels, next(stages))
        placed.append(own is not None)
        layers = [layer for layer in (own, algorithm.layer(channels)) if layer is not None]
        return layers[0] if len(layers) == 1 else nn.Sequential(*layers)

    seed = derive(config.seed, "initialisation")
    with torch.random.fork_rng(devices=[]), DrawnFrom(torch.Generator().manual_seed(seed)):
        torch.manual_seed(seed)  # for what draws in other ways
        model: nn.Module = config.build(
            "network", num_classes=len(federation.classes), in_channels=federation.channels, augment=augment
        )
    if type(augmentation).layer is not Augmentation.layer and not any(placed):
        raise UserError(
            f"augmentation {config.augmentation['name']!r} follows no stage that network {config.network['name']!r} has"
        )
    return model


def build_plan(config: Experiment, federation: Federation) -> Plan:
    """Who trains and who is held out."""
    for name in config.held_out:
        if name not in federation.clients:
            raise UserError(f"held_out: {federation.name} has no client {name!r}; {nearest(name, federation.clients)}")
    taking_part = tuple(sorted(name for name in federation.clients if name not in config.held_out))
    if not taking_part:
        raise UserError("held_out: every client is held out, and none is left to train")
    return Plan(
        rounds=config.rounds,
        seed=config.seed,
        clients=taking_part,
        held_out=config.held_out,
        participation=config.participation,
        evaluate_every=config.evaluate_every,
        evaluate_last=config.evaluate_last,
    )


def find_device(name: str) -> torch.device:
    """The device by its name; `auto` takes a GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device={name}: torch sees {torch.cuda.device_count()} CUDA devices; say device=cpu")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError("device=mps: torch sees no Apple GPU; say device=cpu")
    return device


def facts(config: Experiment, parts: Parts, device: torch.device) -> dict[str, Any]:
    """What a run's folder says of the machine and the data, besides versions."""
    clients = parts.federation.clients
    return {
        "threads": config.threads or find_threads(config, parts, device),
        "device": str(device),
        "engine": find_engine(config, device).__name__.lower(),
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "metric": parts.task.metric,
        "plugins": plugins(config),
        "notices": [*parts.federation.notes, *parts.algorithm.notices(parts.model)],
        "parameters": sum(parameter.numel() for parameter in parts.model.parameters()),
        "samples": {name: [len(index.of(s)) for s in ("train", "val", "test")] for name, index in clients.items()},
        "division": parts.federation.division(),
        "data": parts.federation.fingerprint() if isinstance(config.build("source"), Reader) else None,
        "classes": parts.federation.kinds() if parts.federation.task == "classification" else None,
    }


def find_threads(config: Experiment, parts: Parts, device: torch.device) -> int:
    """What `threads = 0` means: on the CPU as many as a step has work for, beside a GPU torch's own number."""
    if device.type != "cpu":
        return torch.get_num_threads()
    largest = max(len(client.train) for client in parts.federation.clients.values())
    sample, _ = parts.federation.batch(torch.arange(1))
    return useful_threads(parts.model, sample, min(config.batch_size, largest))


def plugins(config: Experiment) -> dict[str, str]:
    """Which of the experiment's components come from other packages, and from which versions."""
    named = [(kind, getattr(config, kind)["name"]) for kind in REGISTRIES]
    named += [("transform", table["name"]) for table in config.transforms]
    packages = {kind: COMPONENTS[kind].packages for kind, _ in named}
    return {f"{kind} {name}": packages[kind][name] for kind, name in named if name in packages[kind]}


def play(run: Run, watcher: Watcher | None = None, parts: Parts | None = None, engine: Engine | None = None) -> Run:
    """Play a run's rounds from its last checkpoint, or from the start, to the end, with an engine of this machine
    unless another one is given."""
    watcher = watcher or Watcher()
    if engine is None and run.provenance.get("engine") == "flower":
        raise UserError(f"{run.folder} is a run of a real federation: start its app again with flwr run")
    device = find_device(run.provenance["device"])
    config, threads = run.experiment, torch.get_num_threads()
    with held(run.folder), arithmetic(config.precision), ExitStack() as ending:  # first: who has to wait does no work
        run = find_run(run.folder)  # as it is now: another process may have been at work on it
        if run.done:
            return run
        run.sweep()
        parts = parts or Parts.build(config)
        known, data = run.provenance.get("division"), run.provenance.get("data")
        if known not in (None, parts.federation.division()) or data not in (None, parts.federation.fingerprint()):
            raise UserError(
                f"{run.folder} was started with other data or splits than {parts.federation.name} has now: "
                "put them back, or start anew with --force"
            )
        memory = Memory(run.folder / "memory", room_on(device))
        if engine is None:
            engine = built = build_engine_of(run, parts, memory, device, watcher)
            ending.callback(built.close)
        try:
            torch.set_num_threads(run.provenance["threads"])  # sums depend on it: a resumed run must not differ
            with tracked(watcher, config.trackers) as watching:
                played = _play(run, watching, parts, engine, memory, device)
            if isinstance(engine, Processes) and engine.used:
                played.note_processes(engine.used)
            return played
        finally:
            torch.set_num_threads(threads)


def find_engine(config: Experiment, device: torch.device) -> type[Sequential]:
    """The engine that the experiment asks for; `auto` captures where the device is CUDA."""
    if config.engine == "captured" and device.type != "cuda":
        raise UserError(f"engine=captured needs a CUDA device, not {device}: say engine=sequential")
    if config.processes > 1 and (config.engine != "auto" or device.type != "cpu"):
        raise UserError(
            f"processes={config.processes} is for engine=auto on a CPU, not for engine={config.engine} on {device}"
        )
    captured = config.engine == "captured" or (config.engine == "auto" and device.type == "cuda")
    return Captured if captured else Sequential


def build_engine(
    config: Experiment, parts: Parts, memory: Memory, device: torch.device, watcher: Watcher
) -> Sequential:
    """The engine that the experiment asks for, in this process."""
    kind = find_engine(config, device)
    own: dict[str, Any] = {"lanes": config.lanes, "say": watcher.noticed} if kind is Captured else {}
    return _built(kind, config, parts, memory, device, **own)


def build_engine_of(run: Run, parts: Parts, memory: Memory, device: torch.device, watcher: Watcher) -> Sequential:
    """The engine that plays a run: on a CPU one that may use all of its cores."""
    config = run.experiment
    if config.engine != "auto" or device.type != "cpu":
        return build_engine(config, parts, memory, device, watcher)
    threads = run.provenance["threads"]
    most = config.processes or max(1, torch.get_num_threads() // threads)
    given = {"config": config.model_dump(mode="json"), "division": parts.federation.division()}
    own: dict[str, Any] = {
        "recipe": Recipe(__name__, "engine_of", given),
        "most": min(most, parts.plan.clients_a_round),
        "threads": threads,
        "asked": config.processes > 1,
        "rounds": config.rounds,
        "say": watcher.noticed,
    }
    return _built(Processes, config, parts, memory, device, **own)


def engine_of(config: dict[str, Any], division: str, memory: Memory) -> Sequential:
    """The same experiment's engine in another process."""
    experiment = load(config)
    parts = Parts.build(experiment)
    if parts.federation.division() != division:
        raise UserError("the data have changed since the run was started")
    return _built(Sequential, experiment, parts, memory, torch.device("cpu"))


def _built(
    kind: type[Sequential], config: Experiment, parts: Parts, memory: Memory, device: torch.device, **own: Any
) -> Sequential:
    return kind(
        parts.model,
        parts.federation,
        parts.task,
        parts.algorithm,
        local_settings(config),
        memory,
        config.seed,
        config.weighting,
        parts.augmentation,
        device,
        parts.transforms,
        config.precision,
        **own,
    )


def is_traced(round: int, rounds: int) -> bool:
    """Whether an algorithm's traces are kept after a round: after the first, the last, and evenly in between."""
    return round in (1, rounds) or round % -(-rounds // TRACES) == 0


def _play(run: Run, watcher: Watcher, parts: Parts, engine: Engine, memory: Memory, device: torch.device) -> Run:
    config, plan = run.experiment, parts.plan
    passed_over: list[str] = []

    def pass_over(damaged: Damaged) -> None:
        if run.provenance.get("engine") == "flower":
            raise UserError(f"{damaged}: put it back, or start another run, since sites train no round that is over")
        passed_over.append(f"{damaged}: it is passed over, and what came after the one before it is played again")

    latest = run.latest(pass_over)
    if latest is None:
        server, best = first_state(parts.model, parts.algorithm, len(plan.clients)).to(device), None
    else:
        server, best = latest[0].to(device), latest[1]
    if run.metrics:
        run.note_resumed(server.round)
    run.truncate(server.round)
    memory.forget_after(server.round)
    memory.restarts = run.restarts()
    if run.profile is None and run.provenance.get("engine") != "flower":  # whose data are not here
        run.keep_profile(profile(parts.federation))
    started, peak = time.perf_counter(), Peak(device)
    watcher.run_started(run, server.round)
    for line in (*passed_over, *run.provenance.get("notices", ())):
        watcher.noticed(line)
    unsaved: ServerState | None = None
    training: int | None = None
    evaluated = False
    if latest is None:
        server = collect_shares(server, parts.algorithm, engine, plan, watcher)
    try:
        while server.round < plan.rounds:
            clock = time.perf_counter()
            server, record = play_round(server, parts.algorithm, engine, plan, watcher)
            seconds = time.perf_counter() - clock
            if record.val is not None and (best is None or better(record.val.mean, best)):
                best, unsaved = record.val.mean, server
            evaluated = evaluated or plan.evaluates(server.round)
            training = training if evaluated else peak.read()  # evaluation, in larger batches, may take more
            if is_traced(server.round, plan.rounds):
                run.trace(server.round, parts.algorithm.traces(server))
            run.append(record, seconds)  # last: a round on record has nothing left to write
            if server.round % config.checkpoint_every == 0 or server.round == plan.rounds:
                _checkpoint(run, server, best, unsaved, memory)
                unsaved = None
    except KeyboardInterrupt:
        if server.round == run.rounds and server.round not in run.restarts():
            _checkpoint(run, server, best, unsaved, memory)
        raise
    run.finish(time.perf_counter() - started, peak.read(), training)
    return run


def _checkpoint(run: Run, server: ServerState, best: float | None, better: ServerState | None, memory: Memory) -> None:
    """Write a checkpoint, and before it the state that did best since the last one, if there is such a state. Not as
    soon as it is found: a run that is stopped in between finds it again, and writing it takes as long as a round."""
    memory.sync()
    if better is not None and best is not None:
        run.checkpoint_best(better, best)
    run.checkpoint(server, best, run.experiment.keep_checkpoints)
    memory.restarts = run.restarts()
