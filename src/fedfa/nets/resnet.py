"""ResNet-18, for CIFAR-10.

He et al., *Deep residual learning for image recognition*, 2016, with the projection shortcut (option B); the FedFA
paper names it without a table. Parameters are named as torchvision's, so that its pretrained weights load, and
drawn as there (He et al., 2015, by fan-out). The ``cifar`` stem, a 3×3 convolution with stride 1 and no pool, is
not He et al.'s but what is usual at 32 pixels, where the ``imagenet`` stem would end at maps of 1×1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, get_args

from torch import Tensor, nn

from fedfa.layers.normalisation import normalised
from fedfa.nets.stages import Augment, augment_layers, scaled

Stem = Literal["cifar", "imagenet"]


class ResNet18(nn.Module):
    """A stem, four stages of two residual blocks, and one fully connected layer.

    `augment` makes the layer that follows each of the `stages` (from 1; None: all), after its second block; the
    stem is not a stage. `stem` is ``cifar`` for small images or ``imagenet`` (7×7, stride 2, then a 3×3 max pool).
    `width` times as many channels as usual are in each layer. Where `augment` brings buffers of its own, pretrained
    weights load with `load_state_dict(weights, strict=False)`.
    """

    stage_channels: ClassVar[tuple[int, ...]] = (64, 128, 256, 512)

    def __init__(
        self,
        num_classes: int,
        in_channels: int = 3,
        augment: Augment | None = None,
        stages: Sequence[int] | None = None,
        stem: Stem = "cifar",
        width: float = 1.0,
    ) -> None:
        super().__init__()
        if stem not in get_args(Stem):
            raise ValueError(f"stem is one of {', '.join(get_args(Stem))}, not {stem!r}")
        channels = scaled(self.stage_channels, width)
        first, second, third, last = channels
        if stem == "imagenet":
            self.conv1 = nn.Conv2d(in_channels, first, 7, stride=2, padding=3, bias=False)
        else:
            self.conv1 = nn.Conv2d(in_channels, first, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(first)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1) if stem == "imagenet" else nn.Identity()
        self.layer1 = _stage(first, first, stride=1)
        self.layer2 = _stage(first, second, stride=2)
        self.layer3 = _stage(second, third, stride=2)
        self.layer4 = _stage(third, last, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(last, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        self.augments = nn.ModuleList(augment_layers(channels, augment, stages))

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(normalised(self.conv1, self.bn1, x, self.relu))
        stages = (self.layer1, self.layer2, self.layer3, self.layer4)
        for stage, augment in zip(stages, self.augments, strict=True):
            x = augment(stage(x))
        x = self.fc(self.avgpool(x).flatten(1))
        return x


class BasicBlock(nn.Module):
    """Two 3×3 convolutions beside a shortcut, which is a 1×1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        changes = stride != 1 or inputs != outputs
        self.downsample: nn.Module = _Projection(inputs, outputs, stride) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out = normalised(self.conv1, self.bn1, x, self.relu)
        out = normalised(self.conv2, self.bn2, out)
        out += self.downsample(x)
        rectified: Tensor = self.relu(out)
        return rectified


class _Projection(nn.Sequential):
    """A 1×1 convolution and its normalisation."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        conv, norm = self
        return normalised(conv, norm, x)  # type: ignore[arg-type]  # what __init__ put there


def _stage(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    return nn.Sequential(BasicBlock(inputs, outputs, stride), BasicBlock(outputs, outputs, 1))
