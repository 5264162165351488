"""FedMix: Yoon et al., *FedMix: Approximation of Mixup under Mean Augmented Federated Learning*, ICLR 2021."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from fedfa.algorithms.base import Algorithm, Share, at_least, fraction
from fedfa.engines.client import Client
from fedfa.layers.second_order import TwiceDifferentiable
from fedfa.reduction import Reduced
from fedfa.state import ServerState
from fedfa.task import Batch, class_shares


@dataclass(frozen=True)
class FedMix(Algorithm):
    """Mixup with averages of other clients' samples, to first order (Eq. 6, Algorithm 2).

    **Averaged images leave the clients.** Before the first round each client averages its training samples `average`
    at a time (0: all of them at once), images and labels, and everyone gets all averages. A step draws one, (x̄, ȳ):

        ℓ₁ + λ·ℓ(f((1−λ)x), ȳ) + λ·⟨∂ℓ₁/∂x, x̄⟩,  ℓ₁ = (1−λ)·ℓ(f((1−λ)x), y)

    with ∂/∂x at (1−λ)x and the product summed over the batch, not averaged: ℓ₁ is a mean already. Its gradient takes
    a second backward. Labels of segmentation are averaged pixel by pixel. λ is 0.05 to 0.2 in the paper, `average`
    5 up to all of a client's data.

    `products="averaged"` does what implementations in public do: the product is averaged over the batch all the same,
    and so the last term is as many times too small as the batch has samples.
    """

    shares: ClassVar[bool] = True
    constants: ClassVar[frozenset[str]] = frozenset({"images", "labels"})
    lam: float = 0.1
    average: int = 5
    products: Literal["summed", "averaged"] = "summed"

    def __post_init__(self) -> None:
        fraction(lam=self.lam)
        at_least(0, average=self.average)
        if self.products not in ("summed", "averaged"):
            raise ValueError(f"products is summed or averaged, not {self.products!r}")

    def notices(self, model: nn.Module) -> list[str]:
        size = f"{self.average} at a time" if self.average else "all of a client's together"
        return [f"fedmix: averaged training images and labels ({size}) leave the clients and go to all of them"]

    def share(self, client: Client) -> Share:
        index = client.index.train
        if not len(index):
            return Share()
        order = torch.randperm(len(index), generator=client.streams.host("fedmix"))
        images, labels = [], []
        for part in index[order].split(self.average or len(index)):
            x, y = client.samples(part)
            images.append(x.mean(0))
            labels.append(class_shares(y, len(client.federation.classes)).mean(0))
        return Share(gathered={"images": torch.stack(images), "labels": torch.stack(labels)})

    def receive(self, server: ServerState, reduced: Reduced, gathered: Mapping[str, list[Tensor]]) -> ServerState:
        return replace(server, memory={name: torch.cat(parts) for name, parts in gathered.items()})

    def broadcast(self, server: ServerState) -> dict[str, Tensor]:
        return dict(server.memory)

    def loss(self, client: Client, batch: Batch) -> Tensor:
        images, labels = client.extras["images"], client.extras["labels"]
        drawn = torch.randint(len(images), (1,), generator=client.streams("fedmix"), device=images.device)
        image, label = images.index_select(0, drawn), labels.index_select(0, drawn)
        x = ((1 - self.lam) * batch.x).requires_grad_()
        convolutions = TwiceDifferentiable()
        with convolutions:
            output = client.model(x)
        own = (1 - self.lam) * client.task.batch_loss(output, batch)
        others = client.task.loss(output, label.expand(len(batch), *label.shape[1:]))
        slope = convolutions.slope(own, x)
        along = (slope * image).sum()
        if self.products == "averaged":
            along = along / len(batch)
        return own + self.lam * others + self.lam * along
