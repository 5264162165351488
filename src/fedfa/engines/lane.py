"""A lane of the captured engine: a slot with a stream, whose steps are captured once as CUDA graphs and replayed."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fedfa.algorithms.base import Algorithm
from fedfa.cuda_streams import own_stream
from fedfa.engines.client import OPTIMIZER, Client, Local, Slot, enter, kept_optimizer, leave, step
from fedfa.reduction import Report, Update, numbers_are_good
from fedfa.rows import copies, cut, in_a_row
from fedfa.streams import Streams

OFTEN = 4
"""Times that a batch size comes before it is captured: a capture costs a few eager steps."""
MOST_SIZES = 8
"""Batch sizes that a lane captures; others run eagerly."""
STRETCH = 4
"""Steps of one size, one after another, that are captured as one graph too: each replay has the GPU wait for its start,
and for the random streams to be moved on."""
ALWAYS = 2**62
"""As often as no batch size comes."""
WARM_UP = 3
"""Eager steps before a lane's first capture, in which cuDNN and the optimiser allocate what they need. Before others
one is enough, for kernels that have not met the batch size."""

ONE_CAPTURE = threading.Lock()
"""Held while something is captured, or given back: runs may share the GPU from threads of one process."""


@contextlib.contextmanager
def captured(
    graph: torch.cuda.CUDAGraph, generators: Sequence[torch.Generator] = (), pool: Any = None
) -> Iterator[None]:
    """Capture what happens on this thread's current stream. Graphs whose memory comes from one pool must leave nothing
    in it that is needed after another of them has run. (`torch.cuda.graph` would collect garbage and wait for the
    device each time, which takes longer than a capture.)"""
    with ONE_CAPTURE, _no_garbage_collected():
        for generator in generators:
            graph.register_generator_state(generator)
        pool = pool or torch.cuda.graph_pool_handle()
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            yield
            graph.capture_end()
        except BaseException:
            _give_up(graph, pool)
            raise


@contextlib.contextmanager
def _no_garbage_collected() -> Iterator[None]:
    """Graphs that are garbage must not be freed by a thread that captures: the driver does not permit it."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _give_up(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """After a capture that failed: let torch's allocator go on as before."""
    with contextlib.suppress(RuntimeError), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # where it failed before its first kernel
        graph.capture_end()
    with contextlib.suppress(RuntimeError):  # which a capture that cannot be ended leaves out
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)


class Lane:
    """A slot with a stream, and with all that its captured steps read and write in places that do not change."""

    def __init__(self, model: nn.Module, local: Local, longest: int, seed: int, device: torch.device) -> None:
        self.stream = own_stream(self, device)
        self.slot = Slot(model, local, capturable=True)
        self.streams = Streams(seed, 0, "", device)
        self.order = torch.zeros(longest, dtype=torch.int64, device=device)
        """The samples of a client's whole round, batch after batch."""
        self.cursor = torch.zeros((), dtype=torch.int64, device=device)
        """Where in it the next batch begins."""
        self.total = torch.zeros((), device=device)
        """The sum of losses so far."""
        self._memory: dict[str, Tensor] = {}
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        """By batch size and number of steps."""
        self._pool = torch.cuda.graph_pool_handle()
        self._seen: Counter[int] = Counter()
        self._rate: float | None = None
        self._entry: torch.cuda.CUDAGraph | None = None
        self._exits: list[tuple[torch.cuda.CUDAGraph, Update, Tensor]] = []

    def begin(self, client: Client, algorithm: Algorithm, memory: Mapping[str, Tensor], order: Tensor) -> None:
        """Everything as it is before the client's first step of the round."""
        client.memory = dict(memory)
        client.steps = 0
        self.streams.move(client.round, client.name)
        order.record_stream(self.stream)  # made on another stream: not to be used again before this one read it
        self.order[: len(order)].copy_(order)
        if self._rate != client.rate:
            for group in self.slot.optimizer.param_groups:
                group["lr"].fill_(client.rate)
            self._rate = client.rate
        if self._entry is not None:
            self._entry.replay()
            return
        for tensor in memory.values():
            tensor.record_stream(self.stream)
        self._enter(client, algorithm)
        for name, tensor in client.memory.items():
            if not name.startswith(OPTIMIZER) and name not in self.slot.tensors:
                client.memory[name] = self._memory.setdefault(name, torch.empty_like(tensor)).copy_(tensor)

    def _enter(self, client: Client, algorithm: Algorithm) -> None:
        self.cursor.zero_()
        self.total.zero_()
        enter(client, algorithm)
        self._restore(kept_optimizer(client))
        algorithm.begin(client)

    def play(self, client: Client, algorithm: Algorithm, sizes: Sequence[int]) -> None:
        """The client's steps."""
        for size, length in _stretches(sizes):
            left = length
            for steps in (STRETCH, 1):
                while left >= steps and (graph := self._graphs.get((size, steps))) is not None:
                    graph.replay()
                    client.steps += steps
                    left -= steps
            for _ in range(left):
                self._step(client, algorithm, size)
                client.steps += 1

    def end(self, client: Client, algorithm: Algorithm, weight: int, turn: int) -> tuple[Update, Tensor]:
        """What the client sends, in tensors that stay as they are until the lane's next client but one has ended."""
        if self.settled:
            graph, like, numbers = self._exits[turn % 2]
            graph.replay()
            return replace(like, client=client.name, weight=weight, steps=client.steps), numbers
        update, numbers = self._leave(client, algorithm, weight)
        client.memory = {
            name: t.clone() if t is self._memory.get(name) else t  # not where the lane's next client will be
            for name, t in client.memory.items()
        }
        return update, numbers

    def _leave(self, client: Client, algorithm: Algorithm, weight: int) -> tuple[Update, Tensor]:
        algorithm.end(client)
        self.slot.draws.clear()
        update = apart(leave(client, algorithm, weight, self.total))
        return update, torch.stack((self.total, numbers_are_good(update).to(self.total.dtype)))

    @property
    def works(self) -> bool:
        """Whether a step of it is captured."""
        return bool(self._graphs)

    @property
    def knows(self) -> dict[int, int]:
        """Batch sizes that it has met, and how often; those that are captured, always."""
        return {**self._seen, **{size: ALWAYS for size, _ in self._graphs}}

    @property
    def settled(self) -> bool:
        """Whether what clients send is captured."""
        return bool(self._exits)

    def missing(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        """What is to be captured for a client's batches: sizes that come often enough, each with a number of steps."""
        self._seen.update(sizes)
        longest: dict[int, int] = {}
        for size, length in _stretches(sizes):
            longest[size] = max(length, longest.get(size, 0))
        known = {size for size, _ in self._graphs}
        wanted = []
        for size, length in longest.items():
            if self._seen[size] >= OFTEN and (size in known or len(known) < MOST_SIZES):
                known.add(size)
                wanted += [(size, steps) for steps in (1, STRETCH) if length >= steps]
        return [pair for pair in wanted if pair not in self._graphs]

    def capture(self, client: Client, algorithm: Algorithm, size: int, steps: int) -> None:
        """Capture some steps with batches of one size. The client has begun, and has to begin again afterwards."""
        eager = 1 if self.works else WARM_UP
        for _ in range(eager if steps == 1 else 0):
            self.cursor.zero_()
            self._step(client, algorithm, size)
        graph = torch.cuda.CUDAGraph()
        try:
            with captured(graph, self.streams.opened(), self._pool):
                for _ in range(steps):
                    self._step(client, algorithm, size)
        except BaseException:
            self._pool = torch.cuda.graph_pool_handle()  # torch does not let a pool be used again that nobody holds
            raise
        self._graphs[size, steps] = graph

    def capture_ends(self, client: Client, algorithm: Algorithm) -> None:
        """Capture how a client enters and what it sends, where it keeps nothing. The client has taken its steps."""
        if self.settled or not self.works:
            return
        exits = []
        for _ in range(2):
            graph = torch.cuda.CUDAGraph()
            with captured(graph):
                update, numbers = self._leave(client, algorithm, 1)
            exits.append((graph, update, numbers))
        entry = torch.cuda.CUDAGraph()
        with captured(entry, self.streams.opened()):
            self._enter(client, algorithm)
        self._exits, self._entry = exits, entry  # all of them, or none: there may be no room for the last

    def _step(self, client: Client, algorithm: Algorithm, size: int) -> None:
        index = self.order.index_select(0, self.cursor + torch.arange(size, device=self.order.device))
        self.total += step(client, algorithm, index)
        self.cursor += size

    def _restore(self, kept: Mapping[str, Tensor]) -> None:
        """The optimiser as it was kept, or as new, without moving its tensors. A momentum of zeros is as good as none:
        the first step makes it the gradient."""
        optimizer = self.slot.optimizer
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for parameter in parameters:
            for tensor in optimizer.state[parameter].values():
                if isinstance(tensor, Tensor):
                    tensor.zero_()
        for name, tensor in kept.items():
            _, number, key = name.split("/")
            state = optimizer.state[parameters[int(number)]]
            state.setdefault(key, tensor.clone()).copy_(tensor)


def assigned(clients: Sequence[frozenset[int]], lanes: Sequence[Mapping[int, int]]) -> list[int]:
    """A lane for each client, by the client's batch sizes and by what the lanes know, of which there are as many: the
    one that has captured these sizes, or else has met them most often, so that few lanes capture the same; where that
    makes no difference, in their order. Of two clients the one that fewer lanes suit chooses first."""
    if len(set(clients)) < 2:
        return list(range(len(clients)))
    new = [[[lane.get(size, 0) for size in sizes if lane.get(size) != ALWAYS] for lane in lanes] for sizes in clients]
    suiting = [sum(not sizes for sizes in row) for row in new]
    pairs = sorted(
        (len(sizes), suiting[client], -min(sizes, default=0), len(lanes[lane]), client, lane)
        for client, row in enumerate(new)
        for lane, sizes in enumerate(row)
    )
    found: dict[int, int] = {}
    for *_, client, lane in pairs:
        if client not in found and lane not in found.values():
            found[client] = lane
    return [found[client] for client in range(len(clients))]


def _stretches(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Equal batch sizes that follow each other: the size, and how many."""
    for size, run in itertools.groupby(sizes):
        yield size, len(list(run))


def apart(update: Update) -> Update:
    """The update in tensors of its own, so that its lane can go on with the next client."""
    floats = {name: tensor for name, tensor in update.model.items() if tensor.is_floating_point()}
    row = in_a_row(floats)
    model = copies({name: tensor for name, tensor in update.model.items() if name not in floats})
    model |= zip(floats, cut(row, [tensor.shape for tensor in floats.values()]), strict=True)
    spreads = update.report.spreads
    values = copies({name: value for name, (value, _) in spreads.items()})
    weights = copies({name: weight for name, (_, weight) in spreads.items()})
    report = Report(copies(update.report.means), {name: (values[name], weights[name]) for name in spreads})
    return replace(update, model={name: model[name] for name in update.model}, report=report, row=row)
