"""Which combinations of task, network, algorithm and augmentation run, and why the others do not.

They are put together as a run would put them together, but on torch's `meta` device, where tensors have shapes and no
numbers: a hundred networks take seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import get_args

import torch
from torch import nn

from fedfa.algorithms import ALGORITHMS
from fedfa.algorithms.base import Algorithm
from fedfa.data.federation import ClientIndex, Federation, TaskName
from fedfa.engines.client import Local
from fedfa.errors import UserError
from fedfa.experiment import load
from fedfa.registries import AUGMENTATIONS, NETWORKS
from fedfa.simulate import build_model, make_network

SIDE = 64
"""Pixels of the images that networks are tried with: all of ours take them."""


@dataclass(frozen=True)
class Cell:
    """One combination, and why it does not run (None: it does)."""

    task: TaskName
    network: str
    algorithm: str
    augmentation: str
    reason: str | None


def matrix() -> list[Cell]:
    """Every combination of what is registered, with settings at their defaults and plain SGD."""
    return [
        Cell(task, network, algorithm, augmentation, reason)
        for task in get_args(TaskName)
        for network in NETWORKS
        for algorithm, augmentation, reason in _pairs(task, network)
    ]


def _pairs(task: TaskName, network: str) -> Iterator[tuple[str, str, str | None]]:
    """Layers keep shapes, so the forward is tried once; algorithms and augmentations do not know of each other, so
    each is tried beside the plainest of the other kind. The test that walks the matrix trains every pair."""
    whole = _objection(task, network, build=build_model)
    alone = {name: whole or _objection(task, network, algorithm=name) for name in ALGORITHMS}
    beside = {name: whole or _objection(task, network, augmentation=name) for name in AUGMENTATIONS}
    for algorithm, augmentation in itertools.product(ALGORITHMS, AUGMENTATIONS):
        yield algorithm, augmentation, alone[algorithm] or beside[augmentation]


def _objection(
    task: TaskName,
    network: str,
    algorithm: str = "fedavg",
    augmentation: str = "none",
    build: Callable[..., nn.Module] = make_network,
) -> str | None:
    try:
        config = load(
            {"source": "digit-sites", "network": network, "algorithm": algorithm, "augmentation": augmentation}
        )
        rule: Algorithm = config.build("algorithm")
        with torch.device("meta"):
            model = build(config, _blank(task), rule, config.build("augmentation"))
    except UserError as error:
        return str(error)
    return rule.objection(model, Local(), ())


def _blank(task: TaskName) -> Federation:
    """A federation with shapes alone."""
    images = torch.empty((2, 3, SIDE, SIDE), dtype=torch.uint8)
    labels = torch.empty((2,) if task == "classification" else (2, SIDE, SIDE), dtype=torch.int64)
    both = torch.arange(2)
    return Federation(task, task, images, labels, ("a", "b"), {"client": ClientIndex(both, both, both)})


def tables(cells: list[Cell]) -> Iterator[str]:
    """The matrix in lines of text: a table for networks whose combinations all do the same, then the reasons."""
    reasons: list[str] = []
    blocks: dict[tuple[tuple[str, str, str | None], ...], list[str]] = {}
    for task, network in dict.fromkeys((cell.task, cell.network) for cell in cells):
        own = [cell for cell in cells if (cell.task, cell.network) == (task, network)]
        found = {cell.reason for cell in own}
        if len(found) == 1 and None not in found:
            reasons.append(f"{task} with {network}: {found.pop()}")
            continue
        key = tuple((cell.algorithm, cell.augmentation, cell.reason) for cell in own)
        blocks.setdefault(key, []).append(f"{task} with {network}")
    for block, names in blocks.items():
        yield from _table(block, ", ".join(names))
    if reasons:
        yield "does not run"
        yield from (f"  {reason}" for reason in reasons)


def _table(block: tuple[tuple[str, str, str | None], ...], title: str) -> Iterator[str]:
    verdicts = {(algorithm, augmentation): reason for algorithm, augmentation, reason in block}
    algorithms = list(dict.fromkeys(algorithm for algorithm, _ in verdicts))
    augmentations = list(dict.fromkeys(augmentation for _, augmentation in verdicts))
    notes = list(dict.fromkeys(reason for reason in verdicts.values() if reason is not None))
    width = max(map(len, algorithms))
    yield title
    yield " ".join(["  " + " " * width, *augmentations])
    for algorithm in algorithms:
        marks = [
            ("yes" if reason is None else f"({notes.index(reason) + 1})").center(len(augmentation))
            for augmentation in augmentations
            for reason in [verdicts[algorithm, augmentation]]
        ]
        yield " ".join([f"  {algorithm:<{width}}", *marks]).rstrip()
    yield from (f"  ({number}) {note}" for number, note in enumerate(notes, 1))
    yield ""
