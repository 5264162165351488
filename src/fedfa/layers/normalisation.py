"""Convolution, batch normalisation and, if wanted, ReLU one after another, fast in channels_last on a GPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedfa.kernels import in_channels_last, kernels, transformed
from fedfa.layers.convolution import convolve

TYPES = (torch.float32, torch.float16, torch.bfloat16)


def normalised(conv: nn.Conv2d, norm: nn.BatchNorm2d, x: Tensor, relu: nn.ReLU | None = None) -> Tensor:
    """relu(norm(conv(x))), or norm(conv(x)). In channels_last on a GPU all but the convolution is Triton kernels that
    read and write the features as seldom as can be: torch's own take a quarter of an AlexNet's step. The convolution's
    bias is not added there: a normalised batch does not show it, and its gradient is 0. It moves the running mean
    alone."""
    layers = (conv, norm) if relu is None else (conv, norm, relu)
    fused = kernels("fedfa.layers.normalisation_triton", conv.weight.device)
    out: Tensor
    if fused is None or transformed() or any(map(_heard, layers)):
        out = norm(conv(x))
        return out if relu is None else relu(out)
    y = convolve(conv, x)
    if _takes(norm, y):
        out = fused.normalised(norm, y, conv.bias, relu is not None)
        return out
    out = norm(y if conv.bias is None else y + conv.bias.view(-1, 1, 1).to(y.dtype))
    return out if relu is None else F.relu(out)


def _heard(layer: nn.Module) -> bool:
    """Whether somebody wants to know what goes through a layer."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks)


def _takes(norm: nn.BatchNorm2d, y: Tensor) -> bool:
    """Whether the kernels normalise such features."""
    if y.dtype not in TYPES or not in_channels_last(y) or y.numel() >= 2**31:
        return False
    if norm.weight is None or norm.running_mean is None or norm.momentum is None or norm.weight.dtype != torch.float32:
        return False
    return norm.training or not (torch.is_grad_enabled() and (y.requires_grad or norm.weight.requires_grad))
