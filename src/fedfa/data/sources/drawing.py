"""What the embedded federations share: seeded draws, blur, smooth fields, and dealing samples out to sides.

Lengths are in pixels, intensities in 0–1. Nothing here touches a global random generator.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fedfa.data.federation import ClientIndex

TRAIN, VAL, TEST = 0, 1, 2
SIDES = (TRAIN, VAL, TEST, TRAIN, TRAIN)
"""60/20/20, in an order that fills all three sides from three items on."""


def stream(seed: int, name: str) -> torch.Generator:
    """The generator of the draws called `name`: another name never disturbs them, as sharing one would."""
    return torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))


def uniform(low: float, high: float, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand(*shape, generator=generator)


def normal(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator)


def blur(images: Tensor, sigma: float) -> Tensor:
    """Gaussian blur of (N, C, H, W), standard deviation `sigma`; the edge pixels repeat outside."""
    reach = max(1, math.ceil(3 * sigma))
    kernel = torch.exp(-0.5 * (torch.arange(-reach, reach + 1) / sigma).square())
    kernel = kernel / kernel.sum()
    # As one-channel images, so that a single kernel serves however many channels there are.
    flat = F.pad(images.flatten(0, 1).unsqueeze(1), (reach, reach, reach, reach), mode="replicate")
    return F.conv2d(F.conv2d(flat, kernel.view(1, 1, 1, -1)), kernel.view(1, 1, -1, 1)).view(images.shape)


def smooth_field(knots: Sequence[int], shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Smooth noise of `shape` (N, D, H, W): normal values at `knots` (along D, H and W), interpolated between.

    Linearly along D, and without kinks (bicubic) within the planes, where they are seen.
    """
    count, depth, *plane = shape
    values = torch.randn(count, 1, *knots, generator=generator)
    planes = F.interpolate(values, (depth, *knots[1:]), mode="trilinear", align_corners=True).flatten(0, 2)
    return F.interpolate(planes.unsqueeze(1), tuple(plane), mode="bicubic", align_corners=True).view(*shape)


def to_uint8(images: Tensor) -> Tensor:
    """Intensities 0–1 as 0–255; what lies outside saturates, as in a sensor."""
    return images.clamp(0, 1).mul(255).round().to(torch.uint8)


def deal(kinds: Tensor, hand: Sequence[int], generator: torch.Generator) -> Tensor:
    """The group of every item, where `hand` is the order in which groups take one item each.

    Items are shuffled, laid out kind by kind and dealt in turn: chance decides which item goes where, and every
    group gets its share of every kind to within a turn.
    """
    order = torch.randperm(len(kinds), generator=generator)
    order = order[torch.argsort(kinds[order], stable=True)]
    groups = torch.empty_like(order)
    groups[order] = torch.tensor(hand)[torch.arange(len(kinds)) % len(hand)]
    return groups


def client_index(members: Tensor, sides: Tensor) -> ClientIndex:
    """A client of the samples `members`, each of which is on the side that `sides` says."""
    return ClientIndex(members[sides == TRAIN], members[sides == VAL], members[sides == TEST])
