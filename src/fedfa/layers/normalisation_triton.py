"""Batch normalisation, with or without ReLU, as Triton kernels for features in channels_last: three launches each way.

Features are seen as rows of channels, a row a pixel. Forward: `_moments` (reads the features: mean and squared
deviations of some rows), `_finish` (small: those of all rows, running statistics, and a table of what every channel
needs), `_apply`. Backward: `_sums` (Σ g and Σ g·(x − μ), g the gradient before the ReLU), `_finish_sums` (small),
`_spread` (dx). Whether the ReLU let a value through is computed again, so that nothing but the features is kept. In
evaluation the table is made of the running statistics.

Sums are float32, in an order that shapes alone decide.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

from fedfa.layers import early_triton as early
from fedfa.layers.early_triton import let_follow, wait

TILE = 4096
"""Elements that a program holds at once."""
PROGRAMS = 256
"""As many programs as keep a large GPU busy, and as many parts as the small kernels hold at once."""
FEW = 16
"""Channels of a program of the small kernels."""
SHARED = ["rows", "chunk", "parts_made"]
"""Arguments whose value is not worth a compilation of its own."""


@triton.jit(do_not_specialize=SHARED)
def _moments(x, parts, rows, channels, chunk, early: tl.constexpr, block_r: tl.constexpr, block_c: tl.constexpr):
    """Mean and sum of squared deviations of every channel over a chunk of rows, into `parts` (chunks, 2, C). Values are
    measured from the chunk's first one, so that squares lose nothing to a large mean."""
    wait(early)
    c = (tl.program_id(1) * block_c + tl.arange(0, block_c))[None, :]
    inside = c < channels
    first = tl.program_id(0) * chunk
    last = tl.minimum(first + chunk, rows)
    pivot = tl.load(x + first * channels + c, mask=inside, other=0).to(tl.float32)
    total = tl.zeros([block_r, block_c], tl.float32)
    square = tl.zeros([block_r, block_c], tl.float32)
    for start in range(first, last, block_r):
        r = (start + tl.arange(0, block_r))[:, None]
        mask = (r < last) & inside
        value = tl.load(x + r * channels + c, mask=mask, other=0).to(tl.float32)
        value = tl.where(mask, value - pivot, 0.0)
        total += value
        square += value * value
    let_follow(early)
    count = (last - first) * 1.0
    gap = tl.sum(total, 0, keep_dims=True) / count
    deviation = tl.sum(square, 0, keep_dims=True) - gap * gap * count
    spot = parts + tl.program_id(0) * 2 * channels + c
    tl.store(spot, pivot + gap, mask=inside)
    tl.store(spot + channels, tl.where(deviation < 0, 0.0, deviation), mask=inside)


@triton.jit
def _follow(running, now, c, inside, momentum):
    before = tl.load(running + c, mask=inside, other=0)
    tl.store(running + c, before + momentum * (now - before), mask=inside)


@triton.jit(do_not_specialize=SHARED)
def _finish(
    parts, weight, offset, running_mean, running_var, batches, table,
    rows, channels, chunk, parts_made, momentum, eps,
    shifted: tl.constexpr, tracked: tl.constexpr, counted: tl.constexpr, early: tl.constexpr,
    block_p: tl.constexpr, block_c: tl.constexpr,
):  # fmt: skip
    """From `parts` to `table` (3, C): mean, 1/std, and weight/std. Moves the running statistics too."""
    let_follow(early)
    wait(early)
    c = (tl.program_id(0) * block_c + tl.arange(0, block_c))[None, :]
    inside = c < channels
    i = tl.arange(0, block_p)[:, None]
    mask = (i < parts_made) & inside
    own = tl.load(parts + i * 2 * channels + c, mask=mask, other=0)
    square = tl.load(parts + i * 2 * channels + channels + c, mask=mask, other=0)
    count = tl.where(mask, tl.minimum(rows - i * chunk, chunk), 0) * 1.0
    pivot = tl.load(parts + c, mask=inside, other=0)
    mean = pivot + tl.sum(tl.where(mask, count * (own - pivot), 0.0), 0, keep_dims=True) / rows
    gap = tl.where(mask, own - mean, 0.0)
    variance = tl.sum(square + count * gap * gap, 0, keep_dims=True) / rows
    inverse = 1 / tl.sqrt_rn(variance + eps)
    tl.store(table + c, mean, mask=inside)
    tl.store(table + channels + c, inverse, mask=inside)
    tl.store(table + 2 * channels + c, inverse * tl.load(weight + c, mask=inside, other=0), mask=inside)
    if tracked:
        if shifted:
            mean += tl.load(offset + c, mask=inside, other=0)
        _follow(running_mean, mean, c, inside, momentum)
        _follow(running_var, variance * (rows / (rows - 1.0)), c, inside, momentum)
    if counted:
        tl.store(batches, tl.load(batches) + 1, mask=tl.program_id(0) == 0)


@triton.jit
def _settle(
    weight, offset, running_mean, running_var, table, channels, eps, shifted: tl.constexpr, block_c: tl.constexpr
):
    """The table of running statistics."""
    c = tl.program_id(0) * block_c + tl.arange(0, block_c)
    inside = c < channels
    mean = tl.load(running_mean + c, mask=inside, other=0)
    if shifted:
        mean -= tl.load(offset + c, mask=inside, other=0)
    inverse = 1 / tl.sqrt_rn(tl.load(running_var + c, mask=inside, other=0) + eps)
    tl.store(table + c, mean, mask=inside)
    tl.store(table + channels + c, inverse, mask=inside)
    tl.store(table + 2 * channels + c, inverse * tl.load(weight + c, mask=inside, other=0), mask=inside)


@triton.jit
def _normal(value, table, bias, c, inside, channels):
    """What the ReLU is given, and the deviation from the mean that it comes from."""
    deviation = value.to(tl.float32) - tl.load(table + c, mask=inside, other=0)
    scale = tl.load(table + 2 * channels + c, mask=inside, other=0)
    return deviation * scale + tl.load(bias + c, mask=inside, other=0), deviation, scale


@triton.jit(do_not_specialize=SHARED)
def _apply(
    x, table, bias, out, rows, channels,
    relu: tl.constexpr, early: tl.constexpr, block_r: tl.constexpr, block_c: tl.constexpr,
):  # fmt: skip
    c = (tl.program_id(1) * block_c + tl.arange(0, block_c))[None, :]
    inside = c < channels
    r = (tl.program_id(0) * block_r + tl.arange(0, block_r))[:, None]
    mask = (r < rows) & inside
    value = tl.load(x + r * channels + c, mask=mask, other=0)
    wait(early)
    normal, _, _ = _normal(value, table, bias, c, inside, channels)
    if relu:
        normal = tl.where(normal <= 0, 0.0, normal)  # NaN stays
    let_follow(early)
    tl.store(out + r * channels + c, normal.to(value.dtype), mask=mask)


@triton.jit
def _behind(x, grad, table, bias, spot, mask, c, inside, channels, relu: tl.constexpr):
    """The gradient before the ReLU, and the features' deviation and scale."""
    value = tl.load(x + spot, mask=mask, other=0)
    slope = tl.load(grad + spot, mask=mask, other=0).to(tl.float32)
    normal, deviation, scale = _normal(value, table, bias, c, inside, channels)
    if relu:
        slope = tl.where(normal <= 0, 0.0, slope)
    return slope, deviation, scale


@triton.jit(do_not_specialize=SHARED)
def _sums(
    x, grad, table, bias, parts, rows, channels, chunk,
    relu: tl.constexpr, early: tl.constexpr, block_r: tl.constexpr, block_c: tl.constexpr,
):  # fmt: skip
    """Σ g and Σ g·(x − μ) of every channel over a chunk of rows, into `parts` (chunks, 2, C)."""
    wait(early)
    c = (tl.program_id(1) * block_c + tl.arange(0, block_c))[None, :]
    inside = c < channels
    first = tl.program_id(0) * chunk
    last = tl.minimum(first + chunk, rows)
    outer = tl.zeros([block_r, block_c], tl.float32)
    inner = tl.zeros([block_r, block_c], tl.float32)
    for start in range(first, last, block_r):
        r = (start + tl.arange(0, block_r))[:, None]
        mask = (r < last) & inside
        slope, deviation, _ = _behind(x, grad, table, bias, r * channels + c, mask, c, inside, channels, relu)
        outer += slope
        inner += tl.where(mask, slope * deviation, 0.0)
    let_follow(early)
    spot = parts + tl.program_id(0) * 2 * channels + c
    tl.store(spot, tl.sum(outer, 0, keep_dims=True), mask=inside)
    tl.store(spot + channels, tl.sum(inner, 0, keep_dims=True), mask=inside)


@triton.jit(do_not_specialize=SHARED)
def _finish_sums(
    parts, table, pulls, grads, rows, channels, parts_made,
    early: tl.constexpr, block_p: tl.constexpr, block_c: tl.constexpr,
):  # fmt: skip
    """From `parts` to `grads` (3, C), of weight, bias and offset (0), and to `pulls` (2, C): what all of a channel's
    rows pull at each of them, outright and by its deviation."""
    let_follow(early)
    wait(early)
    c = (tl.program_id(0) * block_c + tl.arange(0, block_c))[None, :]
    inside = c < channels
    i = tl.arange(0, block_p)[:, None]
    mask = (i < parts_made) & inside
    outer = tl.sum(tl.load(parts + i * 2 * channels + c, mask=mask, other=0), 0, keep_dims=True)
    inner = tl.sum(tl.load(parts + i * 2 * channels + channels + c, mask=mask, other=0), 0, keep_dims=True)
    inverse = tl.load(table + channels + c, mask=inside, other=0)
    tl.store(grads + c, inner * inverse, mask=inside)
    tl.store(grads + channels + c, outer, mask=inside)
    tl.store(grads + 2 * channels + c, tl.zeros_like(outer), mask=inside)
    tl.store(pulls + c, outer / rows, mask=inside)
    tl.store(pulls + channels + c, inner * inverse * inverse / rows, mask=inside)


@triton.jit(do_not_specialize=SHARED)
def _spread(
    x, grad, table, bias, pulls, out, rows, channels,
    relu: tl.constexpr, early: tl.constexpr, block_r: tl.constexpr, block_c: tl.constexpr,
):  # fmt: skip
    """dx = weight/std·(g − mean of g − (x − μ)·mean of g·(x − μ)/var)."""
    c = (tl.program_id(1) * block_c + tl.arange(0, block_c))[None, :]
    inside = c < channels
    r = (tl.program_id(0) * block_r + tl.arange(0, block_r))[:, None]
    mask = (r < rows) & inside
    spot = r * channels + c
    slope, deviation, scale = _behind(x, grad, table, bias, spot, mask, c, inside, channels, relu)
    wait(early)
    outer = tl.load(pulls + c, mask=inside, other=0)
    inner = tl.load(pulls + channels + c, mask=inside, other=0)
    let_follow(early)
    tl.store(out + spot, (scale * (slope - outer - deviation * inner)).to(out.dtype.element_ty), mask=mask)


class _Launch:
    """Grids and blocks that follow from the features' shape."""

    def __init__(self, x: Tensor) -> None:
        self.channels = x.shape[1]
        self.rows = x.numel() // self.channels
        block_c = min(triton.next_power_of_2(self.channels), 64)
        own = early.options(x.device)
        self.blocks = {**own, "block_r": TILE // block_c, "block_c": block_c, "num_warps": 8}
        across = triton.cdiv(self.channels, block_c)
        self.each = (triton.cdiv(self.rows, TILE // block_c), across)
        wanted = max(1, min(self.each[0], PROGRAMS // across))
        self.chunk = triton.cdiv(self.rows, wanted)
        self.parts = triton.cdiv(self.rows, self.chunk)
        self.chunks = (self.parts, across)
        self.few = (triton.cdiv(self.channels, FEW),)
        self.small = {**own, "block_p": triton.next_power_of_2(self.parts), "block_c": FEW}


def normalised(norm: nn.BatchNorm2d, x: Tensor, offset: Tensor | None, relu: bool) -> Tensor:
    """norm(x + offset) of features in channels_last, and with `relu` its ReLU; `offset` is a number a channel."""
    with torch.cuda.device_of(x):
        way = _Normalise.apply if norm.training else _evaluated
        out: Tensor = way(x, norm.weight, norm.bias, offset, norm, relu)
    return out


def _evaluated(
    x: Tensor, weight: Tensor, bias: Tensor, offset: Tensor | None, norm: nn.BatchNorm2d, relu: bool
) -> Tensor:
    launch = _Launch(x)
    table = torch.empty((3, launch.channels), device=x.device)
    out = torch.empty_like(x)
    _settle[launch.few](
        weight, weight if offset is None else offset, norm.running_mean, norm.running_var, table,
        launch.channels, norm.eps, shifted=offset is not None, block_c=FEW,
    )  # fmt: skip
    _apply[launch.each](x, table, bias, out, launch.rows, launch.channels, relu=relu, **launch.blocks)
    return out


def _none(offset: Tensor | None) -> Tensor | None:
    """An offset's gradient."""
    return None if offset is None else torch.zeros_like(offset)


class _Normalise(torch.autograd.Function):
    """Both ways for autograd, which gets plain operations where it wants a gradient of the gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, offset: Tensor | None, norm: nn.BatchNorm2d, relu: bool
    ) -> Tensor:
        launch = _Launch(x)
        rows, channels = launch.rows, launch.channels
        parts, table = (torch.empty((n, channels), device=x.device) for n in (2 * launch.parts, 3))
        out = torch.empty_like(x)
        count = norm.num_batches_tracked
        _moments[launch.chunks](x, parts, rows, channels, launch.chunk, **launch.blocks)
        _finish[launch.few](
            parts, weight, weight if offset is None else offset, norm.running_mean, norm.running_var,
            table if count is None else count, table, rows, channels, launch.chunk, launch.parts,
            float(norm.momentum or 0), float(norm.eps),
            shifted=offset is not None, tracked=bool(norm.momentum), counted=count is not None, **launch.small,
        )  # fmt: skip
        _apply[launch.each](x, table, bias, out, rows, channels, relu=relu, **launch.blocks)
        ctx.save_for_backward(x, weight, bias, offset, table)
        ctx.given = norm.eps, relu
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, offset, table = ctx.saved_tensors
        eps, relu = ctx.given
        if torch.is_grad_enabled():
            plain = F.batch_norm(x, None, None, weight, bias, training=True, eps=eps)
            plain = F.relu(plain) if relu else plain
            return (
                *torch.autograd.grad(plain, (x, weight, bias), grads[0], create_graph=True),
                _none(offset),
                None,
                None,
            )
        with torch.cuda.device_of(x):
            launch = _Launch(x)
            rows, channels = launch.rows, launch.channels
            grad = grads[0].contiguous(memory_format=torch.channels_last)
            parts, pulls, own = (torch.empty((n, channels), device=x.device) for n in (2 * launch.parts, 2, 3))
            out = torch.empty_like(x)
            _sums[launch.chunks](x, grad, table, bias, parts, rows, channels, launch.chunk, relu=relu, **launch.blocks)
            _finish_sums[launch.few](parts, table, pulls, own, rows, channels, launch.parts, **launch.small)
            _spread[launch.each](x, grad, table, bias, pulls, out, rows, channels, relu=relu, **launch.blocks)
        return out, own[0], own[1], None if offset is None else own[2].to(offset.dtype), None, None
