"""The augmentations once more, in NumPy, one sample and one pixel at a time, as the papers' formulas read."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def mixup(x: Array, partner: Sequence[int], lam: float) -> Array:
    return np.stack([lam * x[i] + (1 - lam) * x[j] for i, j in enumerate(partner)])


def box_pixels(lam: float, centre: Sequence[float], sides: Sequence[int]) -> list[tuple[int, ...]]:
    """Pixels whose middle lies in the box, in pixel coordinates: corners first, then cut off at the border."""
    ranges = []
    for c, n in zip(centre, sides, strict=True):
        low, high = max(n * (c - math.sqrt(1 - lam) / 2), 0), min(n * (c + math.sqrt(1 - lam) / 2), n)
        ranges.append([i for i in range(n) if low < i + 0.5 < high])
    return list(itertools.product(*ranges))


def cutmix(x: Array, partner: Sequence[int], pixels: list[tuple[int, ...]]) -> Array:
    """For images (B, C, H, W) or masks (B, H, W): the pixels of the partner's."""
    out = x.copy()
    for i, j in enumerate(partner):
        for row, column in pixels:
            out[i, ..., row, column] = x[j, ..., row, column]
    return out


def mixstyle(x: Array, partner: Sequence[int], lam: Sequence[float], eps: float) -> Array:
    out = np.empty_like(x)
    for i, j in enumerate(partner):
        for c in range(x.shape[1]):
            own, other = x[i, c], x[j, c]
            sigma, sigma_other = math.sqrt(own.var() + eps), math.sqrt(other.var() + eps)
            gamma = lam[i] * sigma + (1 - lam[i]) * sigma_other
            beta = lam[i] * own.mean() + (1 - lam[i]) * other.mean()
            out[i, c] = gamma * (own - own.mean()) / sigma + beta
    return out


def moex(x: Array, partner: Sequence[int], eps: float) -> Array:
    out = np.empty_like(x)
    for i, j in enumerate(partner):
        for place in np.ndindex(x.shape[2:]):
            own, other = x[(i, slice(None), *place)], x[(j, slice(None), *place)]
            normalised = (own - own.mean()) / math.sqrt(own.var() + eps)
            out[(i, slice(None), *place)] = normalised * math.sqrt(other.var() + eps) + other.mean()
    return out
