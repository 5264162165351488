"""What the methods that mix samples have in common: who is mixed with whom, how much, and how."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedfa.layers.ffa import widen


def partners(batch: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
    """A permutation of the batch, all equally likely: sample i is mixed with sample partners[i], maybe itself."""
    return torch.rand(batch, generator=generator, device=device).argsort()


def symmetric_beta(
    alpha: float, shape: Sequence[int], generator: torch.Generator | None, device: torch.device
) -> Tensor:
    """Draws from Beta(α, α) for any α > 0, from two uniform numbers each, without rejection:

        t = √(u^(−1/α) − 1)·cos 2πv,    λ = (1 + t/√(1 + t²))/2

    t·√(2α) has Student's distribution with 2α degrees of freedom (Bailey, *Polar generation of random variates with
    the t-distribution*, 1994), and λ follows (Devroye, *Random variate generation in one line of code*, 1996).
    t/√(1 + t²) is sin(arctan t), which is ±1 where u^(−1/α) overflows.
    """
    u, v = torch.rand((2, *shape), generator=generator, device=device).unbind()
    t = (u.pow(-1 / alpha) - 1).sqrt() * (2 * math.pi * v).cos()
    return (1 + t.atan().sin()) / 2


def interpolate(x: Tensor, partner: Tensor, share: Tensor) -> Tensor:
    """λx + (1 − λ)x[partner], written so that λ = 1 and a sample that is its own partner give x bit for bit."""
    wide = widen(x)
    return (wide + (1 - share) * (wide.index_select(0, partner) - wide)).to(x.dtype)


def check_alpha(alpha: float) -> None:
    if not 0 < alpha < math.inf:
        raise ValueError(f"alpha, of the Beta distribution, must be positive, not {alpha}")
