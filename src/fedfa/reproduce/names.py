"""What a table's files are called, by what was asked for."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedfa.errors import UserError
from fedfa.reproduce.summary import identity, weighty
from fedfa.reproduce.table import Choice, Table, runs_of, suffix

LONGEST = 80
"""Letters of settings in a file's name; more are told by a hash."""


def changes(table: Table, choice: Choice) -> dict[str, Any]:
    """Those of the settings asked for that make other runs of it than the table's own."""

    def runs(overrides: dict[str, Any]) -> list[tuple[str, str]]:
        one = replace(choice, seeds=1, overrides=overrides)
        return [(identity(cell.experiment), cell.experiment.precision) for cell in runs_of(table, one)]

    asked = weighty(choice.overrides)
    asked |= {key: value for key, value in choice.overrides.items() if key == "precision"}  # which counts if it is said
    whole = runs(asked) if asked else []
    for key in list(asked):
        rest = {other: value for other, value in asked.items() if other != key}
        with contextlib.suppress(UserError):  # the others do not go without it
            asked = rest if runs(rest) == whole else asked
    return asked


def file_name(table: Table, choice: Choice, changed: Mapping[str, Any], rule: str = "") -> str:
    """What a table's files are called: those of other settings or by another rule have other names, so that a trial of
    two rounds does not take the place of the whole table. Fewer rows or seeds are a part of the same one."""
    variant = choice.variant if choice.variant not in ("", table.variant) else ""
    tuned = "tuned" if choice.tuned is not None else ""
    settings = "".join(suffix(f"{key}-{value}") for key, value in sorted(changed.items()))
    if len(settings) > LONGEST:
        settings = f"-{hashlib.sha256(settings.encode()).hexdigest()[:8]}"
    other = f"-by-{rule}" if rule not in ("", table.rule) else ""
    return "-".join(part for part in (table.name, variant, tuned) if part) + settings + other
