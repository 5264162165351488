"""Max pooling of features in channels_last as two Triton kernels.

A program takes some pixels and some channels side by side in memory. The forward keeps which place of its window each
maximum came from; in the backward every pixel looks at the windows it is in, so nothing is added atomically.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from fedfa.layers import early_triton as early
from fedfa.layers.early_triton import let_follow, wait

TILE = 2048
"""Elements that a program holds at once."""
SHARED = ["pixels", "height", "width", "out_height", "out_width"]
"""Arguments whose value is not worth a compilation of its own."""


@triton.jit(do_not_specialize=SHARED)
def _forward(
    x, out, places, pixels, channels, height, width, out_height, out_width,
    size: tl.constexpr, stride: tl.constexpr, early: tl.constexpr, block_p: tl.constexpr, block_c: tl.constexpr,
):  # fmt: skip
    wait(early)
    p = (tl.program_id(0) * block_p + tl.arange(0, block_p))[:, None]
    c = (tl.program_id(1) * block_c + tl.arange(0, block_c))[None, :]
    mask = (p < pixels) & (c < channels)
    row = p // out_width
    corner = ((row // out_height) * height + row % out_height * stride) * width + p % out_width * stride
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
    p = (tl.program_id(0) * block_p + tl.arange(0, block_p))[:, None]
    c = (tl.program_id(1) * block_c + tl.arange(0, block_c))[None, :]
    mask = (p < pixels) & (c < channels)
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


def _grid(pixels: int, channels: int) -> tuple[tuple[int, int], dict[str, int]]:
    block_c = min(triton.next_power_of_2(channels), 64)
    block_p = TILE // block_c
    return (triton.cdiv(pixels, block_p), triton.cdiv(channels, block_c)), {"block_p": block_p, "block_c": block_c}


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
        grid, blocks = _grid(batch * out_height * out_width, channels)
        with torch.cuda.device_of(x):
            _forward[grid](
                x, out, places, batch * out_height * out_width, channels, height, width, out_height, out_width,
                size=size, stride=stride, **blocks, **early.options(x.device),
            )  # fmt: skip
        ctx.save_for_backward(x, places)
        ctx.windows = size, stride
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, places = ctx.saved_tensors
        size, stride = ctx.windows
        if torch.is_grad_enabled():  # a gradient of the gradient is asked for: let autograd build it
            (dx,) = torch.autograd.grad(F.max_pool2d(x, size, stride), x, grads[0], create_graph=True)
            return dx, None, None
        batch, channels, height, width = x.shape
        grad = grads[0].contiguous(memory_format=torch.channels_last)
        dx = torch.empty_like(x)
        grid, blocks = _grid(batch * height * width, channels)
        with torch.cuda.device_of(x):
            _backward[grid](
                grad, places, dx, batch * height * width, channels, height, width, *places.shape[2:],
                size=size, stride=stride, **blocks, **early.options(x.device),
            )  # fmt: skip
        return dx, None, None
