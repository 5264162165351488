"""FedRobust: Reisizadeh et al., *Robust Federated Learning: The Case of Affine Distribution Shifts*, NeurIPS 2020."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedfa.algorithms.base import Algorithm, at_least
from fedfa.engines.client import Client
from fedfa.state import frozen_statistics
from fedfa.task import Batch


@dataclass(frozen=True)
class FedRobust(Algorithm):
    """FedAvg against the worst affine shift x ↦ Λx + δ of each client's inputs (Eq. 4): before every step on w, a
    step of ascent on ℓ(Λx + δ) − a·‖Λ − I‖² − b·‖δ‖², with Λ and δ the client's own, kept between rounds.

    A full Λ for 3×256×256 images would take 155 GB: here Λ mixes the channels of a pixel (3×3 for RGB) and δ is a
    number a channel, the same at every pixel. The paper's projections are replaced by its penalties. The ascent sees
    the same draws as the step and moves no running statistics; evaluation sees images as they are.
    """

    map_rate: float = 1e-3
    shift_rate: float = 0.02
    map_penalty: float = 100.0
    shift_penalty: float = 4.0

    def __post_init__(self) -> None:
        at_least(0, map_rate=self.map_rate, shift_rate=self.shift_rate)
        at_least(0, map_penalty=self.map_penalty, shift_penalty=self.shift_penalty)

    def begin(self, client: Client) -> None:
        channels, device = client.federation.channels, client.federation.device
        client.memory.setdefault("map", torch.eye(channels, device=device))
        client.memory.setdefault("shift", torch.zeros(channels, device=device))

    def gradients(self, client: Client, batch: Batch) -> Tensor:
        matrix, shift = client.memory["map"], client.memory["shift"]
        self._ascend(client, batch, matrix, shift)
        return super().gradients(client, replace(batch, x=affine(batch.x, matrix, shift)))

    def _ascend(self, client: Client, batch: Batch, matrix: Tensor, shift: Tensor) -> None:
        leaves = [matrix.detach().clone().requires_grad_(), shift.detach().clone().requires_grad_()]
        with client.rewound(), frozen_statistics(client.model):
            loss = self.loss(client, replace(batch, x=affine(batch.x, *leaves)))
        up_matrix, up_shift = torch.autograd.grad(loss, leaves)
        beside = matrix - torch.eye(len(matrix), device=matrix.device)
        matrix += self.map_rate * (up_matrix - 2 * self.map_penalty * beside)
        shift += self.shift_rate * (up_shift - 2 * self.shift_penalty * shift)


def affine(x: Tensor, matrix: Tensor, shift: Tensor) -> Tensor:
    """Λx + δ at every pixel of (B, C, H, W) images, with Λ (C, C) and δ (C)."""
    return torch.einsum("dc,bchw->bdhw", matrix, x) + shift.view(-1, 1, 1)
