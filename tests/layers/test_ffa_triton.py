"""FFA's Triton kernels against the plain reference in float64.

On a GPU the kernels run as they are, in a few cases (every one is a compilation). Without one, they run in Triton's
interpreter, which must be chosen before Triton is imported: `test_interpreted` plays this file in a process of its own.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from fedfa.layers.ffa import FFA, Drawn, Fusion, Spread, augment, augment_reference, spread_terms
from interpreted import play_interpreted

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if CUDA else "cpu"
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
kernel = [] if INTERPRETED else [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device")]

FORMATS = {"nchw": torch.contiguous_format, "last": torch.channels_last}
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
FUSIONS = get_args(Fusion)
Case = tuple[tuple[int, ...], str, torch.dtype, Fusion, bool | None, bool]


def cases() -> list[Case]:
    """Shape, format, type, fusion, gate, unbiased."""
    half, brain, single = torch.float16, torch.bfloat16, torch.float32
    few: list[Case] = [
        ((32, 64, 31, 31), "last", brain, "adaptive", True, False),
        ((32, 64, 31, 31), "nchw", single, "adaptive", True, False),
        ((8, 6, 14, 14), "last", half, "total", None, True),
        ((4, 512, 1, 1), "nchw", brain, "client", None, False),
        ((5, 7, 3, 9), "nchw", single, "direct", False, False),
        ((2, 5, 127, 127), "last", single, "random", True, True),
        ((2, 5, 127, 127), "nchw", brain, "total", None, False),
        ((5, 7, 3, 9), "last", brain, "adaptive", False, False),
    ]
    if CUDA:
        return few
    shapes = [(8, 6, 14, 14), (1, 3, 4, 4), (5, 7, 3, 9), (4, 17, 1, 1), (2, 1, 6, 6)]
    plain: list[Case] = [
        (shape, format, dtype, "adaptive", True, unbiased)
        for shape in shapes
        for format in FORMATS
        for dtype in TOLERANCE
        for unbiased in ((False, True) if dtype is single else (False,))
    ]
    others: list[Case] = [
        ((5, 7, 3, 9), format, single, fusion, gate, unbiased)
        for format in FORMATS
        for fusion in FUSIONS
        for gate in (True, False, None)
        for unbiased in (False, True)
    ]
    ranks: list[Case] = [
        (shape, "nchw", single, "adaptive", None, False)
        for shape in ((4, 16, 30), (4, 3, 5, 6, 7), (3, 5, 1), (70, 3, 5, 5))
    ]
    return few + plain + others + ranks


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def fused(*given: Any) -> tuple[Tensor, Tensor]:
    from fedfa.layers import ffa_triton

    assert ffa_triton.usable(given[0])
    return ffa_triton.augment(*given)


def spread_of(fusion: Fusion, channels: int) -> Spread:
    return spread_terms(fusion, *normal(2, channels, seed=7).abs())


def to(spread: Spread) -> Spread:
    """The spread as the kernels get it."""
    factor, offset = (value.float().to(DEVICE) if isinstance(value, Tensor) else value for value in spread)
    return Spread(factor, offset)


@pytest.mark.parametrize("case", [pytest.param(case, marks=kernel) for case in cases()])
def test_equals_the_reference(case: Case) -> None:
    shape, format, dtype, fusion, opened, unbiased = case
    # Features of which every channel and sample is its own: a mean far from 0 and a standard deviation near 1.
    own = (*shape[:2], *(1 for _ in shape[2:]))
    x = (normal(*shape) * (1 + normal(*own, seed=3).abs()) + 2 * normal(*own, seed=4)).to(dtype)
    g, noise = normal(*shape, seed=2).to(dtype), normal(2, *shape[:2], seed=1).float()
    spread = spread_of(fusion, shape[1])
    gate = None if opened is None else torch.tensor(opened)

    wide = x.double().requires_grad_()
    wanted, statistics = augment_reference(wide, noise.double(), spread, gate, 1e-6, unbiased)
    wanted.backward(g.double())

    y = x.to(DEVICE, memory_format=FORMATS[format]).detach().requires_grad_()
    padded = torch.nn.functional.pad(noise, (3, 2)).to(DEVICE)[..., 3:-2]  # a slice, as a layer gets it
    device_gate = None if gate is None else gate.to(DEVICE)
    out, found = fused(y, padded, to(spread), device_gate, 1e-6, unbiased)
    out.backward(g.to(DEVICE))
    assert y.grad is not None and wide.grad is not None
    assert out.dtype == dtype and out.stride() == y.stride() == y.grad.stride()
    if opened is False:
        assert torch.equal(out.cpu(), x) and torch.equal(y.grad.cpu(), g)
    allowed = TOLERANCE[dtype]
    torch.testing.assert_close(out.detach().cpu().double(), wanted.detach(), atol=allowed, rtol=allowed)
    torch.testing.assert_close(y.grad.cpu().double(), wide.grad, atol=allowed, rtol=allowed)
    torch.testing.assert_close(found.cpu().double(), statistics, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("format", [pytest.param(format, marks=kernel) for format in FORMATS])
def test_constant_channels_and_equal_samples_stay(format: str) -> None:
    """Σ̂ is exactly 0 where samples are alike, and so is its gradient: a root of rounding errors would not be."""
    image = normal(1, 5, 9, 9, seed=5).float() + 1000
    image[:, 0] = 1 / 3
    x = image.expand(6, 5, 9, 9).to(DEVICE).contiguous(memory_format=FORMATS[format]).requires_grad_()
    g = normal(6, 5, 9, 9, seed=6).float().to(DEVICE)
    out, statistics = fused(x, normal(2, 6, 5).float().to(DEVICE), Spread(2.0, 0.0), None, 1e-6, False)
    out.backward(g)
    assert torch.equal(out, x) and x.grad is not None and torch.equal(x.grad, g)
    torch.testing.assert_close(statistics[:, 0].cpu(), torch.tensor([1 / 3, 1e-3]), atol=0, rtol=1e-6)


@pytest.mark.parametrize("outlier", [pytest.param(1e4, marks=kernel)])
def test_an_odd_first_pixel_costs_no_digits(outlier: float) -> None:
    """Deviations are not only taken from the first pixel, which may be far from all others."""
    x = normal(2, 3, 100, 100).float()
    x[:, :, 0, 0] = outlier
    _, statistics = fused(x.to(DEVICE), torch.zeros(2, 2, 3, device=DEVICE), Spread(1.0, 0.0), None, 1e-6, False)
    _, wanted = augment_reference(x.double(), torch.zeros(2, 2, 3).double(), Spread(1.0, 0.0))
    torch.testing.assert_close(statistics.cpu().double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("fusion", [pytest.param(fusion, marks=kernel) for fusion in FUSIONS])
@pytest.mark.parametrize("opened", [True, False, None])
def test_a_layer_moves_its_statistics(fusion: Fusion, opened: bool | None) -> None:
    """As a layer on the CPU does, in plain operations."""
    from fedfa.layers import ffa_triton

    plain, mine = (FFA(6, momentum=0.9, fusion=fusion).to(device) for device in ("cpu", DEVICE))
    for one in (plain, mine):
        one.set_between(*normal(2, 6, seed=3).abs().float().to(one.mean.device))
    gate = None if opened is None else torch.tensor(opened)
    noise = normal(2, 4, 6, seed=1).float()
    plain.drawn = Drawn(True if gate is None else gate, noise)
    x = normal(4, 6, 8, 8).float().requires_grad_()
    y = x.detach().to(DEVICE).requires_grad_()
    for _ in range(2):
        wanted = plain(x)
        out = ffa_triton.layer(mine, y, noise.to(DEVICE), None if gate is None else gate.to(DEVICE))
    wanted.square().sum().backward()
    out.square().sum().backward()
    assert x.grad is not None and y.grad is not None
    torch.testing.assert_close(out.cpu(), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(y.grad.cpu(), x.grad, atol=1e-4, rtol=1e-4)
    for found, expected in zip(mine.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(found.cpu(), expected)


@pytest.mark.parametrize("opened", [pytest.param(opened, marks=kernel) for opened in (True, False)])
def test_a_gradient_of_the_gradient(opened: bool) -> None:
    x, noise = normal(3, 2, 3, 3).float().to(DEVICE), normal(2, 3, 2, seed=1).float().to(DEVICE)
    gate, found = torch.tensor(opened, device=DEVICE), []
    for function in (fused, augment_reference):
        y = x.clone().requires_grad_()
        out = function(y, noise, Spread(2.0, 0.0), gate, 1e-6, False)[0]
        (first,) = torch.autograd.grad(out.square().sum(), y, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), y)[0])
    torch.testing.assert_close(found[0], found[1], atol=1e-3, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
class TestCUDA:
    def test_augment_takes_the_kernels(self) -> None:
        x = normal(4, 6, 8, 8).float().cuda().requires_grad_()
        noise = normal(2, 4, 6, seed=1).float().cuda()
        for y in (x, x.to(memory_format=torch.channels_last), x.bfloat16()):
            out, _ = augment(y, noise, Spread(2.0, 0.0))
            assert "_Fused" in type(out.grad_fn).__name__
        for y in (x[:, :, ::2], x.double()):
            out, _ = augment(y, noise, Spread(2.0, 0.0))
            assert "_Fused" not in type(out.grad_fn).__name__

    @pytest.mark.parametrize("format", FORMATS)
    def test_captured(self, format: str) -> None:
        x, noise = normal(8, 6, 14, 14).float().cuda(), normal(2, 8, 6, seed=1).float().cuda()
        y = x.to(memory_format=FORMATS[format]).requires_grad_()
        gate = torch.tensor(True, device="cuda")

        def step() -> tuple[Tensor, Tensor]:
            out, _ = fused(y, noise, Spread(2.0, 0.0), gate)
            return out.detach(), torch.autograd.grad(out.square().sum(), y)[0]  # no graph of another stream lives on

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        for opened, seed in ((True, 5), (False, 6), (True, 7)):
            gate.fill_(opened)
            noise.copy_(normal(2, 8, 6, seed=seed))
            graph.replay()
            for mine, eager in zip(captured, step(), strict=True):
                assert torch.equal(mine, eager)
            assert torch.equal(captured[0], y) is not opened


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="the kernels run as they are")
def test_interpreted() -> None:
    play_interpreted(__file__)
