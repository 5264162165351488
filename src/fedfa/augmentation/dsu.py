"""DSU: FFA without the federation."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fedfa.augmentation.base import Augmentation
from fedfa.layers.ffa import FFA


@dataclass(frozen=True)
class DSU(Augmentation):
    """Li et al., *Uncertainty Modeling for Out-of-Distribution Generalization*, ICLR 2022: channel statistics drawn
    around themselves with their variance over the batch. It is FFA without the federation (γ = 0), with the
    unbiased variances of its authors' code."""

    p: float = 0.5
    eps: float = 1e-6

    def __post_init__(self) -> None:
        self.layer(1, 1)  # refuse settings that no layer takes

    def layer(self, channels: int, stage: int) -> nn.Module:
        return FFA(channels, self.p, fusion="client", statistics="released", eps=self.eps)
