"""Moment exchange: Li et al., *On Feature Normalization and Data Augmentation*, CVPR 2021."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedfa.layers.ffa import widen
from fedfa.layers.mixing import partners
from fedfa.layers.randomness import RandomLayer, check_eps, check_probability


def exchange_moments(x: Tensor, partner: Tensor, eps: float = 1e-5) -> Tensor:
    """Features with the moments over channels of their partner, position by position (§3, with PONO):

        σ[partner]·(x − μ)/σ + μ[partner],  μ and σ² = 1/C·Σ(x − μ)² + eps over the channels of each position

    The gradient flows through both samples' moments. Written as x + a·(x − μ) + b, so that a sample that is its own
    partner comes back bit for bit.
    """
    wide = widen(x)
    mean = wide.mean(1, keepdim=True)
    centred = wide - mean
    std = (centred.square().mean(1, keepdim=True) + eps).sqrt()
    scale = std.index_select(0, partner) / std - 1
    return (wide + scale * centred + (mean.index_select(0, partner) - mean)).to(x.dtype)


class Drawn(NamedTuple):
    """One batch's exchange."""

    gate: Tensor
    """Whether moments are exchanged in this batch: a scalar."""
    partner: Tensor
    """(B,) whose moments each sample gets."""


class MoEx(RandomLayer):
    """Exchanges the moments of samples with probability `p` a batch, for features (B, C, ...).

    Labels are to be mixed with the same gate and partners, which are in `drawn`. Several layers in one network get the
    same draw, so that labels have one partner. In evaluation mode, and with p = 0, the layer is the identity.
    """

    stream = "moex"

    def __init__(self, p: float = 0.5, eps: float = 1e-5) -> None:
        super().__init__()
        check_probability(p)
        check_eps(eps)
        self.p, self.eps = p, eps

    @classmethod
    def sample(
        cls, layers: Sequence[RandomLayer], batch: int, generator: torch.Generator | None, device: torch.device
    ) -> list[Any]:
        first: MoEx = layers[0]  # type: ignore[assignment]  # layers are sampled class by class
        gate = torch.rand((), generator=generator, device=device) < first.p
        return [Drawn(gate, partners(batch, generator, device))] * len(layers)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0 or not x.numel():
            return x
        drawn: Drawn = self.draw(x)
        return torch.where(drawn.gate, exchange_moments(x, drawn.partner, self.eps), x)

    def extra_repr(self) -> str:
        return f"p={self.p}"
