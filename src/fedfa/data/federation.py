"""A federation's data: one pool of samples, and for every client the indices that are its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Split = Literal["train", "val", "test"]
TaskName = Literal["classification", "segmentation"]


@dataclass(frozen=True)
class ClientIndex:
    """One client's samples, as indices into the federation's pool."""

    train: Tensor
    val: Tensor
    test: Tensor

    def of(self, split: Split) -> Tensor:
        index: Tensor = getattr(self, split)
        return index


@dataclass(frozen=True)
class Federation:
    """Named clients over one pool of uint8 images, which goes to a device once.

    `images` is (N, C, H, W) in uint8. `labels` is (N,) class numbers for classification, or (N, H, W) masks of
    class numbers for segmentation; `classes` names them (for segmentation, class 0 is the background).
    """

    name: str
    task: TaskName
    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    clients: Mapping[str, ClientIndex]

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.dim() != 4:
            raise ValueError(
                f"{self.name}: images are uint8 (N, C, H, W), not {self.images.dtype} {self.images.dim()}-D"
            )
        wanted = (
            self.images.shape[:1] if self.task == "classification" else self.images.shape[:1] + self.images.shape[2:]
        )
        if self.labels.shape != wanted:
            raise ValueError(f"{self.name}: labels for {self.task} are {tuple(wanted)}, not {tuple(self.labels.shape)}")
        if not self.clients:
            raise ValueError(f"{self.name}: a federation has at least one client")

    @property
    def channels(self) -> int:
        return self.images.shape[1]

    def to(self, device: torch.device | str) -> Federation:
        """The same federation with its pool on `device`; indices stay on the CPU, where batches are laid out."""
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Images scaled to 0–1 in float32, and labels, of the samples at `index`."""
        index = index.to(self.images.device, non_blocking=True)
        # index_select: on the CPU ten times as fast as images[index]
        return self.images.index_select(0, index).float().div_(255), self.labels.index_select(0, index).long()
