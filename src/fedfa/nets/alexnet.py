"""AlexNet with batch normalisation, for Office-Caltech 10 and DomainNet.

Zhou and Konukoglu, *FedFA*, ICLR 2023, Table alexnet: followed layer by layer. What the table leaves open: the
convolutions have biases, as in the authors' code (BN makes them idle, but they are counted and sent). FedBN's
network, from which this one comes, is the same but for fully connected layers of 4096.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn

from fedfa.layers.normalisation import normalised
from fedfa.layers.pooling import AdaptiveAvgPool2d, MaxPool2d
from fedfa.nets.stages import Augment, augment_layers, scaled


class AlexNet(nn.Module):
    """Five convolutional stages and three fully connected layers, for images of 63 pixels a side or more.

    `augment` makes the layer that follows each of the `stages` (from 1; None: all), after the pool where the
    stage ends in one. `width` times as many channels as in the paper's table are in each layer.
    """

    stage_channels: ClassVar[tuple[int, ...]] = (64, 192, 384, 256, 256)

    def __init__(
        self,
        num_classes: int,
        in_channels: int = 3,
        augment: Augment | None = None,
        stages: Sequence[int] | None = None,
        width: float = 1.0,
    ) -> None:
        super().__init__()
        channels = scaled(self.stage_channels, width)
        (hidden,) = scaled((1024,), width)
        first, second, third, fourth, last = channels
        self.features = nn.ModuleList(
            [
                _Stage(in_channels, first, kernel=11, stride=4, padding=2, pool=True),
                _Stage(first, second, kernel=5, padding=2, pool=True),
                _Stage(second, third, kernel=3, padding=1),
                _Stage(third, fourth, kernel=3, padding=1),
                _Stage(fourth, last, kernel=3, padding=1, pool=True),
            ]
        )
        self.classifier = nn.Sequential(
            AdaptiveAvgPool2d(6),
            nn.Flatten(),
            nn.Linear(last * 6 * 6, hidden),
            nn.BatchNorm1d(hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, hidden),
            nn.BatchNorm1d(hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, num_classes),
        )
        self.augments = nn.ModuleList(augment_layers(channels, augment, stages))

    def forward(self, x: Tensor) -> Tensor:
        for stage, augment in zip(self.features, self.augments, strict=True):
            x = augment(stage(x))
        x = self.classifier(x)
        return x


class _Stage(nn.Sequential):
    """Convolution, normalisation, ReLU and, where the stage ends in one, a pool."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int, padding: int, stride: int = 1, pool: bool = False
    ) -> None:
        pools = [MaxPool2d(3, 2)] if pool else []
        conv = nn.Conv2d(inputs, outputs, kernel, stride, padding)
        super().__init__(conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True), *pools)

    def forward(self, x: Tensor) -> Tensor:
        conv, norm, relu, *pools = self
        x = normalised(conv, norm, x, relu)  # type: ignore[arg-type]  # what __init__ put there
        for pool in pools:
            x = pool(x)
        return x
