"""The plain engine: one client after another, on any device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from fedfa.algorithms.base import Algorithm, Share
from fedfa.augmentation import Augmentation
from fedfa.data.federation import Federation, Split
from fedfa.data.transforms import Transforms
from fedfa.engines.base import Refused, Score
from fedfa.engines.client import Broadcast, Client, Local, Slot, train
from fedfa.memory import Memory
from fedfa.precision import Precision, cast
from fedfa.reduction import BadUpdate, Update, check
from fedfa.rows import copies
from fedfa.streams import Streams
from fedfa.task import Task

EVALUATION_BATCH = 256


class Sequential:
    """Trains the clients of a round one after another in one slot, so that memory does not grow with clients."""

    def __init__(
        self,
        model: nn.Module,
        federation: Federation,
        task: Task,
        algorithm: Algorithm,
        local: Local,
        memory: Memory,
        seed: int,
        weighting: str = "uniform",
        augmentation: Augmentation | None = None,
        device: torch.device | str = "cpu",
        transforms: Transforms | None = None,
        precision: Precision = "float32",
    ) -> None:
        self.device = torch.device(device)
        self.federation = federation.to(self.device)
        self.task, self.algorithm, self.local, self.memory = task, algorithm, local, memory
        self.seed, self.weighting = seed, weighting
        self.augmentation, self.transforms = augmentation or Augmentation(), transforms or Transforms()
        self.slot = Slot(cast(model, precision, self.device), local)

    def close(self) -> None:
        """Give back what the engine holds, at the end of a run."""

    def client(self, name: str, broadcast: Broadcast) -> Client:
        """The client with this name as it stands before the round's training."""
        return Client(
            name=name,
            slot=self.slot,
            task=self.task,
            federation=self.federation,
            index=self.federation.clients[name],
            local=self.local,
            round=broadcast.round,
            streams=Streams(self.seed, broadcast.round, name, self.device),
            received=broadcast.model,
            extras=broadcast.extras,
            memory=self._here(self.memory.load(name, broadcast.round - 1)),
            augmentation=self.augmentation,
            transforms=self.transforms,
        )

    def _here(self, memory: dict[str, Tensor]) -> dict[str, Tensor]:
        """What a client keeps, where it trains."""
        there = all(tensor.device.type == self.device.type for tensor in memory.values())
        return memory if there else copies(memory, self.device)

    def share(self, broadcast: Broadcast, names: Sequence[str]) -> Iterator[tuple[str, Share]]:
        for name in names:
            client = self.client(name, broadcast)
            self.slot.enter(client.received, self.algorithm.private(client.model), client.memory)
            yield name, self.algorithm.share(client)
            self.memory.save(name, 0, client.memory)

    def train(self, broadcast: Broadcast, names: Sequence[str]) -> Iterator[Update | Refused]:
        for name in names:
            client = self.client(name, broadcast)
            yield self._sent(client, train(client, self.algorithm, self._weight(client)), broadcast)

    def _weight(self, client: Client) -> int:
        return 1 if self.weighting == "uniform" else len(client.index.train)

    def _sent(self, client: Client, update: Update, broadcast: Broadcast) -> Update | Refused:
        """The update if it may be sent; the client's memory is kept then."""
        if not update.steps:
            samples = len(client.index.train)
            return Refused(client.name, f"has no batch to train on ({samples} training samples)")
        try:
            if not update.sound:
                check(update, broadcast.model, broadcast.expected)
        except BadUpdate as bad:
            return Refused(client.name, str(bad))
        self.memory.save(client.name, broadcast.round, client.memory)
        return update

    @torch.no_grad()
    def evaluate(self, broadcast: Broadcast, names: Sequence[str], split: Split) -> dict[str, Score]:
        model = self.slot.model.eval()
        private = self.algorithm.private(model)
        self.slot.enter(broadcast.model, private, {})
        totals: dict[str, tuple[Tensor, int]] = {}
        for name in names:
            if private:
                own = {**self.algorithm.unseen(broadcast.extras), **self.memory.load(name, broadcast.round)}
                self.slot.enter(broadcast.model, private, own)
            index = self.federation.clients[name].of(split)
            if len(index):
                totals[name] = self._totals(index, broadcast.extras), len(index)
        return {name: Score(float(total[0]) / n, float(total[1]) / n, n) for name, (total, n) in totals.items()}

    def _totals(self, index: Tensor, extras: Mapping[str, Tensor]) -> Tensor:
        """Sums of metric and loss over the samples at `index`."""
        total = torch.zeros(2, device=self.device, dtype=torch.float64)
        for part in index.split(EVALUATION_BATCH):
            x, y = self.federation.batch(part)
            output = self.slot.model(self.algorithm.inputs(self.transforms.evaluation(x), extras))
            total += torch.stack((self.task.scores(output, y).sum(), self.task.loss(output, y) * len(part)))
        return total
