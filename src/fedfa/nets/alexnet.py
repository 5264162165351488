"""AlexNet with batch normalisation, for Office-Caltech 10 and DomainNet.

Zhou and Konukoglu, *FedFA*, ICLR 2023, Table alexnet: followed layer by layer. What the table leaves open: the
convolutions have biases, as in the authors' code (BN makes them idle, but they are counted and sent). FedBN's
network, from which this one comes, is the same but for fully connected layers of 4096.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn

from fedfa.nets.stages import Augment, augment_layers


class AlexNet(nn.Module):
    """Five convolutional stages and three fully connected layers, for images of 63 pixels a side or more.

    `augment` makes the layer that follows each of the `stages` (from 1; None: all), after the pool where the
    stage ends in one.
    """

    stage_channels: ClassVar[tuple[int, ...]] = (64, 192, 384, 256, 256)

    def __init__(
        self,
        num_classes: int,
        in_channels: int = 3,
        augment: Augment | None = None,
        stages: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.features = nn.ModuleList(
            [
                _stage(in_channels, 64, kernel=11, stride=4, padding=2, pool=True),
                _stage(64, 192, kernel=5, padding=2, pool=True),
                _stage(192, 384, kernel=3, padding=1),
                _stage(384, 256, kernel=3, padding=1),
                _stage(256, 256, kernel=3, padding=1, pool=True),
            ]
        )
        self.classifier = nn.Sequential(
            nn.AdaptiveAvgPool2d(6),
            nn.Flatten(),
            nn.Linear(256 * 6 * 6, 1024),
            nn.BatchNorm1d(1024),
            nn.ReLU(inplace=True),
            nn.Linear(1024, 1024),
            nn.BatchNorm1d(1024),
            nn.ReLU(inplace=True),
            nn.Linear(1024, num_classes),
        )
        self.augments = nn.ModuleList(augment_layers(self.stage_channels, augment, stages))

    def forward(self, x: Tensor) -> Tensor:
        for stage, augment in zip(self.features, self.augments, strict=True):
            x = augment(stage(x))
        x = self.classifier(x)
        return x


def _stage(inputs: int, outputs: int, kernel: int, padding: int, stride: int = 1, pool: bool = False) -> nn.Sequential:
    layers = [
        nn.Conv2d(inputs, outputs, kernel, stride, padding),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    ]
    return nn.Sequential(*layers, nn.MaxPool2d(3, 2)) if pool else nn.Sequential(*layers)
