"""Every algorithm trains a round on images from folders; the real sets through a run from the command line's side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

import fedfa
from fedfa.algorithms import ALGORITHMS
from fedfa.nets.stages import Augment, augment_layers

Image = pytest.importorskip("PIL.Image")
Draw = Callable[..., Path]
OURS = [name for name in ALGORITHMS if name not in ("slow", "poison", "private", "hoard", "constant")]


class TinyMasks(nn.Module):
    """One stage, and a class for every pixel."""

    def __init__(self, num_classes: int, in_channels: int, augment: Augment | None = None) -> None:
        super().__init__()
        self.stage = nn.Sequential(nn.Conv2d(in_channels, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.augments = nn.ModuleList(augment_layers([4], augment))
        self.head = nn.Conv2d(4, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        classes: Tensor = self.head(self.augments[0](self.stage(x)))
        return classes


if "tiny-masks" not in list(fedfa.NETWORKS):
    fedfa.NETWORKS.register("tiny-masks", TinyMasks, "one stage, for segmentation")


@pytest.fixture
def trees(tmp_path: Path, draw: Draw) -> Path:
    """A small tree for every source of folders, each at its place under one folder."""
    layouts = {
        "office_caltech10": (("amazon", "webcam"), ("bike", "mug")),
        "domainnet": (("clipart", "real"), ("bird", "zebra")),
        "pacs": (("photo", "sketch"), ("dog", "house")),
        "image_folders": (("north", "south"), ("cat", "dog")),
    }
    for source, (sites, classes) in layouts.items():
        for site in sites:
            for label, name in enumerate(classes):
                for number in range(6):
                    draw(tmp_path / "sets" / source / site / name / f"{number}.png", seed=10 * number + label)
    for site in ("north", "south"):
        folder = tmp_path / "sets" / "segmentation_folders" / site
        for number in range(8):
            draw(folder / "images" / f"{number}.png", seed=number, size=(16, 16))
            (folder / "masks").mkdir(exist_ok=True)
            mask = np.zeros((16, 16), np.uint8)
            mask[4:12, number : number + 6] = 255
            Image.fromarray(mask).save(folder / "masks" / f"{number}.png")
    return tmp_path / "sets"


SETTINGS: dict[str, Any] = {"rounds": 1, "batch_size": 4, "threads": 1, "device": "cpu", "lr": 0.01}


@pytest.mark.parametrize("algorithm", OURS)
def test_every_algorithm_trains_a_round_on_every_source_of_folders(
    algorithm: str, trees: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDFA_DATA", str(trees))
    for source in ("office_caltech10", "domainnet", "pacs", "image_folders", "segmentation_folders"):
        network = "tiny-masks" if source == "segmentation_folders" else "tiny-net"
        chosen = {"source": {"name": source, "size": 16}, "network": network, "algorithm": algorithm, **SETTINGS}
        run = fedfa.run(chosen, root=tmp_path / "runs")
        assert run.rounds == 1 and not run.metrics[0]["refused"]
        assert len(run.metrics[0]["test"]["clients"]) == 2


@pytest.mark.parametrize("algorithm", ["fedavg", "fedfa"])
@pytest.mark.parametrize(
    ("source", "folder", "clients"),
    [("office_caltech10", "office_caltech10", 4), ("pacs", "pacs", 4), ("segmentation_folders", "fundus", 3)],
)
def test_a_round_on_the_real_sets(
    source: str, folder: str, clients: int, algorithm: str, shared_data: Path, shared_cache: Path, tmp_path: Path
) -> None:
    network = "tiny-masks" if source == "segmentation_folders" else "tiny-net"
    table = {"name": source, "path": str(shared_data / folder), "size": 32}
    settings = {**SETTINGS, "batch_size": 32}
    run = fedfa.run({"source": table, "network": network, "algorithm": algorithm, **settings}, root=tmp_path)
    assert run.rounds == 1 and not run.metrics[0]["refused"] and len(run.metrics[0]["test"]["clients"]) == clients
