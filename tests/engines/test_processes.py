"""Clients in several processes: the sequential engine's numbers to the bit, and nothing lost where one is."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fedfa
from fedfa.algorithms import ALGORITHMS
from fedfa.engines import processes
from fedfa.engines.crew import Crew, Lost, Recipe, packed
from fedfa.engines.processes import Processes
from fedfa.errors import UserError
from fedfa.memory import Memory
from fedfa.runs import Run
from fedfa.server import Record, Watcher
from fedfa.simulate import Parts, build_engine_of

pytestmark = pytest.mark.skipif(os.name != "posix", reason="processes are started the POSIX way")


class Noted(Watcher):
    """What a run says, and after each round what is to be done then."""

    def __init__(self, after: Callable[[Record], None] | None = None) -> None:
        self.lines: list[str] = []
        self.after = after

    def noticed(self, line: str) -> None:
        self.lines.append(line)

    def round_done(self, record: Record) -> None:
        if self.after is not None:
            self.after(record)


def played(root: Path, count: int, watcher: Watcher | None = None, **settings: Any) -> Run:
    own = {"rounds": 3, "device": "cpu", "threads": 1, "trackers": [], **settings}
    return fedfa.run("digit-sites", root=root, watcher=watcher, processes=count, **own)


def assert_same(one: Run, other: Run) -> None:
    """Metrics and the last model, to the bit."""
    timeless = [[{k: v for k, v in line.items() if k != "seconds"} for line in run.metrics] for run in (one, other)]
    assert timeless[0] == timeless[1]
    states = [run.latest() for run in (one, other)]
    assert states[0] is not None and states[1] is not None
    for name, tensor in states[0][0].model.items():
        assert torch.equal(tensor, states[1][0].model[name]), name


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """All processes that crews start; they are gone at the end."""
    found: list[subprocess.Popen[bytes]] = []
    original = Crew.__init__

    def noted(self: Crew, recipe: Recipe, size: int, threads: int) -> None:
        original(self, recipe, size, threads)
        found.extend(worker.process for worker in self._workers)

    monkeypatch.setattr(Crew, "__init__", noted)
    yield found
    assert all(process.poll() is not None for process in found)


@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm": "fedfa", "evaluate_every": 2},
        {"algorithm": "scaffold", "participation": 0.5},
        {"algorithm": "fedbn", "optimizer_state": "kept", "momentum": 0.9},
    ],
    ids=["fedfa", "scaffold", "fedbn"],
)
def test_the_same_numbers(settings: dict[str, Any], tmp_path: Path, started: list[Any]) -> None:
    many = played(tmp_path / "many", 2, **settings)
    assert len(started) == 2 and many.provenance["processes"] == 2
    one = played(tmp_path / "one", 1, **settings)
    assert one.folder.name == many.folder.name and "processes" not in one.provenance
    assert_same(one, many)


def test_short_runs_start_none(tmp_path: Path, started: list[Any]) -> None:
    played(tmp_path, 0, rounds=5)
    assert not started


def test_they_are_started_when_they_pay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[Any]) -> None:
    monkeypatch.setattr(processes, "WORTH", 0.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(
        Crew, "ready", lambda self, patient, own=Crew.ready: own(self, True)
    )  # whatever the machine does
    seen: list[int] = []
    many = played(tmp_path / "many", 0, Noted(lambda record: seen.append(len(started))), rounds=6)
    assert seen == [0, 0, 0, 2, 2, 2]
    assert many.provenance["processes"] == 2
    assert_same(played(tmp_path / "one", 1, rounds=6), many)


def test_one_that_is_killed_costs_nothing(tmp_path: Path, started: list[subprocess.Popen[bytes]]) -> None:
    def kill(record: Record) -> None:
        if record.round == 1:
            os.kill(started[0].pid, signal.SIGKILL)

    watcher = Noted(kill)
    many = played(tmp_path / "many", 2, watcher)
    assert [line for line in watcher.lines if "it ended with exit code -9" in line]
    assert_same(played(tmp_path / "one", 1), many)


def test_what_another_process_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[Any]
) -> None:
    monkeypatch.setitem(ALGORITHMS._targets, "mine-alone", ALGORITHMS["fedavg"])
    monkeypatch.setitem(ALGORITHMS._lines, "mine-alone", "known to this process alone")
    watcher = Noted()
    found = played(tmp_path, 2, watcher, algorithm="mine-alone")
    assert found.done and [line for line in watcher.lines if "no algorithm is named 'mine-alone'" in line]


def test_a_recipe_that_fails() -> None:
    crew = Crew(Recipe("fedfa.simulate", "engine_of", {"config": {"name": "nothing"}, "division": ""}), 1, 1)
    try:
        with pytest.raises(Lost):
            crew.ready(patient=True)
    finally:
        crew.close()


def test_how_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as cores are left for, not more than clients; none where the engine is asked for by name."""
    run = played(tmp_path, 1, rounds=1)
    parts = Parts.build(run.experiment)

    def engine(cores: int, **own: Any) -> Any:
        monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
        config = run.experiment.model_copy(update={"processes": 0, **own})
        like: Any = SimpleNamespace(experiment=config, provenance=run.provenance)
        return build_engine_of(like, parts, Memory(tmp_path), torch.device("cpu"), Watcher())

    clients = len(parts.plan.clients)
    assert isinstance(engine(64), Processes) and engine(64).most == clients
    assert engine(3).most == min(3, clients) and engine(1).most == 1
    assert not isinstance(engine(64, engine="sequential"), Processes)


def test_processes_are_for_the_cpu(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="processes=2 is for engine=auto on a CPU, not for engine=sequential"):
        played(tmp_path, 2, engine="sequential")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/proc/self").exists() or shutil.which("ps") is None, reason="looks into /proc, with ps")
def test_they_end_with_the_first_process(tmp_path: Path) -> None:
    """Killed, so that it can tell nobody."""
    code = f"import fedfa; fedfa.run('digit-sites', root={str(tmp_path)!r}, processes=2, rounds=500, device='cpu')"
    first = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    try:
        found: list[int] = []
        deadline = time.monotonic() + 60
        while len(found) < 2 and time.monotonic() < deadline:
            time.sleep(0.2)
            children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(first.pid)], capture_output=True, check=False)
            found = [int(number) for number in children.stdout.split()]
        assert len(found) == 2
    finally:
        first.kill()
        first.wait()
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{number}").exists() for number in found) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not any(Path(f"/proc/{number}").exists() for number in found)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]
)
def test_messages_hold_any_tensor(dtype: torch.dtype) -> None:
    sent = {
        "row": torch.tensor([0, 1, 2, -3]).to(dtype),
        "none": torch.zeros(0, 3, dtype=dtype),
        "number": torch.ones((), dtype=dtype),
        "last": torch.arange(24).view(1, 2, 3, 4).to(dtype).to(memory_format=torch.channels_last),
    }
    for name, tensor in pickle.loads(packed(sent)).items():
        assert torch.equal(tensor, sent[name]) and tensor.dtype == dtype
        tensor.zero_()  # may be written to
    assert sent["number"]
