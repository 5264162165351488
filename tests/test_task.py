"""Losses and metrics against loops over pixels."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedfa.task import Batch, Classification, Segmentation


def logits(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def masks(classes: int, *shape: int) -> Tensor:
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(1))


class TestClassification:
    def test_by_hand(self) -> None:
        output, y = torch.tensor([[2.0, 0.0], [0.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1, 0])
        losses = [math.log(1 + math.exp(-2)), math.log(2), math.log(1 + math.e)]
        assert Classification().loss(output, y).item() == pytest.approx(sum(losses) / 3)
        assert Classification().scores(output, y).tolist() == [1.0, 0.0, 0.0]

    def test_mixed_labels(self) -> None:
        task, output = Classification(), logits(4, 3)
        y, partner, share = torch.tensor([0, 1, 2, 0]), torch.tensor([2, 2, 1, 0]), torch.tensor(0.3)
        loss = task.batch_loss(output, Batch(output, y, partner, share))
        wanted = 0.3 * task.loss(output, y) + 0.7 * task.loss(output, partner)
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
        assert task.batch_loss(output, Batch(output, y)).item() == task.loss(output, y).item()


class TestSegmentation:
    @pytest.mark.parametrize(("dice", "first"), [("foreground", 1), ("released", 0)])
    @pytest.mark.parametrize("classes", [2, 3])
    def test_loss_against_a_loop(self, dice: str, first: int, classes: int) -> None:
        output, y = logits(2, classes, 4, 3), masks(classes, 2, 4, 3)
        p = output.softmax(1)
        dices, cross = [], 0.0
        for c in range(first, classes):
            both = either = 0.0
            for b in range(2):
                for i in range(4):
                    for j in range(3):
                        t = float(y[b, i, j] == c)
                        both += p[b, c, i, j].item() * t
                        either += p[b, c, i, j].item() ** 2 + t**2
            dices.append((2 * both + 1e-5) / (either + 1e-5))
        for b in range(2):
            for i in range(4):
                for j in range(3):
                    cross -= math.log(p[b, y[b, i, j], i, j].item()) / 24
        wanted = (cross + 1 - sum(dices) / len(dices)) / 2
        assert Segmentation(dice).loss(output, y).item() == pytest.approx(wanted)  # type: ignore[arg-type]  # a word of a few

    @pytest.mark.parametrize(("dice", "first"), [("foreground", 1), ("released", 0)])
    def test_scores_against_a_loop(self, dice: str, first: int) -> None:
        output, y = logits(5, 3, 6, 6), masks(3, 5, 6, 6)
        predicted = output.argmax(1)
        for b, score in enumerate(Segmentation(dice).scores(output, y)):  # type: ignore[arg-type]  # a word of a few
            values = []
            for c in range(first, 3):
                a, t = (predicted[b] == c), (y[b] == c)
                values.append(2 * (a & t).sum().item() / (a.sum() + t.sum()).item())
            assert score.item() == pytest.approx(sum(values) / len(values))

    def test_empty_masks(self) -> None:
        background = torch.stack((torch.ones(2, 4, 4), torch.zeros(2, 4, 4)), 1)
        y = torch.zeros(2, 4, 4, dtype=torch.long)
        y[1, 0, 0] = 1
        assert Segmentation().scores(background, y).tolist() == [1.0, 0.0]
        assert torch.isfinite(Segmentation().loss(background, y))

    def test_a_perfect_prediction(self) -> None:
        y = masks(2, 2, 8, 8)
        output = torch.stack((1.0 - y, y.float()), 1) * 50
        assert Segmentation().loss(output, y).item() == pytest.approx(0, abs=1e-5)
        assert Segmentation().scores(output, y).tolist() == [1.0, 1.0]
