"""Pooling that is fast in channels_last on a GPU, where torch's own takes a tenth of an AlexNet's step."""

from __future__ import annotations

from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedfa.kernels import in_channels_last, kernels, transformed


class MaxPool2d(nn.MaxPool2d):
    """torch's layer, as Triton kernels for features in channels_last on a GPU. Same values, same gradients."""

    def forward(self, x: Tensor) -> Tensor:
        fused = _fused(self, x)
        out: Tensor = super().forward(x) if fused is None else fused.max_pool(x, self.kernel_size, self.stride)
        return out


def _fused(layer: nn.MaxPool2d, x: Tensor) -> ModuleType | None:
    """The kernels, where they are there and take such windows and features."""
    plain = (layer.padding, layer.dilation, layer.ceil_mode, layer.return_indices) == (0, 1, False, False)
    if not plain or not isinstance(layer.kernel_size, int) or not isinstance(layer.stride, int):
        return None
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16) or x.dim() != 4:
        return None
    if transformed() or not in_channels_last(x):
        return None
    small = x.numel() < 2**31 and layer.kernel_size <= min(11, *x.shape[2:])  # places in 32 bits, windows' in a byte
    return kernels("fedfa.layers.pooling_triton", x.device) if small else None


class AdaptiveAvgPool2d(nn.AdaptiveAvgPool2d):
    """torch's layer. From a side that is one longer than the output, as AlexNet has it at 256 pixels, its windows are
    two by two, one apart: those torch averages several times as fast."""

    def forward(self, x: Tensor) -> Tensor:
        sides = self.output_size if isinstance(self.output_size, tuple) else (self.output_size,) * 2
        if x.device.type == "cuda" and x.dim() == 4 and x.shape[2:] == tuple((side or -1) + 1 for side in sides):
            return F.avg_pool2d(x, 2, 1)
        out: Tensor = super().forward(x)
        return out
