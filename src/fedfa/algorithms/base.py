"""The interface that every federated algorithm is written to. Its defaults are FedAvg."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor, nn

from fedfa.reduction import Reduced, Report
from fedfa.state import ServerState
from fedfa.task import Batch

if TYPE_CHECKING:
    from fedfa.engines.client import Client, Local


@dataclass(frozen=True)
class Share:
    """What a client gives away once, before the first round."""

    report: Report = field(default_factory=Report)
    """Tensors that the server gets the mean (or the variance) of."""
    gathered: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors that the server gets one by one: the only thing that is not a sum (FedMix's averaged samples)."""


def at_least(low: float, **settings: float) -> None:
    """Refuse settings below `low`, or not finite."""
    for name, value in settings.items():
        if not low <= value < math.inf:
            raise ValueError(f"{name} is a number from {low} on, not {value}")


def fraction(**settings: float) -> None:
    """Refuse settings outside [0, 1)."""
    for name, value in settings.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name} is between 0 and 1 (1 excluded), not {value}")


@dataclass(frozen=True)
class Algorithm:
    """A federated algorithm: a frozen dataclass whose fields are its settings.

    The methods are called in the order they stand in here. Those named after clients run where the data are, the
    others on the server; the two meet only in tensors, so the same object serves a simulation and a real federation.
    A client's step must stay capturable: no `.item()`, no branch on data.
    """

    shares: ClassVar[bool] = False
    """Whether :meth:`share` is asked for before the first round."""

    constants: ClassVar[frozenset[str]] = frozenset()
    """Names of broadcast tensors that never change after the first round: each client need be sent them once."""

    # Before anything runs

    def objection(self, model: nn.Module, local: Local, held_out: Sequence[str]) -> str | None:
        """Why this cannot run with a network, settings of local training and clients held out, in a line."""
        return None

    def notices(self, model: nn.Module) -> list[str]:
        """What whoever starts a run should know: what leaves the clients besides models, what has no effect here."""
        return []

    # The network and the server's own tensors

    def layer(self, channels: int) -> nn.Module | None:
        """A layer to put after every convolutional stage of the network, or None."""
        return None

    def private(self, model: nn.Module) -> frozenset[str]:
        """Names of the model's entries that stay on the client (FedBN's normalisation). They are kept in the
        client's memory, and each client is evaluated with its own."""
        return frozenset()

    def unseen(self, extras: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Private entries for a client that has none of its own, from what the server broadcasts; those that are
        not given here are as the model was built."""
        return {}

    def start(self, model: nn.Module) -> dict[str, Tensor]:
        """The server's own tensors before the first round."""
        return {}

    # Once, before the first round

    def share(self, client: Client) -> Share:
        """What the client gives away once."""
        return Share()

    def receive(self, server: ServerState, reduced: Reduced, gathered: Mapping[str, list[Tensor]]) -> ServerState:
        """Take the clients' shares: reports reduced, and gathered tensors in the order of client names."""
        return server

    # Every round

    def broadcast(self, server: ServerState) -> dict[str, Tensor]:
        """What goes to the clients besides the model."""
        return {}

    def begin(self, client: Client) -> None:
        """Before a client's first step: the model, extras and memory are loaded."""

    def inputs(self, x: Tensor, extras: Mapping[str, Tensor]) -> Tensor:
        """What the network sees of the images, in training and in evaluation alike."""
        return x

    def loss(self, client: Client, batch: Batch) -> Tensor:
        """The loss of one batch."""
        return client.task.batch_loss(client.model(self.inputs(batch.x, client.extras)), batch)

    def gradients(self, client: Client, batch: Batch) -> Tensor:
        """Put the gradient that the optimiser steps along into the parameters' `grad`; returns the loss, detached."""
        client.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(client, batch)
        loss.backward()
        return loss.detach()

    def step(self, client: Client, batch: Batch) -> Tensor:
        """One local step; returns the loss, detached."""
        loss = self.gradients(client, batch)
        if client.local.clip:
            nn.utils.clip_grad_norm_(client.model.parameters(), client.local.clip)
        client.optimizer.step()
        return loss

    def end(self, client: Client) -> None:
        """After a client's last step: what is to be remembered goes into `client.memory`."""

    def report(self, client: Client) -> Report:
        """What the client tells the server besides its model."""
        return Report()

    def expected(self, server: ServerState) -> Mapping[str, Tensor] | None:
        """Tensors of the names, shapes and types that every client reports: others are refused. None: not known,
        and the first client shows it."""
        return None

    def implausible(self, report: Report) -> str | None:
        """Why a report of the right shape, all finite, cannot be true, in a line: asked of what comes from outside."""
        return None

    def aggregate(self, server: ServerState, reduced: Reduced) -> ServerState:
        """The server's state after a round; the caller counts the round."""
        return replace(server, model={**server.model, **reduced.model})

    # For the record

    def traces(self, server: ServerState) -> Mapping[str, Tensor]:
        """Small tensors whose way through the rounds is worth a picture, a value a channel each, named
        ``layer.statistic``. They are written into the run's folder now and then, and nothing is computed from them."""
        return {}
