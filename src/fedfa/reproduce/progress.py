"""How the runs of a table go, all together: bars in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Literal

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from fedfa.experiment import Experiment
from fedfa.report.console import console
from fedfa.report.progress import SECONDS_BETWEEN_LINES
from fedfa.runs import Run
from fedfa.server import Record, Watcher

NAMES = {"test": "test", "val": "validation"}


class Overall:
    """Counts rounds over all runs, whichever of them goes on, and says how long the rest will take."""

    def __init__(
        self, labels: Mapping[str, str], rounds: int, quiet: bool = False, split: Literal["val", "test"] = "test"
    ) -> None:
        self._split = split
        """Whose metric is shown."""
        self._labels = labels
        """What each run is called in the table, by its title."""
        self._rounds, self._played, self._before = rounds, 0, 0
        self._runs, self._ended = len(labels), 0
        self._began = time.monotonic()
        self._printed = 0.0
        self._quiet = quiet
        self._told: set[str] = set()
        self._begun: set[str] = set()
        self._lock = threading.Lock()
        lively = console.is_terminal and not os.environ.get("CI") and not quiet
        self._bars = _bars() if lively else None
        self._all: TaskID | None = None

    def __enter__(self) -> Overall:
        if self._bars is not None and self._runs:
            self._bars.start()
            self._all = self._bars.add_task("all", total=self._rounds, what=f"runs 0/{self._runs}", left="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def watch(self, experiment: Experiment) -> Watcher:
        return _OneRun(self, self._labels[experiment.title], experiment.rounds)

    def left(self) -> str:
        """The time that is left, by the rounds since the first: what came before it was starting up."""
        played = self._played - self._before - 1
        if played < 1:
            return ""
        seconds = (time.monotonic() - self._began) / played * (self._rounds - self._played)
        return f"about {duration(seconds)} left"

    def started(self, label: str, round: int) -> None:
        with self._lock:
            self._begun.add(label)
            self._skip(round)  # of a run that goes on

    def _skip(self, rounds: int) -> None:
        """Rounds that were played before."""
        self._played += rounds
        self._before += rounds

    def played(self, label: str, rounds: int, record: Record) -> None:
        with self._lock:
            self._played += 1
            now = time.monotonic()
            if self._played - self._before == 1:
                self._began = now
            if self._bars is not None or self._quiet or now - self._printed < SECONDS_BETWEEN_LINES:
                return
            self._printed = now
            score = f", {shown}" if (shown := self.score(record)) else ""
            where = f"runs {self._ended}/{self._runs}, rounds {self._played:,}/{self._rounds:,}"
            left = f", {self.left()}" if self.left() else ""
            print(f"{where}{left}; {label}: round {record.round}/{rounds}{score}", flush=True)

    def score(self, record: Record) -> str:
        """A round's metric, if it was evaluated."""
        found = record.test if self._split == "test" else record.val
        return "" if found is None else f"{NAMES[self._split]} {100 * found.mean:.1f} %"

    def ended(self, experiment: Experiment, error: Exception | None) -> None:
        """A run is complete, or failed."""
        with self._lock:
            self._ended += 1
            if self._labels[experiment.title] not in self._begun and error is None:
                self._skip(experiment.rounds)
            what = f"runs {self._ended}/{self._runs}"
        if self._bars is not None and self._all is not None:
            self._bars.update(self._all, what=what)
        if error is not None:
            self.say(f"{self._labels[experiment.title]}: {error}")

    def say(self, line: str) -> None:
        """Print a line, once."""
        with self._lock:
            if line in self._told:
                return
            self._told.add(line)
        if self._bars is not None:
            self._bars.console.print(line, markup=False, highlight=False)
        else:
            print(line, file=sys.stderr, flush=True)


class _OneRun(Watcher):
    """One of the runs."""

    def __init__(self, overall: Overall, label: str, rounds: int) -> None:
        self._overall, self._label, self._rounds = overall, label, rounds
        self._bar: TaskID | None = None

    def run_started(self, run: Run, round: int) -> None:
        self._overall.started(self._label, round)
        if (bars := self._overall._bars) is not None:
            self._bar = bars.add_task(self._label, total=self._rounds, completed=round, what="", left="")

    def noticed(self, line: str) -> None:
        self._overall.say(line)

    def round_done(self, record: Record) -> None:
        overall = self._overall
        overall.played(self._label, self._rounds, record)
        if overall._bars is None or self._bar is None or overall._all is None:
            return
        overall._bars.update(self._bar, completed=record.round, what=overall.score(record))
        overall._bars.update(overall._all, completed=overall._played, left=overall.left())
        if record.round >= self._rounds:
            overall._bars.remove_task(self._bar)


def _bars() -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
        TextColumn("{task.fields[what]}"), TimeElapsedColumn(), TextColumn("{task.fields[left]}"), console=console,
    )  # fmt: skip


def duration(seconds: float) -> str:
    """A time in the unit that suits."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
