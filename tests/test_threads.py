from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fedfa.nets import AlexNet, LeNet, ResNet18, UNet
from fedfa.runs import Run
from fedfa.threads import multiply_adds, useful_threads


@pytest.mark.parametrize(
    ("layer", "shape", "wanted"),
    [
        (nn.Linear(5, 7), (2, 5), 2 * 5 * 7),
        (nn.Conv2d(3, 8, 5, padding=2), (1, 3, 10, 10), 10 * 10 * 8 * 3 * 5 * 5),
        (nn.Conv2d(4, 8, 3, stride=2, groups=2), (1, 4, 9, 9), 4 * 4 * 8 * (4 // 2) * 3 * 3),
        (nn.ConvTranspose2d(6, 3, 2, stride=2), (2, 6, 4, 4), 2 * 4 * 4 * 6 * 3 * 2 * 2),
        (nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten()), (2, 3, 4, 4), 0),
    ],
)
def test_multiply_adds_of_layers(layer: nn.Module, shape: tuple[int, ...], wanted: int) -> None:
    assert multiply_adds(layer, torch.rand(shape)) == wanted


def test_multiply_adds_of_lenet_by_hand() -> None:
    stages = 28 * 28 * 6 * 3 * 25 + 10 * 10 * 16 * 6 * 25
    assert multiply_adds(LeNet(10), torch.rand(1, 3, 28, 28)) == stages + 400 * 120 + 120 * 84 + 84 * 10


def test_counting_leaves_nothing_behind() -> None:
    model = LeNet(10)
    multiply_adds(model, torch.rand(1, 3, 28, 28))
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("network", "batch", "side", "wanted"),
    [(LeNet, 32, 28, 1), (LeNet, 128, 28, 1), (ResNet18, 10, 32, 5), (UNet, 16, 64, 8), (AlexNet, 32, 256, 8)],
)
def test_small_networks_have_one_thread_and_large_ones_what_torch_has(
    monkeypatch: pytest.MonkeyPatch, network: Callable[[int], nn.Module], batch: int, side: int, wanted: int
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert useful_threads(network(10), torch.rand(1, 3, side, side), batch) == wanted
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert useful_threads(network(10), torch.rand(1, 3, side, side), batch) == 1


@pytest.mark.parametrize(("threads", "wanted"), [(0, 1), (2, 2)])
def test_a_run_takes_what_it_is_told_and_else_what_is_of_use(
    play: Callable[..., Run], threads: int, wanted: int
) -> None:
    torch.set_num_threads(2)
    assert play(threads=threads, rounds=1).provenance["threads"] == wanted
