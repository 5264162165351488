"""Names on the command line, and what they stand for.

An entry is imported when it is first asked for, so that listing a hundred names costs nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any, Generic, TypeVar

from fedfa.errors import UserError

T = TypeVar("T")


def nearest(name: str, names: Iterable[str]) -> str:
    """', did you mean X?' where some known name is close, and the known names otherwise."""
    known = list(names)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known) or 'none'}"


class Registry(Mapping[str, T], Generic[T]):
    """A mapping from names to classes or functions, each with a line that describes it."""

    def __init__(self, kind: str, entries: Mapping[str, tuple[str, str]]) -> None:
        self.kind = kind
        self._targets: dict[str, Any] = {name: target for name, (target, _) in entries.items()}
        self.lines: dict[str, str] = {name: line for name, (_, line) in entries.items()}

    def register(self, name: str, target: T | str, line: str) -> None:
        """Add an entry: an object, or ``"package.module:attribute"`` to import when it is needed."""
        if name in self._targets:
            raise ValueError(f"there is a {self.kind} named {name!r} already")
        self._targets[name], self.lines[name] = target, line

    def __getitem__(self, name: str) -> T:
        target = self._targets[name]
        if isinstance(target, str):
            module, _, attribute = target.partition(":")
            target = self._targets[name] = getattr(import_module(module), attribute)
        found: T = target
        return found

    def find(self, name: str) -> T:
        """The entry with this name, or a one-line error with the nearest name there is."""
        if name not in self._targets:
            raise UserError(f"no {self.kind} is named {name!r}; {nearest(name, self)}")
        return self[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __len__(self) -> int:
        return len(self._targets)
