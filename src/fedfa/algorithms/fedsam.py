"""FedSAM: Qu et al., *Generalized Federated Learning via Sharpness Aware Minimization*, ICML 2022."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedfa.algorithms.base import Algorithm, at_least
from fedfa.engines.client import Client
from fedfa.state import frozen_statistics
from fedfa.task import Batch

TINY = 1e-12
"""Where ‖g‖ is smaller there is nothing to climb."""


@dataclass(frozen=True)
class FedSAM(Algorithm):
    """FedAvg whose clients step along the gradient at w + ρ·g/‖g‖, the worst place nearby (Algorithm 1), from w.

    ‖g‖ is over all parameters. Both passes see the same draws of random layers and Dropout, and running statistics
    move in the first alone. ρ = 0.05 as the FedFA authors have it; their base optimiser is Adam at SGD's rate, which
    is a matter of the experiment (`optimizer`), not of this rule.
    """

    rho: float = 0.05

    def __post_init__(self) -> None:
        at_least(0, rho=self.rho)

    def gradients(self, client: Client, batch: Batch) -> Tensor:
        return uphill(super().gradients, client, batch, self.rho)


def uphill(gradients: Callable[[Client, Batch], Tensor], client: Client, batch: Batch, radius: float) -> Tensor:
    """`gradients` at `radius` uphill of the parameters, which are then put back; returns the loss where they stand."""
    with client.rewound():
        loss = gradients(client, batch)
    moving = [(p.detach(), p.grad) for p in client.model.parameters() if p.grad is not None]
    weights, slopes = [w for w, _ in moving], [g for _, g in moving]
    before = [w.clone() for w in weights]  # w + e − e is not w
    scale = radius / torch.stack(torch._foreach_norm(slopes)).norm().clamp_min(TINY)
    torch._foreach_add_(weights, list(torch._foreach_mul(slopes, scale)))
    with frozen_statistics(client.model):
        gradients(client, batch)
    torch._foreach_copy_(weights, before)
    return loss
