"""The engine of a real federation: clients are sites, reached through a Flower grid."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from fedfa.algorithms.base import Algorithm, Share
from fedfa.data.federation import Split
from fedfa.engines.base import Refused, Score
from fedfa.engines.client import Broadcast
from fedfa.flower.parcel import MOST_BYTES, Malformed, Parcel
from fedfa.flower.post import Answer, Post
from fedfa.flower.roster import Listener, Roster
from fedfa.flower.settings import Settings
from fedfa.flower.wire import Kind, Reply, RequestHead, broadcast_blob, pack
from fedfa.reduction import Update
from fedfa.state import size_in_bytes

T = TypeVar("T")
SLACK = 1 << 20
"""Bytes that a reply may take besides its tensors: names and shapes."""


@dataclass(frozen=True)
class Letter:
    """A broadcast, packed once for all sites."""

    kind: Kind
    round: int
    broadcast: bytes
    constants: bytes
    constants_name: str


class Flower:
    """Sends every broadcast to the round's sites and hands over their updates as they arrive. What a site sends is
    checked here as far as the server knows what is right; the reduction checks shapes and numbers, as for any client.
    """

    def __init__(
        self,
        post: Post,
        roster: Roster,
        settings: Settings,
        algorithm: Algorithm,
        training: Sequence[str],
        weighting: str,
        run: str,
        experiment: str,
        listener: Listener,
    ) -> None:
        self._post, self._roster, self._settings, self._algorithm = post, roster, settings, algorithm
        self._training, self._weighting, self._run, self._experiment = training, weighting, run, experiment
        self._listener = listener
        self._holds: dict[str, str] = {}
        """Which constants a site is known to have kept."""
        self._scores: tuple[int, dict[str, dict[Split, Score]]] = (-1, {})

    def share(self, broadcast: Broadcast, names: Sequence[str]) -> Iterator[tuple[str, Share]]:
        shares: dict[str, Share] = {}
        for name, reply in self._replies("share", broadcast, names, MOST_BYTES):
            share = reply if isinstance(reply, str) else _read(reply.share)
            if isinstance(share, str):
                self._listener.noticed(f"{name} shares nothing: {share}")
            else:
                shares[name] = share
        yield from sorted(shares.items())  # what is gathered stands in the order of names

    def train(self, broadcast: Broadcast, names: Sequence[str]) -> Iterator[Update | Refused]:
        least = self._settings.min_sites
        self._roster.wait_for(least, self._training, self._settings.wait, least)
        most = SLACK + size_in_bytes(broadcast.model) + self._reported_bytes(broadcast)
        for name, reply in self._replies("train", broadcast, names, most):
            update = reply if isinstance(reply, str) else _read(self._checked, name, reply)
            yield Refused(name, update) if isinstance(update, str) else update

    def evaluate(self, broadcast: Broadcast, names: Sequence[str], split: Split) -> dict[str, Score]:
        """A site evaluates all its splits when it is asked for the first: a message costs seconds."""
        if self._scores[0] != broadcast.round:
            found: dict[str, dict[Split, Score]] = {}
            for name, reply in self._replies("evaluate", broadcast, names, 0):
                if isinstance(reply, Reply):
                    found[name] = reply.scores()
                else:
                    self._listener.noticed(f"{name} is not evaluated in round {broadcast.round}: {reply}")
            self._scores = broadcast.round, found
        scores = self._scores[1]
        return {name: scores[name][split] for name in names if split in scores.get(name, ())}

    def _checked(self, name: str, reply: Reply) -> Update:
        """The update of a reply, if a site that sent it could have trained it."""
        update = reply.update()
        weight = 1 if self._weighting == "uniform" else self._roster.facts[name].samples[0]
        if update.weight != weight:
            raise Malformed(f"its weight is {update.weight}, not {weight}")
        doubt = self._algorithm.implausible(update.report)
        if doubt is not None:
            raise Malformed(doubt)
        return update

    def _reported_bytes(self, broadcast: Broadcast) -> int:
        """What clients report besides their models takes; where the server does not know, at most as much again."""
        expected = broadcast.model if broadcast.expected is None else broadcast.expected
        return size_in_bytes(expected)

    def _replies(
        self, kind: Kind, broadcast: Broadcast, names: Sequence[str], most: int
    ) -> Iterator[tuple[str, Reply | str]]:
        """Every named site's reply, or why it has none, as they come."""
        self._roster.refresh()
        nodes = {name: self._roster.nodes[name] for name in names if name in self._roster.nodes}
        yield from ((name, "it is not connected") for name in names if name not in nodes)
        letter = self._letter(kind, broadcast)
        again: list[str] = []
        for name, reply in self._exchange(letter, nodes, most):
            if isinstance(reply, Reply) and reply.head.wants_constants:
                self._holds.pop(name, None)
                again.append(name)
            else:
                yield name, reply
        yield from self._exchange(letter, {name: nodes[name] for name in again}, most)

    def _exchange(self, letter: Letter, nodes: Mapping[str, int], most: int) -> Iterator[tuple[str, Reply | str]]:
        sites = {node: name for name, node in nodes.items()}
        parcels = {node: self._addressed(letter, name) for name, node in nodes.items()}
        for answer in self._post.exchange(letter.kind, letter.round, parcels, self._settings.round_timeout):
            name = sites[answer.node]
            reply = _read(self._understood, answer, letter, name, most)
            if isinstance(reply, str) or reply.head.wants_constants:
                yield name, reply
            else:
                self._holds[name] = letter.constants_name
                yield name, reply.head.refused or reply

    def _understood(self, answer: Answer, letter: Letter, name: str, most: int) -> Reply:
        """A reply to this very letter, from the site that it was sent to, with the data that it joined with."""
        if answer.parcel is None:
            raise Malformed(answer.reason)
        reply = Reply.of(answer.parcel, most)
        head = reply.head
        if (head.kind, head.run, head.site) != (letter.kind, self._run, name):
            raise Malformed("it answers for another run, site or kind of request")
        if head.round != letter.round:
            raise Malformed(f"it answers for round {head.round}, not {letter.round}")
        if head.division not in ("", self._roster.facts[name].division):
            raise Malformed("its samples or splits are not those that it joined with")
        return reply

    def _letter(self, kind: Kind, broadcast: Broadcast) -> Letter:
        never = {name: t for name, t in broadcast.extras.items() if name in self._algorithm.constants}
        extras: dict[str, Tensor] = {name: t for name, t in broadcast.extras.items() if name not in never}
        constants = pack(never) if never else b""
        name = hashlib.sha256(constants).hexdigest() if constants else ""
        return Letter(kind, broadcast.round, broadcast_blob(broadcast.model, extras), constants, name)

    def _addressed(self, letter: Letter, name: str) -> Parcel:
        head = RequestHead(
            kind=letter.kind,
            run=self._run,
            round=letter.round,
            site=name,
            experiment=self._experiment,
            constants=letter.constants_name,
        )
        blobs = {"broadcast": letter.broadcast}
        if letter.constants and self._holds.get(name) != letter.constants_name:
            blobs["constants"] = letter.constants
        return Parcel(head.model_dump_json(), blobs)


def _read(read: Callable[..., T], *given: Any) -> T | str:
    """What `read` makes of something from outside, or why it cannot be read."""
    try:
        return read(*given)
    except Malformed as error:
        return str(error)
