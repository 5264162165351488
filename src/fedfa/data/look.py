"""What `fedfa data` looks at: a source's samples and the clients they are divided among, from words of a command."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedfa.data.federate import divide, federate
from fedfa.data.federation import Federation
from fedfa.data.pool import Pool
from fedfa.data.splits import Splits
from fedfa.errors import UserError
from fedfa.experiment import load, parse_override
from fedfa.registries import SOURCES, Reader

KEY = re.compile(r"[A-Za-z_][\w.]*\s*=")
TABLES = ("source", "partition", "split")
CHUNK = 2**22
"""Bytes of samples that are looked at together: a pool may be larger than memory."""


@dataclass(frozen=True)
class Data:
    """A federation with what it was made from. Where it could not be divided, `why` says so."""

    name: str
    path: str
    """The folder, as it was given; empty where none was."""
    pool: Pool | None
    """What was read, if anything was: embedded federations are not."""
    federation: Federation | None
    why: str = ""

    @property
    def samples(self) -> Pool | Federation:
        """Whatever has the images, labels and classes."""
        whole = self.federation or self.pool
        assert whole is not None, "a source gives one or the other"
        return whole


def look(source: str, words: Sequence[str]) -> Data:
    """The data of a source. `words` are its folder, if it has one, and settings, key=value: those of an experiment
    that say how data are divided (`partition`, `split`, `seed`), and any other is a setting of the source."""
    path, overrides = _understood(source, words)
    # Any network will do: none is built.
    config = load({"source": source, "network": "lenet"}, overrides)
    reader, splits = config.build("source"), Splits(**config.split)
    partition = config.build("partition")
    try:
        if not isinstance(reader, Reader):
            return Data(source, "", None, federate(reader, partition, splits, config.seed))
        pool = reader.pool()
    except ImportError as error:
        raise UserError(str(error)) from None
    try:
        clients = divide(pool, partition, splits, config.seed, reader)
    except UserError as error:
        return Data(source, path, pool, None, str(error))
    return Data(source, path, pool, Federation(pool.name, pool.task, pool.images, pool.labels, pool.classes, clients))


def _understood(source: str, words: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The path among the words, and the others as overrides of an experiment."""
    target, words = SOURCES.find(source), list(words)
    path = words.pop(0) if words and (os.path.exists(words[0]) or not KEY.match(words[0])) else ""
    if stray := next((word for word in words if not KEY.match(word)), None):
        raise UserError(f"{stray!r} is not key=value; quote a path that has spaces in it")
    overrides = {}
    for key, value in map(parse_override, words):
        first = key.split(".")[0]
        if "." in key and first not in TABLES:
            raise UserError(f"{key!r}: here only {', '.join(TABLES)} have settings")
        overrides[key if first in (*TABLES, "seed") else f"source.{key}"] = value
    if path:
        if "path" not in inspect.signature(target).parameters:
            raise UserError(f"{source} is made, not read: leave {path} out")
        overrides["source.path"] = path
    return path, overrides


def chunks(tensor: Tensor) -> Iterator[Tensor]:
    """The samples, some at a time."""
    return iter(tensor.split(max(1, CHUNK // max(tensor[:1].nbytes, 1))) if len(tensor) else ())


def by_chunks(tensor: Tensor, work: Callable[[Tensor], Tensor]) -> Tensor:
    """What `work` makes of every sample, without having all of them in memory."""
    parts = [work(part) for part in chunks(tensor)]
    return torch.cat(parts) if parts else work(tensor)


def shown(name: str, most: int = 0) -> str:
    """A name as it can be printed: control characters and bytes that are no text are spelled out; with `most`, the
    middle of one that is wider is left out."""
    from rich.cells import cell_len, set_cell_size

    name = "".join(
        character if character.isprintable() else character.encode("unicode_escape", "backslashreplace").decode()
        for character in name
    )
    if not most or cell_len(name) <= most:
        return name
    start = set_cell_size(name, most // 2).rstrip()
    end = name
    while cell_len(end) > most - 1 - cell_len(start):
        end = end[1:]
    return f"{start}…{end}"
