"""Runs that share one GPU: a thread each, with a stream each, in one process.

A run of a small network leaves most of a GPU idle between rounds and at their ends; others fill it. Kernels of one
process run beside each other, those of several processes do not.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedfa.cuda_streams import borrowed_streams
from fedfa.errors import UserError
from fedfa.experiment import Experiment
from fedfa.precision import arithmetic
from fedfa.runs import Run
from fedfa.server import Record, Watcher
from fedfa.together import Outcome, Watch, outcome_of

AT_ONCE = 5
"""Runs at a time unless it is said how many."""


class _Relay(Watcher):
    """Tells a watcher, one thread at a time, and ends the run when all are to stop."""

    def __init__(self, watcher: Watcher, one: threading.Lock, stop: threading.Event, others: int) -> None:
        self._watcher, self._one, self._stop, self._others = watcher, one, stop, others

    def _tell(self, what: str, *given: Any) -> None:
        if self._stop.is_set():
            raise KeyboardInterrupt
        with self._one:
            getattr(self._watcher, what)(*given)

    def run_started(self, run: Run, round: int) -> None:
        run.note_beside(self._others)
        self._tell("run_started", run, round)

    def noticed(self, line: str) -> None:
        self._tell("noticed", line)

    def round_started(self, round: int, clients: Sequence[str]) -> None:
        self._tell("round_started", round, clients)

    def client_done(self, client: str, loss: Tensor | None, refused: str | None) -> None:
        self._tell("client_done", client, loss, refused)

    def round_done(self, record: Record) -> None:
        self._tell("round_done", record)


def share_gpu(experiments: Sequence[Experiment], root: Path, watch: Watch, at_once: int = 0) -> Iterator[Outcome]:
    """Run experiments on the GPU, `at_once` at a time, and give each as it ends. Those of one precision go together:
    what arithmetic a product is taken in is a setting of the process."""
    ordered = sorted(experiments, key=lambda experiment: experiment.precision)
    for precision, group in groupby(ordered, key=lambda experiment: experiment.precision):
        with arithmetic(precision):
            yield from _share(list(group), root, watch, at_once or AT_ONCE)


def _share(experiments: list[Experiment], root: Path, watch: Watch, at_once: int) -> Iterator[Outcome]:
    waiting: queue.SimpleQueue[Experiment] = queue.SimpleQueue()
    for experiment in experiments:
        waiting.put(experiment)
    ended: queue.SimpleQueue[tuple[Experiment, Run | BaseException]] = queue.SimpleQueue()
    one, stop = threading.Lock(), threading.Event()

    def work() -> None:
        others = min(at_once, len(experiments)) - 1
        with borrowed_streams(1, torch.device("cuda", torch.cuda.current_device())) as (own,), torch.cuda.stream(own):
            while not stop.is_set():
                try:
                    experiment = waiting.get_nowait()
                except queue.Empty:
                    return
                try:
                    relay = _Relay(watch(experiment), one, stop, others)
                    ended.put((experiment, outcome_of(experiment, root, relay)))
                except BaseException as error:  # stopped
                    ended.put((experiment, error))

    def at_work() -> None:
        try:
            work()
        except BaseException as error:  # before there was a run: nobody is to wait for it
            ended.put((experiments[0], error))

    threads = [threading.Thread(target=at_work, daemon=True) for _ in range(min(at_once, len(experiments)))]
    for thread in threads:
        thread.start()
    try:
        for _ in experiments:
            experiment, outcome = _next(ended)
            if isinstance(outcome, BaseException) and not isinstance(outcome, UserError):
                raise outcome
            yield experiment, outcome
    finally:  # Ctrl-C, or an error: each run writes a checkpoint of its last complete round
        stop.set()
        for thread in threads:
            thread.join()


def _next(ended: queue.SimpleQueue[tuple[Experiment, Run | BaseException]]) -> tuple[Experiment, Run | BaseException]:
    """The next one, while Ctrl-C can still be heard."""
    while True:
        try:
            return ended.get(timeout=0.2)
        except queue.Empty:
            continue
