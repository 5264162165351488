"""digit-sites: real handwritten digits, seen through four simulated acquisition devices. No download."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedfa.data.federation import Federation
from fedfa.data.sources.drawing import (
    SIDES,
    blur,
    client_index,
    deal,
    normal,
    smooth_field,
    stream,
    to_uint8,
    uniform,
)

Device = Callable[[Tensor, torch.Generator], Tensor]
"""Ink (N, 1, H, W), 0 for none and 1 for full, to what the device records of it, RGB (N, 3, H, W)."""


@dataclass(frozen=True)
class DigitSites:
    """Handwritten digits at four sites, each of which records them with a device of its own.

    *Real*: the 1,797 digits and their labels, scikit-learn's bundled test part of UCI's "Optical Recognition of
    Handwritten Digits" (8×8 pixels, 13 writers, E. Alpaydin and C. Kaynak). Each is used exactly once.

    *Simulated*: the four devices, and which of them saw which digit. The clients therefore differ in how images
    look (feature shift) and in size (40, 30, 20 and 10 %), not in how often a class occurs. Who wrote a digit is
    not known, so writers stand on all sides of the split, and test scores say nothing about new writers.

    Attributes:
        split: seed of the whole federation: assignment, recording and split. None follows `build`'s seed.
        size: height and width of the images.
    """

    split: int | None = None
    size: int = 28

    def __post_init__(self) -> None:
        if self.size < 16:
            raise ValueError(f"digit-sites: size is at least 16, not {self.size}")

    def build(self, seed: int) -> Federation:
        """The federation: `size`×`size` RGB, 60/20/20 per client, classes in equal shares to within rounding."""
        seed = seed if self.split is None else self.split
        digits, labels = _load_digits()
        ink = _as_ink(digits, self.size)
        sites = deal(labels, TURNS, stream(seed, "sites"))
        images = torch.empty(len(ink), 3, self.size, self.size, dtype=torch.uint8)
        clients = {}
        for site, (name, device) in enumerate(DEVICES.items()):
            members = torch.nonzero(sites == site).flatten()
            images[members] = to_uint8(device(ink[members], stream(seed, name)))
            clients[name] = client_index(members, deal(labels[members], SIDES, stream(seed, f"{name} split")))
        return Federation("digit-sites", "classification", images, labels, tuple("0123456789"), clients)


def _load_digits() -> tuple[Tensor, Tensor]:
    """Digits (1797, 1, 8, 8) in 0–1, and their classes."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("digit-sites needs scikit-learn: pip install 'fedfa[demo]'") from error
    bunch = load_digits()
    digits = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    return digits, torch.tensor(bunch.target, dtype=torch.int64)


def _as_ink(digits: Tensor, size: int) -> Tensor:
    """Strokes at full resolution: the 8×8 densities interpolated, their grey flanks steepened, a margin around."""
    inner = round(0.86 * size)
    margin = size - inner
    wide = F.interpolate(digits, (inner, inner), mode="bicubic", align_corners=False)
    strokes = torch.sigmoid(12 * (wide - 0.5))
    return F.pad(strokes, (margin // 2, margin - margin // 2, margin // 2, margin - margin // 2))


def _colour(*rgb: float) -> Tensor:
    return torch.tensor(rgb).view(1, 3, 1, 1)


def _paint(ink: Tensor, pen: Tensor, ground: Tensor) -> Tensor:
    return ground + ink * (pen - ground)


def _pixels(ink: Tensor) -> float:
    """How many pixels a length of one pixel at 28×28 is, so that devices look alike at every size."""
    return ink.shape[-1] / 28


def scanner(ink: Tensor, generator: torch.Generator) -> Tensor:
    """Flatbed: near-black ink on white paper, slightly blurred, next to no noise."""
    page = _paint(blur(ink, 0.6 * _pixels(ink)), pen=_colour(0.10, 0.10, 0.16), ground=_colour(0.97, 0.97, 0.96))
    return page + 0.01 * normal(page, generator)


def phone(ink: Tensor, generator: torch.Generator) -> Tensor:
    """Hand-held photo: tilted and turned, warm lamp light that falls off to one side, sensor noise."""
    page = _paint(_tilt(ink, generator), pen=_colour(0.16, 0.18, 0.42), ground=_colour(0.95, 0.76, 0.50))
    page = blur(page * _lamp(ink, generator), 0.5 * _pixels(ink))
    return page + 0.045 * normal(page, generator)


def tablet(ink: Tensor, generator: torch.Generator) -> Tensor:
    """Stylus: a bright stroke of any colour with a glow on a dark screen, no noise."""
    thin = torch.sigmoid(14 * (blur(ink, 0.6 * _pixels(ink)) - 0.55))
    glow = blur(thin, 2.0 * _pixels(ink))
    stroke = _screen_colours(len(ink), generator)
    return _colour(0.05, 0.06, 0.10) + stroke * (0.85 * thin + 0.35 * glow)


def fax(ink: Tensor, generator: torch.Generator) -> Tensor:
    """Thermal fax: half resolution, black or nothing, speckle, and streaks along the feed, on grey paper."""
    size = ink.shape[-1]
    coarse = F.interpolate(blur(ink, 0.4 * _pixels(ink)), (size // 2, size // 2), mode="area")
    chance = torch.rand(coarse.shape, generator=generator)
    dots = ((coarse + 0.15 * normal(coarse, generator) > 0.45) & (chance > 0.03)) | (chance > 0.98)
    # A dirty or dead element of the print head marks or misses a whole column.
    column = torch.rand(len(ink), 1, 1, size // 2, generator=generator)
    dots = (dots | (column > 0.98)) & (column > 0.05)
    printed = F.interpolate(dots.float(), (size, size), mode="nearest")
    return _paint(printed, pen=_colour(0.20, 0.20, 0.24), ground=_colour(0.78, 0.78, 0.74))


DEVICES: dict[str, Device] = {"scanner": scanner, "phone": phone, "tablet": tablet, "fax": fax}
TURNS = (0, 1, 2, 0, 1, 3, 0, 1, 2, 0)
"""The order in which the devices take a digit each: 40, 30, 20 and 10 %."""


def _tilt(ink: Tensor, generator: torch.Generator) -> Tensor:
    """Every image turned by up to 20°, scaled by up to 12 % and seen at a slant (a projective map of the plane)."""
    count, size = len(ink), ink.shape[-1]
    angle = uniform(-math.pi / 9, math.pi / 9, (count, 1), generator)
    zoom = uniform(0.88, 1.12, (count, 1), generator)
    slant = uniform(-0.22, 0.22, (count, 2), generator)
    axis = torch.linspace(-1, 1, size) * (1 - 1 / size)
    y, x = (part.reshape(1, -1) for part in torch.meshgrid(axis, axis, indexing="ij"))
    depth = zoom * (1 + slant[:, :1] * x + slant[:, 1:] * y)
    turned = torch.stack((angle.cos() * x - angle.sin() * y, angle.sin() * x + angle.cos() * y), dim=-1)
    grid = (turned / depth.unsqueeze(-1)).view(count, size, size, 2)
    return F.grid_sample(ink, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def _lamp(ink: Tensor, generator: torch.Generator) -> Tensor:
    """Uneven light: brightness between about 0.35 and 1.1 over the image, smooth."""
    count, size = len(ink), ink.shape[-1]
    angle = uniform(0, 2 * math.pi, (count, 1, 1, 1), generator)
    fall = uniform(0.15, 0.35, (count, 1, 1, 1), generator)
    axis = torch.linspace(-1, 1, size)
    ramp = angle.cos() * axis.view(1, 1, 1, -1) + angle.sin() * axis.view(1, 1, -1, 1)
    shadow = smooth_field((1, 3, 3), (count, 1, size, size), generator)
    return (0.78 + fall * ramp + 0.05 * shadow).clamp_min(0.2)


def _screen_colours(count: int, generator: torch.Generator) -> Tensor:
    """Saturated colours of all hues, (count, 3, 1, 1), each with one channel full."""
    hue = torch.rand(count, 1, 1, 1, generator=generator) + torch.tensor([0.0, 1 / 3, 2 / 3]).view(1, 3, 1, 1)
    wave = 0.5 + 0.5 * torch.cos(2 * math.pi * hue)
    return 0.25 + 0.75 * wave / wave.amax(1, keepdim=True)
