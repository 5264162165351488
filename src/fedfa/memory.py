"""Clients' private tensors between rounds: on disk at the latest when a checkpoint goes with them, and as soon as they
are many, so that ten thousand clients take no more memory than a few."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import torch
from torch import Tensor

from fedfa.files import make_durable, read_tensors, write_tensors
from fedfa.rows import copies
from fedfa.state import size_in_bytes

ROOM = 512 << 20
"""Bytes that may wait for their way to the disk, at least. What waits until the next checkpoint is mostly never
written: the next round's takes its place. That saves a file, and on a GPU a wait for it, for every client in every
round."""
OURS, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
"""Where Linux says which control groups this process is in, and what they may use."""
SHARE = 32
"""A part of memory as large as a SHAREth of it may wait, where that is more: two rounds of Adam's moments for four
AlexNets are 830 MB, which would all go to the disk in every round."""


def room_on(device: torch.device) -> int:
    """Bytes that may wait where clients train on this device."""
    if device.type == "cuda":
        return max(ROOM, torch.cuda.get_device_properties(device).total_memory // SHARE)
    return max(ROOM, min(_limits(), default=0) // SHARE)


def _limits() -> Iterator[int]:
    """How much memory there is: the machine's, and what a container or a cluster's job may use of it."""
    with suppress(AttributeError, ValueError, OSError):
        yield os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):
        for line in OURS.read_text().splitlines():
            _, kinds, own = line.split(":", 2)
            second = kinds == ""  # of the two versions of control groups
            if not second and "memory" not in kinds.split(","):
                continue
            root = GROUPS if second else GROUPS / "memory"
            group = root / own.strip("/")
            for folder in (group, *group.parents):  # in a container the group's own path is not there, but its root is
                with suppress(ValueError, OSError):  # "max"
                    yield int((folder / ("memory.max" if second else "memory.limit_in_bytes")).read_text())


class Memory:
    """One folder a client, one file a version: the memory after round t is in ``t.safetensors``.

    A round that is played again after a crash starts from the version before it. Kept are the versions that the
    checkpoints go with, the one before this round, and this round's. They stay where the client trained, on a GPU say,
    until :meth:`sync`, which is due before a checkpoint (nothing goes back to a round after it), or until they are more
    than `room`. Files are whole at any moment, and safe from a power cut after :meth:`sync`.
    """

    def __init__(self, folder: Path, room: int = ROOM) -> None:
        self._folder, self._room = folder, room
        self.restarts: Sequence[int] = ()
        """Rounds that a restart could go back to: versions they need are not deleted."""
        self._waiting: dict[str, dict[int, dict[str, Tensor]]] = {}
        """Versions that are not on disk yet, by client and round, and their size in bytes."""
        self._size = 0
        self._written: set[Path] = set()
        self._known = {path.name for path in folder.glob("*")}
        """Clients that have a folder: most algorithms keep nothing, and the disk need not be asked."""

    def load(self, client: str, round: int) -> dict[str, Tensor]:
        """The client's memory as it was after the given round, in tensors of its own; empty if it has none."""
        version = max((version for version in self._versions(client) if version <= round), default=None)
        if version is None:
            return {}
        waiting = self._waiting.get(client, {}).get(version)
        return read_tensors(self._file(client, version)) if waiting is None else copies(waiting)

    def save(self, client: str, round: int, tensors: dict[str, Tensor]) -> None:
        """Keep the client's memory after the given round."""
        if not tensors and not self._versions(client):
            return
        self._drop(client, round)
        own = self._waiting.setdefault(client, {})[round] = copies(tensors)  # an algorithm may go on with the tensors
        self._size += size_in_bytes(own)
        versions = self._versions(client)
        needed = {round}
        for limit in (*self.restarts, round - 1):
            needed.add(max((version for version in versions if version <= limit), default=round))
        for version in versions - needed:
            self._drop(client, version)
            self._file(client, version).unlink(missing_ok=True)
        if self._size > self._room:
            self._write()

    def sync(self) -> None:
        """Wait until everything that was saved and is still needed is on the disk."""
        self._write()
        for file in self._written:
            if file.exists():
                make_durable(file)
        self._written.clear()

    def forget_after(self, round: int) -> None:
        """Delete versions of rounds that did not count, before they are played again."""
        for client, waiting in self._waiting.items():
            for version in [version for version in waiting if version > round]:
                self._drop(client, version)
        for folder in self._folder.glob("*"):
            for version in _versions(folder):
                if version > round:
                    (folder / f"{version}.safetensors").unlink()

    def _write(self) -> None:
        for client, waiting in self._waiting.items():
            for version, tensors in waiting.items():
                file = self._file(client, version)
                write_tensors(file, tensors, durable=False)  # a wait for the disk is ten times the write
                self._written.add(file)
                self._known.add(file.parent.name)
        self._waiting.clear()
        self._size = 0

    def _drop(self, client: str, version: int) -> None:
        """Forget a version, if it waits."""
        self._size -= size_in_bytes(self._waiting.get(client, {}).pop(version, {}))

    def _versions(self, client: str) -> set[int]:
        found = set(self._waiting.get(client, ()))
        folder = self._folder_of(client)
        return found | set(_versions(folder)) if folder.name in self._known else found

    def _folder_of(self, client: str) -> Path:
        return self._folder / quote(client, safe=" ").replace(".", "%2E")  # `quote` lets `..` through

    def _file(self, client: str, round: int) -> Path:
        return self._folder_of(client) / f"{round}.safetensors"


def _versions(folder: Path) -> list[int]:
    return [int(file.stem) for file in folder.glob("*.safetensors") if re.fullmatch(r"\d+", file.stem)]
