"""Clients and splits as a plain text file, so that others can use exactly ours, and we theirs.

UTF-8; one line a sample, ``client<TAB>split<TAB>name``, where split is train, val or test and name is what the source
calls the sample (its path in the source's folder, with slashes; '#' and a number where a file holds several). Empty
lines, and lines that start with '#', say nothing. Samples that the file does not name are not used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from fedfa.data.federation import ClientIndex
from fedfa.data.pool import Pool
from fedfa.data.splits import SIDES, client_index
from fedfa.errors import UserError
from fedfa.files import write_text
from fedfa.registry import nearest


def write_splits(path: Path | str, pool: Pool, clients: Mapping[str, ClientIndex]) -> None:
    """Write who has which sample on which side, in order of clients, splits and the pool."""
    lines = [f"# {pool.name}: client, split and name of a sample on each line, separated by tabs\n"]
    written: set[str] = set()
    for client in sorted(clients):
        for side in SIDES:
            for name in (pool.names[number] for number in clients[client].of(side).tolist()):
                if name in written or any(mark in client + name for mark in "\t\n\r") or client[:1] in ("#", ""):
                    what = "there twice" if name in written else "not to be told apart in a file of splits"
                    raise UserError(f"{path}: sample {name!r} of client {client!r} is {what}")
                written.add(name)
                lines.append(f"{client}\t{side}\t{name}\n")
    try:
        write_text(Path(path), "".join(lines))
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None


def read_splits(path: Path | str, pool: Pool) -> dict[str, ClientIndex]:
    """The clients of a file of splits, with their samples as indices into the pool."""
    places = {name: number for number, name in enumerate(pool.names)}
    first: dict[str, int] = {}
    members: dict[str, tuple[list[int], list[int]]] = {}
    for number, client, side, name in _lines(path):
        if name not in places:
            hint = _elsewhere(name, places)
            raise UserError(f"{path}, line {number}: {pool.name} has no sample {name!r}{hint}")
        if name in first:
            raise UserError(f"{path}, line {number}: {name!r} stands on line {first[name]} already")
        first[name] = number
        samples, sides = members.setdefault(client, ([], []))
        samples.append(places[name])
        sides.append(side)
    if not members:
        raise UserError(f"{path} names no samples: a line is client, split and name, separated by tabs")
    clients = {}
    for client, (samples, sides) in sorted(members.items()):
        order = np.argsort(samples)
        clients[client] = client_index(np.array(samples)[order], np.array(sides)[order])
    return clients


def _lines(path: Path | str) -> Iterator[tuple[int, str, int, str]]:
    try:
        text = Path(path).read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"split.file: {path} cannot be read: {error}") from None
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        if not line.strip() or line.startswith("#"):
            continue
        parts = line.split("\t")
        if len(parts) != 3 or not all(parts):
            raise UserError(f"{path}, line {number}: is not client, split and name, separated by tabs: {line[:80]!r}")
        client, side, name = parts
        if side not in SIDES:
            raise UserError(f"{path}, line {number}: no split is named {side!r}; {nearest(side, SIDES)}")
        yield number, client, SIDES.index(side), name


def _elsewhere(name: str, places: Mapping[str, int]) -> str:
    """A hint where the sample is there under another folder, as when a path starts further up."""
    last = name.rpartition("/")[2]
    close = [place for place in places if place.rpartition("/")[2] == last][:1]
    return f"; there is {close[0]!r}" if close else ""
