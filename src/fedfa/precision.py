"""The arithmetic of training on a GPU: float32, its faster tf32, or bfloat16 where it does no harm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedfa.kernels import transformed
from fedfa.rows import copy_all

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
        with torch.autocast(x.device.type, torch.bfloat16), _rounded_weights(self):
            output: Tensor = kind.forward(self, x)
        return output.float()

    # A subclass, and not a method set on the object: a copy of the model must not call the model it was copied from.
    model.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    return model


def _wide(model: nn.Module) -> bool:
    """Whether cuDNN would spend more on turning features for its tensor cores than on narrow channels."""
    return any(isinstance(module, nn.Conv2d) and module.in_channels >= WIDE for module in model.modules())


ROUNDED = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear)
"""Layers whose weights autocast rounds."""


@contextmanager
def _rounded_weights(model: nn.Module) -> Iterator[None]:
    """While it lasts, weights that autocast would round one by one are rounded already. On a GPU that is one launch for
    all of them and one for their gradients, in place of two for each."""
    layers = [layer for layer in model.modules() if isinstance(layer, ROUNDED)]
    whole = {layer: weight for layer in layers if _whole(weight := layer._parameters.get("weight"))}
    if not whole or transformed():
        yield
        return
    try:
        together = _Rounded.apply(*whole.values())  # type: ignore[no-untyped-call]  # torch's
        for layer, rounded in zip(whole, together, strict=True):
            layer._parameters["weight"] = rounded
        yield
    finally:
        for layer, weight in whole.items():
            layer._parameters["weight"] = weight


def _whole(weight: Tensor | None) -> bool:
    return weight is not None and weight.dtype == torch.float32


class _Rounded(torch.autograd.Function):
    """Tensors in bfloat16, and their gradients in the tensors' own type."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.like = [torch.empty_like(tensor, device="meta") for tensor in tensors]
        ctx.set_materialize_grads(False)
        rounded = [torch.empty_like(tensor, dtype=torch.bfloat16) for tensor in tensors]
        copy_all(rounded, tensors)
        return tuple(rounded)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # a graph of this backward is asked for
            return tuple(g if g is None else g.to(like.dtype) for g, like in zip(grads, ctx.like, strict=True))
        found = [
            g if g is None else torch.empty_like(like, device=g.device) for g, like in zip(grads, ctx.like, strict=True)
        ]
        copy_all([tensor for tensor in found if tensor is not None], [g for g in grads if g is not None])
        return tuple(found)
