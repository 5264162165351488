"""The paper's Proposition 1 and Theorem 1, numerically, on a small smooth network in float64.

Both are first-order statements: what they leave out is of second order in the noise, so halving the noise must
quarter the error.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import jvp

from fedfa.layers.ffa import Spread, augment

SCALES = (8e-3, 4e-3, 2e-3, 1e-3)


class Smooth(nn.Module):
    """Three convolutional stages of Tanh and average pooling, and a linear classifier."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        widths = (2, 3, 4, 5)
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2)) for i, o in pairwise(widths)
        )
        self.head = nn.Linear(5, 3)
        self.double()

    def features(self, x: Tensor, start: int = 0) -> Tensor:
        """h^{start+1:K} applied to x."""
        for stage in self.stages[start:]:
            x = stage(x)
        return x

    def classify(self, features: Tensor) -> Tensor:
        return self.head(features.mean((2, 3)))


@pytest.fixture(scope="module")
def network() -> Smooth:
    return Smooth()


@pytest.fixture(scope="module")
def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(6, 2, 8, 8, dtype=torch.float64), torch.randint(3, (6,))


def noisy(network: Smooth, x: Tensor, active: set[int], noises: list[Tensor], scale: float) -> tuple[Tensor, Tensor]:
    """The features of the last stage with FFA noise, ε scaled, after the active stages; and the first-order form
    Σ_z J^z e^z, where e^z is the noise that Lemma 1 gives on the clean features of stage z."""
    clean = [x]
    for stage in network.stages:
        clean.append(stage(clean[-1]))
    linear = torch.zeros_like(clean[-1])
    augmented = x
    for number, stage in enumerate(network.stages):
        augmented = stage(augmented)
        if number in active:
            noise = noises[number] * scale
            augmented, _ = augment(augmented, noise, Spread(2.0, 0.0))
            error = augment(clean[number + 1], noise, Spread(2.0, 0.0))[0] - clean[number + 1]
            linear = linear + jvp(lambda h, n=number: network.features(h, n + 1), (clean[number + 1],), (error,))[1]
    return augmented, linear


def orders(errors: list[float]) -> list[float]:
    """How fast the errors fall when the noise is halved: 2 for a second-order error."""
    return [torch.log2(torch.tensor(a / b)).item() for a, b in pairwise(errors)]


@pytest.mark.parametrize("active", [{0}, {1}, {2}, {0, 2}, {0, 1, 2}])
def test_proposition_1(network: Smooth, batch: tuple[Tensor, Tensor], active: set[int]) -> None:
    """The accumulated noise of the last layer is Σ J^z e^z, up to the square of the noise."""
    x, _ = batch
    noises = [torch.randn(2, 6, c, dtype=torch.float64, generator=torch.Generator().manual_seed(c)) for c in (3, 4, 5)]
    clean = network.features(x)
    errors = []
    for scale in SCALES:
        augmented, linear = noisy(network, x, active, noises, scale)
        errors.append((augmented - clean - linear).norm().item())
        assert linear.norm() > 0
    if active == {2}:
        assert max(errors) < 1e-12, "noise of the last layer itself is not approximated"
    else:
        assert all(1.7 < order < 2.3 for order in orders(errors)), (errors, orders(errors))


def test_theorem_1(network: Smooth, batch: tuple[Tensor, Tensor]) -> None:
    """L_FedFA = L_ERM + ∇ℓᵀ Σ J^z e^z, up to the square of the noise."""
    x, y = batch
    noises = [torch.randn(2, 6, c, dtype=torch.float64, generator=torch.Generator().manual_seed(c)) for c in (3, 4, 5)]
    clean = network.features(x).detach().requires_grad_()
    erm = F.cross_entropy(network.classify(clean), y)
    (gradient,) = torch.autograd.grad(erm, clean)
    errors = []
    for scale in SCALES:
        augmented, linear = noisy(network, x, {0, 1, 2}, noises, scale)
        loss = F.cross_entropy(network.classify(augmented), y)
        errors.append(abs((loss - erm - (gradient * linear).sum()).item()))
    assert all(1.7 < order < 2.3 for order in orders(errors)), (errors, orders(errors))


def test_the_linear_term_vanishes_in_expectation(network: Smooth, batch: tuple[Tensor, Tensor]) -> None:
    """ε and −ε are as likely, and their linear terms cancel: the effect that is left is of second order."""
    x, _ = batch
    noises = [torch.randn(2, 6, c, dtype=torch.float64, generator=torch.Generator().manual_seed(c)) for c in (3, 4, 5)]
    _, plus = noisy(network, x, {0, 1, 2}, noises, 0.1)
    _, minus = noisy(network, x, {0, 1, 2}, [-noise for noise in noises], 0.1)
    assert (plus + minus).norm() < 1e-12 * plus.norm()
