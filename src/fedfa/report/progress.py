"""How a run goes, in a terminal: live where there is one, a line now and then where there is none."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from fedfa.errors import UserError
from fedfa.report.compare import Comparison, cell, sparkline, summarise
from fedfa.report.console import console
from fedfa.runs import Run
from fedfa.server import Record, Watcher

if TYPE_CHECKING:
    from torch import Tensor

SECONDS_BETWEEN_LINES = 5.0


def watch(play: Callable[[Watcher], Run], quiet: bool) -> None:
    """Play a run under a watcher that suits the terminal, and print what came of it."""
    watcher = Silent() if quiet else Lively() if console.is_terminal and not os.environ.get("CI") else Plain()
    try:
        with watcher:
            run = play(watcher)
    except KeyboardInterrupt:
        if watcher.run is not None:
            at = watcher.run.rounds
            again = f"fedfa resume {shlex.quote(str(watcher.run.folder))}"
            print(f"stopped after round {at}; go on with: {again}", file=sys.stderr)
        raise
    if watcher.run is None and not quiet:
        print(f"this run is complete already ({run.rounds} rounds); `fedfa run … --force` starts it anew")
    summary = summarise(run, run.experiment.algorithm["name"])
    scores = f"test {summary.metric} {100 * summary.last:.1f} % after round {summary.rounds}"
    if summary.gap is not None and summary.unseen is not None:
        scores += f", {100 * summary.unseen:.1f} % on unseen clients (gap {100 * summary.gap:+.1f})"
    if summary.best is not None:
        scores += f"; best by validation {100 * summary.best:.1f} % (round {summary.best_round})"
    print(f"{summary.label}: {scores}")
    if summary.refused:
        many = "1 update was" if summary.refused == 1 else f"{summary.refused} updates were"
        print(f"{many} left out; metrics.jsonl says which and why")
    print(f"results in {run.folder}")  # not by rich, which would take brackets in a path for markup


class _Screen(Watcher):
    """What the watchers below share: the run, and a place to be used in `with`."""

    run: Run | None = None

    def __enter__(self) -> _Screen:
        return self

    def __exit__(self, *_: object) -> None: ...

    def run_started(self, run: Run, round: int) -> None:
        self.run = run

    def noticed(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


class Silent(_Screen):
    """Nothing but the result."""


class Plain(_Screen):
    """For a pipe or a log: a line every few seconds, and for the first and last round."""

    def __init__(self) -> None:
        self._printed = 0.0

    def run_started(self, run: Run, round: int) -> None:
        super().run_started(run, round)
        print(opening(run, round), flush=True)

    def round_done(self, record: Record) -> None:
        assert self.run is not None
        rounds = self.run.experiment.rounds
        now = time.monotonic()
        if record.refused or record.round in (1, rounds) or now - self._printed > SECONDS_BETWEEN_LINES:
            self._printed = now
            print(f"round {record.round}/{rounds}{_told(record)}", flush=True)


class Lively(_Screen):
    """For a terminal: a progress bar with the time left, and a table of clients."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("round"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[doing]}"),
            TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=console,
        )  # fmt: skip
        self._losses: dict[str, Tensor | None] = {}
        self._refused: dict[str, int] = {}
        self._curves: dict[str, list[float]] = {}
        self._last: Record | None = None
        self._live: Live | None = None

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def run_started(self, run: Run, round: int) -> None:
        super().run_started(run, round)
        print(opening(run, round))
        lines = [line["test"]["clients"] for line in run.metrics if "test" in line]  # of a run that goes on
        self._curves = {name: [at[name] for at in lines if name in at] for name in run.provenance["samples"]}
        self._task = self._progress.add_task("", total=run.experiment.rounds, completed=round, doing="")
        self._live = Live(console=console, refresh_per_second=8, get_renderable=self._screen)  # draws at once
        self._live.start()

    def round_started(self, round: int, clients: Sequence[str]) -> None:
        self._chosen, self._finished = len(clients), 0

    def client_done(self, client: str, loss: Tensor | None, refused: str | None) -> None:
        self._finished += 1
        self._losses[client] = loss
        if refused is not None:
            self._refused[client] = self._refused.get(client, 0) + 1
        self._progress.update(self._task, doing=f"clients {self._finished}/{self._chosen}")

    def round_done(self, record: Record) -> None:
        self._progress.update(self._task, completed=record.round)
        if record.test is not None:
            self._last = record
            for name, score in record.test.clients.items():
                self._curves.setdefault(name, []).append(score.metric)

    def _screen(self) -> Group:
        return Group(self._clients(), self._progress)

    def _clients(self) -> Table:
        assert self.run is not None
        samples, metric = self.run.provenance["samples"], self.run.provenance["metric"]
        table = Table("client", "samples", "loss", f"test {metric}", "curve", box=None)
        shown = list(self._curves)[:12]
        for name in shown:
            loss, curve = self._losses.get(name), self._curves[name]
            held_out = " (held out)" if name in self.run.experiment.held_out else ""
            refused = f" [red]{self._refused[name]} left out[/red]" if name in self._refused else ""
            table.add_row(
                escape(name) + held_out + refused,
                str(samples.get(name, ["?"])[0]),
                "–" if loss is None else f"{float(loss):.3f}",
                f"{100 * curve[-1]:.1f} %" if curve else "–",
                sparkline(curve) if curve else "",
            )
        if len(self._curves) > len(shown):
            table.add_row(f"… {len(self._curves) - len(shown)} more")
        if self._last is not None and self._last.test is not None:
            mean = "–" if self._last.loss is None else f"{self._last.loss:.3f}"
            table.add_row("[bold]mean[/bold]", "", mean, f"[bold]{100 * self._last.test.mean:.1f} %[/bold]")
        return table


def opening(run: Run, round: int) -> str:
    """The first line: what is run, and where it goes."""
    config, clients = run.experiment, run.provenance["samples"]
    again = f", from round {round}" if round else ""
    return (
        f"{config.algorithm['name']} on {config.source['name']}, {len(clients)} clients, {config.network['name']}, "
        f"seed {config.seed}, {run.provenance['device']}{again}; results in {run.folder}"
    )


def _told(record: Record) -> str:
    text = "" if record.loss is None else f"  loss {record.loss:.3f}"
    if record.test is not None:
        text += f"  test {100 * record.test.mean:.1f} %"
        shown = list(record.test.clients.items())[:6]
        text += "  (" + ", ".join(f"{name} {100 * score.metric:.1f}" for name, score in shown) + ")"
    return text + "".join(f"  [{name} left out: {reason}]" for name, reason in record.refused.items())


def print_comparison(comparison: Comparison, png: Path | None, csv: Path | None) -> None:
    """A comparison in the terminal, with curves as rows of bars, and as files."""
    rows = comparison.rows()
    metric = comparison.runs[0].metric
    curves = [sparkline([value for _, value in summary.curve]) for summary in comparison.runs]
    if console.is_terminal:
        table = Table(
            title=f"test {metric}, % (clients and last: after the last round)", box=None, title_justify="left"
        )
        for number, name in enumerate([*rows[0], "curve"]):
            table.add_column(escape(name), justify="right" if number and name != "curve" else "left", no_wrap=True)
        for row, curve in zip(rows, curves, strict=True):
            table.add_row(*(escape(cell(value)) for value in row.values()), curve)
        console.print(table)
    else:
        print(f"test {metric}, % (clients and last: after the last round)\n{comparison}")
        for summary, curve in zip(comparison.runs, curves, strict=True):
            print(f"{curve}  {summary.label}")
    for line in comparison.notices:
        print(line)
    for path, write in ((png, comparison.write_png), (csv, comparison.write_csv)):
        if path is not None:
            written(path, write)


def written(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file, and say so."""
    put(path, write)
    print(f"wrote {path}")


def put(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file into a folder that need not be there yet; what goes wrong is the user's to put right."""
    if path.is_dir():
        raise UserError(f"cannot write {path}: it is a folder; name a file in it")
    if path.exists() and path.suffix in (".json", ".jsonl", ".toml", ".safetensors"):
        raise UserError(f"{path} is there, and stays as it is: runs, summaries and tables are such files; name another")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
    except ValueError as error:  # a kind of picture that matplotlib does not know
        raise UserError(f"cannot write {path}: {error}") from None
