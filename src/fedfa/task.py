"""Tasks: loss, metric and prediction."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

DICE_SMOOTHING = 1e-5


@dataclass(frozen=True)
class Batch:
    """Inputs and labels of one step. Where labels are mixed, `share` is the part of `y` and the rest is
    `partner`'s: the loss is share·ℓ(y) + (1 − share)·ℓ(partner)."""

    x: Tensor
    y: Tensor
    partner: Tensor | None = None
    share: Tensor | None = None

    def __len__(self) -> int:
        return len(self.x)


def class_shares(y: Tensor, classes: int) -> Tensor:
    """Labels as shares of the classes, (B, classes, ...): of class numbers 0 and 1, of shares themselves."""
    return y if y.is_floating_point() else F.one_hot(y, classes).movedim(-1, 1).float()


class Task(ABC):
    """What a network is trained for."""

    metric: ClassVar[str]
    """Name of the number that evaluation reports, as a share of 1: higher is better."""

    @abstractmethod
    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Mean loss of a batch. `y` holds class numbers, or in floating point the share of every class, with the
        classes in its second dimension as in `output`."""

    @abstractmethod
    def scores(self, output: Tensor, y: Tensor) -> Tensor:
        """The metric of every sample, (B,)."""

    def batch_loss(self, output: Tensor, batch: Batch) -> Tensor:
        """:meth:`loss`, where labels may be mixed."""
        loss = self.loss(output, batch.y)
        if batch.partner is None or batch.share is None:
            return loss
        return batch.share * loss + (1 - batch.share) * self.loss(output, batch.partner)


class Classification(Task):
    """Cross-entropy and top-1 accuracy."""

    metric = "accuracy"

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(output, y)

    def scores(self, output: Tensor, y: Tensor) -> Tensor:
        return (output.argmax(1) == y).float()


@dataclass(frozen=True)
class Segmentation(Task):
    """(Cross-entropy + Dice loss)/2, and the Dice coefficient of every image.

    `dice` says which classes count: ``foreground`` (all but class 0), or ``released``, which averages over the
    background as well, as the authors' code does.
    """

    metric = "dice"
    dice: Literal["foreground", "released"] = "foreground"

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return (F.cross_entropy(output, y) + self._dice_loss(output, y)) / 2

    def _dice_loss(self, output: Tensor, y: Tensor) -> Tensor:
        """1 − soft Dice over the whole batch, 2·Σpt/(Σp² + Σt²), averaged over classes."""
        p = output.softmax(1)
        t = class_shares(y, output.shape[1]).to(p.dtype)
        first = self._first_class
        dims = (0, *range(2, output.dim()))
        both = (p * t).sum(dims)[first:]
        either = (p.square() + t.square()).sum(dims)[first:]
        return 1 - ((2 * both + DICE_SMOOTHING) / (either + DICE_SMOOTHING)).mean()

    def scores(self, output: Tensor, y: Tensor) -> Tensor:
        """Dice of each image, averaged over the classes that count; 1 where a class is in neither mask."""
        classes = torch.arange(self._first_class, output.shape[1], device=y.device).view(1, -1, 1)
        predicted = output.argmax(1).flatten(1).unsqueeze(1) == classes
        true = y.flatten(1).unsqueeze(1) == classes
        both = (predicted & true).sum(2)
        either = predicted.sum(2) + true.sum(2)
        return torch.where(either > 0, 2 * both / either.clamp_min(1), torch.ones_like(both, dtype=torch.float)).mean(1)

    @property
    def _first_class(self) -> int:
        return 1 if self.dice == "foreground" else 0
