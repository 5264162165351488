"""Figures, with matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fedfa.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fedfa.report.compare import Comparison

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")
"""Paul Tol's bright scheme: told apart with any colour vision, and in print."""


def draw_curves(comparison: Comparison, path: Path) -> Path:
    """Test metric by round on the left, and of every client after the last round on the right."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("a picture needs matplotlib: pip install 'fedfa[demo]'") from None
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(10, 4), dpi=150, layout="constrained")
        left, right = figure.subplots(1, 2)
        metric = comparison.runs[0].metric
        _curves(left, comparison)
        left.set(xlabel="round", ylabel=f"test {metric}, %, mean over clients", title="Convergence")
        _bars(right, comparison)
        right.set(ylabel=f"test {metric}, %", title="Clients, last round")
        left.legend(frameon=False)
        figure.savefig(path)
    return path


def _curves(axes: Axes, comparison: Comparison) -> None:
    from matplotlib.ticker import MaxNLocator

    for number, summary in enumerate(comparison.runs):
        rounds, values = zip(*summary.curve, strict=True)
        colour = COLOURS[number % len(COLOURS)]
        axes.plot(
            rounds, [100 * v for v in values], color=colour, label=summary.label, marker="o" if len(rounds) < 3 else ""
        )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", alpha=0.3)


def _bars(axes: Axes, comparison: Comparison) -> None:
    names = [*map(comparison.title, comparison.clients), "mean"]
    width = 0.8 / len(comparison.runs)
    for number, summary in enumerate(comparison.runs):
        values = [100 * summary.clients.get(name, 0.0) for name in comparison.clients] + [100 * summary.last]
        at = [place + (number - (len(comparison.runs) - 1) / 2) * width for place in range(len(names))]
        axes.bar(at, values, width * 0.9, color=COLOURS[number % len(COLOURS)])
    axes.set_xticks(range(len(names)), names, rotation=30 if len(names) > 6 else 0)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
