"""The server's arithmetic as single Triton kernels, for CUDA: each is one pass where plain operations take several."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit(do_not_specialize=["weight", "count"])
def _add(high, low, row, weight, count, first: tl.constexpr, block: tl.constexpr):
    """(high, low) += weight·row, from zeros if it is the first. To be launched without fused multiplications: with
    float64 rows the product may be rounded, and it has to be as on the CPU."""
    start = tl.program_id(0).to(tl.int64) * block
    spot = start + tl.arange(0, block)
    if start + block <= count:  # without a mask, several entries are read at a time
        _add_at(high + spot, low + spot, row + spot, weight, None, first, block)
    else:
        _add_at(high + spot, low + spot, row + spot, weight, spot < count, first, block)


@triton.jit
def _add_at(high, low, row, weight, mask, first: tl.constexpr, block: tl.constexpr):
    """Knuth's two-sum."""
    if first:  # what is there was never written
        big = tl.zeros([block], tl.float64)
        small = tl.zeros([block], tl.float64)
    else:
        big = tl.load(high, mask=mask)
        small = tl.load(low, mask=mask)
    value = tl.load(row, mask=mask).to(tl.float64) * weight
    total = big + value
    rounded = total - big
    small += (value - rounded) + (big - (total - rounded))
    new = total + small
    tl.store(high, new, mask=mask)
    tl.store(low, small - (new - total), mask=mask)


@triton.jit(do_not_specialize=["by", "count"])
def _divide(high, low, mean, by, count, block: tl.constexpr):
    """mean = (high + low) / by."""
    start = tl.program_id(0).to(tl.int64) * block
    spot = start + tl.arange(0, block)
    if start + block <= count:
        _divide_at(high + spot, low + spot, mean + spot, by, None)
    else:
        _divide_at(high + spot, low + spot, mean + spot, by, spot < count)


@triton.jit
def _divide_at(high, low, mean, by, mask):
    """Triton's float64 division rounds as IEEE 754 has it (it is float32's that does not)."""
    total = tl.load(high, mask=mask) + tl.load(low, mask=mask)
    tl.store(mean, (total / by).to(mean.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["count"])
def _look(row, witness, count, block: tl.constexpr):
    """Make the witness NaN where a number is not finite."""
    start = tl.program_id(0).to(tl.int64) * block
    spot = start + tl.arange(0, block)
    if start + block <= count:
        _look_at(tl.load(row + spot), witness)
    else:
        _look_at(tl.load(row + spot, mask=spot < count, other=0), witness)


@triton.jit
def _look_at(value, witness):
    """Whoever finds something writes the same: their order does not show."""
    finite = tl.abs(value) < float("inf")  # not so for NaN
    tl.store(witness, float("nan"), mask=tl.min(finite.to(tl.int32), 0) == 0)


def started(row: Tensor, weight: int) -> tuple[Tensor, Tensor]:
    """weight·row as high and low of a new sum."""
    high = torch.empty(row.shape, dtype=torch.float64, device=row.device)
    low = torch.empty_like(high)
    with torch.cuda.device_of(row):
        _add[_blocks(row)](high, low, row, weight, row.numel(), first=True, block=BLOCK, enable_fp_fusion=False)
    return high, low


def add(high: Tensor, low: Tensor, row: Tensor, weight: int) -> None:
    """Add weight·row to high + low in place."""
    with torch.cuda.device_of(row):
        _add[_blocks(row)](high, low, row, weight, row.numel(), first=False, block=BLOCK, enable_fp_fusion=False)


def divided(high: Tensor, low: Tensor, by: int, type: torch.dtype) -> Tensor:
    """(high + low) / by, in float32 or float64. (torch itself would multiply by 1/by on a GPU, and not on the CPU.)"""
    mean = torch.empty(high.shape, dtype=type, device=high.device)
    with torch.cuda.device_of(high):
        _divide[_blocks(high)](high, low, mean, by, high.numel(), block=BLOCK)
    return mean


def witness(row: Tensor) -> Tensor:
    """0 where all of the row's numbers are finite, NaN where they are not."""
    found = torch.zeros((), dtype=torch.float64, device=row.device)
    with torch.cuda.device_of(row):
        _look[_blocks(row)](row, found, row.numel(), block=BLOCK)
    return found


def _blocks(row: Tensor) -> tuple[int]:
    return (triton.cdiv(row.numel(), BLOCK),)
