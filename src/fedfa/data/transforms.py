"""Transforms of batches, on the device that the batch is on, with a draw for every sample.

Sampling stands apart from applying: what is drawn comes first, as tensors from the stream "transforms", and images and
masks are then a pure function of them. So a mask moves with its image, and a step with transforms can be captured: no
number goes to the host, and nothing branches on data. Each transform is a function, and a frozen dataclass whose
fields are its settings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedfa.kernels import kernels, transformed
from fedfa.task import Batch

Fill = Literal["zeros", "edge", "mirror"]
"""What stands where there was no image: zeros, the nearest pixel of its edge, or the image seen in a mirror there."""

PADDING_MODES: dict[Fill, str] = {"zeros": "zeros", "edge": "border", "mirror": "reflection"}


def flip(x: Tensor, flipped: Tensor, side: int = -1) -> Tensor:
    """Images (B, C, H, W) seen in a mirror, exactly, where `flipped` (B,) is true: left and right change places, or
    with `side` −2 top and bottom."""
    if (fast := _kernels(x)) is not None:
        out: Tensor = fast.flip(x, flipped, side)
        return out
    return torch.where(flipped.view(-1, 1, 1, 1), x.flip(side), x)


def shift(x: Tensor, by: Tensor, fill: Fill = "zeros") -> Tensor:
    """Images (B, C, H, W) moved by whole pixels, exactly: pixel (i, j) becomes what was at (i + by[0], j + by[1]).
    `by` is (B, 2). It is padding, and then cutting out at an offset of `by` from the middle."""
    height, width = x.shape[-2:]
    rows = by[:, :1] + torch.arange(height, device=x.device)
    columns = by[:, 1:] + torch.arange(width, device=x.device)
    moved = _pixels(x, _inside(rows, height, fill), _inside(columns, width, fill))
    if fill != "zeros":
        return moved
    known = ((rows >= 0) & (rows < height)).unsqueeze(2) & ((columns >= 0) & (columns < width)).unsqueeze(1)
    return moved.masked_fill_(~known.unsqueeze(1), 0)


def rotate(x: Tensor, degrees: Tensor, fill: Fill = "zeros", nearest: bool = False) -> Tensor:
    """Images (B, C, H, W) turned about their middle by `degrees` (B,), counter-clockwise, at their old size. Values
    between pixels are interpolated bilinearly, or taken from the nearest pixel.

    Output pixel p, measured from the middle with y downwards, shows the image at R·p, R = [[cos, −sin], [sin, cos]].
    """
    if fill == "zeros" and not nearest and (fast := _kernels(x)) is not None:
        out: Tensor = fast.turn(x, degrees)
        return out
    height, width = x.shape[-2:]
    angle = torch.deg2rad(degrees.float()).view(-1, 1, 1)
    cos, sin = angle.cos(), angle.sin()
    down = torch.arange(height, device=x.device).view(1, -1, 1) - (height - 1) / 2
    along = torch.arange(width, device=x.device).view(1, 1, -1) - (width - 1) / 2
    # grid_sample's units: the image reaches from −1 to 1 along each side, however long that is.
    cos_x, sin_x, cos_y, sin_y = cos * (2 / width), sin * (2 / width), cos * (2 / height), sin * (2 / height)
    grid = torch.stack((cos_x * along - sin_x * down, sin_y * along + cos_y * down), dim=-1)
    mode = "nearest" if nearest else "bilinear"
    turned = F.grid_sample(x.float(), grid, mode=mode, padding_mode=PADDING_MODES[fill], align_corners=False)
    return turned.to(x.dtype)


def _kernels(x: Tensor) -> ModuleType | None:
    """Kernels for such images, if there are any."""
    plain = x.is_floating_point() and x.dtype != torch.float64 and x.is_contiguous() and not x.requires_grad
    small = 0 < x.shape[-2:].numel() < 2**31 and 0 < len(x) < 2**16
    return kernels("fedfa.data.transforms_triton", x.device) if plain and small and not transformed() else None


def normalise(x: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """(x − mean)/std, with a number a channel, or one for all."""
    return (x - _channels(mean, x)) / _channels(std, x)


def _channels(numbers: Sequence[float], like: Tensor) -> Tensor:
    """A column of numbers on the device, filled in there: a copy from the host could not be captured."""
    columns = [torch.full((1, 1, 1, 1), number, dtype=like.dtype, device=like.device) for number in numbers]
    return torch.cat(columns, dim=1)


def _pixels(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """x[b, c, rows[b, i], columns[b, j]]: one gather over pixels is two to three times as fast as one a side."""
    index = (rows.unsqueeze(2) * x.shape[-1] + columns.unsqueeze(1)).flatten(1).unsqueeze(1)
    return x.flatten(2).gather(2, index.expand(-1, x.shape[1], -1)).view(x.shape)


def _inside(index: Tensor, size: int, fill: Fill) -> Tensor:
    """Indices of pixels that exist, for any that are asked for: at the edge, or mirrored at it as often as needed."""
    if fill != "mirror":
        return index.clamp(0, size - 1)
    around = index % (2 * size)
    return torch.minimum(around, 2 * size - 1 - around)


@dataclass(frozen=True)
class Transform:
    """The interface: what is drawn, and what is done with it."""

    always: ClassVar[bool] = False
    """Whether it applies in evaluation as well. Such a transform draws nothing."""

    def sample(self, batch: int, generator: torch.Generator) -> Tensor:
        """What is drawn for a batch of that many samples, (batch, ...), on the generator's device."""
        return torch.empty(batch, 0, device=generator.device)

    def apply(self, x: Tensor, drawn: Tensor, mask: bool = False) -> Tensor:
        """Images (B, C, H, W) in floating point, or with `mask` masks of class numbers (B, 1, H, W), as drawn."""
        raise NotImplementedError(f"{type(self).__name__} must define apply()")

    def objection(self, channels: int) -> str | None:
        """Why it does not go with images of that many channels, in a line."""
        return None


@dataclass(frozen=True)
class Flip(Transform):
    """Images mirrored, left to right or top to bottom, each with a probability of its own."""

    horizontal: float = 0.5
    vertical: float = 0.0

    def __post_init__(self) -> None:
        for name, chance in (("horizontal", self.horizontal), ("vertical", self.vertical)):
            if not 0 <= chance <= 1:
                raise ValueError(f"flip: {name} is a probability, between 0 and 1, not {chance}")

    def sample(self, batch: int, generator: torch.Generator) -> Tensor:
        chance = torch.rand(batch, 2, generator=generator, device=generator.device)
        return torch.stack((chance[:, 0] < self.horizontal, chance[:, 1] < self.vertical), dim=1)

    def apply(self, x: Tensor, drawn: Tensor, mask: bool = False) -> Tensor:
        x = flip(x, drawn[:, 0], side=-1) if self.horizontal else x
        return flip(x, drawn[:, 1], side=-2) if self.vertical else x


@dataclass(frozen=True)
class Rotate(Transform):
    """Images turned by an angle between −`degrees` and `degrees`, all alike probable."""

    degrees: float = 30.0
    fill: Fill = "zeros"

    def __post_init__(self) -> None:
        if not 0 <= self.degrees <= 180:
            raise ValueError(f"rotate: degrees is the largest angle, between 0 and 180, not {self.degrees}")

    def sample(self, batch: int, generator: torch.Generator) -> Tensor:
        return (2 * torch.rand(batch, generator=generator, device=generator.device) - 1) * self.degrees

    def apply(self, x: Tensor, drawn: Tensor, mask: bool = False) -> Tensor:
        return rotate(x, drawn, self.fill, nearest=mask)


@dataclass(frozen=True)
class Crop(Transform):
    """Images padded by `padding` pixels on every side, and cut back to their size at a place drawn at random."""

    padding: int = 4
    fill: Fill = "zeros"

    def __post_init__(self) -> None:
        if self.padding < 0:
            raise ValueError(f"crop: padding is a number of pixels, 0 or more, not {self.padding}")

    def sample(self, batch: int, generator: torch.Generator) -> Tensor:
        widest = 2 * self.padding + 1
        return torch.randint(widest, (batch, 2), generator=generator, device=generator.device) - self.padding

    def apply(self, x: Tensor, drawn: Tensor, mask: bool = False) -> Tensor:
        return shift(x, drawn, self.fill)


@dataclass(frozen=True)
class Normalise(Transform):
    """(x − mean)/std of images in 0–1, a number for every channel or one for all; in evaluation too."""

    always: ClassVar[bool] = True
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)

    def __post_init__(self) -> None:
        if not self.mean or not self.std:
            raise ValueError("normalise: mean and std are a number for every channel, or one for all")
        if not all(math.isfinite(number) for number in self.mean):
            raise ValueError(f"normalise: mean is of finite numbers, not {list(self.mean)}")
        if not all(0 < number < math.inf for number in self.std):
            raise ValueError(f"normalise: std is of numbers above 0, not {list(self.std)}")

    def apply(self, x: Tensor, drawn: Tensor, mask: bool = False) -> Tensor:
        return x if mask else normalise(x, self.mean, self.std)

    def objection(self, channels: int) -> str | None:
        for name, numbers in (("mean", self.mean), ("std", self.std)):
            if len(numbers) not in (1, channels):
                return f"normalise: {name} has {len(numbers)} numbers, and the images have {channels} channels"
        return None


@dataclass(frozen=True)
class Transforms:
    """Transforms one after another, in the order they are listed in."""

    parts: tuple[Transform, ...] = ()

    def sample(self, batch: int, generator: torch.Generator) -> list[Tensor]:
        """A draw for each of them."""
        return [part.sample(batch, generator) for part in self.parts]

    def apply(self, batch: Batch, drawn: Sequence[Tensor]) -> Batch:
        """The batch after all of them: images, and masks where labels are masks (B, H, W)."""
        x, y = batch.x, batch.y
        for part, own in zip(self.parts, drawn, strict=True):
            x = part.apply(x, own)
            if y.dim() == 3:
                y = part.apply(y.unsqueeze(1), own, mask=True).squeeze(1)
        return replace(batch, x=x, y=y)

    def training(self, batch: Batch, streams: Callable[[str], torch.Generator]) -> Batch:
        """What a training step sees of a batch."""
        return self.apply(batch, self.sample(len(batch), streams("transforms"))) if self.parts else batch

    def evaluation(self, x: Tensor) -> Tensor:
        """What evaluation sees of images, and whoever else looks at them as they are."""
        nothing = x.new_empty(len(x), 0)
        for part in self.parts:
            x = part.apply(x, nothing) if part.always else x
        return x

    def objection(self, channels: int) -> str | None:
        """Why they do not go with images of that many channels, in a line."""
        return next((line for part in self.parts if (line := part.objection(channels))), None)
