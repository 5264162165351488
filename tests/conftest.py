"""A federation that trains in milliseconds, and algorithms whose results can be computed by hand.

Subprocesses import this file too (see `command`), so that ``source=tiny`` is known there as well.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor, nn

import fedfa
from fedfa import Algorithm, ClientIndex, Federation, Run
from fedfa.algorithms.base import Share
from fedfa.engines.client import Client
from fedfa.nets.stages import Augment, augment_layers
from fedfa.reduction import Reduced, Report
from fedfa.state import ServerState, entries
from fedfa.streams import generator

TESTS = Path(__file__).parent


@dataclass(frozen=True)
class Tiny:
    """Clients with striped 12-pixel images of three classes, each client with a tint of its own."""

    names: Sequence[str] = ("north", "south", "west")
    train: Sequence[int] = (14, 10, 7)
    val: int = 6
    test: int = 8

    def build(self, seed: int) -> Federation:
        draw = generator(seed, "tiny")
        images, labels, clients, first = [], [], {}, 0
        for number, (name, train) in enumerate(zip(self.names, self.train, strict=True)):
            count = train + self.val + self.test
            kinds = torch.arange(count) % 3
            x = 60 * torch.rand(count, 3, 12, 12, generator=draw) + 20 * number
            for sample, kind in enumerate(kinds.tolist()):
                x[sample, :, kind :: kind + 2] += 80
            images.append(x.to(torch.uint8))
            labels.append(kinds)
            clients[name] = ClientIndex(*(first + torch.arange(count)).split([train, self.val, self.test]))
            first += count
        return Federation("tiny", "classification", torch.cat(images), torch.cat(labels), ("a", "b", "c"), clients)


class TinyNet(nn.Module):
    """One stage with everything that makes resuming hard: BatchNorm's counters, Dropout, an augmenting layer."""

    def __init__(
        self, num_classes: int, in_channels: int, augment: Augment | None = None, dropout: float = 0.2
    ) -> None:
        super().__init__()
        self.stage = nn.Sequential(nn.Conv2d(in_channels, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Dropout(dropout), nn.Linear(64, num_classes)
        )
        self.augments = nn.ModuleList(augment_layers([4], augment))

    def forward(self, x: Tensor) -> Tensor:
        x = self.augments[0](self.stage(x))
        return self.head(x)


@dataclass(frozen=True)
class Slow(Algorithm):
    """FedAvg whose clients take their time, so that a test can stop it in the middle."""

    pause: float = 0.0

    def begin(self, client: Client) -> None:
        time.sleep(self.pause)


@dataclass(frozen=True)
class Poison(Algorithm):
    """FedAvg, but one client (or every one) sends a model with a NaN in it."""

    client: str = "south"

    def end(self, client: Client) -> None:
        if self.client in (client.name, "all"):
            with torch.no_grad():
                next(client.model.parameters()).view(-1)[0] = torch.nan


@dataclass(frozen=True)
class Constant(Algorithm):
    """Every entry of a client's model is one number that a test can compute: what the server makes of it shows."""

    of: Literal["samples", "rate", "steps"] = "samples"

    def end(self, client: Client) -> None:
        number = {"samples": len(client.index.train), "rate": client.rate, "steps": client.steps}[self.of]
        for tensor in client.slot.tensors.values():
            tensor.detach().fill_(number)


@dataclass(frozen=True)
class Private(Algorithm):
    """FedAvg, but for BatchNorm, which each client keeps to itself."""

    def private(self, model: nn.Module) -> frozenset[str]:
        return frozenset(name for name in entries(model) if name.startswith("stage.1."))


@dataclass(frozen=True)
class Hoard(Private):
    """All that an algorithm may keep: private entries, shares of before the first round, memory on both sides."""

    shares: ClassVar[bool] = True

    def share(self, client: Client) -> Share:
        client.memory["own"] = torch.rand(2, generator=client.streams("share"))
        return Share(Report(means={"own": client.memory["own"]}), gathered={"own": client.memory["own"]})

    def receive(self, server: ServerState, reduced: Reduced, gathered: Mapping[str, list[Tensor]]) -> ServerState:
        return replace(server, memory={"mean": reduced.means["own"], "all": torch.stack(gathered["own"])})

    def broadcast(self, server: ServerState) -> dict[str, Tensor]:
        return dict(server.memory)

    def inputs(self, x: Tensor, extras: Mapping[str, Tensor]) -> Tensor:
        return x * (1 + extras["mean"].mean() + extras["all"].std())

    def end(self, client: Client) -> None:
        client.memory["own"] = client.memory["own"] / 2 + client.extras["mean"]

    def report(self, client: Client) -> Report:
        return Report(means={"own": client.memory["own"]})

    def aggregate(self, server: ServerState, reduced: Reduced) -> ServerState:
        server = super().aggregate(server, reduced)
        return replace(server, memory={**server.memory, "mean": reduced.means["own"] / 3})


if "tiny" not in list(fedfa.SOURCES):
    fedfa.SOURCES.register("tiny", Tiny, "striped images at three sites")
    fedfa.NETWORKS.register("tiny-net", TinyNet, "one stage")
    fedfa.ALGORITHMS.register("slow", Slow, "FedAvg that takes its time")
    fedfa.ALGORITHMS.register("poison", Poison, "FedAvg with a NaN")
    fedfa.ALGORITHMS.register("private", Private, "FedAvg with BatchNorm of one's own")
    fedfa.ALGORITHMS.register("hoard", Hoard, "keeps all that can be kept")
    fedfa.ALGORITHMS.register("constant", Constant, "models of one number")

TINY: dict[str, Any] = {
    "name": "tiny",
    "source": "tiny",
    "network": "tiny-net",
    "algorithm": "fedavg",
    "rounds": 3,
    "batch_size": 4,
    "lr": 0.05,
    "threads": 1,
    "device": "cpu",
}


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """A run sets torch's number of threads for the whole process; other tests should not notice."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def tiny() -> dict[str, Any]:
    """The smallest experiment."""
    return dict(TINY)


@pytest.fixture
def play(tmp_path: Path) -> Callable[..., Run]:
    """Run the smallest experiment with overrides, in a folder of this test."""

    def play(root: str = "runs", **settings: Any) -> Run:
        return fedfa.run(TINY, root=tmp_path / root, **settings)

    return play


@pytest.fixture
def tiny_file(tmp_path: Path) -> Path:
    """The smallest experiment as a file."""
    path = tmp_path / "tiny.toml"
    path.write_text(fedfa.load(TINY).toml())
    return path


@pytest.fixture
def assert_same() -> Callable[[Run, Run], None]:
    """Two runs are the same run: every number but the seconds, and every bit of the checkpoints."""

    def assert_same(one: Run, other: Run) -> None:
        assert untimed(one) == untimed(other)
        assert one.done == other.done
        for found, wanted in ((one.latest(), other.latest()), ((one.best(), None), (other.best(), None))):
            assert found is not None and wanted is not None
            assert found[1] == wanted[1]
            assert (found[0] is None) == (wanted[0] is None)
            if found[0] is not None and wanted[0] is not None:
                assert found[0].round == wanted[0].round
                for part in ("model", "memory", "centres"):
                    mine, theirs = getattr(found[0], part), getattr(wanted[0], part)
                    assert mine.keys() == theirs.keys()
                    assert not [name for name in mine if not torch.equal(mine[name], theirs[name])]

    return assert_same


def untimed(run: Run) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key != "seconds"} for line in run.metrics]


@pytest.fixture
def hand_made(tmp_path: Path) -> Callable[..., Run]:
    """A run's folder written by hand: `tests` and `vals` are {client: metric} a round."""

    def hand_made(
        folder: str,
        tests: Sequence[dict[str, float]],
        vals: Sequence[dict[str, float]] = (),
        unseen: Sequence[str] = (),
        refused: Sequence[dict[str, str]] = (),
        metric: str = "accuracy",
        **settings: Any,
    ) -> Run:
        config = fedfa.load(TINY, {"rounds": max(len(tests), 1), "held_out": tuple(unseen), **settings})
        names = dict.fromkeys(name for scores in tests for name in scores)
        facts = {"threads": 1, "device": "cpu", "metric": metric, "samples": {name: [5, 2, 2] for name in names}}
        run = Run.create(tmp_path / folder, config, facts)
        with open(run.folder / "metrics.jsonl", "w") as file:
            for number, test in enumerate(tests):
                line: dict[str, Any] = {
                    "round": number + 1,
                    "clients": [name for name in test if name not in unseen],
                    "loss": 1 / (number + 1),
                    "refused": refused[number] if number < len(refused) else {},
                    "test": evaluation(test, unseen),
                    "seconds": 0.5,
                }
                if number < len(vals):
                    line["val"] = evaluation(vals[number], unseen)
                file.write(json.dumps(line) + "\n")
        return run

    return hand_made


def evaluation(scores: dict[str, float], held_out: Sequence[str]) -> dict[str, Any]:
    seen = [value for name, value in scores.items() if name not in held_out]
    rest = [value for name, value in scores.items() if name in held_out]
    mean = sum(seen) / len(seen)
    unseen = sum(rest) / len(rest) if rest else None
    losses = {name: 1 - value for name, value in scores.items()}
    gap = None if unseen is None else mean - unseen
    return {"mean": mean, "unseen": unseen, "gap": gap, "clients": scores, "losses": losses}


COMMAND = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
import conftest
from fedfa.cli import app
app(prog_name="fedfa")
"""


@pytest.fixture
def command() -> list[str]:
    """The `fedfa` command in a process of its own, which knows the tiny federation."""
    return [sys.executable, "-c", COMMAND]


@pytest.fixture
def spawn() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a process that does not outlive the test."""
    started: list[subprocess.Popen[str]] = []

    def spawn(words: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
        given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment, **options}
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's job in the background, which would pass it on
            signal.signal(signal.SIGINT, signal.default_int_handler)
        process = subprocess.Popen(list(words), **given)
        started.append(process)
        return process

    yield spawn
    for process in started:
        with process:  # closes its pipes and waits for it
            process.kill()


@pytest.fixture
def wait_for() -> Callable[[Callable[[], bool]], None]:
    """Wait until something is so, or fail."""

    def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "it did not happen in time"
            time.sleep(0.01)

    return wait_for
