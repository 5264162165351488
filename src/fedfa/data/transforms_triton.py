"""Images flipped and turned by one Triton kernel each. torch's own operations take two for the one, and nineteen for
the other, of which four write something for every pixel."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _own(height, width, block: tl.constexpr):
    """A program's image and pixels: row and column of each, and which of them exist."""
    pixel = tl.program_id(0) * block + tl.arange(0, block)
    return tl.program_id(1).to(tl.int64), pixel // width, pixel % width, pixel < height * width


@triton.jit(do_not_specialize=["height", "width"])
def _flip(x, flipped, step, out, channels, height, width, across: tl.constexpr, block: tl.constexpr):
    image, row, column, there = _own(height, width, block)
    turn = tl.load(flipped + image * step)
    if across:
        old = row * width + tl.where(turn, width - 1 - column, column)
    else:
        old = tl.where(turn, height - 1 - row, row) * width + column
    for c in range(channels):
        plane = (image * channels + c) * height * width
        tl.store(out + plane + row * width + column, tl.load(x + plane + old, mask=there), mask=there)


@triton.jit(do_not_specialize=["height", "width"])
def _turn(x, degrees, out, channels, height, width, block: tl.constexpr):
    """Bilinear between the four pixels around each place, with zeros outside of the image."""
    image, row, column, there = _own(height, width, block)
    angle = tl.load(degrees + image).to(tl.float32) * 0.017453292519943295
    cos = tl.cos(angle)
    sin = tl.sin(angle)
    middle_y = (height - 1) / 2.0
    middle_x = (width - 1) / 2.0
    down = row - middle_y
    along = column - middle_x
    at_y = sin * along + cos * down + middle_y
    at_x = cos * along - sin * down + middle_x
    top = tl.floor(at_y)
    left = tl.floor(at_x)
    low = at_y - top
    right = at_x - left
    y = top.to(tl.int32)
    x0 = left.to(tl.int32)
    above = there & (y >= 0) & (y < height)
    below = there & (y + 1 >= 0) & (y + 1 < height)
    before = (x0 >= 0) & (x0 < width)
    after = (x0 + 1 >= 0) & (x0 + 1 < width)
    for c in range(channels):
        plane = (image * channels + c) * height * width
        spot = x + plane + y * width + x0
        a = tl.load(spot, mask=above & before, other=0).to(tl.float32)
        b = tl.load(spot + 1, mask=above & after, other=0).to(tl.float32)
        d = tl.load(spot + width, mask=below & before, other=0).to(tl.float32)
        e = tl.load(spot + width + 1, mask=below & after, other=0).to(tl.float32)
        value = (1 - low) * ((1 - right) * a + right * b) + low * ((1 - right) * d + right * e)
        tl.store(out + plane + row * width + column, value, mask=there)


def flip(x: Tensor, flipped: Tensor, side: int) -> Tensor:
    """:func:`fedfa.data.transforms.flip` of images that lie in a row."""
    return _launched(_flip, x, (flipped, flipped.stride(0)), across=side == -1)


def turn(x: Tensor, degrees: Tensor) -> Tensor:
    """:func:`fedfa.data.transforms.rotate`, bilinear and with zeros, of images that lie in a row."""
    return _launched(_turn, x, (degrees.contiguous(),))


def _launched(kernel: Any, x: Tensor, drawn: tuple[Any, ...], **how: Any) -> Tensor:
    out = torch.empty_like(x)
    batch, channels, height, width = x.shape
    with torch.cuda.device_of(x):
        grid = (triton.cdiv(height * width, BLOCK), batch)
        kernel[grid](x, *drawn, out, channels, height, width, block=BLOCK, **how)
    return out
