"""Networks as functions of one flat vector of parameters, in float64.

A network is called with that vector and images and gives its outputs and the batch statistics of its BatchNorm, flat:
running statistics are the caller's, who moves them or does not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

BATCH_NORM_EPS, BATCH_NORM_MOMENTUM = 1e-5, 0.1


class State(NamedTuple):
    """A model: parameters, float buffers and integer counters, each a flat vector."""

    w: Tensor
    b: Tensor
    n: Tensor


class Network:
    """Names and shapes of a network's entries, in the order of the flat vectors."""

    parameters: Mapping[str, tuple[int, ...]]
    buffers: Mapping[str, tuple[int, ...]] = {}
    counters: tuple[str, ...] = ()
    normal: tuple[str, ...] = ()
    """Parameters that belong to BatchNorm."""

    def __call__(self, w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("each network writes its own")

    def behind(self, prefix: str, w: Tensor) -> dict[str, Tensor]:
        """A vector like the parameters' by their names, each behind a prefix."""
        return {f"{prefix}/{name}": part for name, part in _cut(w, self.parameters).items()}

    def named(self, state: State) -> dict[str, Tensor]:
        """The entries by name, each in its shape."""
        return {
            **_cut(state.w, self.parameters),
            **_cut(state.b, self.buffers),
            **{name: state.n[number] for number, name in enumerate(self.counters)},
        }

    def flat(self, named: Mapping[str, Tensor]) -> State:
        """The other way round."""
        w = [named[name].double().reshape(-1) for name in self.parameters]
        b = [named[name].double().reshape(-1) for name in self.buffers]
        n = [int(named[name]) for name in self.counters]
        return State(torch.cat(w), torch.cat(b) if b else torch.zeros(0).double(), torch.tensor(n, dtype=torch.int64))

    def belongs_to_normal(self) -> Tensor:
        """Which of the parameters are BatchNorm's, as a mask of the flat vector."""
        marks = [torch.full((math.prod(shape),), name in self.normal) for name, shape in self.parameters.items()]
        return torch.cat(marks)


def _cut(flat: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    parts = flat.split([math.prod(shape) for shape in shapes.values()])
    return {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


class SoftmaxRegression(Network):
    """Flatten, then one linear map: `nn.Sequential(nn.Flatten(), nn.Linear(inputs, classes))`."""

    def __init__(self, inputs: int, classes: int) -> None:
        self.parameters = {"1.weight": (classes, inputs), "1.bias": (classes,)}

    def __call__(self, w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        p = _cut(w, self.parameters)
        return x.reshape(len(x), -1) @ p["1.weight"].T + p["1.bias"], x.new_zeros(0)


class Convolutional(Network):
    """3×3 convolution without bias, BatchNorm, tanh (smooth: no kink where float32 and float64 part), linear map.

    With `dense` images are padded with a rim of zeros and the last map is a 1×1 convolution: an output a pixel.
    """

    def __init__(self, channels: int, features: int, classes: int, pixels: int, dense: bool = False) -> None:
        self.dense, self.head = dense, "3" if dense else "4"
        self.parameters = {
            "0.weight": (features, channels, 3, 3),
            "1.weight": (features,),
            "1.bias": (features,),
            f"{self.head}.weight": (classes, features, 1, 1) if dense else (classes, features * pixels),
            f"{self.head}.bias": (classes,),
        }
        self.buffers = {"1.running_mean": (features,), "1.running_var": (features,)}
        self.counters = ("1.num_batches_tracked",)
        self.normal = ("1.weight", "1.bias")

    def __call__(self, w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        p = _cut(w, self.parameters)
        if self.dense:
            x = torch.nn.functional.pad(x, (1, 1, 1, 1))
        windows = x.unfold(2, 3, 1).unfold(3, 3, 1)  # (B, C, H−2, W−2, 3, 3)
        z = torch.einsum("bchwij,ocij->bohw", windows, p["0.weight"])
        z, statistics = batch_norm(z, p["1.weight"], p["1.bias"])
        z = torch.tanh(z)
        head, bias = p[f"{self.head}.weight"], p[f"{self.head}.bias"]
        if self.dense:
            return torch.einsum("bchw,oc->bohw", z, head[:, :, 0, 0]) + bias[:, None, None], statistics
        return z.reshape(len(z), -1) @ head.T + bias, statistics


def batch_norm(z: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """BatchNorm in training: normalised by the biased variance; statistics (mean, unbiased variance), flat."""
    count = z.numel() // z.shape[1]
    mean = z.sum((0, 2, 3)) / count
    centred = z - mean[:, None, None]
    square = (centred**2).sum((0, 2, 3))
    normal = centred / torch.sqrt(square / count + BATCH_NORM_EPS)[:, None, None]
    return normal * scale[:, None, None] + shift[:, None, None], torch.cat((mean, square / (count - 1)))


def cross_entropy(logits: Tensor, shares: Tensor) -> Tensor:
    """−Σ_k share_k·log softmax_k, mean over samples (and pixels). Labels are always shares of the classes here."""
    log = logits - torch.logsumexp(logits, 1, keepdim=True)
    return -(shares * log).sum(1).mean()


def cross_entropy_and_dice(logits: Tensor, shares: Tensor) -> Tensor:
    """(Cross-entropy + 1 − Dice)/2, Dice over the whole batch for every class but the background."""
    p = torch.exp(logits - torch.logsumexp(logits, 1, keepdim=True))
    losses = []
    for k in range(1, logits.shape[1]):
        both = (p[:, k] * shares[:, k]).sum()
        either = (p[:, k] ** 2).sum() + (shares[:, k] ** 2).sum()
        losses.append(1 - (2 * both + 1e-5) / (either + 1e-5))
    return (cross_entropy(logits, shares) + sum(losses) / len(losses)) / 2
