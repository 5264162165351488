"""Small federations played by the engine round by round, with everything that a client sent in sight."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fedfa
from fedfa import Algorithm, ClientIndex, Federation
from fedfa.augmentation import Augmentation
from fedfa.engines.base import Refused
from fedfa.engines.client import Broadcast, Client, Local, Slot
from fedfa.engines.sequential import Sequential
from fedfa.memory import Memory
from fedfa.reduction import Update
from fedfa.server import Plan, Record, Watcher, collect_shares, first_state, play_round
from fedfa.state import ServerState
from fedfa.streams import Streams
from fedfa.task import Classification, Task


class Recording(Sequential):
    """The plain engine, which remembers every update that it handed over: {(round, client): update}."""

    sent: dict[tuple[int, str], Update]

    def train(self, broadcast: Broadcast, names: Sequence[str]) -> Iterator[Update | Refused]:
        for update in super().train(broadcast, names):
            if isinstance(update, Update):
                model = {name: tensor.detach().clone() for name, tensor in update.model.items()}
                self.sent[broadcast.round, update.client] = replace(update, model=model)
            yield update


@dataclass
class Played:
    """How a federation's rounds went: server states from the first on, records, updates, and the clients' memory."""

    states: list[ServerState]
    records: list[Record]
    sent: dict[tuple[int, str], Update]
    memory: Memory
    engine: Sequential

    @property
    def server(self) -> ServerState:
        return self.states[-1]

    @property
    def model(self) -> Mapping[str, Tensor]:
        return self.server.model

    def kept(self, client: str, round: int | None = None) -> dict[str, Tensor]:
        """A client's private tensors after a round, the last one if none is given."""
        return self.memory.load(client, self.server.round if round is None else round)


def play(
    algorithm: Algorithm,
    model: nn.Module,
    federation: Federation,
    folder: Path,
    rounds: int = 1,
    local: Local | None = None,
    task: Task | None = None,
    participation: float = 1.0,
    weighting: str = "uniform",
    augmentation: Augmentation | None = None,
    held_out: tuple[str, ...] = (),
    seed: int = 0,
) -> Played:
    """Play rounds with a copy of the model; memory goes to `folder`."""
    memory = Memory(folder)
    engine = Recording(
        copy.deepcopy(model),
        federation,
        task or Classification(),
        algorithm,
        local or Local(batch_size=4, lr=0.1),
        memory,
        seed,
        weighting,
        augmentation,
    )
    engine.sent = {}
    plan = plan_for(federation, rounds, participation, held_out, seed)
    server = collect_shares(first_state(model, algorithm, len(plan.clients)), algorithm, engine, plan)
    states, records = [server], []
    for _ in range(rounds):
        server, record = play_round(server, algorithm, engine, plan, Watcher())
        states.append(server)
        records.append(record)
    return Played(states, records, engine.sent, memory, engine)


def plan_for(
    federation: Federation, rounds: int, participation: float = 1.0, held_out: tuple[str, ...] = (), seed: int = 0
) -> Plan:
    names = tuple(sorted(name for name in federation.clients if name not in held_out))
    return Plan(rounds, seed, names, held_out, participation)


def algorithm(name: str, **settings: Any) -> Algorithm:
    return fedfa.ALGORITHMS[name](**settings)


def poisoned(given: Algorithm, client: str, round: int) -> Algorithm:
    """The same algorithm, but one client's model has a NaN in it at the end of one round."""

    class Poisoned(type(given)):  # type: ignore[misc]  # a class made here
        def end(self, at: Client) -> None:
            super().end(at)
            if (at.name, at.round) == (client, round):
                with torch.no_grad():
                    next(at.model.parameters()).view(-1)[0] = torch.nan

    return Poisoned(**{f.name: getattr(given, f.name) for f in fields(given)})


def client_of(
    algorithm: Algorithm, model: nn.Module, federation: Federation, name: str = "a", task: Task | None = None
) -> Client:
    """A client with the model in its slot, before its first step of round 1, for hooks called one by one."""
    local = Local(batch_size=4, lr=0.1)
    slot = Slot(model, local)
    received = {key: tensor.clone() for key, tensor in slot.tensors.items()}
    return Client(
        name=name,
        slot=slot,
        task=task or Classification(),
        federation=federation,
        index=federation.clients[name],
        local=local,
        round=1,
        streams=Streams(0, 1, name),
        received=received,
        extras={},
        memory={},
    )


SIZES = {"a": 11, "b": 5, "c": 9, "d": 7}
"""Training samples of `uneven`: with batches of four, a last batch of three, two of one (dropped), and of three."""


def uneven(
    height: int = 6, width: int = 5, task: str = "classification", held_out: Mapping[str, int] | None = None
) -> Federation:
    """Four clients of different sizes and tints, two channels, images that are not square, three classes.

    Their samples lie in the pool in no order, so that whoever takes positions for indices is found out.
    """
    draw = torch.Generator().manual_seed(3)
    sizes = {**SIZES, **(held_out or {})}
    total = sum(sizes.values()) + 4 * len(sizes)
    pool = torch.randperm(total, generator=draw)
    images = torch.randint(0, 160, (total, 2, height, width), generator=draw, dtype=torch.uint8)
    clients, first = {}, 0
    for number, (name, size) in enumerate(sizes.items()):
        own = pool[first : first + size + 4]
        images[own] += 20 * number
        clients[name] = ClientIndex(own[:size], own[size : size + 2], own[size + 2 :])
        first += size + 4
    shape = (total, height, width) if task == "segmentation" else (total,)
    labels = torch.randint(3, shape, generator=draw)
    return Federation("uneven", task, images, labels, ("x", "y", "z"), clients)


def points(**clients: Sequence[tuple[Sequence[float], int]]) -> Federation:
    """One-pixel images whose channels are given numbers, k/255 each, with their labels: for sums done by hand."""
    samples = [sample for given in clients.values() for sample in given]
    images = torch.tensor([[round(255 * value) for value in x] for x, _ in samples], dtype=torch.uint8)
    labels = torch.tensor([y for _, y in samples])
    index, first = {}, 0
    for name, given in clients.items():
        own = torch.arange(first, first + len(given))
        index[name] = ClientIndex(own, own[:0], own[:0])
        first += len(given)
    classes = tuple(str(number) for number in range(int(labels.max()) + 1))
    return Federation("points", "classification", images[:, :, None, None], labels, classes, index)


class Line(nn.Module):
    """f(x) = Σⱼ wⱼ·xⱼ, each wⱼ a parameter of its own: `w0`, `w1`, …"""

    def __init__(self, *weights: float) -> None:
        super().__init__()
        for number, weight in enumerate(weights):
            self.register_parameter(f"w{number}", nn.Parameter(torch.tensor([weight])))

    def forward(self, x: Tensor) -> Tensor:
        return (x.flatten(1) * torch.cat(list(self.parameters()))).sum(1)


class Squares(Task):
    """½(f(x) − y)², mean over the batch, where y is the class number itself: gradients are residuals."""

    metric = "negative error"

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        target = y.flatten(1) @ torch.arange(y.shape[1], dtype=y.dtype) if y.is_floating_point() else y
        return (output - target).square().mean() / 2

    def scores(self, output: Tensor, y: Tensor) -> Tensor:
        return -(output - y).abs()


def steps_by_hand(algorithm: Algorithm, data: Federation, folder: Path, *start: float, **options: Any) -> list[float]:
    """The weights of a :class:`Line` after the rounds, with squared errors and a rate of ½ if no other is given."""
    options = {"local": Local(batch_size=1, lr=0.5), **options}
    return weights(play(algorithm, Line(*(start or (0.0,))), data, folder, task=Squares(), **options))


def weights(played: Played) -> list[float]:
    return [tensor.item() for tensor in played.model.values()]


TWO = points(a=[([1.0], 1)], b=[([1.0], 3)])
"""Two clients with a sample each, x = 1, and labels 1 and 3: at rate ½, w becomes (w + 1)/2 and (w + 3)/2."""

THREE = points(a=[([1.0], 1), ([1.0], 1)], b=[([1.0], 3)])
"""The same, but client a has its sample twice: with batches of one it makes two steps where b makes one."""


def one_hot(federation: Federation, index: Tensor) -> tuple[Tensor, Tensor]:
    """Images and shares of the classes in float64, for the reference."""
    labels = nn.functional.one_hot(federation.labels[index].long(), len(federation.classes))
    return federation.images[index].double() / 255, labels.movedim(-1, 1).double()
