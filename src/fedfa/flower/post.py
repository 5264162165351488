"""Requests out, replies in: what the server does with a Flower grid."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import httpx
from flwr.app import Message
from flwr.serverapp import Grid

from fedfa.flower.parcel import Malformed, Parcel
from fedfa.flower.wire import TYPES, Kind, one_line

FIRST_PAUSE, LONGEST_PAUSE = 0.02, 1.0
"""Seconds between two looks for replies: short at first, since a site may be quick."""


@dataclass(frozen=True)
class Answer:
    """What came of a request: a parcel, or the reason why there is none."""

    node: int
    parcel: Parcel | None
    reason: str = ""


class Post:
    """Sends parcels to nodes and hands over their replies as they come. No reply, however bad, raises."""

    def __init__(self, grid: Grid, ttl: float) -> None:
        self.grid = grid
        self._ttl = ttl

    def send(self, kind: Kind, round: int, parcels: Mapping[int, Parcel]) -> dict[str, int]:
        """The messages that are on their way, and to whom; one that could not be sent is not among them."""
        messages = [
            Message(parcel.records(), node, TYPES[kind], ttl=self._ttl, group_id=str(round))
            for node, parcel in parcels.items()
        ]
        ids = list(self.grid.push_messages(messages)) if messages else []
        return {id: node for id, node in zip(ids, parcels, strict=False) if id}

    def replies(self, sent: Mapping[str, int]) -> list[tuple[str, Answer]]:
        """The replies to these messages that are there."""
        return [(id, self._answer(sent[id], reply)) for id, reply in self._pull(list(sent)) if id in sent]

    def exchange(self, kind: Kind, round: int, parcels: Mapping[int, Parcel], limit: float) -> Iterator[Answer]:
        """Send, and hand over what comes of each parcel until the time is up."""
        sent = self.send(kind, round, parcels)
        yield from (Answer(node, None, "it could not be reached") for node in parcels.keys() - set(sent.values()))
        end, pause = time.monotonic() + limit, FIRST_PAUSE
        while sent:
            found = self.replies(sent)
            for id, answer in found:
                del sent[id]
                yield answer
            if found:
                pause = FIRST_PAUSE
            elif time.monotonic() > end:
                yield from (Answer(node, None, f"it did not answer within {limit:g} s") for node in sent.values())
                return
            else:
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)

    def _pull(self, ids: list[str]) -> list[tuple[str, Message | None]]:
        """The replies that are there, by the messages they answer. Flower raises for all of them where one is damaged:
        then they are looked at one by one, and None stands for the damaged one."""
        if not ids:
            return []
        try:
            return [(reply.metadata.reply_to_message_id, reply) for reply in self.grid.pull_messages(ids)]
        except httpx.HTTPStatusError as error:
            if error.response.status_code < httpx.codes.INTERNAL_SERVER_ERROR:
                raise
            return []  # the SuperLink is too busy: look again, until the time is up
        except httpx.HTTPError:  # it is gone
            raise
        except Exception:
            if len(ids) == 1:
                return [(ids[0], None)]
            return [found for id in ids for found in self._pull([id])]

    @staticmethod
    def _answer(node: int, reply: Message | None) -> Answer:
        if reply is None:
            return Answer(node, None, "its message cannot be read")
        if reply.has_error():
            return Answer(node, None, one_line(reply.error.reason or "it failed"))
        try:
            return Answer(node, Parcel.of(reply.content))
        except Malformed as error:
            return Answer(node, None, str(error))
