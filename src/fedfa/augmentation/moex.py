"""Moment exchange: Li et al., *On Feature Normalization and Data Augmentation*, CVPR 2021."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from fedfa.augmentation.base import Augmentation
from fedfa.layers import moex as layers
from fedfa.layers.randomness import Draws
from fedfa.streams import Streams
from fedfa.task import Batch


@dataclass(frozen=True)
class MoEx(Augmentation):
    """Moments over channels swapped with a permuted batch's after one stage, and the loss λ·ℓ(y) + (1 − λ)·ℓ(y′).

    With probability `p` a batch; otherwise features and loss are the plain ones. λ = `lam` is a setting, not drawn,
    and says how much of the label stays with the sample whose normalised features are kept. The authors use p from
    0.25 to 1 and λ from 0.5 (CIFAR) to 0.9 (ImageNet, ModelNet); p = 0.5 and λ = 0.9 here. `stage` is 1, the nearest
    to where they found it to work best, early in the network.

    Deviation: the variance over channels is biased, as PONO defines it; the authors' code has the unbiased one.
    """

    p: float = 0.5
    lam: float = 0.9
    stage: int = 1
    eps: float = 1e-5

    def __post_init__(self) -> None:
        if not 0 <= self.lam <= 1:
            raise ValueError(f"lam is the share of a sample's own label, between 0 and 1, not {self.lam}")
        if self.stage < 1:
            raise ValueError(f"stage counts the network's stages from 1, not {self.stage}")
        self.layer(1, self.stage)  # refuse settings that no layer takes

    def layer(self, channels: int, stage: int) -> nn.Module | None:
        return layers.MoEx(self.p, self.eps) if stage == self.stage else None

    def mix(self, batch: Batch, draws: Draws, streams: Streams) -> Batch:
        if self.p == 0:
            return batch
        gate, partner = draws.of(layers.MoEx)[0]
        return Batch(batch.x, batch.y, batch.y.index_select(0, partner), torch.where(gate, self.lam, 1.0))
