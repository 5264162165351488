"""What travels between server and sites: a head (JSON) and blobs (bytes). No pickle, and no torch in here.

As a Flower message a parcel is one string and one Array a blob: Flower makes a request of its own for every Array, so a
model of sixty tensors goes as one (docs/decisions/0011). Over a site's Unix socket it is the same bytes, framed.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

STYPE = "fedfa.safetensors"
MOST_HEAD = 1 << 20
"""Bytes that a head may take: it holds the experiment."""
MOST_BLOBS = 8
MOST_BYTES = 1 << 32
"""Bytes that a blob may take, whatever it holds."""
_LENGTH = struct.Struct("!Q")


class Malformed(Exception):
    """Something that came from outside and is not what it should be, in a line."""


@dataclass(frozen=True)
class Parcel:
    """A head, as JSON text, and blobs by name."""

    head: str
    blobs: Mapping[str, bytes] = field(default_factory=dict)

    def records(self) -> RecordDict:
        """As the content of a Flower message."""
        arrays = {name: Array("uint8", (len(blob),), STYPE, blob) for name, blob in self.blobs.items()}
        return RecordDict({"head": ConfigRecord({"json": self.head}), "blobs": ArrayRecord(arrays)})

    @classmethod
    def of(cls, records: RecordDict) -> Parcel:
        """From the content of a Flower message, which may be anything."""
        head, blobs = records.get("head"), records.get("blobs")
        if set(records) != {"head", "blobs"} or not isinstance(head, ConfigRecord):
            raise Malformed("the message has no head, or more than a head and blobs")
        if not isinstance(blobs, ArrayRecord) or len(blobs) > MOST_BLOBS:
            raise Malformed(f"the message has no blobs, or more than {MOST_BLOBS}")
        text = head.get("json")
        if not isinstance(text, str) or len(text) > MOST_HEAD:
            raise Malformed("the message's head is no text, or too long")
        return cls(text, {name: _bytes(name, array) for name, array in blobs.items()})

    def send(self, connection: socket.socket) -> None:
        """Over a socket: the head's length, the head, and for every blob its name's and its own length and bytes."""
        names = {name: len(blob) for name, blob in self.blobs.items()}
        for part in (self.head.encode(), json.dumps(names).encode()):
            connection.sendall(_LENGTH.pack(len(part)) + part)
        for blob in self.blobs.values():
            connection.sendall(blob)

    @classmethod
    def receive(cls, connection: socket.socket) -> Parcel:
        """From a socket; :class:`Malformed` where it is no parcel, or ends in the middle."""
        head, table = (_text(connection) for _ in range(2))
        try:
            sizes = json.loads(table)
        except ValueError:
            sizes = None
        if not isinstance(sizes, dict) or len(sizes) > MOST_BLOBS:
            raise Malformed("the parcel's list of blobs cannot be read")
        if not all(type(size) is int and 0 <= size <= MOST_BYTES for size in sizes.values()):
            raise Malformed("the parcel has a blob of no size, or too large")
        return cls(head, {name: _exactly(connection, size) for name, size in sizes.items()})


def _bytes(name: str, array: Array) -> bytes:
    if array.stype != STYPE or array.dtype != "uint8" or array.shape != (len(array.data),):
        raise Malformed(f"blob {name[:40]!r} is {array.stype[:40]!r}, not {STYPE!r}")
    if len(array.data) > MOST_BYTES:
        raise Malformed(f"blob {name[:40]!r} has {len(array.data):,} bytes, more than {MOST_BYTES:,}")
    return array.data


def _text(connection: socket.socket) -> str:
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if length > MOST_HEAD:
        raise Malformed("the parcel's head is too long")
    try:
        return _exactly(connection, length).decode()
    except UnicodeDecodeError:
        raise Malformed("the parcel's head is no text") from None


def _exactly(connection: socket.socket, size: int) -> bytes:
    """So many bytes. Memory grows with what has come, not with what was announced."""
    received = bytearray()
    while len(received) < size:
        part = connection.recv(min(size - len(received), 1 << 20))
        if not part:
            raise Malformed("the parcel ends in the middle")
        received += part
    return bytes(received)
