"""What sources whose images come as arrays, many in a file, have in common."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedfa.data.cache import Facts, Writer
from fedfa.data.pool import Given, Problem

CHUNK = 4096
"""Images that are worked on at a time."""


class Gathering:
    """A pool as it is put together: images go to the cache, and what is known of them into `facts`."""

    def __init__(self, writer: Writer, classes: Sequence[str]) -> None:
        self.writer, self.facts = writer, Facts(list(classes))
        self._first: dict[bytes, int] = {}

    def add(
        self,
        images: NDArray[np.uint8],
        labels: NDArray[Any],
        names: Iterable[str],
        sites: Iterable[str],
        given: Given,
    ) -> None:
        """Samples of one part of a data set, images as (N, C, H, W). Equal images form a group."""
        facts, images = self.facts, np.ascontiguousarray(images)
        for image, name, site in zip(images, names, sites, strict=True):
            key = hashlib.blake2b(image, digest_size=12).digest()
            facts.groups.append(self._first.setdefault(key, len(facts.names)))
            facts.names.append(name)
            facts.sites.append(site)
            facts.given.append(given)
        self.writer.append("images", images)
        self.writer.append("labels", labels.astype(np.int64))

    def problem(self, file: str, what: str) -> None:
        self.facts.problems.append(Problem(file, what))

    def good_labels(self, labels: NDArray[Any], file: str) -> NDArray[np.bool_]:
        """Where a label is one of the classes; a problem, if it is not everywhere."""
        good = (labels >= 0) & (labels < len(self.facts.classes))
        if not good.all():
            wrong = labels[~good][0]
            self.problem(
                file, f"{(~good).sum():,} labels are none of 0–{len(self.facts.classes) - 1} ({wrong}); left out"
            )
        return np.asarray(good, dtype=np.bool_)

    def finish(self) -> Facts:
        """The facts, with a line on duplicates: they are not worth one each among ten thousands."""
        twice = sum(group != place for place, group in enumerate(self.facts.groups))
        if twice:
            self.problem(
                "", f"duplicate: {twice:,} images are there before; each is kept on the other's side of a split"
            )
        return self.facts


def resize(images: NDArray[np.uint8], size: int, channels: int = 3) -> NDArray[np.uint8]:
    """Images (N, C, H, W) as (N, channels, size, size): bilinear, with antialiasing where they get smaller."""
    parts = []
    for start in range(0, len(images), CHUNK):
        part = torch.tensor(images[start : start + CHUNK])
        if part.shape[-2:] != (size, size):
            part = torch.nn.functional.interpolate(part.float(), (size, size), mode="bilinear", antialias=True)
            part = part.round().clamp(0, 255).to(torch.uint8)
        parts.append(part.expand(-1, channels, -1, -1).contiguous().numpy())
    return np.concatenate(parts) if parts else np.empty((0, channels, size, size), np.uint8)
