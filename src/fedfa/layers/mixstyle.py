"""MixStyle: Zhou et al., *Domain Generalization with MixStyle*, ICLR 2021."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedfa.layers.ffa import channel_statistics
from fedfa.layers.mixing import check_alpha, partners, symmetric_beta
from fedfa.layers.randomness import RandomLayer, check_eps, check_probability


def mix_style(x: Tensor, partner: Tensor, share: Tensor, eps: float = 1e-6) -> Tensor:
    """Features with the channel statistics of each sample mixed with its partner's (§3.1):

        γ = λσ + (1 − λ)σ[partner],  β = λμ + (1 − λ)μ[partner],  γ·(x − μ)/σ + β

    `share` is λ, (B,). μ and σ are constants to the gradient. Written as x + a·(x − μ) + b, so that λ = 1 gives x
    bit for bit.
    """
    statistics = channel_statistics(x.detach(), eps).unsqueeze(3)
    towards = statistics.index_select(1, partner) - statistics
    b, change = ((1 - share).view(-1, 1, 1) * towards).unbind()
    mean, std = statistics.unbind()
    flat = x.flatten(2)
    return (flat + change / std * (flat - mean) + b).to(x.dtype).view_as(x)


class Drawn(NamedTuple):
    """One forward's randomness of one MixStyle layer."""

    share: Tensor
    """(B,) λ of every sample; 1, which changes nothing, where the layer is not active."""
    partner: Tensor
    """(B,) whose statistics each sample's are mixed with."""


class MixStyle(RandomLayer):
    """Mixes the channel statistics of samples, for features (B, C, H, W), (B, C, D, H, W) or (B, C, L).

    While training, with probability `p` a batch; λ ~ Beta(α, α) for every sample. Every layer draws for itself. In
    evaluation mode, and with p = 0, the layer is the identity.
    """

    stream = "mixstyle"

    def __init__(self, p: float = 0.5, alpha: float = 0.1, eps: float = 1e-6) -> None:
        super().__init__()
        check_probability(p)
        check_alpha(alpha)
        check_eps(eps)
        self.p, self.alpha, self.eps = p, alpha, eps

    @classmethod
    def sample(
        cls, layers: Sequence[RandomLayer], batch: int, generator: torch.Generator | None, device: torch.device
    ) -> list[Any]:
        own: list[MixStyle] = layers  # type: ignore[assignment]  # layers are sampled class by class
        drawn = []
        for layer in own:
            active = torch.rand((), generator=generator, device=device) < layer.p
            share = symmetric_beta(layer.alpha, (batch,), generator, device)
            drawn.append(Drawn(torch.where(active, share, 1.0), partners(batch, generator, device)))
        return drawn

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() < 3:
            raise ValueError(f"MixStyle takes (batch, channels, ...) features, not {tuple(x.shape)}")
        if not self.training or self.p == 0 or not x.numel():
            return x
        drawn: Drawn = self.draw(x)
        return mix_style(x, drawn.partner, drawn.share, self.eps)

    def extra_repr(self) -> str:
        return f"p={self.p}, alpha={self.alpha}"
