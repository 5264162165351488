"""What needs a CUDA device: capture, compilation, precision, and the engine there."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fedfa
from fedfa.augmentation import Augmentation, CutMix, ManifoldMixup, MixStyle, Mixup, MoEx
from fedfa.engines.client import Broadcast, Local
from fedfa.engines.sequential import Sequential
from fedfa.layers.ffa import FFA, Drawn, Spread, augment, augment_reference
from fedfa.layers.mixing import interpolate, symmetric_beta
from fedfa.layers.mixstyle import mix_style
from fedfa.layers.moex import exchange_moments
from fedfa.layers.randomness import Draws
from fedfa.memory import Memory
from fedfa.nets import AlexNet, LeNet
from fedfa.server import Plan, collect_shares, first_state
from fedfa.streams import Streams
from fedfa.task import Batch, Classification

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
        grads.append(y.grad.cpu())  # type: ignore[union-attr]  # known to be there
    for out, grad in zip(outs[1:], grads[1:], strict=True):
        torch.testing.assert_close(out, outs[0], atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(grad, grads[0], atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("fusion", ["adaptive", "total", "random"])
def test_a_captured_layer_draws_anew_and_sees_a_new_gamma(fusion: str) -> None:
    layer = FFA(4, p=0.5, fusion=fusion).cuda()  # type: ignore[arg-type]  # text where one of some words is asked for
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
        net[3].drawn = drawn  # type: ignore[index]  # a child module
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
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())  # type: ignore[arg-type]  # a word of a few
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


MIXING: dict[str, Augmentation] = {
    "mixup": Mixup(),
    "cutmix": CutMix(),
    "manifold-mixup": ManifoldMixup(),
    "mixstyle": MixStyle(),
    "moex": MoEx(lam=0.75),
}


def expected(name: str, x: Tensor, drawn: list[tuple[Tensor, ...]]) -> list[Tensor]:
    """What each layer makes of `x`, on the CPU, from draws that were made on the GPU."""
    draws = [[tensor.cpu() for tensor in own] for own in drawn]
    if name == "manifold-mixup":
        return [interpolate(x, partner, share) if here else x for here, share, partner in draws]
    if name == "mixstyle":
        return [mix_style(x, partner, share) for share, partner in draws]
    return [exchange_moments(x, partner) if gate else x for gate, partner in draws]


@pytest.mark.parametrize("name", MIXING)
def test_a_captured_augmentation_draws_anew_and_mixes_labels_alike(name: str) -> None:
    augmentation, batch = MIXING[name], 8
    made = [augmentation.layer(4, stage) for stage in (1, 2)]
    layers = nn.ModuleList([layer for layer in made if layer is not None])
    draws, streams = Draws(layers), Streams(0, 1, "a", "cuda")
    x = normal(batch, 4, 6, 6)
    given = Batch(x.cuda(), torch.arange(batch).cuda())

    def step() -> tuple[Batch, list[Tensor]]:
        draws.sample(batch, streams)
        return augmentation.mix(given, draws, streams), [layer(given.x) for layer in layers]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(streams(name))
    with torch.cuda.graph(graph):
        mixed, outs = step()
    changed, seen = 0, set()
    for _ in range(60):
        graph.replay()
        drawn = [layer.drawn for layer in layers]
        for out, wanted in zip(outs, expected(name, x, drawn), strict=True):
            torch.testing.assert_close(out.cpu(), wanted, atol=1e-4, rtol=1e-4)
        places = [mixed.x, *outs]
        changed += any(not torch.equal(place, given.x) for place in places)
        seen.add(tuple(torch.stack(places).square().sum((2, 3, 4)).flatten().tolist()))
        if mixed.partner is None or mixed.share is None:
            assert name == "mixstyle"
            continue
        partner, share = mixed.partner.cpu(), mixed.share.cpu()
        assert sorted(partner.tolist()) == list(range(batch))
        if name == "mixup":
            torch.testing.assert_close(mixed.x.cpu(), interpolate(x, partner, share))
        elif name == "cutmix":
            own, other = (mixed.x.cpu() == x), (mixed.x.cpu() == x[partner])
            assert (own | other).all()
            kept = own.float().mean((1, 2, 3))[partner != torch.arange(batch)]
            torch.testing.assert_close(kept, share.expand_as(kept))
        elif name == "manifold-mixup":
            assert sum(not torch.equal(place, given.x) for place in places) == 1
            assert all(torch.equal(partner, own.partner.cpu()) and share == own.share.cpu() for own in drawn)
        else:
            assert torch.equal(partner, drawn[0].partner.cpu()) and share == (0.75 if drawn[0].gate else 1)
    assert 15 < changed <= 60 and len(seen) > 15, "every replay draws anew"


@pytest.mark.parametrize("name", MIXING)
def test_a_captured_step_with_mixed_labels_trains(name: str) -> None:
    """Sampling, mixing, forward, backward and update in one graph, in bfloat16, beside FFA."""
    augmentation = MIXING[name]
    torch.manual_seed(0)
    stages = iter(range(1, 6))

    def layers(channels: int) -> nn.Module:
        own = augmentation.layer(channels, next(stages))
        return nn.Sequential(own, FFA(channels)) if own is not None else FFA(channels)

    model = AlexNet(10, augment=layers).cuda()
    draws, streams = Draws(model), Streams(0, 1, "a", "cuda")
    given = Batch(torch.rand(8, 3, 96, 96, device="cuda"), torch.arange(8, device="cuda"))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step() -> Tensor:
        draws.sample(8, streams)
        batch = augmentation.mix(given, draws, streams)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = Classification().batch_loss(model(batch.x), batch)
        loss.backward()
        optimizer.step()
        return loss

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        before = [step().item() for _ in range(3)]
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    for own in {name, "ffa"}:
        graph.register_generator_state(streams(own))
    with torch.cuda.graph(graph):
        loss = step()
    losses = []
    for _ in range(60):
        graph.replay()
        losses.append(loss.item())
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert sum(losses[-20:]) / 20 < 0.75 * before[0]  # by less than that losses differ from draw to draw


def test_beta_on_the_gpu() -> None:
    """Mean 1/2 and variance 1/(4·(2α + 1)), never outside of 0–1."""
    generator = torch.Generator("cuda").manual_seed(0)
    for alpha in (0.1, 1.0, 2.0):
        draws = symmetric_beta(alpha, (200_000,), generator, torch.device("cuda")).double()
        assert torch.isfinite(draws).all() and draws.min() >= 0 and draws.max() <= 1
        assert abs(draws.mean().item() - 0.5) < 5e-3
        assert draws.var().item() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.01)


@pytest.mark.parametrize("name", ["manifold-mixup", "mixstyle", "moex"])
def test_mixing_layers_compile_whole(name: str) -> None:
    layer = MIXING[name].layer(8, 1)
    assert layer is not None
    layer.cuda()
    Draws(layer).sample(8, Streams(0, 1, "a", "cuda"))
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True)
    x, outs = normal(8, 8, 16, 16).cuda(), []
    for module in (layer, compiled):
        y = x.clone().requires_grad_()
        out = module(y)
        out.square().sum().backward()
        outs.append((out.detach(), y.grad))
    torch.testing.assert_close(outs[0], outs[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", MIXING)
def test_augmentations_in_a_run(tmp_path: Path, name: str) -> None:
    for experiment in ("digit-sites", "phantom-sites"):
        run = fedfa.run(experiment, root=tmp_path, device="cuda", algorithm="fedfa", augmentation=name, rounds=1)
        assert not run.metrics[-1]["refused"]


ALGORITHMS = [name for name in fedfa.ALGORITHMS if name.startswith(("fed", "scaffold"))]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithms_agree_with_the_cpu(tmp_path: Path, name: str) -> None:
    """Without random layers, three rounds come to the same model to rounding; FedMix draws its averages on the
    device, so that there the runs are only alike."""
    settings: dict[str, object] = {"algorithm": name, "rounds": 3}
    if name.startswith("fedfa"):
        settings["algorithm.p"] = 0.0
    runs = [fedfa.run("digit-sites", root=tmp_path / d, device=d, **settings) for d in ("cpu", "cuda")]
    first, second = (run.metrics[-1]["loss"] for run in runs)
    assert first == pytest.approx(second, rel=5e-2 if name == "fedmix" else 5e-3)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithms_step_can_be_captured(tmp_path: Path, name: str) -> None:
    """A replayed step is the eager one: the same parameters and private tensors after five."""
    config = fedfa.load({"source": "digit-sites", "network": "lenet", "algorithm": name})
    algorithm = config.build("algorithm")
    source = config.build("source").build(0)
    torch.manual_seed(0)
    model = LeNet(10, augment=lambda c: algorithm.layer(c) or nn.Identity())
    local = Local(lr=0.01)
    finals = []
    for captured in (False, True):
        engine = Sequential(
            copy.deepcopy(model), source, Classification(), algorithm, local, Memory(tmp_path), 0, device="cuda"
        )
        plan = Plan(2, 0, tuple(source.clients))
        server = collect_shares(first_state(model, algorithm, 4).to("cuda"), algorithm, engine, plan)
        client = engine.client("phone", Broadcast(1, server.model, algorithm.broadcast(server)))
        engine.slot.enter(client.received, algorithm.private(client.model), {})
        algorithm.begin(client)
        batch = Batch(*engine.federation.batch(client.index.train[:16]))
        engine.slot.draws.sample(16, client.streams)
        engine.slot.model.train()
        kept = {key: tensor.clone() for key, tensor in client.memory.items()}
        if captured:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(3):
                    algorithm.step(client, batch)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            graph.register_generator_state(client.streams("fedmix"))
            with torch.cuda.graph(graph):
                algorithm.step(client, batch)
            engine.slot.enter(client.received, algorithm.private(client.model), {})
            for key, tensor in kept.items():
                client.memory[key].copy_(tensor)
        for _ in range(5):
            if captured:
                graph.replay()
            else:
                algorithm.step(client, batch)
        finals.append({**{k: v.clone() for k, v in engine.slot.tensors.items()}, **client.memory})
    for key, tensor in finals[0].items():
        if name == "fedmix":
            assert torch.isfinite(finals[1][key]).all()
        else:
            torch.testing.assert_close(finals[1][key], tensor, atol=1e-5, rtol=1e-3)
