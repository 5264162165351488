"""The engine for a GPU: clients side by side, each step captured once as a CUDA graph and replayed.

In eager PyTorch the step of a small network is hundreds of launches, and a fast GPU waits for them. A *lane* is a slot
with a stream of its own. Its step, from drawing noise and taking the batch out of the pool to the optimiser's update,
is captured when batches of a size have come a few times, and from then on replayed with one launch. Lanes run beside
each other. Nothing in an algorithm knows of it: what its step reads lies in tensors that stay where they are (the
server's model and extras, the client's memory, the order of the data, generators that are seeded anew for a client).

A step's own Python runs when it is captured, not when it is replayed: it must not depend on the round or the client.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from fedfa.algorithms.base import Algorithm
from fedfa.engines.base import Refused
from fedfa.engines.client import OPTIMIZER, Broadcast, Client, Local, Slot, batches, enter, kept_optimizer, leave, step
from fedfa.engines.sequential import Sequential
from fedfa.reduction import Report, Update, finite, in_a_row
from fedfa.streams import Streams

MOST_LANES = 10
"""Lanes unless it is said how many. More help where rounds are short: at 50 clients of five small steps each, 50 lanes
were a fifth faster than ten, and 25 no faster; every lane takes a model's memory."""
OFTEN = 4
"""Times that a batch size comes before it is captured: a capture costs a few eager steps."""
MOST_GRAPHS = 8
"""Batch sizes that a lane captures; others run eagerly."""
WARM_UP = 3
"""Eager steps before a capture, in which cuDNN and the optimiser allocate what they need."""


Sent = tuple[Client, Update, torch.cuda.Event]
"""A client at work, what it will have sent, and when that is there."""


class Lane:
    """A slot with a stream, and with all that its captured steps read and write in places that do not change."""

    def __init__(self, model: nn.Module, local: Local, longest: int, seed: int, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.slot = Slot(model, local, capturable=True)
        self.streams = Streams(seed, 0, "", device)
        self.order = torch.zeros(longest, dtype=torch.int64, device=device)
        """The samples of a client's whole round, batch after batch."""
        self.cursor = torch.zeros((), dtype=torch.int64, device=device)
        """Where in it the next batch begins."""
        self.total = torch.zeros((), device=device)
        """The sum of losses so far."""
        self._memory: dict[str, Tensor] = {}
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._seen: Counter[int] = Counter()

    def begin(
        self, client: Client, algorithm: Algorithm, memory: Mapping[str, Tensor], parts: Sequence[Tensor]
    ) -> None:
        """Everything as it is before the client's first step of the round."""
        client.memory = dict(memory)
        for tensor in memory.values():
            tensor.record_stream(self.stream)  # made on another stream: not to be used again before this one read it
        client.steps = 0
        self.streams.move(client.round, client.name)
        order = torch.cat(list(parts)).pin_memory()
        self.order[: len(order)].copy_(order, non_blocking=True)
        self.cursor.zero_()
        self.total.zero_()
        enter(client, algorithm)
        self._restore(kept_optimizer(client), client.rate)
        algorithm.begin(client)
        for name, tensor in client.memory.items():
            if not name.startswith(OPTIMIZER) and name not in self.slot.tensors:
                client.memory[name] = self._memory.setdefault(name, torch.empty_like(tensor)).copy_(tensor)

    def play(self, client: Client, algorithm: Algorithm, sizes: Sequence[int]) -> None:
        """The client's steps."""
        for size in sizes:
            graph = self._graphs.get(size)
            if graph is None:
                self._step(client, algorithm, size)
            else:
                graph.replay()
            client.steps += 1

    def apart(self, memory: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The client's memory, without the places that the lane's next client will be in."""
        return {name: t.clone() if t is self._memory.get(name) else t for name, t in memory.items()}

    def missing(self, sizes: Sequence[int]) -> list[int]:
        """Batch sizes that come often enough to be captured, and are not yet."""
        self._seen.update(sizes)
        often = [size for size, times in self._seen.items() if times >= OFTEN and size not in self._graphs]
        return often[: MOST_GRAPHS - len(self._graphs)]

    def capture(self, client: Client, algorithm: Algorithm, size: int) -> None:
        """Capture the step for batches of one size. The client has begun, and has to begin again afterwards."""
        for _ in range(WARM_UP):
            self.cursor.zero_()
            self._step(client, algorithm, size)
        graph = torch.cuda.CUDAGraph()
        for generator in self.streams.opened():
            graph.register_generator_state(generator)
        with torch.cuda.graph(graph, stream=self.stream):
            self._step(client, algorithm, size)
        self._graphs[size] = graph

    def _step(self, client: Client, algorithm: Algorithm, size: int) -> None:
        index = self.order.index_select(0, self.cursor + torch.arange(size, device=self.order.device))
        self.total += step(client, algorithm, index)
        self.cursor += size

    def _restore(self, kept: Mapping[str, Tensor], rate: float) -> None:
        """The optimiser as it was kept, or as new, without moving its tensors. A momentum of zeros is as good as none:
        the first step makes it the gradient."""
        optimizer = self.slot.optimizer
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for group in optimizer.param_groups:
            group["lr"].fill_(rate)
        for parameter in parameters:
            for tensor in optimizer.state[parameter].values():
                if isinstance(tensor, Tensor):
                    tensor.zero_()
        for name, tensor in kept.items():
            _, number, key = name.split("/")
            state = optimizer.state[parameters[int(number)]]
            state.setdefault(key, tensor.clone()).copy_(tensor)


class Captured(Sequential):
    """Trains the clients of a round in lanes, as many at a time as there are lanes, the largest clients first."""

    def __init__(self, *args: Any, lanes: int = 0, say: Callable[[str], None] = print, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.say = say
        self._most = lanes or MOST_LANES
        self._lanes: list[Lane] = []
        self._model: dict[str, Tensor] = {}
        self._extras: dict[str, Tensor] = {}
        sizes = [len(index.train) for index in self.federation.clients.values()]
        self._longest = max(sizes) * self.local.epochs
        self._eager = self._obstacle()

    def _obstacle(self) -> bool:
        """Whether clients have to train one after another; said in a line if so."""
        reason = None
        if self.federation.images.device.type != "cuda":
            reason = "the images do not fit onto the GPU"
        elif any(isinstance(module, _DropoutNd) and module.p for module in self.slot.model.modules()):
            reason = "Dropout draws from torch's own generator, which lanes would share"
        if reason is not None:
            self.say(f"engine captured: {reason}, so clients train one after another")
        return reason is not None

    def train(self, broadcast: Broadcast, names: Sequence[str]) -> Iterator[Update | Refused]:
        waiting = sorted(names, key=lambda name: -len(self.federation.clients[name].train))
        if not self._eager:
            self._receive(broadcast)
        at_work: list[Sent] = []
        while waiting and not self._eager:
            wave = self._wave(waiting, broadcast)
            del waiting[: len(wave)]
            yield from self._hand_over(at_work, broadcast)  # while the next wave is at work
            at_work = wave
        yield from self._hand_over(at_work, broadcast)
        yield from super().train(broadcast, waiting)

    def _wave(self, waiting: Sequence[str], broadcast: Broadcast) -> list[Sent]:
        """Start the first of the waiting clients, one in each lane."""
        wave = []
        for name, lane in zip(waiting, self._at_most(len(waiting)), strict=False):
            client = self._client(name, broadcast, lane)
            update = self._start(client, lane)
            if update is None:  # that lane had no room, or nothing can be captured
                break
            wave.append((client, update, lane.stream.record_event()))
        return wave

    def _hand_over(self, wave: list[Sent], broadcast: Broadcast) -> Iterator[Update | Refused]:
        """What a wave sends. Whether it is finite is asked of the GPU once for all of it."""
        here = torch.cuda.current_stream()
        for _, update, done in wave:
            here.wait_event(done)
            for tensor in _tensors(update):
                tensor.record_stream(here)  # made on the lane's stream, freed on this one
        flags = [finite(update) for _, update, _ in wave if update.steps]
        known = iter(torch.stack(flags).tolist() if flags else [])
        for client, update, _ in wave:
            looked_at = replace(update, finite=next(known)) if update.steps else update
            yield self._sent(client, looked_at, broadcast)

    def _at_most(self, clients: int) -> list[Lane]:
        while len(self._lanes) < min(clients, self._most):
            try:
                model = copy.deepcopy(self.slot.model)
                lane = Lane(model, self.local, self._longest, self.seed, self.device)
                lane.slot.built = self.slot.built
                self._lanes.append(lane)
            except torch.OutOfMemoryError:
                self._fewer(len(self._lanes))
        return self._lanes[:clients]

    def _receive(self, broadcast: Broadcast) -> None:
        """Copy what the server sent to where captured steps look for it."""
        for held, sent in ((self._model, broadcast.model), (self._extras, broadcast.extras)):
            if held.keys() != sent.keys():
                held.clear()
                held.update({name: tensor.clone() for name, tensor in sent.items()})
                self._lanes.clear()  # their graphs look in the old places
            changing = [name for name in held if name not in self.algorithm.constants]
            if changing:
                torch._foreach_copy_([held[name] for name in changing], [sent[name] for name in changing])

    def _client(self, name: str, broadcast: Broadcast, lane: Lane) -> Client:
        client = self.client(name, broadcast)
        client.slot, client.streams = lane.slot, lane.streams
        client.received, client.extras = self._model, self._extras
        return client

    def _start(self, client: Client, lane: Lane) -> Update | None:
        """Hand a client's whole round to its lane. None where that cannot be."""
        weight = self._weight(client)
        order = Streams(self.seed, client.round, client.name).host("order")
        parts = list(batches(client.index.train, self.local, order))
        if not parts:
            return Update(client.name, weight, {})
        memory, sizes = client.memory, [len(part) for part in parts]
        lane.stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(lane.stream):
                for size in lane.missing(sizes):
                    lane.begin(client, self.algorithm, memory, parts)
                    lane.capture(client, self.algorithm, size)
                lane.begin(client, self.algorithm, memory, parts)
                lane.play(client, self.algorithm, sizes)
                self.algorithm.end(client)
                lane.slot.draws.clear()
                update = leave(client, self.algorithm, weight, lane.total / sum(sizes))
                client.memory = lane.apart(client.memory)
                return _apart(update)
        except torch.OutOfMemoryError:
            self._fewer(len(self._lanes) - 1)
        except RuntimeError as error:
            if "captur" not in str(error):
                raise
            self._eager = True
            line = str(error).strip().splitlines()[0]
            self.say(f"engine captured: this step cannot be captured ({line}), so clients train one after another")
        return None

    def _fewer(self, most: int) -> None:
        """Go on with as many lanes as there is room for, or without any."""
        torch.cuda.synchronize()  # a lane may be at work
        self._most = most
        del self._lanes[most:]
        torch.cuda.empty_cache()
        self._eager = self._most < 1
        how = "one after another" if self._eager else f"{self._most} at a time"
        self.say(f"engine captured: the GPU has no room for more, so clients train {how}")


def _apart(update: Update) -> Update:
    """The update in tensors of its own, so that its lane can go on with the next client."""
    row = in_a_row(update.model)
    floats = {name: tensor for name, tensor in update.model.items() if tensor.is_floating_point()}
    parts = row.split([tensor.numel() for tensor in floats.values()])
    model = {name: tensor.clone() for name, tensor in update.model.items() if name not in floats}
    model |= {name: part.view(tensor.shape) for (name, tensor), part in zip(floats.items(), parts, strict=True)}
    means = {name: tensor.clone() for name, tensor in update.report.means.items()}
    spreads = {name: (value.clone(), weight.clone()) for name, (value, weight) in update.report.spreads.items()}
    ordered = {name: model[name] for name in update.model}
    return replace(update, model=ordered, report=Report(means, spreads), row=row)


def _tensors(update: Update) -> Iterator[Tensor]:
    yield from update.model.values()
    yield from update.report.means.values()
    for value, weight in update.report.spreads.values():
        yield from (value, weight)
    yield from (tensor for tensor in (update.row, update.loss) if tensor is not None)
