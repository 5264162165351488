"""Augmentations that go with any algorithm: of a batch, of hidden features, or none."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fedfa.layers.ffa import FFA
from fedfa.layers.randomness import Draws
from fedfa.streams import Streams
from fedfa.task import Batch


@dataclass(frozen=True)
class Augmentation:
    """No augmentation, and the interface of all: fields are settings, both methods default to nothing."""

    def layer(self, channels: int, stage: int) -> nn.Module | None:
        """A layer to put after a convolutional stage of the network (they count from 1), before the algorithm's own."""
        return None

    def mix(self, batch: Batch, draws: Draws, streams: Streams) -> Batch:
        """What the step sees of a batch. Labels may be mixed, also as the layers are about to mix features: `draws`
        has what they were given for this step."""
        return batch


@dataclass(frozen=True)
class DSU(Augmentation):
    """Li et al., *Uncertainty Modeling for Out-of-Distribution Generalization*, ICLR 2022: channel statistics drawn
    around themselves with their variance over the batch. It is FFA without the federation (γ = 0), with the
    unbiased variances of its authors' code."""

    p: float = 0.5
    eps: float = 1e-6

    def layer(self, channels: int, stage: int) -> nn.Module:
        return FFA(channels, self.p, fusion="client", statistics="released", eps=self.eps)
