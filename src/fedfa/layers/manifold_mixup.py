"""Manifold Mixup: Verma et al., *Manifold Mixup: Better Representations by Interpolating Hidden States*, ICML 2019."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedfa.layers.mixing import check_alpha, interpolate, partners, symmetric_beta
from fedfa.layers.randomness import RandomLayer


class Drawn(NamedTuple):
    """One batch's mixing, as one of the places where it may happen sees it."""

    here: Tensor
    """Whether this is the place: a scalar."""
    share: Tensor
    """λ, a scalar, the same at every place."""
    partner: Tensor
    """(B,) who each sample is mixed with, the same at every place."""


class ManifoldMixup(RandomLayer):
    """Mixes features, λx + (1 − λ)x[partner], in one of the places that a network has such layers.

    All layers of a network are sampled together: the place is uniform among them and, with `input`, the network's
    input, where none of them mixes and whoever feeds the network does (:class:`fedfa.augmentation.ManifoldMixup`).
    λ ~ Beta(α, α). Labels are to be mixed with the same share and partners, which are in `drawn`: where the layer is
    used without an augmentation, give it draws (:class:`fedfa.layers.randomness.Draws`) and read them there.
    """

    stream = "manifold-mixup"

    def __init__(self, alpha: float = 2.0, input: bool = True) -> None:
        super().__init__()
        check_alpha(alpha)
        self.alpha, self.input = alpha, input

    @classmethod
    def sample(
        cls, layers: Sequence[RandomLayer], batch: int, generator: torch.Generator | None, device: torch.device
    ) -> list[Any]:
        first: ManifoldMixup = layers[0]  # type: ignore[assignment]  # layers are sampled class by class
        place = torch.randint(len(layers) + first.input, (), generator=generator, device=device)
        share = symmetric_beta(first.alpha, (), generator, device)
        partner = partners(batch, generator, device)
        return [Drawn(place == number, share, partner) for number in range(len(layers))]

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not x.numel():
            return x
        drawn: Drawn = self.draw(x)
        return interpolate(x, drawn.partner, torch.where(drawn.here, drawn.share, 1.0))

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}, input={self.input}"
