"""Max pooling of features in channels_last as Triton kernels.

A program takes some pixels and some channels side by side in memory. The forward keeps which place of its window each
maximum came from; in the backward every pixel looks at the windows it is in, so nothing is added atomically. The
gradient of that is taken from the same places.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedfa.layers import early_triton as early
from fedfa.layers.early_triton import let_follow, wait

TILE = 2048
"""Elements that a program holds at once."""
SHARED = ["pixels", "height", "width", "out_height", "out_width"]
"""Arguments whose value is not worth a compilation of its own."""


@triton.jit
def _own(pixels, channels, block_p: tl.constexpr, block_c: tl.constexpr):
    """A program's pixels and channels, and which of them there are."""
    p = (tl.program_id(0) * block_p + tl.arange(0, block_p))[:, None]
    c = (tl.program_id(1) * block_c + tl.arange(0, block_c))[None, :]
    return p, c, (p < pixels) & (c < channels)


@triton.jit
def _corner(p, height, width, out_height, out_width, stride: tl.constexpr):
    """Where the windows of pooled pixels begin."""
    row = p // out_width
    return ((row // out_height) * height + row % out_height * stride) * width + p % out_width * stride


@triton.jit(do_not_specialize=SHARED)
def _forward(
    x, out, places, pixels, channels, height, width, out_height, out_width,
    size: tl.constexpr, stride: tl.constexpr, early: tl.constexpr, block_p: tl.constexpr, block_c: tl.constexpr,
):  # fmt: skip
    wait(early)
    p, c, mask = _own(pixels, channels, block_p, block_c)
    corner = _corner(p, height, width, out_height, out_width, stride)
    best = tl.load(x + corner * channels + c, mask=mask, other=0).to(tl.float32)
    place = tl.zeros([block_p, block_c], tl.int32)
    for k in tl.static_range(1, size * size):
        spot = corner + (k // size) * width + k % size
        value = tl.load(x + spot * channels + c, mask=mask, other=0).to(tl.float32)
        better = (value > best) | (value != value)  # noqa: PLR0124  # the first of equals, and NaN, as torch has it
        best = tl.where(better, value, best)
        place = tl.where(better, k, place)
    let_follow(early)
    tl.store(out + p * channels + c, best, mask=mask)
    tl.store(places + p * channels + c, place.to(tl.int8), mask=mask)


@triton.jit(do_not_specialize=SHARED)
def _backward(
    grad, places, dx, pixels, channels, height, width, out_height, out_width,
    size: tl.constexpr, stride: tl.constexpr, early: tl.constexpr, block_p: tl.constexpr, block_c: tl.constexpr,
):  # fmt: skip
    wait(early)
    p, c, mask = _own(pixels, channels, block_p, block_c)
    across = p % width
    down = p // width % height
    sample = p // width // height
    total = tl.zeros([block_p, block_c], tl.float32)
    windows: tl.constexpr = (size + stride - 1) // stride
    for a in tl.static_range(windows):
        for b in tl.static_range(windows):
            y = down // stride - a
            x = across // stride - b
            own_y = down - y * stride
            own_x = across - x * stride
            inside = (y >= 0) & (y < out_height) & (own_y < size) & (x >= 0) & (x < out_width) & (own_x < size)
            spot = ((sample * out_height + y) * out_width + x) * channels + c
            place = tl.load(places + spot, mask=mask & inside, other=-1).to(tl.int32)
            slope = tl.load(grad + spot, mask=mask & inside, other=0).to(tl.float32)
            total += tl.where(place == own_y * size + own_x, slope, 0.0)
    let_follow(early)
    tl.store(dx + p * channels + c, total, mask=mask)


@triton.jit(do_not_specialize=SHARED)
def _taken(
    x, places, out, pixels, channels, height, width, out_height, out_width,
    size: tl.constexpr, stride: tl.constexpr, early: tl.constexpr, block_p: tl.constexpr, block_c: tl.constexpr,
):  # fmt: skip
    """What lies where the maxima came from."""
    wait(early)
    p, c, mask = _own(pixels, channels, block_p, block_c)
    corner = _corner(p, height, width, out_height, out_width, stride)
    place = tl.load(places + p * channels + c, mask=mask, other=0).to(tl.int32)
    spot = corner + place // size * width + place % size
    tl.store(out + p * channels + c, tl.load(x + spot * channels + c, mask=mask, other=0), mask=mask)


def max_pool(x: Tensor, size: int, stride: int) -> Tensor:
    """Maxima over windows of `size` pixels a side, `stride` apart, of features in channels_last."""
    out: Tensor = _MaxPool.apply(x, size, stride)
    return out


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, stride: int) -> Tensor:
        batch, channels, height, width = x.shape
        out_height, out_width = ((side - size) // stride + 1 for side in (height, width))
        shape = (batch, channels, out_height, out_width)
        out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        places = torch.empty_like(out, dtype=torch.int8)
        _launch(_forward, (x, out, places), out, x, out, size, stride)
        ctx.save_for_backward(places)
        ctx.given = x.shape, size, stride
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _Back.apply(grads[0], *ctx.saved_tensors, *ctx.given), None, None


class _Back(torch.autograd.Function):
    """Gradients to where the maxima came from; :class:`_Taken` is the way back, and each the other's gradient."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, places: Tensor, shape: torch.Size, size: int, stride: int) -> Tensor:
        grad = grad.contiguous(memory_format=torch.channels_last)
        out = torch.empty(shape, dtype=grad.dtype, device=grad.device, memory_format=torch.channels_last)
        _launch(_backward, (grad, places, out), out, out, grad, size, stride)
        ctx.save_for_backward(places)
        ctx.given = size, stride
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _Taken.apply(grads[0], *ctx.saved_tensors, *ctx.given), None, None, None, None


class _Taken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor, size: int, stride: int) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        out = torch.empty_like(places, dtype=x.dtype)
        _launch(_taken, (x, places, out), out, x, out, size, stride)
        ctx.save_for_backward(places)
        ctx.given = x.shape, size, stride
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _Back.apply(grads[0], *ctx.saved_tensors, *ctx.given), None, None, None


def _launch(
    kernel: Any, given: tuple[Tensor, ...], each: Tensor, whole: Tensor, pooled: Tensor, size: int, stride: int
) -> None:
    """A program for some pixels of `each`, which is `whole` or `pooled`: the features before and after."""
    batch, channels, height, width = each.shape
    pixels = batch * height * width
    block_c = min(triton.next_power_of_2(channels), 64)
    block_p = TILE // block_c
    with torch.cuda.device_of(whole):
        kernel[(triton.cdiv(pixels, block_p), triton.cdiv(channels, block_c))](
            *given, pixels, channels, *whole.shape[2:], *pooled.shape[2:],
            size=size, stride=stride, block_p=block_p, block_c=block_c, **early.options(whole.device),
        )  # fmt: skip
