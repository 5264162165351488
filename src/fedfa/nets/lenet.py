"""LeNet-5, for EMNIST and the digits.

LeCun et al., *Gradient-based learning applied to document recognition*, 1998; the FedFA paper names it without a
table. Deviations, all of them usual now: ReLU, max pooling, every map of the first stage connected to every one of
the second, a linear output; the first convolution pads by 2, which stands for the original's 32-pixel frame around
28-pixel digits. Other sizes are averaged to 5×5 before the classifier; at 28 pixels that is the identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn

from fedfa.layers.pooling import MaxPool2d
from fedfa.nets.stages import Augment, augment_layers


class LeNet(nn.Module):
    """Two convolutional stages and three fully connected layers, for images of 12 pixels a side or more.

    `augment` makes the layer that follows each of the `stages` (from 1; None: all), after its pool.
    """

    stage_channels: ClassVar[tuple[int, ...]] = (6, 16)

    def __init__(
        self,
        num_classes: int,
        in_channels: int = 3,
        augment: Augment | None = None,
        stages: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.features = nn.ModuleList([_stage(in_channels, 6, padding=2), _stage(6, 16, padding=0)])
        self.classifier = nn.Sequential(
            nn.AdaptiveAvgPool2d(5),
            nn.Flatten(),
            nn.Linear(16 * 5 * 5, 120),
            nn.ReLU(inplace=True),
            nn.Linear(120, 84),
            nn.ReLU(inplace=True),
            nn.Linear(84, num_classes),
        )
        self.augments = nn.ModuleList(augment_layers(self.stage_channels, augment, stages))

    def forward(self, x: Tensor) -> Tensor:
        for stage, augment in zip(self.features, self.augments, strict=True):
            x = augment(stage(x))
        x = self.classifier(x)
        return x


def _stage(inputs: int, outputs: int, padding: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 5, padding=padding), nn.ReLU(inplace=True), MaxPool2d(2))
