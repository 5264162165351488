"""Random layers: sampling apart from applying.

All randomness of a training step is drawn before the forward, from named streams, into tensors that the layers
read. A layer is then a deterministic function of its input and its draws, so that a step can be captured in a
CUDA graph, and so that a second pass (FedSAM) can see the same draws. A layer that was given none draws for itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn


def check_probability(p: float) -> None:
    if not 0 <= p <= 1:
        raise ValueError(f"p is a probability, between 0 and 1, not {p}")


def check_eps(eps: float) -> None:
    if not 0 < eps < math.inf:
        raise ValueError(f"eps must be positive, not {eps}")


class RandomLayer(nn.Module):
    """A layer whose forward reads its randomness from `self.drawn`."""

    stream: ClassVar[str]
    """The named stream that the layer's draws come from."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: Any = None

    @classmethod
    def sample(
        cls, layers: Sequence[RandomLayer], batch: int, generator: torch.Generator | None, device: torch.device
    ) -> list[Any]:
        """One draw for each of `layers`, for a batch of `batch` samples, on `device`, which is the generator's. All
        layers of a class are sampled together, so that they can share a choice (Manifold Mixup's one stage) and a
        launch."""
        raise NotImplementedError(f"{cls.__name__} must define sample()")

    def draw(self, x: Tensor) -> Any:
        """The draws given for this forward of `x`, or fresh ones from torch's global generator."""
        return self.sample([self], len(x), None, x.device)[0] if self.drawn is None else self.drawn


class Draws:
    """Gives the random layers of one model their draws, step by step."""

    def __init__(self, model: nn.Module) -> None:
        self._groups: dict[type[RandomLayer], list[RandomLayer]] = {}
        for layer in random_layers(model):
            self._groups.setdefault(type(layer), []).append(layer)

    def sample(self, batch: int, streams: Callable[[str], torch.Generator]) -> None:
        """Draw for a forward of `batch` samples, from the streams the layers name."""
        for kind, layers in self._groups.items():
            generator = streams(kind.stream)
            drawn = kind.sample(layers, batch, generator, generator.device)
            for layer, own in zip(layers, drawn, strict=True):
                layer.drawn = own

    def of(self, kind: type[RandomLayer]) -> list[Any]:
        """What the layers of a class were given, in the order of the network: for who mixes labels as they mix
        features."""
        return [layer.drawn for layer in self._groups.get(kind, [])]

    def clear(self) -> None:
        """Let every layer draw for itself again."""
        for layers in self._groups.values():
            for layer in layers:
                layer.drawn = None


def random_layers(model: nn.Module) -> Iterable[RandomLayer]:
    return (module for module in model.modules() if isinstance(module, RandomLayer))
