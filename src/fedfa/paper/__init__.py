"""The paper's own numbers, as data, with the places where they contradict each other."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from fedfa.errors import UserError
from fedfa.registry import nearest


@dataclass(frozen=True)
class PaperTable:
    """One of the paper's tables, or that part of it that is about one benchmark. Numbers are per cent."""

    name: str
    title: str
    label: str
    metric: str
    columns: tuple[str, ...]
    rows: Mapping[str, tuple[float, ...]]
    """For every row a number a column, then the average."""

    @property
    def clients(self) -> tuple[str, ...]:
        """Whose numbers they are; of a table that has averages alone, what another of the same benchmark says."""
        benchmark = self.name.partition("-")[0]
        alike = (table.columns for table in tables().values() if table.name.partition("-")[0] == benchmark)
        return self.columns or next(filter(None, alike), ())

    def average(self, row: str) -> float | None:
        """The row's printed average; None where the paper has no such row."""
        return self.rows[row][-1] if row in self.rows else None

    def number(self, row: str, column: str) -> float | None:
        """What the paper prints for a client; None where it prints nothing."""
        known = row in self.rows and column in self.columns
        return self.rows[row][self.columns.index(column)] if known else None


@dataclass(frozen=True)
class Contradiction:
    """A place where the paper disagrees with itself, or with the authors' released code."""

    kind: str
    table: str
    reason: str
    row: str = ""
    column: str = ""
    other: str = ""


def paper_table(name: str) -> PaperTable:
    """A table by its name in `numbers.toml`."""
    known = tables()
    if name not in known:
        raise UserError(f"the paper has no table {name!r}; {nearest(name, known)}")
    return known[name]


@cache
def tables() -> dict[str, PaperTable]:
    """Every table of the paper."""
    return {
        name: PaperTable(
            name,
            table["title"],
            table["label"],
            table["metric"],
            tuple(table["columns"]),
            {row: tuple(numbers) for row, numbers in table["rows"].items()},
        )
        for name, table in _read()["tables"].items()
    }


@cache
def contradictions() -> tuple[Contradiction, ...]:
    """Where the paper's numbers cannot all be right."""
    return tuple(Contradiction(**entry) for entry in _read()["contradictions"])


def cost() -> dict[str, Any]:
    """What the paper says its method costs: sizes by network, and claims in its words."""
    found: dict[str, Any] = _read()["cost"]
    return found


def claims(network: str) -> list[str]:
    """The same in sentences, for one network."""
    sizes = cost()[network]
    sent = f"FedFA sends {sizes['extra_kib']:g} KB more a client and round, up and down together"
    sent += f", beside 2 × {sizes['model_mib']:g} MB"
    return [f"The paper: {sent}.", *(f"The paper on {name}: {said}." for name, said in cost()["claims"].items())]


@cache
def _read() -> dict[str, Any]:
    return tomllib.loads((files("fedfa.paper") / "numbers.toml").read_text("utf-8"))
