"""Ten thousand clients with private state: it is on disk, and in memory only while a client trains."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fedfa
from fedfa import ClientIndex, Federation
from fedfa.engines.client import Local
from fedfa.engines.sequential import Sequential
from fedfa.memory import Memory
from fedfa.server import Plan, Watcher, collect_shares, first_state, play_round
from fedfa.task import Classification

CLIENTS = 10_000


def federation() -> Federation:
    images = torch.randint(256, (64, 1, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    index = [torch.arange(s, s + 2) for s in range(0, 64, 2)]
    none = torch.arange(0)
    clients = {f"{number:05d}": ClientIndex(index[number % 32], none, none) for number in range(CLIENTS)}
    return Federation("many", "classification", images, torch.arange(64) % 2, ("0", "1"), clients)


def live_bytes() -> int:
    """Of every tensor there is, each storage once."""
    tensors = [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


class Watching(Watcher):
    """Measures now and then what is in memory while clients train."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.chosen: set[str] = set()
        self._done = 0

    def round_started(self, round: int, clients: Sequence[str]) -> None:
        self.chosen |= set(clients)

    def client_done(self, client: str, loss: Tensor | None, refused: str | None) -> None:
        assert refused is None
        self._done += 1
        if self._done % 40 == 1:
            self.seen.append(live_bytes())


@pytest.mark.parametrize("name", ["scaffold", "feddyn", "fedbn", "fedrobust"])
def test_memory_does_not_grow_with_clients(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.Flatten(), nn.Linear(576, 64), nn.BatchNorm1d(64)]
    model = nn.Sequential(*layers, nn.Linear(64, 2))
    size = sum(p.numel() * 4 for p in model.parameters())
    algorithm = fedfa.ALGORITHMS[name]()
    memory = Memory(tmp_path, room=2 * size)
    engine = Sequential(model, federation(), Classification(), algorithm, Local(lr=0.05), memory, 0)
    plan = Plan(9, 0, tuple(engine.federation.clients), participation=0.012, evaluate_every=9)
    server = collect_shares(first_state(model, algorithm, CLIENTS), algorithm, engine, plan)
    watcher = Watching()
    for _ in range(2):
        server, _ = play_round(server, algorithm, engine, plan, watcher)
    assert len(watcher.seen) == 6 and len(watcher.chosen) > 200
    memory.sync()
    assert {folder.name for folder in tmp_path.iterdir()} == watcher.chosen
    # 240 clients' variates would be 240 models; an engine, a server and sums in float64 are less than 20.
    assert max(watcher.seen) - min(watcher.seen) < 4 * size
