"""One client's local training: the one loop that every engine runs, and a real client too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from fedfa.augmentation import Augmentation
from fedfa.data.federation import ClientIndex, Federation
from fedfa.data.transforms import Transforms
from fedfa.layers.randomness import Draws
from fedfa.reduction import Update
from fedfa.rows import copies, copy_all
from fedfa.state import Kind, entries
from fedfa.streams import Streams
from fedfa.task import Batch, Task

if TYPE_CHECKING:
    from fedfa.algorithms.base import Algorithm

OPTIMIZER = "optimizer/"


@dataclass(frozen=True)
class Local:
    """Settings of local training."""

    epochs: int = 1
    batch_size: int = 32
    drop_last: bool = False
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: float = 0.01
    lr_decay: float = 1.0
    """The learning rate of round t is lr·lr_decay^(t−1)."""
    momentum: float = 0.0
    """SGD's."""
    weight_decay: float = 0.0
    clip: float = 0.0
    """The largest norm of a step's gradient; longer ones are scaled down to it. 0 for none."""
    optimizer_state: Literal["fresh", "kept"] = "fresh"
    """Whether momentum and moments start anew every round, or are kept by each client."""

    def rate(self, round: int) -> float:
        return self.lr * self.lr_decay ** (round - 1)

    def build(self, parameters: list[nn.Parameter], capturable: bool = False) -> torch.optim.Optimizer:
        """The optimiser, in its fused form where torch has one: Adam is four times as fast on the CPU that way. A
        capturable one has its learning rate in a tensor, which a captured step reads anew each time."""
        fused = all(parameter.device.type in ("cpu", "cuda") for parameter in parameters)
        decay = self.weight_decay
        rate = torch.tensor(self.lr, device=parameters[0].device) if capturable else self.lr
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, rate, momentum=self.momentum, weight_decay=decay, fused=fused)
        kind = torch.optim.Adam if self.optimizer == "adam" else torch.optim.AdamW
        return kind(parameters, rate, weight_decay=decay, fused=fused, capturable=capturable)


@dataclass(frozen=True)
class Broadcast:
    """What the server sends to every client of a round."""

    round: int
    model: Mapping[str, Tensor]
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    expected: Mapping[str, Tensor] | None = None
    """What a client's report looks like, as far as the server knows: not sent, but checked on both sides."""


class Slot:
    """A place where clients train, one after another: a model, its optimiser and its random layers' draws."""

    def __init__(self, model: nn.Module, local: Local, capturable: bool = False) -> None:
        self.model = model
        self.kinds = entries(model)
        state = model.state_dict()
        self.tensors: dict[str, Tensor] = {name: state[name] for name in self.kinds}
        self.built = {name: tensor.clone() for name, tensor in self.tensors.items()}
        """The model's entries as they were built: what a client without private ones of its own starts from."""
        self.optimizer = local.build(list(model.parameters()), capturable)
        self.draws = Draws(model)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite the model's entries of these names."""
        if tensors:
            copy_all([self.tensors[name] for name in tensors], tensors.values())

    def enter(self, received: Mapping[str, Tensor], private: frozenset[str], memory: Mapping[str, Tensor]) -> None:
        """Become a client: the server's entries, and the client's private ones from its memory, or as the model was
        built if it has none yet. Nothing of the client before is left."""
        self.load(received)
        self.load({name: memory.get(name, self.built[name]) for name in private})


@dataclass
class Client:
    """One client in one round: what an algorithm's hooks work on."""

    name: str
    slot: Slot
    task: Task
    federation: Federation
    index: ClientIndex
    local: Local
    round: int
    streams: Streams
    received: Mapping[str, Tensor]
    """The server's model as it was broadcast, w_t."""
    extras: Mapping[str, Tensor]
    """What the server sent besides the model."""
    memory: dict[str, Tensor]
    """The client's private tensors, kept between the rounds it takes part in. Empty before the first."""
    augmentation: Augmentation = field(default_factory=Augmentation)
    transforms: Transforms = field(default_factory=Transforms)
    steps: int = 0
    """Local steps taken so far in this round."""

    @property
    def model(self) -> nn.Module:
        return self.slot.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.slot.optimizer

    @property
    def rate(self) -> float:
        """The learning rate of this round."""
        return self.local.rate(self.round)

    def samples(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Images and labels as evaluation has them: for an algorithm that looks at data besides the batches."""
        x, y = self.federation.batch(index)
        return self.transforms.evaluation(x), y

    def anchors(self) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        """Every shared parameter beside its value in the server's model: (name, w, w_t)."""
        for name, kind in self.slot.kinds.items():
            if kind is Kind.PARAMETER and name in self.received:
                yield name, self.model.get_parameter(name), self.received[name]

    @torch.no_grad()
    def add_to_gradients(self, term: Callable[[str, Tensor, Tensor], Tensor]) -> None:
        """Add term(name, w, w_t) to the gradient of every shared parameter that has one."""
        done: set[int] = set()  # a weight with two names has one gradient
        for name, parameter, start in self.anchors():
            if parameter.grad is not None and id(parameter) not in done:
                parameter.grad += term(name, parameter, start)
                done.add(id(parameter))

    @contextmanager
    def rewound(self) -> Iterator[None]:
        """What is drawn in here from torch's global generator (Dropout) is drawn again after it: for the first of
        two passes over a batch. The draws of random layers stay as they are for the whole step. While a CUDA graph is
        captured, torch lets nobody at its generator: Dropout, which none of our networks has, draws twice then."""
        capturing = self.federation.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        with torch.random.fork_rng([] if capturing else _devices(self)):
            yield


def batches(index: Tensor, local: Local, generator: torch.Generator) -> Iterator[Tensor]:
    """The indices of a round's batches, shuffled anew for every epoch.

    A client with fewer samples than a batch trains with a batch of its own size; a last batch of one sample is
    left out, since BatchNorm cannot normalise it; any other last batch counts, unless `drop_last`.
    """
    samples = len(index)
    size = min(local.batch_size, samples)
    for _ in range(local.epochs):
        for part in index[torch.randperm(samples, generator=generator)].split(max(size, 1)):
            whole = len(part) == size
            if (len(part) > 1 and (whole or not local.drop_last)) or len(part) == local.batch_size:
                yield part


def train(client: Client, algorithm: Algorithm, weight: int) -> Update:
    """Train one client for a round and return its update. The client's memory is new, its model is in the slot."""
    enter(client, algorithm)
    _restore(client.optimizer, kept_optimizer(client), client.rate)
    total, samples = torch.zeros((), device=client.federation.device), 0
    try:
        # The global generator serves whatever draws from it (Dropout): the same draws in whatever order clients run.
        with torch.random.fork_rng(_devices(client)):
            torch.manual_seed(client.streams.seed("torch"))
            algorithm.begin(client)
            for index in batches(client.index.train, client.local, client.streams.host("order")):
                total += step(client, algorithm, index)
                client.steps += 1
                samples += len(index)
            algorithm.end(client)
    finally:
        client.slot.draws.clear()
    return leave(client, algorithm, weight, total / max(samples, 1))


def enter(client: Client, algorithm: Algorithm) -> None:
    """Put the client's model into its slot: the server's, and what is private from its memory."""
    private = algorithm.private(client.model)
    client.slot.enter(client.received, private, {**algorithm.unseen(client.extras), **client.memory})
    if not client.model.training:  # it takes as long as a small network's step
        client.model.train()


def step(client: Client, algorithm: Algorithm, index: Tensor) -> Tensor:
    """One local step on the samples at `index`; the sum of their losses. All of it can be captured in a CUDA graph."""
    client.slot.draws.sample(len(index), client.streams)
    batch = client.transforms.training(Batch(*client.federation.batch(index)), client.streams)
    batch = client.augmentation.mix(batch, client.slot.draws, client.streams)
    return algorithm.step(client, batch) * len(index)


def leave(client: Client, algorithm: Algorithm, weight: int, loss: Tensor) -> Update:
    """What a client that is done sends, and what it keeps. The update's tensors are the slot's."""
    slot, private = client.slot, algorithm.private(client.model)
    client.memory.update(copies({name: slot.tensors[name] for name in sorted(private)}))
    if client.local.optimizer_state == "kept":
        client.memory.update(_saved(slot.optimizer))
    return Update(
        client=client.name,
        weight=weight,
        model={name: tensor for name, tensor in slot.tensors.items() if name not in private},
        report=algorithm.report(client),
        steps=client.steps,
        loss=loss,
    )


def kept_optimizer(client: Client) -> dict[str, Tensor]:
    """The optimiser's state in a client's memory, where it is kept between rounds."""
    if client.local.optimizer_state == "fresh":
        return {}
    return {name: tensor for name, tensor in client.memory.items() if name.startswith(OPTIMIZER)}


def _devices(client: Client) -> list[int]:
    device = client.federation.device
    return [device.index or 0] if device.type == "cuda" else []


def _restore(optimizer: torch.optim.Optimizer, memory: Mapping[str, Tensor], rate: float) -> None:
    """Give the optimiser the state in a client's memory, or a fresh one, and the round's learning rate."""
    optimizer.state.clear()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for name, tensor in memory.items():
        _, number, key = name.split("/")
        parameter = parameters[int(number)]
        on_host = key == "step" and not optimizer.defaults["fused"]  # where torch then keeps the count of steps
        optimizer.state[parameter][key] = tensor.clone().to("cpu" if on_host else parameter.device)
    for group in optimizer.param_groups:
        group["lr"] = rate


def _saved(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        f"{OPTIMIZER}{number}/{key}": value.detach().clone()
        for number, parameter in enumerate(parameters)
        for key, value in optimizer.state[parameter].items()
        if isinstance(value, Tensor)
    }
