"""FedProx: Li et al., *Federated Optimization in Heterogeneous Networks*, MLSys 2020."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedfa.algorithms.base import Algorithm, at_least
from fedfa.engines.client import Client
from fedfa.task import Batch


@dataclass(frozen=True)
class FedProx(Algorithm):
    """FedAvg whose clients minimise their loss + μ/2·‖w − w_t‖² (Eq. 2), w_t being the model they were sent.

    The term's gradient, μ·(w − w_t), is added to the loss's; the loss that is reported is without it, as every
    method's is. μ = 0.01 is the FedFA authors'; FedBN's code has 0.001. Inexact local solvers (γ of the paper) are
    not here: every client makes its epochs.
    """

    mu: float = 0.01

    def __post_init__(self) -> None:
        at_least(0, mu=self.mu)

    def gradients(self, client: Client, batch: Batch) -> Tensor:
        loss = super().gradients(client, batch)
        client.add_to_gradients(lambda name, w, start: self.mu * (w - start))
        return loss
