"""The engine for a CPU with several cores: clients side by side in processes, where that saves time.

A step of a small network keeps one core busy and no more, since threads meet after every operation. So clients train in
processes, one after another in each. What a client sends does not depend on who trained it, and the server's sums have
no order: all numbers are the sequential engine's, to the bit.

Processes take seconds to start. A run begins in this one, and they are started once it is known that they will save
more; rounds go on here until they are ready.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fedfa.data.federation import Split
from fedfa.engines.base import Refused, Score
from fedfa.engines.client import Broadcast
from fedfa.engines.crew import Crew, Job, Lost, Recipe
from fedfa.engines.sequential import Sequential
from fedfa.reduction import Update

WORTH = 10.0
"""Seconds that processes must save: starting them takes a few, of all cores."""
LOOK = 3
"""Rounds that are timed first. The first of them is left out: it warms caches."""


class Processes(Sequential):
    """Trains the clients of a round in `most` processes of some `threads`; with `asked` from the first round on,
    otherwise when it pays over the `rounds` that there are."""

    def __init__(
        self,
        *args: Any,
        recipe: Recipe,
        most: int,
        threads: int = 1,
        asked: bool = False,
        rounds: int = 0,
        say: Callable[[str], None] = print,
        **settings: Any,
    ) -> None:
        super().__init__(*args, **settings)
        self.recipe, self.most, self.threads = recipe, most, threads
        self.asked, self.rounds, self.say = asked, rounds, say
        self.used = 0
        """Processes that have trained clients."""
        self._crew: Crew | None = None
        self._alone = os.name != "posix" or most < 2
        self._seconds: list[float] = []

    def train(self, broadcast: Broadcast, names: Sequence[str]) -> Iterator[Update | Refused]:
        self._consider(broadcast.round)
        crew, left = self._at_hand(), list(names)
        try:
            if crew is not None:
                jobs = (Job(name, None, self.memory.load(name, broadcast.round - 1)) for name in names)
                for answer in crew.work(broadcast, jobs):
                    assert isinstance(answer.result, Update | Refused)
                    if answer.kept is not None:
                        self.memory.save(answer.job.client, broadcast.round, answer.kept)
                    left.remove(answer.job.client)
                    yield answer.result
                self.used = self.most
                return
        except Lost as lost:
            self._give_up(lost)
        started = time.perf_counter()
        yield from super().train(broadcast, left)
        self._seconds.append(time.perf_counter() - started)

    def evaluate(self, broadcast: Broadcast, names: Sequence[str], split: Split) -> dict[str, Score]:
        crew = self._at_hand()
        if crew is None:
            return super().evaluate(broadcast, names, split)
        private = self.algorithm.private(self.slot.model)
        jobs = (
            Job(name, split, self.memory.load(name, broadcast.round) if private else {})
            for name in names
            if len(self.federation.clients[name].of(split))
        )
        found: dict[str, Score] = {}
        try:
            for answer in crew.work(broadcast, jobs):
                assert isinstance(answer.result, dict)
                found |= answer.result
        except Lost as lost:
            self._give_up(lost)
            return super().evaluate(broadcast, names, split)
        return {name: found[name] for name in names if name in found}

    def close(self) -> None:
        if self._crew is not None:
            self._crew.close()
        self._crew = None

    def _consider(self, round: int) -> None:
        """Start the processes, if it is time to."""
        if self._alone or self._crew is not None or not (self.asked or self._saved(round) > WORTH):
            return
        try:
            self._crew = Crew(self.recipe, self.most, self.threads)
        except Lost as lost:
            self._give_up(lost)

    def _at_hand(self) -> Crew | None:
        """The processes, if there are any and they are ready."""
        try:
            return self._crew if self._crew is not None and self._crew.ready(self.asked) else None
        except Lost as lost:
            self._give_up(lost)
            return None

    def _saved(self, round: int) -> float:
        """Seconds that processes would save from this round on."""
        if len(self._seconds) < LOOK:
            return 0.0
        left = self.rounds - round + 1
        return left * statistics.median(self._seconds[1:]) * (1 - 1 / self.most)

    def _give_up(self, lost: Lost) -> None:
        self.close()
        self._alone = True
        self.say(f"clients train one after another, since a process for them is of no use: {lost}")
