"""The federated rules on flat vectors, as their papers write them; the server here may see every client's model.

Each rule is a class with up to four methods: `prepare` once before the first round, `enter` and `leave` around a
client's local training, `direction` for the vector that its optimiser steps along, `server` after a round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from reference.networks import Network, State

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass
class Site:
    """A client: all of its training samples, and what it keeps to itself."""

    name: str
    x: Tensor
    y: Tensor
    """Shares of the classes."""
    kept: dict[str, Tensor] = field(default_factory=dict)
    order: Tensor | None = None
    """The order in which FedMix averages its samples."""
    draw: torch.Generator = field(default_factory=torch.Generator)
    """The stream of FedMix's draws in this round."""


class Result(NamedTuple):
    """What a client ends a round with."""

    site: Site
    weight: int
    state: State


@dataclass
class FedAvg:
    """The average of models: Eq. 1."""

    network: Network
    loss: Loss
    population: int

    def prepare(self, sites: Sequence[Site], first: State) -> None:
        """Before the first round."""

    def enter(self, site: Site, state: State) -> State:
        return state

    def slope(self, w: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient of the batch's loss in w, and the batch's statistics."""

        def loss(w: Tensor) -> tuple[Tensor, Tensor]:
            output, statistics = self.network(w, x)
            return self.loss(output, y), statistics

        return torch.func.grad(loss, has_aux=True)(w)

    def direction(self, site: Site, w: Tensor, start: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.slope(w, x, y)

    def leave(self, site: Site, state: State, start: Tensor, steps: int, rate: float) -> None: ...

    def server(self, state: State, results: Sequence[Result]) -> State:
        return self.average(results)

    def average(self, results: Sequence[Result]) -> State:
        total = sum(result.weight for result in results)
        w = sum(result.weight / total * result.state.w for result in results)
        b = sum(result.weight / total * result.state.b for result in results)
        n = [
            sum(result.weight * int(result.state.n[k]) for result in results) // total
            for k in range(len(results[0].state.n))
        ]
        return State(w, b, torch.tensor(n, dtype=torch.int64))


@dataclass
class FedAvgM(FedAvg):
    """Hsu et al. 2019 in their own order: v ← βv + (w − avg), w ← w − v."""

    beta: float = 0.9

    def prepare(self, sites: Sequence[Site], first: State) -> None:
        self.v = torch.zeros_like(first.w)

    def server(self, state: State, results: Sequence[Result]) -> State:
        mean = self.average(results)
        self.v = self.beta * self.v + (state.w - mean.w)
        return mean._replace(w=state.w - self.v)


@dataclass
class FedProx(FedAvg):
    """Li et al. 2020: the gradient of μ/2·‖w − w_t‖² is μ(w − w_t)."""

    mu: float = 0.01

    def direction(self, site: Site, w: Tensor, start: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        g, statistics = self.slope(w, x, y)
        return g + self.mu * (w - start), statistics


@dataclass
class FedSAM(FedAvg):
    """Qu et al. 2022: the gradient at w + ρ·g/‖g‖; statistics are those of the pass at w."""

    rho: float = 0.05

    def direction(self, site: Site, w: Tensor, start: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        g, statistics = self.slope(w, x, y)
        there, _ = self.slope(w + self.rho * g / math.sqrt(float(g @ g)), x, y)
        return there, statistics


@dataclass
class FedBN(FedAvg):
    """Li et al. 2021: BatchNorm's parameters, statistics and counters stay where they are."""

    share_average: bool = False

    def prepare(self, sites: Sequence[Site], first: State) -> None:
        self.own = self.network.belongs_to_normal()
        self.built = first
        self.mean: State | None = None

    def enter(self, site: Site, state: State) -> State:
        private = self.mean if self.share_average and self.mean is not None else self.built
        if site.kept:
            private = State(site.kept["w"], site.kept["b"], site.kept["n"])
        return State(torch.where(self.own, private.w, state.w), private.b, private.n)

    def leave(self, site: Site, state: State, start: Tensor, steps: int, rate: float) -> None:
        site.kept.update(state._asdict())

    def server(self, state: State, results: Sequence[Result]) -> State:
        self.mean = self.average([result._replace(weight=1) for result in results])
        mean = self.average(results)
        return State(torch.where(self.own, self.built.w, mean.w), self.built.b, self.built.n)


@dataclass
class FedRobust(FedAvg):
    """Reisizadeh et al. 2020: x ↦ Λx + δ per pixel, one step of ascent on (Λ, δ), then of descent on w."""

    map_rate: float = 1e-3
    shift_rate: float = 0.02
    map_penalty: float = 100.0
    shift_penalty: float = 4.0

    def direction(self, site: Site, w: Tensor, start: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        channels = x.shape[1]
        one = torch.eye(channels, dtype=x.dtype)
        turn, shift = site.kept.get("map", one), site.kept.get("shift", torch.zeros(channels, dtype=x.dtype))

        def loss(turn: Tensor, shift: Tensor) -> Tensor:
            return self.loss(self.network(w, _moved(x, turn, shift))[0], y)

        up_turn, up_shift = torch.func.grad(loss, (0, 1))(turn, shift)
        site.kept["map"] = turn + self.map_rate * (up_turn - 2 * self.map_penalty * (turn - one))
        site.kept["shift"] = shift + self.shift_rate * (up_shift - 2 * self.shift_penalty * shift)
        return self.slope(w, _moved(x, site.kept["map"], site.kept["shift"]), y)


def _moved(x: Tensor, turn: Tensor, shift: Tensor) -> Tensor:
    """Every pixel's channels through Λ, plus δ: channel i becomes Σ_j Λ_ij·x_j + δ_i."""
    rows = [sum(turn[i, j] * x[:, j] for j in range(len(shift))) + shift[i] for i in range(len(shift))]
    return torch.stack(rows, 1)


@dataclass
class FedMix(FedAvg):
    """Yoon et al. 2021, Eq. 4 and Algorithm 1: the loss's Taylor expansion around (1 − λ)x."""

    lam: float = 0.1
    average_of: int = 5
    averaged: bool = False
    """Whether the derivative is divided by the batch's size once more."""

    def prepare(self, sites: Sequence[Site], first: State) -> None:
        self.images, self.labels = [], []
        for site in sorted(sites, key=lambda site: site.name):
            x, y = (site.x, site.y) if site.order is None else (site.x[site.order], site.y[site.order])
            size = self.average_of or len(x)
            for at in range(0, len(x), size):
                self.images.append(x[at : at + size].mean(0))
                self.labels.append(y[at : at + size].mean(0))

    def direction(self, site: Site, w: Tensor, start: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        number = int(torch.randint(len(self.images), (1,), generator=site.draw))
        return torch.func.grad(lambda w: self.objective(w, x, y, number), has_aux=True)(w)

    def objective(self, w: Tensor, x: Tensor, y: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """(1−λ)·ℓ(f(z), y) + λ·ℓ(f(z), ȳ) + λ·⟨∂(first term)/∂z, x̄⟩ at z = (1−λ)x."""
        image, label = self.images[number], self.labels[number]

        def first(z: Tensor) -> Tensor:
            return (1 - self.lam) * self.loss(self.network(w, z)[0], y)

        z = (1 - self.lam) * x
        output, statistics = self.network(w, z)
        # The inner product as a directional derivative: every sample moves along the same x̄.
        _, along = torch.func.jvp(first, (z,), (image.expand_as(z).contiguous(),))
        along = along * (1 / len(x) if self.averaged else 1)
        return first(z) + self.lam * self.loss(output, label.expand_as(y)) + self.lam * along, statistics


@dataclass
class FedHarmo(FedAvg):
    """HarmoFL, Jiang et al. 2022: low frequencies with the federation's amplitude, and a step from a neighbour of w."""

    alpha: float = 0.05
    amplitude: str = "window"
    window: float = 0.1

    def prepare(self, sites: Sequence[Site], first: State) -> None:
        means = [np.abs(np.fft.fft2(site.x.numpy())).mean(0) for site in sites]
        self.mean = sum(means) / len(means)

    def inputs(self, x: Tensor) -> Tensor:
        if self.amplitude == "none":
            return x
        reach = 0 if self.amplitude == "dc" else math.floor(self.window * min(x.shape[-2:]))
        return torch.from_numpy(harmonised(x.numpy(), self.mean, reach))

    def direction(self, site: Site, w: Tensor, start: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = self.inputs(x)
        g, statistics = self.slope(w, x, y)
        there, _ = self.slope(w + self.alpha * g / torch.sqrt((g * g).sum()), x, y)
        return there, statistics


def harmonised(x: np.ndarray, amplitude: np.ndarray, reach: int) -> np.ndarray:
    """Bins with centred frequency |u| ≤ reach and |v| ≤ reach get the given amplitude and keep their phase.

    On the shifted spectrum, as HarmoFL's code has it: the mean is in its centre, at (H//2, W//2).
    """
    height, width = x.shape[-2:]
    spectrum = np.fft.fftshift(np.fft.fft2(x), axes=(-2, -1))
    wanted = np.fft.fftshift(amplitude, axes=(-2, -1))
    for row in range(height):
        for column in range(width):
            if abs(row - height // 2) <= reach and abs(column - width // 2) <= reach:
                phase = np.angle(spectrum[..., row, column])
                spectrum[..., row, column] = wanted[..., row, column] * np.exp(1j * phase)
    return np.fft.ifft2(np.fft.ifftshift(spectrum, axes=(-2, -1))).real


@dataclass
class Scaffold(FedAvg):
    """Karimireddy et al. 2020, option II. The server's variate is the mean over all N clients' of their own."""

    server_rate: float = 1.0

    def prepare(self, sites: Sequence[Site], first: State) -> None:
        self.sites = list(sites)
        for site in sites:
            site.kept["variate"] = torch.zeros_like(first.w)
        self.c = torch.zeros_like(first.w)

    def direction(self, site: Site, w: Tensor, start: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        g, statistics = self.slope(w, x, y)
        return g - site.kept["variate"] + self.c, statistics

    def leave(self, site: Site, state: State, start: Tensor, steps: int, rate: float) -> None:
        site.kept["variate"] = site.kept["variate"] - self.c + (start - state.w) / (steps * rate)

    def server(self, state: State, results: Sequence[Result]) -> State:
        self.c = sum(site.kept["variate"] for site in self.sites) / self.population
        mean = self.average(results)
        return mean._replace(w=(1 - self.server_rate) * state.w + self.server_rate * mean.w)


@dataclass
class FedDyn(FedAvg):
    """Acar et al. 2021. The mean of models in both of the server's lines is the same one, weighted or not."""

    alpha: float = 0.1

    def prepare(self, sites: Sequence[Site], first: State) -> None:
        for site in sites:
            site.kept["dual"] = torch.zeros_like(first.w)
        self.h = torch.zeros_like(first.w)

    def direction(self, site: Site, w: Tensor, start: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        g, statistics = self.slope(w, x, y)
        return g - site.kept["dual"] + self.alpha * (w - start), statistics

    def leave(self, site: Site, state: State, start: Tensor, steps: int, rate: float) -> None:
        site.kept["dual"] = site.kept["dual"] - self.alpha * (state.w - start)

    def server(self, state: State, results: Sequence[Result]) -> State:
        mean = self.average(results)
        self.h = self.h - self.alpha * len(results) / self.population * (mean.w - state.w)
        return mean._replace(w=mean.w - self.h / self.alpha)


@dataclass
class FedOpt(FedAvg):
    """Reddi et al. 2021, Algorithm 2: m ← β₁m + (1−β₁)Δ, v by `moment`, w ← w + η·m/(√v + τ), v₀ = τ²."""

    lr: float = 0.03
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3
    moment: str = "adam"

    def prepare(self, sites: Sequence[Site], first: State) -> None:
        self.m = torch.zeros_like(first.w)
        self.v = torch.full_like(first.w, self.tau**2)

    def server(self, state: State, results: Sequence[Result]) -> State:
        mean = self.average(results)
        change = mean.w - state.w
        square = change * change
        self.m = self.beta1 * self.m + (1 - self.beta1) * change
        if self.moment == "adagrad":
            self.v = self.v + square
        elif self.moment == "adam":
            self.v = self.beta2 * self.v + (1 - self.beta2) * square
        else:
            above = (self.v > square).double() - (self.v < square).double()
            self.v = self.v - (1 - self.beta2) * square * above
        return mean._replace(w=state.w + self.lr * self.m / (torch.sqrt(self.v) + self.tau))
