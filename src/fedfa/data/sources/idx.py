"""The format of MNIST's files: a magic number, the sizes of the dimensions, and bytes. Packed with gzip or not."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fedfa.data.sources.reading import Broken

UNSIGNED_BYTE = 8
MOST_BYTES = 4 << 30
"""EMNIST's largest file has 0.6 GB."""


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """The array in a file of unsigned bytes. Raises :class:`Broken`, with the reason, where that is not in it."""
    try:
        with open(path, "rb") as plain:
            packed = plain.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else open(path, "rb") as stream:
            return _read(stream, dimensions)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise Broken(f"gzip: {error}") from error
    except OSError as error:
        raise Broken(f"cannot be read ({error.strerror or error})") from error


class _Stream(Protocol):
    def read(self, size: int, /) -> bytes: ...


def _read(stream: _Stream, dimensions: int) -> NDArray[np.uint8]:
    magic = stream.read(4)
    if len(magic) < 4 or magic[:3] != bytes((0, 0, UNSIGNED_BYTE)):
        raise Broken(f"not an idx file of bytes: it starts with {magic.hex() or 'nothing'}")
    if magic[3] != dimensions:
        raise Broken(f"has {magic[3]} dimensions, not {dimensions}")
    sizes = stream.read(4 * dimensions)
    shape = tuple(int(size) for size in np.frombuffer(sizes[: len(sizes) // 4 * 4], ">u4"))
    wanted = math.prod(shape)
    if len(shape) < dimensions or wanted > MOST_BYTES:
        raise Broken(f"says it holds {'×'.join(map(str, shape)) or 'nothing'}, which cannot be")
    data = stream.read(wanted)
    if len(data) < wanted or stream.read(1):
        raise Broken(f"should hold {wanted:,} bytes ({'×'.join(map(str, shape))}), and holds {_count(data, wanted)}")
    return np.frombuffer(data, np.uint8).reshape(shape)


def _count(data: bytes, wanted: int) -> str:
    return f"{len(data):,}" if len(data) < wanted else "more"
