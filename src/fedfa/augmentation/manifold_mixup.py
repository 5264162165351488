"""Manifold Mixup: Verma et al., *Manifold Mixup: Better Representations by Interpolating Hidden States*, ICML 2019."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from fedfa.augmentation.base import Augmentation
from fedfa.layers import manifold_mixup as layers
from fedfa.layers.mixing import interpolate
from fedfa.layers.randomness import Draws
from fedfa.streams import Streams
from fedfa.task import Batch


@dataclass(frozen=True)
class ManifoldMixup(Augmentation):
    """Mixup at one place a batch, drawn uniformly from the input and the network's stages (§2).

    One λ ~ Beta(α, α) and one permutation a batch, for features and for the loss, λ·ℓ(y) + (1 − λ)·ℓ(y′). α = 2.
    `input` says whether the images themselves are among the places. The stages are those that the network augments
    (`network.stages`).

    In U-Net the layers follow the pools: a skip connection carries features from before its pool, so those at and
    above the chosen stage stay unmixed, and those below it come from mixed features.
    """

    alpha: float = 2.0
    input: bool = True

    def __post_init__(self) -> None:
        self.layer(1, 1)  # refuse settings that no layer takes

    def layer(self, channels: int, stage: int) -> nn.Module:
        return layers.ManifoldMixup(self.alpha, self.input)

    def mix(self, batch: Batch, draws: Draws, streams: Streams) -> Batch:
        drawn: list[layers.Drawn] = draws.of(layers.ManifoldMixup)
        _, share, partner = drawn[0]
        x = batch.x
        if self.input:
            elsewhere = torch.stack([place.here for place in drawn]).any()
            x = interpolate(x, partner, torch.where(elsewhere, 1.0, share))
        return Batch(x, batch.y, batch.y.index_select(0, partner), share)
