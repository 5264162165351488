"""The arithmetic of training on a GPU: float32, its faster tf32, or bfloat16 where it does no harm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

Precision = Literal["float32", "tf32", "bf16"]

WIDE = 128
"""Channels from which tf32 is faster in channels_last: ResNet-18 by a seventh, while LeNet is slower by as much."""


@contextmanager
def arithmetic(precision: Precision) -> Iterator[None]:
    """While it lasts, products on a GPU are taken in float32, or in tf32 where its ten bits are allowed."""
    allowed = precision != "float32"
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def cast(model: nn.Module, precision: Precision, device: torch.device) -> nn.Module:
    """The model on the device, in the memory format that is faster there; with ``bf16`` its forward is autocast.
    Parameters, gradients, statistics and outputs stay in float32."""
    model = model.to(device)
    if device.type == "cuda" and (precision == "bf16" or (precision == "tf32" and _wide(model))):
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's types leave this form out
    if precision != "bf16":
        return model
    kind = type(model)

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            output: Tensor = kind.forward(self, x)
        return output.float()

    # A subclass, and not a method set on the object: a copy of the model must not call the model it was copied from.
    model.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    return model


def _wide(model: nn.Module) -> bool:
    """Whether cuDNN would spend more on turning features for its tensor cores than on narrow channels."""
    return any(isinstance(module, nn.Conv2d) and module.in_channels >= WIDE for module in model.modules())
