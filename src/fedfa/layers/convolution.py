"""A convolution of images that is fast in channels_last on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedfa.kernels import in_channels_last, kernels, transformed

MOST = 64
"""Channels that an image may have when it is folded."""


def convolve(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """conv(x) without its bias. Images of few channels that are taken in long strides, as by an AlexNet's first layer,
    are folded in channels_last on a GPU: a square of `stride` by `stride` pixels becomes one of as many more channels,
    and the convolution one of stride 1. Tensor cores are idle where there are three channels: at 48 the layer takes a
    fifth of the time."""
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else conv.weight.dtype
    fold = kernels("fedfa.layers.convolution_triton", x.device) if _foldable(conv, x, dtype) else None
    out: Tensor
    if fold is None:
        out = conv._conv_forward(x, conv.weight, None)
    else:
        out = fold.folded(x, conv.weight, conv.stride[0], int(conv.padding[0]), dtype)
    return out


def _foldable(conv: nn.Conv2d, x: Tensor, dtype: torch.dtype) -> bool:
    if x.dim() != 4 or transformed() or not in_channels_last(conv.weight):
        return False
    if not x.is_floating_point() or not dtype.is_floating_point or dtype == torch.float64:
        return False
    stride, size = conv.stride[0], conv.kernel_size[0]
    square = conv.stride == (stride, stride) and conv.kernel_size == (size, size)
    plain = conv.groups == 1 and conv.dilation == (1, 1) and conv.padding_mode == "zeros"
    padded = not isinstance(conv.padding, str) and conv.padding[0] == conv.padding[1]
    few = 1 < stride <= size and conv.in_channels <= 4 and conv.in_channels * stride * stride <= MOST
    return square and plain and padded and few and x.numel() < 2**31 and min(x.shape[2:]) >= size
