"""A whole federation, dense and in float64: rounds of clients in plain loops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reference.networks import BATCH_NORM_MOMENTUM, State
from reference.rules import FedAvg, Result, Site


@dataclass
class Sgd:
    """SGD with heavy-ball momentum and weight decay, fresh every round."""

    rate: float
    momentum: float = 0.0
    decay: float = 0.0
    velocity: Tensor | None = None

    def step(self, w: Tensor, g: Tensor) -> Tensor:
        g = g + self.decay * w
        self.velocity = g if self.velocity is None else self.momentum * self.velocity + g
        return w - self.rate * self.velocity


@dataclass(frozen=True)
class Schedule:
    """What happens when, taken from the code under test: it is not what these references are about."""

    chosen: Callable[[int], Sequence[str]]
    """The clients of a round."""
    order: Callable[[int, str], Iterable[Tensor]]
    """Batches of a client in a round, as positions in its training samples."""
    draw: Callable[[int, str], torch.Generator]
    """The stream of FedMix's draws."""
    optimizer: Callable[[int], Sgd]
    """A fresh optimiser for a round."""
    weighted: bool = False


def play(rule: FedAvg, sites: dict[str, Site], first: State, schedule: Schedule, rounds: int) -> State:
    """The server's model after the rounds; the clients' own things are left in `sites`, the server's in `rule`."""
    rule.prepare(list(sites.values()), first)
    state = first
    for round in range(1, rounds + 1):
        results = [local(rule, sites[name], state, schedule, round) for name in schedule.chosen(round)]
        state = rule.server(state, results)
    return state


def local(rule: FedAvg, site: Site, state: State, schedule: Schedule, round: int) -> Result:
    """One client's round."""
    start = state.w
    w, b, n = rule.enter(site, state)
    optimizer = schedule.optimizer(round)
    site.draw = schedule.draw(round, site.name)
    steps = 0
    for at in schedule.order(round, site.name):
        g, statistics = rule.direction(site, w, start, site.x[at], site.y[at])
        w = optimizer.step(w, g)
        b = (1 - BATCH_NORM_MOMENTUM) * b + BATCH_NORM_MOMENTUM * statistics
        n = n + 1
        steps += 1
    rule.leave(site, State(w, b, n), start, steps, optimizer.rate)
    return Result(site, len(site.x) if schedule.weighted else 1, State(w, b, n))
