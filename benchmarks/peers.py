"""A round of our sequential engine against the same round in Flower's simulation and in pfl, on the CPU.

    python -m benchmarks.peers [--quick]

Every framework trains the same federation: images, network and its first weights, clients, batches of one size, local
steps, SGD, FedAvg; nobody evaluates. Each is a process of its own that plays one round when it is told to, so that
rounds are interleaved, and with one thread a process. Flower has as many processes as there are cores, as is its way;
pfl has one; we have one, or as many as there are cores. What is not installed is left out.

Ray, under Flower, asks for a cloud's metadata when it starts. It is only started where nothing can be reached:

    ip netns add sim; ip -n sim link set lo up; ip netns exec sim .venv/bin/python -m benchmarks.peers
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measure import ratios

if TYPE_CHECKING:
    from fedfa.engines.sequential import Sequential
    from fedfa.memory import Memory

CLIENTS, LR, SIDE = 10, 0.1, 28
STEPS = {"LeNet": (20, 32), "two-convolution CNN": (10, 10)}
"""A client's steps in a round, and the images in each of them."""
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
FAIR = {"OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}
"""One thread a process; and Ray steps back behind everyone else otherwise, which a busy machine makes it pay for."""
HOW = "ip netns add sim; ip -n sim link set lo up; ip netns exec sim .venv/bin/python -m benchmarks.peers"


@cache
def images(net: str) -> tuple[Tensor, Tensor]:
    """Noisy pictures of ten coarse patterns: (clients, samples, 3, side, side) in uint8, and their classes. A fifth of
    the classes is drawn at random, so that the loss has a floor, which everyone reaches who trains."""
    draw = torch.Generator().manual_seed(0)
    steps, batch = STEPS[net]
    patterns = F.interpolate(torch.rand(10, 3, SIDE // 4, SIDE // 4, generator=draw).round() * 128, size=SIDE)
    labels = torch.randint(10, (CLIENTS, steps * batch), generator=draw)
    noisy = patterns[labels] + 40 * torch.randn(*labels.shape, 3, SIDE, SIDE, generator=draw)
    wrong = torch.rand(labels.shape, generator=draw) < 0.2
    labels = torch.where(wrong, torch.randint(10, labels.shape, generator=draw), labels)
    return noisy.clamp(0, 255).to(torch.uint8), labels


@cache
def floats(net: str, client: int) -> tuple[Tensor, Tensor]:
    """A client's samples as the peers get them: scaled once, not batch by batch."""
    x, y = images(net)
    return x[client].float() / 255, y[client]


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "LeNet":
        from fedfa.nets import LeNet

        return LeNet(10)
    side = SIDE // 2 - 2  # pfl-research's network for its CIFAR-10 benchmark
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(64 * side * side, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


class Turns:
    """A worker's side of the bargain: a round begins with a line on stdin, and ends with its training loss."""

    def __init__(self) -> None:
        self.answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # whatever else is printed goes to the log

    def wait(self) -> None:
        if not sys.stdin.readline():
            raise EOFError("nobody waits for another round")

    def done(self, loss: float) -> None:
        print(loss, file=self.answers, flush=True)


def our_engine(net: str, memory: Memory, **own: Any) -> Sequential:
    """Our engine: in this process, or with settings of its own in several."""
    import fedfa
    from fedfa.engines.client import Local
    from fedfa.engines.processes import Processes
    from fedfa.engines.sequential import Sequential
    from fedfa.task import Classification

    x, y = images(net)
    places, none = torch.arange(y.numel()).view(CLIENTS, -1), torch.arange(0)
    clients = {f"{number:02d}": fedfa.ClientIndex(index, none, none) for number, index in enumerate(places)}
    classes = tuple("0123456789")
    data = fedfa.Federation("patterns", "classification", x.flatten(0, 1), y.flatten(), classes, clients)
    local, rule = Local(batch_size=STEPS[net][1], lr=LR), fedfa.ALGORITHMS["fedavg"]()
    kind = Processes if own else Sequential
    return kind(network(net), data, Classification(), rule, local, memory, 0, **own)


def ours(net: str, rounds: int, turns: Turns, **own: Any) -> None:
    from fedfa.memory import Memory
    from fedfa.server import Plan, Watcher, first_state, play_round

    engine = our_engine(net, Memory(Path(tempfile.mkdtemp())), **own)
    plan = Plan(rounds, 0, tuple(engine.federation.clients), evaluate_every=rounds + 1)
    state = first_state(network(net), engine.algorithm, CLIENTS)
    for _ in range(rounds):
        turns.wait()
        state, record = play_round(state, engine.algorithm, engine, plan, Watcher())
        assert record.loss is not None
        turns.done(record.loss)
    engine.close()


def ours_in_processes(net: str, rounds: int, turns: Turns) -> None:
    from fedfa.engines.crew import Recipe

    recipe = Recipe("benchmarks.peers", "our_engine", {"net": net})
    ours(net, rounds, turns, recipe=recipe, most=os.cpu_count() or 1, asked=True)


def pfl(net: str, rounds: int, turns: Turns) -> None:
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    losses: list[Tensor] = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network(net)

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(self.net(x), y)
            losses.append(loss.detach().clone())  # pfl divides the loss in place
            return loss

        def metrics(self, x: Tensor, y: Tensor) -> dict[str, object]:  # for evaluation, of which round 0 has one
            with torch.no_grad():
                return {"loss": Weighted(F.cross_entropy(self.net(x), y, reduction="sum").item(), len(x))}

    class OneAtATime(TrainingProcessCallback):  # type: ignore[misc]  # pfl has no types here
        def on_train_begin(self, *, model: object) -> Metrics:
            turns.wait()
            return Metrics()

        def after_central_iteration(self, metrics: object, model: object, *, central_iteration: int) -> object:
            turns.done(float(torch.stack(losses).mean()))
            losses.clear()
            if central_iteration + 1 < rounds:
                turns.wait()
            return False, Metrics()

    model = Model()
    users = FederatedDataset(
        lambda user: PyTorchTensorDataset(floats(net, user), user_id=str(user)),
        get_user_sampler("minimize_reuse", list(range(CLIENTS))),
    )
    FederatedAveraging().run(
        NNAlgorithmParams(rounds, evaluation_frequency=rounds + 1, train_cohort_size=CLIENTS, val_cohort_size=0),
        SimulatedBackend(training_data=users, val_data=users),
        PyTorchModel(model, torch.optim.SGD, torch.optim.SGD(model.parameters(), 1.0)),
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=LR, local_batch_size=STEPS[net][1]),
        NNEvalHyperParams(local_batch_size=STEPS[net][1]),
        callbacks=[OneAtATime()],
        send_metrics_to_platform=False,
    )


def flower(net: str, rounds: int, turns: Turns) -> None:
    alone_or_refuse()
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client, server = ClientApp(), ServerApp()

    @client.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        (steps, batch), model = STEPS[net], network(net)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), LR)
        x, y = floats(net, int(context.node_config["partition-id"]))
        total = torch.zeros(())
        for index in torch.randperm(len(x)).split(batch):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[index]), y[index])
            loss.backward()
            optimizer.step()
            total += loss.detach()
        metrics = MetricRecord({"loss": float(total) / steps, "num-examples": len(x)})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        return Message(content=content, reply_to=message)

    class OneAtATime(FedAvg):  # type: ignore[misc]  # nor has Flower
        def configure_train(self, *given: object) -> object:
            turns.wait()
            return super().configure_train(*given)

        def aggregate_train(self, *given: object) -> object:
            arrays, metrics = super().aggregate_train(*given)
            turns.done(metrics["loss"])
            return arrays, metrics

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = OneAtATime(fraction_evaluate=0.0, min_available_nodes=CLIENTS)
        strategy.start(grid, ArrayRecord(network(net).state_dict()), num_rounds=rounds)

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, num_supernodes=CLIENTS, backend_config=resources)


PLAYERS: dict[str, tuple[Callable[[str, int, Turns], None], tuple[str, ...]]] = {
    "fedfa": (ours, ("fedfa",)),
    "fedfa-processes": (ours_in_processes, ("fedfa",)),
    "pfl": (pfl, ("pfl",)),
    "flower": (flower, ("flwr", "ray")),
}
"""How each of them plays, and what must be installed for it."""


def work(name: str, net: str, rounds: int) -> None:
    """What a worker does."""
    torch.set_num_threads(1)
    PLAYERS[name][0](net, rounds, Turns())


def alone_or_refuse() -> None:
    """Ray must not find a network."""
    if any(name != "lo" for _, name in socket.if_nameindex()):
        raise SystemExit(f"Ray looks for a cloud's metadata when it starts; give it no network: {HOW}")


def cpu_seconds(root: int) -> float:
    """What a process and all below it have used of the CPU: on a busy machine a truer figure than the clock's."""
    used, parent = {}, {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            fields = file.read_text().rpartition(")")[2].split()
            parent[int(file.parent.name)], used[int(file.parent.name)] = int(fields[1]), sum(map(int, fields[11:15]))
    family = {root}
    while more := {child for child, of in parent.items() if of in family} - family:
        family |= more
    return sum(used.get(member, 0) for member in family) / os.sysconf("SC_CLK_TCK")


class Worker:
    """One framework in a process of its own, told when to play a round."""

    def __init__(self, name: str, net: str, rounds: int) -> None:
        self.name, self.log = name, tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with the process
        self.losses: list[float] = []
        self.cpu: list[float] = []
        code = f"from benchmarks import peers; peers.work({name!r}, {net!r}, {rounds})"
        root = str(Path(__file__).parents[1])
        env = os.environ | QUIET | FAIR | {"PYTHONPATH": root}  # Ray's processes need the path too
        begin = time.perf_counter()
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", code]
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self.log, text=True, env=env, cwd=root)
        self.round()
        self.start = time.perf_counter() - begin
        """Seconds from nothing to the end of the first round."""

    def round(self) -> None:
        assert self.process.stdin and self.process.stdout
        before = cpu_seconds(self.process.pid)
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            self.log.seek(0)
            raise SystemExit(f"{self.name} ended early:\n{self.log.read()[-3000:]}")
        self.losses.append(float(answer))
        self.cpu.append(cpu_seconds(self.process.pid) - before)


def present() -> list[str]:
    """The frameworks that can be measured here; a line for each that cannot."""
    found = []
    for name, (_, packages) in PLAYERS.items():
        missing = [package for package in packages if importlib.util.find_spec(package) is None]
        if missing:
            print(f"{name} is left out: {' and '.join(missing)} not installed")
            continue
        try:
            if name == "flower":
                alone_or_refuse()
            found.append(name)
        except SystemExit as reason:
            print(f"{name} is left out: {reason}")
    return found


def compare(names: list[str], net: str, repeats: int, starts: int, warmup: int = 3) -> None:
    steps, batch = STEPS[net]
    print(f"{net}: {CLIENTS} clients, {steps} steps of {batch} images of {SIDE} px", flush=True)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    workers: dict[str, Worker] = {}
    for number in range(starts):
        rounds = 1 + warmup + repeats if number == starts - 1 else 1
        for name in names:
            workers[name] = Worker(name, net, rounds)
            seconds[name].append(workers[name].start)
            if rounds == 1:
                workers[name].process.wait()
    found = ratios("fedfa", {name: worker.round for name, worker in workers.items()}, repeats, warmup)
    print("  seconds a round over fedfa's: " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in found.items()))
    base = statistics.median(workers["fedfa"].cpu[-repeats:])
    used = {name: statistics.median(worker.cpu[-repeats:]) / base for name, worker in workers.items()}
    print("  CPU seconds a round over fedfa's: " + ", ".join(f"{name} {used[name]:.2f}" for name in found))
    text = ", ".join(f"{name} {statistics.median(times):.1f}" for name, times in seconds.items())
    print(f"  seconds from nothing to the end of the first round: {text}")
    text = ", ".join(f"{name} {worker.losses[0]:.3f} → {worker.losses[-1]:.3f}" for name, worker in workers.items())
    print(f"  training loss in the first and in the last round: {text}", flush=True)
    first, last = workers["fedfa"].losses[0], workers["fedfa"].losses[-1]
    for name, worker in workers.items():
        worker.process.wait()
        if worker.losses[-1] > 0.8 * worker.losses[0] or abs(worker.losses[-1] - last) > 0.1 * (first - last):
            raise SystemExit(f"{name} does not train as fedfa does")


def main(quick: bool = False) -> None:
    names = present()
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, one thread a process")
    for net in STEPS:
        compare(names, net, repeats=5 if quick else 15, starts=1 if quick else 3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Our sequential engine against Flower and pfl, as ratios in one run.")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    main(parser.parse_args().quick)
