"""A table of the paper as data: a TOML file in `experiments/` that says which runs it is made of."""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedfa.errors import UserError, some
from fedfa.experiment import Experiment, builtin_experiments, load
from fedfa.paper import PaperTable, paper_table
from fedfa.registries import Reader
from fedfa.registry import nearest
from fedfa.statistics import MOST_SEEDS, Rule

Settings = dict[str, Any]
GROUPS = "groups"
"""What a figure has along its axis where that is not a setting: the table's groups."""


SAID = {
    "dict_type": "is settings in braces, such as {{lr = 0.1}}, not {}",
    "tuple_type": "is a list, such as ['a', 'b'], not {}",
    "string_type": "is text in quotes, not {}",
    "int_type": "is a whole number, not {}",
    "missing": "is missing",
    "too_short": "has no entry",
}
"""What is wrong with a table's file, in its own words and not in Python's."""


class Variant(BaseModel):
    """Another reading of the same table, where the paper contradicts itself or the authors' code."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    why: str
    settings: Settings = {}
    rows: dict[str, Settings] = {}


class Table(BaseModel):
    """What a table is made of. Settings are those of an experiment, as on the command line (`algorithm.p`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    title: str
    base: str
    """The benchmark that all runs share: a file in `experiments/benchmarks`, or a built-in experiment."""
    needs: str = ""
    """The data set's name for people; empty where the data are embedded."""
    folder: str = ""
    """The folder that the data set usually lies in; empty where the data are embedded."""
    stand_in: str = ""
    """The table that takes this one's place where its data are not to be had."""
    kind: Literal["scores", "cost"] = "scores"
    seeds: int = Field(default=5, ge=1, le=MOST_SEEDS)
    rule: Rule = "last"
    reference: str = ""
    """The row that others are compared with, seed by seed; the first, unless named."""
    paper: str | dict[str, str] = ""
    """The paper's table; for groups, that of each."""
    cost_of: Literal["", "alexnet", "unet"] = ""
    """The network whose cost the paper speaks of."""
    settings: Settings = {}
    rows: dict[str, Settings] = Field(min_length=1)
    groups: dict[str, Settings] = {"": {}}
    """Sections of the table, each with all rows."""
    held_out: tuple[str, ...] = ()
    """Clients that are held out, one after the other: the table then shows how each does unseen."""
    variant: str = "paper"
    """What the table is called as it stands, beside its variants."""
    variants: dict[str, Variant] = {}
    notes: tuple[str, ...] = ()
    against: dict[str, str] = {}
    """What the table's figure has along its axes: titles, and the settings in which rows differ, or `groups`."""

    @model_validator(mode="after")
    def _makes_sense(self) -> Table:
        rows, groups = self.rows, self.groups
        if not re.fullmatch(r"[\w.-]+", self.name):
            raise ValueError(f"the name {self.name!r}: letters, digits, '.', '_' and '-', since files are named by it")
        if odd := [name for name in (self.title, *rows) if not name.strip() or not name.isprintable()]:
            raise ValueError(f"the name {odd[0]!r}: titles and rows' names are printed, in one line")
        if odd := [name for name in groups if name and not name.isprintable()]:
            raise ValueError(f"the name {odd[0]!r}: groups' names are printed, in one line")
        if not groups:
            raise ValueError("[groups] is empty: leave it out")
        if self.reference and self.reference not in rows:
            raise ValueError(f"reference: there is no row {self.reference!r}; {nearest(self.reference, rows)}")
        for name, variant in self.variants.items():
            if unknown := [row for row in variant.rows if row not in rows]:
                raise ValueError(f"variant {name}: there is no row {unknown[0]!r}; {nearest(unknown[0], rows)}")
        if isinstance(self.paper, dict) and (unknown := [group for group in self.paper if group not in groups]):
            raise ValueError(f"paper: there is no group {unknown[0]!r}; {nearest(unknown[0], groups)}")
        endings = [suffix(group) for group in groups]
        if len({*endings}) < len(groups):
            raise ValueError("two groups differ in signs alone, and their files would have one name")
        if taken := [ending[1:] for ending in endings if ending.endswith(("-curves", "-paper", "-figure"))]:
            raise ValueError(f"a group may not be called {taken[0]}, as another of the table's files is")
        given = [self.settings, *rows.values(), *groups.values(), *(one.settings for one in self.variants.values())]
        if any("seed" in settings for settings in given):
            raise ValueError("seed is not a setting of a table: seeds says how many, from 0 on")
        varied = {setting for setting in self.against.values() if setting == GROUPS or _varied(setting, rows)}
        if unknown := sorted({*self.against.values()} - varied):
            raise ValueError(f"against: no two rows differ in {unknown[0]!r}")
        if named := [name for name in self.variants if not re.fullmatch(r"[\w.-]+", name)]:
            raise ValueError(f"the name {named[0]!r}: letters, digits, '.', '_' and '-', since files are named by it")
        if self.variant in self.variants:
            raise ValueError(f"variant {self.variant}: that is what the table is called as it stands")
        if len({*self.held_out}) < len(self.held_out) or "" in self.held_out:
            raise ValueError("held_out: names of clients, each once")
        if self.held_out and any("held_out" in settings for settings in given):
            raise ValueError("held_out is said for the table: no settings may say it once more")
        return self

    @property
    def first(self) -> str:
        """The reference row."""
        return self.reference or next(iter(self.rows))

    def titled(self, group: str) -> str:
        """The title of a group's part."""
        return f"{self.title}, {group}" if group else self.title

    def paper_of(self, group: str) -> PaperTable | None:
        """The paper's table for a group."""
        name = self.paper if isinstance(self.paper, str) else self.paper.get(group, "")
        return paper_table(name) if name else None

    def runs(self) -> int:
        """How many runs it takes."""
        return len(self.rows) * len(self.groups) * max(len(self.held_out), 1) * self.seeds


def _varied(setting: str, rows: Mapping[str, Settings]) -> bool:
    """Whether some rows say a setting, and not all the same: one that leaves it out has its default."""
    where, _, key = setting.rpartition(".")
    values = set()
    for row in rows.values():
        holder = row.get(where) if where else row
        inside = holder.get(key) if isinstance(holder, Mapping) else None
        values.add(str(row.get(setting, inside)))
    return len(values) > 1


def suffix(group: str) -> str:
    """What a group's files have behind the table's name; nothing where a table has no groups."""
    name = "".join(sign if sign.isalnum() or sign in ".-" else "-" for sign in group).strip("-")
    return f"-{name}" if name else ""


@dataclass(frozen=True)
class Cell:
    """One run of a table, and its place in it."""

    group: str
    row: str
    seed: int
    held_out: str
    experiment: Experiment


@dataclass(frozen=True)
class Choice:
    """What is asked for of a table, besides the table."""

    seeds: int | None = None
    only: tuple[str, ...] = ()
    variant: str = ""
    overrides: Settings = field(default_factory=dict)
    tuned: Mapping[str, Settings] | None = None
    """Settings by row that a search on validation data came to."""


def lay_out(table: Table, choice: Choice) -> list[Cell]:
    """All runs of a table, seed by seed, so that what is there when it is stopped can be compared. Changes that rows
    would belie are refused."""
    cells = runs_of(table, choice)
    if choice.overrides:
        _refuse_compared(table, choice)
    return cells


def runs_of(table: Table, choice: Choice) -> list[Cell]:
    """All runs of a table, whatever its rows are called."""
    variant = chosen_variant(table, choice.variant)
    rows = chosen_rows(table, choice.only)
    _refuse(table, choice)
    base = benchmark(table.base)
    cells = []
    for seed in range(choice.seeds or table.seeds):
        for held_out in table.held_out or ("",):
            for group, common in table.groups.items():
                for row in rows:
                    settings = {
                        **table.settings,
                        **variant.settings,
                        **table.rows[row],
                        **variant.rows.get(row, {}),
                        **common,
                        **((choice.tuned or {}).get(row, {})),
                        **({"held_out": held_out} if held_out else {}),
                        **choice.overrides,
                        "seed": seed,
                    }
                    try:
                        experiment = load(base, settings)
                    except UserError as error:
                        raise UserError(f"{table.name}, row {row!r}: {error}") from None
                    cells.append(Cell(group, row, seed, held_out, experiment))
    return cells


def says_precision(table: Table, choice: Choice) -> bool:
    """Whether a table, or what is asked for of it, names a precision. Where nothing does, runs of any will do."""
    variant = chosen_variant(table, choice.variant)
    said = [table.settings, variant.settings, choice.overrides, *table.groups.values()]
    said += [*table.rows.values(), *variant.rows.values(), *(choice.tuned or {}).values()]
    return any("precision" in settings for settings in said)


def _refuse_compared(table: Table, choice: Choice) -> None:
    """Refuse changes of what rows or groups differ in, since they are called by it."""
    own = runs_of(table, replace(choice, seeds=1, only=(), overrides={}, tuned=None))
    by_name = {", ".join(part for part in (cell.group, cell.row) if part): cell.experiment for cell in own}
    plain = {name: experiment.model_dump(mode="json") for name, experiment in by_name.items()}
    for key in choice.overrides:
        where, _, setting = key.rpartition(".")
        holders = {name: config[where] if where else config for name, config in plain.items()}
        values = {name: holder[setting] for name, holder in holders.items() if setting in holder}
        for one, other in pairwise(values):
            if values[one] != values[other]:
                raise UserError(f"{table.name}: {one!r} and {other!r} differ in {key}, so it cannot be changed for all")


def _refuse(table: Table, choice: Choice) -> None:
    """Changes that would not be what they say."""
    given = {key.partition(".")[0]: key for key in choice.overrides}
    if "seed" in given:
        raise UserError("seed: a table's runs have the seeds from 0 on; say how many with --seeds")
    if table.held_out and "held_out" in given:
        raise UserError(f"held_out: {table.name} holds out one client after the other, {some(table.held_out)}")
    for row, settings in (choice.tuned or {}).items():
        for key in sorted(settings.keys() & choice.overrides.keys()):
            if settings[key] != choice.overrides[key]:
                raise UserError(f"{key}: {settings[key]} was tuned for {row}: leave it out, or leave --tuned out")


def chosen_rows(table: Table, only: Sequence[str]) -> list[str]:
    """The rows that are asked for, in the table's order, with the reference row; all, if none is named. Names may have
    been split at commas of their own: as many parts as make a name are taken for one."""
    by_name = {plain(name): name for name in table.rows}
    wanted, first = {table.first}, 0
    while first < len(only):
        ends = range(len(only), first, -1)
        last = next((end for end in ends if plain(",".join(only[first:end])) in by_name), None)
        if last is None:
            raise UserError(f"{table.name} has no row {only[first]!r}; {nearest(only[first], table.rows)}")
        wanted.add(by_name[plain(",".join(only[first:last]))])
        first = last
    return [name for name in table.rows if not only or name in wanted]


def plain(name: str) -> str:
    """A row's name without what is tiresome to type."""
    return re.sub(r"[^\w{},.+-]", "", name.lower())


def chosen_variant(table: Table, name: str) -> Variant:
    """The variant of that name; none for the table as it stands."""
    if not name or name == table.variant:
        return Variant(why="")
    if name not in table.variants:
        raise UserError(f"{table.name} has no variant {name!r}; {nearest(name, [table.variant, *table.variants])}")
    return table.variants[name]


# Files


def folder() -> Path:
    """Where tables are: in an installed package inside of it, in a checkout beside `src`."""
    inside, beside = Path(__file__).parents[1] / "experiments", Path(__file__).parents[3] / "experiments"
    return inside if inside.is_dir() else beside


def table_names() -> list[str]:
    return sorted(path.stem for path in folder().glob("*.toml"))


def find_table(name: str) -> Table:
    """A table by its name, or from a file of one's own."""
    path = Path(name)
    if path.suffix != ".toml":
        if name not in table_names():
            raise UserError(f"no table {name!r}; {nearest(name, table_names())} (or the path of a .toml file)")
        path = folder() / f"{name}.toml"
    try:
        return Table(**{"name": path.stem, **_merged(path)})
    except ValidationError as error:
        problem = error.errors()[0]
        where, what = ".".join(map(str, problem["loc"])), problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            what = f"a table has no such key; {nearest(where, Table.model_fields)}"
        elif problem["type"] in SAID:
            where = ".".join(part for part in map(str, problem["loc"]) if not re.search(r"\[|^(str|int|dict)$", part))
            what = SAID[problem["type"]].format(f"{problem['input']!r:.60}")
        raise UserError(": ".join(part for part in (str(path), where, what) if part)) from None


def benchmark(name: str) -> Any:
    """What :func:`fedfa.load` takes for a table's `base`."""
    path = folder() / "benchmarks" / f"{name}.toml"
    known = [*builtin_experiments(), *(file.stem for file in path.parent.glob("*.toml"))]
    if not path.is_file() and not name.endswith(".toml") and name not in known:
        raise UserError(f"base: no benchmark or experiment {name!r}; {nearest(name, known)}")
    return path if path.is_file() else name


def _merged(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A file's content on top of that of the table it is `like`."""
    if path in seen:
        raise UserError(f"{path} is like itself")
    content = read_toml(path)
    like = content.pop("like", "")
    if not isinstance(like, str):
        raise UserError(f"{path}: like is the name of a file beside it, not {like!r}")
    if like:
        inherited: dict[str, Any] = {
            "variant": "paper",
            "variants": {},
            "paper": "",
            "cost_of": "",
            "stand_in": "",
            "needs": "",
            "folder": "",
        }
        if "rows" in content:  # which may differ in other things
            inherited["against"] = {}
        content = {**_merged(path.parent / f"{like.removesuffix('.toml')}.toml", (*seen, path)), **inherited, **content}
    return content


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"no file {path}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def with_rounds(overrides: Settings, rounds: int | None) -> Settings:
    """Changes, with the number of rounds that an option asks for."""
    if rounds is None:
        return overrides
    if overrides.get("rounds", rounds) != rounds:
        raise UserError(f"--rounds {rounds} and rounds={overrides['rounds']}: say one of them")
    return {"rounds": rounds, **overrides}


# Data


def find_data(table: Table, data: Path | None) -> Settings:
    """The settings that make a table's runs read the data in `data`: the data set's own folder, or one that holds it by
    its usual name. Without `data`, `$FEDFA_DATA` or `data` is that folder."""
    if not table.folder:
        return {}
    if data is not None and not data.is_dir():
        raise UserError(f"--data: there is no folder {data}")
    base = data or Path(os.environ.get("FEDFA_DATA") or "data")
    place = base / table.folder
    if place.is_dir():
        return {"source.path": str(place.resolve())}
    if data is not None:
        others = {find_table(name).folder for name in table_names()} - {""}
        if any((data / other).is_dir() for other in others):  # so it holds data sets, and is none itself
            raise UserError(
                f"{table.name} needs {table.needs}, and {data} has no folder {table.folder}{_instead(table)}"
            )
        return {"source.path": str(data.resolve())}
    raise UserError(f"{table.name} needs {table.needs} in {place}, or wherever --data DIR says{_instead(table)}")


def tell_unread(tables: Sequence[Table], data: Path | None) -> None:
    """Say so where a folder of data was named that none of the tables has a use for."""
    if data is not None and not any(table.folder for table in tables):
        print(f"--data {data} is not read: {some([table.name for table in tables])} needs none", file=sys.stderr)


def _instead(table: Table) -> str:
    return f"; a stand-in, as an experiment of its own: fedfa reproduce {table.stand_in}" if table.stand_in else ""


def check_data(table: Table, experiment: Experiment) -> None:
    """Read a table's data once, so that what is wrong with them is said once, and not by every run."""
    source = experiment.build("source")
    if isinstance(source, Reader):
        try:
            source.pool()
        except ImportError as error:
            raise UserError(str(error)) from None
        except UserError as error:
            more = f" ({table.name} needs {table.needs}{_instead(table)})" if table.needs else ""
            raise UserError(f"{error}{more}") from None


def describe(tables: Sequence[str]) -> list[tuple[str, str, str, str]]:
    """For the list: name, data, number of runs, title."""
    found = [find_table(name) for name in tables]
    return [(table.name, table.needs or "embedded", f"{table.runs():,}", table.title) for table in found]
