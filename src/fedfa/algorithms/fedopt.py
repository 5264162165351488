"""FedOpt: Reddi et al., *Adaptive Federated Optimization*, ICLR 2021: FedAdam, FedYogi and FedAdagrad."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace

from torch import Tensor, nn

from fedfa.algorithms.base import Algorithm, at_least, fraction
from fedfa.reduction import Reduced
from fedfa.state import ServerState, group, zeros_for_parameters


@dataclass(frozen=True)
class FedOpt(Algorithm):
    """An adaptive optimiser on the server, for Δ = mean(wᵢ) − w (Algorithm 2):

        m ← β₁m + (1 − β₁)Δ,  w ← w + η·m/(√v + τ),  v from τ² on, as the subclasses have it

    without bias correction, as in the paper. Parameters alone are moved so; BatchNorm's statistics and counters are
    averaged. β₁ = 0.9, τ = 1e-3; η is tuned in the paper, between 1e-3 and 1.
    """

    lr: float = 0.01
    beta1: float = 0.9
    tau: float = 1e-3

    def __post_init__(self) -> None:
        at_least(0, lr=self.lr, tau=self.tau)
        fraction(beta1=self.beta1, beta2=getattr(self, "beta2", 0.0))
        if not self.tau:
            raise ValueError("tau is above 0: parameters that did not move are divided by it")

    @abstractmethod
    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """The new v, from Δ²."""

    def start(self, model: nn.Module) -> dict[str, Tensor]:
        first = zeros_for_parameters(model, "first")
        second = {f"second/{name}": zero + self.tau**2 for name, zero in group(first, "first").items()}
        return {**first, **second}

    def aggregate(self, server: ServerState, reduced: Reduced) -> ServerState:
        model, memory = {**server.model, **reduced.model}, dict(server.memory)
        for name, last in group(server.memory, "first").items():
            delta = reduced.model[name] - server.model[name]
            m = self.beta1 * last + (1 - self.beta1) * delta
            v = self.second(memory[f"second/{name}"], delta.square())
            model[name] = server.model[name] + self.lr * m / (v.sqrt() + self.tau)
            memory[f"first/{name}"], memory[f"second/{name}"] = m, v
        return replace(server, model=model, memory=memory)


@dataclass(frozen=True)
class FedAdagrad(FedOpt):
    """v ← v + Δ²."""

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        return v + square


@dataclass(frozen=True)
class FedAdam(FedOpt):
    """v ← β₂v + (1 − β₂)Δ², β₂ = 0.99."""

    beta2: float = 0.99

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * square


@dataclass(frozen=True)
class FedYogi(FedOpt):
    """v ← v − (1 − β₂)Δ²·sign(v − Δ²), β₂ = 0.99: unlike Adam's, v shrinks no faster than it grows."""

    beta2: float = 0.99

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - self.beta2) * square * (v - square).sign()
