"""Folding as Triton kernels: images of few channels and long strides as images of many channels and stride 1.

Pixel (s·u + i, s·v + j) of channel c, with s the stride, becomes channel (c·s + i)·s + j of pixel (u, v); channels are
filled up with zeros to a power of two, and weights to a multiple of s pixels a side.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

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
    """How images and weights are folded: by a convolution's stride, padding and size, and the number of channels."""

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

    def folded(self, length: int) -> int:
        """Pixels of a folded image along a side."""
        return (length + 2 * self.padding - self.size) // self.stride + self.side


def folded(x: Tensor, weight: Tensor, stride: int, padding: int, dtype: torch.dtype) -> Tensor:
    """The convolution, in `dtype` and channels_last."""
    fold = Fold(x.shape[1], weight.shape[2], stride, padding)
    out: Tensor = F.conv2d(_Images.apply(x, fold, dtype), _Weight.apply(weight, fold, dtype))
    return out


def _move_pixels(way: Any, plain: Tensor, small: Tensor, fold: Fold) -> None:
    """Between images and folded ones."""
    batch, channels, height, width = plain.shape
    down, across = small.shape[2:]
    pixels, block_p = batch * down * across, TILE // fold.wide
    with torch.cuda.device_of(plain):
        way[(triton.cdiv(pixels, block_p),)](
            *((plain, small) if way is _fold else (small, plain)), pixels, channels, height, width, down, across,
            *plain.stride(), fold.padding, stride=fold.stride, block_p=block_p, block_c=fold.wide,
        )  # fmt: skip


def _move_weight(way: Any, plain: Tensor, small: Tensor, fold: Fold) -> None:
    """Between a weight and the folded one."""
    with torch.cuda.device_of(plain):
        way[(len(plain), fold.side**2)](
            *((plain, small) if way is _fold_weight else (small, plain)), fold.channels, fold.size, *plain.stride(),
            stride=fold.stride, side=fold.side, block_c=fold.wide,
        )  # fmt: skip


class _Images(torch.autograd.Function):
    """Images, folded; :class:`_ImagesBack` is the way back, and each the other's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fold: Fold, dtype: torch.dtype) -> Tensor:
        sides = [fold.folded(length) for length in x.shape[2:]]
        out = torch.empty((len(x), *sides, fold.wide), dtype=dtype, device=x.device).movedim(-1, 1)
        _move_pixels(_fold, x, out, fold)
        ctx.fold, ctx.like = fold, torch.empty_like(x, device="meta")
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _ImagesBack.apply(grads[0], ctx.fold, ctx.like), None, None


class _ImagesBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, fold: Fold, like: Tensor) -> Tensor:
        out = torch.zeros_like(like, device=grad.device)  # not all pixels need be in a window
        _move_pixels(_unfold, out, grad.contiguous(memory_format=torch.channels_last), fold)
        ctx.fold, ctx.dtype = fold, grad.dtype
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _Images.apply(grads[0], ctx.fold, ctx.dtype), None, None


class _Weight(torch.autograd.Function):
    """A weight, folded; as with images."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, fold: Fold, dtype: torch.dtype) -> Tensor:
        shape = (len(weight), fold.side, fold.side, fold.wide)
        out = torch.empty(shape, dtype=dtype, device=weight.device).movedim(-1, 1)
        _move_weight(_fold_weight, weight, out, fold)
        ctx.fold, ctx.like = fold, torch.empty_like(weight, device="meta")
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _WeightBack.apply(grads[0], ctx.fold, ctx.like), None, None


class _WeightBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, fold: Fold, like: Tensor) -> Tensor:
        out = torch.empty_like(like, device=grad.device)
        _move_weight(_unfold_weight, out, grad.contiguous(memory_format=torch.channels_last), fold)
        ctx.fold, ctx.dtype = fold, grad.dtype
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _Weight.apply(grads[0], ctx.fold, ctx.dtype), None, None
