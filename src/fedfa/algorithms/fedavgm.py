"""FedAvgM: Hsu, Qi and Brown, *Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification*, 2019."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor, nn

from fedfa.algorithms.base import Algorithm, fraction
from fedfa.reduction import Reduced
from fedfa.state import ServerState, group, zeros_for_parameters


@dataclass(frozen=True)
class FedAvgM(Algorithm):
    """FedAvg with momentum on the server: v ← βv + (w − avg), w ← w − v (§4.3).

    Written as w ← avg − β·v with the v of before, which is the same and is FedAvg exactly at β = 0. Parameters alone
    have momentum; BatchNorm's statistics and counters are averaged. β is 0.7 to 0.997 in Hsu et al.; the FedFA
    authors' code has 0.01, which is nearly FedAvg. A steady update ends up 1/(1 − β) times as long: lower `lr` with it.
    """

    beta: float = 0.9

    def __post_init__(self) -> None:
        fraction(beta=self.beta)

    def start(self, model: nn.Module) -> dict[str, Tensor]:
        return zeros_for_parameters(model, "velocity")

    def aggregate(self, server: ServerState, reduced: Reduced) -> ServerState:
        model, memory = {**server.model, **reduced.model}, dict(server.memory)
        for name, velocity in group(server.memory, "velocity").items():
            average = reduced.model[name]
            model[name] = average - self.beta * velocity
            memory[f"velocity/{name}"] = self.beta * velocity + (server.model[name] - average)
        return replace(server, model=model, memory=memory)
