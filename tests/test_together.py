"""Many runs at once: done ones are taken as they are, a failing one ends no other, Ctrl-C leaves checkpoints."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fedfa
import fedfa.simulate
from fedfa import Run, UserError, sharing, together
from fedfa.runs import find_run, held
from fedfa.server import Record, Watcher
from fedfa.together import run_together


class Counting(Watcher):
    """Counts what it is told."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.rounds: list[int] = []

    def run_started(self, run: Run, round: int) -> None:
        self.started.append(round)

    def round_done(self, record: Record) -> None:
        self.rounds.append(record.round)


def small(**settings: Any) -> fedfa.Experiment:
    return fedfa.load("digit-sites", {"rounds": 2, "device": "cpu", "split.fraction": 0.1, **settings})


def test_one_after_another(tiny: dict[str, Any], tmp_path: Path) -> None:
    experiments = [fedfa.load(tiny, {"seed": seed}) for seed in range(3)]
    done = fedfa.run(experiments[2], root=tmp_path)
    watchers: dict[int, Counting] = {}

    def watch(experiment: fedfa.Experiment) -> Watcher:
        return watchers.setdefault(experiment.seed, Counting())

    ended = list(run_together(experiments, root=tmp_path, watch=watch))
    assert [experiment.seed for experiment, _ in ended] == [2, 0, 1]  # what is done comes first
    assert isinstance(ended[0][1], Run) and ended[0][1].folder == done.folder
    assert sorted(watchers) == [0, 1]
    assert watchers[0].rounds == [1, 2, 3]
    assert all(isinstance(run, Run) and run.done for _, run in ended)


def test_a_failing_run_ends_no_other(tiny: dict[str, Any], tmp_path: Path) -> None:
    experiments = [fedfa.load(tiny, {"held_out": "nobody"}), fedfa.load(tiny)]
    (_, failed), (_, run) = run_together(experiments, root=tmp_path, watch=lambda _: Watcher())
    assert isinstance(failed, UserError) and "nobody" in str(failed)
    assert isinstance(run, Run)


def test_a_run_that_breaks_ends_no_other(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Memory that runs out, say: the reason is told, and where it was."""
    real = fedfa.simulate.play_round

    def play_round(server: Any, algorithm: Any, engine: Any, plan: Any, watcher: Any) -> Any:
        if plan.seed == 0:
            raise RuntimeError("no memory\nis left")
        return real(server, algorithm, engine, plan, watcher)

    monkeypatch.setattr(fedfa.simulate, "play_round", play_round)
    experiments = [fedfa.load(tiny, {"seed": seed}) for seed in (0, 1)]
    (_, failed), (_, run) = run_together(experiments, root=tmp_path, watch=lambda _: Watcher())
    assert isinstance(failed, UserError) and str(failed) == "RuntimeError: no memory is left"
    assert isinstance(run, Run) and run.done and "beside" not in run.provenance
    assert "in play_round" in capsys.readouterr().err


@pytest.fixture
def without_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that would share a GPU, on a CPU: all but the streams is as there."""

    @contextmanager
    def none(count: int, device: Any) -> Iterator[tuple[None, ...]]:
        yield (None,) * count

    monkeypatch.setattr(sharing, "borrowed_streams", none)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.stream", lambda _: nullcontext())


@pytest.mark.usefixtures("without_streams")
def test_threads_give_the_same_numbers_and_one_that_breaks_ends_no_other(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fedfa.simulate.play_round

    def play_round(server: Any, algorithm: Any, engine: Any, plan: Any, watcher: Any) -> Any:
        if plan.seed == 2 and server.round == 1:
            raise RuntimeError("no memory is left")
        return real(server, algorithm, engine, plan, watcher)

    monkeypatch.setattr(fedfa.simulate, "play_round", play_round)
    experiments = [
        fedfa.load(tiny, {"seed": seed, "network.dropout": 0.0}) for seed in range(4)
    ]  # which is all threads'
    ended = {
        experiment.seed: outcome
        for experiment, outcome in sharing.share_gpu(experiments, tmp_path / "shared", lambda _: Watcher(), at_once=3)
    }
    failed = ended.pop(2)
    assert isinstance(failed, UserError) and "no memory is left" in str(failed)
    for seed, run in ended.items():
        assert isinstance(run, Run) and find_run(run.folder).provenance["beside"] == 2
        alone = fedfa.run(experiments[seed], root=tmp_path / "alone")
        assert [line["loss"] for line in alone.metrics] == [line["loss"] for line in run.metrics]


@pytest.mark.usefixtures("without_streams")
def test_threads_are_stopped_with_checkpoints(tiny: dict[str, Any], tmp_path: Path) -> None:
    class Impatient(Watcher):
        def round_done(self, record: Record) -> None:
            if record.round == 2:
                raise KeyboardInterrupt

    experiments = [fedfa.load(tiny, {"seed": seed, "checkpoint_every": 1}) for seed in range(3)]
    with pytest.raises(KeyboardInterrupt):
        list(sharing.share_gpu(experiments, tmp_path, lambda _: Impatient()))
    assert not list(tmp_path.glob("*/done")) and list(tmp_path.glob("*/checkpoints/round-*"))


def test_threads_that_cannot_begin_are_not_waited_for(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_device() -> int:
        raise RuntimeError("no such device")

    monkeypatch.setattr("torch.cuda.current_device", no_device)
    with pytest.raises(RuntimeError, match="no such device"):
        list(sharing.share_gpu([fedfa.load(tiny)], tmp_path, lambda _: Watcher()))


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(errno.ENOSPC, "No space left on device")])
def test_what_concerns_all_runs_ends_all(error: OSError, tiny: dict[str, Any], tmp_path: Path) -> None:
    """And is told by the command, in one line."""

    class Full(Watcher):
        def round_done(self, record: Record) -> None:
            raise error

    with pytest.raises(type(error)):
        list(run_together([fedfa.load(tiny, {"seed": s}) for s in (0, 1)], root=tmp_path, watch=lambda _: Full()))


def test_memory_that_runs_out_is_one_line(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def play_round(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")

    monkeypatch.setattr(fedfa.simulate, "play_round", play_round)
    ((_, failed),) = run_together([fedfa.load(tiny)], root=tmp_path, watch=lambda _: Watcher())
    assert str(failed) == "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    assert not capsys.readouterr().err


def test_a_table_whose_reader_has_gone_says_nothing(tmp_path: Path) -> None:
    """As in `fedfa reproduce … | head -1`."""
    words = [sys.executable, "-m", "fedfa", "reproduce", "digit-sites", "--rounds", "2", "--seeds", "2", "device=cpu"]
    ours = subprocess.Popen([*words, "-o", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert ours.stdout is not None and ours.stderr is not None and ours.stdout.readline()
    ours.stdout.close()
    assert not ours.stderr.read() and ours.wait(120) == 0
    ours.stderr.close()


def test_a_worker_whose_first_process_is_gone_ends_without_a_word(tmp_path: Path) -> None:
    script = (
        "import os, sys, threading, time, pathlib\n"
        "import fedfa\nfrom fedfa.server import Watcher\nfrom fedfa.together import run_together\n"
        "class Gone(Watcher):\n"
        "    def round_done(self, record): os._exit(9)\n"
        "if __name__ == '__main__':\n"
        "    given = {'rounds': 300, 'device': 'cpu', 'split.fraction': 0.1}\n"
        "    runs = [fedfa.load('digit-sites', {**given, 'seed': s}) for s in (0, 1)]\n"
        "    list(run_together(runs, root=pathlib.Path(sys.argv[1]), watch=lambda _: Gone(), at_once=2))\n"
    )
    file = tmp_path / "script.py"
    file.write_text(script)
    done = subprocess.run(
        [sys.executable, str(file), str(tmp_path / "runs")], capture_output=True, text=True, timeout=100, check=False
    )  # which waits for all that have its output, workers among them
    assert done.returncode == 9 and not done.stderr
    assert not list(tmp_path.glob("runs/*/done"))


def test_a_worker_that_is_killed_in_the_middle_of_a_word() -> None:
    """Its pipe then has a part of a message."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe(duplex=False)
    os.write(theirs.fileno(), (1000).to_bytes(4, "big") + b"a part")
    theirs.close()
    gone = SimpleNamespace(join=lambda: None, exitcode=-9)
    ended, error = together._hear(ours, Watcher(), gone)  # type: ignore[arg-type]  # a stand-in for a process
    assert ended and "exit code -9" in str(error)


def test_processes_give_the_same_numbers(tmp_path: Path) -> None:
    good, bad = small(), small(held_out="nobody")
    watcher = Counting()
    found = run_together([good, bad], root=tmp_path / "apart", watch=lambda _: watcher, at_once=2)
    ended = {experiment.title: outcome for experiment, outcome in found}
    assert isinstance(ended[bad.title], UserError) and "nobody" in str(ended[bad.title])
    run = ended[good.title]
    assert isinstance(run, Run) and run.done
    assert (watcher.started, watcher.rounds) == ([0], [1, 2])
    assert find_run(run.folder).provenance["beside"] == 1, "so that its seconds are no cost of its own"
    alone = fedfa.run(good, root=tmp_path / "alone")
    assert [line["test"] for line in run.metrics] == [line["test"] for line in alone.metrics]


SCRIPT = """
import sys
from pathlib import Path
import fedfa
from fedfa.server import Watcher
from fedfa.together import run_together
if __name__ == "__main__":
    root = Path(sys.argv[1])
    experiments = [fedfa.load("digit-sites", {"rounds": 10_000, "seed": seed}) for seed in range(2)]
    for _ in run_together(experiments, root=root, watch=lambda _: Watcher(), at_once=2):
        pass
"""


def test_ctrl_c_ends_all_processes_with_checkpoints(
    tmp_path: Path, spawn: Callable[..., Any], wait_for: Callable[..., None]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = spawn([sys.executable, str(script), str(tmp_path / "runs")])

    def both_play() -> bool:
        metrics = list((tmp_path / "runs").glob("*/metrics.jsonl"))
        return len(metrics) == 2 and all(path.read_text().count("\n") > 1 for path in metrics)

    wait_for(both_play)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in told  # of the script, which does not catch it
    assert told.count("Traceback") == 1
    runs = [Run(path.parent) for path in (tmp_path / "runs").glob("*/experiment.toml")]
    assert len(runs) == 2
    for run in runs:
        assert run.rounds in run.restarts()
    before = [run.rounds for run in runs]
    time.sleep(1)
    assert [run.rounds for run in runs] == before  # nobody works on


PLAYED = """
import sys
from pathlib import Path
import fedfa
from fedfa.server import Watcher
from fedfa.together import run_together

class Noting(Watcher):
    def __init__(self, seed): self.seed = seed
    def round_done(self, record): print("played", self.seed, flush=True)

settings = {"rounds": 4, "device": "cpu", "split.fraction": 0.2}
experiments = [fedfa.load("digit-sites", {**settings, "seed": seed}) for seed in range(4)]
ended = list(run_together(experiments, root=Path(sys.argv[1]), watch=lambda experiment: Noting(experiment.seed)))
assert all(run.done and run.rounds == 4 for _, run in ended), ended
print("ended", len(ended), flush=True)
"""


def test_processes_share_the_runs_of_one_folder(tmp_path: Path) -> None:
    """Each run is played by one of them, and each of them has all runs in the end."""
    command = [sys.executable, "-c", PLAYED, str(tmp_path)]
    told = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    out = [process.communicate(timeout=240) for process in told]
    assert [process.returncode for process in told] == [0, 0], out
    lines = [line for stdout, _ in out for line in stdout.splitlines()]
    assert sorted(lines) == sorted(["ended 4"] * 2 + [f"played {seed}" for seed in range(4) for _ in range(4)])


def test_a_run_that_another_process_gave_up_goes_on_here(tiny: dict[str, Any], tmp_path: Path) -> None:
    experiment, others = fedfa.load(tiny), fedfa.load(tiny, {"seed": 1})
    folder = tmp_path / experiment.title
    folder.mkdir()
    noted: list[str] = []

    class Noting(Counting):
        def noticed(self, line: str) -> None:
            noted.append(line)
            other.__exit__(None, None, None)  # that process ends

    other = held(folder)
    other.__enter__()
    ended = list(run_together([experiment, others], root=tmp_path, watch=lambda _: Noting()))
    assert [experiment.seed for experiment, _ in ended] == [1, 0]
    assert all(isinstance(run, Run) and run.done for _, run in ended)
    assert noted == ["waiting for one of these runs, which another process is at work on"]


@pytest.mark.parametrize("at_once", [0, 2])
def test_nothing_to_do(at_once: int, tmp_path: Path) -> None:
    assert list(run_together([], root=tmp_path, watch=lambda _: Watcher(), at_once=at_once)) == []
