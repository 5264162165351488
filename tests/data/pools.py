"""Pools made up for tests of partitions and splits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fedfa.data.federation import ClientIndex
from fedfa.data.pool import Pool


def make_pool(labels: Sequence[int], **known: Any) -> Pool:
    """A pool of one-pixel images with these labels; sites, groups and given as asked for, or none."""
    count = len(labels)
    plain = {
        "names": [f"folder/{number:04d}.png" for number in range(count)],
        "sites": ["here"] * count,
        "groups": list(range(count)),
        "given": [""] * count,
    }
    images, classes = torch.zeros(count, 1, 1, 1, dtype=torch.uint8), tuple("abcdefghij")
    return Pool("made-up", "classification", images, torch.tensor(labels), classes, **{**plain, **known})


def make_masks(count: int, **known: Any) -> Pool:
    """The same for segmentation."""
    pool = make_pool([0] * count, **known)
    masks = torch.zeros(count, 1, 1, dtype=torch.uint8)
    return Pool(**{**vars(pool), "task": "segmentation", "labels": masks})


def sizes(index: ClientIndex) -> tuple[int, int, int]:
    return len(index.train), len(index.val), len(index.test)


def everything(index: ClientIndex) -> list[int]:
    return sorted([*index.train.tolist(), *index.val.tolist(), *index.test.tolist()])
