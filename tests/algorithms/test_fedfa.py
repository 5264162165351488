"""FedFA in a federation: what travels, what is kept, and what γ becomes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

import fedfa
from fedfa.algorithms.base import Algorithm
from fedfa.algorithms.fedfa import FedFA
from fedfa.augmentation import DSU
from fedfa.data.federation import ClientIndex, Federation
from fedfa.engines.client import Broadcast, Local
from fedfa.engines.sequential import Sequential
from fedfa.layers.ffa import FFA, Fusion, Statistics, between
from fedfa.memory import Memory
from fedfa.nets import AlexNet, LeNet, UNet
from fedfa.reduction import Across, Reduced, Reduction, Update
from fedfa.server import Plan, ServerState, Watcher, first_state, play_round
from fedfa.state import ffa_layers
from fedfa.task import Classification

SIZES = {"a": 40, "b": 24, "c": 9}


def shifted_federation(sizes: dict[str, int] = SIZES) -> Federation:
    """Clients whose images have the same content at different brightness."""
    generator = torch.Generator().manual_seed(0)
    images, labels, clients, at = [], [], {}, 0
    for number, (name, size) in enumerate(sizes.items()):
        noise = torch.randint(0, 60, (size, 1, 14, 14), generator=generator)
        images.append((noise + 60 * number).to(torch.uint8))
        labels.append(torch.randint(3, (size,), generator=generator))
        index = torch.arange(at, at + size)
        clients[name] = ClientIndex(index, index[:4], index[:4])
        at += size
    return Federation("shifted", "classification", torch.cat(images), torch.cat(labels), ("0", "1", "2"), clients)


class Setting:
    """A small federation under one algorithm, round by round."""

    def __init__(self, algorithm: Algorithm, folder: Path, local: Local | None = None, **sizes: int) -> None:
        self.algorithm = algorithm
        federation = shifted_federation(sizes or SIZES)
        torch.manual_seed(0)
        model = LeNet(3, in_channels=1, augment=lambda c: algorithm.layer(c) or nn.Identity())
        self.model = model
        local = local or Local(batch_size=8, lr=0.1)
        self.engine = Sequential(model, federation, Classification(), algorithm, local, Memory(folder, room=0), seed=0)
        self.plan = Plan(rounds=10, seed=0, clients=tuple(federation.clients))
        self.server = first_state(model, algorithm, len(federation.clients))
        self.updates: list[Update] = []

    def rounds(self, count: int) -> ServerState:
        for _ in range(count):
            self.server, self.record = play_round(self.server, self.algorithm, self.engine, self.plan, Watcher())
        return self.server

    def reports(self) -> dict[str, dict[str, tuple[Tensor, Tensor]]]:
        """What each client would report in the next round."""
        broadcast = Broadcast(self.server.round + 1, self.server.model, self.algorithm.broadcast(self.server))
        found: dict[str, dict[str, tuple[Tensor, Tensor]]] = {}
        for update in self.engine.train(broadcast, self.plan.clients):
            assert isinstance(update, Update)
            found[update.client] = {
                name: (value.clone(), weight.clone()) for name, (value, weight) in update.report.spreads.items()
            }
        return found


def algorithm(**settings: Any) -> FedFA:
    return FedFA(**settings)


class TestGamma:
    def test_is_the_modulated_variance_of_what_clients_reported(self, tmp_path: Path) -> None:
        setting = Setting(algorithm(p=1.0), tmp_path)
        reports = setting.reports()
        server = setting.rounds(1)
        for name in ("augments.0.std", "augments.1.mean"):
            values = torch.stack([report[name][0] for report in reports.values()]).double()
            wanted = fedfa.modulate(values.var(0, correction=0))
            path, _, statistic = name.rpartition(".")
            torch.testing.assert_close(
                server.memory[f"{path}.gamma_{statistic}"].double(), wanted, atol=1e-5, rtol=1e-4
            )
            assert server.memory[f"{path}.gamma_{statistic}"].std() > 0.01, "channels must differ"

    @pytest.mark.parametrize("fusion", ["adaptive", "direct", "total"])
    @pytest.mark.parametrize("statistics", ["paper", "kept"])
    def test_all_at_once_is_the_same_as_one_by_one(self, fusion: Fusion, statistics: Statistics) -> None:
        """Statistics of layers with the same number of channels and with others, one of them from one client only."""
        rule = algorithm(fusion=fusion, statistics=statistics)
        draw = torch.Generator().manual_seed(0)
        names = [f"{layer}.{statistic}" for layer in "abcd" for statistic in ("mean", "std")]
        sizes = dict(zip(names, (4, 4, 7, 7, 4, 4, 16, 16), strict=True))
        memory = {f"{n[0]}.gamma_{n[2:]}": torch.rand(size, generator=draw) for n, size in sizes.items()}
        spreads = {
            name: Across(torch.zeros(size), torch.rand(size, generator=draw), torch.tensor(1 + (name != "b.std")))
            for name, size in sizes.items()
        }
        server = ServerState(0, 2, {}, memory)
        after = rule.aggregate(server, Reduced(2, {}, {}, spreads)).memory
        assert list(after) == list(memory)
        for name, across in spreads.items():
            gamma = f"{name[0]}.gamma_{name[2:]}"
            stays = statistics == "kept" and across.clients < 2
            assert torch.equal(after[gamma], memory[gamma] if stays else between(fusion, across.variance))

    def test_reaches_the_clients_in_the_next_round(self, tmp_path: Path) -> None:
        setting = Setting(algorithm(p=1.0), tmp_path)
        server = setting.rounds(1)
        setting.reports()
        for path, layer in ffa_layers(setting.model):
            assert torch.equal(layer.gamma_mean, server.memory[f"{path}.gamma_mean"])

    def test_one_client_gives_one_everywhere(self, tmp_path: Path) -> None:
        server = Setting(algorithm(p=1.0), tmp_path, a=20).rounds(2)
        assert all(torch.equal(gamma, torch.ones_like(gamma)) for gamma in server.memory.values())

    @pytest.mark.parametrize("fusion", ["direct", "total"])
    def test_direct_and_total_hold_the_raw_variance(self, tmp_path: Path, fusion: Fusion) -> None:
        setting = Setting(algorithm(p=1.0, fusion=fusion), tmp_path)
        assert all(torch.equal(gamma, torch.zeros_like(gamma)) for gamma in setting.server.memory.values())
        reports = setting.reports()
        server = setting.rounds(1)
        values = torch.stack([report["augments.0.mean"][0] for report in reports.values()]).double()
        torch.testing.assert_close(
            server.memory["augments.0.gamma_mean"].double(), values.var(0, correction=0), atol=1e-9, rtol=1e-3
        )

    @pytest.mark.parametrize("settings", [{"fusion": "client"}, {"fusion": "random"}])
    def test_variants_that_do_not_look_at_others_send_nothing(self, tmp_path: Path, settings: Any) -> None:
        setting = Setting(algorithm(**settings), tmp_path)
        setting.rounds(1)
        model = sum(t.numel() * t.element_size() for t in setting.server.model.values())
        assert setting.record.bytes_up == setting.record.bytes_down == model


class TestStatistics:
    def test_paper_resets_every_round(self, tmp_path: Path) -> None:
        setting = Setting(algorithm(p=1.0, momentum=0.5), tmp_path)
        setting.rounds(3)
        setting.reports()
        batches = {layer.batches.item() for _, layer in ffa_layers(setting.model)}
        assert batches == {1}, "client c has 9 samples: one batch of 8, and one of 1 that is left out"

    def test_small_clients_show_their_number_of_batches_unless_corrected(self, tmp_path: Path) -> None:
        """The trap: with α = 0.99 the statistics are (1 − αⁿ) of the truth."""
        plain = Setting(algorithm(p=1.0), tmp_path / "plain", Local(batch_size=4, lr=1e-6), a=40, b=8).reports()
        right = Setting(
            algorithm(p=1.0, statistics="corrected"), tmp_path / "right", Local(batch_size=4, lr=1e-6), a=40, b=8
        ).reports()
        name = "augments.0.mean"
        small = {client: report[name][0].abs().mean().item() for client, report in plain.items()}
        true = {client: report[name][0].abs().mean().item() for client, report in right.items()}
        assert small["a"] == pytest.approx((1 - 0.99**10) * true["a"], rel=0.05)
        assert small["b"] == pytest.approx((1 - 0.99**2) * true["b"], rel=0.05)

    def test_kept_survives_rounds_on_disk(self, tmp_path: Path) -> None:
        setting = Setting(algorithm(p=1.0, statistics="kept"), tmp_path)
        setting.rounds(3)
        memory = Memory(tmp_path).load("a", 3)
        assert memory["augments.0.batches"].item() == 15
        assert Memory(tmp_path).load("b", 3)["augments.1.batches"].item() == 9
        assert Memory(tmp_path).load("a", 2)["augments.0.batches"].item() == 10

    @pytest.mark.parametrize("statistics", ["corrected", "kept"])
    def test_a_client_without_active_batches_is_left_out(self, tmp_path: Path, statistics: Statistics) -> None:
        setting = Setting(algorithm(p=0.0, statistics=statistics), tmp_path)
        weights = {weight.item() for report in setting.reports().values() for _, weight in report.values()}
        assert weights == {0}
        before = setting.server.memory
        after = setting.rounds(1).memory
        assert all(torch.equal(before[name], after[name]) for name in before), "γ keeps its last value"

    def test_as_the_paper_writes_it_such_a_client_counts_with_0_and_1(self, tmp_path: Path) -> None:
        setting = Setting(algorithm(p=0.0), tmp_path)
        for report in setting.reports().values():
            for name, (value, weight) in report.items():
                assert weight.item() == 1
                assert torch.equal(value, torch.zeros_like(value) if name.endswith("mean") else torch.ones_like(value))

    def test_released_averages_statistics_and_keeps_gamma_at_one(self, tmp_path: Path) -> None:
        setting = Setting(algorithm(p=1.0, statistics="released"), tmp_path)
        server = setting.rounds(1)
        assert set(server.memory) == {f"augments.{i}.{s}" for i in (0, 1) for s in ("mean", "std")}
        sent = server.memory["augments.0.mean"].clone()
        assert sent.abs().sum() > 0
        setting.rounds(1)
        for _, layer in ffa_layers(setting.model):
            assert torch.equal(layer.gamma_mean, torch.ones_like(layer.gamma_mean))
        # the round's last client has one batch: it ends with α·(what the server sent) + (1 − α)·(its features, ≥ 0)
        layer = next(iter(ffa_layers(setting.model)))[1]
        assert (layer.mean >= 0.99 * sent).all() and layer.mean.sum() > 0.99 * sent.sum()
        assert sent.max() > 0.001

    def test_released_by_hand(self, tmp_path: Path) -> None:
        """The mean over clients, each weighing one, of what they end with."""
        setting = Setting(algorithm(p=1.0, statistics="released"), tmp_path)
        broadcast = Broadcast(1, setting.server.model, setting.algorithm.broadcast(setting.server))
        ends = [
            update.report.means["augments.1.std"].clone()
            for update in setting.engine.train(broadcast, setting.plan.clients)
            if isinstance(update, Update)
        ]
        server = setting.rounds(1)
        torch.testing.assert_close(server.memory["augments.1.std"], torch.stack(ends).mean(0))


class TestTraffic:
    @pytest.mark.parametrize(("network", "extra"), [(AlexNet, 18_432), (UNet, 15_872)])
    def test_extra_bytes_are_the_papers(self, network: Any, extra: int) -> None:
        """4·ΣC floats a client and round: two vectors up and two down at each layer."""
        rule = FedFA()
        model = network(2, augment=rule.layer)
        server = first_state(model, rule, 4)
        down = sum(t.numel() * 4 for t in rule.broadcast(server).values())

        class Holder:
            pass

        client = Holder()
        client.model = model  # type: ignore[attr-defined]  # a stand-in for a client
        report = rule.report(client)  # type: ignore[arg-type]  # a stand-in for a client
        up = sum(value.numel() * 4 for value, _ in report.spreads.values())
        assert (down, up, down + up) == (extra // 2, extra // 2, extra)

    def test_ffa_buffers_are_not_averaged_with_the_model(self) -> None:
        model = LeNet(3, augment=FedFA().layer)
        assert not any("augments" in name for name in first_state(model, FedFA(), 2).model)

    def test_dsu_layers_are_not_fedfas(self) -> None:
        model = LeNet(3, augment=lambda c: nn.Sequential(DSU().layer(c, 1), FedFA().layer(c)))
        assert set(FedFA().start(model)) == {f"augments.{i}.1.gamma_{s}" for i in (0, 1) for s in ("mean", "std")}


class TestReductions:
    def test_p_zero_is_fedavg_bit_for_bit(self, tmp_path: Path) -> None:
        ours = Setting(algorithm(p=0.0), tmp_path / "a").rounds(3)
        plain = Setting(fedfa.ALGORITHMS["fedavg"](), tmp_path / "b").rounds(3)
        assert all(torch.equal(ours.model[name], tensor) for name, tensor in plain.model.items())

    def test_with_the_layer_on_it_is_not(self, tmp_path: Path) -> None:
        ours = Setting(algorithm(p=1.0), tmp_path / "a").rounds(1)
        plain = Setting(fedfa.ALGORITHMS["fedavg"](), tmp_path / "b").rounds(1)
        assert any(not torch.equal(ours.model[name], tensor) for name, tensor in plain.model.items())

    def test_fedavg_is_the_mean_of_models_trained_by_hand(self, tmp_path: Path) -> None:
        """One full-batch SGD step a client, written out."""
        local = Local(batch_size=100, lr=0.1)
        setting = Setting(fedfa.ALGORITHMS["fedavg"](), tmp_path, local)
        start = {name: tensor.clone() for name, tensor in setting.server.model.items()}
        server = setting.rounds(1)
        federation = shifted_federation()
        ends = []
        for index in federation.clients.values():
            model = LeNet(3, in_channels=1)
            model.load_state_dict(start)
            x, y = federation.images[index.train].float() / 255, federation.labels[index.train]
            nn.functional.cross_entropy(model(x), y).backward()
            ends.append({name: p.detach() - 0.1 * p.grad for name, p in model.named_parameters()})
        for name in ends[0]:
            torch.testing.assert_close(server.model[name], torch.stack([end[name] for end in ends]).mean(0))


class TestNames:
    def test_every_name_of_the_command_line(self) -> None:
        settings = {name: cls() for name, cls in fedfa.ALGORITHMS.items() if name.startswith("fedfa")}
        found = {name: (rule.fusion, rule.statistics) for name, rule in settings.items()}  # type: ignore[attr-defined]  # its own fields
        assert found == {
            "fedfa": ("adaptive", "paper"),
            "fedfa-r": ("random", "paper"),
            "fedfa-c": ("client", "paper"),
            "fedfa-direct": ("direct", "paper"),
            "fedfa-total": ("total", "kept"),
        }
        assert all((rule.p, rule.momentum) == (0.5, 0.99) for rule in settings.values())  # type: ignore[attr-defined]  # its own fields

    def test_wrong_settings_are_refused_at_once(self) -> None:
        with pytest.raises(ValueError, match="probability"):
            FedFA(p=2.0)

    @pytest.mark.parametrize("statistics", get_args(Statistics))
    @pytest.mark.parametrize("fusion", get_args(Fusion))
    def test_every_combination_runs(self, tmp_path: Path, fusion: Fusion, statistics: Statistics) -> None:
        if statistics == "released" and fusion in ("direct", "total"):
            with pytest.raises(ValueError, match="no variance over clients"):
                algorithm(fusion=fusion, statistics=statistics)
            return
        setting = Setting(algorithm(fusion=fusion, statistics=statistics), tmp_path, a=12, b=10)
        server = setting.rounds(2)
        assert not setting.record.refused
        assert all(torch.isfinite(tensor).all() for tensor in server.model.values())
        assert any(isinstance(module, FFA) for module in setting.model.modules())


def test_the_server_never_sees_one_client_alone() -> None:
    """What aggregation works on are sums: no list of updates is anywhere in the reduction."""
    reduction = Reduction({"w": torch.zeros(3)})
    for number in range(5):
        reduction.add(Update(str(number), 1, {"w": torch.full((3,), float(number))}))
    held = [value for value in vars(reduction).values() if isinstance(value, (list, tuple))]
    assert not held
