"""FedAdam, FedYogi and FedAdagrad by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from playing import TWO, algorithm, play, steps_by_hand, uneven

# avg = (w + 2)/2. From w = 0: Δ = 1, m = (1 − ½)·1 = ½ with β₁ = ½; τ is such that v is a square. Server rate 1.


def test_adam(tmp_path: Path) -> None:
    """τ = 1/7, β₂ = ½: v = ½/49 + ½ = 25/49, w = ½/(5/7 + 1/7) = 7/12.
    Round 2: Δ = (7/12 + 2)/2 − 7/12 = 17/24, m = ¼ + 17/48 = 29/48, v = 25/98 + 289/1152 = 0.5059701,
    √v = 0.7113158, w = 7/12 + 0.6041667/(0.7113158 + 0.1428571) = 1.2906453."""
    given = algorithm("fedadam", lr=1.0, beta1=0.5, beta2=0.5, tau=1 / 7)
    assert steps_by_hand(given, TWO, tmp_path) == pytest.approx([7 / 12], rel=1e-6)
    assert steps_by_hand(given, TWO, tmp_path, rounds=2) == pytest.approx([1.2906453], rel=1e-6)


def test_yogi(tmp_path: Path) -> None:
    """τ = ¼, β₂ = ½: v = 1/16 + ½ (Δ² above v) = 9/16, w = ½/(¾ + ¼) = ½.
    Round 2: Δ = 1.25 − 0.5 = ¾, Δ² = v, so v stays; m = ¼ + 3/8 = 5/8, w = ½ + 5/8 = 1.125.
    Round 3: Δ = 7/16, Δ² = 49/256 < v: v = 9/16 − ½·49/256 = 0.466797; m = 5/16 + 7/32 = 0.53125,
    w = 1.125 + 0.53125/(0.6832253 + 0.25) = 1.6942623."""
    given = algorithm("fedyogi", lr=1.0, beta1=0.5, beta2=0.5, tau=0.25)
    found = [steps_by_hand(given, TWO, tmp_path, rounds=r)[0] for r in (1, 2, 3)]
    assert found == pytest.approx([0.5, 1.125, 1.6942623], rel=1e-6)


def test_adagrad(tmp_path: Path) -> None:
    """τ = ¾: v = 9/16 + 1 = 25/16, w = ½/(5/4 + ¾) = ¼.
    Round 2: Δ = 1.125 − 0.25 = 7/8, m = ¼ + 7/16 = 11/16, v = 25/16 + 49/64 = 149/64,
    w = ¼ + 0.6875/(1.5258195 + 0.75) = 0.5520890."""
    given = algorithm("fedadagrad", lr=1.0, beta1=0.5, tau=0.75)
    found = [steps_by_hand(given, TWO, tmp_path, rounds=r)[0] for r in (1, 2)]
    assert found == pytest.approx([0.25, 0.5520890], rel=1e-6)


def test_they_are_not_fedavg(tmp_path: Path) -> None:
    assert steps_by_hand(algorithm("fedavg"), TWO, tmp_path) == [1.0]


def test_rate_scales_the_step(tmp_path: Path) -> None:
    given = algorithm("fedadagrad", lr=0.5, beta1=0.5, tau=0.75)
    assert steps_by_hand(given, TWO, tmp_path) == pytest.approx([0.125], rel=1e-6)


@pytest.mark.parametrize("name", ["fedadam", "fedyogi", "fedadagrad"])
def test_moments_are_the_parameters_alone(name: str, tmp_path: Path) -> None:
    """A parameter that did not move stays where it is: 0/(τ + τ)."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(36, 3))
    model.register_parameter("idle", nn.Parameter(torch.ones(2)))
    played = play(algorithm(name), model, uneven(), tmp_path, rounds=2)
    assert {key.partition("/")[2] for key in played.server.memory} == {n for n, _ in model.named_parameters()}
    assert torch.equal(played.model["idle"], torch.ones(2))
