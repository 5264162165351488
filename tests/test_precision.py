"""Precision and the choice of an engine, as far as a CPU shows them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fedfa import Run, UserError
from fedfa.nets import LeNet, ResNet18
from fedfa.precision import Precision, arithmetic, cast

cuda = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=cuda)]


def test_arithmetic_is_put_back() -> None:
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    for precision, allowed in (("float32", False), ("tf32", True), ("bf16", True)):
        with arithmetic(precision):  # type: ignore[arg-type]  # text where one of some words is asked for
            assert torch.backends.cudnn.allow_tf32 is torch.backends.cuda.matmul.allow_tf32 is allowed
    assert (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32) == before


def test_bfloat16_rounds_the_forward_and_nothing_else() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4))
    x = torch.randn(8, 64)
    exact = plain(x)
    mixed = cast(copy.deepcopy(plain), "bf16", torch.device("cpu"))
    rounded = mixed(x)
    assert rounded.dtype == torch.float32 and not torch.equal(rounded, exact)
    torch.testing.assert_close(rounded, exact, atol=0.05, rtol=0.05)
    rounded.sum().backward()
    assert all(p.dtype == torch.float32 and p.grad is not None for p in mixed.parameters())
    assert list(mixed.state_dict()) == list(plain.state_dict())
    assert cast(plain, "tf32", torch.device("cpu")) is plain and torch.equal(plain(x), exact)


class Autocast(nn.Module):
    """torch's own way."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            output: Tensor = self.model(x)
        return output.float()


def wanted(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad


@pytest.mark.parametrize("device", DEVICES)
def test_weights_rounded_together_are_what_autocast_makes_of_them(device: str) -> None:
    """To the bit, gradients and a gradient of the gradient too; and afterwards the weights are in their places."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 4, 2), nn.Flatten(), nn.Linear(196, 8), nn.LayerNorm(8)
    ).to(device)
    model.append(nn.Linear(8, 8, device=device))
    model[-1].weight.requires_grad_(False)
    found = []
    for way in (cast(copy.deepcopy(model), "bf16", torch.device(device)), Autocast(model)):
        x = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
        own = list(filter(wanted, way.parameters()))
        out = way(x)
        assert all(one is other for one, other in zip(own, filter(wanted, way.parameters()), strict=True))
        first = torch.autograd.grad(out.square().mean(), own, retain_graph=True)
        (slope,) = torch.autograd.grad(out.square().mean(), x, create_graph=True)
        second = torch.autograd.grad(slope.square().sum(), own, allow_unused=True)
        found.append((out, *first, slope, *second))
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


@pytest.mark.parametrize("algorithm", ["fedavg", "fedfa", "fedmix", "fedsam", "fedrobust", "scaffold"])
def test_a_run_with_weights_rounded_together_is_one_with_autocasts(
    algorithm: str,
    play: Callable[..., Run],
    assert_same: Callable[[Run, Run], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {"precision": "bf16", "algorithm": algorithm, "device": "cpu"}
    ours = play(**settings)
    monkeypatch.setattr("fedfa.precision._rounded_weights", lambda model: nullcontext())
    assert_same(ours, play("torchs", **settings))


def test_weights_are_in_their_places_after_a_forward_that_fails() -> None:
    model = cast(nn.Sequential(nn.Linear(4, 2)), "bf16", torch.device("cpu"))
    before = list(model.parameters())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(1, 5))
    assert all(one is other for one, other in zip(model.parameters(), before, strict=True))


def test_a_copy_of_a_mixed_model_is_a_model_of_its_own() -> None:
    model = cast(nn.Sequential(nn.Linear(4, 2)), "bf16", torch.device("cpu"))
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    x = torch.ones(1, 4)
    assert other(x).abs().sum() == 0 and model(x).abs().sum() > 0


def test_a_run_in_bfloat16(play: Callable[..., Run]) -> None:
    rough, exact = play(precision="bf16"), play(precision="float32")
    assert rough.folder != exact.folder
    first, second = rough.metrics[-1]["loss"], exact.metrics[-1]["loss"]
    assert first != second and first == pytest.approx(second, rel=0.1)


def test_capturing_needs_a_gpu(play: Callable[..., Run], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="engine=captured needs a CUDA device, not cpu: say engine=sequential"):
        play(engine="captured")
    assert not list(tmp_path.iterdir())


def test_auto_is_sequential_on_a_cpu_and_lanes_change_no_name(play: Callable[..., Run]) -> None:
    auto = play(engine="auto")
    assert play(engine="auto", lanes=3).folder == auto.folder
    plain = play(engine="sequential")
    assert [line["test"] for line in plain.metrics] == [line["test"] for line in auto.metrics]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("network", "precision", "last"),
    [(LeNet, "tf32", False), (ResNet18, "tf32", True), (ResNet18, "float32", False), (LeNet, "bf16", True)],
)
def test_the_memory_format_on_a_gpu(network: type, precision: Precision, last: bool) -> None:
    model = cast(network(10), precision, torch.device("cuda"))
    kernels = [module.weight for module in model.modules() if isinstance(module, nn.Conv2d)]
    either = [w for w in kernels if w.shape[1] > 1 and w[0, 0].numel() > 1]  # others lie in both formats at once
    assert either and all(weight.is_contiguous(memory_format=torch.channels_last) == last for weight in either)
