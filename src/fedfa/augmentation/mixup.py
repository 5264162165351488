"""Mixup: Zhang et al., *mixup: Beyond Empirical Risk Minimization*, ICLR 2018."""

from __future__ import annotations

from dataclasses import dataclass

from fedfa.augmentation.base import Augmentation
from fedfa.layers.mixing import check_alpha, interpolate, partners, symmetric_beta
from fedfa.layers.randomness import Draws
from fedfa.streams import Streams
from fedfa.task import Batch


@dataclass(frozen=True)
class Mixup(Augmentation):
    """Images mixed with those of a permuted batch, x̃ = λx + (1 − λ)x′, and the loss λ·ℓ(y) + (1 − λ)·ℓ(y′).

    One λ ~ Beta(α, α) a batch, as in the authors' code. α = 1; 0.2 is common for larger data. Masks are mixed by the
    loss as well: every pixel has a share λ of its own label.
    """

    alpha: float = 1.0

    def __post_init__(self) -> None:
        check_alpha(self.alpha)

    def mix(self, batch: Batch, draws: Draws, streams: Streams) -> Batch:
        generator, device = streams("mixup"), batch.x.device
        share = symmetric_beta(self.alpha, (), generator, device)
        partner = partners(len(batch), generator, device)
        return Batch(interpolate(batch.x, partner, share), batch.y, batch.y.index_select(0, partner), share)
