"""Many small tensors as one: on a GPU the time of a small operation is that of its launch, whatever it works on."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor


def in_a_row(tensors: Mapping[str, Tensor]) -> Tensor:
    """The floating-point ones of the tensors, one after another, in a tensor of their own."""
    floats = [tensor for tensor in tensors.values() if tensor.is_floating_point()]
    return joined(floats) if floats else torch.zeros(0)


@torch.no_grad()
def joined(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors' entries one after another, in a tensor of their own."""
    if tensors[0].device.type != "cuda" or len({tensor.dtype for tensor in tensors}) > 1:
        return torch.cat([tensor.flatten() for tensor in tensors])
    # CUDA's `cat` takes several times as long as a copy where a few of the tensors are much larger than the others.
    row = tensors[0].new_empty(sum(tensor.numel() for tensor in tensors))
    copy_all(cut(row, [tensor.shape for tensor in tensors]), tensors)
    return row


def cut(row: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """A row as tensors of these shapes, which are views of it."""
    parts = row.split([shape.numel() for shape in shapes])
    return [part if len(shape) == 1 else part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def copies(tensors: Mapping[str, Tensor], device: torch.device | None = None) -> dict[str, Tensor]:
    """Copies of tensors, here or on another device. Those of one type from one device lie in a row: one launch or one
    transfer for all, and not one a tensor."""
    found: dict[str, Tensor] = {}
    for kind in {(tensor.dtype, tensor.device) for tensor in tensors.values()}:
        own = {name: tensor for name, tensor in tensors.items() if (tensor.dtype, tensor.device) == kind}
        row = joined(list(own.values()))
        row = row if device is None else row.to(device)
        found |= zip(own, cut(row, [tensor.shape for tensor in own.values()]), strict=True)
    return {name: found[name] for name in tensors}


def copy_all(into: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    """Copy every source into its place. CUDA does it in one launch where all are of one type and lie in memory as
    their places do, and one by one as soon as a single pair does not: so those go apart."""
    groups: dict[tuple[torch.dtype, torch.dtype, bool], tuple[list[Tensor], list[Tensor]]] = {}
    for place, source in zip(into, sources, strict=True):
        alike = place.stride() == source.stride()
        places, found = groups.setdefault((place.dtype, source.dtype, alike), ([], []))
        places.append(place)
        found.append(source)
    for places, found in groups.values():
        torch._foreach_copy_(places, found)


@functools.cache
def owners(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """For each entry of a row of tensors of these sizes, the number of the tensor that it is of: with it, one
    `index_select` gives every entry its tensor's value. Kept, since the host waits while it goes to a GPU."""
    return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes, dtype=torch.int64)).to(device)
