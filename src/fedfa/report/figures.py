"""Figures, with matplotlib."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedfa.errors import UserError
from fedfa.statistics import LEVEL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fedfa.report.compare import Comparison
    from fedfa.report.study import Panel, Series
    from fedfa.statistics import Rule

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")
"""Paul Tol's bright scheme: told apart with any colour vision, and in print."""
LINES = (
    "-",
    "--",
    ":",
    "-.",
    (0, (9, 2)),
    (0, (1, 4)),
    (0, (7, 2, 1, 2, 1, 2)),
    (0, (3, 1)),
    (0, (9, 2, 1, 2)),
    (0, (5, 5)),
)
HATCHES = ("", "////", "----", "\\\\\\\\", "||||", "....", "xxxx", "++++", "oooo", "//..")
"""What tells lines and bars apart that have the same colour."""


@contextmanager
def style(size: float) -> Iterator[None]:
    """How figures look, with text of `size` points."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("a picture needs matplotlib: pip install 'fedfa[demo]'") from None
    settings: dict[Any, Any] = {
        "font.size": size,
        "axes.titlesize": size + 1,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "pdf.fonttype": 42,  # text that editors and publishers can read
        "text.parse_math": False,  # a client may be called $x$
    }
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a box stands for a sign that the font does not have
        yield


def draw_curves(comparison: Comparison, path: Path) -> Path:
    """Test metric by round on the left, and of every client after the last round on the right."""
    with style(10):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 4), dpi=150, layout="constrained")
        left, right = figure.subplots(1, 2)
        metric = comparison.runs[0].metric
        _curves(left, comparison)
        left.set(xlabel="round", ylabel=f"test {metric}, %, mean over clients", title="Convergence")
        _bars(right, comparison)
        right.set(ylabel=f"test {metric}, %", title="Clients, last round")
        left.legend()
        figure.savefig(path)
    return path


def _curves(axes: Axes, comparison: Comparison) -> None:
    from matplotlib.ticker import MaxNLocator

    for number, summary in enumerate(comparison.runs):
        rounds, values = zip(*summary.curve, strict=True)
        colour, line = ink(number)
        marker = "o" if len(rounds) < 3 else ""
        axes.plot(rounds, [100 * v for v in values], color=colour, linestyle=line, label=summary.label, marker=marker)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", alpha=0.3)


def _bars(axes: Axes, comparison: Comparison) -> None:
    names = [*map(comparison.title, comparison.clients), "mean"]
    width = 0.8 / len(comparison.runs)
    for number, summary in enumerate(comparison.runs):
        values = [100 * summary.clients.get(name, 0.0) for name in comparison.clients] + [100 * summary.last]
        at = [place + (number - (len(comparison.runs) - 1) / 2) * width for place in range(len(names))]
        axes.bar(at, values, width * 0.9, **_body(number))
    axes.set_xticks(range(len(names)), names, rotation=30 if len(names) > 6 else 0)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


# For a paper

INSIDE = 5
"""Curves whose names stand among them; those of more stand beside them, where they cover none."""


def draw_convergence(panel: Panel, rule: Rule) -> Figure:
    """Test metric by round: means over seeds, with 95 % intervals where they do not hide each other."""
    from matplotlib.ticker import MaxNLocator

    many, labels = len(panel.series) > INSIDE, _wrapped(panel)
    bands = False
    figure, axes = _column(*_with_names(3.4, labels) if many else (2.6, 3.4))
    for place, series in enumerate(panel.series):
        curve = _band(series, panel.primary)
        if curve is None:
            continue
        rounds, means, lows, highs = curve
        colour, line = ink(place)
        marker = "o" if len(rounds) < 3 else ""
        axes.plot(
            rounds, means, color=colour, linestyle=line, linewidth=1.2, label=labels[place], marker=marker, markersize=3
        )
        if len(series.used) > 1 and not many:
            axes.fill_between(rounds, lows, highs, color=colour, alpha=0.15, linewidth=0)
            bands = True
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    axes.set(xlabel="round", ylabel=_measured(panel))
    if bands:
        axes.set_xlabel(f"round (bands: {100 * LEVEL:.0f} % intervals over seeds)")
    axes.grid(axis="y", alpha=0.3)
    if many:
        figure.legend(fontsize=7, loc="outside right center")
    else:
        axes.legend(fontsize=7)
    return figure


def draw_clients(panel: Panel, rule: Rule) -> Figure:
    """Test metric of every client: means over seeds, with 95 % intervals."""
    names = [*panel.shown_clients, panel.primary]
    many, labels = len(panel.series) > INSIDE, _wrapped(panel)
    across = 3.4 if len(names) * len(panel.series) <= 24 else 7
    figure, axes = _column(*_with_names(across, labels) if many else (2.6, across))
    width = 0.8 / len(panel.series)
    for place, series in enumerate(panel.series):
        found = [series.summary(rule, name) for name in names]
        at = [number + (place - (len(panel.series) - 1) / 2) * width for number in range(len(names))]
        heights = [100 * summary.mean if summary else 0.0 for summary in found]
        axes.bar(at, heights, width * 0.92, **_body(place), label=labels[place])
        known = [
            (x, 100 * one.mean, 100 * (one.mean - one.low))
            for x, one in zip(at, found, strict=True)
            if one is not None and one.low is not None
        ]
        if known:
            x, y, half = zip(*known, strict=True)
            axes.errorbar(x, y, half, fmt="none", ecolor="black", elinewidth=0.8)
    axes.set_xticks(
        range(len(names)), [panel.client_title(name) for name in names], rotation=30 if len(names) > 6 else 0
    )
    axes.set(ylabel=_measured(panel), ylim=(0, 100))
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    if many:
        figure.legend(fontsize=7, loc="outside right center")
    else:
        figure.legend(fontsize=7, loc="outside upper center", ncols=3 if max(map(len, labels)) < 14 else 2)
    return figure


def _wrapped(panel: Panel) -> list[str]:
    """Methods' names, in lines that a legend has room for."""
    return [textwrap.fill(series.label, 28, break_long_words=False) for series in panel.series]


def _with_names(width: float, labels: Sequence[str]) -> tuple[float, float]:
    """Height and width of a figure with so wide a chart and all names to its right, in inches."""
    lines = [line for label in labels for line in label.splitlines()]
    return max(2.6, 0.4 + 0.125 * len(lines) + 0.06 * len(labels)), width + 0.9 + 0.055 * max(map(len, lines))


def _measured(panel: Panel) -> str:
    return f"test {panel.metric}, %{', unseen clients' if panel.held_out else ''}"


def draw_differences(panel: Panel, rule: Rule) -> Figure:
    """Differences to what methods are compared with, paired by seed, with 95 % intervals."""
    compared = panel.compared(rule)
    places = {series: place for place, series in enumerate(panel.series)}
    names = [textwrap.fill(one.series.label, 22, break_long_words=False) for one in compared]
    figure, axes = _column(0.9 + max(sum(0.14 + 0.11 * len(name.splitlines()) for name in names), 0.5))
    for row, one in enumerate(compared):
        colour = ink(places[one.series])[0]
        found = one.difference
        if found.low is not None and found.high is not None:
            axes.plot((100 * found.low, 100 * found.high), (row, row), color=colour, linewidth=1.5)
        axes.plot(100 * found.mean, row, "o", color=colour, markersize=4)
    axes.axvline(0, color="#555555", linewidth=0.8)
    axes.set_yticks(range(len(compared)), names, fontsize=7)
    axes.set_ylim(len(compared) - 0.5, -0.5)
    told = textwrap.fill(f"difference to {panel.base_title}, points", 34, break_long_words=False)
    axes.set(xlabel=told)
    axes.grid(axis="x", alpha=0.3)
    return figure


FIGURES: dict[str, Callable[[Panel, Rule], Figure]] = {
    "convergence": draw_convergence,
    "clients": draw_clients,
    "differences": draw_differences,
}


def _column(height: float, width: float = 3.4) -> tuple[Figure, Axes]:
    """A figure as wide as a column of a paper, in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=300, layout="constrained")
    return figure, figure.subplots()


def ink(place: int) -> tuple[str, Any]:
    """The colour and the line of one of several methods."""
    return COLOURS[place % len(COLOURS)], LINES[place // len(COLOURS) % len(LINES)]


def _body(place: int) -> dict[str, Any]:
    """How the bars of one of several methods look."""
    return {"color": ink(place)[0], "hatch": HATCHES[place // len(COLOURS) % len(HATCHES)],
            "edgecolor": "white", "linewidth": 0}  # fmt: skip


def _band(series: Series, who: str) -> tuple[list[int], list[float], list[float], list[float]] | None:
    """Rounds, means and the ends of intervals, in per cent."""
    from fedfa.statistics import summarise

    curves = [curve for entry in series.used if (curve := entry.curve("test", who))]
    rounds = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
    if not rounds:
        return None
    found = [summarise(100 * curve[round] for curve in curves) for round in rounds]
    lows = [max(0.0, one.mean if one.low is None else one.low) for one in found]
    highs = [min(100.0, one.mean if one.high is None else one.high) for one in found]
    return rounds, [one.mean for one in found], lows, highs
