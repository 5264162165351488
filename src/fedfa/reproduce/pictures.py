"""A table's convergence curves, drawn as the report draws them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from fedfa.files import beside
from fedfa.report.entry import Entry
from fedfa.report.figures import draw_convergence, style
from fedfa.report.study import Panel
from fedfa.report.study import Series as Drawn
from fedfa.reproduce.results import Results, Row
from fedfa.reproduce.table import suffix


def draw(results: Results, stem: Path) -> list[Path]:
    """A picture of the curves of every group, where matplotlib is there. Tables of costs have no curves, and in those
    of unseen clients a row has several."""
    if find_spec("matplotlib") is None or results.table.kind == "cost" or results.table.held_out:
        return []
    drawn = []
    for group, rows in results.groups.items():
        panel = _panel(results.table.titled(group), rows)
        if not panel.series:
            continue
        path = stem.with_name(f"{stem.name}{suffix(group)}-curves.png")
        with style(8), beside(path) as part:
            draw_convergence(panel, results.rule).savefig(part, format="png")
        drawn.append(path)
    return drawn


def _panel(title: str, rows: Sequence[Row]) -> Panel:
    series = []
    for row in rows:
        runs = [run for _, run in row.series.runs]
        entries = tuple(Entry(run.name, run.config, run.provenance, run.metrics, run.done) for run in runs)
        if entries:
            series.append(Drawn(row.series.name, entries))
    return Panel(title, tuple(series))
