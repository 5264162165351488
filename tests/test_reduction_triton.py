"""The server's Triton kernels against the plain operations, bit for bit.

On a GPU the kernels run as they are. Without one, they run in Triton's interpreter, which must be chosen before Triton
is imported: `test_interpreted` plays this file in a process of its own.
"""

from __future__ import annotations

import importlib.util
import math
import os
from types import ModuleType

import pytest
import torch
from torch import Tensor

from fedfa.reduction import _started, _two_sum_
from interpreted import play_interpreted

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if CUDA else "cpu"
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
kernel = [] if INTERPRETED else [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device")]


def row(count: int, type: torch.dtype, seed: int) -> Tensor:
    """Numbers of many sizes, a zero of either sign among them."""
    draw = torch.Generator().manual_seed(seed)
    size = 10.0 ** torch.randint(-6, 7, (count,), generator=draw)
    values = torch.randn(count, generator=draw, dtype=torch.float64) * size
    values[: min(count, 2)] = torch.tensor([-0.0, 0.0][:count])
    return values.to(type)


def same(found: Tensor, wanted: Tensor) -> bool:
    """Whether two tensors are the same to the bit, the sign of a zero included."""
    whole = {torch.float32: torch.int32, torch.float64: torch.int64}[wanted.dtype]
    return torch.equal(found.cpu().view(whole), wanted.view(whole))


@pytest.fixture
def kernels() -> ModuleType:
    from fedfa import reduction_triton

    return reduction_triton


@pytest.mark.parametrize("type", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 1024, 5003])
class TestKernels:
    pytestmark = kernel

    def test_a_sum_from_its_first_term_to_its_mean(self, kernels: ModuleType, type: torch.dtype, count: int) -> None:
        first = row(count, type, seed=0)
        zeros = torch.zeros(2, count, dtype=torch.float64)
        _two_sum_(*zeros, first.double() * 7)
        plain, own = _started(first, 7), kernels.started(first.to(DEVICE), 7)
        for mine, started, added in zip(own, plain, zeros, strict=True):
            assert same(mine, added) and same(started, added), "a first term is one added to zeros"
        for weight in (1, 3, 459):
            term = row(count, type, seed=weight)
            _two_sum_(*plain, term.double() * weight)
            kernels.add(*own, term.to(DEVICE), weight)
            assert all(same(mine, theirs) for mine, theirs in zip(own, plain, strict=True))
        for by in (1, 3, 470):
            for into in (torch.float32, torch.float64):
                assert same(kernels.divided(*own, by, into), (plain[0] + plain[1]).div_(by).to(into))

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_a_witness_sees_what_is_not_finite(
        self, kernels: ModuleType, type: torch.dtype, count: int, bad: float
    ) -> None:
        values = row(count, type, seed=0)
        values[0] = torch.finfo(type).max
        assert kernels.witness(values.to(DEVICE)).item() == 0
        for spot in {0, count // 2, count - 1}:
            worse = values.clone()
            worse[spot] = bad
            assert kernels.witness(worse.to(DEVICE)).isnan()


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="the kernels run as they are")
def test_interpreted() -> None:
    play_interpreted(__file__)
