"""A batch taken out of the pool as one Triton kernel: torch's selection, conversion and division take three."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit(do_not_specialize=["size"])
def _take(pool, index, out, size, block: tl.constexpr):
    row = tl.program_id(1)
    spot = tl.program_id(0) * block + tl.arange(0, block)
    mask = spot < size
    value = tl.load(pool + tl.load(index + row) * size + spot, mask=mask, other=0)
    tl.store(out + row.to(tl.int64) * size + spot, tl.div_rn(value.to(tl.float32), 255.0), mask=mask)


def take(pool: Tensor, index: Tensor) -> Tensor:
    """The images at `index`, which exist, scaled to 0–1 in float32."""
    out = torch.empty((len(index), *pool.shape[1:]), device=pool.device)
    size = pool[0].numel()
    with torch.cuda.device_of(pool):
        _take[(triton.cdiv(size, BLOCK), len(index))](pool, index, out, size, block=BLOCK, num_warps=8)
    return out
