"""A federation's data: one pool of samples, and for every client the indices that are its own."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fedfa.kernels import kernels

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
    notes: tuple[str, ...] = ()
    """What a run should say of the data, a line each: files that were left out."""
    home: torch.device | None = None
    """Where batches go, where that is not where the pool is: it does not fit there."""

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

    def division(self) -> str:
        """Sixteen hex digits that change with who has which sample on which side: by these a resumed run knows that
        its data are still the same."""
        digest = hashlib.blake2b(f"{tuple(self.images.shape)}{self.classes}".encode(), digest_size=8)
        for name, index in sorted(self.clients.items()):
            for split in (index.train, index.val, index.test):
                digest.update(f"{name} {len(split)}".encode() + split.numpy().astype("<i8").tobytes())
        return digest.hexdigest()

    def fingerprint(self) -> str:
        """Sixteen hex digits of what the samples are, wherever they lie and however they are divided: all labels of a
        classification, and :data:`LOOKED_AT` samples."""
        return fingerprint(self.images, self.labels, self.classes)

    def kinds(self) -> int:
        """How many classes occur: EMNIST's readers know 62, whatever is in the files."""
        return int(self.labels.unique().numel())

    @property
    def device(self) -> torch.device:
        """Where batches are."""
        return self.home or self.images.device

    def to(self, device: torch.device | str) -> Federation:
        """The same federation with its pool on `device`, or, where it does not fit there, with its batches.

        Indices stay on the CPU, where batches are laid out. A memory-mapped pool stays on disk for the CPU.
        """
        device = torch.device(device)
        if self.images.device.type == "cpu" and self.images.nbytes + self.labels.nbytes > room(device):
            return replace(self, home=device)
        return replace(self, images=self.images.to(device), labels=self.labels.to(device), home=None)

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Images scaled to 0–1 in float32, and labels, of the samples at `index`."""
        fused = kernels("fedfa.data.pixels_triton", self.images.device)
        index = index.to(self.images.device, non_blocking=True)
        labels = self._take(self.labels, index).long()
        if fused is not None and self._plain(index):
            taken: Tensor = fused.take(self.images, index)
            return taken, labels
        images = self._take(self.images, index).float()
        return images.div_(torch.full((), 255.0, device=images.device)), labels  # by a number, a GPU would multiply

    def _plain(self, index: Tensor) -> bool:
        """Whether a kernel finds the images where it looks for them."""
        whole = self.home is None and self.images.is_contiguous()
        return whole and index.dtype == torch.int64 and 0 < len(index) < 2**16

    def _take(self, pool: Tensor, index: Tensor) -> Tensor:
        if self.home is None:
            return pool.index_select(0, index)  # on the CPU ten times as fast as pool[index]
        pinned = self.home.type == "cuda"  # from where the copy runs beside the computation
        rows = torch.empty(len(index), *pool.shape[1:], dtype=pool.dtype, pin_memory=pinned)
        return torch.index_select(pool, 0, index, out=rows).to(self.home, non_blocking=pinned)


LOOKED_AT = 64
"""Samples that a fingerprint looks at: all of a large set would take as long as reading it."""


def fingerprint(images: Tensor, labels: Tensor, classes: Sequence[str]) -> str:
    """See :meth:`Federation.fingerprint`."""
    digest = hashlib.blake2b(f"{tuple(images.shape)}{tuple(classes)}".encode(), digest_size=8)
    some = torch.linspace(0, len(images) - 1, min(len(images), LOOKED_AT)).long()
    for part in (images[some], labels if labels.dim() == 1 else labels[some]):
        digest.update(part.contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()


def room(device: torch.device) -> float:
    """Bytes that a pool may take on a device: half of what is free there, since training needs room as well."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] / 2
    if device.type == "mps":
        free: int = torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
        return free / 2
    return math.inf
