"""The captured engine against the sequential one. All of it needs a CUDA device."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedfa
from fedfa import Algorithm, Federation
from fedfa.augmentation import Augmentation
from fedfa.data.federation import ClientIndex
from fedfa.engines.captured import Captured
from fedfa.engines.client import Client, Local
from fedfa.engines.lane import Lane
from fedfa.engines.sequential import Sequential
from fedfa.memory import Memory
from fedfa.nets import ResNet18
from fedfa.precision import arithmetic
from fedfa.server import Record, Watcher, collect_shares, first_state, play_round
from fedfa.state import ServerState
from fedfa.task import Batch, Classification
from playing import algorithm, plan_for, uneven

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ALGORITHMS = [name for name in fedfa.ALGORITHMS if name.startswith(("fed", "scaffold"))]


def network(rule: Algorithm, augmentation: Augmentation | None = None) -> nn.Module:
    torch.manual_seed(0)
    own = [layer for layer in (augmentation and augmentation.layer(4, 1), rule.layer(4)) if layer is not None]
    stage = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), *own]
    return nn.Sequential(*stage, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3))


def play(
    kind: type[Sequential],
    rule: Algorithm,
    folder: Path,
    rounds: int = 6,
    local: Local | None = None,
    augmentation: Augmentation | None = None,
    participation: float = 1.0,
    model: nn.Module | None = None,
    federation: Federation | None = None,
    watcher: Watcher | None = None,
    **own: Any,
) -> tuple[ServerState, list[Record], Memory]:
    federation = federation or uneven()
    model = copy.deepcopy(model) if model is not None else network(rule, augmentation)
    local = local or Local(batch_size=4, lr=0.05, epochs=2)
    memory = Memory(folder)
    with arithmetic("float32"):
        engine = kind(
            model, federation, Classification(), rule, local, memory, 0, augmentation=augmentation, device="cuda", **own
        )
        plan = plan_for(federation, rounds, participation)
        start = first_state(model, rule, len(plan.clients)).to("cuda")
        server = collect_shares(start, rule, engine, plan)
        records = []
        for _ in range(rounds):
            server, record = play_round(server, rule, engine, plan, watcher or Watcher())
            records.append(record)
        engine.close()
    return server, records, memory


def assert_alike(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor.float(), other[name].float(), atol=2e-5, rtol=2e-4, msg=name)


def still(name: str) -> Algorithm:
    """The algorithm with nothing random in it; FedMix shares a single average, which every draw then is."""
    if name.startswith("fedfa"):
        return algorithm(name, p=0.0)
    return algorithm(name, average=0) if name == "fedmix" else algorithm(name)


def one_site() -> Federation:
    """For FedMix: with one average in all there is nothing to draw."""
    whole = uneven()
    return Federation(whole.name, whole.task, whole.images, whole.labels, whole.classes, {"a": whole.clients["a"]})


@pytest.mark.parametrize("name", ALGORITHMS)
def test_it_equals_the_sequential_engine_where_nothing_is_random(name: str, tmp_path: Path) -> None:
    federation = one_site() if name == "fedmix" else None
    found = [
        play(kind, still(name), tmp_path / kind.__name__, federation=federation) for kind in (Sequential, Captured)
    ]
    (plain, records, kept), (ours, others, memory) = found
    assert_alike(dict(plain.model), dict(ours.model))
    assert_alike(dict(plain.memory), dict(ours.memory))
    for record, other in zip(records, others, strict=True):
        assert record.loss == pytest.approx(other.loss, rel=1e-3)
        assert not other.refused and record.clients == other.clients
    for client in uneven().clients:
        assert_alike(kept.load(client, 6), memory.load(client, 6))


@pytest.mark.parametrize("statistics", ["corrected", "kept", "released"])
def test_whatever_happens_to_the_statistics(statistics: str, tmp_path: Path) -> None:
    rule, said = algorithm("fedfa", p=0.0, statistics=statistics), list[str]()
    plain, *_ = play(Sequential, rule, tmp_path / "a")
    ours, *_ = play(Captured, rule, tmp_path / "b", say=said.append)
    assert not said
    assert_alike(dict(plain.model), dict(ours.model))
    assert_alike(dict(plain.memory), dict(ours.memory))


@pytest.mark.parametrize(
    "local",
    [
        Local(batch_size=4, lr=0.05, momentum=0.9, weight_decay=1e-3),
        Local(batch_size=4, lr=0.05, momentum=0.9, optimizer_state="kept"),
        Local(batch_size=4, lr=0.01, optimizer="adam", optimizer_state="kept"),
        Local(batch_size=4, lr=0.01, optimizer="adamw"),
        Local(batch_size=4, lr=0.1, lr_decay=0.5, clip=0.3),
        Local(batch_size=100, lr=0.1, epochs=3),
        Local(batch_size=4, lr=0.1, drop_last=True),
    ],
)
def test_optimisers_and_batches(local: Local, tmp_path: Path) -> None:
    rule = algorithm("fedprox")
    (plain, *_), (ours, *_) = (
        play(kind, rule, tmp_path / kind.__name__, local=local) for kind in (Sequential, Captured)
    )
    assert_alike(dict(plain.model), dict(ours.model))


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_any_number_of_lanes_and_any_participation(lanes: int, tmp_path: Path) -> None:
    plain, records, _ = play(Sequential, algorithm("scaffold"), tmp_path / "a", participation=0.5)
    ours, others, _ = play(Captured, algorithm("scaffold"), tmp_path / "b", participation=0.5, lanes=lanes)
    assert [record.clients for record in records] == [record.clients for record in others]
    assert_alike(dict(plain.model), dict(ours.model))


@pytest.mark.parametrize("name", ["fedfa", "scaffold", "fedmix"])
def test_steps_captured_as_one_graph_are_the_same_steps(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture, made = Lane.capture, []

    def noted(lane: Lane, client: Client, rule: Algorithm, size: int, steps: int) -> None:
        made.append(steps)
        capture(lane, client, rule, size, steps)

    monkeypatch.setattr(Lane, "capture", noted)
    found = []
    for stretch in (3, 1000):
        made.clear()
        monkeypatch.setattr("fedfa.engines.lane.STRETCH", stretch)
        local = Local(batch_size=2, lr=0.05, epochs=2)
        found.append(play(Captured, algorithm(name), tmp_path / str(stretch), local=local))
        assert (3 in made) == (stretch == 3) and 1 in made
    (ours, records, _), (singly, others, _) = found
    assert_alike(dict(ours.model), dict(singly.model))
    assert [r.loss for r in records] == pytest.approx([r.loss for r in others], rel=1e-4)


@pytest.mark.parametrize("name", ["fedfa", "fedfa-total", "fedmix"])
def test_it_repeats_itself_and_draws_anew_every_step(name: str, tmp_path: Path) -> None:
    rule = algorithm(name, p=1.0) if name != "fedmix" else algorithm(name, lam=0.3, average=2)
    losses = [[r.loss for r in play(Captured, rule, tmp_path / str(n))[1]] for n in range(2)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert len(set(losses[0])) == len(losses[0])


class Losses(Watcher):
    def __init__(self) -> None:
        self.found: list[float] = []

    def client_done(self, client: str, loss: Tensor | None, refused: str | None) -> None:
        assert loss is not None
        self.found.append(float(loss))


def test_with_ffa_it_equals_the_sequential_engine_in_distribution(tmp_path: Path) -> None:
    """Sixty-four clients with the same data differ by their draws alone: their losses have one distribution."""
    few = uneven()
    clients = {f"{number:02d}": few.clients["a"] for number in range(64)}
    federation = Federation(few.name, few.task, few.images, few.labels, few.classes, clients)
    found = []
    for kind in (Sequential, Captured):
        watcher = Losses()
        play(kind, algorithm("fedfa", p=0.7), tmp_path / kind.__name__, 3, federation=federation, watcher=watcher)
        found.append(torch.tensor(watcher.found[-64:]))
    plain, ours = found
    error = ((plain.var() + ours.var()) / 64).sqrt()
    assert abs(plain.mean() - ours.mean()) < 4 * error
    assert 0.6 < ours.std() / plain.std() < 1.6
    assert len(set(ours.tolist())) == 64


@pytest.mark.parametrize("name", ["mixup", "cutmix", "manifold-mixup", "mixstyle", "moex", "dsu"])
def test_augmentations(name: str, tmp_path: Path) -> None:
    augmentation = fedfa.AUGMENTATIONS[name]()
    _, records, _ = play(Captured, algorithm("fedfa"), tmp_path, augmentation=augmentation)
    assert all(record.loss is not None and not record.refused for record in records)


def test_segmentation_in_bfloat16(tmp_path: Path) -> None:
    run = fedfa.run("phantom-sites", root=tmp_path, device="cuda", engine="captured", precision="bf16", rounds=4)
    assert run.metrics[-1]["loss"] < run.metrics[0]["loss"]


def test_dropout_falls_back_with_a_line(tmp_path: Path) -> None:
    said: list[str] = []
    model = nn.Sequential(network(Algorithm()), nn.Dropout(0.5))
    play(Captured, Algorithm(), tmp_path, model=model, say=said.append, rounds=1)
    assert said == [
        "engine captured: Dropout draws from torch's own generator, which lanes would share, "
        "so clients train one after another"
    ]


class Curious(Algorithm):
    """A step that looks at a number, which nothing captured can."""

    def gradients(self, client: Client, batch: Batch) -> Tensor:
        loss = super().gradients(client, batch)
        assert loss.item() > 0
        return loss


def test_a_step_that_cannot_be_captured_falls_back_with_a_line(tmp_path: Path) -> None:
    said: list[str] = []
    ours, *_ = play(Captured, Curious(), tmp_path / "a", say=said.append)
    plain, *_ = play(Sequential, Algorithm(), tmp_path / "b")
    assert len(said) == 1 and "cannot be captured" in said[0]
    assert_alike(dict(plain.model), dict(ours.model))


class Careful(Algorithm):
    """The same at a client's end."""

    def end(self, client: Client) -> None:
        assert all(parameter.isfinite().all().item() for parameter in client.model.parameters())


def test_an_end_that_cannot_be_captured_leaves_the_steps_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager, said = list[str](), list[str]()
    monkeypatch.setattr(Sequential, "train", lambda *_: eager.append("a client") or iter(()))
    ours, *_ = play(Captured, Careful(), tmp_path / "a", say=said.append)
    monkeypatch.undo()
    plain, *_ = play(Sequential, Algorithm(), tmp_path / "b")
    assert len(said) == 1 and "so its steps alone are replayed" in said[0] and not eager
    assert_alike(dict(plain.model), dict(ours.model))


def test_too_little_memory_means_fewer_lanes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third lane finds no room: two go on, and the result is the same."""
    from fedfa.engines import captured

    original, made = captured.Lane.capture, []

    def scarce(self: Any, *args: Any) -> None:
        if self not in made:
            made.append(self)
        if len(made) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        original(self, *args)

    monkeypatch.setattr(captured.Lane, "capture", scarce)
    said: list[str] = []
    ours, *_ = play(Captured, algorithm("fedprox"), tmp_path / "a", say=said.append)
    plain, *_ = play(Sequential, algorithm("fedprox"), tmp_path / "b")
    assert said and "the GPU has no room for more" in said[0]
    assert_alike(dict(plain.model), dict(ours.model))


def test_the_end_of_a_run_gives_memory_back(tmp_path: Path) -> None:
    """A graph's memory is its own, and stays with torch until someone says otherwise."""
    given: list[int] = []

    class Weighed(Captured):
        def close(self) -> None:
            held = torch.cuda.memory_reserved()
            super().close()
            given.append(held - torch.cuda.memory_reserved())

    images = torch.randint(256, (32, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    none = torch.arange(0)
    clients = {f"{i}": ClientIndex(torch.arange(8) + 8 * i, none, none) for i in range(4)}
    federation = Federation("small", "classification", images, torch.arange(32) % 3, tuple("abc"), clients)
    server, *_ = play(Weighed, Algorithm(), tmp_path, model=ResNet18(3), federation=federation)
    size = sum(tensor.nbytes for tensor in server.model.values())
    assert given[0] > 4 * 2 * size  # each lane's model and, at least, its gradients


def test_a_full_gpu_means_fewer_lanes(tmp_path: Path) -> None:
    """With no more of the GPU than a few lanes of a large model take, torch's own allocator says no."""
    images = torch.randint(256, (64, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    none = torch.arange(0)
    clients = {f"{i}": ClientIndex(torch.arange(8) + 8 * i, none, none) for i in range(8)}
    federation = Federation("large", "classification", images, torch.arange(64) % 3, tuple("abc"), clients)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 200_000), nn.ReLU(), nn.Linear(200_000, 3))  # 54 MB
    settings: dict[str, Any] = {"federation": federation, "model": model, "rounds": 4}
    plain, *_ = play(Sequential, algorithm("fedavg"), tmp_path / "a", **settings)
    said: list[str] = []
    gc.collect()
    torch.cuda.empty_cache()
    allowed = torch.cuda.memory_reserved() + 1500 * 2**20
    torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.mem_get_info()[1])
    try:
        ours, records, _ = play(Captured, algorithm("fedavg"), tmp_path / "b", say=said.append, **settings)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert said and all("the GPU has no room for more" in line for line in said)
    assert not any(record.refused for record in records)
    assert_alike(dict(plain.model), dict(ours.model))


def test_memory_grows_with_lanes_and_not_with_clients(tmp_path: Path) -> None:
    def peak(clients: int, lanes: int) -> int:
        images = torch.zeros(8, 3, 32, 32, dtype=torch.uint8)
        none = torch.arange(0)
        index = {f"{i:03d}": ClientIndex(torch.arange(8), none, none) for i in range(clients)}
        federation = Federation("many", "classification", images, torch.arange(8) % 3, tuple("abc"), index)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        settings: dict[str, Any] = {"federation": federation, "model": ResNet18(3), "rounds": 3, "lanes": lanes}
        play(Captured, algorithm("fedavg"), tmp_path / f"{clients}-{lanes}", **settings)
        return torch.cuda.max_memory_allocated() - before

    few, many, more_lanes = (
        peak(8, 4),
        peak(40, 4),
        peak(40, 8),
    )  # two waves at least: one is at work while one is added up
    assert many < 1.1 * few
    assert more_lanes > 1.3 * many
