"""Layers with ways of their own in channels_last on a GPU: torch's values, torch's gradients.

Without a GPU their kernels run in Triton's interpreter, where Triton is: `test_interpreted` plays this file in a
process of its own, in which a CPU passes for a GPU.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedfa.data.federation import ClientIndex, Federation
from fedfa.layers import second_order
from fedfa.layers.convolution import convolve
from fedfa.layers.normalisation import normalised
from fedfa.layers.pooling import AdaptiveAvgPool2d, MaxPool2d
from fedfa.layers.second_order import TwiceDifferentiable
from fedfa.nets import AlexNet, ResNet18, UNet
from fedfa.precision import arithmetic
from fedfa.state import frozen_statistics
from interpreted import play_interpreted

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
cuda = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=cuda)]
TYPES = [torch.float32, torch.bfloat16]
POOLS = [
    ((32, 64, 63, 63), 3, 2),
    ((3, 70, 8, 9), 2, 2),
    ((2, 3, 13, 11), 3, 1),
    ((2, 5, 9, 10), 3, 4),
    ((1, 1, 7, 7), 3, 2),
]
if INTERPRETED:
    del POOLS[0]
FEATURES = [(32, 64, 31, 31), (4, 384, 7, 7), (3, 70, 8, 9), (2, 3, 13, 11), (2, 5, 1, 3)]
if INTERPRETED:
    FEATURES[0] = (8, 64, 9, 9)
FOLDS = [(3, 64, 11, 4, 2, (63, 64)), (1, 5, 7, 2, 3, (20, 31)), (3, 8, 4, 4, 0, (16, 16)), (2, 4, 5, 3, 1, (12, 17))]


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No tf32, so that float32 can be compared; and in the interpreter, a CPU that passes for a GPU."""
    for module in ("data.federation", "layers.convolution", "layers.normalisation", "layers.pooling"):
        if INTERPRETED:
            monkeypatch.setattr(f"fedfa.{module}.kernels", lambda name, device: importlib.import_module(name))
    with arithmetic("float32"):
        yield


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def last(x: Tensor, device: str, dtype: torch.dtype) -> Tensor:
    return x.to(device, dtype).to(memory_format=torch.channels_last)


def close(one: Tensor, other: Tensor, dtype: torch.dtype) -> None:
    loose = 2e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(one, other, atol=loose * max(float(other.detach().abs().max()), 1.0), rtol=0.0)


def slopes(out: Tensor) -> Tensor:
    return normal(*out.shape, seed=1).to(out)


def both(ours: nn.Module, torchs: nn.Module, x: Tensor) -> None:
    """Same outputs, same gradients of inputs and parameters."""
    found = []
    for layer in (ours, torchs):
        own = x.clone(memory_format=torch.preserve_format).requires_grad_()
        out = layer(own)
        found.append((out, *torch.autograd.grad(out, [own, *layer.parameters()], slopes(out))))
    for one, other in zip(*found, strict=True):
        close(one, other, x.dtype)
    assert torch.equal(found[0][0], found[1][0]) or not isinstance(ours, MaxPool2d)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("shape", "size", "stride"), POOLS)
def test_max_pooling(shape: tuple[int, ...], size: int, stride: int, dtype: torch.dtype, device: str) -> None:
    x = normal(*shape).mul(3).round()  # many are equal
    both(MaxPool2d(size, stride), nn.MaxPool2d(size, stride), last(x, device, dtype))


@pytest.mark.parametrize("device", DEVICES)
def test_max_pooling_keeps_nan(device: str) -> None:
    x = last(normal(2, 4, 8, 8), device, torch.float32)
    x[0, 1, 3, 3] = torch.nan
    torch.testing.assert_close(MaxPool2d(2)(x), nn.MaxPool2d(2)(x), equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sides", [(7, 7), (6, 6), (7, 9), (13, 13)])
def test_average_pooling(sides: tuple[int, int], device: str) -> None:
    x = last(normal(3, 8, *sides), device, torch.float32)
    both(AdaptiveAvgPool2d(6), nn.AdaptiveAvgPool2d(6), x)
    both(AdaptiveAvgPool2d((6, None)), nn.AdaptiveAvgPool2d((6, None)), x)


def layers(inputs: int, channels: int, device: str, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    own = nn.Sequential(nn.Conv2d(inputs, channels, 3, padding=1, bias=bias), nn.BatchNorm2d(channels), nn.ReLU())
    with torch.no_grad():
        for tensor in (own[1].weight, own[1].bias, own[1].running_mean):
            tensor.copy_(normal(channels, seed=2))  # some weights are negative
    return own.to(device).to(memory_format=torch.channels_last)


def trained(network: Any, layers: nn.Sequential, x: Tensor) -> list[Tensor]:
    """Output, gradients where they are taken, and running statistics after a step."""
    own = x.clone(memory_format=torch.preserve_format).requires_grad_()
    out = network(own)
    taken = [own, *layers.parameters()] if out.requires_grad else []
    found = torch.autograd.grad(out, taken, slopes(out)) if taken else ()
    return [out, *found, *layers.buffers()]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", FEATURES)
@pytest.mark.parametrize("relu", [True, False])
def test_normalisation(relu: bool, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """Where values are rounded to bfloat16 on the way some change their side of the ReLU: ours are no further from
    float64 than torch's own. (The interpreter cuts bits off where a GPU rounds.)"""
    channels, x = shape[1], last(normal(shape[0], 6, *shape[2:]), device, torch.float32)
    ours, torchs = layers(6, channels, device), layers(6, channels, device)
    if not relu:
        torchs[2] = nn.Identity()
    exact = copy.deepcopy(torchs).double()
    for training in (True, False):
        for own in (ours, torchs, exact):
            own.train(training)
        with torch.autocast(device, dtype, enabled=dtype == torch.bfloat16), torch.set_grad_enabled(training):
            found = trained(lambda own: normalised(*ours[:2], own, ours[2] if relu else None), ours, x)
            peers = trained(torchs, torchs, x)
        with torch.set_grad_enabled(training):
            wanted = trained(exact, exact, x.double())
        for one, peer, right in zip(found, peers, wanted, strict=True):
            far = [float((tensor - right).detach().double().norm()) for tensor in (one, peer)]
            assert far[0] <= (4 if INTERPRETED else 1.5) * far[1] + 1e-5 * max(
                float(right.detach().double().norm()), 1.0
            )
            assert one.dtype == peer.dtype and one.stride() == peer.stride()
    assert found[-1] == wanted[-1] == 1  # batches


@pytest.mark.parametrize("device", DEVICES)
def test_normalisation_far_from_zero_and_of_a_constant(device: str) -> None:
    """A mean of a thousand standard deviations, as float32 can hold it, and no deviation at all."""
    ours = layers(4, 4, device, bias=False)
    nn.init.dirac_(ours[0].weight)
    x = normal(8, 4, 9, 9)
    x[:, 0] += 1000
    x[:, 1] = 3
    torchs, x = copy.deepcopy(ours).double(), last(x, device, torch.float32)
    peer = copy.deepcopy(ours)
    found = trained(lambda own: normalised(*ours[:2], own, ours[2]), ours, x)
    peers, wanted = trained(peer, peer, x), trained(torchs, torchs, x.double())
    for place in (0, *range(3, len(found))):  # all but gradients of the features and of the convolution
        far = [(tensor[place].double() - wanted[place]).detach().abs().max() for tensor in (found, peers)]
        assert far[0] <= 2e-3 + 1.5 * far[1]  # as torch's own is, which differs with the number of threads


@pytest.mark.parametrize("device", DEVICES)
def test_frozen_statistics_stay_where_they_are(device: str) -> None:
    ours = layers(6, 8, device)
    before = [tensor.clone() for tensor in ours.buffers()]
    with frozen_statistics(ours):
        normalised(*ours[:2], last(normal(4, 6, 9, 9), device, torch.float32), ours[2])
    for tensor, held in zip(ours.buffers(), before, strict=True):
        assert torch.equal(tensor, held)


@pytest.mark.parametrize("device", DEVICES)
def test_a_hook_is_heard(device: str) -> None:
    ours, heard = layers(6, 8, device), []
    ours[1].register_forward_hook(lambda _, __, out: heard.append(out.shape))
    normalised(*ours[:2], last(normal(4, 6, 9, 9), device, torch.float32), ours[2])
    assert heard == [(4, 8, 9, 9)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("inputs", "outputs", "size", "stride", "padding", "sides"), FOLDS)
def test_folded_convolution(
    inputs: int, outputs: int, size: int, stride: int, padding: int, sides: Any, dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(inputs, outputs, size, stride, padding).to(device).to(memory_format=torch.channels_last)
    x = normal(4, inputs, *sides).to(device)
    with torch.autocast(device, dtype, enabled=dtype == torch.bfloat16):
        found, wanted = convolve(conv, x), conv._conv_forward(x, conv.weight, None)
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    close(found, wanted, dtype)
    for one, other in zip(
        *(torch.autograd.grad(out, conv.weight, slopes(out)) for out in (found, wanted)), strict=True
    ):
        assert one.stride() == conv.weight.stride() or inputs == 1  # where formats are alike
        close(one, other, dtype)


@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_is_its_bytes_over_255(device: str) -> None:
    images = torch.arange(256, dtype=torch.uint8).repeat(9).view(3, 3, 16, 16)
    none = torch.arange(0)
    federation = Federation(
        "bytes",
        "classification",
        images,
        torch.arange(3),
        tuple("abc"),
        {"a": ClientIndex(torch.arange(3), none, none)},
    ).to(device)
    index = torch.tensor([2, 0])
    x, y = federation.batch(index.to(device))
    assert torch.equal(x.cpu(), images[index].float() / 255)
    assert y.tolist() == [2, 0]
    assert len(federation.batch(none.to(device))[0]) == 0


def twice(network: Any, x: Tensor, parameters: list[Tensor]) -> list[Tensor]:
    """Gradients of a gradient: a product with all first gradients of a weighted sum of the outputs, differentiated with
    respect to the weights, the input and the parameters."""
    own = x.clone(memory_format=torch.preserve_format).requires_grad_()
    out = network(own)
    weights = slopes(out).requires_grad_()
    first = torch.autograd.grad(out, [own, *parameters], weights, create_graph=True)
    product = sum((slope * normal(*slope.shape, seed=3 + place).to(slope)).sum() for place, slope in enumerate(first))
    return [*first, *torch.autograd.grad(product, [weights, own, *parameters], materialize_grads=True)]


def near(found: list[Tensor], wanted: list[Tensor], loose: float = 1e-4) -> None:
    for one, right in zip(found, wanted, strict=True):
        far = float((one.double() - right).detach().norm())
        assert far <= loose * max(float(right.detach().norm()), 1.0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", FEATURES)
@pytest.mark.parametrize("relu", [True, False])
def test_the_gradient_of_normalisations_gradient(relu: bool, shape: tuple[int, ...], device: str) -> None:
    ours = layers(shape[1], shape[1], device, bias=False)
    nn.init.dirac_(ours[0].weight)
    x = last(normal(*shape), device, torch.float32)
    ours[0].weight.requires_grad_(False)
    exact = copy.deepcopy(ours).double()
    wanted = twice(exact if relu else exact[:2], x.double(), list(exact[1].parameters()))
    found = twice(lambda own: normalised(*ours[:2], own, ours[2] if relu else None), x, list(ours[1].parameters()))
    near(found, wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("shape", "size", "stride"), POOLS)
def test_the_gradient_of_poolings_gradient(shape: tuple[int, ...], size: int, stride: int, device: str) -> None:
    x = last(normal(*shape), device, torch.float32)
    ours, torchs = MaxPool2d(size, stride), nn.MaxPool2d(size, stride)
    wanted = twice(lambda own: torchs(own).square(), x.double(), [])
    near(twice(lambda own: ours(own).square(), x, []), wanted, 1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("inputs", "outputs", "size", "stride", "padding", "sides"), FOLDS)
def test_the_gradient_of_a_folded_convolutions_gradient(
    inputs: int, outputs: int, size: int, stride: int, padding: int, sides: Any, device: str
) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(inputs, outputs, size, stride, padding, bias=False)
    conv = conv.to(device).to(memory_format=torch.channels_last)
    exact, x = copy.deepcopy(conv).double(), normal(4, inputs, *sides).to(device)
    wanted = twice(lambda own: exact(own).square(), x.double(), [exact.weight])
    near(twice(lambda own: convolve(conv, own).square(), x, [conv.weight]), wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("fast", [False, True])
def test_a_gradient_of_an_alexnets_gradient(
    fast: bool, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What FedMix takes, through all of the layers. In bfloat16 it points about where the right one does, as nearly as
    by torch's own operations, which are taken in torch's own format. (The interpreter cuts bits off where a GPU
    rounds.)"""
    monkeypatch.setattr(second_order, "_pays", lambda x: fast and x.dtype != torch.float64)
    torch.manual_seed(1)
    plain = AlexNet(5, width=0.25).to(device)
    ours = copy.deepcopy(plain).to(memory_format=torch.channels_last)
    exact = copy.deepcopy(plain).double()
    x, along = (normal(6, 3, 80, 80, seed=seed).to(device) for seed in (1, 2))

    def second(network: nn.Module, own: Tensor) -> Tensor:
        own.requires_grad_()
        convolutions = TwiceDifferentiable()
        with torch.autocast(device, dtype, enabled=dtype == torch.bfloat16 and network is not exact), convolutions:
            loss = network(own).logsumexp(1).sum()
        slope = convolutions.slope(loss, own)
        found = torch.autograd.grad((slope * along).sum(), list(network.parameters()), materialize_grads=True)
        return torch.cat([tensor.flatten().double() for tensor in found])

    wanted = second(exact, x.double())
    near = {network: float(torch.cosine_similarity(second(network, x.clone()), wanted, 0)) for network in (ours, plain)}
    if dtype == torch.float32:
        assert near[ours] > 0.9999
    else:
        assert near[ours] > (0.5 if INTERPRETED else near[plain] - 0.1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("network", "shape"),
    [
        (AlexNet, (4, 3, 80, 80)),
        (lambda classes: ResNet18(classes, stem="imagenet"), (4, 3, 32, 32)),
        (UNet, (4, 3, 32, 32)),
    ],
)
def test_networks_are_as_they_are_in_torch(network: Any, shape: tuple[int, ...], device: str) -> None:
    """A step of each in channels_last against one in the ordinary format, in float64."""
    torch.manual_seed(1)
    ours = network(5).to(device).to(memory_format=torch.channels_last)
    plain = copy.deepcopy(ours).double().to(memory_format=torch.contiguous_format)
    x = normal(*shape, seed=1).to(device)
    out, wanted = ours(x), plain(x.double())
    close(out, wanted.float(), torch.float32)
    out.square().mean().backward()
    wanted.square().mean().backward()
    for (name, one), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        scale = max(float(other.grad.abs().max()), 1e-3)
        torch.testing.assert_close(
            one.grad.double(), other.grad, atol=2e-3 * scale, rtol=0.0, msg=lambda m, n=name: n + m
        )
    for one, other in zip(ours.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(one.double(), other.double(), atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="the kernels run as they are")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_interpreted() -> None:
    play_interpreted(__file__)
