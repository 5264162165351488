"""FedDyn: Acar et al., *Federated Learning Based on Dynamic Regularization*, ICLR 2021."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor, nn

from fedfa.algorithms.base import Algorithm, at_least
from fedfa.engines.client import Client
from fedfa.reduction import Reduced
from fedfa.state import ServerState, group, zeros_for_parameters
from fedfa.task import Batch


@dataclass(frozen=True)
class FedDyn(Algorithm):
    """Clients minimise their loss − ⟨∇ᵢ, w⟩ + α/2·‖w − w_t‖² (Eq. 1), so that their optima come to agree.

    Then ∇ᵢ ← ∇ᵢ − α(wᵢ − w_t); the server's h ← h − α·(|S|/N)·mean(wᵢ − w_t) and w = mean(wᵢ) − h/α (Algorithm 1).
    The means are weighted as the experiment's `weighting` says; the paper's are not. The terms' gradient is added to
    the loss's, and the loss that is reported is without them. Parameters alone have ∇ᵢ and h; BatchNorm's statistics
    are averaged. α is 0.01 to 0.1 in the paper.
    """

    alpha: float = 0.1

    def __post_init__(self) -> None:
        at_least(0, alpha=self.alpha)
        if not self.alpha:
            raise ValueError("alpha is above 0: the server divides by it")

    def start(self, model: nn.Module) -> dict[str, Tensor]:
        return zeros_for_parameters(model, "h")

    def begin(self, client: Client) -> None:
        for name, _, start in client.anchors():
            client.memory.setdefault(f"dual/{name}", start.new_zeros(start.shape))

    def gradients(self, client: Client, batch: Batch) -> Tensor:
        loss = super().gradients(client, batch)
        dual = group(client.memory, "dual")
        client.add_to_gradients(lambda name, w, start: self.alpha * (w - start) - dual[name])
        return loss

    def end(self, client: Client) -> None:
        for name, w, start in client.anchors():
            client.memory[f"dual/{name}"] = client.memory[f"dual/{name}"] - self.alpha * (w.detach() - start)

    def aggregate(self, server: ServerState, reduced: Reduced) -> ServerState:
        model, memory = {**server.model, **reduced.model}, dict(server.memory)
        part = reduced.clients / server.population
        for name, last in group(server.memory, "h").items():
            average = reduced.model[name]
            h = last - self.alpha * part * (average - server.model[name])
            model[name] = average - h / self.alpha
            memory[f"h/{name}"] = h
        return replace(server, model=model, memory=memory)
