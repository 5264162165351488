"""What a source reads from disk, before it is divided among clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from fedfa.data.federation import TaskName

Given = Literal["train", "val", "test", ""]


@dataclass(frozen=True)
class Problem:
    """Something that is wrong with a file, or with the data as a whole."""

    file: str
    """Relative to the source's folder; empty where no single file is to blame."""
    what: str
    """In a line: what is wrong, and what was done about it."""
    fatal: bool = False
    """Whether the data cannot be trained on as they are. Other problems leave samples out, or are worth knowing."""

    @property
    def left_out(self) -> bool:
        """Whether it cost a file its place: all readers say so in these words."""
        return "left out" in self.what

    @property
    def absent(self) -> bool:
        """Whether a whole part of the data set is not there: all readers say so in these words."""
        return not self.file and self.what.endswith("is missing")


@dataclass(frozen=True)
class Pool:
    """Samples with all that is known of them. `images` and `labels` are as in a federation, and may be memory-mapped;
    the other sequences have an entry a sample."""

    name: str
    task: TaskName
    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    names: Sequence[str]
    """What each sample is called in files of splits: its path in the source's folder, with slashes, and after a '#'
    which part of the file it is."""
    sites: Sequence[str]
    """Where each sample comes from: domain, hospital, writer. Empty strings where the data have no sites."""
    groups: Sequence[int]
    """Samples with the same number stay on one side of a split: byte-identical files, slices of one patient."""
    given: Sequence[Given]
    """The split that the data set itself puts the sample into, if it does."""
    problems: tuple[Problem, ...] = field(default_factory=tuple)

    def __len__(self) -> int:
        return len(self.images)
