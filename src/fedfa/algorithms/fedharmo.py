"""FedHarmo: Jiang, Wang and Dou, *HarmoFL: Harmonizing Local and Global Drifts in Federated Learning on Heterogeneous
Medical Images*, AAAI 2022."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedfa.algorithms.base import Algorithm, Share, at_least
from fedfa.algorithms.fedsam import uphill
from fedfa.engines.client import Client
from fedfa.layers.amplitude import amplitudes, with_amplitudes
from fedfa.reduction import Reduced, Report
from fedfa.state import ServerState
from fedfa.task import Batch

CHUNK = 256
"""Images whose spectra are taken at once."""


@dataclass(frozen=True)
class FedHarmo(Algorithm):
    """Amplitude normalisation of the inputs (Eqs. 2 to 4), and steps along the gradient at w + α·g/‖g‖ (Eq. 8).

    Before the first round every client reports the mean amplitude spectrum of its training images; their mean over
    clients, which the server gets as a sum, then replaces the low frequencies' amplitudes of every image, in training
    and in evaluation; phases stay. `amplitude="window"` takes frequencies up to `window` times the shorter side,
    ``dc`` the mean brightness of a channel alone, as the authors' call does, ``none`` leaves images as they are.
    α = 0.05; the paper trains with Adam at 1e-4.
    """

    shares: ClassVar[bool] = True
    constants: ClassVar[frozenset[str]] = frozenset({"amplitude"})
    alpha: float = 0.05
    amplitude: Literal["window", "dc", "none"] = "window"
    window: float = 0.1

    def __post_init__(self) -> None:
        at_least(0, alpha=self.alpha)
        if not 0 <= self.window < 0.5:
            raise ValueError(f"window is a share of the image's side, from 0 up to 0.5 (excluded), not {self.window}")

    def share(self, client: Client) -> Share:
        index = client.index.train
        if self.amplitude == "none" or not len(index):
            return Share()
        half = int(self.window * min(client.federation.images.shape[-2:])) if self.amplitude == "window" else 0
        sums = [amplitudes(client.samples(part)[0], half).sum(0) for part in index.split(CHUNK)]
        return Share(Report(means={"amplitude": torch.stack(sums).sum(0) / len(index)}))

    def receive(self, server: ServerState, reduced: Reduced, gathered: Mapping[str, list[Tensor]]) -> ServerState:
        return replace(server, memory=dict(reduced.means))

    def broadcast(self, server: ServerState) -> dict[str, Tensor]:
        return dict(server.memory)

    def inputs(self, x: Tensor, extras: Mapping[str, Tensor]) -> Tensor:
        return with_amplitudes(x, extras["amplitude"]) if "amplitude" in extras else x

    def gradients(self, client: Client, batch: Batch) -> Tensor:
        return uphill(super().gradients, client, batch, self.alpha)
