"""Pooling and convolution with ways of their own in channels_last on a GPU: torch's values, torch's gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedfa.layers.convolution import Conv2d
from fedfa.layers.pooling import MaxPool2d

cuda = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=cuda)]
POOLS = [
    ((32, 64, 63, 63), 3, 2),
    ((3, 70, 8, 9), 2, 2),
    ((2, 3, 13, 11), 3, 1),
    ((2, 5, 9, 10), 3, 4),
    ((1, 1, 7, 7), 3, 2),
]


def both(ours: nn.Module, torchs: nn.Module, x: Tensor) -> None:
    """Same outputs, same gradients of inputs and parameters."""
    found = []
    for layer in (ours, torchs):
        own = x.clone(memory_format=torch.preserve_format).requires_grad_()
        out = layer(own)
        slopes = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
        grads = torch.autograd.grad(out, [own, *layer.parameters()], slopes)
        found.append((out, *grads))
    loose = 2e-2 if x.dtype == torch.bfloat16 else 1e-4
    for one, other in zip(*found, strict=True):
        scale = float(other.detach().abs().max())
        torch.testing.assert_close(one, other, atol=loose * max(scale, 1.0), rtol=0.0)
    assert torch.equal(found[0][0], found[1][0]) or not isinstance(ours, MaxPool2d)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "size", "stride"), POOLS)
def test_max_pooling(shape: tuple[int, ...], size: int, stride: int, dtype: torch.dtype, device: str) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(3).round()  # many are equal
    x = x.to(device, dtype).to(memory_format=torch.channels_last)
    both(MaxPool2d(size, stride), nn.MaxPool2d(size, stride), x)


@pytest.mark.parametrize("device", DEVICES)
def test_max_pooling_keeps_nan(device: str) -> None:
    x = torch.randn(2, 4, 8, 8).to(device).to(memory_format=torch.channels_last)
    x[0, 1, 3, 3] = torch.nan
    torch.testing.assert_close(MaxPool2d(2)(x), nn.MaxPool2d(2)(x), equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convolution(dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    ours, torchs = Conv2d(6, 16, 3, 2, 1), nn.Conv2d(6, 16, 3, 2, 1)
    torchs.load_state_dict(ours.state_dict())
    for layer in (ours, torchs):
        layer.to(device, dtype).to(memory_format=torch.channels_last)
    both(ours, torchs, torch.randn(4, 6, 15, 15).to(device, dtype).to(memory_format=torch.channels_last))


@pytest.mark.parametrize("device", DEVICES)
def test_a_gradient_of_the_gradient(device: str) -> None:
    torch.manual_seed(0)
    kinds = ((Conv2d, MaxPool2d), (nn.Conv2d, nn.MaxPool2d))
    networks = [
        nn.Sequential(conv(2, 4, 3), nn.Tanh(), pool(2), nn.Flatten(), nn.Linear(36, 1)) for conv, pool in kinds
    ]
    networks[1].load_state_dict(networks[0].state_dict())
    found = []
    for network in networks:
        network.to(device).to(memory_format=torch.channels_last)
        x = torch.linspace(-1, 1, 2 * 2 * 64).view(2, 2, 8, 8).to(device).to(memory_format=torch.channels_last)
        x.requires_grad_()
        (slope,) = torch.autograd.grad(network(x).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), list(network.parameters())))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-2)
