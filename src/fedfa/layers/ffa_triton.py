"""FFA's arithmetic as Triton kernels, for CUDA: two launches forward and two backward, whatever the format.

Needs Triton, so it is to be imported only once features on a GPU come. :func:`augment` is that of
:mod:`fedfa.layers.ffa`, whose ``_Augment`` has the mathematics; :func:`layer` is a layer's whole forward. Features are
seen as (B, C, P) with two steps in memory, from channel to channel and from pixel to pixel, one of which is 1: so the
same kernels serve NCHW and channels_last.

Forward: `_moments` (reads the features: mean and squared deviations of every sample and channel) and `_apply`
(x̂ = x + a·(x − μ) + b, with the two numbers a and b that every sample and channel needs; each program finds Σ̂ of its
channels anew, which is less work than a launch). Backward: `_sums` (Σ G and Σ G·(x − μ)) and `_spread`
(dx = G·(1 + a) + inner·(x − μ) + outer). All sums are float32. Where a gate is closed nothing is computed, and the
features or their gradient are copied.

Nothing waits for the device and every block size follows from shapes, so all of it can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedfa.layers.ffa import FFA, RANDOM_STD, Fusion, Spread, augment_reference

TILE = 4096
"""Elements that a program holds at once."""
PROGRAMS = 256
"""As many programs as keep every multiprocessor of a large GPU busy."""
SECTOR = 16
"""Channels side by side that a program reads at least: 32 bytes in half precision, what memory gives at once."""
WIDE = 32
"""Channels of a program that applies what was found, and has to find it: few programs then read the same numbers."""
SAMPLES = 64
"""Samples whose statistics a program holds at once."""
SHARED = ["batch", "pixels", "chunk"]
"""Arguments whose value is not worth a compilation of its own."""


@triton.jit
def _gathered(value, mask, count, seen, mean, square, axis: tl.constexpr):
    """Mean and squared deviations of what was seen, with a block more along an axis (Chan's rule). The block's mean
    is corrected by its own deviations, and the first block is taken as it is: so values that are all the same have
    that mean and deviate by exactly 0."""
    own = tl.sum(tl.where(mask, value, 0.0), axis, keep_dims=True) / count
    own += tl.sum(tl.where(mask, value - own, 0.0), axis, keep_dims=True) / count
    deviation = tl.where(mask, value - own, 0.0)
    share = tl.where(seen > 0, count / (seen + count), 1.0)
    gap = own - mean
    square += tl.sum(deviation * deviation, axis, keep_dims=True) + gap * gap * seen * share
    return mean + gap * share, square


@triton.jit(do_not_specialize=SHARED)
def _moments(
    x, gate, parts, batch, channels, pixels, chunk, step_c, step_p,
    skipped: tl.constexpr, block_c: tl.constexpr, block_p: tl.constexpr,
):  # fmt: skip
    """Mean and sum of squared deviations of every sample and channel over a chunk of pixels, into `parts`
    (chunks, 2, B, C)."""
    blocks = tl.cdiv(channels, block_c)
    sample = tl.program_id(0) // blocks
    c = tl.program_id(0) % blocks * block_c + tl.arange(0, block_c)
    inside = c < channels
    first = tl.program_id(1) * chunk
    last = tl.minimum(first + chunk, pixels)
    row = x + sample.to(tl.int64) * channels * pixels + c * step_c
    end = last
    if skipped:
        end = tl.where(tl.load(gate) != 0, last, first)
    mean = tl.zeros([block_c, 1], tl.float32)
    square = tl.zeros([block_c, 1], tl.float32)
    for start in range(first, end, block_p):
        p = start + tl.arange(0, block_p)
        mask = inside[:, None] & (p < last)[None, :]
        value = tl.load(row[:, None] + p[None, :] * step_p, mask=mask, other=0).to(tl.float32)
        count = tl.minimum(last - start, block_p) * 1.0
        mean, square = _gathered(value, mask, count, (start - first) * 1.0, mean, square, 1)
    plane = batch * channels
    spot = (parts + tl.program_id(1) * 2 * plane + sample * channels + c)[:, None]
    tl.store(spot, mean, mask=inside[:, None])
    tl.store(spot + plane, square, mask=inside[:, None])


@triton.jit
def _statistics(parts, b, c, mask, batch, channels, pixels, chunk, divisor, eps):
    """μ and σ of some samples and channels, from the chunks."""
    plane = batch * channels
    spot = parts + b * channels + c
    mean = tl.load(spot, mask=mask, other=0)
    square = tl.load(spot + plane, mask=mask, other=0)
    for start in range(chunk, pixels, chunk):
        spot += 2 * plane
        count = tl.minimum(pixels - start, chunk) * 1.0
        seen = start * 1.0
        share = count / (seen + count)
        gap = tl.load(spot, mask=mask, other=0) - mean
        square += tl.load(spot + plane, mask=mask, other=0) + gap * gap * seen * share
        mean += gap * share
    return mean, tl.sqrt_rn(square / divisor + eps)


@triton.jit
def _width(variance, factor, offset, samples):
    """Σ̂ = √(factor·Σ² + offset), 0 at 0, and dΣ̂/dstatistic over the statistic's deviation, 0 there too."""
    fused = factor * variance + offset
    width = tl.where(fused > 0, tl.sqrt_rn(tl.where(fused > 0, fused, 1.0)), 0.0)
    return width, tl.where(fused > 0, factor / (tl.where(fused > 0, width, 1.0) * samples), 0.0)


@triton.jit
def _term(base, mean, std, c, inside, varies: tl.constexpr):
    """A term's value for μ and for σ, of some channels."""
    own_mean = tl.where(inside, base, 0.0)
    own_std = own_mean
    if varies:
        own_mean += tl.load(mean + c, mask=inside, other=0).to(tl.float32)
        own_std += tl.load(std + c, mask=inside, other=0).to(tl.float32)
    return own_mean, own_std


@triton.jit
def _follow(running, now, c, mask, weight):
    """Eq. momentum, where the mask has it."""
    before = tl.load(running + c, mask=mask, other=0).to(tl.float32)
    tl.store(running + c, before + weight * (now - before), mask=mask)


@triton.jit
def _over_batch(parts, c, inside, end, batch, channels, pixels, chunk, divisor, eps, block_b: tl.constexpr):
    """Mean and squared deviations of μ and of σ over the batch, of some channels."""
    mean = tl.zeros_like(c).to(tl.float32)
    mean_square = tl.zeros_like(mean)
    std = tl.zeros_like(mean)
    std_square = tl.zeros_like(mean)
    for start in range(0, end, block_b):
        b = start + tl.arange(0, block_b)[None, :]
        mask = (b < batch) & inside
        own_mean, own_std = _statistics(parts, b, c, mask, batch, channels, pixels, chunk, divisor, eps)
        count = tl.minimum(batch - start, block_b) * 1.0
        mean, mean_square = _gathered(own_mean, mask, count, start * 1.0, mean, mean_square, 1)
        std, std_square = _gathered(own_std, mask, count, start * 1.0, std, std_square, 1)
    return mean, mean_square, std, std_square


@triton.jit(do_not_specialize=SHARED)
def _apply(
    x, gate, parts, noise, factor_mean, factor_std, offset_mean, offset_std, rows, centres,
    running_mean, running_std, batches, out,
    batch, channels, pixels, chunk, step_c, step_p, noise_k, noise_b, noise_c, factor, offset, weight, eps,
    factored: tl.constexpr, shifted: tl.constexpr, tracked: tl.constexpr, gated: tl.constexpr,
    skipped: tl.constexpr, unbiased: tl.constexpr, block_b: tl.constexpr, block_c: tl.constexpr, block_p: tl.constexpr,
):  # fmt: skip
    """x̂ = x + a·(x − μ) + b; x itself where the gate is closed. Beside it, from the first program of a sample, `rows`
    (5, B, C): μ, σ, a, and dΣ̂/dμ, dΣ̂/dσ; from the first of all, `centres` (2, C), the statistics' means over the
    batch, and the running statistics, which move where the gate is open."""
    blocks = tl.cdiv(channels, block_c)
    sample = tl.program_id(0) // blocks
    c = (tl.program_id(0) % blocks * block_c + tl.arange(0, block_c))[:, None]
    p = (tl.program_id(1) * block_p + tl.arange(0, block_p))[None, :]
    inside = c < channels
    mask = inside & (p < pixels)
    place = sample.to(tl.int64) * channels * pixels + c * step_c + p * step_p
    value = tl.load(x + place, mask=mask, other=0)
    opened = 1
    if gated:
        opened = tl.where(tl.load(gate) != 0, 1, 0)
    end = batch
    if skipped:
        end = batch * opened
    known = inside & (end > 0)
    divisor = tl.maximum(pixels - 1, 1) * 1.0 if unbiased else pixels * 1.0
    samples = tl.maximum(batch - 1, 1) * 1.0 if unbiased else batch * 1.0
    extra = tl.where(batch > 1, eps, 0.0) if unbiased else 0.0
    spot = noise + sample * noise_b + c * noise_c
    mean_noise = tl.load(spot, mask=known, other=0).to(tl.float32)
    std_noise = tl.load(spot + noise_k, mask=known, other=0).to(tl.float32)
    mean_factor, std_factor = _term(factor, factor_mean, factor_std, c, inside, factored)
    mean_offset, std_offset = _term(offset, offset_mean, offset_std, c, inside, shifted)
    mean, std = _statistics(parts, sample, c, known, batch, channels, pixels, chunk, divisor, eps)
    centre, mean_square, std_centre, std_square = _over_batch(
        parts, c, inside, end, batch, channels, pixels, chunk, divisor, eps, block_b
    )
    mean_width, mean_slope = _width(mean_square / samples + extra, mean_factor, mean_offset, samples)
    std_width, std_slope = _width(std_square / samples + extra, std_factor, std_offset, samples)
    scale = std_noise * std_width / std
    wide = value.to(tl.float32)
    new = (wide + scale * (wide - mean) + mean_noise * mean_width).to(value.dtype)
    tl.store(out + place, tl.where(opened != 0, new, value), mask=mask)
    plane = batch * channels
    first = known & (tl.program_id(1) == 0)
    row = rows + sample * channels + c
    tl.store(row, mean, mask=first)
    tl.store(row + plane, std, mask=first)
    tl.store(row + 2 * plane, scale, mask=first)
    tl.store(row + 3 * plane, mean_slope * (mean - centre), mask=first)
    tl.store(row + 4 * plane, std_slope * (std - std_centre), mask=first)
    first &= sample == 0
    tl.store(centres + c, centre, mask=first)
    tl.store(centres + channels + c, std_centre, mask=first)
    if tracked:
        _follow(running_mean, centre, c, first & (opened != 0), weight)
        _follow(running_std, std_centre, c, first & (opened != 0), weight)
        one = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
        tl.store(batches, tl.load(batches) + opened, mask=one)


@triton.jit(do_not_specialize=SHARED)
def _sums(
    x, grad, gate, rows, parts, batch, channels, pixels, chunk, step_c, step_p,
    gated: tl.constexpr, block_c: tl.constexpr, block_p: tl.constexpr,
):  # fmt: skip
    """Σ G and Σ G·(x − μ) of every sample and channel over a chunk of pixels, into `parts` (chunks, 2, B, C)."""
    blocks = tl.cdiv(channels, block_c)
    sample = tl.program_id(0) // blocks
    c = tl.program_id(0) % blocks * block_c + tl.arange(0, block_c)
    inside = c < channels
    first = tl.program_id(1) * chunk
    last = tl.minimum(first + chunk, pixels)
    end = last
    if gated:
        end = tl.where(tl.load(gate) != 0, last, first)
    place = sample.to(tl.int64) * channels * pixels + c * step_c
    mean = tl.load(rows + sample * channels + c, mask=inside, other=0)[:, None]
    outer = tl.zeros([block_c], tl.float32)
    inner = tl.zeros([block_c], tl.float32)
    for start in range(first, end, block_p):
        p = start + tl.arange(0, block_p)
        mask = inside[:, None] & (p < last)[None, :]
        here = place[:, None] + p[None, :] * step_p
        value = tl.load(x + here, mask=mask, other=0).to(tl.float32)
        slope = tl.load(grad + here, mask=mask, other=0).to(tl.float32)
        outer += tl.sum(slope, 1)
        inner += tl.sum(tl.where(mask, slope * (value - mean), 0.0), 1)
    plane = batch * channels
    spot = parts + tl.program_id(1) * 2 * plane + sample * channels + c
    tl.store(spot, outer, mask=inside)
    tl.store(spot + plane, inner, mask=inside)


@triton.jit
def _total(parts, b, c, mask, batch, channels, pixels, chunk):
    """Both sums of some samples and channels, over the chunks."""
    plane = batch * channels
    spot = parts + b * channels + c
    outer = tl.load(spot, mask=mask, other=0)
    inner = tl.load(spot + plane, mask=mask, other=0)
    for _ in range(chunk, pixels, chunk):
        spot += 2 * plane
        outer += tl.load(spot, mask=mask, other=0)
        inner += tl.load(spot + plane, mask=mask, other=0)
    return outer, inner


@triton.jit
def _pulls(
    parts, noise, rows, c, inside, end, batch, channels, pixels, chunk, noise_k, noise_b, noise_c, block_b: tl.constexpr
):
    """How the gradients of all samples pull at Σ̂ of μ and of σ, of some channels."""
    mean_pull = tl.zeros_like(c).to(tl.float32)
    std_pull = tl.zeros_like(mean_pull)
    for start in range(0, end, block_b):
        b = start + tl.arange(0, block_b)[None, :]
        mask = (b < batch) & inside
        outer, inner = _total(parts, b, c, mask, batch, channels, pixels, chunk)
        std = tl.load(rows + (batch + b) * channels + c, mask=mask, other=1)
        spot = noise + b * noise_b + c * noise_c
        mean_noise = tl.load(spot, mask=mask, other=0).to(tl.float32)
        std_noise = tl.load(spot + noise_k, mask=mask, other=0).to(tl.float32)
        mean_pull += tl.sum(mean_noise * outer, 1, keep_dims=True)
        std_pull += tl.sum(std_noise * (inner / std), 1, keep_dims=True)
    return mean_pull, std_pull


@triton.jit(do_not_specialize=SHARED)
def _spread(
    x, grad, gate, parts, noise, rows, out,
    batch, channels, pixels, chunk, step_c, step_p, noise_k, noise_b, noise_c,
    gated: tl.constexpr, unbiased: tl.constexpr, block_b: tl.constexpr, block_c: tl.constexpr, block_p: tl.constexpr,
):  # fmt: skip
    """dx = G·(1 + a) + inner·(x − μ) + outer, where `inner` and `outer` are how μ, σ and, through all samples of the
    batch, Σ̂ pull at a sample's pixels; G itself where the gate is closed, and x is not read there."""
    blocks = tl.cdiv(channels, block_c)
    sample = tl.program_id(0) // blocks
    c = (tl.program_id(0) % blocks * block_c + tl.arange(0, block_c))[:, None]
    p = (tl.program_id(1) * block_p + tl.arange(0, block_p))[None, :]
    inside = c < channels
    place = sample.to(tl.int64) * channels * pixels + c * step_c + p * step_p
    slope = tl.load(grad + place, mask=inside & (p < pixels), other=0)
    end = batch
    if gated:
        end = tl.where(tl.load(gate) != 0, batch, 0)
    known = inside & (end > 0)
    value = tl.load(x + place, mask=known & (p < pixels), other=0).to(tl.float32)
    plane = batch * channels
    row = rows + sample * channels + c
    mean = tl.load(row, mask=known, other=0)
    std = tl.load(row + plane, mask=known, other=1)
    scale = tl.load(row + 2 * plane, mask=known, other=0)
    mean_slope = tl.load(row + 3 * plane, mask=known, other=0)
    std_slope = tl.load(row + 4 * plane, mask=known, other=0)
    own_outer, own_inner = _total(parts, sample, c, known, batch, channels, pixels, chunk)
    mean_pull, std_pull = _pulls(
        parts, noise, rows, c, inside, end, batch, channels, pixels, chunk, noise_k, noise_b, noise_c, block_b
    )
    divisor = tl.maximum(pixels - 1, 1) * 1.0 if unbiased else pixels * 1.0
    outer = (mean_slope * mean_pull - scale * own_outer) / pixels
    inner = (std_slope * std_pull - scale * (own_inner / std)) / (divisor * std)
    wide = slope.to(tl.float32)
    new = (wide + scale * wide + (inner * (value - mean) + outer)).to(slope.dtype)
    tl.store(out + place, tl.where(end > 0, new, slope), mask=inside & (p < pixels))


class Term(NamedTuple):
    """The factor or the offset of a :class:`~fedfa.layers.ffa.Spread`, in the pieces that a kernel reads: `base`, plus
    a value per channel for μ and one for σ, each (C,)."""

    base: float
    mean: Tensor | None = None
    std: Tensor | None = None

    @classmethod
    def of(cls, value: Tensor | float, channels: int) -> Term:
        if not isinstance(value, Tensor):
            return cls(value)
        mean, std = value.expand(2, 1, channels).contiguous().view(2, channels).unbind()
        return cls(0.0, mean, std)

    def together(self) -> Tensor | float:
        if self.mean is None or self.std is None:
            return self.base
        return torch.stack((self.mean, self.std)).unsqueeze(1) + self.base


def terms(fusion: Fusion, gamma_mean: Tensor, gamma_std: Tensor) -> tuple[Term, Term]:
    """:func:`~fedfa.layers.ffa.spread_terms` without a launch: the kernel adds 1 to γ itself."""
    match fusion:
        case "adaptive" | "direct":
            return Term(1.0, gamma_mean, gamma_std), Term(0.0)
        case "client":
            return Term(1.0), Term(0.0)
        case "random":
            return Term(0.0), Term(RANDOM_STD**2)
        case "total":
            return Term(1.0), Term(0.0, gamma_mean, gamma_std)


class Running(NamedTuple):
    """Running statistics, for a kernel to move (Eq. momentum)."""

    mean: Tensor
    std: Tensor
    batches: Tensor
    momentum: float


def augment(
    x: Tensor, noise: Tensor, spread: Spread, gate: Tensor | None = None, eps: float = 1e-6, unbiased: bool = False
) -> tuple[Tensor, Tensor]:
    """:func:`fedfa.layers.ffa.augment`, of features that are :func:`usable`."""
    own = (Term.of(value, x.shape[1]) for value in spread)
    out, statistics = _Fused.apply(x, noise, *own, gate, eps, unbiased, None, False)
    return out, statistics


def layer(ffa: FFA, x: Tensor, noise: Tensor, gate: Tensor | None) -> Tensor:
    """What a layer makes of features that are :func:`usable`. It reads γ and moves the running statistics on the way;
    where the gate is closed no statistics are taken."""
    running = Running(ffa.mean, ffa.std, ffa.batches, ffa.momentum) if ffa.tracking else None
    own, unbiased = terms(ffa.fusion, ffa.gamma_mean, ffa.gamma_std), ffa.statistics == "released"
    out: Tensor
    out, _ = _Fused.apply(x, noise, *own, gate, ffa.eps, unbiased, running, True)
    return out


class _Fused(torch.autograd.Function):
    """Both for autograd, which asks the reference where it wants a gradient of the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        noise: Tensor,
        factor: Term,
        offset: Term,
        gate: Tensor | None,
        eps: float,
        unbiased: bool,
        running: Running | None,
        skip: bool,
    ) -> tuple[Tensor, Tensor]:
        out, rows, statistics = forward(x, noise, factor, offset, gate, eps, unbiased, running, skip)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(x, noise, rows, gate)
            ctx.given = (factor, offset, eps, unbiased)
        ctx.mark_non_differentiable(statistics)
        return out, statistics

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, noise, rows, gate = ctx.saved_tensors
        factor, offset, eps, unbiased = ctx.given
        if torch.is_grad_enabled():  # a graph of this backward is asked for: let autograd build it
            out, _ = augment_reference(x, noise, Spread(factor.together(), offset.together()), gate, eps, unbiased)
            (dx,) = torch.autograd.grad(out, x, grads[0], create_graph=True)
        else:
            dx = backward(grads[0], x, noise, rows, gate, unbiased)
        return dx, None, None, None, None, None, None, None, None


def steps(x: Tensor) -> tuple[int, int] | None:
    """Elements from channel to channel and from pixel to pixel; None where the features lie in neither format."""
    pixels = x[0, 0].numel()
    if x.is_contiguous():
        return pixels, 1
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    return (1, x.shape[1]) if last is not None and x.is_contiguous(memory_format=last) else None


def usable(x: Tensor) -> bool:
    """Whether the kernels take features like these."""
    size = x[0].numel() if len(x) else 0
    return 0 < size < 2**30 and x[0, 0].numel() < 2**22 and x.shape[:2].numel() < 2**28 and steps(x) is not None


class _Launch:
    """What every launch for some features needs: the shape, the steps in memory, and the blocks that follow."""

    def __init__(self, x: Tensor) -> None:
        found = steps(x)
        assert found is not None, "usable() says whether features can come here"
        self.step_c, self.step_p = found
        self.batch, self.channels = x.shape[:2]
        self.pixels = x[0, 0].numel()
        self.block_b = min(triton.next_power_of_2(self.batch), SAMPLES)

    def tile(self, programs: int) -> tuple[int, int]:
        """Channels and pixels of a block: long in memory, and narrow enough for that many programs, where each takes
        all pixels of its channels."""
        channels, pixels = (triton.next_power_of_2(size) for size in (self.channels, self.pixels))
        if self.step_c == 1:
            block_c, least = min(channels, 4 * SECTOR), SECTOR
        else:
            block_c, least = min(channels, max(TILE // pixels, 1)), 1
        while block_c > least and self.batch * triton.cdiv(self.channels, block_c) < programs:
            block_c //= 2
        return block_c, min(pixels, TILE // block_c)

    def applied(self) -> tuple[tuple[int, int], dict[str, int]]:
        """Grid and blocks of a kernel that applies what was found."""
        channels, pixels = (triton.next_power_of_2(size) for size in (self.channels, self.pixels))
        block_c = min(channels, WIDE if self.step_c == 1 else max(TILE // pixels, 1))
        block_p = min(pixels, 2 * TILE // block_c)
        blocks = {"block_b": self.block_b, "block_c": block_c, "block_p": block_p, "num_warps": 8}
        return self.grid(block_c, triton.cdiv(self.pixels, block_p)), blocks

    def chunks(self, block_c: int, block_p: int) -> tuple[int, int]:
        """Into how many chunks pixels are split, and their length: more than one where programs would be few."""
        programs = self.batch * triton.cdiv(self.channels, block_c)
        wanted = max(1, min(triton.cdiv(self.pixels, block_p), PROGRAMS // programs))
        chunk = triton.cdiv(triton.cdiv(self.pixels, wanted), block_p) * block_p
        return triton.cdiv(self.pixels, chunk), chunk

    def grid(self, block_c: int, second: int) -> tuple[int, int]:
        return self.batch * triton.cdiv(self.channels, block_c), second


def _warps(elements: int) -> int:
    return 8 if elements > TILE // 2 else 4


def forward(
    x: Tensor,
    noise: Tensor,
    factor: Term,
    offset: Term,
    gate: Tensor | None,
    eps: float,
    unbiased: bool,
    running: Running | None = None,
    skip: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Augmented features, what the backward needs of the batch (5, B, C), and its mean statistics (2, C).

    With `running`, moves the running statistics where the gate is open. With `skip`, a closed gate also leaves the
    statistics out: what is returned of them then means nothing.
    """
    with torch.cuda.device_of(x):
        launch = _Launch(x)
        batch, channels, pixels = launch.batch, launch.channels, launch.pixels
        out = torch.empty_like(x)
        block_c, block_p = launch.tile(PROGRAMS)
        count, chunk = launch.chunks(block_c, block_p)
        parts, rows, centres = (
            torch.empty(shape, dtype=torch.float32, device=x.device)
            for shape in ((count, 2, batch, channels), (5, batch, channels), (2, channels))
        )
        opened = rows if gate is None else gate.view(torch.uint8)
        skipped = skip and gate is not None
        _moments[launch.grid(block_c, count)](
            x, opened, parts, batch, channels, pixels, chunk, launch.step_c, launch.step_p,
            skipped=skipped, block_c=block_c, block_p=block_p, num_warps=_warps(block_c * block_p),
        )  # fmt: skip
        grid, blocks = launch.applied()
        _apply[grid](
            x, opened, parts, noise, *_rows(factor, rows), *_rows(offset, rows), rows, centres,
            *((rows, rows, rows) if running is None else running[:3]), out,
            batch, channels, pixels, chunk, launch.step_c, launch.step_p, *noise.stride(),
            float(factor.base), float(offset.base), 0.0 if running is None else 1 - running.momentum, float(eps),
            factored=factor.mean is not None, shifted=offset.mean is not None, tracked=running is not None,
            gated=gate is not None, skipped=skipped, unbiased=unbiased, **blocks,
        )  # fmt: skip
    return out, rows, centres


def backward(grad: Tensor, x: Tensor, noise: Tensor, rows: Tensor, gate: Tensor | None, unbiased: bool) -> Tensor:
    """The gradient with respect to `x`, in its format."""
    with torch.cuda.device_of(x):
        launch = _Launch(x)
        batch, channels, pixels = launch.batch, launch.channels, launch.pixels
        out = torch.empty_like(x)
        if grad.stride() != out.stride():
            grad = torch.empty_like(x).copy_(grad)
        block_c, block_p = launch.tile(PROGRAMS)
        count, chunk = launch.chunks(block_c, block_p)
        parts = torch.empty((count, 2, batch, channels), dtype=torch.float32, device=x.device)
        opened = rows if gate is None else gate.view(torch.uint8)
        _sums[launch.grid(block_c, count)](
            x, grad, opened, rows, parts, batch, channels, pixels, chunk, launch.step_c, launch.step_p,
            gated=gate is not None, block_c=block_c, block_p=block_p, num_warps=_warps(block_c * block_p),
        )  # fmt: skip
        grid, blocks = launch.applied()
        _spread[grid](
            x, grad, opened, parts, noise, rows, out,
            batch, channels, pixels, chunk, launch.step_c, launch.step_p, *noise.stride(),
            gated=gate is not None, unbiased=unbiased, **blocks,
        )  # fmt: skip
    return out


def _rows(term: Term, missing: Tensor) -> tuple[Tensor, Tensor]:
    """A term's values per channel, for μ and for σ. A kernel does not read the stand-in for those that are missing."""
    return (missing, missing) if term.mean is None or term.std is None else (term.mean, term.std)
