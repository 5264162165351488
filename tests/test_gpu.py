"""What needs a CUDA device: capture, compilation, precision, and the engine there."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fedfa
from fedfa.layers.ffa import FFA, Drawn, Spread, augment, augment_reference
from fedfa.nets import AlexNet

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(8, 6, 14, 14), (4, 3, 5, 6, 7), (4, 16, 30), (1, 3, 4, 4), (4, 3, 1, 1)])
@pytest.mark.parametrize("open_gate", [True, False])
def test_equals_the_cpu(shape: tuple[int, ...], open_gate: bool) -> None:
    x, noise, g = normal(*shape), normal(2, *shape[:2], seed=1), normal(*shape, seed=2)
    outs, grads = [], []
    for device, function in (("cpu", augment_reference), ("cuda", augment), ("cuda", augment_reference)):
        y = x.clone().to(device).requires_grad_()
        out, _ = function(y, noise.to(device), Spread(2.0, 0.0), torch.tensor(open_gate, device=device))
        out.backward(g.to(device))
        outs.append(out.detach().cpu())
        grads.append(y.grad.cpu())  # type: ignore[union-attr]
    for out, grad in zip(outs[1:], grads[1:], strict=True):
        torch.testing.assert_close(out, outs[0], atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(grad, grads[0], atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("fusion", ["adaptive", "total", "random"])
def test_a_captured_layer_draws_anew_and_sees_a_new_gamma(fusion: str) -> None:
    layer = FFA(4, p=0.5, fusion=fusion).cuda()  # type: ignore[arg-type]
    x = normal(8, 4, 6, 6).cuda()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            layer(x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x)
    layer.reset_statistics()
    seen = []
    for _ in range(200):
        graph.replay()
        seen.append((out - x).abs().max().item())
    active = sum(change > 0 for change in seen)
    assert 60 < active < 140, "the gate is drawn at every replay"
    assert layer.batches.item() == active
    assert len(set(seen)) == active + 1, "and so is the noise"
    if fusion != "random":
        wide = 1e6
        layer.gamma_mean.fill_(wide)
        layer.gamma_std.fill_(wide)
        for _ in range(20):
            graph.replay()
            if (out - x).abs().max() > 0:
                break
        assert (out - x).abs().max() > 10 * max(seen)


def test_a_captured_training_step_equals_an_eager_one() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), FFA(8, p=1.0), nn.Flatten(), nn.Linear(288, 4)
    )
    model = model.cuda()
    eager = copy.deepcopy(model)
    x, y = normal(4, 3, 8, 8).cuda(), torch.tensor([0, 1, 2, 3]).cuda()
    drawn = Drawn(torch.tensor(True).cuda(), normal(2, 4, 8, seed=3).cuda())

    def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
        net[3].drawn = drawn  # type: ignore[index]
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    start = copy.deepcopy(model.state_dict())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(model, optimizer)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(model, optimizer)
    model.load_state_dict(start)
    for _ in range(5):
        graph.replay()
    other = torch.optim.SGD(eager.parameters(), 0.1)
    for _ in range(5):
        step(eager, other)
    for name, tensor in eager.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("channels_last", [False, True])
def test_autocast_in_bfloat16(channels_last: bool) -> None:
    torch.manual_seed(0)
    model = AlexNet(10, augment=lambda c: FFA(c, p=1.0)).cuda()
    x = torch.rand(8, 3, 128, 128, device="cuda")
    if channels_last:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(x).float().square().mean()
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())  # type: ignore[arg-type]
    layer = next(m for m in model.modules() if isinstance(m, FFA))
    assert layer.mean.dtype == torch.float32 and layer.batches == 1


def test_compiles_whole() -> None:
    layer = FFA(8, p=1.0).cuda()
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True)
    x = normal(8, 8, 16, 16).cuda()
    drawn = Drawn(torch.tensor(True).cuda(), normal(2, 8, 8, seed=1).cuda())
    outs = []
    for module in (layer, compiled):
        module.drawn = drawn
        y = x.clone().requires_grad_()
        out = module(y)
        out.square().sum().backward()
        outs.append((out.detach(), y.grad))
    torch.testing.assert_close(outs[0], outs[1], atol=1e-4, rtol=1e-4)


def test_the_sequential_engine_repeats_itself(tmp_path: Path) -> None:
    runs = [
        fedfa.run("phantom-sites", root=tmp_path / str(i), device="cuda", algorithm="fedfa-total", rounds=3)
        for i in range(2)
    ]
    first, second = (run.metrics[-1]["test"]["mean"] for run in runs)
    assert abs(first - second) < 0.05
    assert runs[0].provenance["device"] == "cuda"


def test_the_same_batches_as_on_the_cpu(tmp_path: Path) -> None:
    """With nothing random but the order of the data, which is laid out on the host, devices agree to rounding."""
    losses = [
        fedfa.run("digit-sites", root=tmp_path / device, device=device, algorithm="fedavg", rounds=3).metrics[-1][
            "loss"
        ]
        for device in ("cpu", "cuda")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)
