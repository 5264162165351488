"""The server's exact addition as one Triton kernel, for CUDA: `_two_sum_` takes a dozen."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit(do_not_specialize=["weight", "count"])
def _add(high, low, row, weight, count, block: tl.constexpr):
    """(high, low) += weight·row. The product is exact in float64, so it does not matter if it is fused with the sum."""
    spot = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    mask = spot < count
    big = tl.load(high + spot, mask=mask, other=0)
    small = tl.load(low + spot, mask=mask, other=0)
    value = tl.load(row + spot, mask=mask, other=0).to(tl.float64) * weight
    total = big + value
    rounded = total - big
    small += (value - rounded) + (big - (total - rounded))
    new = total + small
    tl.store(high + spot, new, mask=mask)
    tl.store(low + spot, small - (new - total), mask=mask)


def add(high: Tensor, low: Tensor, row: Tensor, weight: int) -> None:
    """Add weight·row to high + low in place."""
    with torch.cuda.device_of(row):
        _add[(triton.cdiv(row.numel(), BLOCK),)](high, low, row, weight, row.numel(), block=BLOCK)
