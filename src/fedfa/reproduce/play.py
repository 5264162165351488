"""`fedfa reproduce`: from tables' names to their runs, and from those to the tables."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

from fedfa.data.federation import fingerprint
from fedfa.errors import UserError, some
from fedfa.experiment import Experiment
from fedfa.files import check_folder
from fedfa.paper import claims
from fedfa.registries import Reader
from fedfa.report.beside import single_runs
from fedfa.report.console import console
from fedfa.reproduce.names import changes, file_name
from fedfa.reproduce.pictures import draw
from fedfa.reproduce.progress import Overall
from fedfa.reproduce.render import curves_csv, show, tables, write_files
from fedfa.reproduce.results import AVERAGE, Results, gather
from fedfa.reproduce.summary import (
    RunSummary,
    arithmetic,
    arithmetic_of,
    find_summaries,
    identity,
    no_collection,
    summary_of,
    write_summary,
)
from fedfa.reproduce.table import (
    Cell,
    Choice,
    Table,
    check_data,
    chosen_rows,
    chosen_variant,
    describe,
    find_data,
    find_table,
    lay_out,
    read_toml,
    says_precision,
    table_names,
    tell_unread,
    with_rounds,
)
from fedfa.runs import Run
from fedfa.statistics import RULES, Rule
from fedfa.together import run_together


@dataclass(frozen=True)
class Wish:
    """What the command line asks for besides the table and settings."""

    seeds: int | None = None
    only: str = ""
    data: Path | None = None
    rounds: int | None = None
    out: Path = Path("runs")
    at_once: int = 0
    variant: str = ""
    tuned: Path | None = None
    rule: str = ""
    table_only: bool = False
    sources: tuple[Path, ...] = ()
    summaries: Path | None = None
    quiet: bool = False


def list_tables() -> None:
    """All tables: name, data, number of runs, what it is."""
    lines = [("table", "data", "runs", ""), *describe(table_names())]
    widths = [max(len(line[place]) for line in lines) for place in range(3)]
    for name, data, runs, title in lines:
        console.print(
            f"{name:<{widths[0]}}  {data:<{widths[1]}}  {runs:>{widths[2]}}  {title}",
            soft_wrap=True, highlight=False, markup=False,
        )  # fmt: skip


class _Known:
    """The complete runs that there are in some folders, by what they are runs of; of those of the same, those of the
    precision that `preferred` is go first, then those in the first folder, and then the latest. Runs of other data
    than those `at_hand` do not count, as far as both are known, nor, where a precision is to be met `precisely`, those
    of another one."""

    def __init__(self, there: Mapping[str, Sequence[RunSummary | Run]], precisely: bool, at_hand: bool) -> None:
        self.precisely, self._at_hand = precisely, at_hand
        self.preferred = ""
        self._found = {name: list(runs) for name, runs in there.items()}
        self._names: dict[str, str] = {}
        self._data: dict[str, str | None] = {}
        self.of_other_data: set[str] = set()
        """Runs that do not count for that."""
        self.ambiguous = False
        """Whether runs of one experiment are of several sets of data, and nobody knows which is meant."""

    def name(self, experiment: Experiment) -> str:
        if experiment.title not in self._names:
            self._names[experiment.title] = identity(experiment)
        return self._names[experiment.title]

    def prefer(self, cells: Sequence[Cell]) -> None:
        """Let those of the precision go first that most of these cells have a run of: numbers are to be alike."""
        kinds = ({arithmetic_of(run) for run in self._found.get(self.name(cell.experiment), [])} for cell in cells)
        counted = Counter(kind for found in kinds for kind in sorted(found))
        self.preferred = counted.most_common(1)[0][0] if counted else ""

    def find(self, cell: Cell) -> RunSummary | None:
        runs = self._found.get(self.name(cell.experiment), [])
        if not self._at_hand and len({run.provenance.get("data") for run in runs} - {None}) > 1:
            self.ambiguous = True
        ranked = sorted(enumerate(runs), key=lambda one: (arithmetic_of(one[1]) == self.preferred, one[0]))
        for place, found in reversed(ranked):
            if self.precisely and cell.experiment.precision not in (found.config["precision"], arithmetic_of(found)):
                continue
            own = found.provenance.get("data")
            if own is None or self._data_of(cell.experiment) in (None, own):
                summary = summary_of(found) if isinstance(found, Run) else found
                runs[place] = summary
                return summary
            self.of_other_data.add(found.folder.name if isinstance(found, Run) else found.name)
        return None

    def _data_of(self, experiment: Experiment) -> str | None:
        """What the data are that the experiment would be run on; None where that is not known."""
        key = str(experiment.source)
        if self._at_hand and key not in self._data:
            source, pool = experiment.build("source"), None
            with contextlib.suppress(UserError, ImportError):  # which is told where the data are needed
                pool = source.pool() if isinstance(source, Reader) else None
            self._data[key] = None if pool is None else fingerprint(pool.images, pool.labels, pool.classes)
        return self._data.get(key)

    def add(self, experiment: Experiment, run: Run) -> None:
        own = run.provenance.get("data")
        if own is not None and self._data_of(experiment) not in (None, own):
            raise UserError(
                f"{run.folder} was played on other data than {experiment.source.get('path') or 'its source'} has now: "
                "put those back, or delete the folder to play it anew"
            )
        self._found.setdefault(self.name(experiment), []).append(run)

    def write(self, cell: Cell, folder: Path) -> None:
        found = self.find(cell)
        if found is not None:
            write_summary(found, folder)


@dataclass(frozen=True)
class _Planned:
    """A table as it was asked for, and which of its runs there are."""

    table: Table
    choice: Choice
    cells: list[Cell]
    rule: Rule
    known: _Known
    tuned: Tuned

    @cached_property
    def changed(self) -> dict[str, Any]:
        """What makes other runs of it than the table's own; of a search, what all of its trials had."""
        common = {key: value for key, value in self.tuned.settings.items() if key not in self.tuned.searched}
        asked = {**common, **self.choice.overrides}
        return changes(self.table, replace(self.choice, overrides=asked, tuned=None))

    @property
    def apart(self) -> bool:
        """Whether its runs have a process each: costs are not to be measured beside others."""
        return self.table.kind == "cost"

    def missing(self) -> list[Cell]:
        return [cell for cell in self.cells if self.known.find(cell) is None]


def reproduce(names: Sequence[str], overrides: dict[str, Any], wish: Wish) -> list[Results]:
    """Run what is missing of some tables, and make the tables. Runs of all of them go side by side, and one that two
    tables have is played once."""
    if wish.summaries is not None:
        check_folder(wish.summaries, "--summaries")
    check_folder(wish.out / "tables", "--out")

    @cache
    def there() -> dict[str, list[RunSummary | Run]]:
        """What there is in the folders, read once for all tables."""
        found: dict[str, list[RunSummary | Run]] = {}
        for folder in reversed(wish.sources or tuple(filter(Path.is_dir, [wish.out]))):
            with no_collection():
                inside = find_summaries(folder, bool(wish.table_only or wish.sources))
            for name, runs in inside.items():
                found.setdefault(name, []).extend(runs)
        return found

    plans = [_plan(name, overrides, wish, there) for name in dict.fromkeys(names)]
    if twice := [name for name, count in Counter(plan.table.name for plan in plans).items() if count > 1]:
        raise UserError(f"two tables are called {twice[0]}: their files would have one name")
    tell_unread([plan.table for plan in plans], wish.data)

    def ended(experiment: Experiment, run: Run) -> None:
        for plan in plans:
            plan.known.add(experiment, run)
        if wish.summaries is not None:  # now: who knows how long this may go on
            write_summary(summary_of(run), wish.summaries)

    failed: dict[str, UserError] = {}
    if not wish.table_only:
        for apart in (True, False):  # what is measured by itself may serve other tables, but not theirs it
            missing = [(plan, cell) for plan in plans if plan.apart == apart for cell in plan.missing()]
            runs = _distinct([(label(cell, plan.table.name if len(plans) > 1 else ""), cell) for plan, cell in missing])
            if runs:
                failed |= play_all(runs, ended, out=wish.out, at_once=wish.at_once, apart=apart, quiet=wish.quiet)
    made = []
    for plan in plans:
        results = gather(plan.table, plan.cells, plan.known.find, plan.rule)
        if failed and not any(series.runs for series in results.series):
            continue  # nothing came of it: a table that is there stays as it is
        if wish.summaries is not None:
            for cell in plan.cells:
                plan.known.write(cell, wish.summaries)
        _make(results, plan, wish)
        made.append(results)
    complain(failed)
    return made


def _plan(
    name: str,
    overrides: dict[str, Any],
    wish: Wish,
    there: Callable[[], Mapping[str, Sequence[RunSummary | Run]]],
) -> _Planned:
    table = find_table(name)
    rule = _rule(wish.rule, table.rule)
    only = split_names(wish.only)
    rows = chosen_rows(table, only)
    chosen_variant(table, wish.variant)  # before data are asked for
    tuned = Tuned() if wish.tuned is None else read_tuned(wish.tuned, table, wish.variant, rows)
    where = {} if wish.table_only else find_data(table, wish.data)
    overrides = with_rounds(overrides, wish.rounds)
    choice = Choice(wish.seeds, only, wish.variant, {**where, **overrides}, tuned.rows)
    for key in sorted(tuned.searched & overrides.keys()):
        raise UserError(f"{key} was searched for by {wish.tuned}: leave it out, or leave --tuned out")
    precisely = says_precision(table, choice)
    cells = lay_out(table, choice)
    known = _Known(there(), precisely, not wish.table_only)
    known.prefer(cells)
    plan = _Planned(table, choice, cells, rule, known, tuned)
    missing = [] if wish.table_only else plan.missing()
    if missing:
        check_data(table, missing[0].experiment)
        try_out({cell.row: cell.experiment for cell in missing}, wish.out)
    if missing and not precisely:
        _tell_precision(table.name, missing[0].experiment, [known.find(cell) for cell in cells])
    if known.of_other_data:
        is_, does = ("is", "does") if len(known.of_other_data) == 1 else ("are", "do")
        told = f"{len(known.of_other_data)} of the runs that are there {is_} of other data, and {does} not count"
        print(f"{table.name}: {told}", file=sys.stderr)
    return plan


def _tell_precision(table: str, coming: Experiment, found: Sequence[RunSummary | None]) -> None:
    """Say so where runs that are there are of another precision than those that are about to be played beside them."""
    from fedfa.simulate import find_device

    with contextlib.suppress(UserError):  # which is told where the device is needed
        own = arithmetic(coming.precision, find_device(coming.device).type)
        others = Counter(run.arithmetic for run in found if run is not None and run.arithmetic != own)
        if others:
            ((most, _),) = others.most_common(1)
            are = "of the runs that are there is" if others.total() == 1 else "of the runs that are there are"
            told = f"{others.total()} {are} in {some(list(others))}, and those to come in {own}"
            print(f"{table}: {told}: precision={most} has all alike", file=sys.stderr)


def try_out(experiments: Mapping[str, Experiment], out: Path) -> None:
    """What is wrong with every row is said once, before any is played."""
    from fedfa.simulate import Parts, find_device, find_engine

    wrong: list[UserError] = []
    for experiment in experiments.values():
        try:
            find_engine(experiment, find_device(experiment.device))
            Parts.build(experiment)
            break
        except UserError as error:
            wrong.append(error)
    else:
        raise wrong[0]
    check_folder(out, "--out")


def _distinct(cells: Sequence[tuple[str, Cell]]) -> dict[str, Experiment]:
    """Runs by their labels, each once, though two rows may be the same."""
    first = {cell.experiment.title: name for name, cell in reversed(cells)}
    return {name: cell.experiment for name, cell in cells if first[cell.experiment.title] == name}


def complain(failed: Mapping[str, UserError]) -> None:
    """One line, if runs failed."""
    if failed:
        name, error = next(iter(failed.items()))
        raise UserError(f"{len(failed)} {'runs' if len(failed) > 1 else 'run'} failed, such as {name}: {error}")


def split_names(only: str) -> tuple[str, ...]:
    """Rows' names, separated by commas; commas in braces, as in {1,2}, separate nothing."""
    parts, depth = [""], 0
    for sign in only:
        depth += {"{": 1, "}": -1}.get(sign, 0)
        if sign == "," and not depth:
            parts.append("")
        else:
            parts[-1] += sign
    return tuple(part.strip() for part in parts if part.strip())


def _rule(asked: str, own: Rule) -> Rule:
    if not asked:
        return own
    for rule in RULES:
        if rule == asked:
            return rule
    raise UserError(f"--rule is {', '.join(RULES)}, not {asked!r}")


@dataclass(frozen=True)
class Tuned:
    """What a search has found."""

    rows: Mapping[str, dict[str, Any]] | None = None
    """The settings of rows; None without a search."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What all of its trials had of the command line; rows have it too."""
    rounds: int | None = None
    """The rounds of its trials, if not the table's own."""
    searched: frozenset[str] = frozenset()
    """What was drawn."""


def read_tuned(path: Path, table: Table, variant: str, rows: Sequence[str]) -> Tuned:
    """What `fedfa tune` has written for rows of a table."""
    content = read_toml(path)
    there, rounds, settings = content.get("rows", {}), content.get("rounds"), content.get("settings", {})
    tried = content.get("tried", {})
    if not isinstance(there, dict) or not all(isinstance(settings, dict) for settings in there.values()):
        raise UserError(f"{path} is not a file of `fedfa tune`: [rows.NAME] has the settings of a row")
    if rounds is not None and (type(rounds) is not int or rounds < 1):
        raise UserError(f"{path} is not a file of `fedfa tune`: rounds is a number from 1 on")
    if not isinstance(settings, dict):
        raise UserError(f"{path} is not a file of `fedfa tune`: [settings] has what all trials had")
    try:
        searched = frozenset(key for row in rows for trial in tried.get(row, ()) for key in trial) - {"validation"}
    except (AttributeError, TypeError):
        raise UserError(f"{path} is not a file of `fedfa tune`: [tried] has a list of trials a row") from None
    asked = {"table": table.name, "variant": variant or table.variant}
    for key, value in asked.items():
        if content.get(key) != value:
            raise UserError(f"{path} was tuned for {key} {content.get(key)!r}, not {value!r}")
    found: dict[str, dict[str, Any]] = content.get("rows", {})
    lacking = [row for row in rows if row not in found]
    if lacking:
        raise UserError(f"{path} has no settings for {some(lacking)}: a comparison is fair if all rows are tuned")
    return Tuned({row: found[row] for row in rows}, settings, rounds, searched)


def play_all(
    runs: Mapping[str, Experiment],
    ended: Callable[[Experiment, Run], None],
    *,
    out: Path,
    at_once: int = 0,
    apart: bool = False,
    quiet: bool = False,
    split: Literal["val", "test"] = "test",
) -> dict[str, UserError]:
    """Play runs, which have labels, under one bar, with their metric on a `split`; `ended` gets each that is complete.
    Gives why some could not be."""
    labels = {experiment.title: name for name, experiment in runs.items()}
    failed: dict[str, UserError] = {}
    done = 0
    with Overall(labels, sum(experiment.rounds for experiment in runs.values()), quiet, split) as overall:
        try:
            for experiment, outcome in run_together(
                list(runs.values()), root=out, watch=overall.watch, at_once=at_once, apart=apart
            ):
                error = outcome if isinstance(outcome, UserError) else None
                if isinstance(outcome, Run):
                    try:
                        ended(experiment, outcome)
                        done += 1
                    except UserError as refused:  # of other data, say
                        error = refused
                if error is not None:
                    failed[labels[experiment.title]] = error
                overall.ended(experiment, error)
        except KeyboardInterrupt:
            so_far = f"{done} of these {len(runs)} runs {'is' if done == 1 else 'are'} done"
            print(f"stopped; {so_far}: the same command goes on", file=sys.stderr)
            raise
    return failed


def label(cell: Cell, table: str = "") -> str:
    """What a run is called while it goes."""
    parts = [table, cell.row, cell.group, f"without {cell.held_out}" if cell.held_out else "", f"seed {cell.seed}"]
    return ", ".join(part for part in parts if part)


def _make(results: Results, plan: _Planned, wish: Wish) -> None:
    table, choice, cells = plan.table, plan.choice, plan.cells
    variant = choice.variant if choice.variant not in ("", table.variant) else ""
    told = f", variant {variant!r} ({table.variants[variant].why})" if variant else ""
    kinds = sorted({cell.experiment.rounds for cell in cells})
    rounds = counted(kinds[0]) if len(kinds) == 1 else f"{kinds[0]} to {kinds[-1]} rounds"
    if choice.tuned is not None:
        over = counted(plan.tuned.rounds or table_rounds(table, choice))
        told += f", tuned on validation data{f' over {over}' if over != rounds else ''}"
    told += f", {rounds}"
    others = [f"{key}={value}" for key, value in plan.changed.items() if key != "rounds"]
    told += f", with {', '.join(others)}" if others else ""
    made = tables(results, told)
    notes = _notes(results, plan)
    for one in made:
        show(one)
        print()
    for note in notes:
        print(note)
    stem = wish.out / "tables" / file_name(table, choice, plan.changed, plan.rule)
    if not any(series.runs for series in results.series):
        print("no run of it is there, so no file was written")
        return
    curves = curves_csv(results)
    written = [*write_files(stem, table.name, made, notes, curves), *draw(results, stem)]
    print(f"wrote {', '.join(str(path) for path in written)}")


def table_rounds(table: Table, choice: Choice) -> int:
    """How many rounds the table has by itself."""
    own = {key: value for key, value in choice.overrides.items() if key != "rounds"}
    return lay_out(table, replace(choice, seeds=1, overrides=own))[0].experiment.rounds


def counted(rounds: int) -> str:
    return f"{rounds} {'rounds' if rounds > 1 else 'round'}"


def _notes(results: Results, plan: _Planned) -> list[str]:
    """What stands below the table."""
    table = plan.table
    notes = list(table.notes)
    if table.cost_of:
        notes += claims(table.cost_of)
    if results.refused:
        notes.append(f"Updates were left out: {'; '.join(results.refused)}.")
    for group, rows in results.groups.items() if table.kind != "cost" else ():
        within, others = f"{group}: " if group else "", results.others_clients(group)
        if others:
            notes.append(f"{within}The paper's numbers are of other clients: these runs are {others}.")
        for client, without in results.absent(group).items():
            if len(without) < len(rows):
                notes.append(f"{within}{client} took no part in {some(without)}, whose average is of the others.")
        paper = results.paper_beside(group)
        if paper is not None:
            beside = {row.series.name: (paper.average(row.series.name), row.get(results.rule, AVERAGE)) for row in rows}
            told = single_runs(beside)
            notes += [f"{within}{told}"] if told else []
    if plan.known.ambiguous or results.data_sets > 1:
        notes.append("These runs are of several sets of data: make the table --from runs of one of them.")
    missing = results.missing
    if missing:
        wanted = sum(len(series.cells) for series in results.series)
        named = some([repr(label(cell)) for cell in missing])
        notes.append(f"{len(missing)} of {wanted} runs {'is' if len(missing) == 1 else 'are'} missing: {named}.")
    if results.mixed and not plan.known.precisely:
        notes.append(f"{results.mixed}: a part of a difference may be the precision's.")
    machines = results.machines()
    if machines:
        notes.append(f"Computed on {'; '.join(machines)}.")
    return notes
