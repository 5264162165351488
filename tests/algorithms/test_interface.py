"""The interface carries what other methods need: each kind of hook, used by a small algorithm of its kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedfa.algorithms.base import Algorithm, Share
from fedfa.augmentation import DSU, Augmentation
from fedfa.data.federation import ClientIndex, Federation
from fedfa.engines.client import Client, Local
from fedfa.engines.sequential import Sequential
from fedfa.layers.ffa import FFA
from fedfa.layers.randomness import Draws
from fedfa.memory import Memory
from fedfa.reduction import Reduced, Report
from fedfa.server import Plan, Record, ServerState, Watcher, collect_shares, first_state, play_round
from fedfa.state import Kind, entries, frozen_statistics
from fedfa.streams import Streams
from fedfa.task import Batch, Classification


def federation() -> Federation:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 255, (36, 1, 4, 4), generator=generator, dtype=torch.uint8)
    labels = torch.randint(2, (36,), generator=generator)
    clients = {
        name: ClientIndex(torch.arange(s, s + 8), torch.arange(s + 8, s + 10), torch.arange(s + 10, s + 12))
        for name, s in (("a", 0), ("b", 12), ("c", 24))
    }
    return Federation("tiny", "classification", images, labels, ("0", "1"), clients)


def network(algorithm: Algorithm, augmentation: Augmentation) -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for layer in (augmentation.layer(2, 1), algorithm.layer(2)) if layer is not None]
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), *layers, nn.Flatten(), nn.Linear(8, 2))


def play(
    algorithm: Algorithm,
    folder: Path,
    rounds: int = 1,
    local: Local | None = None,
    participation: float = 1.0,
    augmentation: Augmentation | None = None,
) -> tuple[ServerState, list[Record]]:
    augmentation = augmentation or Augmentation()
    model = network(algorithm, augmentation)
    local = local or Local(batch_size=4, lr=0.1)
    engine = Sequential(
        model, federation(), Classification(), algorithm, local, Memory(folder, room=0), 0, augmentation=augmentation
    )
    plan = Plan(rounds, 0, ("a", "b", "c"), participation=participation)
    server = collect_shares(first_state(model, algorithm, 3), algorithm, engine, plan)
    records = []
    for _ in range(rounds):
        server, record = play_round(server, algorithm, engine, plan, Watcher())
        records.append(record)
    return server, records


@dataclass(frozen=True)
class Variates(Algorithm):
    """SCAFFOLD's shape: private control variates, a correction of gradients, a report, server state, a broadcast."""

    def start(self, model: nn.Module) -> dict[str, Tensor]:
        return {name: torch.zeros_like(p) for name, p in model.named_parameters()}

    def broadcast(self, server: ServerState) -> dict[str, Tensor]:
        return dict(server.memory)

    def begin(self, client: Client) -> None:
        if not client.memory:
            client.memory.update({name: torch.zeros_like(value) for name, value in client.extras.items()})

    def gradients(self, client: Client, batch: Batch) -> Tensor:
        loss = super().gradients(client, batch)
        for name, parameter in client.model.named_parameters():
            assert parameter.grad is not None
            parameter.grad += client.extras[name] - client.memory[name]
        return loss

    def end(self, client: Client) -> None:
        scale = 1 / (client.steps * client.rate)
        for name, parameter in client.model.named_parameters():
            drift = (client.received[name] - parameter.detach()) * scale
            client.memory[f"{name}/change"] = drift - client.extras[name]
            client.memory[name] = client.memory[name] + client.memory[f"{name}/change"]

    def report(self, client: Client) -> Report:
        return Report(means={name: client.memory[f"{name}/change"] for name in client.extras})

    def aggregate(self, server: ServerState, reduced: Reduced) -> ServerState:
        share = reduced.clients / server.population
        memory = {name: old + share * reduced.means[name] for name, old in server.memory.items()}
        return replace(super().aggregate(server, reduced), memory=memory)


@dataclass(frozen=True)
class TwoPasses(Algorithm):
    """SAM's shape: a second pass with the same draws, in which no running statistics move."""

    rho: float = 0.05
    seen: ClassVar[list[tuple[Tensor, Tensor, Tensor]]] = []

    def layer(self, channels: int) -> nn.Module:
        return FFA(channels, p=1.0)

    def step(self, client: Client, batch: Batch) -> Tensor:
        parameters = list(client.model.parameters())
        start = [p.detach().clone() for p in parameters]
        first = self.loss(client, batch)
        gradients = torch.autograd.grad(first, parameters)
        norm = torch.stack([g.norm() for g in gradients]).norm().clamp_min(1e-12)
        moved = {name: buffer.clone() for name, buffer in client.model.named_buffers()}
        with torch.no_grad():
            for p, g in zip(parameters, gradients, strict=True):
                p.add_(self.rho * g / norm)
        client.optimizer.zero_grad()
        with frozen_statistics(client.model):
            self.loss(client, batch).backward()
        assert all(torch.equal(moved[name], buffer) for name, buffer in client.model.named_buffers())
        with torch.no_grad():
            for p, w in zip(parameters, start, strict=True):
                p.copy_(w)
        with frozen_statistics(client.model):
            again = self.loss(client, batch)
        self.seen.append((first.detach(), again.detach(), moved["1.running_mean"]))
        client.optimizer.step()
        return first.detach()


@dataclass(frozen=True)
class Affine(Algorithm):
    """FedRobust's shape: a private shift of the inputs, moved by ascent before the descent on the model."""

    step_size: float = 0.5

    def begin(self, client: Client) -> None:
        client.memory.setdefault("delta", torch.zeros(1))

    def loss(self, client: Client, batch: Batch) -> Tensor:
        delta = client.memory["delta"].clone().requires_grad_()
        loss = client.task.batch_loss(client.model(batch.x + delta), batch)
        (gradient,) = torch.autograd.grad(loss, delta, retain_graph=True)
        client.memory["delta"] = (delta + self.step_size * gradient).detach()
        return client.task.batch_loss(client.model(batch.x + client.memory["delta"]), batch)


@dataclass(frozen=True)
class Sharing(Algorithm):
    """FedMix's and FedHarmo's shapes: something gathered once, something averaged once, both used on inputs."""

    shares: ClassVar[bool] = True

    def share(self, client: Client) -> Share:
        x, _ = client.federation.batch(client.index.train)
        return Share(Report(means={"mean image": x.mean(0)}), {"averages": x.mean((0, 2, 3))})

    def receive(self, server: ServerState, reduced: Reduced, gathered: Mapping[str, list[Tensor]]) -> ServerState:
        memory = {"mean image": reduced.means["mean image"], "averages": torch.stack(gathered["averages"])}
        return replace(server, memory=memory)

    def broadcast(self, server: ServerState) -> dict[str, Tensor]:
        return dict(server.memory)

    def inputs(self, x: Tensor, extras: Mapping[str, Tensor]) -> Tensor:
        return x - extras["mean image"]


@dataclass(frozen=True)
class OwnNorms(Algorithm):
    """FedBN's shape: BatchNorm stays on the client, which is evaluated with its own."""

    def private(self, model: nn.Module) -> frozenset[str]:
        norms = [path for path, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)]
        return frozenset(name for name in entries(model) if name.rpartition(".")[0] in norms)


class TestPrivateState:
    def test_variates_travel_stay_and_sum_to_the_servers(self, tmp_path: Path) -> None:
        server, _ = play(Variates(), tmp_path, rounds=3)
        kept = [Memory(tmp_path).load(name, 3) for name in ("a", "b", "c")]
        for name, variate in server.memory.items():
            torch.testing.assert_close(torch.stack([m[name] for m in kept]).mean(0), variate, atol=1e-6, rtol=1e-4)
        assert any(variate.abs().sum() > 0 for variate in server.memory.values())

    def test_first_round_is_fedavg_and_the_second_is_not(self, tmp_path: Path) -> None:
        for rounds, same in ((1, True), (2, False)):
            ours, _ = play(Variates(), tmp_path / f"a{rounds}", rounds)
            plain, _ = play(Algorithm(), tmp_path / f"b{rounds}", rounds)
            assert torch.equal(ours.model["0.weight"], plain.model["0.weight"]) is same

    def test_only_clients_that_took_part_have_any(self, tmp_path: Path) -> None:
        _, records = play(Variates(), tmp_path, rounds=1, participation=0.34)
        (chosen,) = records[0].clients
        assert [name for name in ("a", "b", "c") if Memory(tmp_path).load(name, 1)] == [chosen]

    def test_kept_optimiser_state(self, tmp_path: Path) -> None:
        for optimizer, momentum in (("sgd", 0.9), ("adam", 0.0)):
            ends = {}
            for kind in ("fresh", "kept"):
                local = Local(batch_size=4, lr=0.01, optimizer=optimizer, momentum=momentum, optimizer_state=kind)
                ends[kind], _ = play(Algorithm(), tmp_path / f"{optimizer}{kind}", 2, local)
            assert not torch.equal(ends["fresh"].model["0.weight"], ends["kept"].model["0.weight"])
        steps = Memory(tmp_path / "adamkept").load("a", 2)["optimizer/0/step"]
        assert steps.item() == 4  # two batches, two rounds


@dataclass(frozen=True)
class SharedNorms(OwnNorms):
    """FedBN with its opt-in: the average of BatchNorm goes to clients that have none of their own."""

    def report(self, client: Client) -> Report:
        own = self.private(client.model)
        return Report(means={n: t for n, t in client.slot.tensors.items() if n in own and t.is_floating_point()})

    def aggregate(self, server: ServerState, reduced: Reduced) -> ServerState:
        return replace(super().aggregate(server, reduced), memory=dict(reduced.means))

    def broadcast(self, server: ServerState) -> dict[str, Tensor]:
        return dict(server.memory)

    def unseen(self, extras: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return extras


class TestPersonalModels:
    def test_a_client_that_never_trained_gets_the_average(self, tmp_path: Path) -> None:
        algorithm = SharedNorms()
        model = network(algorithm, Augmentation())
        engine = Sequential(
            model, federation(), Classification(), algorithm, Local(lr=0.1), Memory(tmp_path, room=0), 0
        )
        plan = Plan(2, 0, ("a", "b"), held_out=("c",))
        server = first_state(model, algorithm, 2)
        for _ in range(2):
            server, record = play_round(server, algorithm, engine, plan, Watcher())
        kept = [Memory(tmp_path).load(name, 2)["1.running_mean"] for name in ("a", "b")]
        torch.testing.assert_close(server.memory["1.running_mean"], torch.stack(kept).mean(0))
        judge = network(algorithm, Augmentation()).eval()
        judge.load_state_dict({**server.model, **server.memory}, strict=False)
        x, y = federation().batch(federation().clients["c"].test)
        assert record.test is not None
        assert abs(nn.functional.cross_entropy(judge(x), y).item() - record.test.clients["c"].loss) < 1e-5

    def test_private_entries_never_leave(self, tmp_path: Path) -> None:
        server, _ = play(OwnNorms(), tmp_path, rounds=2)
        assert sorted(server.model) == ["0.bias", "0.weight", "4.bias", "4.weight"]
        kept = [Memory(tmp_path).load(name, 2)["1.running_mean"] for name in ("a", "b")]
        assert not torch.equal(*kept)

    def test_each_client_is_evaluated_with_its_own(self, tmp_path: Path) -> None:
        server, records = play(OwnNorms(), tmp_path, rounds=2)
        assert records[-1].test is not None
        data = federation()
        for name, score in records[-1].test.clients.items():
            model = network(OwnNorms(), Augmentation()).eval()
            own = {n: t for n, t in Memory(tmp_path).load(name, 2).items() if n.startswith("1.")}
            model.load_state_dict({**server.model, **own})
            x, y = data.batch(data.clients[name].test)
            assert abs(nn.functional.cross_entropy(model(x), y).item() - score.loss) < 1e-5


class TestSteps:
    def test_two_passes_see_the_same_draws_and_move_statistics_once(self, tmp_path: Path) -> None:
        TwoPasses.seen.clear()
        _, records = play(TwoPasses(), tmp_path, rounds=1)
        assert len(TwoPasses.seen) == 6 and not records[0].refused
        for first, again, _ in TwoPasses.seen:
            assert torch.equal(first, again), "the same parameters and draws give the same loss"
        assert len({tuple(mean.tolist()) for _, _, mean in TwoPasses.seen}) == 6

    def test_frozen_statistics_restores_what_it_found(self) -> None:
        model = nn.Sequential(nn.BatchNorm2d(2, momentum=0.3), FFA(2, p=1.0), nn.BatchNorm2d(2, momentum=None))
        x = torch.randn(4, 2, 3, 3)
        with frozen_statistics(model):
            model(x)
        assert model[0].num_batches_tracked == 0 and model[1].batches == 0
        assert torch.equal(model[2].running_mean, torch.zeros(2))
        model(x)
        assert model[0].momentum == 0.3 and model[0].num_batches_tracked == 1 and model[1].batches == 1
        assert model[2].momentum is None and model[2].num_batches_tracked == 1

    def test_input_perturbation(self, tmp_path: Path) -> None:
        play(Affine(), tmp_path, rounds=2)
        deltas = {Memory(tmp_path).load(name, 2)["delta"].item() for name in ("a", "b", "c")}
        assert len(deltas) == 3 and 0.0 not in deltas

    def test_long_gradients_are_clipped(self, tmp_path: Path) -> None:
        """One full-batch step of a client moves the model by lr·clip at most, and by just that where it is clipped."""
        moved = {}
        start = first_state(network(Algorithm(), Augmentation()), Algorithm(), 3).model
        for clip in (0.0, 1e-3, 1e6):
            local = Local(batch_size=100, lr=0.1, clip=clip)
            end, _ = play(Algorithm(), tmp_path / str(clip), local=local, participation=0.34)
            names = [
                name for name, kind in entries(network(Algorithm(), Augmentation())).items() if kind is Kind.PARAMETER
            ]
            moved[clip] = torch.cat([(end.model[n] - start[n]).flatten() for n in names]).norm().item()
        assert abs(moved[1e-3] - 1e-4) < 1e-6
        assert moved[0.0] == moved[1e6] > 1e-2

    def test_anchors_pair_parameters_with_the_servers(self, tmp_path: Path) -> None:
        @dataclass(frozen=True)
        class Proximal(Algorithm):
            mu: float = 0.0

            def loss(self, client: Client, batch: Batch) -> Tensor:
                distance = sum(((w - start) ** 2).sum() for _, w, start in client.anchors())
                return super().loss(client, batch) + self.mu / 2 * distance

        free, _ = play(Proximal(0.0), tmp_path / "a")
        plain, _ = play(Algorithm(), tmp_path / "b")
        tied, _ = play(Proximal(5.0), tmp_path / "c")
        start = first_state(network(Algorithm(), Augmentation()), Algorithm(), 3)
        name = "4.weight"
        assert torch.equal(free.model[name], plain.model[name])
        assert (tied.model[name] - start.model[name]).norm() < (plain.model[name] - start.model[name]).norm()


class TestShares:
    def test_gathered_and_averaged_once(self, tmp_path: Path) -> None:
        server, _ = play(Sharing(), tmp_path)
        data = federation()
        images = [data.batch(index.train)[0] for index in data.clients.values()]
        torch.testing.assert_close(server.memory["mean image"], torch.stack([x.mean(0) for x in images]).mean(0))
        assert server.memory["averages"].shape == (3, 1)
        torch.testing.assert_close(server.memory["averages"][1], images[1].mean((0, 2, 3)))

    def test_inputs_are_changed_in_evaluation_too(self, tmp_path: Path) -> None:
        server, records = play(Sharing(), tmp_path)
        assert records[0].test is not None
        model = network(Sharing(), Augmentation()).eval()
        model.load_state_dict(dict(server.model))
        x, y = federation().batch(federation().clients["a"].test)
        loss = nn.functional.cross_entropy(model(x - server.memory["mean image"]), y).item()
        assert abs(loss - records[0].test.clients["a"].loss) < 1e-5


class TestAugmentation:
    def test_labels_can_be_mixed(self, tmp_path: Path) -> None:
        seen: list[float] = []

        @dataclass(frozen=True)
        class Mixed(Augmentation):
            def mix(self, batch: Batch, draws: Draws, streams: Streams) -> Batch:
                other = torch.randperm(len(batch), generator=streams("mixup"))
                share = torch.rand((), generator=streams("mixup"))
                seen.append(share.item())
                return Batch(share * batch.x + (1 - share) * batch.x[other], batch.y, batch.y[other], share)

        mixed, _ = play(Algorithm(), tmp_path / "a", augmentation=Mixed())
        plain, _ = play(Algorithm(), tmp_path / "b")
        assert len(set(seen)) == 6
        assert not torch.equal(mixed.model["0.weight"], plain.model["0.weight"])

    def test_dsu_is_a_layer_before_the_algorithms_own(self, tmp_path: Path) -> None:
        layer = DSU().layer(2, 1)
        assert isinstance(layer, FFA) and (layer.fusion, layer.statistics) == ("client", "released")
        ours, _ = play(Algorithm(), tmp_path / "a", augmentation=DSU(p=1.0))
        off, _ = play(Algorithm(), tmp_path / "b", augmentation=DSU(p=0.0))
        plain, _ = play(Algorithm(), tmp_path / "c")
        assert torch.equal(off.model["0.weight"], plain.model["0.weight"])
        assert not torch.equal(ours.model["0.weight"], plain.model["0.weight"])


class TestEntries:
    def test_kinds_are_found_by_type(self) -> None:
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), FFA(2))
        assert entries(model) == {
            "0.weight": Kind.PARAMETER,
            "0.bias": Kind.PARAMETER,
            "1.weight": Kind.PARAMETER,
            "1.bias": Kind.PARAMETER,
            "1.running_mean": Kind.BUFFER,
            "1.running_var": Kind.BUFFER,
            "1.num_batches_tracked": Kind.COUNTER,
        }
        assert entries(FFA(3)) == {}

    def test_batch_statistics_are_averaged_and_counters_stay_whole(self, tmp_path: Path) -> None:
        server, _ = play(Algorithm(), tmp_path)
        assert server.model["1.num_batches_tracked"].item() == 2
        assert server.model["1.num_batches_tracked"].dtype == torch.int64
        assert server.model["1.running_mean"].abs().sum() > 0
