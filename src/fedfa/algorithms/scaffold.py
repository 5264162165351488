"""SCAFFOLD: Karimireddy et al., *SCAFFOLD: Stochastic Controlled Averaging for Federated Learning*, ICML 2020."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from fedfa.algorithms.base import Algorithm, at_least
from fedfa.engines.client import Client, Local
from fedfa.reduction import Reduced, Report
from fedfa.state import ServerState, group, zeros_for_parameters
from fedfa.task import Batch


@dataclass(frozen=True)
class Scaffold(Algorithm):
    """FedAvg whose clients step along g − cᵢ + c: control variates take out what is a client's own (Algorithm 1,
    option II).

    After K steps at rate η, cᵢ changes by (w_t − w)/(K·η) − c; the server adds |S|/N times the mean change, every
    client counting the same, to c. Both start at 0, so the first round is FedAvg. (w_t − w)/(K·η) is a mean gradient
    under plain SGD alone: other optimisers are refused. Clients send as much again as the model. `server_rate` is
    η_g; BatchNorm's statistics are averaged.
    """

    server_rate: float = 1.0

    def __post_init__(self) -> None:
        at_least(0, server_rate=self.server_rate)

    def objection(self, model: nn.Module, local: Local, held_out: Sequence[str]) -> str | None:
        if local.optimizer != "sgd" or local.momentum:
            return "scaffold's control variates are gradients under plain SGD alone: say optimizer=sgd momentum=0"
        return None

    def start(self, model: nn.Module) -> dict[str, Tensor]:
        return zeros_for_parameters(model, "variate")

    def broadcast(self, server: ServerState) -> dict[str, Tensor]:
        return dict(server.memory)

    def begin(self, client: Client) -> None:
        for name, variate in client.extras.items():
            client.memory.setdefault(name, variate.new_zeros(variate.shape))

    def gradients(self, client: Client, batch: Batch) -> Tensor:
        loss = super().gradients(client, batch)
        shared, own = group(client.extras, "variate"), group(client.memory, "variate")
        client.add_to_gradients(lambda name, w, start: shared[name] - own[name])
        return loss

    def end(self, client: Client) -> None:
        for name, change in self._changes(client).items():
            client.memory[name] = client.memory[name] + change

    def report(self, client: Client) -> Report:
        return Report(means=self._changes(client))

    def expected(self, server: ServerState) -> Mapping[str, Tensor]:
        return server.memory

    def aggregate(self, server: ServerState, reduced: Reduced) -> ServerState:
        model, memory = {**server.model, **reduced.model}, dict(server.memory)
        part = reduced.clients / server.population
        for name in group(server.memory, "variate"):
            average = reduced.model[name]
            model[name] = average + (self.server_rate - 1) * (average - server.model[name])
            memory[f"variate/{name}"] = memory[f"variate/{name}"] + part * reduced.means[f"variate/{name}"]
        return replace(server, model=model, memory=memory)

    def _changes(self, client: Client) -> dict[str, Tensor]:
        """cᵢ⁺ − cᵢ, by the variates' names."""
        scale = 1 / (max(client.steps, 1) * client.rate)
        return {
            f"variate/{name}": (start - w.detach()) * scale - client.extras[f"variate/{name}"]
            for name, w, start in client.anchors()
        }
