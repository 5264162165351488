"""The engine for a GPU: clients side by side, each step captured once as a CUDA graph and replayed.

In eager PyTorch the step of a small network is hundreds of launches, and a fast GPU waits for them. A *lane* is a slot
with a stream of its own. Its step, from drawing noise and taking the batch out of the pool to the optimiser's update,
is captured when batches of a size have come a few times, and from then on replayed with one launch. Lanes run beside
each other. Nothing in an algorithm knows of it: what its step reads lies in tensors that stay where they are (the
server's model and extras, the client's memory, the order of the data, generators that are seeded anew for a client).

Where clients keep nothing between rounds, how a client enters its lane and what it sends are captured as well, and so
is evaluation.

What is captured runs its own Python then, and not when it is replayed: it must not depend on the round or the client.
"""

from __future__ import annotations

import copy
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.dropout import _DropoutNd

from fedfa.cuda_streams import borrowed_streams
from fedfa.data.federation import Split
from fedfa.engines.base import Refused, Score
from fedfa.engines.client import Broadcast, Client, batches
from fedfa.engines.lane import ONE_CAPTURE, Lane, assigned, captured
from fedfa.engines.sequential import Sequential
from fedfa.reduction import Update
from fedfa.rows import copy_all
from fedfa.state import size_in_bytes
from fedfa.streams import Streams

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
"""Queues from the host to the GPU, read when CUDA starts. With its default of 8 more lanes than that wait for each
other: rounds of small networks took up to a third longer."""

MOST_LANES = 10
"""Lanes unless it is said how many. At 50 clients of five small steps each, 16 were a twentieth faster, 25 no faster;
every lane takes a model's memory."""
SPARE = 8
"""Times the model's size that lanes leave free: the server's sums are taken in pairs of float64 beside them."""
SCARCE = 0.25
"""Share of the GPU's memory: with less of it free, what is kept for later is given back."""
SWEEPS = 2
"""Streams that clients are evaluated on side by side: small splits do not fill a GPU."""

_ALONE = threading.Lock()
"""Held while a client trains eagerly, who uses torch's global generator."""


@dataclass
class Sent:
    """A client at work, and what it will have sent when `done`: an update, and its sum of losses beside whether all of
    its numbers are good."""

    client: Client
    update: Update
    numbers: Tensor
    samples: int
    passing: bool
    """Whether its tensors go when they are done with, and are not a captured exit's."""
    done: torch.cuda.Event


class Captured(Sequential):
    """Trains the clients of a round in lanes, as many at a time as there are lanes, the largest clients first."""

    def __init__(self, *args: Any, lanes: int = 0, say: Callable[[str], None] = print, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.say = say
        self._most = lanes or MOST_LANES
        self._lanes: list[Lane] = []
        self._waves = 0
        self._forgetful: bool | None = None
        """Whether clients keep nothing between rounds; None while that is not known."""
        self._sweeps: dict[tuple[Split, tuple[str, ...]], Sweep | None] = {}
        self._sweep_pool = torch.cuda.graph_pool_handle()
        self._left_over = False
        """Whether eager steps before captures have left memory behind that no one uses again."""
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

    def close(self) -> None:
        """Give the GPU's memory back. That of graphs would stay with torch when the run is gone, where neither another
        run's graphs nor another process can have it."""
        for lane in self._lanes:
            lane.stream.synchronize()
        with ONE_CAPTURE:
            for held in (self._lanes, self._sweeps, self._model, self._extras):
                held.clear()
            torch.cuda.empty_cache()

    def train(self, broadcast: Broadcast, names: Sequence[str]) -> Iterator[Update | Refused]:
        waiting = sorted(names, key=lambda name: -len(self.federation.clients[name].train))
        if not self._eager:
            self._receive(broadcast)
            self._tidy()
        at_work: list[Sent] = []
        given: Counter[Lane] = Counter()  # samples that lanes have got in this round
        while waiting and not self._eager:
            wave = self._wave(waiting, broadcast, given)
            del waiting[: len(wave)]
            yield from self._hand_over(at_work, broadcast)  # while the next wave is at work
            at_work = wave
        yield from self._hand_over(at_work, broadcast)
        if waiting:
            with _ALONE:
                yield from super().train(broadcast, waiting)

    def _tidy(self) -> None:
        """Give back what eager steps before captures have left, where memory is scarce: all runs that share the GPU
        wait for that, and have to ask for theirs again."""
        if self._left_over:
            free, total = torch.cuda.mem_get_info(self.device)
            if free < SCARCE * total:
                self._gave_back()
            self._left_over = False

    def _wave(self, waiting: Sequence[str], broadcast: Broadcast, given: Counter[Lane]) -> list[Sent]:
        """Start the first of the waiting clients, one in each lane. They come the largest first, and go to lanes that
        have got least: all end at about the same time. Which of these a client goes to, its batch sizes say."""
        self._waves += 1
        free = self._freest(len(waiting), given)
        names = waiting[: len(free)]
        parts = [self._parts(name, broadcast.round) for name in names]
        lanes = [free[i] for i in assigned([frozenset(map(len, own)) for own in parts], [lane.knows for lane in free])]
        clients = [self._client(name, broadcast, lane) for name, lane in zip(names, lanes, strict=True)]
        lengths = [sum(map(len, own)) for own in parts]
        rows = [part for own in parts for part in own]
        whole = torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64)
        orders = whole.pin_memory().to(self.device, non_blocking=True)  # one copy for all of the wave
        wave = []
        for client, lane, own, order in zip(clients, lanes, parts, orders.split(lengths), strict=True):
            sent = self._start(client, lane, order, [len(part) for part in own])
            if sent is None:  # that lane had no room, or nothing can be captured
                break
            given[lane] += len(order)
            wave.append(sent)
        return wave

    def _parts(self, name: str, round: int) -> list[Tensor]:
        order = Streams(self.seed, round, name).host("order")
        return list(batches(self.federation.clients[name].train, self.local, order))

    def _hand_over(self, wave: list[Sent], broadcast: Broadcast) -> Iterator[Update | Refused]:
        """What a wave sends. The GPU is waited for once for all of it."""
        if not wave:
            return
        here = torch.cuda.current_stream()
        for sent in wave:
            here.wait_event(sent.done)
            for tensor in _tensors(sent.update) if sent.passing else ():
                tensor.record_stream(here)  # made on the lane's stream, freed on this one
        numbers = torch.stack([sent.numbers for sent in wave]).tolist()
        for sent, (loss, good) in zip(wave, numbers, strict=True):
            mean = torch.tensor(loss / max(sent.samples, 1))
            yield self._sent(sent.client, replace(sent.update, loss=mean, sound=bool(good)), broadcast)

    def _freest(self, clients: int, given: Counter[Lane]) -> list[Lane]:
        """A lane for each of so many clients, or all that there can be: those that have got least, least first."""
        while len(self._lanes) < min(clients, self._most):
            try:
                model = copy.deepcopy(self.slot.model)
                lane = Lane(model, self.local, self._longest, self.seed, self.device)
                lane.slot.built = self.slot.built
                self._lanes.append(lane)
            except torch.OutOfMemoryError:
                self._fewer(len(self._lanes))
        return sorted(self._lanes, key=lambda lane: given[lane])[:clients]

    def _receive(self, broadcast: Broadcast) -> None:
        """Copy what the server sent to where captured steps look for it."""
        in_slots = {name: self.slot.tensors[name] for name in broadcast.model}  # which are in the slots' memory format
        for held, sent, like in (
            (self._model, broadcast.model, in_slots),
            (self._extras, broadcast.extras, broadcast.extras),
        ):
            if held.keys() != sent.keys():
                held.clear()
                held.update({name: torch.empty_like(tensor).copy_(sent[name]) for name, tensor in like.items()})
                with ONE_CAPTURE:
                    self._lanes.clear()  # their graphs look in the old places
                    self._sweeps.clear()
            changing = [name for name in held if name not in self.algorithm.constants]
            if changing:
                copy_all([held[name] for name in changing], [sent[name] for name in changing])

    def _client(self, name: str, broadcast: Broadcast, lane: Lane) -> Client:
        client = self.client(name, broadcast)
        client.slot, client.streams = lane.slot, lane.streams
        client.received, client.extras = self._model, self._extras
        return client

    def _start(self, client: Client, lane: Lane, order: Tensor, sizes: Sequence[int]) -> Sent | None:
        """Hand a client's whole round to its lane. None where that cannot be."""
        memory = client.memory
        for _ in range(2):
            client.memory = memory
            lane.stream.wait_stream(torch.cuda.current_stream())
            try:
                with torch.cuda.stream(lane.stream):
                    sent, new = self._played(client, lane, order, sizes)
                if new:
                    self._keep_room()
                return sent
            except torch.OutOfMemoryError:
                pass
            except RuntimeError as error:
                if "captur" not in str(error):
                    raise
                self._eager = True
                self._say_why("this step", error, "clients train one after another")
                return None
            if not self._gave_back():
                break
        self._fewer(sum(other.works for other in self._lanes if other is not lane))
        return None

    def _gave_back(self) -> bool:
        """Give back what torch keeps and nobody uses, which an eager step finds by itself and a capture does not.
        Whether there was any."""
        held = torch.cuda.memory_reserved(self.device)
        with ONE_CAPTURE:
            torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self.device) < held

    def _say_why(self, what: str, error: RuntimeError, so: str) -> None:
        line = str(error).strip().splitlines()[0]
        self.say(f"engine captured: {what} cannot be captured ({line}), so {so}")

    def _played(self, client: Client, lane: Lane, order: Tensor, sizes: Sequence[int]) -> tuple[Sent, bool]:
        """What the client will have sent, and whether something new was captured for it."""
        weight, memory = self._weight(client), client.memory
        missing = lane.missing(sizes)
        for size, steps in missing:
            self._left_over = True
            lane.begin(client, self.algorithm, memory, order)
            lane.capture(client, self.algorithm, size, steps)
        lane.begin(client, self.algorithm, memory, order)
        lane.play(client, self.algorithm, sizes)
        settled = lane.settled
        if self._forgetful:
            self._capture_ends(client, lane)
        update, numbers = lane.end(client, self.algorithm, weight, self._waves)
        if self._forgetful is None and sizes:
            self._forgetful = not memory and not client.memory
        sent = Sent(client, update, numbers, sum(sizes), not lane.settled, lane.stream.record_event())
        return sent, bool(missing) or lane.settled != settled

    def _capture_ends(self, client: Client, lane: Lane) -> None:
        """Where that cannot be, steps are replayed all the same."""
        try:
            lane.capture_ends(client, self.algorithm)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or "captur" not in str(error):
                raise
            self._forgetful = False
            self._say_why("what a client begins and ends with", error, "its steps alone are replayed")

    def _keep_room(self) -> None:
        """Run out of memory now, when a lane can still be given up for it, and not when updates are added."""
        torch.empty(SPARE * size_in_bytes(self.slot.tensors), dtype=torch.uint8, device=self.device)

    def _fewer(self, most: int) -> None:
        """Go on with as many lanes as there is room for, or without any."""
        torch.cuda.synchronize()  # a lane may be at work
        self._most = most
        with ONE_CAPTURE:
            del self._lanes[most:]
            torch.cuda.empty_cache()
        self._eager = self._most < 1
        how = "one after another" if self._eager else f"{self._most} at a time"
        self.say(f"engine captured: the GPU has no room for more, so clients train {how}")

    @torch.no_grad()
    def evaluate(self, broadcast: Broadcast, names: Sequence[str], split: Split) -> dict[str, Score]:
        key = (split, tuple(names))
        some = any(len(self.federation.clients[name].of(split)) for name in names)
        captures = some and not self._eager and not self.algorithm.private(self.slot.model)
        if captures and key in self._sweeps:
            self._receive(broadcast)
            self.slot.load(self._model)
            sweep = self._sweeps[key] = self._sweeps[key] or self._sweep(names, split)
            if sweep.graph is not None:
                sweep.graph.replay()
                return sweep.scores()
        if captures:
            self._sweeps.setdefault(key)  # the first time warms up
        return super().evaluate(broadcast, names, split)

    def _sweep(self, names: Sequence[str], split: Split) -> Sweep:
        """Capture the evaluation of all these clients; without a graph where that cannot be."""
        clients = {name: index for name in names if len(index := self.federation.clients[name].of(split))}
        indices = {name: index.to(self.device) for name, index in clients.items()}
        graph = torch.cuda.CUDAGraph()
        self.slot.model.eval()
        try:
            with borrowed_streams(SWEEPS + 1, self.device) as (here, *aside):
                here.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(here), captured(graph, pool=self._sweep_pool):
                    totals: list[Tensor] = []
                    for number, index in enumerate(indices.values()):
                        stream = aside[number % SWEEPS]
                        stream.wait_stream(here)
                        with torch.cuda.stream(stream):
                            totals.append(self._totals(index, self._extras))
                    for stream in aside[: len(indices)]:
                        here.wait_stream(stream)
                    found = torch.stack(totals)
        except RuntimeError as error:  # one that cannot be captured, or no room
            self._sweep_pool = torch.cuda.graph_pool_handle()  # see Lane.capture
            self._say_why("evaluation", error, "clients are evaluated one by one")
            return Sweep({}, None, torch.empty(0))
        return Sweep(indices, graph, found)


@dataclass
class Sweep:
    """The captured evaluation of some clients: the samples that it reads, and sums of metric and loss."""

    indices: dict[str, Tensor]
    graph: torch.cuda.CUDAGraph | None
    totals: Tensor

    def scores(self) -> dict[str, Score]:
        found = zip(self.indices.items(), self.totals.tolist(), strict=True)
        return {name: Score(metric / len(i), loss / len(i), len(i)) for (name, i), (metric, loss) in found}


def _tensors(update: Update) -> Iterator[Tensor]:
    yield from update.model.values()
    yield from update.report.means.values()
    for value, weight in update.report.spreads.values():
        yield from (value, weight)
    yield from (tensor for tensor in (update.row, update.loss) if tensor is not None)
