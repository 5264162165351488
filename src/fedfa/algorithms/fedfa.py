"""FedFA: Zhou and Konukoglu, *FedFA: Federated Feature Augmentation*, ICLR 2023, and its variants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedfa.algorithms.base import Algorithm
from fedfa.engines.client import Client
from fedfa.layers.ffa import FFA, Fusion, Statistics, between
from fedfa.reduction import Across, Reduced, Report
from fedfa.rows import copies, copy_all
from fedfa.state import ServerState, ffa_layers

STATISTICS = ("mean", "std")
ROUNDING = 1e-4
"""How far below 0 taking the bias out of a running std may bring it: an error of 1e-7, divided by 1 − α."""


@dataclass(frozen=True)
class FedFA(Algorithm):
    """Feature augmentation whose width comes from the client's batch and from the federation (Algorithms 1 and 2).

    Every stage of the network is followed by an :class:`~fedfa.FFA` layer. A client sends the layers' running
    statistics with its model; the server takes their variance over clients (Eq. shareing), modulates it to γ
    (Eq. t), and sends γ with the next model. Statistics weigh one a client, whatever the weights of the models.

    What happens to the running statistics between rounds is `statistics`, as :class:`~fedfa.FFA` describes it. With
    ``corrected`` and ``kept``, a client whose layer was never active is left out of that layer's variance, and γ
    keeps its last value while fewer than two clients are left; as the paper writes it, such a client counts with 0
    and 1. With ``released`` the server averages the statistics and sends them back, and γ is 1 throughout.
    """

    p: float = 0.5
    momentum: float = 0.99
    fusion: Fusion = "adaptive"
    statistics: Statistics = "paper"
    eps: float = 1e-6

    def __post_init__(self) -> None:
        self.layer(1)  # refuse settings that no layer takes

    def layer(self, channels: int) -> nn.Module:
        return FFA(channels, self.p, self.momentum, self.fusion, self.statistics, self.eps)

    def start(self, model: nn.Module) -> dict[str, Tensor]:
        names = STATISTICS if self._averaged else tuple(f"gamma_{name}" for name in STATISTICS)
        return {
            f"{path}.{name}": layer.get_buffer(name).clone()
            for path, layer in self._layers(model)
            for name in names
            if self._averaged or self._federated
        }

    def broadcast(self, server: ServerState) -> dict[str, Tensor]:
        return dict(server.memory)

    def begin(self, client: Client) -> None:
        self.load_statistics(client.model, client.memory, client.extras)

    def load_statistics(self, model: nn.Module, memory: Mapping[str, Tensor], extras: Mapping[str, Tensor]) -> None:
        """Running statistics reset, or as the client kept them, and γ as the server sent it. All copies are one: on a
        GPU each would be a launch of its own."""
        sent = {**memory, **extras}  # `kept` statistics are in memory, `released` ones among the extras
        found: list[tuple[Tensor, Tensor]] = []
        for path, layer in self._layers(model):
            layer.reset_statistics()
            buffers = (*STATISTICS, "batches", *(f"gamma_{name}" for name in STATISTICS))
            found += [(layer.get_buffer(name), sent[at]) for name in buffers if (at := f"{path}.{name}") in sent]
        if found:
            copy_all(*zip(*found, strict=True))

    def end(self, client: Client) -> None:
        client.memory.update(self.kept_statistics(client.model))

    def kept_statistics(self, model: nn.Module) -> dict[str, Tensor]:
        """What a client keeps to itself between rounds: its running statistics, if they are `kept`."""
        if self.statistics != "kept":
            return {}
        layers = self._layers(model)
        return copies(
            {f"{path}.{name}": la.get_buffer(name) for path, la in layers for name in (*STATISTICS, "batches")}
        )

    def report(self, client: Client) -> Report:
        return self.report_of(client.model)

    def report_of(self, model: nn.Module) -> Report:
        """The statistics that leave a client with this model."""
        layers = self._layers(model)
        if self._averaged:
            return Report(means={f"{path}.{name}": la.get_buffer(name) for path, la in layers for name in STATISTICS})
        if not self._federated:
            return Report()
        spreads: dict[str, tuple[Tensor, Tensor]] = {}
        for path, layer in layers:
            if self.statistics == "paper":
                values, weight = (layer.mean, layer.std), torch.ones_like(layer.batches)
            else:
                values, weight = layer.corrected(), (layer.batches > 0).to(layer.batches.dtype)
            for name, value in zip(STATISTICS, values, strict=True):
                spreads[f"{path}.{name}"] = (value, weight)
        return Report(spreads=spreads)

    def implausible(self, report: Report) -> str | None:
        sent = {**report.means, **{name: value for name, (value, _) in report.spreads.items()}}
        for name, value in sent.items():
            if name.endswith(".std") and bool((value < -ROUNDING).any()):
                return f"{name} is negative"
        return None

    def aggregate(self, server: ServerState, reduced: Reduced) -> ServerState:
        server = super().aggregate(server, reduced)
        gammas = self._gammas(reduced.spreads, server.memory)
        return replace(server, memory={**server.memory, **reduced.means, **gammas})

    def expected(self, server: ServerState) -> Mapping[str, Tensor]:
        if self._averaged:
            return server.memory
        return {_statistic_name(gamma): tensor for gamma, tensor in server.memory.items()}

    def traces(self, server: ServerState) -> Mapping[str, Tensor]:
        """γ of both statistics, and the means over clients of the running statistics."""
        return {**server.memory, **server.centres}

    def _layers(self, model: nn.Module) -> list[tuple[str, FFA]]:
        """The layers that are this algorithm's, and not an augmentation's (DSU)."""
        own = (self.fusion, self.statistics)
        return [(path, layer) for path, layer in ffa_layers(model) if (layer.fusion, layer.statistics) == own]

    def _gammas(self, spreads: Mapping[str, Across], last: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """γ of every statistic. Those of equally many channels are rows of one tensor: a dozen launches for all of
        them, not for each."""
        alike: dict[torch.Size, list[str]] = {}
        for name, across in spreads.items():
            alike.setdefault(across.variance.shape, []).append(name)
        found: dict[str, Tensor] = {}
        for names in alike.values():
            own = [_gamma_name(name) for name in names]
            gamma = between(self.fusion, torch.stack([spreads[name].variance for name in names]))
            if self.statistics != "paper":
                few = torch.stack([spreads[name].counted for name in names]) < 2
                gamma = torch.where(few.unsqueeze(1), torch.stack([last[name] for name in own]), gamma)
            found |= zip(own, gamma.unbind(), strict=True)
        return found

    @property
    def _averaged(self) -> bool:
        """Whether the server averages the running statistics and sends them back."""
        return self.statistics == "released"

    @property
    def _federated(self) -> bool:
        """Whether the width depends on the other clients at all."""
        return self.fusion not in ("client", "random") and not self._averaged


def _gamma_name(statistic: str) -> str:
    path, _, name = statistic.rpartition(".")
    return f"{path}.gamma_{name}"


def _statistic_name(gamma: str) -> str:
    path, _, name = gamma.rpartition(".")
    return f"{path}.{name.removeprefix('gamma_')}"


@dataclass(frozen=True)
class FedFARandom(FedFA):
    """FedFA-R: the same standard deviation, λ = 0.5, for every statistic and channel."""

    fusion: Fusion = "random"


@dataclass(frozen=True)
class FedFAClient(FedFA):
    """FedFA-C: the client's own batch variance alone (γ = 0)."""

    fusion: Fusion = "client"


@dataclass(frozen=True)
class FedFADirect(FedFA):
    """'Direct Fusion': the raw variance over clients where γ stands."""

    fusion: Fusion = "direct"


@dataclass(frozen=True)
class FedFATotal(FedFA):
    """An extension: batch variance plus variance over clients, by the law of total variance. Statistics are kept
    and corrected by default, since raw variances show how many batches a client has as soon as they are not.

    The width does not shrink with a channel's own σ, so gradients grow as Σ̂/σ where a channel is nearly constant at
    one client and varies across clients: on networks without BatchNorm, clip gradients (docs/layer.md)."""

    fusion: Fusion = "total"
    statistics: Statistics = "kept"
