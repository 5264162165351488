"""U-Net, for ProstateMRI.

Zhou and Konukoglu, *FedFA*, ICLR 2023, Tables unet and unet_block. What the tables leave open, as in the authors'
code: 3×3 convolutions are padded by 1, so that the mask has the size of the image, and have no bias, BN following;
each decoder block is fed a 2×2 transposed convolution (stride 2, with bias) of what lies below, concatenated with
the encoder's features of that size. These skip connections carry the features as they were before the pool and
before augmentation; nothing is augmented in the decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedfa.layers.normalisation import normalised
from fedfa.layers.pooling import MaxPool2d
from fedfa.nets.stages import Augment, augment_layers, scaled


class UNet(nn.Module):
    """Four encoder stages, a bottleneck (stage 5) and four decoder blocks; one logit per class and pixel.

    `augment` makes the layer that follows each of the `stages` (from 1; None: all): after the pools of stages 1 to
    4 and after the bottleneck. `width` times as many channels as in the paper's table are in each block. The sides of
    the images are multiples of 16.
    """

    stage_channels: ClassVar[tuple[int, ...]] = (32, 64, 128, 256, 512)

    def __init__(
        self,
        num_classes: int,
        in_channels: int = 3,
        augment: Augment | None = None,
        stages: Sequence[int] | None = None,
        width: float = 1.0,
    ) -> None:
        super().__init__()
        widths = scaled(self.stage_channels, width)
        pools = len(widths) - 1
        upwards = list(pairwise(reversed(widths)))
        self.encoders = nn.ModuleList([_Block(low, high) for low, high in pairwise((in_channels, *widths))])
        self.pools = nn.ModuleList([*(MaxPool2d(2) for _ in range(pools)), nn.Identity()])
        self.ups = nn.ModuleList([nn.ConvTranspose2d(high, low, 2, stride=2) for high, low in upwards])
        self.decoders = nn.ModuleList([_Block(2 * low, low) for _, low in upwards])
        self.head = nn.Conv2d(widths[0], num_classes, 1)
        self.augments = nn.ModuleList(augment_layers(widths, augment, stages))
        self.multiple = 2**pools

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        if height % self.multiple or width % self.multiple:
            raise ValueError(f"UNet takes images whose sides are multiples of {self.multiple}, not {height}x{width}")
        skips: list[Tensor] = []
        for encoder, pool, augment in zip(self.encoders, self.pools, self.augments, strict=True):
            skips.append(encoder(x))
            x = augment(pool(skips[-1]))
        skips.pop()  # the bottleneck's: it goes up, not across
        for up, decoder in zip(self.ups, self.decoders, strict=True):
            x = decoder(torch.cat((up(x), skips.pop()), dim=1))
        x = self.head(x)
        return x


class _Block(nn.Sequential):
    """Table unet_block."""

    def __init__(self, inputs: int, outputs: int) -> None:
        layers: list[nn.Module] = []
        for width in (inputs, outputs):
            conv = nn.Conv2d(width, outputs, 3, padding=1, bias=False)
            layers += [conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
        super().__init__(*layers)

    def forward(self, x: Tensor) -> Tensor:
        conv, norm, relu, conv_2, norm_2, relu_2 = self
        x = normalised(conv, norm, x, relu)  # type: ignore[arg-type]  # what __init__ put there
        return normalised(conv_2, norm_2, x, relu_2)  # type: ignore[arg-type]  # as above
