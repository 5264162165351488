"""Convolutions whose gradient has a fast gradient, against torch's own and against differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

from fedfa.layers import second_order
from fedfa.layers.second_order import TwiceDifferentiable
from fedfa.nets import AlexNet, LeNet, UNet

cuda = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=cuda)]


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take our way on the CPU too."""
    monkeypatch.setattr(second_order, "_pays", lambda x: True)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x, w, b: F.conv2d(x, w, b, 2, 1), [(2, 2, 4, 5), (3, 2, 3, 3), (3,)]),
        (F.conv2d, [(2, 2, 4, 4), (2, 2, 3, 3)]),
        (lambda x, w, b: F.conv2d(x, w, b, (1, 2), (2, 0), (1, 2), groups=2), [(1, 2, 3, 7), (2, 1, 3, 2), (2,)]),
        (lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1, 1, groups=2), [(1, 2, 2, 3), (2, 1, 3, 3), (2,)]),
        (F.conv2d, [(2, 4, 5), (2, 2, 3, 3)]),  # one image alone, which is left to torch
        (lambda x, w: F.conv2d(x, w, padding="same"), [(1, 2, 4, 5), (3, 2, 3, 3)]),  # and so is this
    ],
)
def test_both_gradients_are_right(function: Callable[..., Tensor], shapes: list[tuple[int, ...]]) -> None:
    torch.manual_seed(0)

    def ours(*given: Tensor) -> Tensor:
        with TwiceDifferentiable():
            return function(*given)

    given = tuple(normal(*shape) for shape in shapes)
    torch.testing.assert_close(ours(*given), function(*given))
    assert gradcheck(ours, given)
    assert gradgradcheck(ours, given, fast_mode=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("network", "shape"),
    [
        (lambda: LeNet(5), (4, 3, 28, 28)),
        (lambda: AlexNet(5, width=0.25), (4, 3, 80, 80)),
        (lambda: UNet(1), (2, 3, 32, 32)),
    ],
)
def test_a_networks_gradient_of_its_slope(network: Any, shape: tuple[int, ...], device: str) -> None:
    """What FedMix takes: the gradient, for the weights, of a loss and of its slope along an image."""
    torch.manual_seed(0)
    model: nn.Module = network().double().to(device)
    x, along = torch.randn(2, *shape, dtype=torch.float64, device=device)
    found = {}
    for ours in (True, False):
        own = x.clone().requires_grad_()
        if ours:
            with TwiceDifferentiable() as convolutions:
                loss = model(own).square().mean()
            slope = convolutions.slope(loss, own)
        else:
            loss = model(own).square().mean()
            (slope,) = torch.autograd.grad(loss, own, create_graph=True)
        found[ours] = torch.autograd.grad(loss + (slope * along).sum(), list(model.parameters()))
    torch.testing.assert_close(found[True], found[False], rtol=1e-9, atol=1e-12)


def test_a_slope_takes_no_gradient_of_weights() -> None:
    taken: list[list[bool]] = []

    class Listen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.ops.aten.convolution_backward.default:
                taken.append(list(args[-1]))
            return function(*args, **(kwargs or {}))

    x, weight = normal(2, 4, 7, 6), normal(6, 4, 3, 3)
    with TwiceDifferentiable() as convolutions:
        out = F.conv2d(x, weight)
    with Listen():  # type: ignore[no-untyped-call]  # torch's
        convolutions.slope(out.square().sum(), x)
    assert taken == [[True, False, False]]


def test_autocast_is_heeded() -> None:
    """Autocast casts for torch's own functions; ours casts by itself."""
    torch.manual_seed(0)
    conv, x = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = conv(x)
        with TwiceDifferentiable():
            out = conv(x)
    assert out.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(out, wanted)
    out.float().sum().backward()
    assert conv.weight.grad is not None and conv.weight.grad.dtype == torch.float32


def test_on_the_cpu_torchs_own_way_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    x, weight = normal(1, 2, 4, 4), normal(2, 2, 3, 3)
    with TwiceDifferentiable():
        assert type(F.conv2d(x, weight).grad_fn).__name__ == "ConvolutionBackward0"
