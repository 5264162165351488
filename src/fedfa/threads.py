"""How many threads a run gets on the CPU where the experiment does not say (`threads = 0`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

GRAIN = 10**9
"""Multiply-adds of a forward pass that are worth a thread. Threads meet after every operation: in a step of LeNet they
wait for each other longer than they work, and much longer where another process holds a core (docs/engines.md)."""


def useful_threads(model: nn.Module, sample: Tensor, batch_size: int) -> int:
    """A thread for every :data:`GRAIN` of a step's forward pass, at least one, at most those that torch has.

    It depends on the experiment and the number of cores alone, since sums depend on it in turn.
    """
    return max(1, min(torch.get_num_threads(), multiply_adds(model, sample) * batch_size // GRAIN))


@torch.no_grad()
def multiply_adds(model: nn.Module, x: Tensor) -> int:
    """What a forward pass over `x` costs, by the layers that have a matrix or kernels for their weight."""
    total = 0

    def count(layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        nonlocal total
        transposed = isinstance(layer, nn.modules.conv._ConvTransposeNd)  # whose weight is by inputs, not by outputs
        side = inputs[0] if transposed else output
        total += side.numel() * layer.weight[0].numel()  # type: ignore[index]  # torch types a module's attributes as anything

    weighty = (nn.Linear, nn.modules.conv._ConvNd)
    hooks = [layer.register_forward_hook(count) for layer in model.modules() if isinstance(layer, weighty)]
    try:
        model.eval()(x)
    finally:
        for hook in hooks:
            hook.remove()
    return total
