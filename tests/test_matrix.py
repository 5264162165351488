"""Every combination of task, network, algorithm and augmentation runs, or is refused with the reason that is listed."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import fedfa
from fedfa import ClientIndex, Federation, UserError
from fedfa.cli import app
from fedfa.data.federation import TaskName
from fedfa.engines.client import Local
from fedfa.engines.sequential import Sequential
from fedfa.matrix import Cell, matrix, tables
from fedfa.memory import Memory
from fedfa.server import Plan, Watcher, collect_shares, first_state, play_round
from fedfa.simulate import build_model
from fedfa.task import Classification, Segmentation

ALGORITHMS = [
    *("fedavg", "fedavgm", "fedprox", "fedsam", "fedbn", "fedrobust", "fedmix", "fedharmo", "scaffold", "feddyn"),
    *("fedadam", "fedyogi", "fedadagrad", "fedfa", "fedfa-r", "fedfa-c", "fedfa-direct", "fedfa-total"),
]
AUGMENTATIONS = ["none", "mixup", "cutmix", "manifold-mixup", "mixstyle", "moex", "dsu"]
NETWORKS = {"classification": ["alexnet", "lenet", "resnet18"], "segmentation": ["unet"]}


@cache
def cells() -> dict[tuple[str, str, str, str], Cell]:
    return {(cell.task, cell.network, cell.algorithm, cell.augmentation): cell for cell in matrix()}


@cache
def federation(task: TaskName, side: int) -> Federation:
    """Two clients with two batches of two images each."""
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(256, (8, 3, side, side), generator=draw, dtype=torch.uint8)
    shape = (8,) if task == "classification" else (8, side, side)
    labels = torch.randint(2, shape, generator=draw)
    none = torch.arange(0)
    clients = {name: ClientIndex(torch.arange(s, s + 4), none, none) for name, s in (("a", 0), ("b", 4))}
    return Federation("small", task, images, labels, ("0", "1"), clients)


def train(task: TaskName, network: str, algorithm: str, augmentation: str, folder: Path) -> None:
    """One real round of a narrow network; everything in it must be finite, and the model must have moved."""
    narrow = {"name": network} if network == "lenet" else {"name": network, "width": 1 / 16}
    config = fedfa.load({"source": "tiny", "network": narrow, "algorithm": algorithm, "augmentation": augmentation})
    data = federation(task, 64 if network == "alexnet" else 32)
    rule, mixing = config.build("algorithm"), config.build("augmentation")
    model = build_model(config, data, rule, mixing)
    goal = Segmentation() if task == "segmentation" else Classification()
    local = Local(batch_size=2, lr=0.01, clip=1.0)
    engine = Sequential(model, data, goal, rule, local, Memory(folder), 0, augmentation=mixing)
    plan = Plan(2, 0, ("a", "b"), evaluate_every=2)
    start = first_state(model, rule, 2)
    server, record = play_round(collect_shares(start, rule, engine, plan), rule, engine, plan, Watcher())
    assert not record.refused
    assert record.loss is not None and math.isfinite(record.loss)
    assert any(not torch.equal(server.model[name], tensor) for name, tensor in start.model.items())


def test_it_covers_all_that_is_built_in() -> None:
    networks = {network for names in NETWORKS.values() for network in names}
    assert {(cell.algorithm, cell.augmentation) for cell in cells().values()} >= {
        (algorithm, augmentation) for algorithm in ALGORITHMS for augmentation in AUGMENTATIONS
    }
    assert {cell.network for cell in cells().values()} >= networks
    assert {name for name in fedfa.ALGORITHMS if name.startswith("fed")} <= set(ALGORITHMS)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("task", "network"), [(task, name) for task, names in NETWORKS.items() for name in names])
def test_what_is_said_to_run_runs(task: TaskName, network: str, algorithm: str, tmp_path: Path) -> None:
    for augmentation in AUGMENTATIONS:
        assert cells()[task, network, algorithm, augmentation].reason is None
        train(task, network, algorithm, augmentation, tmp_path / augmentation)


@pytest.mark.parametrize(
    ("task", "network"),
    [("segmentation", name) for name in NETWORKS["classification"]] + [("classification", "unet")],
)
def test_what_is_said_not_to_run_is_refused_for_that_reason(task: TaskName, network: str, tmp_path: Path) -> None:
    reasons = {cell.reason for cell in cells().values() if (cell.task, cell.network) == (task, network)}
    assert len(reasons) == 1 and None not in reasons
    with pytest.raises(UserError, match=f"network '{network}' puts out .*, which is not for {task}"):
        train(task, network, "fedavg", "none", tmp_path)


class TestTables:
    @staticmethod
    def cell(network: str, algorithm: str, augmentation: str, reason: str | None) -> Cell:
        return Cell("classification", network, algorithm, augmentation, reason)

    def test_networks_that_do_the_same_share_a_table_and_reasons_are_told_once(self) -> None:
        picky = [
            self.cell(network, algorithm, augmentation, reason if algorithm == "b" and augmentation == "mix" else None)
            for network, reason in (("one", None), ("two", "b does not mix"), ("three", None))
            for algorithm in ("a", "b")
            for augmentation in ("none", "mix")
        ]
        broken = [self.cell("four", "a", "none", "four is broken"), self.cell("four", "b", "none", "four is broken")]
        assert "\n".join(tables([*picky, *broken])) == (
            "classification with one, classification with three\n"
            "    none mix\n"
            "  a yes  yes\n"
            "  b yes  yes\n"
            "\n"
            "classification with two\n"
            "    none mix\n"
            "  a yes  yes\n"
            "  b yes  (1)\n"
            "  (1) b does not mix\n"
            "\n"
            "does not run\n"
            "  classification with four: four is broken"
        )

    def test_an_algorithms_objection_is_in_the_matrix(self, monkeypatch: pytest.MonkeyPatch) -> None:
        scaffold = fedfa.ALGORITHMS["scaffold"]
        monkeypatch.setattr(scaffold, "objection", lambda *_: "not today")
        found = {cell.reason for cell in matrix() if cell.algorithm == "scaffold" and cell.network == "lenet"}
        assert found == {"not today", "network 'lenet' puts out (2, 2), which is not for segmentation"}

    def test_on_the_command_line(self) -> None:
        shown = CliRunner().invoke(app, ["list", "--matrix"])
        assert shown.exit_code == 0
        assert "segmentation with lenet: network 'lenet' puts out (2, 2), which is not for segmentation" in shown.stdout
        for name in ALGORITHMS:
            assert f"\n  {name} " in shown.stdout
