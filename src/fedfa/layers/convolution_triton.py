"""Folding as Triton kernels: images of few channels and long strides as images of many channels and stride 1.

Pixel (s·u + i, s·v + j) of channel c, with s the stride, becomes channel (c·s + i)·s + j of pixel (u, v); channels are
filled up with zeros to a power of two, and weights to a multiple of s pixels a side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

Way = Callable[[Tensor, Tensor, bool], None]

TILE = 4096
"""Elements of a program."""


@triton.jit
def _pixels(
    pixels, channels, height, width, down, across, step_n, step_c, step_h, step_w, padding,
    stride: tl.constexpr, block_p: tl.constexpr, block_c: tl.constexpr,
):  # fmt: skip
    """Of a program's folded pixels: where their entries lie in images (N, C, H, W), which of them are there at all,
    where they lie in the folded ones, (N, down, across, block_c), and which of those there are."""
    p = (tl.program_id(0) * block_p + tl.arange(0, block_p))[:, None]
    k = tl.arange(0, block_c)[None, :]
    h = p // across % down * stride + k // stride % stride - padding
    w = p % across * stride + k % stride - padding
    c = k // (stride * stride)
    there = (p < pixels) & (c < channels) & (h >= 0) & (h < height) & (w >= 0) & (w < width)
    plain = p // across // down * step_n + c * step_c + h * step_h + w * step_w
    return plain, there, p * block_c + k, p < pixels


@triton.jit(do_not_specialize=["pixels"])
def _fold(
    x, out, pixels, channels, height, width, down, across, step_n, step_c, step_h, step_w, padding,
    stride: tl.constexpr, block_p: tl.constexpr, block_c: tl.constexpr,
):  # fmt: skip
    plain, there, spot, inside = _pixels(
        pixels, channels, height, width, down, across, step_n, step_c, step_h, step_w, padding, stride, block_p, block_c
    )
    tl.store(out + spot, tl.load(x + plain, mask=there, other=0).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["pixels"])
def _unfold(
    grad, out, pixels, channels, height, width, down, across, step_n, step_c, step_h, step_w, padding,
    stride: tl.constexpr, block_p: tl.constexpr, block_c: tl.constexpr,
):  # fmt: skip
    """The way back, for a gradient."""
    plain, there, spot, _ = _pixels(
        pixels, channels, height, width, down, across, step_n, step_c, step_h, step_w, padding, stride, block_p, block_c
    )
    tl.store(out + plain, tl.load(grad + spot, mask=there, other=0).to(out.dtype.element_ty), mask=there)


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


class Fold(NamedTuple):
    """How images and weights of a convolution are folded."""

    channels: int
    size: int
    stride: int
    padding: int

    @property
    def side(self) -> int:
        """Pixels of a folded weight, up and across."""
        side: int = triton.cdiv(self.size, self.stride)
        return side

    @property
    def wide(self) -> int:
        """Channels of what is folded."""
        wide: int = triton.next_power_of_2(self.channels * self.stride**2)
        return wide

    def images(self, plain: Tensor, small: Tensor, back: bool) -> None:
        """Fold images, or with `back` put the folded ones back into place."""
        batch, channels, height, width = plain.shape
        down, across = small.shape[2:]
        pixels, block_p = batch * down * across, TILE // self.wide
        if back:
            plain.zero_()  # not every pixel need be in a window
        way, both = (_unfold, (small, plain)) if back else (_fold, (plain, small))
        way[(triton.cdiv(pixels, block_p),)](
            *both, pixels, channels, height, width, down, across, *plain.stride(), self.padding,
            stride=self.stride, block_p=block_p, block_c=self.wide,
        )  # fmt: skip

    def weight(self, plain: Tensor, small: Tensor, back: bool) -> None:
        """The same of a weight."""
        way, both = (_unfold_weight, (small, plain)) if back else (_fold_weight, (plain, small))
        way[(len(plain), self.side**2)](
            *both, self.channels, self.size, *plain.stride(), stride=self.stride, side=self.side, block_c=self.wide
        )


def folded(x: Tensor, weight: Tensor, stride: int, padding: int, dtype: torch.dtype) -> Tensor:
    """The convolution, in `dtype` and channels_last."""
    size = weight.shape[2]
    fold = Fold(x.shape[1], size, stride, padding)
    sides = [(length + 2 * padding - size) // stride + fold.side for length in x.shape[2:]]
    small = _Folded.apply(x, fold.images, (len(x), *sides, fold.wide), dtype)
    kernel = _Folded.apply(weight, fold.weight, (len(weight), fold.side, fold.side, fold.wide), dtype)
    return F.conv2d(small, kernel)


class _Folded(torch.autograd.Function):
    """Images or a weight, folded by `way`; :class:`_Unfolded` is the way back, and each the other's gradient."""

    @staticmethod
    def forward(ctx: Any, plain: Tensor, way: Way, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        small = torch.empty(shape, dtype=dtype, device=plain.device).movedim(-1, 1)
        with torch.cuda.device_of(plain):
            way(plain, small, False)
        ctx.given = way, torch.empty_like(plain, device="meta")
        return small

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _Unfolded.apply(grads[0], *ctx.given), None, None, None


class _Unfolded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, way: Way, like: Tensor) -> Tensor:
        small = grad.contiguous(memory_format=torch.channels_last)
        plain = torch.empty_like(like, device=grad.device)
        with torch.cuda.device_of(plain):
            way(plain, small, True)
        ctx.given = way, tuple(grad.movedim(1, -1).shape), grad.dtype
        return plain

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _Folded.apply(grads[0], *ctx.given), None, None
