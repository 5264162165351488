"""MixStyle: Zhou et al., *Domain Generalization with MixStyle*, ICLR 2021."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fedfa.augmentation.base import Augmentation
from fedfa.layers import mixstyle as layers


@dataclass(frozen=True)
class MixStyle(Augmentation):
    """Channel statistics mixed with those of a permuted batch after the first stages, labels kept.

    λ ~ Beta(α, α) for every sample, with probability `p` a batch and layer; p = 0.5 and α = 0.1 as in the paper. It
    mixes shallow stages, where statistics hold style and not content: `stages`, 1 and 2.

    Deviations: variances over pixels are biased, as the paper writes them (the authors' code has unbiased ones, which
    are not defined for 1×1 maps); partners come from the whole batch, which is one client's, so that domains are
    not told apart.
    """

    p: float = 0.5
    alpha: float = 0.1
    stages: tuple[int, ...] = (1, 2)
    eps: float = 1e-6

    def __post_init__(self) -> None:
        if not self.stages or min(self.stages) < 1:
            raise ValueError(f"stages counts the network's stages from 1, and names at least one, not {self.stages}")
        self.layer(1, self.stages[0])  # refuse settings that no layer takes

    def layer(self, channels: int, stage: int) -> nn.Module | None:
        return layers.MixStyle(self.p, self.alpha, self.eps) if stage in self.stages else None
