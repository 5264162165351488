"""Where an algorithm's settings make it FedAvg, it is FedAvg: bit for bit on the CPU, Dropout and all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fedfa.algorithms.base import Algorithm
from fedfa.augmentation import DSU, Augmentation
from fedfa.engines.client import Local
from playing import Played, algorithm, play, uneven

OPTIMIZERS = {
    "sgd": Local(epochs=2, batch_size=4, lr=0.05, momentum=0.9, weight_decay=0.01),
    "kept sgd": Local(epochs=1, batch_size=4, lr=0.05, momentum=0.9, optimizer_state="kept"),
    "adam": Local(epochs=2, batch_size=4, lr=0.01, optimizer="adam"),
    "clipped": Local(epochs=1, batch_size=4, lr=0.5, clip=0.3, lr_decay=0.9),
}

EXACT = {
    "fedfa": algorithm("fedfa", p=0.0),
    "fedprox": algorithm("fedprox", mu=0.0),
    "fedavgm": algorithm("fedavgm", beta=0.0),
    "fedsam": algorithm("fedsam", rho=0.0),
    "fedmix": algorithm("fedmix", lam=0.0),
    "fedharmo": algorithm("fedharmo", alpha=0.0, amplitude="none"),
}


def network(algorithm: Algorithm, augmentation: Augmentation | None = None) -> nn.Module:
    torch.manual_seed(0)
    made = ((augmentation or Augmentation()).layer(3, 1), algorithm.layer(3))
    model = nn.Sequential()
    model.add_module("stage", nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU()))
    model.add_module("layers", nn.Sequential(*(layer for layer in made if layer is not None)))
    model.add_module("head", nn.Sequential(nn.Dropout(0.3), nn.Flatten(), nn.Linear(36, 3)))
    return model


def end(given: Algorithm, local: Local, folder: Path, augmentation: Augmentation | None = None) -> Played:
    return play(given, network(given, augmentation), uneven(), folder, 3, local, augmentation=augmentation)


def differing(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", EXACT)
def test_bit_for_bit(name: str, optimizer: str, tmp_path: Path) -> None:
    ours = end(EXACT[name], OPTIMIZERS[optimizer], tmp_path / "ours")
    plain = end(algorithm("fedavg"), OPTIMIZERS[optimizer], tmp_path / "plain")
    assert not differing(ours.model, plain.model)
    assert [record.loss for record in ours.records] == [record.loss for record in plain.records]
    for client in "abcd":  # kept optimisers too
        kept = {key: tensor for key, tensor in ours.kept(client).items() if key.startswith("optimizer/")}
        assert not differing(kept, plain.kept(client))


@pytest.mark.parametrize("name", ["fedsam", "fedharmo", "fedmix"])
def test_bit_for_bit_with_an_augmenting_layer(name: str, tmp_path: Path) -> None:
    """DSU draws its noise once a step, however many passes are made."""
    local = OPTIMIZERS["sgd"]
    ours = end(EXACT[name], local, tmp_path / "ours", DSU(p=0.7))
    plain = end(algorithm("fedavg"), local, tmp_path / "plain", DSU(p=0.7))
    if name == "fedmix":  # a backward with a graph of its own goes another way through the layer
        for key, tensor in plain.model.items():
            torch.testing.assert_close(ours.model[key], tensor, rtol=1e-4, atol=1e-5)
    else:
        assert not differing(ours.model, plain.model)


@pytest.mark.parametrize("optimizer", ["sgd", "clipped"])
def test_fedrobust_without_ascent_to_rounding(optimizer: str, tmp_path: Path) -> None:
    given = algorithm("fedrobust", map_rate=0.0, shift_rate=0.0)
    ours = end(given, OPTIMIZERS[optimizer], tmp_path / "ours")
    plain = end(algorithm("fedavg"), OPTIMIZERS[optimizer], tmp_path / "plain")
    for name, tensor in plain.model.items():
        torch.testing.assert_close(ours.model[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "given",
    [
        algorithm("fedprox", mu=0.1),
        algorithm("fedavgm", beta=0.1),
        algorithm("fedsam", rho=0.01),
        algorithm("fedmix", lam=0.01),
        algorithm("fedharmo", alpha=0.01, amplitude="none"),
        algorithm("fedharmo", alpha=0.0),
        algorithm("fedrobust", shift_rate=0.0),
        algorithm("fedrobust", map_rate=0.0),
    ],
    ids=repr,
)
def test_and_is_not_otherwise(given: Algorithm, tmp_path: Path) -> None:
    """No setting is without effect."""
    ours = end(given, OPTIMIZERS["sgd"], tmp_path / "ours")
    plain = end(algorithm("fedavg"), OPTIMIZERS["sgd"], tmp_path / "plain")
    assert "head.2.weight" in differing(ours.model, plain.model)
