"""A table's pictures: convergence curves, drawn as the report draws them, and its figure, where the paper has one."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedfa.files import beside
from fedfa.report.entry import Entry, InTurn
from fedfa.report.figures import draw_convergence, style
from fedfa.report.study import Panel
from fedfa.report.study import Series as Drawn
from fedfa.reproduce.against import draw_against
from fedfa.reproduce.results import Results, Row
from fedfa.reproduce.table import suffix

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(results: Results, stem: Path) -> list[Path]:
    """A picture of the curves of every group, and the table's figure, where matplotlib is there. Tables of costs have
    no curves."""
    if find_spec("matplotlib") is None or results.table.kind == "cost":
        return []
    drawn = []
    for group, rows in results.groups.items():
        panel = _panel(results.table.titled(group), rows)
        if not panel.series:
            continue
        with style(8):
            drawn.append(_save(draw_convergence(panel, results.rule), stem, f"{suffix(group)}-curves"))
    with style(8):
        if (figure := draw_against(results)) is not None:
            drawn.append(_save(figure, stem, "-figure"))
    return drawn


def _save(figure: Figure, stem: Path, ending: str) -> Path:
    path = stem.with_name(f"{stem.name}{ending}.png")
    with beside(path) as part:
        figure.savefig(part, format="png")
    return path


def _panel(title: str, rows: Sequence[Row]) -> Panel:
    """Rows as a report has them; of clients that are held out one after the other, those of a seed as one run."""
    series = []
    for row in rows:
        by_seed: dict[int, list[Entry]] = {}
        for cell, run in row.series.runs:
            if cell.seed in row.series.seeds:
                own: dict[str, Any] = {} if cell.held_out else {"held_out": []}  # the table's numbers are the others'
                entry = Entry(run.name, {**run.config, **own}, run.provenance, run.metrics, run.done)
                by_seed.setdefault(cell.seed, []).append(entry)
        entries = tuple(InTurn.of(found) if len(found) > 1 else found[0] for found in by_seed.values())
        if entries:
            series.append(Drawn(row.series.name, entries))
    return Panel(title, tuple(series))
