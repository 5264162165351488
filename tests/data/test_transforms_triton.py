"""Flips and rotations by Triton kernels against torch's operations, which are held to Pillow's and SciPy's
(test_transforms.py). On a GPU the kernels run as they are; without one, in Triton's interpreter."""

from __future__ import annotations

import importlib
import importlib.util
import os

import pytest
import torch
from torch import Tensor

from fedfa.data import transforms
from fedfa.data.transforms import flip, rotate
from interpreted import play_interpreted

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if CUDA else "cpu"
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
SHAPES = [(9, 3, 20, 33), (5, 1, 64, 17), (2, 4, 1, 9), (2, 2, 7, 1), (1, 1, 1, 1)]
TYPES = [torch.float32, torch.bfloat16]
ANGLES = [0.0, 30.0, -7.3, 45.0, 90.0, -90.0, 180.0, -179.0, 0.01]


def kernel(function: object) -> object:
    """For tests of kernels."""
    marks = [] if INTERPRETED else [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device")]
    for mark in marks:
        function = mark(function)
    return function


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, a CPU that passes for a GPU."""
    if INTERPRETED:
        monkeypatch.setattr(transforms, "kernels", lambda name, device: importlib.import_module(name))


def pictures(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@kernel
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("side", [-1, -2])
def test_flips(shape: tuple[int, ...], dtype: torch.dtype, side: int, fast: None) -> None:
    x = pictures(shape, dtype)
    drawn = torch.rand(len(x), 2, generator=torch.Generator().manual_seed(1)) < 0.5
    wanted = torch.where(drawn[:, 1].view(-1, 1, 1, 1), x.flip(side), x)
    assert torch.equal(flip(x.to(DEVICE), drawn.to(DEVICE)[:, 1], side).cpu(), wanted)


@kernel
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TYPES)
def test_rotations(shape: tuple[int, ...], dtype: torch.dtype, fast: None) -> None:
    x, degrees = pictures(shape, dtype), torch.tensor(ANGLES[: shape[0]])
    found = rotate(x.to(DEVICE), degrees.to(DEVICE)).cpu()
    wanted = rotate(x.double(), degrees)  # for which there is no kernel
    torch.testing.assert_close(found.double(), wanted, atol=1e-4 if dtype == torch.float32 else 5e-3, rtol=0)
    assert found.dtype == dtype
    assert torch.equal(found[0], x[0])  # by no angle


@kernel
def test_what_has_no_kernel(fast: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other fills, masks, images in another order, and those that a gradient is wanted of."""
    used = []
    monkeypatch.setattr(transforms, "kernels", lambda name, device: used.append(name))
    x, degrees = pictures((2, 3, 8, 9), torch.float32).to(DEVICE), torch.tensor([20.0, -20.0]).to(DEVICE)
    rotate(x, degrees, "edge")
    rotate(x, degrees, nearest=True)
    rotate(x.to(memory_format=torch.channels_last), degrees)
    rotate(x.clone().requires_grad_(), degrees).sum().backward()
    flip(x[:0], degrees[:0] > 0)
    assert not used
    rotate(x, degrees)
    assert used


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="the kernels run as they are")
def test_interpreted() -> None:
    play_interpreted(__file__)
