"""The local loop: which batches a client trains on."""

from __future__ import annotations

import pytest
import torch

from fedfa.engines.client import Local, batches


def sizes(samples: int, epochs: int = 1, batch_size: int = 32, drop_last: bool = False) -> list[int]:
    local = Local(epochs=epochs, batch_size=batch_size, drop_last=drop_last)
    return [len(part) for part in batches(torch.arange(samples), local, torch.Generator().manual_seed(0))]


@pytest.mark.parametrize(
    ("samples", "drop_last", "expected"),
    [
        (96, False, [32, 32, 32]),
        (75, False, [32, 32, 11]),
        (75, True, [32, 32]),
        (65, False, [32, 32]),  # a last batch of one sample is left out
        (66, False, [32, 32, 2]),
        (20, False, [20]),
        (20, True, [20]),  # fewer samples than a batch: a batch of its own size
        (33, True, [32]),
        (2, False, [2]),
        (1, False, []),
        (0, False, []),
    ],
)
def test_sizes(samples: int, drop_last: bool, expected: list[int]) -> None:
    assert sizes(samples, drop_last=drop_last) == expected


def test_batches_of_one_where_they_are_asked_for() -> None:
    assert sizes(3, batch_size=1) == [1, 1, 1]


def test_every_epoch_sees_every_sample_in_another_order() -> None:
    index = torch.arange(100, 160)
    parts = list(batches(index, Local(epochs=2, batch_size=20), torch.Generator().manual_seed(0)))
    first, second = torch.cat(parts[:3]), torch.cat(parts[3:])
    assert torch.equal(first.sort().values, index) and torch.equal(second.sort().values, index)
    assert not torch.equal(first, second)


def test_learning_rate_decays_by_round() -> None:
    local = Local(lr=0.1, lr_decay=0.5)
    assert [local.rate(round) for round in (1, 2, 4)] == pytest.approx([0.1, 0.05, 0.0125])
