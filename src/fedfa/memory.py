"""Clients' private tensors between rounds: on disk, so that ten thousand clients take no memory."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from torch import Tensor

from fedfa.files import make_durable, read_tensors, write_tensors


class Memory:
    """One folder a client, one file a version: the memory after round t is in ``t.safetensors``.

    A round that is played again after a crash starts from the version before it. Kept are the versions that the
    checkpoints go with, the one before this round, and this round's. Files are whole at any moment, and safe from a
    power cut after :meth:`sync`, which is due before a checkpoint: nothing goes back to a round after it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.restarts: Sequence[int] = ()
        """Rounds that a restart could go back to: versions they need are not deleted."""
        self._written: set[Path] = set()
        self._known = {path.name for path in folder.glob("*")}
        """Clients that have a folder: most algorithms keep nothing, and the disk need not be asked."""

    def load(self, client: str, round: int) -> dict[str, Tensor]:
        """The client's memory as it was after the given round; empty if it has none."""
        known = [version for version in self._versions(client) if version <= round]
        return read_tensors(self._file(client, max(known))) if known else {}

    def save(self, client: str, round: int, tensors: dict[str, Tensor]) -> None:
        """Keep the client's memory after the given round."""
        if not tensors and not self._has(client):
            return
        self._known.add(self._folder_of(client).name)
        write_tensors(self._file(client, round), tensors, durable=False)  # a wait for the disk is ten times the write
        self._written.add(self._file(client, round))
        versions = self._versions(client)
        needed = {round}
        for limit in (*self.restarts, round - 1):
            needed.add(max((version for version in versions if version <= limit), default=round))
        for version in set(versions) - needed:
            self._file(client, version).unlink()

    def sync(self) -> None:
        """Wait until everything that was saved and is still needed is on the disk."""
        for file in self._written:
            if file.exists():
                make_durable(file)
        self._written.clear()

    def forget_after(self, round: int) -> None:
        """Delete versions of rounds that did not count, before they are played again."""
        for folder in self._folder.glob("*"):
            for version in _versions(folder):
                if version > round:
                    (folder / f"{version}.safetensors").unlink()

    def _versions(self, client: str) -> list[int]:
        return _versions(self._folder_of(client)) if self._has(client) else []

    def _has(self, client: str) -> bool:
        return bool(self._known) and self._folder_of(client).name in self._known

    def _folder_of(self, client: str) -> Path:
        return self._folder / quote(client, safe=" ").replace(".", "%2E")  # `quote` lets `..` through

    def _file(self, client: str, round: int) -> Path:
        return self._folder_of(client) / f"{round}.safetensors"


def _versions(folder: Path) -> list[int]:
    return [int(file.stem) for file in folder.glob("*.safetensors") if re.fullmatch(r"\d+", file.stem)]
