"""The interface that every augmentation is written to. Its defaults are no augmentation."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

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
