"""What an engine is: how the clients of a round are trained and evaluated. Everything else is shared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from fedfa.data.federation import Split
from fedfa.engines.client import Broadcast
from fedfa.reduction import Update

if TYPE_CHECKING:
    from fedfa.algorithms.base import Share


@dataclass(frozen=True)
class Refused:
    """A client that sends nothing this round, and why."""

    client: str
    reason: str


@dataclass(frozen=True)
class Score:
    """A model on one client's split."""

    metric: float
    loss: float
    samples: int


class Engine(Protocol):
    """Trains and evaluates clients."""

    def share(self, broadcast: Broadcast, names: Sequence[str]) -> Iterator[tuple[str, Share]]:
        """What each client gives away once, before the first round."""
        ...

    def train(self, broadcast: Broadcast, names: Sequence[str]) -> Iterator[Update | Refused]:
        """Updates of the named clients as they finish. An update is good until the next one is asked for."""
        ...

    def evaluate(self, broadcast: Broadcast, names: Sequence[str], split: Split) -> dict[str, Score]:
        """The broadcast model on each named client's split, with the client's private entries where it has any."""
        ...
