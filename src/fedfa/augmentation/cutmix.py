"""CutMix: Yun et al., *CutMix: Regularization Strategy to Train Strong Classifiers*, ICCV 2019."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedfa.augmentation.base import Augmentation
from fedfa.layers.mixing import check_alpha, partners, symmetric_beta
from fedfa.layers.randomness import Draws, check_probability
from fedfa.streams import Streams
from fedfa.task import Batch


def box(share: Tensor, centre: Tensor, sides: Sequence[int]) -> Tensor:
    """Which pixels of an image with these sides lie in the box whose sides are √(1 − λ) of the image's (Eq. 2), a
    boolean tensor of that shape. `centre` is in 0–1, one number a side; what sticks out of the image is cut off."""
    reach = (1 - share).sqrt() / 2
    inside = torch.ones((), dtype=torch.bool, device=centre.device)
    for side, middle in zip(sides, centre.unbind(), strict=True):
        pixels = (torch.arange(side, device=centre.device) + 0.5) / side
        inside = inside.unsqueeze(-1) & ((pixels - middle).abs() < reach)
    return inside


@dataclass(frozen=True)
class CutMix(Augmentation):
    """A box of each image is replaced by the same box of a permuted batch's (Eq. 1), and the loss is
    λ·ℓ(y) + (1 − λ)·ℓ(y′), with λ the area really kept.

    One box a batch: λ ~ Beta(α, α), sides √(1 − λ) of the image's, centre uniform, cut off at the border. α = 1. `p`
    is the probability a batch: 1 as in the paper; the authors' code has 0.5 for CIFAR. Masks are cut and pasted
    like the images, so that every pixel has its own label and the loss is the plain one.

    Deviation: a pixel belongs to the box when its centre lies inside; the authors' code rounds the corners down.
    """

    alpha: float = 1.0
    p: float = 1.0

    def __post_init__(self) -> None:
        check_alpha(self.alpha)
        check_probability(self.p)

    def mix(self, batch: Batch, draws: Draws, streams: Streams) -> Batch:
        if self.p == 0:
            return batch
        generator, device = streams("cutmix"), batch.x.device
        sides = batch.x.shape[2:]
        active = torch.rand((), generator=generator, device=device) < self.p
        share = torch.where(active, symmetric_beta(self.alpha, (), generator, device), 1.0)
        cut = box(share, torch.rand(len(sides), generator=generator, device=device), sides)
        partner = partners(len(batch), generator, device)
        x = torch.where(cut, batch.x.index_select(0, partner), batch.x)
        y = batch.y.index_select(0, partner)
        if batch.y.dim() > len(sides):  # a label for every pixel
            return Batch(x, torch.where(cut, y, batch.y))
        return Batch(x, batch.y, y, 1 - cut.float().mean())
