"""Manifold Mixup, MixStyle and MoEx against numbers by hand and a second implementation; what they draw, against
its distribution."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from fedfa.layers import FFA, ManifoldMixup, MixStyle, MoEx, exchange_moments, mix_style
from fedfa.layers import manifold_mixup as manifold
from fedfa.layers import mixstyle as style
from fedfa.layers import moex as exchange
from fedfa.layers.mixing import interpolate, partners, symmetric_beta
from fedfa.layers.randomness import Draws, RandomLayer
from fedfa.state import entries
from fedfa.streams import Streams
from reference import augmentations as reference

CPU = torch.device("cpu")
SHAPES = [(4, 3, 5, 6), (3, 2, 7), (3, 2, 2, 3, 2)]
EDGES = [(1, 3, 4, 4), (4, 3, 1, 1), (1, 1, 1, 1), (4, 1, 3, 3)]
LAYERS: list[Callable[[], RandomLayer]] = [ManifoldMixup, lambda: MixStyle(p=1.0), lambda: MoEx(p=1.0)]
IDS = ["manifold-mixup", "mixstyle", "moex"]
every_layer = pytest.mark.parametrize("build", LAYERS, ids=IDS)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def turned(batch: int) -> Tensor:
    """Everyone is mixed with the next."""
    return torch.arange(batch).roll(-1)


def opened(layer: RandomLayer, batch: int) -> RandomLayer:
    """The layer with draws in which it acts on every sample."""
    share = torch.linspace(0.2, 0.8, batch)
    drawn = {
        ManifoldMixup: manifold.Drawn(torch.tensor(True), share[0], turned(batch)),
        MixStyle: style.Drawn(share, turned(batch)),
        MoEx: exchange.Drawn(torch.tensor(True), turned(batch)),
    }
    layer.drawn = drawn[type(layer)]  # type: ignore[index]  # a child module
    return layer


def closed(layer: RandomLayer, batch: int) -> RandomLayer:
    """The layer with draws in which it does not act."""
    drawn = {
        ManifoldMixup: manifold.Drawn(torch.tensor(False), torch.tensor(0.3), turned(batch)),
        MixStyle: style.Drawn(torch.ones(batch), turned(batch)),
        MoEx: exchange.Drawn(torch.tensor(False), turned(batch)),
    }
    layer.drawn = drawn[type(layer)]  # type: ignore[index]  # a child module
    return layer


class TestDistributions:
    @pytest.mark.parametrize("alpha", [0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 8.0])
    def test_beta(self, alpha: float) -> None:
        """The distribution function at 200 points. For small α much of it lies closer to 0 and 1 than float32 can
        tell, so points are compared and not every draw."""
        count = 200_000
        draws = symmetric_beta(alpha, (count,), torch.Generator().manual_seed(3), CPU)
        assert torch.isfinite(draws).all() and draws.min() >= 0 and draws.max() <= 1
        points = np.concatenate((np.logspace(-6, -1, 60), np.linspace(0.1, 0.9, 80), 1 - np.logspace(-1, -6, 60)))
        found = np.searchsorted(np.sort(draws.double().numpy()), points, side="right") / count
        assert np.abs(found - stats.beta(alpha, alpha).cdf(points)).max() < 1.95 / math.sqrt(count)  # 0.1 % level
        assert draws.double().var().item() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.01)

    def test_beta_from_extreme_uniforms(self, monkeypatch: pytest.MonkeyPatch) -> None:
        corners = torch.tensor([0.0, 1e-38, 2**-24, 0.25, 0.5, 0.75, 1 - 2**-24])
        monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.cartesian_prod(corners, corners).T)
        for alpha in (1e-3, 0.1, 1.0, 1e3):
            draws = symmetric_beta(alpha, (49,), None, CPU)
            assert torch.isfinite(draws).all() and draws.min() >= 0 and draws.max() <= 1

    def test_partners_are_uniform_permutations(self) -> None:
        generator = torch.Generator().manual_seed(0)
        seen = Counter(tuple(partners(4, generator, CPU).tolist()) for _ in range(12_000))
        assert len(seen) == 24 and all(sorted(order) == [0, 1, 2, 3] for order in seen)
        assert stats.chisquare(list(seen.values())).pvalue > 1e-3
        assert partners(1, generator, CPU).tolist() == [0]

    def test_mixstyle_draws(self) -> None:
        layers = [MixStyle(p=0.3), MixStyle(p=0.3)]
        generator = torch.Generator().manual_seed(1)
        drawn = [MixStyle.sample(layers, 4, generator, CPU) for _ in range(4000)]
        active = torch.tensor([[(one.share != 1).any() for one in pair] for pair in drawn])
        # λ rounds to 1 for all four samples now and then: (P[λ ≈ 1])⁴ ≈ 1e-4 of the active ones
        torch.testing.assert_close(active.double().mean(0), torch.full((2,), 0.3).double(), atol=0.025, rtol=0)
        both = (active[:, 0] & active[:, 1]).double().mean().item()
        assert both == pytest.approx(0.09, abs=0.02), "layers are gated apart"
        shares = torch.stack([pair[0].share for pair, on in zip(drawn, active[:, 0], strict=True) if on])
        assert shares.var().item() == pytest.approx(1 / 4.8, rel=0.05)  # Beta(0.1, 0.1)
        assert np.corrcoef(shares[:, 0], shares[:, 1])[0, 1] == pytest.approx(0, abs=0.1), "λ is each sample's own"

    def test_moex_gate_and_partners_are_one_for_all_layers(self) -> None:
        layers, generator = [MoEx(p=0.25), MoEx(p=0.25)], torch.Generator().manual_seed(1)
        drawn = [MoEx.sample(layers, 5, generator, CPU) for _ in range(4000)]
        assert sum(one.gate.item() for one, _ in drawn) / 4000 == pytest.approx(0.25, abs=0.025)
        assert all(one.gate is other.gate and one.partner is other.partner for one, other in drawn)

    @pytest.mark.parametrize("input", [True, False])
    def test_manifold_mixup_chooses_one_place_uniformly(self, input: bool) -> None:
        layers, generator = [ManifoldMixup(input=input) for _ in range(3)], torch.Generator().manual_seed(1)
        places, shares = Counter[int](), []
        for _ in range(4000):
            drawn = ManifoldMixup.sample(layers, 5, generator, CPU)
            here = [number for number, one in enumerate(drawn) if one.here]
            assert len(here) == 1 or (input and not here)
            places[here[0] if here else -1] += 1
            assert all(one.share is drawn[0].share and one.partner is drawn[0].partner for one in drawn)
            shares.append(drawn[0].share.item())
        assert len(places) == 3 + input and stats.chisquare(list(places.values())).pvalue > 1e-3
        assert stats.kstest(shares, stats.beta(2, 2).cdf).pvalue > 1e-3


class TestArithmetic:
    def test_interpolation_by_hand(self) -> None:
        x = torch.tensor([[0.0, 4.0], [8.0, 8.0]])
        out = interpolate(x, torch.tensor([1, 0]), torch.tensor(0.75))
        assert torch.equal(out, torch.tensor([[2.0, 5.0], [6.0, 7.0]]))

    def test_mixstyle_by_hand(self) -> None:
        """μ = 1 and 10, σ = 1 and 3; with λ = 1/2 both become 5.5 and 2. With λ = 0 they are swapped."""
        x = torch.tensor([[0.0, 2.0], [7.0, 13.0]], dtype=torch.float64).view(2, 1, 2)
        half = mix_style(x, torch.tensor([1, 0]), torch.full((2,), 0.5), eps=1e-30)
        torch.testing.assert_close(half, torch.tensor([[3.5, 7.5], [3.5, 7.5]]).double().view(2, 1, 2))
        whole = mix_style(x, torch.tensor([1, 0]), torch.tensor([0.0, 1.0]), eps=1e-30)
        torch.testing.assert_close(whole, torch.tensor([[7.0, 13.0], [7.0, 13.0]]).double().view(2, 1, 2))

    def test_moex_by_hand(self) -> None:
        """One position: channels (0, 2) have moments 1 and 1, channels (13, 7) have 10 and 3."""
        x = torch.tensor([[0.0, 2.0], [13.0, 7.0]], dtype=torch.float64).view(2, 2, 1)
        out = exchange_moments(x, torch.tensor([1, 0]), eps=1e-30)
        torch.testing.assert_close(out, torch.tensor([[7.0, 13.0], [2.0, 0.0]]).double().view(2, 2, 1))

    @pytest.mark.parametrize("shape", SHAPES + EDGES)
    def test_equals_the_reference(self, shape: tuple[int, ...]) -> None:
        x, partner = 3 * normal(*shape) + 1, turned(shape[0])
        share = torch.linspace(0, 1, shape[0], dtype=torch.float64)
        found = (
            interpolate(x, partner, share[0] + 0.3),
            mix_style(x, partner, share, 1e-6),
            exchange_moments(x, partner, 1e-5),
        )
        given = x.numpy(), partner.tolist()
        wanted = (
            reference.mixup(*given, 0.3),
            reference.mixstyle(*given, share.tolist(), 1e-6),
            reference.moex(*given, 1e-5),
        )
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, torch.from_numpy(theirs), atol=1e-12, rtol=1e-9)

    @pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
    def test_half_precision_computes_in_float32(self, kind: torch.dtype) -> None:
        x = (100 + normal(4, 6, 5, 5)).to(kind)
        partner, share = turned(4), torch.tensor([0.1, 0.3, 0.5, 0.9])
        for function in (
            lambda x: interpolate(x, partner, share[1]),
            lambda x: mix_style(x, partner, share),
            lambda x: exchange_moments(x, partner),
        ):
            assert torch.equal(function(x), function(x.float()).to(kind))

    def test_moments_are_the_partners_afterwards(self) -> None:
        x, partner = normal(4, 8, 3, 3), turned(4)
        out = exchange_moments(x, partner, eps=1e-12)
        torch.testing.assert_close(out.mean(1), x[partner].mean(1))
        torch.testing.assert_close(out.std(1), x[partner].std(1))


class TestLayers:
    @every_layer
    def test_acts_while_training_alone(self, build: Callable[[], RandomLayer]) -> None:
        layer, x = opened(build(), 4), normal(4, 3, 5, 5)
        assert not torch.allclose(layer(x), x)
        assert layer.eval()(x) is x

    @every_layer
    def test_closed_is_the_identity_bit_for_bit(self, build: Callable[[], RandomLayer]) -> None:
        x = (1e3 * normal(4, 3, 5, 5)).float().requires_grad_()
        out = closed(build(), 4)(x)
        assert torch.equal(out, x)
        g = normal(4, 3, 5, 5, seed=1).float()
        (slope,) = torch.autograd.grad(out, x, g)
        assert torch.equal(slope, g)

    @pytest.mark.parametrize("layer", [MixStyle(p=0), MoEx(p=0)])
    def test_p_zero_returns_its_input(self, layer: RandomLayer) -> None:
        x = normal(4, 3, 5, 5)
        assert layer(x) is x

    @every_layer
    def test_a_batch_of_one_and_an_empty_one_stay(self, build: Callable[[], RandomLayer]) -> None:
        x = normal(1, 3, 4, 4).float()
        assert torch.equal(build()(x), x)
        assert build()(x[:0]).shape == (0, 3, 4, 4)

    @every_layer
    def test_the_same_draws_give_the_same_output(self, build: Callable[[], RandomLayer]) -> None:
        layer, x = build(), normal(6, 3, 5, 5)
        draws = Draws(layer)
        draws.sample(6, Streams(0, 1, "a"))
        torch.manual_seed(0)
        first = layer(x)
        torch.manual_seed(1)
        assert torch.equal(layer(x), first)

    @every_layer
    def test_draws_for_itself_where_none_are_given(self, build: Callable[[], RandomLayer]) -> None:
        layer, x = build(), normal(6, 3, 5, 5)
        outs = []
        for seed in (0, 0, *range(1, 9)):
            torch.manual_seed(seed)
            outs.append(layer(x))
        assert torch.equal(outs[0], outs[1])
        assert not all(torch.equal(outs[0], out) for out in outs)

    @every_layer
    @pytest.mark.parametrize("shape", [(3, 2, 2, 3), *EDGES])
    def test_gradients(self, build: Callable[[], RandomLayer], shape: tuple[int, ...]) -> None:
        """By finite differences; MixStyle's with its statistics held still, as it defines them."""
        x = normal(*shape).requires_grad_()
        layer = opened(build(), shape[0])
        if isinstance(layer, MixStyle):
            layer.drawn = style.Drawn(layer.drawn.share.double(), layer.drawn.partner)
            mean = x.detach().flatten(2).mean(2)[..., None, None]
            std = (x.detach().flatten(2).var(2, correction=0)[..., None, None] + layer.eps).sqrt()
            share = layer.drawn.share.view(-1, 1, 1, 1)
            other = layer.drawn.partner
            gamma, beta = (share * s + (1 - share) * s[other] for s in (std, mean))
            g = normal(*shape, seed=1)
            (slope,) = torch.autograd.grad(layer(x), x, g)
            torch.testing.assert_close(layer(x), gamma * (x - mean) / std + beta)
            torch.testing.assert_close(slope, g * gamma / std)
        else:
            assert torch.autograd.gradcheck(layer, x)
            assert torch.autograd.gradgradcheck(layer, x)

    @every_layer
    @pytest.mark.parametrize("shape", [(4, 3, 4, 4), *EDGES])
    def test_constant_features_have_finite_gradients(
        self, build: Callable[[], RandomLayer], shape: tuple[int, ...]
    ) -> None:
        for value in (0.0, 7.0):
            for prepare in (opened, closed):
                x = torch.full(shape, value, requires_grad=True)
                prepare(build(), shape[0])(x).square().sum().backward()
                assert x.grad is not None and torch.isfinite(x.grad).all()

    @every_layer
    def test_can_be_differentiated_twice(self, build: Callable[[], RandomLayer]) -> None:
        """As FedMix does."""
        x = normal(4, 3, 4, 4).requires_grad_()
        weight = normal(3, seed=2).requires_grad_()
        out = opened(build(), 4)(x * weight.view(1, 3, 1, 1))
        (slope,) = torch.autograd.grad(out.pow(3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(slope.sum(), weight)
        assert torch.isfinite(second).all() and second.abs().min() > 0

    @every_layer
    def test_keeps_channels_last(self, build: Callable[[], RandomLayer]) -> None:
        x = normal(4, 6, 5, 7)
        last = x.to(memory_format=torch.channels_last)
        out = opened(build(), 4)(last)
        torch.testing.assert_close(out, opened(build(), 4)(x))
        assert out.is_contiguous(memory_format=torch.channels_last)

    @every_layer
    def test_has_no_state(self, build: Callable[[], RandomLayer]) -> None:
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Sequential(build(), FFA(2)))
        assert not build().state_dict()
        assert list(entries(model)) == ["0.weight", "0.bias"]
        copied = copy.deepcopy(model)
        assert Draws(copied).of(type(build())) == [None]

    def test_only_one_place_is_mixed(self) -> None:
        """Layers in a row: each batch, one of them or none changes what passes."""
        layers = [ManifoldMixup() for _ in range(3)]
        draws, streams, changed = Draws(nn.Sequential(*layers)), Streams(0, 1, "a"), Counter[int]()
        x = normal(6, 2, 3, 3).float()
        for _ in range(60):
            draws.sample(6, streams)
            changed[sum(not torch.equal(layer(x), x) for layer in layers)] += 1
        assert set(changed) == {0, 1}

    @pytest.mark.parametrize(
        ("build", "message"),
        [
            (lambda: MixStyle(p=1.5), "p is a probability, between 0 and 1, not 1.5"),
            (lambda: MixStyle(alpha=0), "alpha, of the Beta distribution, must be positive, not 0"),
            (lambda: MixStyle(eps=0), "eps must be positive, not 0"),
            (lambda: MixStyle()(normal(2, 3)), r"MixStyle takes \(batch, channels, ...\) features, not \(2, 3\)"),
            (lambda: MoEx(p=-1), "p is a probability, between 0 and 1, not -1"),
            (lambda: MoEx(eps=-1), "eps must be positive, not -1"),
            (lambda: ManifoldMixup(alpha=math.nan), "alpha, of the Beta distribution, must be positive, not nan"),
            (lambda: ManifoldMixup(alpha=math.inf), "alpha, of the Beta distribution, must be positive, not inf"),
        ],
    )
    def test_settings_that_make_no_sense(self, build: Callable[[], object], message: str) -> None:
        with pytest.raises(ValueError, match=f"^{message}$"):
            build()
