"""A whole run: resuming to the same bits, sampling, weighting, held-out clients, and clients that misbehave."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import fedfa
from fedfa import Run, UserError
from fedfa.nets import LeNet
from fedfa.runs import Run as RunFolder
from fedfa.server import Plan, Record, Watcher, sample_clients
from fedfa.simulate import Parts, find_device
from fedfa.streams import generator

Play = Callable[..., Run]
Same = Callable[[Run, Run], None]


# Stopped at any moment, and resumed


class Crash(Exception):
    """The process dies: nothing is caught, nothing is tidied up."""


class Stop(Watcher):
    """Stops the run at a moment of a round."""

    def __init__(self, moment: str, round: int, error: type[BaseException]) -> None:
        self.moment, self.round, self.error = moment, round, error
        self.current = 0

    def round_started(self, round: int, clients: Sequence[str]) -> None:
        self.current = round
        self.perhaps("round_started")

    def client_done(self, client: str, loss: Any, refused: str | None) -> None:
        if client != "north":  # in the middle, where there is one
            self.perhaps("client_done")

    def round_done(self, record: Record) -> None:
        self.perhaps("round_done")

    def perhaps(self, moment: str) -> None:
        if (moment, self.current) == (self.moment, self.round):
            raise self.error


KINDS: dict[str, dict[str, Any]] = {
    "plain": {"weighting": "samples", "lr_decay": 0.9, "epochs": 2},
    "kept momentum": {"momentum": 0.9, "optimizer_state": "kept", "lr_decay": 0.9},
    "kept adam, half the clients": {"optimizer": "adam", "lr": 0.01, "optimizer_state": "kept", "participation": 0.5},
    "fedfa": {"algorithm": "fedfa", "algorithm.p": 0.9, "augmentation": "dsu"},
    "fedfa, kept statistics": {"algorithm": "fedfa", "algorithm.statistics": "kept", "participation": 0.5},
    "private entries and shares": {"algorithm": "hoard", "participation": 0.5},
    "fedfa, everything kept": {
        "algorithm": "fedfa-total", "optimizer": "adamw", "optimizer_state": "kept", "evaluate_every": 2,
    },
}  # fmt: skip
MOMENTS: list[tuple[str, int, type[BaseException]]] = [
    ("round_started", 1, KeyboardInterrupt),
    ("client_done", 1, Crash),
    ("round_done", 1, KeyboardInterrupt),
    ("client_done", 2, Crash),
    ("round_done", 2, KeyboardInterrupt),
    ("round_started", 3, Crash),
    ("client_done", 4, KeyboardInterrupt),
    ("client_done", 4, Crash),  # two rounds back to the checkpoint
    ("round_done", 5, Crash),
]
BASE = {"rounds": 5, "checkpoint_every": 2, "keep_checkpoints": 2}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_stopped_at_any_moment_resumes_to_the_same_bits(play: Play, assert_same: Same, kind: str) -> None:
    settings = {**BASE, **KINDS[kind]}
    straight = play("straight", **settings)
    for number, (moment, round, error) in enumerate(MOMENTS):
        with pytest.raises(error):
            play(f"stopped{number}", watcher=Stop(moment, round, error), **settings)
        (folder,) = (straight.folder.parent.parent / f"stopped{number}").iterdir()
        assert not Run(folder).done and Run(folder).rounds == round - 1
        assert_same(fedfa.resume(folder), straight)


def test_a_run_stopped_again_and_again_resumes_to_the_same_bits(play: Play, assert_same: Same) -> None:
    settings = {**BASE, **KINDS["fedfa, everything kept"], "checkpoint_every": 3}
    straight = play("straight", **settings)
    for moment, round, error in (
        ("client_done", 2, Crash),  # no checkpoint yet: from the start
        ("client_done", 2, KeyboardInterrupt),  # which writes one after round 1
        ("round_done", 4, Crash),
        ("client_done", 5, KeyboardInterrupt),
    ):
        with pytest.raises(error):
            play(watcher=Stop(moment, round, error), **settings)
    run = play(**settings)
    assert_same(run, straight)
    assert [note["round"] for note in run.provenance["resumed"]] == [0, 1, 3, 4]


class Count:
    """Counts the files a run puts in place, and stops it before or after one of them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count, self.stop, self.error = 0, -1, Crash
        self.after = False
        self.rename = os.replace
        patch.setattr("fedfa.files.os.replace", self)

    def __call__(self, source: Path, target: Path) -> None:
        self.count += 1
        stop = self.count == self.stop
        if stop and not self.after:
            raise self.error
        self.rename(source, target)
        if stop:
            raise self.error


@pytest.mark.parametrize("error", [KeyboardInterrupt, Crash])
def test_a_run_stopped_at_any_file_it_writes_resumes_to_the_same_bits(
    play: Play, assert_same: Same, monkeypatch: pytest.MonkeyPatch, error: Any
) -> None:
    settings = {"rounds": 3, "checkpoint_every": 2, "momentum": 0.9, "optimizer_state": "kept"}
    files = Count(monkeypatch)
    straight = play("straight", **settings)
    total, files.error = files.count, error
    assert total >= 15  # provenance, config, metrics, 9 of clients, a best, 2 checkpoints, done
    for number in range(1, total + 1):
        files.count, files.stop, files.after = 0, number, number % 2 == 0
        with pytest.raises(error):
            play(f"stopped{number}", **settings)
        files.stop = -1
        assert_same(play(f"stopped{number}", **settings), straight)


@pytest.mark.parametrize("written", [False, True])
def test_a_run_stopped_between_a_round_s_record_and_its_checkpoint(
    play: Play, assert_same: Same, monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    """The best model of a round on record is not lost; that of a round that is not comes again."""
    straight = play("straight", rounds=4)
    append = RunFolder.append

    def interrupted(self: Run, record: Record, seconds: float) -> None:
        if record.round != 2:
            append(self, record, seconds)
            return
        if written:
            append(self, record, seconds)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "append", interrupted)
        patch.setattr("fedfa.server.evaluate", rising)
        with pytest.raises(KeyboardInterrupt):
            play(rounds=4)
    (folder,) = (straight.folder.parent.parent / "runs").iterdir()
    assert Run(folder).rounds == (2 if written else 1)
    best = Run(folder).best()
    assert (best is not None and best.round == 2) if written else best is None
    monkeypatch.setattr("fedfa.server.evaluate", rising)
    resumed = fedfa.resume(folder)
    assert_same_losses(resumed, straight)
    best = resumed.best()
    assert best is not None and best.round == 4


def rising(server: Any, *_: Any) -> dict[str, Any]:
    """Every round is better than the one before."""
    from fedfa.server import Evaluation

    return {"val": Evaluation({}, server.round / 100), "test": Evaluation({}, 0.5)}


def assert_same_losses(one: Run, other: Run) -> None:
    assert [line["loss"] for line in one.metrics] == [line["loss"] for line in other.metrics]


def test_a_metrics_file_cut_off_by_the_crash(play: Play, assert_same: Same) -> None:
    straight = play("straight", **BASE)
    with pytest.raises(Crash):
        play(watcher=Stop("round_done", 4, Crash), **BASE)
    (folder,) = (straight.folder.parent.parent / "runs").iterdir()
    path = folder / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    assert Run(folder).rounds == 2
    assert_same(fedfa.resume(folder), straight)


KILLED = """
import sys, time
sys.path.insert(0, sys.argv[1])
import conftest, fedfa, json
from fedfa.server import Watcher
class Slow(Watcher):
    def client_done(self, *_): time.sleep(0.1)
fedfa.run(conftest.TINY, root=sys.argv[2], watcher=Slow(), **json.loads(sys.argv[3]))
"""


def test_a_killed_process_resumes_to_the_same_bits(
    play: Play, assert_same: Same, spawn: Any, wait_for: Any, tmp_path: Path
) -> None:
    settings = {**BASE, **KINDS["fedfa, everything kept"], "rounds": 6}
    straight = play("straight", **settings)
    words = [str(Path(__file__).parent), str(tmp_path / "runs"), json.dumps(settings)]
    process = spawn([sys.executable, "-c", KILLED, *words])
    path = tmp_path / "runs" / straight.folder.name / "metrics.jsonl"
    wait_for(lambda: process.poll() is not None or (path.exists() and path.read_text().count("\n") >= 3))
    process.kill()
    assert process.wait() == -9, process.communicate()
    assert 3 <= Run(path.parent).rounds < 6
    halves = [path.parent / place / f".x.safetensors.{process.pid}.part" for place in ("checkpoints", "memory/north")]
    for half in halves:  # as if it had been writing these
        half.write_text("half a")
    assert_same(fedfa.resume(path.parent), straight)
    assert not any(half.exists() for half in halves)


# The same seed, and another


def losses(run: Run) -> list[float]:
    return [line["loss"] for line in run.metrics]


def test_a_seed_decides_everything(play: Play, assert_same: Same) -> None:
    settings = {"algorithm": "fedfa", "participation": 0.5}
    one = play("one", **settings)
    torch.manual_seed(1234)  # the process's own generator does not matter
    torch.rand(10)
    assert_same(play("two", **settings), one)
    other = play("one", **settings, seed=1)
    assert losses(other) != losses(one)


def test_a_run_leaves_torch_s_generator_alone(play: Play) -> None:
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    play(algorithm="fedfa")
    assert torch.equal(torch.rand(3), wanted)


@pytest.mark.parametrize("algorithm", ["fedavg", "fedfa", "private"])
def test_clients_do_not_depend_on_each_other(play: Play, algorithm: str) -> None:
    """A client's first round is the same whoever else takes part: streams are its own."""
    told: dict[str, list[float]] = {}

    class Listen(Watcher):
        def __init__(self, key: str) -> None:
            self.key = key

        def client_done(self, client: str, loss: Any, refused: str | None) -> None:
            if client == "west":
                told.setdefault(self.key, []).append(float(loss))

    play("all", rounds=1, watcher=Listen("all"), algorithm=algorithm)
    play("alone", rounds=1, watcher=Listen("alone"), algorithm=algorithm, held_out=["north", "south"])
    assert told["all"] == told["alone"]


# Numbers by hand


def model_of(run: Run) -> dict[str, torch.Tensor]:
    latest = run.latest()
    assert latest is not None
    return dict(latest[0].model)


@pytest.mark.parametrize(("weighting", "wanted"), [("uniform", 31 / 3), ("samples", (14**2 + 10**2 + 7**2) / 31)])
def test_weighting_by_hand(play: Play, weighting: str, wanted: float) -> None:
    """Clients' models are the numbers of their samples: 14, 10 and 7."""
    model = model_of(play(algorithm="constant", weighting=weighting, rounds=1))
    floats = [tensor for tensor in model.values() if tensor.is_floating_point()]
    assert len(floats) == 8
    assert all(torch.equal(tensor, torch.full_like(tensor, wanted)) for tensor in floats)
    assert model["stage.1.num_batches_tracked"].item() == math.floor(wanted)


def test_learning_rate_decays_by_round(play: Play) -> None:
    for rounds, wanted in ((1, 0.08), (2, 0.04), (4, 0.01)):
        model = model_of(play(algorithm="constant", **{"algorithm.of": "rate"}, lr=0.08, lr_decay=0.5, rounds=rounds))
        assert model["head.3.bias"][0].item() == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, (4, 3, 2)),  # 4+4+4+2, 4+4+2, 4+3
        ({"epochs": 3}, (12, 9, 6)),
        ({"drop_last": True}, (3, 2, 1)),
        ({"drop_last": True, "epochs": 2}, (6, 4, 2)),
        ({"batch_size": 3}, (5, 3, 2)),  # the last of 10 and of 7 would be one sample
        ({"batch_size": 13}, (1, 1, 1)),  # 13 of 14: one is left over; the others are smaller than a batch
        ({"batch_size": 100, "drop_last": True}, (1, 1, 1)),
        ({"batch_size": 1}, (14, 10, 7)),
    ],
)
def test_steps_by_hand(play: Play, settings: dict[str, Any], steps: tuple[int, ...]) -> None:
    settings = {"algorithm": "constant", "algorithm.of": "steps", "rounds": 1, **settings}
    run = play(**settings)
    assert run.metrics[0]["refused"] == {}
    assert model_of(run)["head.3.bias"][0].item() == pytest.approx(sum(steps) / 3, rel=1e-6)


def test_a_round_of_fedavg_by_hand(play: Play) -> None:
    """One step on the whole of each client's data, weighed by samples: w − lr·Σ nᵢ·gᵢ/Σ nᵢ."""
    settings = {"network": "lenet", "batch_size": 64, "weighting": "samples", "lr": 0.5, "rounds": 1}
    config = fedfa.load(fedfa.load({"source": "tiny", "network": "lenet"}), settings)
    parts = Parts.build(config)
    start = {name: tensor.clone() for name, tensor in parts.model.state_dict().items()}
    model = LeNet(3)
    wanted = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in start.items()}
    means = []
    for index in parts.federation.clients.values():
        model.load_state_dict(start)
        x, y = parts.federation.images[index.train] / 255, parts.federation.labels[index.train]
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        means.append(loss.item())
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            wanted[name] += (start[name] - 0.5 * parameter.grad).double() * len(index.train) / 31
    run = play(**settings)
    found = model_of(run)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name].double(), tensor, rtol=0, atol=1e-6)
    assert run.metrics[0]["loss"] == pytest.approx(sum(means) / 3, abs=1e-6)  # over clients, each the same


def test_evaluation_by_hand(play: Play) -> None:
    run = play(rounds=2, network="lenet", lr=0.5)
    config = run.experiment
    parts = Parts.build(config)
    parts.model.load_state_dict(model_of(run))
    model = parts.model.eval()
    for split in ("val", "test"):
        for name, index in parts.federation.clients.items():
            x, y = parts.federation.batch(index.of(split))
            with torch.no_grad():
                output = model(x)
            found = run.metrics[-1][split]
            assert found["clients"][name] == (output.argmax(1) == y).sum().item() / len(y)
            assert found["losses"][name] == pytest.approx(F.cross_entropy(output, y).item(), abs=1e-5)


def test_training_learns(play: Play) -> None:
    run = play(rounds=25, network="lenet", optimizer="adam", lr=0.003)
    assert run.metrics[-1]["loss"] < 0.5 * run.metrics[0]["loss"]
    assert run.metrics[-1]["test"]["mean"] > 0.9


def test_momentum_that_is_kept_is_not_momentum_that_is_fresh(play: Play) -> None:
    fresh, kept = play(momentum=0.9), play(momentum=0.9, optimizer_state="kept")
    assert losses(fresh)[0] == losses(kept)[0]  # the first round starts from nothing either way
    assert losses(fresh)[1:] != losses(kept)[1:]


# Who takes part


def test_participation_by_hand() -> None:
    plan = Plan(rounds=9, seed=0, clients=tuple("abcdefghij"), participation=0.3)
    draws = [sample_clients(plan, round) for round in range(1, 60)]
    assert all(len(set(drawn)) == 3 and drawn == sorted(drawn) for drawn in draws)
    assert draws == [sample_clients(plan, round) for round in range(1, 60)]
    assert len({tuple(drawn) for drawn in draws}) > 30
    assert {name for drawn in draws for name in drawn} == set("abcdefghij")
    other = Plan(rounds=9, seed=1, clients=tuple("abcdefghij"), participation=0.3)
    assert draws != [sample_clients(other, round) for round in range(1, 60)]


@pytest.mark.parametrize(("share", "count"), [(1.0, 10), (0.95, 10), (0.94, 9), (0.25, 3), (0.24, 2), (1e-9, 1)])
def test_the_share_is_rounded_and_at_least_one(share: float, count: int) -> None:
    plan = Plan(rounds=1, seed=0, clients=tuple("abcdefghij"), participation=share)
    assert len(sample_clients(plan, 1)) == count


def test_every_client_is_drawn_equally_often() -> None:
    plan = Plan(rounds=1, seed=0, clients=tuple("abcde"), participation=0.4)
    drawn = [name for round in range(2000) for name in sample_clients(plan, round)]
    # 2000 rounds of 2 of 5: 800 times each, with a standard deviation of √(2000·0.4·0.6) ≈ 22
    assert all(abs(drawn.count(name) - 800) < 110 for name in "abcde")


def test_only_the_round_s_clients_train(play: Play) -> None:
    run = play(participation=0.5, rounds=8)
    chosen = [tuple(line["clients"]) for line in run.metrics]
    assert all(len(clients) == 2 for clients in chosen) and len(set(chosen)) > 1
    assert all(len(line["test"]["clients"]) == 3 for line in run.metrics)  # all are evaluated


# Clients held out


def test_a_held_out_client_never_trains_and_is_evaluated(play: Play) -> None:
    told: list[str] = []

    class Listen(Watcher):
        def client_done(self, client: str, loss: Any, refused: str | None) -> None:
            told.append(client)

    run = play(held_out="south", rounds=4, participation=0.6, watcher=Listen())
    assert "south" not in told
    for line in run.metrics:
        assert line["clients"] and "south" not in line["clients"]
        for split in ("val", "test"):
            found = line[split]
            assert found["clients"].keys() == {"north", "south", "west"}
            assert found["mean"] == pytest.approx((found["clients"]["north"] + found["clients"]["west"]) / 2, abs=1e-12)
            assert found["unseen"] == found["clients"]["south"]
            assert found["gap"] == found["mean"] - found["unseen"]


def test_a_held_out_client_s_data_do_not_matter(play: Play) -> None:
    """Its training data could be anything: the model is the same."""
    one = play("one", held_out="west", rounds=2)
    other = play("other", held_out="west", rounds=2, **{"source.train": [14, 10, 3]})
    assert losses(one) == losses(other)


def test_clients_held_out_twice_count_once(tiny: dict[str, Any]) -> None:
    plan = Parts.build(fedfa.load(tiny, {"held_out": ["west", "south", "west"]})).plan
    assert plan.held_out == ("south", "west") and plan.clients == ("north",)


def test_clients_that_cannot_be_held_out(play: Play) -> None:
    with pytest.raises(UserError, match=r"^held_out: tiny has no client 'nort'; did you mean 'north'\?$"):
        play(held_out=["nort"])
    with pytest.raises(UserError, match=r"^held_out: every client is held out, and none is left to train$"):
        play(held_out=["north", "south", "west"])


# Clients that misbehave


def test_a_client_whose_model_is_not_finite_is_left_out(play: Play) -> None:
    told: dict[str, tuple[bool, str | None]] = {}

    class Listen(Watcher):
        def client_done(self, client: str, loss: Any, refused: str | None) -> None:
            told[client] = (loss is not None, refused)

    run = play(algorithm="poison", watcher=Listen())
    reason = "stage.0.weight is not finite"
    assert told == {"north": (True, None), "south": (False, reason), "west": (True, None)}
    for line in run.metrics:
        assert line["refused"] == {"south": reason}
        assert line["clients"] == ["north", "south", "west"] and math.isfinite(line["loss"])
    assert all(tensor.isfinite().all() for tensor in model_of(run).values())


def test_a_client_left_out_is_as_if_it_had_not_been_drawn(play: Play) -> None:
    with_it = play("one", algorithm="poison", weighting="samples")
    without = play("two", algorithm="fedavg", weighting="samples", held_out="south")
    assert losses(with_it) == losses(without)
    assert all(torch.equal(tensor, model_of(without)[name]) for name, tensor in model_of(with_it).items())


def test_a_client_left_out_does_not_remember_the_round(play: Play) -> None:
    run = play(algorithm="poison", momentum=0.9, optimizer_state="kept")
    assert {path.name for path in (run.folder / "memory").iterdir()} == {"north", "west"}


def test_a_round_without_a_single_update_changes_nothing(play: Play) -> None:
    run = play(algorithm="poison", **{"algorithm.client": "all"}, rounds=2)
    assert run.done
    for line in run.metrics:
        assert line["loss"] is None and set(line["refused"]) == {"north", "south", "west"} and line["bytes_up"] == 0
    start = Parts.build(run.experiment).model.state_dict()
    assert all(torch.equal(tensor, start[name]) for name, tensor in model_of(run).items())


def test_a_learning_rate_that_is_too_large_harms_no_one_else(play: Play) -> None:
    run = play(lr=1e30, rounds=2, network="lenet")
    assert sum(len(line["refused"]) for line in run.metrics) >= 1
    assert all(tensor.isfinite().all() for tensor in model_of(run).values())


def test_clients_with_too_few_samples(play: Play) -> None:
    run = play(rounds=2, **{"source.train": [8, 1, 0]})
    for line in run.metrics:
        assert line["refused"] == {
            "south": "has no batch to train on (1 training samples)",
            "west": "has no batch to train on (0 training samples)",
        }
        assert line["test"]["clients"].keys() == {"north", "south", "west"}


def test_a_client_without_samples_sends_nothing_whatever_the_batch_size(play: Play) -> None:
    run = play(rounds=1, batch_size=1, **{"source.train": [8, 1, 0]})
    assert run.metrics[0]["refused"] == {"west": "has no batch to train on (0 training samples)"}


def test_a_client_without_test_samples_is_not_scored(play: Play) -> None:
    run = play(rounds=1, **{"source.test": 0})
    assert "test" not in run.metrics[0] and "val" in run.metrics[0]


# What cannot be built


class Crooked(nn.Module):
    def __init__(self, num_classes: int, in_channels: int, augment: Any = None, kind: str = "shape") -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "error":
            raise RuntimeError("two\nlines")
        return x


def test_a_network_that_does_not_fit_the_federation(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedfa.NETWORKS, "_targets", {**fedfa.NETWORKS._targets, "crooked": Crooked})
    with pytest.raises(UserError, match=r"^network 'crooked' puts out \(2, 3, 12, 12\), which is not for class"):
        play(network="crooked")
    with pytest.raises(UserError, match=r"^network 'crooked' does not take tiny: two"):
        play(network="crooked", **{"network.kind": "error"})
    with pytest.raises(UserError, match=r"^network 'unet' does not take tiny: UNet takes images whose sides are"):
        play(network="unet")


def test_the_first_model_depends_on_the_seed_alone(tiny: dict[str, Any]) -> None:
    def first(**overrides: Any) -> dict[str, torch.Tensor]:
        return Parts.build(fedfa.load(tiny, overrides)).model.state_dict()

    plain, augmented, other = first(), first(algorithm="fedfa", lr=3, augmentation="dsu"), first(seed=1)
    assert all(torch.equal(tensor, augmented[name]) for name, tensor in plain.items())
    assert not torch.equal(plain["head.3.weight"], other["head.3.weight"])


# What an algorithm keeps on the clients


def test_shares_come_once_from_every_client_that_takes_part(play: Play) -> None:
    run = play(algorithm="hoard", rounds=1, held_out="south")
    latest = run.latest()
    assert latest is not None
    shared = [torch.rand(2, generator=generator(0, 0, name, "share")) for name in ("north", "west")]
    assert torch.equal(latest[0].memory["all"], torch.stack(shared))
    mean = sum(shared) / 2  # of the shares; a client's own is then half of it and that mean
    torch.testing.assert_close(latest[0].memory["mean"], (mean / 2 + mean) / 3)


def test_private_entries_stay_on_the_client_which_is_evaluated_with_its_own(play: Play) -> None:
    run = play(algorithm="hoard", rounds=2, lr=0.5)
    model = model_of(run)
    assert model.keys() == {"stage.0.weight", "stage.0.bias", "head.3.weight", "head.3.bias"}
    parts = Parts.build(run.experiment)
    latest = run.latest()
    assert latest is not None
    seen = set()
    for name, index in parts.federation.clients.items():
        kept = load_file(run.folder / "memory" / name / "2.safetensors")
        seen.add(tuple(kept["stage.1.running_mean"].tolist()))
        own = {key: value for key, value in kept.items() if key.startswith("stage.1.")}
        parts.model.load_state_dict({**model, **own})
        x, y = parts.federation.batch(index.test)
        with torch.no_grad():
            output = parts.model.eval()(parts.algorithm.inputs(x, latest[0].memory))
        assert run.metrics[-1]["test"]["losses"][name] == pytest.approx(F.cross_entropy(output, y).item(), abs=1e-5)
    assert len(seen) == 3


def test_a_client_that_never_trained_is_evaluated_with_the_entries_the_model_began_with(play: Play) -> None:
    """Not with those of the client before it."""
    run = play(algorithm="private", rounds=2, lr=0.5, held_out="west")
    parts = Parts.build(run.experiment)
    parts.model.load_state_dict({**parts.model.state_dict(), **model_of(run)})
    x, y = parts.federation.batch(parts.federation.clients["west"].test)
    with torch.no_grad():
        wanted = F.cross_entropy(parts.model.eval()(x), y).item()
    assert run.metrics[-1]["test"]["losses"]["west"] == pytest.approx(wanted, abs=1e-5)


# Devices and threads


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert find_device("auto") == torch.device("cpu")
    for name in ("cuda", "cuda:3"):
        with pytest.raises(UserError, match=f"^device={name}: torch sees 0 CUDA devices; say device=cpu$"):
            find_device(name)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert find_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(UserError, match="torch sees 2 CUDA devices"):
        find_device("cuda:2")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"^device=mps: torch sees no Apple GPU; say device=cpu$"):
        find_device("mps")


def test_a_resumed_run_uses_as_many_threads_as_it_began_with(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(2)
    monkeypatch.setattr("fedfa.threads.GRAIN", 1)
    with pytest.raises(KeyboardInterrupt):
        play(threads=0, watcher=Stop("round_done", 2, KeyboardInterrupt))
    torch.set_num_threads(1)
    used: set[int] = set()

    class Count(Watcher):
        def round_done(self, record: Record) -> None:
            used.add(torch.get_num_threads())

    run = play(threads=0, watcher=Count())
    assert run.provenance["threads"] == 2 and used == {2}
    assert torch.get_num_threads() == 1, "and the process gets its own number back"


def test_a_run_goes_on_where_it_began_whatever_auto_means_now(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        play(device="auto", watcher=Stop("round_done", 2, KeyboardInterrupt))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert play(device="auto").provenance["device"] == "cpu"
