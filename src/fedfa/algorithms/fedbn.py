"""FedBN: Li et al., *FedBN: Federated Learning on Non-IID Features via Local Batch Normalization*, ICLR 2021."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedfa.algorithms.base import Algorithm
from fedfa.engines.client import Client, Local
from fedfa.reduction import Reduced, Report
from fedfa.state import ServerState, entries


@dataclass(frozen=True)
class FedBN(Algorithm):
    """FedAvg without BatchNorm: its parameters and statistics stay with each client, and each is evaluated with its
    own (Algorithm 1).

    Layers are found by type. The server has no BatchNorm at all, so a client that never trained has none either. With
    `share_average` the clients send theirs to be averaged, and clients that have none get the average; it is off by
    default, since then BatchNorm does leave the clients.
    """

    share_average: bool = False

    def private(self, model: nn.Module) -> frozenset[str]:
        norms = {path for path, module in model.named_modules() if isinstance(module, _BatchNorm)}
        return frozenset(name for name in entries(model) if name.rpartition(".")[0] in norms)

    def objection(self, model: nn.Module, local: Local, held_out: Sequence[str]) -> str | None:
        if held_out and not self.share_average and self.private(model):
            return (
                f"fedbn has no BatchNorm for {held_out[0]!r}, which never trains: "
                "say algorithm.share_average=true to let the clients' average go there"
            )
        return None

    def notices(self, model: nn.Module) -> list[str]:
        if not self.private(model):
            return ["fedbn: the network has no BatchNorm, so this is FedAvg"]
        if self.share_average:
            return ["fedbn: BatchNorm leaves the clients, averaged; clients that never trained are tested with it"]
        return []

    def unseen(self, extras: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return extras

    def start(self, model: nn.Module) -> dict[str, Tensor]:
        own = self.private(model) if self.share_average else frozenset()
        return {name: tensor.detach().clone() for name, tensor in model.state_dict().items() if name in own}

    def broadcast(self, server: ServerState) -> dict[str, Tensor]:
        return dict(server.memory)

    def report(self, client: Client) -> Report:
        return Report(means={name: client.slot.tensors[name] for name in client.extras})

    def expected(self, server: ServerState) -> Mapping[str, Tensor]:
        return server.memory

    def aggregate(self, server: ServerState, reduced: Reduced) -> ServerState:
        return replace(super().aggregate(server, reduced), memory=dict(reduced.means))
