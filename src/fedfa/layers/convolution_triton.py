"""Folding as Triton kernels: images of few channels and long strides as images of many channels and stride 1.

Pixel (s·u + i, s·v + j) of channel c, with s the stride, becomes channel (c·s + i)·s + j of pixel (u, v); channels are
filled up with zeros to a power of two, and weights to a multiple of s pixels a side.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096
"""Elements of a program."""


@triton.jit(do_not_specialize=["pixels"])
def _fold(
    x, out, pixels, channels, height, width, down, across, step_n, step_c, step_h, step_w, padding,
    stride: tl.constexpr, block_p: tl.constexpr, block_c: tl.constexpr,
):  # fmt: skip
    """Images (N, C, H, W), padded and folded, into (N, down, across, block_c)."""
    p = (tl.program_id(0) * block_p + tl.arange(0, block_p))[:, None]
    k = tl.arange(0, block_c)[None, :]
    h = p // across % down * stride + k // stride % stride - padding
    w = p % across * stride + k % stride - padding
    c = k // (stride * stride)
    there = (p < pixels) & (c < channels) & (h >= 0) & (h < height) & (w >= 0) & (w < width)
    sample = p // across // down
    value = tl.load(x + sample * step_n + c * step_c + h * step_h + w * step_w, mask=there, other=0)
    tl.store(out + p * block_c + k, value.to(out.dtype.element_ty), mask=p < pixels)


@triton.jit
def _places(
    channels, size, step_o, step_c, step_h, step_w, stride: tl.constexpr, side: tl.constexpr, block_c: tl.constexpr
):
    """Of a program's output channel and place: where its entries lie in a weight (O, C, size, size), which of them are
    there at all, and where they lie in the folded one, (O, side, side, block_c)."""
    own = tl.program_id(0)
    place = tl.program_id(1)
    k = tl.arange(0, block_c)
    h = place // side * stride + k // stride % stride
    w = place % side * stride + k % stride
    c = k // (stride * stride)
    there = (c < channels) & (h < size) & (w < size)
    plain = own * step_o + c * step_c + h * step_h + w * step_w
    return plain, there, (own * side * side + place) * block_c + k


@triton.jit
def _fold_weight(
    weight, out, channels, size, step_o, step_c, step_h, step_w,
    stride: tl.constexpr, side: tl.constexpr, block_c: tl.constexpr,
):  # fmt: skip
    plain, there, spot = _places(channels, size, step_o, step_c, step_h, step_w, stride, side, block_c)
    tl.store(out + spot, tl.load(weight + plain, mask=there, other=0).to(out.dtype.element_ty))


@triton.jit
def _unfold_weight(
    grad, out, channels, size, step_o, step_c, step_h, step_w,
    stride: tl.constexpr, side: tl.constexpr, block_c: tl.constexpr,
):  # fmt: skip
    """The way back, for a gradient."""
    plain, there, spot = _places(channels, size, step_o, step_c, step_h, step_w, stride, side, block_c)
    tl.store(out + plain, tl.load(grad + spot).to(out.dtype.element_ty), mask=there)


def folded(x: Tensor, weight: Tensor, stride: int, padding: int, dtype: torch.dtype) -> Tensor:
    """The convolution of images that need no gradient, in `dtype` and channels_last."""
    with torch.cuda.device_of(x):
        out: Tensor = _Folded.apply(x, weight, stride, padding, dtype)
    return out


class _Folded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int, padding: int, dtype: torch.dtype) -> Tensor:
        batch, channels, height, width = x.shape
        outputs, _, size, _ = weight.shape
        side, wide = triton.cdiv(size, stride), triton.next_power_of_2(channels * stride * stride)
        down, across = ((length + 2 * padding - size) // stride + side for length in (height, width))
        small = torch.empty((batch, down, across, wide), dtype=dtype, device=x.device)
        pixels, block_p = batch * down * across, TILE // wide
        _fold[(triton.cdiv(pixels, block_p),)](
            x, small, pixels, channels, height, width, down, across, *x.stride(), padding,
            stride=stride, block_p=block_p, block_c=wide,
        )  # fmt: skip
        kernel = torch.empty((outputs, side, side, wide), dtype=dtype, device=x.device)
        _fold_weight[(outputs, side * side)](
            weight, kernel, channels, size, *weight.stride(), stride=stride, side=side, block_c=wide
        )
        small, kernel = small.movedim(-1, 1), kernel.movedim(-1, 1)
        ctx.save_for_backward(x, weight, small, kernel)
        ctx.given = stride, padding, dtype
        return F.conv2d(small, kernel)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, small, kernel = ctx.saved_tensors
        stride, padding, dtype = ctx.given
        if torch.is_grad_enabled():  # a gradient of the gradient is asked for: let autograd build it
            plain = F.conv2d(x.to(dtype), weight.to(dtype), None, stride, padding)
            return None, *torch.autograd.grad(plain, weight, grads[0], create_graph=True), None, None, None
        settings = (None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1, (False, True, False))
        grad = torch.ops.aten.convolution_backward(grads[0], small, kernel, *settings)[1]
        grad = grad.contiguous(memory_format=torch.channels_last)
        out = torch.empty_like(weight)
        outputs, wide, side, _ = kernel.shape
        with torch.cuda.device_of(x):
            _unfold_weight[(outputs, side * side)](
                grad, out, *weight.shape[1:3], *out.stride(), stride=stride, side=side, block_c=wide
            )
        return None, out, None, None, None
