"""Federated feature augmentation (FFA), the layer at the centre of FedFA.

Zhou and Konukoglu, *FedFA: Federated Feature Augmentation*, ICLR 2023. Equation numbers below are the
paper's names: (cfw) channel statistics, (clientspecific) their variance over a batch, (momentum) the
running statistics, (shareing) their variance over clients, (t) its modulation, (fusion), (in) and (rep)
the augmentation itself.

The arithmetic stands in three pure functions: :func:`modulate` (Eq. t), :func:`spread_terms` (Eq. fusion
and its variants) and :func:`augment` (Eqs. cfw, clientspecific, in, rep). :class:`FFA` holds the buffers and
draws the noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from types import ModuleType
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from fedfa.kernels import kernels, transformed
from fedfa.layers.randomness import RandomLayer, check_eps, check_probability

Fusion = Literal["adaptive", "direct", "client", "random", "total"]
Statistics = Literal["paper", "corrected", "kept", "released"]

RANDOM_STD = 0.5
"""FedFA-R's λ: the standard deviation of both statistics, in every channel (paper §4.1)."""


def modulate(variance: Tensor) -> Tensor:
    """γ of the client-sharing variances Σ² of one layer's channels (Eq. t): C·w/Σw with w = (1 + 1/Σ²)⁻¹.
    Where `variance` has more dimensions than one, channels are the last, and each row of them is for itself.

    Written as s/(1+s), which is 0 at Σ² = 0 where 1/Σ² is not defined. Where every channel's variance is 0
    (one client, or the first round) no channel stands out and γ is 1 everywhere. γ sums to C, is never
    negative, and grows with the variance; it is not invariant to the scale of the features.

    >>> modulate(torch.tensor([0.0, 1.0, 3.0]))
    tensor([0.0000, 1.2000, 1.8000])
    """
    # The largest number has weight 1, and so has ∞ in the limit; ∞/∞ is not a number.
    finite = variance.clamp(max=torch.finfo(variance.dtype).max)
    weight = finite / (1 + finite)
    total = weight.sum(-1, keepdim=True)
    alike = ~(total > 0)
    gamma = weight * (variance.shape[-1] / total.masked_fill_(alike, 1))
    return gamma.masked_fill_(alike, 1)


def between(fusion: Fusion, variance: Tensor) -> Tensor:
    """What the layer's γ buffers hold for a client-sharing variance Σ²: γ for `adaptive`, Σ² itself otherwise."""
    return modulate(variance) if fusion == "adaptive" else variance


class Spread(NamedTuple):
    """The fused variance as a function of the batch's: Σ̂² = factor·Σ² + offset."""

    factor: Tensor | float
    offset: Tensor | float


def spread_terms(fusion: Fusion, gamma_mean: Tensor, gamma_std: Tensor) -> Spread:
    """Eq. fusion and its variants, from the γ buffers of a layer; tensors are (2, 1, C), mean's row and std's row.

    ========  =====================  ==========================================
    adaptive  (γ + 1)·Σ²             Eq. fusion
    direct    (Σ²_clients + 1)·Σ²    'Direct Fusion' of the ablation
    client    Σ²                     FedFA-C
    random    λ², λ = 0.5            FedFA-R
    total     Σ² + Σ²_clients        law of total variance; not in the paper
    ========  =====================  ==========================================
    """
    match fusion:
        case "adaptive" | "direct":
            return Spread(torch.stack((gamma_mean, gamma_std)).unsqueeze(1) + 1, 0.0)
        case "client":
            return Spread(1.0, 0.0)
        case "random":
            return Spread(0.0, RANDOM_STD**2)
        case "total":
            return Spread(1.0, torch.stack((gamma_mean, gamma_std)).unsqueeze(1))


def channel_statistics(x: Tensor, eps: float = 1e-6, unbiased: bool = False) -> Tensor:
    """μ and σ of every sample and channel (Eq. cfw), stacked as (2, B, C), in float32 or better.

    ``σ = √(var + eps)`` is the one place where eps enters, so that σ can be divided by.
    """
    flat = widen(x).flatten(2)
    mean = flat.mean(2)
    count = flat.shape[2]
    square = (flat - mean.unsqueeze(2)).square().sum(2)
    std = (square / (max(count - 1, 1) if unbiased else count) + eps).sqrt()
    return torch.stack((mean, std))


def augment_reference(
    x: Tensor,
    noise: Tensor,
    spread: Spread,
    gate: Tensor | None = None,
    eps: float = 1e-6,
    unbiased: bool = False,
) -> tuple[Tensor, Tensor]:
    """:func:`augment`, in plain differentiable operations: what its hand-written backward is tested against,
    what `torch.compile` sees, and what is used where a gradient of the gradient is asked for."""
    statistics = channel_statistics(x, eps, unbiased)
    mean, std = statistics
    width = _width(_batch_variance(statistics, eps, unbiased), spread)
    shift = noise * width
    if gate is not None:
        # `where`, not a product: a closed gate must stop a NaN gradient too, and 0·∞ does not.
        shift = torch.where(gate, shift, torch.zeros_like(shift))
    wide = widen(x)
    b, a = _spatial(shift[0], x), _spatial(shift[1] / std, x)
    out = wide + a * (wide - _spatial(mean, x)) + b
    return out.to(x.dtype), statistics.detach().mean(1)


def augment(
    x: Tensor,
    noise: Tensor,
    spread: Spread,
    gate: Tensor | None = None,
    eps: float = 1e-6,
    unbiased: bool = False,
) -> tuple[Tensor, Tensor]:
    """Augment the features `x` (B, C, ...) with the standard normal `noise` (2, B, C): Eqs. in and rep.

    Substituting Eq. rep into Eq. in gives x̂ = x + a·(x − μ) + b with a = ε_σ·Σ̂_σ/σ and b = ε_μ·Σ̂_μ per
    sample and channel (Lemma 1): one pass over the features, and exact where x·scale + shift would cancel.
    `noise[0]` is ε_μ and `noise[1]` is ε_σ; Σ̂ comes from the batch (Eq. clientspecific) and `spread` (Eq.
    fusion). Where the boolean scalar `gate` is false the features come back as they are.

    Returns the augmented features, in the type of `x`, and the batch's mean μ and σ per channel, (2, C),
    detached: what Eq. momentum averages. `unbiased` takes both variances as the released code does. Gradients
    flow through μ, σ and Σ̂ as well as through x.
    """
    if (fused := _fused(x)) is not None:
        both: tuple[Tensor, Tensor] = fused.augment(x, noise, spread, gate, eps, unbiased)
        return both
    if (
        torch.compiler.is_compiling()
        or not x.is_contiguous()  # channels_last, which plain operations keep
        or x.device.type not in ("cpu", "cuda")
        or torch._C._are_functorch_transforms_active()  # torch.func takes no backward by hand
    ):
        return augment_reference(x, noise, spread, gate, eps, unbiased)
    out, statistics = _Augment.apply(  # type: ignore[no-untyped-call]  # torch has no annotation here
        x, noise, spread.factor, spread.offset, gate, eps, unbiased
    )
    return out, statistics


class _Augment(torch.autograd.Function):
    """`augment_reference` with its backward by hand: fewer operations, and one feature map kept.

    With x̄ = (x − μ)/σ the layer is x̂ = x + A·x̄ + b, A = ε_σ·Σ̂_σ, b = ε_μ·Σ̂_μ, and its backward has the same
    shape, dx = G·(1 + A/σ) + u·x̄ + v, with u and v per sample and channel. On small networks the time goes into
    the number of operations, not into the numbers, so the rows for mean and std travel as one (2, B, C) tensor.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        noise: Tensor,
        factor: Tensor | float,
        offset: Tensor | float,
        gate: Tensor | None,
        eps: float,
        unbiased: bool,
    ) -> tuple[Tensor, Tensor]:
        wide = widen(x)
        batch, channels = x.shape[:2]
        shape = (batch, channels) + (1,) * (x.dim() - 2)
        pixels = math.prod(x.shape[2:])
        # var·n/(n−1) + eps = (n/(n−1))·(var + eps·(n−1)/n): the unbiased σ is the biased one, stretched.
        stretch = pixels / (pixels - 1) if unbiased and pixels > 1 else 1.0
        # Group normalisation with a group a channel: the one CPU kernel that takes both moments in a pass
        # (`var_mean` is twenty times slower there).
        normal, mean, rstd = torch.native_group_norm(wide, None, None, batch, channels, pixels, channels, eps / stretch)
        if stretch != 1.0:
            normal, rstd = normal.div_(math.sqrt(stretch)), rstd.div_(math.sqrt(stretch))
        statistics = torch.stack((mean, rstd.reciprocal()))
        width, centre = torch.std_mean(statistics, 1, correction=int(unbiased and batch > 1), keepdim=True)
        deviation = statistics.sub_(centre)
        # √ is safe here: its derivative is taken by hand below, where Σ̂ = 0 comes with deviation = 0.
        if unbiased and batch > 1:
            width = width.square_().add_(eps).sqrt_()
        if isinstance(offset, Tensor) or offset:
            width = width.square_().mul_(factor).add_(offset).sqrt_()
        else:
            width = width.mul_(factor**0.5)
        # A product will do for the gate: the noise is finite, and so is all that it meets.
        opened = noise if gate is None else noise * gate
        shift, scale = (opened * width).unbind()
        out = normal.mul_(scale.view(shape)).add_(shift.view(shape)).add_(wide)
        if ctx.needs_input_grad[0]:
            slope = factor / width.mul_(_samples(batch, unbiased)).clamp_min_(_TINY)  # dΣ̂/dstatistic = slope·deviation
            ctx.save_for_backward(x, opened, mean, rstd, deviation.mul_(slope), scale)
            ctx.given = (noise, Spread(factor, offset), gate, eps, unbiased)
        batch_statistics = centre.squeeze(1)
        ctx.mark_non_differentiable(batch_statistics)
        return (out if wide is x else out.to(x.dtype)), batch_statistics

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, noise, mean, rstd, pull, scale = ctx.saved_tensors
        if torch.is_grad_enabled():  # a graph of this backward is asked for: let autograd build it
            out, _ = augment_reference(x, *ctx.given)
            (dx,) = torch.autograd.grad(out, x, grads[0], create_graph=True)
            return dx, None, None, None, None, None, None
        wide, grad = widen(x), widen(grads[0]).contiguous()
        shape = mean.shape + (1,) * (x.dim() - 2)
        rows, pixels = mean.numel(), math.prod(x.shape[2:])
        # Σ G and Σ G·x̄ over pixels, in one pass: the bias and weight gradients of a group normalisation that
        # takes every sample and channel for a channel of its own (its weight is not read for them).
        _, weight, bias = _group_norm_backward(
            grad.view(1, rows, pixels), wide.view(1, rows, pixels), mean.view(1, rows), rstd.view(1, rows),
            rstd.view(rows), 1, rows, pixels, rows, (False, True, True),
        )  # fmt: skip
        sums = torch.stack((bias, weight)).view(noise.shape)
        ratio = scale * rstd
        back = pull * (sums * noise).sum(1, keepdim=True)
        outer, inner = back.addcmul_(ratio, sums, value=-1).div_(pixels).unbind()
        inner = inner * rstd
        if ctx.given[-1]:  # σ's variance was taken over pixels − 1
            inner *= pixels / max(pixels - 1, 1)
        dx = (wide - mean.view(shape)).mul_(inner.view(shape)).add_(outer.view(shape))
        dx += grad * (ratio + 1).view(shape)
        return (dx if wide is x else dx.to(x.dtype)), None, None, None, None, None, None


def _fused(x: Tensor) -> ModuleType | None:
    """The Triton kernels, where they are there and take features like `x`."""
    if x.device.type != "cuda" or x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return None
    if transformed():
        return None
    fused = kernels("fedfa.layers.ffa_triton", x.device)
    return fused if fused is not None and fused.usable(x) else None


_group_norm_backward = torch.ops.aten.native_group_norm_backward.default
_TINY = 1e-20
"""Below this Σ̂ is taken for 0, where the statistics do not deviate and any finite slope gives gradient 0."""


def widen(x: Tensor) -> Tensor:
    """Features in the type that statistics are taken in: float32 for half precision, otherwise their own."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _spatial(value: Tensor, x: Tensor) -> Tensor:
    """A (B, C) tensor as one that broadcasts over the spatial dimensions of x."""
    return value.reshape(value.shape + (1,) * (x.dim() - 2))


def _samples(batch: int, unbiased: bool) -> int:
    return max(batch - 1, 1) if unbiased else batch


def _batch_variance(statistics: Tensor, eps: float, unbiased: bool) -> Tensor:
    """Σ² of both statistics over the batch (Eq. clientspecific), (2, 1, C)."""
    batch = statistics.shape[1]
    deviation = statistics - statistics.mean(1, keepdim=True)
    variance = deviation.square().sum(1, keepdim=True) / _samples(batch, unbiased)
    # The released code adds eps here too. At B = 1 it divides by 0; here one sample has no spread at all.
    return variance + eps if unbiased and batch > 1 else variance


def _width(variance: Tensor, spread: Spread) -> Tensor:
    """Σ̂ = √(factor·Σ² + offset), with value 0 and gradient 0 at 0, where a plain root has gradient ∞."""
    fused = spread.factor * variance + spread.offset
    positive = fused > 0
    return torch.where(positive, torch.where(positive, fused, torch.ones_like(fused)).sqrt(), torch.zeros_like(fused))


class Drawn(NamedTuple):
    """One forward's randomness of one FFA layer."""

    gate: Tensor | bool
    """Whether the layer is active for this batch: a scalar tensor on a GPU, where nothing may wait for its value;
    a plain bool on the CPU, where it is at hand and a closed layer need not compute what `where` would discard."""
    noise: Tensor
    """(2, B, C) standard normal: ε_μ and ε_σ."""


CLOSED = Drawn(False, torch.empty(0))
"""What a closed layer on the CPU draws."""


class FFA(RandomLayer):
    """Federated feature augmentation, for features (B, C, H, W), (B, C, D, H, W) or (B, C, L).

    While training, with probability `p` a batch, the mean and standard deviation of every sample and channel
    are drawn anew from Gaussians around them, whose variance is the statistics' variance over the batch, fused
    with how they differ across the federation. In evaluation mode, and with p = 0, the layer is the identity.

    Used alone, without a federation, γ stays where it starts, at 1: all channels alike, Σ̂² = 2·Σ², which is
    DSU (Li et al., 2022) with its noise √2 times as wide. :func:`fedfa.update_gamma` sets γ from groups of
    samples (domains) in one process; under ``fedfa.ALGORITHMS["fedfa"]`` the server does, every round.

    Args:
        channels: C, the features' second dimension.
        p: probability that the layer is active for a batch.
        momentum: α of the running statistics (Eq. momentum).
        fusion: how the batch's and the federation's variances combine; see :func:`spread_terms`.
        statistics: what happens to the running statistics in a federation. ``paper``: reset every round and
            used as they are. ``corrected``: reset every round, bias-corrected. ``kept``: kept by each client,
            never reset, bias-corrected. ``released``: as the authors' code does it: averaged by the server and
            sent back, unbiased variances with eps in both, γ ≡ 1.
        eps: added to the variance over pixels, under the root.

    Buffers: ``mean`` and ``std``, the running statistics (from 0 and 1, moved only by active batches);
    ``gamma_mean`` and ``gamma_std`` (from 1 for ``adaptive``; for ``direct`` and ``total`` they hold Σ² across
    clients and start from 0); ``batches``, the count of active batches.
    """

    stream = "ffa"
    mean: Tensor
    std: Tensor
    gamma_mean: Tensor
    gamma_std: Tensor
    batches: Tensor

    def __init__(
        self,
        channels: int,
        p: float = 0.5,
        momentum: float = 0.99,
        fusion: Fusion = "adaptive",
        statistics: Statistics = "paper",
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        if channels < 1:
            raise ValueError(f"FFA needs at least one channel, not {channels}")
        check_eps(eps)
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum is between 0 and 1 (1 excluded), not {momentum}")
        for name, value, allowed in (("fusion", fusion, Fusion), ("statistics", statistics, Statistics)):
            if value not in get_args(allowed):
                raise ValueError(f"{name} is one of {', '.join(get_args(allowed))}, not {value!r}")
        if statistics == "released" and fusion in ("direct", "total"):
            raise ValueError(f"statistics='released' has no variance over clients, which fusion={fusion!r} needs")
        self.channels, self.p, self.momentum, self.eps = channels, p, momentum, eps
        self.fusion: Fusion = fusion
        self.statistics: Statistics = statistics
        self.register_buffer("mean", torch.empty(channels))
        self.register_buffer("std", torch.empty(channels))
        self.register_buffer("gamma_mean", torch.full((channels,), 1.0 if fusion == "adaptive" else 0.0))
        self.register_buffer("gamma_std", self.gamma_mean.clone())
        self.register_buffer("batches", torch.tensor(0))
        self.tracking = True
        self.reset_statistics()

    @property
    def p(self) -> float:
        """The probability that the layer is active for a batch."""
        return self._p

    @p.setter
    def p(self, value: float) -> None:
        check_probability(value)
        self._p = value
        # Below which a standard normal number is with that probability. Here, since `torch.compile` cannot trace it.
        self.quantile = NormalDist().inv_cdf(value) if 0 < value < 1 else math.copysign(math.inf, value - 0.5)

    def reset_statistics(self) -> None:
        """Running statistics back to 0 and 1, as Algorithm 1 does for every client at the start of a round."""
        self.mean.zero_()
        self.std.fill_(1.0)
        self.batches.zero_()

    def corrected(self) -> tuple[Tensor, Tensor]:
        """The running mean and std without their bias towards 0 and 1: (x̄ − αⁿ·x̄₀)/(1 − αⁿ), after n active
        batches. With none there is nothing to correct: they come back as they are, and `batches` says so."""
        left = torch.pow(self.momentum, self.batches.to(self.mean.dtype))
        seen = torch.where(self.batches > 0, 1 - left, torch.ones_like(left))
        keep = torch.where(self.batches > 0, left, torch.zeros_like(left))
        return self.mean / seen, (self.std - keep) / seen

    @torch.no_grad()
    def set_between(self, variance_mean: Tensor, variance_std: Tensor) -> None:
        """Take Σ² across clients or domains (Eq. shareing) into the γ buffers (Eq. t, for ``adaptive``)."""
        if self.fusion in ("client", "random") or self.statistics == "released":
            return
        self.gamma_mean.copy_(between(self.fusion, variance_mean))
        self.gamma_std.copy_(between(self.fusion, variance_std))

    @classmethod
    def sample(
        cls, layers: Sequence[RandomLayer], batch: int, generator: torch.Generator | None, device: torch.device
    ) -> list[Any]:
        """Gates and noise of several layers for one batch. On the CPU a closed layer gets no noise."""
        own: list[FFA] = layers  # type: ignore[assignment]  # layers are sampled class by class
        if device.type != "cpu" or torch.compiler.is_compiling():
            return _drawn_at_once(own, batch, generator, device)
        uniform = torch.rand(len(own), generator=generator)
        dtype = own[0].mean.dtype
        return [
            Drawn(True, torch.randn((2, batch, layer.channels), generator=generator, dtype=dtype))
            if chance < layer.p
            else CLOSED
            for layer, chance in zip(own, uniform.tolist(), strict=True)
        ]

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() < 3 or x.shape[1] != self.channels:
            raise ValueError(f"FFA({self.channels}) takes (batch, {self.channels}, ...) features, not {tuple(x.shape)}")
        if not self.training or self.p == 0 or not x.numel():
            return x
        gate, noise = self.draw(x)
        if gate is False:
            return x
        gate = None if gate is True else gate
        if (fused := _fused(x)) is not None:
            whole: Tensor = fused.layer(self, x, noise, gate)
            return whole
        spread = spread_terms(self.fusion, self.gamma_mean, self.gamma_std)
        out, statistics = augment(x, noise, spread, gate, self.eps, self.statistics == "released")
        if self.tracking:
            self._track(statistics, gate)
        return out

    def follow(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """A forward hook that puts this layer after another module. A bound method, so that a deep copy of the
        model calls the copy's layer."""
        if not isinstance(output, Tensor):
            raise ValueError(f"FFA follows a module that returns features, not {type(output).__name__}")
        augmented: Tensor = self(output)
        return augmented

    def _track(self, statistics: Tensor, gate: Tensor | None) -> None:
        """Eq. momentum, where the gate is open (Algorithm 2)."""
        weight = (1 - self.momentum) if gate is None else gate * (1 - self.momentum)
        mean, std = statistics.to(self.mean.dtype).unbind()
        self.mean.lerp_(mean, weight)
        self.std.lerp_(std, weight)
        self.batches.add_(1 if gate is None else gate)

    def extra_repr(self) -> str:
        return (
            f"{self.channels}, p={self.p}, momentum={self.momentum}, fusion={self.fusion}, statistics={self.statistics}"
        )


def _drawn_at_once(
    layers: Sequence[FFA], batch: int, generator: torch.Generator | None, device: torch.device
) -> list[Drawn]:
    """Gates and noise of all layers from one launch, for a GPU: a gate is a normal number too, open where that is below
    the layer's quantile."""
    channels, dtype = [layer.channels for layer in layers], layers[0].mean.dtype
    rows = 2 * batch * sum(channels)
    normal = torch.randn(rows + len(layers), generator=generator, device=device, dtype=dtype)
    parts, chances = normal[:rows].view(2, batch, -1).split(channels, 2), normal[rows:]
    quantiles = [layer.quantile for layer in layers]
    if len(set(quantiles)) == 1:  # one launch, not one a layer
        gates = (chances < quantiles[0]).unbind()
    else:
        gates = tuple(chance < quantile for chance, quantile in zip(chances.unbind(), quantiles, strict=True))
    return [Drawn(*drawn) for drawn in zip(gates, parts, strict=True)]
