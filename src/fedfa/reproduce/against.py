"""Figures with a setting along their axis, as the paper has them of p and α, and of the share of training samples."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedfa.experiment import COSMETIC, Experiment
from fedfa.report.beside import METHODS
from fedfa.report.compare import flat, told_apart
from fedfa.report.figures import INSIDE, ink
from fedfa.reproduce.results import AVERAGE, Results
from fedfa.reproduce.table import GROUPS
from fedfa.statistics import LEVEL, Difference, Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LETTER = 0.055
"""Inches that a letter of the smallest text takes at most."""


@dataclass(frozen=True)
class Point:
    """A method's number at one place of the axis, its difference to the reference, and the paper's number."""

    at: str
    found: Summary
    difference: Difference | None
    paper: float | None = None


@dataclass(frozen=True)
class Part:
    """One axis of a figure: what stands along it, in order, and a line of points for each method. The reference, where
    the setting does not concern it, is the same all along."""

    title: str
    places: tuple[str, ...]
    lines: Mapping[str, Sequence[Point]]
    level: float | None = None
    """The reference's mean; none where groups have one each."""


def parts(results: Results) -> list[Part]:
    """What the table's figure shows: for each of its axes the rows that differ in nothing else."""
    made = [
        _by_group(results, title) if setting == GROUPS else _by_setting(results, title, setting)
        for title, setting in results.table.against.items()
    ]
    return [part for part in made if part.lines]


def _by_group(results: Results, title: str) -> Part:
    lines: dict[str, list[Point]] = {}
    for group, rows in results.groups.items():
        paper = results.paper_beside(group)
        for row in rows:
            if (found := row.get(results.rule, AVERAGE)) is not None:
                known = None if paper is None else paper.average(row.series.name)
                lines.setdefault(row.series.name, []).append(Point(group, found, row.difference, known))
    return Part(title, tuple(results.groups), lines)


def _by_setting(results: Results, title: str, setting: str) -> Part:
    """Rows whose experiments differ in one setting alone are a line; rows by themselves are none."""
    by_rest: dict[str, dict[str, Point]] = {}
    firsts: dict[str, Experiment] = {}
    order: dict[str, float] = {}
    """Where a value stands: numbers by their size, others as they come."""
    level = None
    for row in (row for rows in results.groups.values() for row in rows):
        found = row.get(results.rule, AVERAGE)
        if found is None:
            continue
        experiment = row.series.cells[0].experiment
        value, rest, _ = _without(experiment, setting)
        if value is not None:
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            place = f"{value:g}" if number else _told(value)
            order.setdefault(place, value if number else len(order))
            by_rest.setdefault(rest, {})[place] = Point(place, found, row.difference)
            firsts.setdefault(rest, experiment)
        elif row.series.name == results.table.first and len(results.groups) == 1:
            level = found.mean
    lines = {rest: [by_place[place] for place in sorted(by_place, key=order.__getitem__)]
             for rest, by_place in by_rest.items() if len(by_place) > 1}  # fmt: skip
    names = told_apart([flat(_without(firsts[rest], setting)[2]) for rest in lines], "algorithm.name")
    places = {point.at for points in lines.values() for point in points}
    named = dict(zip(map(_method, names), lines.values(), strict=True))
    return Part(title, tuple(sorted(places, key=order.__getitem__)), named, level)


def _method(label: str) -> str:
    """A label that begins with an algorithm's name, which is written as people write it."""
    name, space, rest = label.partition(" ")
    return f"{METHODS.get(name, name)}{space}{rest}"


def _told(value: Any) -> str:
    """A value that is no number: a component by its name, a list by its parts."""
    if isinstance(value, Mapping):
        return str(value.get("name", value))
    return "+".join(map(_told, value)) if isinstance(value, (list, tuple)) else str(value)


def _without(experiment: Experiment, setting: str) -> tuple[Any, str, dict[str, Any]]:
    """An experiment's value of a setting, None where it has none, and all of the rest as one text, and as it is."""
    plain = experiment.model_dump(mode="json", exclude=COSMETIC | {"name", "seed"})
    where, _, key = setting.rpartition(".")
    holder = plain.get(where, {}) if where else plain
    value = holder.pop(key, None)
    plain.setdefault("algorithm", {"name": ""})  # where it stands along the axis itself
    return value, json.dumps(plain, sort_keys=True), plain


def draw_against(results: Results) -> Figure | None:
    """The figure: means over seeds, with the intervals of their differences to the reference, which are paired and so
    closer than those of means; and the paper's numbers, where it has any, as open circles."""
    from matplotlib.figure import Figure

    shown, first = parts(results), results.table.first
    if not shown:
        return None
    many = len({name for part in shown for name in part.lines}) > INSIDE
    figure = Figure(figsize=(3.4 * len(shown) + 1.2 * many, 3.4 if many else 2.8), dpi=300, layout="constrained")
    inks = {
        name: ink(number) for number, name in enumerate(dict.fromkeys(name for part in shown for name in part.lines))
    }
    for axes, part in zip(figure.subplots(1, len(shown), squeeze=False, sharey=True)[0], shown, strict=True):
        _draw(axes, part, first, inks)
    figure.axes[0].set_ylabel(f"test {results.metric}, %")
    points = [point for part in shown for points in part.lines.values() for point in points]
    told = []
    if any(point.difference is not None and point.difference.interval is not None for point in points):
        told.append(f"bars: {100 * LEVEL:.0f} % intervals of the differences to {first}, paired by seed")
    told += ["circles: the paper's single runs"] if any(point.paper is not None for point in points) else []
    figure.supxlabel(textwrap.fill("; ".join(told), int(figure.get_figwidth() / LETTER)), size=7)
    drawn = {
        name: handle for axes in figure.axes for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if many:
        figure.legend([*drawn.values()], [*drawn], fontsize=7, loc="outside right center")
    else:
        figure.legend([*drawn.values()], [*drawn], fontsize=7, loc="outside upper center", ncols=len(drawn))
    return figure


def _draw(axes: Axes, part: Part, first: str, inks: Mapping[str, tuple[str, Any]]) -> None:
    places = {at: number for number, at in enumerate(part.places)}
    if part.level is not None:
        axes.axhline(100 * part.level, color="#555555", linestyle="--", linewidth=1, label=first)
    for number, (name, points) in enumerate(part.lines.items()):
        colour, line = inks[name]
        aside = 0.05 * (number - (len(part.lines) - 1) / 2)
        at = [places[point.at] + aside for point in points]
        means = [100 * point.found.mean for point in points]
        axes.plot(at, means, color=colour, linestyle=line, marker="o", markersize=3, linewidth=1.2, label=name)
        for x, mean, point in zip(at, means, points, strict=True):
            if point.difference is not None and point.difference.interval is not None:
                ends = [mean + 100 * (end - point.difference.mean) for end in point.difference.interval]
                axes.plot((x, x), ends, color=colour, linewidth=0.8, alpha=0.6)
            if point.paper is not None:
                axes.plot(x, point.paper, "o", color=colour, markersize=4, markerfacecolor="none", linewidth=0)
    axes.set_xticks(range(len(part.places)), part.places)
    axes.set_xlabel(part.title)
    axes.margins(x=0.08)
    axes.grid(axis="y", alpha=0.3)
