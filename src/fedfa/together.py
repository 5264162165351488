"""Many runs: those that are done are taken as they are, the others are played; one that fails ends no other."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from fedfa.errors import Busy, UserError
from fedfa.experiment import Experiment
from fedfa.runs import Run, find_run, is_free, unedited
from fedfa.server import Record, Watcher

Outcome = tuple[Experiment, Run | UserError]
Watch = Callable[[Experiment], Watcher]
PAUSE = 1.0
"""Seconds between looks at runs that another process plays."""
PATIENCE = 60.0
"""Seconds that worker processes have for a last checkpoint after Ctrl-C."""


def run_together(
    experiments: Sequence[Experiment], *, root: Path, watch: Watch, at_once: int = 0, apart: bool = False
) -> Iterator[Outcome]:
    """Run experiments and give each with its :class:`Run`, or with the reason why there is none, as it ends.

    Those that are complete under `root` come first; those that were stopped go on. At most `at_once` are played at a
    time (0: as many as suit the device). On a GPU they are threads of this process, which share it. On the CPU they
    come one after another in this process, or, with more than one at once, have a process each with one thread. With
    `apart` every run has a process of its own in any case, so that its peak memory is its own. Ctrl-C stops all of
    them, each with a checkpoint of its last complete round.

    Several processes may do the same at once, each on a GPU of its own, say: a run that another one is at work on is
    left to it, and waited for at the end; if that one stops, the run goes on here.
    """
    missing: list[Experiment] = []
    for experiment in experiments:
        found = _complete(root / experiment.title)
        if found is None:
            missing.append(experiment)
        else:
            yield experiment, found
    elsewhere: list[Experiment] = []
    while missing or elsewhere:
        for experiment, outcome in _played(missing, root, watch, at_once, apart):
            if isinstance(outcome, Busy):
                elsewhere.append(experiment)
            else:
                yield experiment, outcome
        missing = []
        for experiment in elsewhere.copy():
            if (found := _complete(root / experiment.title)) is not None:
                yield experiment, found
            elif is_free(root / experiment.title):
                missing.append(experiment)  # that process has stopped
            else:
                continue
            elsewhere.remove(experiment)
        if elsewhere and not missing:
            many = "one" if len(elsewhere) == 1 else str(len(elsewhere))
            watch(elsewhere[0]).noticed(f"waiting for {many} of these runs, which another process is at work on")
            time.sleep(PAUSE)


def _played(waiting: Sequence[Experiment], root: Path, watch: Watch, at_once: int, apart: bool) -> Iterator[Outcome]:
    on_gpu = [] if apart or at_once == 1 else [experiment for experiment in waiting if _captured(experiment)]
    if on_gpu:
        from fedfa.sharing import share_gpu

        yield from share_gpu(on_gpu, root, watch, at_once)
    others = [experiment for experiment in waiting if experiment not in on_gpu]
    if apart or at_once > 1:
        yield from _in_processes(others, root, watch, 1 if apart else at_once)  # costs are not measured beside others
    else:
        for experiment in others:
            yield experiment, outcome_of(experiment, root, watch(experiment))


def _captured(experiment: Experiment) -> bool:
    """Whether the experiment's clients train on a GPU by captured steps: such runs can share it."""
    from fedfa.engines.captured import Captured
    from fedfa.simulate import find_device, find_engine

    try:
        return find_engine(experiment, find_device(experiment.device)) is Captured
    except UserError:  # which is told when it is run
        return False


def complete(folder: Path) -> Run | None:
    """The run in a folder, if it is there and complete."""
    there = (folder / "done").exists() and (folder / "experiment.toml").exists()
    return unedited(find_run(folder)) if there else None


def _complete(folder: Path) -> Run | UserError | None:
    """The same; or what is wrong with its folder, which stops no other run."""
    try:
        return complete(folder)
    except UserError as error:
        return error


def outcome_of(experiment: Experiment, root: Path, watcher: Watcher) -> Run | UserError:
    """Run an experiment; where it fails, why. That ends no other run; a full disk, or a reader of our output who has
    gone, ends all."""
    import torch

    from fedfa.simulate import run

    try:
        return run(experiment, root=root, watcher=watcher)
    except UserError as error:
        return error
    except OSError:
        raise
    except Exception as error:
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)):  # a bug
            traceback.print_exception(error)
        return UserError(f"{type(error).__name__}: {' '.join(str(error).split())}")


# Worker processes


class _Teller(Watcher):
    """The watcher in a worker process: passes on what its like in the first process should know. What single clients
    did stays here: their losses are tensors."""

    def __init__(self, pipe: Connection, others: int) -> None:
        self._pipe, self._others = pipe, others

    def run_started(self, run: Run, round: int) -> None:
        run.note_beside(self._others)
        self._pipe.send(("run_started", run.folder, round))

    def noticed(self, line: str) -> None:
        self._pipe.send(("noticed", line))

    def round_done(self, record: Record) -> None:
        self._pipe.send(("round_done", record))


def _work(experiment: Experiment, root: Path, pipe: Connection, threads: int, others: int) -> None:
    """What a worker process does: one run, while as many others as that go on. It was started deaf to Ctrl-C and leaves
    the terminal's group, so that the first process alone says when to stop, and says it once: a second signal would
    cut its last checkpoint short."""
    if hasattr(os, "setsid"):
        os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a scheduler may tell all of them; the first process says it again
    try:
        _hear_interrupts(True)
        import torch

        if threads:
            torch.set_num_threads(threads)
        alone = experiment.model_copy(update={"processes": 1})  # others of its like have the other cores
        outcome = outcome_of(alone, root, _Teller(pipe, others))
    except (KeyboardInterrupt, BrokenPipeError):  # stopped, or the first process is gone: the checkpoint is written
        os._exit(130)
    pipe.send(("ended", outcome if isinstance(outcome, UserError) else None))


def _hear_interrupts(hear: bool) -> None:
    """Let Ctrl-C and SIGTERM through to this thread, or keep it waiting; processes that are started inherit it."""
    if hasattr(signal, "pthread_sigmask"):
        how = signal.SIG_UNBLOCK if hear else signal.SIG_BLOCK
        signal.pthread_sigmask(how, {signal.SIGINT, signal.SIGTERM})


def _in_processes(waiting: Sequence[Experiment], root: Path, watch: Watch, at_once: int) -> Iterator[Outcome]:
    left, others = list(waiting), min(at_once, len(waiting)) - 1
    working: dict[Connection, tuple[Experiment, BaseProcess, Watcher]] = {}
    try:
        while left or working:
            while left and len(working) < at_once:
                experiment = left.pop(0)
                pipe, process = _start(experiment, root, threads=1 if at_once > 1 else 0, others=others)
                working[pipe] = experiment, process, watch(experiment)
            for ready in wait(list(working)):
                assert isinstance(ready, Connection)
                experiment, process, watcher = working[ready]
                ended, error = _hear(ready, watcher, process)
                if ended:
                    del working[ready]
                    process.join()
                    yield experiment, error or find_run(root / experiment.title)
    finally:
        _stop([process for _, process, _ in working.values()])


def _start(experiment: Experiment, root: Path, threads: int, others: int) -> tuple[Connection, BaseProcess]:
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(experiment, root, theirs, threads, others), daemon=True)
    resource_tracker.ensure_running()  # else the first start would start it, and it lets interrupts through again
    _hear_interrupts(False)
    try:
        process.start()
    finally:
        _hear_interrupts(True)
    theirs.close()
    return ours, process


def _hear(pipe: Connection, watcher: Watcher, process: BaseProcess) -> tuple[bool, UserError | None]:
    """Take one message from a worker. Whether that was its last, and if so, why its run is not complete."""
    try:
        what, *rest = pipe.recv()
    except (EOFError, OSError):  # it is gone without a word, or within one: killed, or a bug that it has printed
        process.join()
        return True, UserError(f"its process ended with exit code {process.exitcode}")
    if what == "ended":
        return True, rest[0]
    given: list[Any] = [find_run(rest[0]), rest[1]] if what == "run_started" else rest
    getattr(watcher, what)(*given)
    return False, None


def _stop(processes: Sequence[BaseProcess]) -> None:
    """End workers: each writes a checkpoint first, if it is given the time."""
    for process in processes:
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGINT)
    end = time.monotonic() + PATIENCE
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
