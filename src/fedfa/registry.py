"""Names on the command line, and what they stand for.

An entry is imported when it is first asked for, so that listing a hundred names costs nothing. Entries come from the
package, from `register`, and from other installed packages, which name theirs as entry points of the groups
``fedfa.algorithms``, ``fedfa.augmentations``, ``fedfa.networks``, ``fedfa.sources``, ``fedfa.partitions`` and
``fedfa.transforms``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from importlib.metadata import entry_points
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
        self._lines: dict[str, str] = {name: line for name, (_, line) in entries.items()}
        self._searched = False
        self.packages: dict[str, str] = {}
        """Entries that came from other packages: which, and which version."""

    @property
    def lines(self) -> Mapping[str, str]:
        """What each entry does, by name."""
        self._search()
        return self._lines

    def register(self, name: str, target: T | str, line: str) -> None:
        """Add an entry: an object, or ``"package.module:attribute"`` to import when it is needed."""
        if name in self._targets:
            raise ValueError(f"there is a {self.kind} named {name!r} already")
        self._targets[name], self._lines[name] = target, line

    def _search(self) -> None:
        """Add what other installed packages offer. A name that is taken keeps its meaning."""
        if self._searched:
            return
        self._searched = True
        for point in entry_points(group=f"fedfa.{self.kind}s"):
            package = f"{point.dist.name} {point.dist.version}" if point.dist else "a package"
            if point.name in self._targets:
                self._lines[point.name] += f" ({package} has one of this name too, which is not used)"
                continue
            self.register(point.name, f"{point.module}:{point.attr}", f"from {package}")
            self.packages[point.name] = package

    def __getitem__(self, name: str) -> T:
        if name not in self._targets:
            self._search()
        target = self._targets[name]
        if isinstance(target, str):
            module, _, attribute = target.partition(":")
            target = self._targets[name] = getattr(import_module(module), attribute)
        found: T = target
        return found

    def find(self, name: str) -> T:
        """The entry with this name, or a one-line error with the nearest name there is."""
        if name not in self:
            raise UserError(f"no {self.kind} is named {name!r}; {nearest(name, self)}")
        try:
            return self[name]
        except Exception as error:  # whatever importing another package gives
            if name not in self.packages:
                raise
            raise UserError(f"{self.kind} {name!r} cannot be had from {self.packages[name]}: {error}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._targets or name in list(self)  # without importing it

    def __iter__(self) -> Iterator[str]:
        self._search()
        return iter(self._targets)

    def __len__(self) -> int:
        self._search()
        return len(self._targets)
