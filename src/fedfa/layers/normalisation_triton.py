"""Batch normalisation, with or without ReLU, of features in channels_last on CUDA: three launches forward, three
backward, and three for the gradient of that, of :mod:`fedfa.layers.normalisation_kernels_triton`."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fedfa.layers import early_triton as early
from fedfa.layers import normalisation_kernels_triton as kernels

TILE = 4096
"""Elements that a program holds at once."""
PROGRAMS = 256
"""As many programs as keep a large GPU busy, and as many parts as the small kernels hold at once."""
TILES = 8
"""As many of these as a program of the sums takes, where there are so many: beside other lanes, more programs that do
less each only wait for a place."""
FEW = 16
"""Channels of a program of the small kernels."""


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
        wanted = max(1, min(triton.cdiv(self.each[0], TILES), PROGRAMS // across))
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
    kernels.settle[launch.few](
        weight, weight if offset is None else offset, norm.running_mean, norm.running_var, table,
        launch.channels, norm.eps, shifted=offset is not None, block_c=FEW,
    )  # fmt: skip
    kernels.apply[launch.each](x, table, bias, out, launch.rows, launch.channels, relu=relu, **launch.blocks)
    return out


class _Normalise(torch.autograd.Function):
    """Both ways for autograd."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, offset: Tensor | None, norm: nn.BatchNorm2d, relu: bool
    ) -> Tensor:
        launch = _Launch(x)
        rows, channels = launch.rows, launch.channels
        parts, table = (torch.empty((n, channels), device=x.device) for n in (2 * launch.parts, 3))
        out = torch.empty_like(x)
        count = norm.num_batches_tracked
        kernels.moments[launch.chunks](x, parts, rows, channels, launch.chunk, **launch.blocks)
        kernels.finish[launch.few](
            parts, weight, weight if offset is None else offset, norm.running_mean, norm.running_var,
            table if count is None else count, table, rows, channels, launch.chunk, launch.parts,
            float(norm.momentum or 0), float(norm.eps),
            shifted=offset is not None, tracked=bool(norm.momentum), counted=count is not None, **launch.small,
        )  # fmt: skip
        kernels.apply[launch.each](x, table, bias, out, rows, channels, relu=relu, **launch.blocks)
        ctx.save_for_backward(x, weight, bias, offset, table)
        ctx.relu = relu
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, offset, table = ctx.saved_tensors
        if torch.is_grad_enabled():  # a graph of this backward is asked for
            dx, own = _Back.apply(grads[0], x, weight, bias, table, ctx.relu)
        else:
            dx, own = _back(grads[0], x, bias, table, ctx.relu)
        return dx, own[0], own[1], None if offset is None else own[2].to(offset.dtype), None, None


def _back(grad: Tensor, x: Tensor, bias: Tensor, table: Tensor, relu: bool) -> tuple[Tensor, Tensor]:
    """Gradients of the features, and (3, C) of weight, bias and offset."""
    with torch.cuda.device_of(x):
        launch = _Launch(x)
        rows, channels = launch.rows, launch.channels
        grad = grad.contiguous(memory_format=torch.channels_last)
        parts, pulls, own = (torch.empty((n, channels), device=x.device) for n in (2 * launch.parts, 2, 3))
        out = torch.empty_like(x)
        kernels.sums[launch.chunks](
            x, grad, table, bias, parts, rows, channels, launch.chunk, relu=relu, **launch.blocks
        )
        kernels.finish_sums[launch.few](parts, table, pulls, own, rows, channels, launch.parts, **launch.small)
        kernels.spread[launch.each](x, grad, table, bias, pulls, out, rows, channels, relu=relu, **launch.blocks)
    return out, own


class _Back(torch.autograd.Function):
    """`_back`, where a gradient of it is asked for. With x̄ the normalised features, s = 1/std, w the weight and ⟨⟩
    means over rows, dx = w·s·(g − ⟨g⟩ − x̄·q), q = ⟨g·x̄⟩; the weight's gradient is Σ g·x̄, the bias' Σ g. Their products
    with h, a and b, summed, have the gradients

    - w·s·(h − ⟨h⟩ − x̄·d) + a·x̄ + b, d = ⟨h·x̄⟩, with respect to g,
    - −w·s²·(x̄·(r − 3·q·d) + d·(g − ⟨g⟩) + q·(h − ⟨h⟩)) + a·s·(g − ⟨g⟩ − x̄·q), r = ⟨g·h⟩ − ⟨g⟩·⟨h⟩, to x,
    - n·s·(r − q·d) to w,

    since ds/dx = −s²·x̄/n and dq/dx = s·(g − ⟨g⟩ − x̄·q)/n.
    """

    @staticmethod
    def forward(
        ctx: Any, grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, table: Tensor, relu: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(grad, x, bias, table)
        ctx.relu = relu
        ctx.set_materialize_grads(False)
        return _back(grad, x, bias, table, relu)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad, x, bias, table = ctx.saved_tensors
        turn, pull = grads
        with torch.cuda.device_of(x):
            launch = _Launch(x)
            rows, channels = launch.rows, launch.channels
            grad = grad.contiguous(memory_format=torch.channels_last)
            turn = torch.zeros_like(x) if turn is None else turn.contiguous(memory_format=torch.channels_last)
            parts, own = (torch.empty((n, channels), device=x.device) for n in (5 * launch.parts, 7))
            back, out = torch.empty_like(grad), torch.empty_like(x)
            kernels.second_sums[launch.chunks](
                x, grad, turn, table, bias, parts, rows, channels, launch.chunk, relu=ctx.relu, **launch.blocks
            )
            kernels.second_finish[launch.few](
                parts, table, own if pull is None else pull.contiguous(), own, rows, channels, launch.parts,
                pulled=pull is not None, **launch.small,
            )  # fmt: skip
            kernels.second_spread[launch.each](
                x, grad, turn, table, bias, own, back, out, rows, channels, relu=ctx.relu, **launch.blocks
            )
        return back, out, own[6], None, None, None
