"""The FFA layer against numbers from outside the code: FACTS, the paper's equations by hand, finite differences."""

from __future__ import annotations

import copy
import math
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fedfa
from fedfa.layers.ffa import (
    FFA,
    Drawn,
    Fusion,
    Spread,
    Statistics,
    _drawn_at_once,
    augment,
    augment_reference,
    channel_statistics,
    spread_terms,
)
from fedfa.layers.randomness import Draws

FUSIONS = get_args(Fusion)
SHAPES = [(3, 2, 3, 3), (3, 2, 5), (2, 2, 2, 2, 2)]
EDGES = [(1, 2, 3, 3), (3, 2, 1, 1), (1, 2, 1)]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def spread(fusion: Fusion, channels: int) -> Spread:
    gamma = torch.rand(2, channels, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return spread_terms(fusion, *gamma)


def opened(layer: FFA, batch: int, seed: int = 0) -> FFA:
    """The layer with its gate open and noise from a seed."""
    layer.drawn = Drawn(torch.tensor(True), normal(2, batch, layer.channels, seed=seed, dtype=torch.float32))
    return layer


class TestModulate:
    """Eq. t."""

    def test_numbers_by_hand(self) -> None:
        torch.testing.assert_close(fedfa.modulate(torch.tensor([0.0, 1.0, 3.0])), torch.tensor([0.0, 1.2, 1.8]))
        torch.testing.assert_close(
            fedfa.modulate(torch.tensor([0.01, 0.04])), torch.tensor([0.409449, 1.590551]), atol=1e-6, rtol=0
        )

    def test_no_variance_gives_one_everywhere(self) -> None:
        assert torch.equal(fedfa.modulate(torch.zeros(5)), torch.ones(5))

    def test_is_not_invariant_to_scale(self) -> None:
        variance = torch.tensor([0.5, 2.0])
        assert not torch.allclose(fedfa.modulate(variance), fedfa.modulate(100 * variance))

    def test_survives_extremes(self) -> None:
        gamma = fedfa.modulate(torch.tensor([0.0, 1e-38, 1e38, math.inf]))
        torch.testing.assert_close(gamma, torch.tensor([0.0, 0.0, 2.0, 2.0]))

    @given(st.lists(st.floats(0, 1e6, width=32), min_size=1, max_size=12))
    def test_sums_to_the_number_of_channels_and_grows_with_variance(self, values: list[float]) -> None:
        variance = torch.tensor(values, dtype=torch.float64)
        gamma = fedfa.modulate(variance)
        assert gamma.sum().item() == pytest.approx(len(values))
        assert 0 <= gamma.min().item() <= gamma.max().item() <= len(values) + 1e-9
        order = variance.argsort()
        assert (gamma[order].diff() >= -1e-12).all()
        turned = torch.arange(len(values) - 1, -1, -1)
        torch.testing.assert_close(fedfa.modulate(variance[turned]), gamma[turned])

    @pytest.mark.parametrize("channels", [1, 7, 64, 192, 384])
    def test_rows_are_layers_of_their_own_to_the_bit(self, channels: int) -> None:
        variance = normal(6, channels, dtype=torch.float32).square()
        variance[1], variance[2, 0], variance[3, 0], variance[4] = 0, math.inf, math.nan, 1e-30
        for row, gamma in zip(variance, fedfa.modulate(variance), strict=True):
            assert torch.equal(fedfa.modulate(row), gamma)
            assert torch.equal(self.as_it_is_written(row), gamma)

    @staticmethod
    def as_it_is_written(variance: Tensor) -> Tensor:
        """One layer's γ in plain steps."""
        weight = variance / (1 + variance)
        weight[variance == math.inf] = 1
        total = weight.sum()
        return weight * (len(weight) / total) if total > 0 else torch.ones_like(weight)

    def test_equal_variances_give_one(self) -> None:
        torch.testing.assert_close(fedfa.modulate(torch.full((6,), 0.3)), torch.ones(6))


class TestArithmetic:
    def test_statistics_of_a_channel_by_hand(self) -> None:
        x = torch.tensor([0.0, 2.0, 4.0, 6.0]).view(1, 1, 2, 2)  # mean 3, squares of deviations 9, 1, 1, 9
        biased, unbiased = (channel_statistics(x, 1e-6, kind).squeeze() for kind in (False, True))
        torch.testing.assert_close(biased, torch.tensor([3.0, math.sqrt(5 + 1e-6)]))
        torch.testing.assert_close(unbiased, torch.tensor([3.0, math.sqrt(20 / 3 + 1e-6)]))

    def test_variance_over_the_batch_is_biased(self) -> None:
        """μ = [[0, 1], [2, 1]] over B = 2 has Σ² = [1, 0]: with ε_μ = 1 and γ = 0 each mean moves by 1 or by 0."""
        x = torch.tensor([[0.0, 1.0], [2.0, 1.0]]).view(2, 2, 1).expand(2, 2, 4).contiguous()
        noise = torch.stack((torch.ones(2, 2), torch.zeros(2, 2)))
        out, statistics = augment(x, noise, Spread(1.0, 0.0))
        torch.testing.assert_close(out - x, torch.tensor([1.0, 0.0]).view(1, 2, 1).expand(2, 2, 4))
        torch.testing.assert_close(statistics[0], torch.tensor([1.0, 1.0]))

    @pytest.mark.parametrize("fusion", FUSIONS)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_is_the_papers_arithmetic(self, shape: tuple[int, ...], fusion: Fusion) -> None:
        """Eqs. cfw, clientspecific, fusion, rep and in, written out one by one in NumPy."""
        x, noise = normal(*shape), normal(2, *shape[:2], seed=1)
        gamma = normal(2, shape[1], seed=2).abs()
        flat = x.flatten(2).numpy()
        mu, sigma = flat.mean(2), (flat.var(2) + 1e-6) ** 0.5
        fuse = {
            "adaptive": lambda own, g: (g + 1) * own,
            "direct": lambda own, g: (g + 1) * own,
            "client": lambda own, g: own,
            "random": lambda own, g: 0.25 + 0 * own,
            "total": lambda own, g: own + g,
        }[fusion]
        width_mu, width_sigma = (fuse(s.var(0), g) ** 0.5 for s, g in zip((mu, sigma), gamma.numpy(), strict=True))
        mu_hat, sigma_hat = mu + noise[0].numpy() * width_mu, sigma + noise[1].numpy() * width_sigma
        expected = sigma_hat[..., None] * (flat - mu[..., None]) / sigma[..., None] + mu_hat[..., None]
        for function in (augment, augment_reference):
            out, statistics = function(x, noise, spread_terms(fusion, *gamma))
            torch.testing.assert_close(out, torch.from_numpy(expected).view(shape))
            torch.testing.assert_close(statistics[0], torch.from_numpy(mu.mean(0)))
            torch.testing.assert_close(statistics[1], torch.from_numpy(sigma.mean(0)))

    def test_lemma_1(self) -> None:
        """x̂ − x = ε_σ·Σ̂_σ·x̄ + ε_μ·Σ̂_μ, exactly."""
        x, noise = normal(5, 3, 4, 4), normal(2, 5, 3, seed=1)
        mean, std = channel_statistics(x)
        variance = torch.stack((mean, std)).var(1, correction=0)
        width = (variance * 2.5).sqrt()  # γ = 1.5
        normalised = (x - mean[..., None, None]) / std[..., None, None]
        error = noise[1] * width[1], noise[0] * width[0]
        expected = error[0][..., None, None] * normalised + error[1][..., None, None]
        out, _ = augment(x, noise, Spread(torch.full((2, 1, 3), 2.5, dtype=torch.float64), 0.0))
        torch.testing.assert_close(out - x, expected, atol=1e-14, rtol=1e-12)

    def test_released_arithmetic(self) -> None:
        """Unbiased variances, eps in both, as the authors' code: (γ + 1)·(Σ² + eps) with γ = 1."""
        x, noise = normal(4, 3, 3, 3), normal(2, 4, 3, seed=1)
        mean, std = x.mean((2, 3)), (x.var((2, 3)) + 1e-6).sqrt()
        width = [((s.var(0) + 1e-6) * 2).sqrt() for s in (mean, std)]
        beta, gamma = mean + noise[0] * width[0], std + noise[1] * width[1]
        expected = (x - mean[..., None, None]) / std[..., None, None] * gamma[..., None, None] + beta[..., None, None]
        for function in (augment, augment_reference):
            out, _ = function(x, noise, Spread(2.0, 0.0), None, 1e-6, True)
            torch.testing.assert_close(out, expected)

    def test_a_constant_channel_in_bfloat16_keeps_its_value(self) -> None:
        """x·scale + shift would be off by as much as the channel's value."""
        x = torch.full((2, 1, 8, 8), 5.0, dtype=torch.bfloat16)
        x[1] += normal(1, 8, 8).bfloat16()  # one sample varies, so σ does vary over the batch
        noise = torch.stack((torch.zeros(2, 1), torch.full((2, 1), 3.0)))
        for function in (augment, augment_reference):
            out, _ = function(x, noise, Spread(2.0, 0.0))
            assert out.dtype == torch.bfloat16
            assert torch.equal(out[0], x[0])

    @pytest.mark.parametrize("shape", EDGES)
    @pytest.mark.parametrize("unbiased", [False, True])
    def test_edges_are_finite(self, shape: tuple[int, ...], unbiased: bool) -> None:
        x = normal(*shape).requires_grad_()
        out, _ = augment(x, normal(2, *shape[:2], seed=1), spread("adaptive", shape[1]), None, 1e-6, unbiased)
        out.sum().backward()
        assert torch.isfinite(out).all() and torch.isfinite(x.grad).all()
        if shape[0] == 1:
            assert torch.equal(out, x), "one sample has no spread over the batch"

    @pytest.mark.parametrize("where", ["one channel", "all"])
    def test_dead_channels_are_finite(self, where: str) -> None:
        x = normal(4, 3, 5, 5)
        x[:, 0 if where == "one channel" else slice(None)] = 0.7
        x.requires_grad_()
        out, _ = augment(x, normal(2, 4, 3, seed=1), spread("adaptive", 3))
        (out * normal(4, 3, 5, 5, seed=3)).sum().backward()
        assert torch.isfinite(out).all() and torch.isfinite(x.grad).all()
        torch.testing.assert_close(out[:, 0], x[:, 0], atol=1e-12, rtol=0)


class TestGradients:
    @pytest.mark.parametrize("gate", [None, True, False])
    @pytest.mark.parametrize("unbiased", [False, True])
    @pytest.mark.parametrize("fusion", FUSIONS)
    @pytest.mark.parametrize("shape", SHAPES + EDGES)
    def test_against_finite_differences(
        self, shape: tuple[int, ...], fusion: Fusion, unbiased: bool, gate: bool | None
    ) -> None:
        x, noise = normal(*shape).requires_grad_(), normal(2, *shape[:2], seed=1)
        door = None if gate is None else torch.tensor(gate)

        def function(x: Tensor) -> Tensor:
            return augment(x, noise, spread(fusion, shape[1]), door, 1e-6, unbiased)[0]

        assert torch.autograd.gradcheck(function, (x,))
        if gate:  # the gradient of the gradient is autograd's own: a third of the cases will do
            assert torch.autograd.gradgradcheck(function, (x,))

    @pytest.mark.parametrize("fusion", FUSIONS)
    def test_by_hand_equals_autograd_in_float32(self, fusion: Fusion) -> None:
        g = normal(8, 6, 14, 14, seed=3, dtype=torch.float32)
        grads = []
        for function in (augment, augment_reference):
            x = normal(8, 6, 14, 14, dtype=torch.float32).requires_grad_()
            noise = normal(2, 8, 6, seed=1, dtype=torch.float32)
            out, _ = function(x, noise, Spread(*(t.float() if isinstance(t, Tensor) else t for t in spread(fusion, 6))))
            out.backward(g)
            grads.append(x.grad)
        torch.testing.assert_close(*grads, atol=2e-6, rtol=1e-5)

    def test_a_closed_gate_passes_the_gradient_unchanged(self) -> None:
        x, g = normal(1, 3, 4, 4).requires_grad_(), normal(1, 3, 4, 4, seed=2)
        for function in (augment, augment_reference):
            x.grad = None
            out, _ = function(x, normal(2, 1, 3, seed=1), spread("adaptive", 3), torch.tensor(False))
            out.backward(g)
            assert torch.equal(out, x) and torch.equal(x.grad, g)

    def test_flows_through_the_statistics(self) -> None:
        """With μ, σ and Σ̂ taken for constants the gradient of Σ x̂ would be 1 + a: it is not."""
        x, noise = normal(4, 2, 3, 3).requires_grad_(), normal(2, 4, 2, seed=1)
        out, _ = augment(x, noise, Spread(2.0, 0.0))
        (out**2).sum().backward()
        mean, std = channel_statistics(x.detach())
        width = (2 * torch.stack((mean, std)).var(1, correction=0)).sqrt()
        constant = 2 * out.detach() * (1 + (noise[1] * width[1] / std))[..., None, None]
        assert (x.grad - constant).abs().max() > 0.1


class TestLayer:
    def test_buffers_start_where_the_paper_says(self) -> None:
        layer = FFA(3)
        assert {name: buffer.tolist() for name, buffer in layer.named_buffers()} == {
            "mean": [0, 0, 0],
            "std": [1, 1, 1],
            "gamma_mean": [1, 1, 1],
            "gamma_std": [1, 1, 1],
            "batches": 0,
        }
        for fusion in ("direct", "total"):
            assert FFA(2, fusion=fusion).gamma_mean.tolist() == [0, 0]

    def test_eval_mode_is_the_identity_bit_for_bit(self) -> None:
        layer, x = FFA(3, p=1.0).eval(), normal(2, 3, 4, 4, dtype=torch.float32)
        before = copy.deepcopy(layer.state_dict())
        assert layer(x) is x
        assert all(torch.equal(before[name], value) for name, value in layer.state_dict().items())

    def test_p_zero_is_the_identity_while_training(self) -> None:
        layer, x = FFA(3, p=0.0), normal(2, 3, 4, 4, dtype=torch.float32)
        assert layer(x) is x and layer.batches == 0

    @pytest.mark.parametrize("shape", [(4, 3, 6, 6), (4, 3, 9), (4, 3, 3, 4, 5)])
    def test_takes_one_two_and_three_dimensions(self, shape: tuple[int, ...]) -> None:
        x = normal(*shape, dtype=torch.float32)
        out = opened(FFA(3), 4)(x)
        assert out.shape == x.shape and not torch.equal(out, x)

    def test_running_statistics_after_equal_batches(self) -> None:
        """n equal updates: μ̄ = (1 − αⁿ)·m and σ̄ = αⁿ + (1 − αⁿ)·s."""
        layer, x = FFA(3, momentum=0.9), normal(4, 3, 5, 5, dtype=torch.float32)
        for _ in range(7):
            opened(layer, 4)(x)
        mean, std = channel_statistics(x).mean(1)
        left = 0.9**7
        torch.testing.assert_close(layer.mean, (1 - left) * mean)
        torch.testing.assert_close(layer.std, left + (1 - left) * std)
        assert layer.batches == 7
        corrected = layer.corrected()
        torch.testing.assert_close(corrected[0], mean)
        torch.testing.assert_close(corrected[1], std)

    def test_momentum_zero_keeps_the_last_active_batch(self) -> None:
        layer = FFA(2, momentum=0.0)
        first, second = normal(3, 2, 4, 4, dtype=torch.float32), normal(3, 2, 4, 4, seed=5, dtype=torch.float32)
        opened(layer, 3)(first)
        layer.drawn = Drawn(torch.tensor(False), torch.zeros(2, 3, 2))
        assert torch.equal(layer(second), second)
        torch.testing.assert_close(layer.mean, channel_statistics(first).mean(1)[0])
        assert layer.batches == 1

    def test_correction_without_batches_changes_nothing(self) -> None:
        mean, std = FFA(2).corrected()
        assert mean.tolist() == [0, 0] and std.tolist() == [1, 1]

    def test_gate_opens_at_its_rate(self) -> None:
        torch.manual_seed(0)
        layer, x = FFA(1, p=0.3), torch.zeros(1, 1, 1)
        for _ in range(2000):
            layer(x)
        assert layer.batches.item() == pytest.approx(600, abs=4 * math.sqrt(2000 * 0.3 * 0.7))

    def test_noise_has_the_variance_it_should(self) -> None:
        """Over many draws mean(x̂) = x and var(μ̂) = (γ + 1)·Σ²."""
        torch.manual_seed(0)
        layer, x = FFA(2, p=1.0), normal(3, 2, 4, 4, dtype=torch.float32)
        layer.gamma_mean.copy_(torch.tensor([0.2, 1.8]))
        draws = torch.stack([layer(x) for _ in range(4000)])
        own = channel_statistics(x).var(1, correction=0)[0]
        wanted = (layer.gamma_mean + 1) * own
        means = draws.mean((-2, -1))
        torch.testing.assert_close(means.var(0).mean(0), wanted, rtol=0.06, atol=0)
        assert (draws.mean(0) - x).abs().max() < 5 * (draws.std(0) / math.sqrt(4000)).max()

    def test_noise_differs_by_sample_and_channel_and_not_by_position(self) -> None:
        layer = FFA(2, p=1.0)
        x = normal(3, 2, 1, 1, dtype=torch.float32).expand(3, 2, 4, 4).contiguous()
        torch.manual_seed(0)
        moved = layer(x) - x
        assert torch.allclose(moved, moved[..., :1, :1].expand_as(moved))
        assert moved[..., 0, 0].unique().numel() == 6

    def test_statistics_of_another_type_than_the_features(self) -> None:
        layer = opened(FFA(3, momentum=0.0), 4)
        x = (normal(4, 3, 16, 16) * 100 + 1000).float()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = layer(x.bfloat16())
        assert out.dtype == torch.bfloat16 and layer.mean.dtype == torch.float32
        torch.testing.assert_close(layer.mean, x.bfloat16().float().mean((0, 2, 3)))

    @pytest.mark.parametrize("layer_type", [torch.float64, torch.bfloat16])
    @pytest.mark.parametrize("x_type", [torch.float64, torch.float32, torch.bfloat16])
    def test_layers_and_features_of_any_type(self, layer_type: torch.dtype, x_type: torch.dtype) -> None:
        layer = opened(FFA(3, momentum=0.0), 4).to(layer_type)
        x = normal(4, 3, 8, 8).to(x_type).requires_grad_()
        out = layer(x)
        out.sum().backward()
        assert out.dtype == x_type == x.grad.dtype and layer.mean.dtype == layer_type
        wanted = x.detach().double().mean((0, 2, 3))
        torch.testing.assert_close(layer.mean.double(), wanted, atol=2e-3, rtol=1e-2)

    def test_function_transforms(self) -> None:
        """The pure function: the layer moves its buffers in place, which torch.func forbids it as it does BatchNorm."""
        x, noise = normal(4, 3, 5, 5), normal(2, 4, 3, seed=1)
        by_transform = torch.func.grad(lambda y: augment(y, noise, spread("total", 3))[0].square().sum())(x)
        leaf = x.clone().requires_grad_()
        augment(leaf, noise, spread("total", 3))[0].square().sum().backward()
        torch.testing.assert_close(by_transform, leaf.grad)

    def test_gradient_in_half_precision(self) -> None:
        x = normal(4, 3, 8, 8, dtype=torch.float32).bfloat16().requires_grad_()
        opened(FFA(3), 4)(x).float().square().sum().backward()
        wide = x.detach().float().requires_grad_()
        opened(FFA(3), 4)(wide).square().sum().backward()
        assert x.grad.dtype == torch.bfloat16
        torch.testing.assert_close(x.grad.float(), wide.grad, atol=0.1, rtol=0.05)

    def test_channels_last_gives_the_same_and_stays(self) -> None:
        x = normal(4, 6, 8, 8, dtype=torch.float32)
        plain = opened(FFA(6), 4)(x)
        last = opened(FFA(6), 4)(x.to(memory_format=torch.channels_last))
        torch.testing.assert_close(last, plain)
        assert last.is_contiguous(memory_format=torch.channels_last)

    @pytest.mark.parametrize(("backend", "fusion"), [("inductor", "adaptive"), *(("aot_eager", f) for f in FUSIONS)])
    def test_compiles_whole(self, backend: str, fusion: Fusion) -> None:
        layer = FFA(3, fusion=fusion, p=1.0)
        compiled = torch.compile(copy.deepcopy(layer), fullgraph=True, backend=backend)
        x, noise = normal(4, 3, 5, 5, dtype=torch.float32), normal(2, 4, 3, dtype=torch.float32)
        try:
            outs, grads = [], []
            for module in (layer, compiled):
                module.drawn = Drawn(torch.tensor(True), noise)
                y = x.clone().requires_grad_()
                outs.append(module(y))
                outs[-1].square().sum().backward()
                grads.append(y.grad)
        except Exception as error:
            if "compiler" in str(error).lower() and backend == "inductor":
                pytest.skip(f"inductor needs a C++ compiler: {error}")
            raise
        torch.testing.assert_close(*outs)
        torch.testing.assert_close(*grads)
        torch.testing.assert_close(layer.mean, compiled.mean)

    @pytest.mark.parametrize("p", [0.3, 0.8])
    def test_compiled_it_draws_as_often(self, p: float) -> None:
        torch.manual_seed(0)
        compiled = torch.compile(FFA(3, p=p), fullgraph=True, backend="aot_eager")
        x = normal(4, 3, 5, 5, dtype=torch.float32)
        active = sum(not torch.equal(compiled(x), x) for _ in range(400))
        assert abs(active / 400 - p) < 0.08  # three standard deviations and more

    @pytest.mark.parametrize("chances", [(0.3, 0.3, 0.3), (0.0, 0.75, 1.0)])
    def test_drawn_at_once_gates_open_with_their_probability(self, chances: tuple[float, ...]) -> None:
        """As on a GPU: all gates and all noise from one launch."""
        layers = [FFA(channels, p=p) for channels, p in zip((2, 3, 5), chances, strict=True)]
        generator = torch.Generator().manual_seed(0)
        drawn = [_drawn_at_once(layers, 4, generator, torch.device("cpu")) for _ in range(4000)]
        for place, p in enumerate(chances):
            gates = torch.stack([own[place].gate for own in drawn]).double()
            noise = torch.stack([own[place].noise for own in drawn]).double()
            assert gates.mean().item() == pytest.approx(p, abs=0.03)
            assert noise.shape == (4000, 2, 4, layers[place].channels)
            assert abs(noise.mean().item()) < 0.02 and noise.std().item() == pytest.approx(1, abs=0.02)
            if 0 < p < 1:
                assert abs(noise[gates > 0].mean().item()) < 0.03, "noise does not depend on the gate"
        gates = torch.stack([torch.stack([each.gate for each in own]) for own in drawn]).double()
        if len(set(chances)) == 1:
            assert (torch.corrcoef(gates.T) - torch.eye(3)).abs().max() < 0.06, "gates are independent"

    def test_the_probability_can_be_changed(self) -> None:
        layer = FFA(2, p=0.0)
        layer.p = 1.0
        x = normal(4, 2, 5, 5, dtype=torch.float32)
        assert not torch.equal(layer(x), x)
        with pytest.raises(ValueError, match="probability"):
            layer.p = 2.0

    def test_copies_and_saves(self) -> None:
        layer = opened(FFA(3), 4)
        layer(normal(4, 3, 5, 5, dtype=torch.float32))
        twin = copy.deepcopy(layer)
        twin.mean.zero_()
        assert layer.mean.abs().sum() > 0
        loaded = FFA(3)
        loaded.load_state_dict(layer.state_dict())
        assert torch.equal(loaded.mean, layer.mean) and loaded.batches == 1

    def test_given_draws_make_it_deterministic(self) -> None:
        model = nn.Sequential(nn.Conv2d(1, 2, 3), FFA(2, p=1.0), nn.Conv2d(2, 4, 3), FFA(4, p=1.0))
        x = normal(3, 1, 8, 8, dtype=torch.float32)
        draws = Draws(model)
        draws.sample(3, lambda name: torch.Generator().manual_seed(len(name)))
        first, second = model(x), model(x)
        assert torch.equal(first, second)
        draws.clear()
        assert not torch.equal(model(x), first)

    def test_draws_use_the_stream_the_layer_names(self) -> None:
        asked: list[str] = []

        def streams(name: str) -> torch.Generator:
            asked.append(name)
            return torch.Generator().manual_seed(0)

        Draws(nn.Sequential(FFA(2), FFA(3))).sample(4, streams)
        assert asked == ["ffa"]

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"channels": 0}, "at least one channel"),
            ({"p": 1.5}, "probability"),
            ({"p": math.nan}, "probability"),
            ({"momentum": 1.0}, "momentum"),
            ({"eps": 0.0}, "eps"),
            ({"eps": math.nan}, "eps"),
            ({"fusion": "total", "statistics": "released"}, "no variance over clients"),
            ({"fusion": "both"}, "adaptive, direct, client, random, total"),
            ({"statistics": "mean"}, "paper, corrected, kept, released"),
        ],
    )
    def test_refuses_settings_that_make_no_sense(self, settings: dict[str, object], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            FFA(**{"channels": 3, **settings})  # type: ignore[arg-type]  # wrong or mixed settings are the point

    def test_an_empty_batch_changes_nothing(self) -> None:
        layer = FFA(4, p=1.0)
        assert layer(torch.rand(0, 4, 3, 3)).shape == (0, 4, 3, 3)
        assert torch.equal(layer.mean, torch.zeros(4)) and layer.batches == 0

    @pytest.mark.parametrize("shape", [(2, 4, 5, 5), (2, 3), (3,)])
    def test_refuses_features_of_another_shape(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match=r"FFA\(3\) takes"):
            FFA(3)(torch.zeros(shape))

    @pytest.mark.parametrize("statistics", get_args(Statistics))
    def test_every_variant_trains(self, statistics: Statistics) -> None:
        for fusion in FUSIONS if statistics != "released" else ("adaptive", "client", "random"):
            layer = opened(FFA(2, fusion=fusion, statistics=statistics), 3)
            x = normal(3, 2, 4, 4, dtype=torch.float32).requires_grad_()
            layer(x).sum().backward()
            assert torch.isfinite(x.grad).all() and layer.batches == 1
