"""From the runs of a table to its numbers: over seeds, by client, paired with the reference row."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedfa.errors import UserError
from fedfa.paper import PaperTable
from fedfa.reproduce.summary import RunSummary
from fedfa.reproduce.table import Cell, Table
from fedfa.statistics import RULES, Difference, Rule, Summary, holm, paired, summarise

AVERAGE, SEEN, GAP = "average", "seen", "gap"
BySeed = dict[int, float]


@dataclass
class Series:
    """The runs of one row of a table."""

    group: str
    name: str
    cells: list[Cell] = field(default_factory=list)
    runs: list[tuple[Cell, RunSummary]] = field(default_factory=list)

    @property
    def missing(self) -> list[Cell]:
        there = {id(cell) for cell, _ in self.runs}
        return [cell for cell in self.cells if id(cell) not in there]

    @property
    def seeds(self) -> list[int]:
        """Seeds that are complete: with all held-out clients, where there are any."""
        lacking = {cell.seed for cell in self.missing}
        return sorted({cell.seed for cell in self.cells} - lacking)

    @property
    def wanted(self) -> int:
        return len({cell.seed for cell in self.cells})

    def columns(self) -> list[str]:
        """The clients; where one after the other is held out, those."""
        if self.cells[0].held_out:
            return list(dict.fromkeys(cell.held_out for cell in self.cells))
        return list(dict.fromkeys(name for _, run in self.runs for chosen in _some(run) for name in chosen.clients))

    def values(self, rule: Rule) -> dict[str, BySeed]:
        """Test metrics by column and seed. The average is over the columns, for complete seeds; where clients are
        held out, `seen` and `gap` are averages over the runs too."""
        found: dict[str, BySeed] = {}
        lists: dict[str, dict[int, list[float]]] = {AVERAGE: {}, SEEN: {}, GAP: {}}
        for cell, run in self.runs:
            chosen = run.selected.get(rule)
            if chosen is None:
                continue
            if cell.held_out:
                told = {AVERAGE: chosen.unseen, SEEN: chosen.mean, GAP: chosen.gap}
                if chosen.unseen is not None:
                    found.setdefault(cell.held_out, {})[cell.seed] = chosen.unseen
            else:
                told = {AVERAGE: chosen.mean}
                for name, value in chosen.clients.items():
                    found.setdefault(name, {})[cell.seed] = value
            for key, number in told.items():
                if number is not None and cell.seed in self.seeds:
                    lists[key].setdefault(cell.seed, []).append(number)
        means = {key: {seed: statistics.fmean(given) for seed, given in by.items()} for key, by in lists.items()}
        return {**found, **{key: by for key, by in means.items() if by}}


@dataclass(frozen=True)
class Row:
    """A row's numbers."""

    series: Series
    by_rule: Mapping[Rule, Mapping[str, Summary]]
    difference: Difference | None = None
    """To the reference row, by seed, in the average by the table's rule."""
    p: float | None = None
    """Of that, corrected for the number of rows in the group (Holm)."""

    def get(self, rule: Rule, column: str) -> Summary | None:
        return self.by_rule.get(rule, {}).get(column)


@dataclass(frozen=True)
class Results:
    """A table's numbers: rows by group."""

    table: Table
    rule: Rule
    groups: Mapping[str, Sequence[Row]]

    @property
    def series(self) -> list[Series]:
        return [row.series for rows in self.groups.values() for row in rows]

    @property
    def missing(self) -> list[Cell]:
        return [cell for series in self.series for cell in series.missing]

    @property
    def metric(self) -> str:
        """What is tested, as the runs say."""
        found = sorted({str(run.provenance["metric"]) for series in self.series for _, run in series.runs})
        if len(found) > 1:
            raise UserError(f"{self.table.name}: rows with different metrics do not compare: {', '.join(found)}")
        return found[0] if found else "metric"

    def columns(self, group: str) -> list[str]:
        """The clients of a group's runs; groups may be of different data."""
        return list(dict.fromkeys(name for row in self.groups[group] for name in row.series.columns()))

    def clients(self, group: str) -> int:
        """How many clients a run has: where some are drawn, seeds draw others, and `columns` has them all."""
        runs = (run for row in self.groups[group] for _, run in row.series.runs)
        return max((len(chosen.clients) for run in runs for chosen in _some(run)), default=0)

    def absent(self, group: str) -> dict[str, list[str]]:
        """Clients that settings hold out, with the rows of a group that do; not those that the table holds out, one
        after the other."""
        found: dict[str, list[str]] = {}
        for row in () if self.table.held_out else self.groups[group]:
            for name in row.series.cells[0].experiment.held_out:
                found.setdefault(name, []).append(row.series.name)
        return dict(sorted(found.items()))

    def others_clients(self, group: str) -> str:
        """In what the paper's numbers are of other clients than a group's runs; empty where they are not."""
        paper = self.table.paper_of(group)
        wanted, absent = set() if paper is None else {*paper.clients}, self.absent(group)
        columns = {*self.columns(group)}
        lacking, more = sorted(wanted - columns), sorted(columns - wanted)
        if not wanted or not columns or not (lacking or more or absent):
            return ""
        told = [f"without {', '.join(lacking)}"] * bool(lacking) + [f"with {', '.join(more)}"] * bool(more)
        told += [f"with {', '.join(absent)} held out"] * bool(absent and not lacking and not more)
        return " and ".join(told)

    def paper_beside(self, group: str) -> PaperTable | None:
        """The paper's table for a group, where it is of the same clients."""
        return None if self.others_clients(group) else self.table.paper_of(group)

    @property
    def refused(self) -> list[str]:
        """Which rows had updates left out, how many of how many, and why most of them."""
        told = []
        for series in self.series:
            lines = [line for _, run in series.runs for line in run.metrics]
            reasons = Counter(reason for line in lines for reason in line.get("refused", {}).values())
            if reasons:
                ((why, _),) = reasons.most_common(1)
                count = f"{reasons.total():,} of {sum(len(line['clients']) for line in lines):,}"
                name = ", ".join(part for part in (series.name, series.group) if part)
                told.append(f"{name} {count} ({'' if len(reasons) == 1 else 'mostly: '}{why})")
        return told

    @property
    def data_sets(self) -> int:
        """How many sets of data the runs are of that are to be of one, as far as they tell."""
        found: dict[str, set[str]] = {}
        for cell, run in (pair for series in self.series for pair in series.runs):
            found.setdefault(str(cell.experiment.source), set()).add(run.provenance.get("data", ""))
        return max((len(known - {""}) for known in found.values()), default=0)

    @property
    def mixed(self) -> str:
        """Which rows' runs are of another precision than most; empty where none is."""
        found = Counter(run.arithmetic for series in self.series for _, run in series.runs)
        if len(found) < 2:
            return ""
        (most, _), *others = found.most_common()
        told = []
        for kind, _ in others:
            names = []
            for series in self.series:
                name = ", ".join(part for part in (series.name, series.group) if part)
                count = sum(run.arithmetic == kind for _, run in series.runs)
                part = "" if count == len(series.runs) else f" ({count} of {len(series.runs)})"
                names += [f"{name}{part}"] if count else []
            told.append(f"in {kind} those of {', '.join(names)}")
        return f"Runs are in {most}, but {'; '.join(told)}"

    def machines(self) -> list[str]:
        """What the runs were computed on, each once."""
        return sorted({_machine(run) for series in self.series for _, run in series.runs})


def gather(table: Table, cells: Sequence[Cell], find: Callable[[Cell], RunSummary | None], rule: Rule) -> Results:
    """The numbers of those runs of a table that there are."""
    by_row: dict[tuple[str, str], Series] = {}
    for cell in cells:
        series = by_row.setdefault((cell.group, cell.row), Series(cell.group, cell.row))
        series.cells.append(cell)
        run = find(cell)
        if run is not None:
            series.runs.append((cell, run))
    groups: dict[str, list[Series]] = {}
    for series in by_row.values():
        groups.setdefault(series.group, []).append(series)
    return Results(table, rule, {group: _rows(members, table.first, rule) for group, members in groups.items()})


def _rows(members: Sequence[Series], first: str, rule: Rule) -> list[Row]:
    values = {series.name: {which: series.values(which) for which in RULES} for series in members}
    base = values.get(first, {}).get(rule, {}).get(AVERAGE, {})
    differences = {
        name: paired(by_rule[rule].get(AVERAGE, {}), base) for name, by_rule in values.items() if name != first
    }
    tested = {name: found.p for name, found in differences.items() if found is not None and found.p is not None}
    corrected = dict(zip(tested, holm(list(tested.values())), strict=True))
    return [
        Row(
            series,
            {
                which: {column: summarise(by.values()) for column, by in columns.items()}
                for which, columns in values[series.name].items()
            },
            differences.get(series.name),
            corrected.get(series.name),
        )
        for series in members
    ]


def hardware(series: Series) -> dict[int, str]:
    """What a seed's run was computed on, as far as its time and memory hang on it."""
    return {cell.seed: _machine(run) for cell, run in series.runs}


def _machine(run: RunSummary) -> str:
    hardware = run.provenance.get("hardware", "?")
    how = [str(run.provenance.get("engine", "?")), *([] if hardware == "CPU" else [str(run.config.get("precision"))])]
    return f"{hardware} ({', '.join(how)})"


def _some(run: RunSummary) -> list[Any]:
    """One of the run's selections, whichever there is."""
    return list(run.selected.values())[:1]


# Costs


def costs(series: Series) -> dict[str, BySeed]:
    """What a run took, by seed: bytes up and down a client and round (medians: what is sent once, in the first round,
    is `once`), seconds a round (median, without the first, which builds what the others use), peak memory; both without
    evaluation, in as far as rounds came without it, and not of runs that had the machine with others."""
    found: dict[str, BySeed] = {}
    for cell, run in series.runs:
        lines, alone = run.metrics, not run.provenance.get("beside")
        later = lines[1:] or lines
        timed = [line for line in later if "val" not in line and "test" not in line] or later
        told = {
            "up": _median([line.get("bytes_up") for line in lines]),
            "down": _median([line.get("bytes_down") for line in later]),
            "seconds": _median([line.get("seconds") for line in timed]) if alone else None,
            "memory": run.provenance.get("training_memory", run.provenance.get("memory")) if alone else None,
        }
        if told["down"] is not None:
            told["once"] = lines[0]["bytes_down"] - told["down"]
        for key, value in told.items():
            if value is not None:
                found.setdefault(key, {})[cell.seed] = float(value)
    return found


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


# Curves


def curve(series: Series, split: str) -> dict[int, Summary]:
    """The mean over clients by round, over the seeds that have that round: `split` is test, val or loss. Where clients
    are held out it is of those, as in the table: a seed's is the mean over its runs, each of which holds out one."""
    runs = len(series.columns()) if series.cells[0].held_out else 1
    by_round: dict[int, dict[int, list[float]]] = {}
    for cell, run in series.runs:
        which = "unseen" if cell.held_out else "mean"
        for line in run.metrics:
            value = line.get("loss") if split == "loss" else line.get(split, {}).get(which)
            if value is not None:
                by_round.setdefault(line["round"], {}).setdefault(cell.seed, []).append(value)
    whole = {
        number: [statistics.fmean(values) for values in by_seed.values() if len(values) == runs]
        for number, by_seed in sorted(by_round.items())
    }
    return {number: summarise(values) for number, values in whole.items() if values}
