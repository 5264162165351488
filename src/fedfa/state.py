"""What a model's entries are to a federation, decided in one place and by type, never by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fedfa.layers.ffa import FFA


class Kind(Enum):
    """How an entry of a model is treated when clients' models are put together."""

    PARAMETER = "parameter"
    """A floating-point parameter: averaged, and what server optimisers work on."""
    BUFFER = "buffer"
    """A floating-point buffer (BatchNorm's running statistics): averaged, never moved by a server optimiser."""
    COUNTER = "counter"
    """An integer (`num_batches_tracked`): averaged in integers, rounded down."""


def entries(model: nn.Module) -> dict[str, Kind]:
    """The entries of a model that clients and server exchange, with their kinds.

    FFA's buffers are not among them: its running statistics and γ belong to the algorithm, which sends them apart.
    """
    own = {f"{path}.{name}" if path else name for path, layer in ffa_layers(model) for name, _ in layer.named_buffers()}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    kinds: dict[str, Kind] = {}
    for name, tensor in model.state_dict().items():
        if name in own:
            continue
        if not tensor.is_floating_point():
            kinds[name] = Kind.COUNTER
        else:
            kinds[name] = Kind.PARAMETER if name in parameters else Kind.BUFFER
    return kinds


def ffa_layers(model: nn.Module) -> Iterator[tuple[str, FFA]]:
    """Path and layer of every FFA layer in the model."""
    return ((path, module) for path, module in model.named_modules() if isinstance(module, FFA))


def zeros_for_parameters(model: nn.Module, prefix: str) -> dict[str, Tensor]:
    """A tensor of zeros for each parameter, named ``prefix/parameter``: what server optimisers start from."""
    names = [name for name, kind in entries(model).items() if kind is Kind.PARAMETER]
    return {f"{prefix}/{name}": torch.zeros_like(model.get_parameter(name), requires_grad=False) for name in names}


def group(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors named ``prefix/…``, by what follows."""
    return {name.removeprefix(f"{prefix}/"): t for name, t in tensors.items() if name.startswith(f"{prefix}/")}


def size_in_bytes(tensors: Mapping[str, Tensor]) -> int:
    """What the tensors take on the wire."""
    return sum(tensor.nbytes for tensor in tensors.values())


@contextmanager
def frozen_statistics(model: nn.Module) -> Iterator[None]:
    """While it lasts, a forward in training mode moves no running statistics, of BatchNorm or of FFA: for the
    second pass of a two-pass step. BatchNorm still normalises with its batch."""
    norms = [m for m in model.modules() if isinstance(m, _NormBase) and m.track_running_stats]
    layers = [layer for _, layer in ffa_layers(model)]
    kept = [norm.num_batches_tracked for norm in norms]
    momenta = [norm.momentum for norm in norms]
    tracking = [layer.tracking for layer in layers]
    try:
        for norm in norms:
            norm.momentum = 0.0
            norm.num_batches_tracked = None
        for layer in layers:
            layer.tracking = False
        yield
    finally:
        for norm, count, momentum in zip(norms, kept, momenta, strict=True):
            norm.num_batches_tracked, norm.momentum = count, momentum
        for layer, tracked in zip(layers, tracking, strict=True):
            layer.tracking = tracked


@dataclass(frozen=True)
class ServerState:
    """Everything the server knows after a round, and all that a checkpoint holds."""

    round: int
    """Rounds completed."""
    population: int
    """Clients that may take part, sampled or not."""
    model: Mapping[str, Tensor]
    """The global model's entries, as :func:`entries` lists them."""
    memory: Mapping[str, Tensor] = field(default_factory=dict)
    """The algorithm's own tensors: momentum, control variates, γ."""
    centres: Mapping[str, Tensor] = field(default_factory=dict)
    """Last round's mean of every statistic whose variance across clients is taken: where deviations are measured
    from, public, so that clients could compute them themselves."""

    def to(self, device: torch.device | str) -> ServerState:
        def moved(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: tensor.to(device) for name, tensor in tensors.items()}

        return ServerState(self.round, self.population, moved(self.model), moved(self.memory), moved(self.centres))
