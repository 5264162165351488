"""FFA's Triton kernels, which :mod:`fedfa.layers.ffa_triton` launches: two forward and two backward.

Features are seen as (B, C, P) with two steps in memory, from channel to channel and from pixel to pixel, one of which
is 1: so the same kernels serve NCHW and channels_last.

Forward: `moments` (reads the features: mean and squared deviations of every sample and channel; the last program of
some channels to finish takes them over the batch, in `_widths`: Σ̂, the running statistics, and the two numbers a and b
that every sample and channel needs), `apply` (x̂ = x + a·(x − μ) + b). Backward: `sums` (Σ G and Σ G·(x − μ), and the
last program `_pulls`), `spread` (dx = G·(1 + a) + inner·(x − μ) + outer). All sums are float32. Where a gate is closed
nothing is computed, and the features or their gradient are copied.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fedfa.layers.early_triton import let_follow, wait

SHARED = ["batch", "pixels", "chunk"]
"""Arguments whose value is not worth a compilation of its own."""


@triton.jit
def _gathered(value, mask, count, seen, mean, square, axis: tl.constexpr, exact: tl.constexpr):
    """Mean and squared deviations of what was seen, with a block more along an axis (Chan's rule). With `exact`, values
    that are all the same have that mean and deviate by exactly 0: the block's mean is corrected by its own deviations,
    and the first block is taken as it is."""
    own = tl.sum(tl.where(mask, value, 0.0), axis, keep_dims=True) / count
    if exact:
        own += tl.sum(tl.where(mask, value - own, 0.0), axis, keep_dims=True) / count
    deviation = tl.where(mask, value - own, 0.0)
    share = tl.where(seen > 0, count / (seen + count), 1.0)
    gap = own - mean
    square += tl.sum(deviation * deviation, axis, keep_dims=True) + gap * gap * seen * share
    return mean + gap * share, square


@triton.jit
def _own(channels, block_c: tl.constexpr):
    """Of a program: the number of its block of channels, its sample, its channels, and which of them there are."""
    blocks = tl.cdiv(channels, block_c)
    block = tl.program_id(0) % blocks
    c = block * block_c + tl.arange(0, block_c)
    return block, tl.program_id(0) // blocks, c, c < channels


@triton.jit
def _is_last(arrived, programs):
    """Whether this program is the last of some to come here: what they stored before can then be read. Leaves the
    counter at 0, as it was."""
    tl.debug_barrier()  # what all threads of this program have stored stands before it is counted
    last = tl.atomic_add(arrived, 1, sem="acq_rel") == programs - 1
    if last:
        tl.store(arrived, 0)
    return last


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
def _drawn(noise, b, c, mask, noise_k, noise_b, noise_c):
    """The noise of μ and of σ."""
    spot = noise + b * noise_b + c * noise_c
    mean = tl.load(spot, mask=mask, other=0).to(tl.float32)
    return mean, tl.load(spot + noise_k, mask=mask, other=0).to(tl.float32)


@triton.jit
def _widths(
    parts, noise, factor_mean, factor_std, offset_mean, offset_std, rows, centres,
    running_mean, running_std, batches, opened, block,
    batch, channels, pixels, chunk, noise_k, noise_b, noise_c, factor, offset, weight, eps,
    factored: tl.constexpr, shifted: tl.constexpr, tracked: tl.constexpr, unbiased: tl.constexpr,
    block_b: tl.constexpr, block_c: tl.constexpr,
):  # fmt: skip
    """From `parts` to `rows` (6, B, C): μ, σ, b, a, and dΣ̂/dμ, dΣ̂/dσ; and to `centres` (2, C), the statistics' means
    over the batch. Moves the running statistics too, where the gate is open. The first samples, in most batches all,
    are read once and their noise with them: what this takes is waiting for memory."""
    c = block * block_c + tl.arange(0, block_c)[None, :]
    inside = c < channels
    divisor = tl.maximum(pixels - 1, 1) * 1.0 if unbiased else pixels * 1.0
    samples = tl.maximum(batch - 1, 1) * 1.0 if unbiased else batch * 1.0
    extra = tl.where(batch > 1, eps, 0.0) if unbiased else 0.0
    b = tl.arange(0, block_b)[:, None]
    mask = (b < batch) & inside
    own_mean, own_std = _statistics(parts, b, c, mask, batch, channels, pixels, chunk, divisor, eps)
    mean_noise, std_noise = _drawn(noise, b, c, mask, noise_k, noise_b, noise_c)
    mean_factor, std_factor = _term(factor, factor_mean, factor_std, c, inside, factored)
    mean_offset, std_offset = _term(offset, offset_mean, offset_std, c, inside, shifted)
    count = tl.minimum(batch, block_b) * 1.0
    none = tl.zeros([1, block_c], tl.float32)
    mean, mean_square = _gathered(own_mean, mask, count, 0.0, none, none, 0, True)
    std, std_square = _gathered(own_std, mask, count, 0.0, none, none, 0, True)
    for start in range(block_b, batch, block_b):
        more = (start + b < batch) & inside
        other_mean, other_std = _statistics(parts, start + b, c, more, batch, channels, pixels, chunk, divisor, eps)
        count = tl.minimum(batch - start, block_b) * 1.0
        mean, mean_square = _gathered(other_mean, more, count, start * 1.0, mean, mean_square, 0, True)
        std, std_square = _gathered(other_std, more, count, start * 1.0, std, std_square, 0, True)
    mean_width, mean_slope = _width(mean_square / samples + extra, mean_factor, mean_offset, samples)
    std_width, std_slope = _width(std_square / samples + extra, std_factor, std_offset, samples)
    plane = batch * channels
    for start in range(0, batch, block_b):
        if start > 0:
            mask = (start + b < batch) & inside
            own_mean, own_std = _statistics(parts, start + b, c, mask, batch, channels, pixels, chunk, divisor, eps)
            mean_noise, std_noise = _drawn(noise, start + b, c, mask, noise_k, noise_b, noise_c)
        row = rows + (start + b) * channels + c
        tl.store(row, own_mean, mask=mask)
        tl.store(row + plane, own_std, mask=mask)
        tl.store(row + 2 * plane, mean_noise * mean_width, mask=mask)
        tl.store(row + 3 * plane, std_noise * std_width / own_std, mask=mask)
        tl.store(row + 4 * plane, mean_slope * (own_mean - mean), mask=mask)
        tl.store(row + 5 * plane, std_slope * (own_std - std), mask=mask)
    tl.store(centres + c, mean, mask=inside)
    tl.store(centres + channels + c, std, mask=inside)
    if tracked:
        _follow(running_mean, mean, c, c < channels * opened, weight)
        _follow(running_std, std, c, c < channels * opened, weight)
        tl.store(batches, tl.load(batches) + opened, mask=block == 0)


@triton.jit(do_not_specialize=SHARED)
def moments(
    x, noise, gate, factor_mean, factor_std, offset_mean, offset_std, arrived, parts, rows, centres,
    running_mean, running_std, batches,
    batch, channels, pixels, chunk, step_c, step_p, noise_k, noise_b, noise_c, factor, offset, weight, eps,
    factored: tl.constexpr, shifted: tl.constexpr, tracked: tl.constexpr, gated: tl.constexpr, skipped: tl.constexpr,
    unbiased: tl.constexpr, early: tl.constexpr, block_b: tl.constexpr, block_c: tl.constexpr, block_p: tl.constexpr,
):  # fmt: skip
    """Mean and sum of squared deviations of every sample and channel over a chunk of pixels, into `parts`
    (chunks, 2, B, C). The last program of some channels goes on to `_widths`."""
    wait(early)
    opened = 1
    if gated:
        opened = tl.where(tl.load(gate) != 0, 1, 0)
    if skipped:  # noqa: SIM102  # this is known when the kernel is compiled, the gate when it runs
        if opened == 0:
            return
    block, sample, c, inside = _own(channels, block_c)
    first = tl.program_id(1) * chunk
    last = tl.minimum(first + chunk, pixels)
    row = x + sample.to(tl.int64) * channels * pixels + c * step_c
    mean = tl.zeros([block_c, 1], tl.float32)
    square = tl.zeros([block_c, 1], tl.float32)
    for start in range(first, last, block_p):
        p = start + tl.arange(0, block_p)
        mask = inside[:, None] & (p < last)[None, :]
        value = tl.load(row[:, None] + p[None, :] * step_p, mask=mask, other=0).to(tl.float32)
        count = tl.minimum(last - start, block_p) * 1.0
        mean, square = _gathered(value, mask, count, (start - first) * 1.0, mean, square, 1, False)
    let_follow(early)
    plane = batch * channels
    spot = (parts + tl.program_id(1) * 2 * plane + sample * channels + c)[:, None]
    tl.store(spot, mean, mask=inside[:, None])
    tl.store(spot + plane, square, mask=inside[:, None])
    if _is_last(arrived + block, batch * tl.num_programs(1)):
        _widths(
            parts, noise, factor_mean, factor_std, offset_mean, offset_std, rows, centres,
            running_mean, running_std, batches, opened, block,
            batch, channels, pixels, chunk, noise_k, noise_b, noise_c, factor, offset, weight, eps,
            factored, shifted, tracked, unbiased, block_b, block_c,
        )  # fmt: skip


@triton.jit(do_not_specialize=SHARED)
def apply(
    x, gate, rows, out, batch, channels, pixels, step_c, step_p,
    gated: tl.constexpr, early: tl.constexpr, block_c: tl.constexpr, block_p: tl.constexpr,
):  # fmt: skip
    """x̂ = x + a·(x − μ) + b; x itself where the gate is closed."""
    _, sample, c, inside = _own(channels, block_c)
    p = tl.program_id(1) * block_p + tl.arange(0, block_p)
    mask = inside[:, None] & (p < pixels)[None, :]
    place = sample.to(tl.int64) * channels * pixels + c[:, None] * step_c + p[None, :] * step_p
    value = tl.load(x + place, mask=mask, other=0)
    wait(early)
    plane = batch * channels
    row = rows + sample * channels + c
    known = inside
    if gated:
        known &= tl.load(gate) != 0  # zeros otherwise, with which x̂ is x
    mean = tl.load(row, mask=known, other=0)[:, None]
    shift = tl.load(row + 2 * plane, mask=known, other=0)[:, None]
    scale = tl.load(row + 3 * plane, mask=known, other=0)[:, None]
    wide = value.to(tl.float32)
    new = (wide + scale * (wide - mean) + shift).to(value.dtype)
    if gated:
        new = tl.where(tl.load(gate) != 0, new, value)  # infinities too
    tl.store(out + place, new, mask=mask)


@triton.jit
def _slopes(parts, noise, rows, b, c, mask, batch, channels, pixels, chunk, noise_k, noise_b, noise_c):
    """Both sums of some samples and channels, over the chunks; their σ; their noise."""
    plane = batch * channels
    spot = parts + b * channels + c
    outer = tl.load(spot, mask=mask, other=0)
    inner = tl.load(spot + plane, mask=mask, other=0)
    std = tl.load(rows + plane + b * channels + c, mask=mask, other=1)
    mean_noise, std_noise = _drawn(noise, b, c, mask, noise_k, noise_b, noise_c)
    for _ in range(chunk, pixels, chunk):
        spot += 2 * plane
        outer += tl.load(spot, mask=mask, other=0)
        inner += tl.load(spot + plane, mask=mask, other=0)
    return outer, inner, std, mean_noise, std_noise


@triton.jit
def _kept(rows, b, c, mask, batch, channels):
    """a, dΣ̂/dμ and dΣ̂/dσ of some samples and channels."""
    plane = batch * channels
    row = rows + 3 * plane + b * channels + c
    scale = tl.load(row, mask=mask, other=0)
    return scale, tl.load(row + plane, mask=mask, other=0), tl.load(row + 2 * plane, mask=mask, other=0)


@triton.jit
def _pulls(
    parts, noise, rows, pulls, block, batch, channels, pixels, chunk, noise_k, noise_b, noise_c,
    unbiased: tl.constexpr, block_b: tl.constexpr, block_c: tl.constexpr,
):  # fmt: skip
    """`outer` and `inner` of every sample and channel (2, B, C): how μ, σ and, through all samples of the batch, Σ̂
    pull at its pixels. As in `_widths`, the first samples are read once."""
    c = block * block_c + tl.arange(0, block_c)[None, :]
    inside = c < channels
    plane = batch * channels
    divisor = tl.maximum(pixels - 1, 1) * 1.0 if unbiased else pixels * 1.0
    b = tl.arange(0, block_b)[:, None]
    mask = (b < batch) & inside
    outer, inner, std, mean_noise, std_noise = _slopes(
        parts, noise, rows, b, c, mask, batch, channels, pixels, chunk, noise_k, noise_b, noise_c
    )
    scale, mean_slope, std_slope = _kept(rows, b, c, mask, batch, channels)
    mean_pull = tl.sum(mean_noise * outer, 0)[None, :]
    std_pull = tl.sum(std_noise * (inner / std), 0)[None, :]
    for start in range(block_b, batch, block_b):
        more = (start + b < batch) & inside
        other_outer, other_inner, other_std, mean_noise, std_noise = _slopes(
            parts, noise, rows, start + b, c, more, batch, channels, pixels, chunk, noise_k, noise_b, noise_c
        )
        mean_pull += tl.sum(mean_noise * other_outer, 0)[None, :]
        std_pull += tl.sum(std_noise * (other_inner / other_std), 0)[None, :]
    for start in range(0, batch, block_b):
        if start > 0:
            mask = (start + b < batch) & inside
            outer, inner, std, mean_noise, std_noise = _slopes(
                parts, noise, rows, start + b, c, mask, batch, channels, pixels, chunk, noise_k, noise_b, noise_c
            )
            scale, mean_slope, std_slope = _kept(rows, start + b, c, mask, batch, channels)
        spot = pulls + (start + b) * channels + c
        tl.store(spot, (mean_slope * mean_pull - scale * outer) / pixels, mask=mask)
        tl.store(spot + plane, (std_slope * std_pull - scale * (inner / std)) / (divisor * std), mask=mask)


@triton.jit(do_not_specialize=SHARED)
def sums(
    x, grad, noise, gate, arrived, rows, parts, pulls,
    batch, channels, pixels, chunk, step_c, step_p, noise_k, noise_b, noise_c,
    gated: tl.constexpr, unbiased: tl.constexpr, early: tl.constexpr, block_b: tl.constexpr, block_c: tl.constexpr,
    block_p: tl.constexpr,
):  # fmt: skip
    """Σ G and Σ G·(x − μ) of every sample and channel over a chunk of pixels, into `parts` (chunks, 2, B, C). The
    last program of some channels goes on to `_pulls`."""
    wait(early)
    if gated:  # noqa: SIM102  # as above
        if tl.load(gate) == 0:
            return
    block, sample, c, inside = _own(channels, block_c)
    first = tl.program_id(1) * chunk
    last = tl.minimum(first + chunk, pixels)
    place = sample.to(tl.int64) * channels * pixels + c * step_c
    mean = tl.load(rows + sample * channels + c, mask=inside, other=0)[:, None]
    outer = tl.zeros([block_c], tl.float32)
    inner = tl.zeros([block_c], tl.float32)
    for start in range(first, last, block_p):
        p = start + tl.arange(0, block_p)
        mask = inside[:, None] & (p < last)[None, :]
        here = place[:, None] + p[None, :] * step_p
        value = tl.load(x + here, mask=mask, other=0).to(tl.float32)
        slope = tl.load(grad + here, mask=mask, other=0).to(tl.float32)
        outer += tl.sum(slope, 1)
        inner += tl.sum(tl.where(mask, slope * (value - mean), 0.0), 1)
    let_follow(early)
    plane = batch * channels
    spot = parts + tl.program_id(1) * 2 * plane + sample * channels + c
    tl.store(spot, outer, mask=inside)
    tl.store(spot + plane, inner, mask=inside)
    if _is_last(arrived + block, batch * tl.num_programs(1)):
        _pulls(
            parts, noise, rows, pulls, block, batch, channels, pixels, chunk, noise_k, noise_b, noise_c,
            unbiased, block_b, block_c,
        )  # fmt: skip


@triton.jit(do_not_specialize=SHARED)
def spread(
    x, grad, gate, rows, pulls, out, batch, channels, pixels, step_c, step_p,
    gated: tl.constexpr, early: tl.constexpr, block_c: tl.constexpr, block_p: tl.constexpr,
):  # fmt: skip
    """dx = G·(1 + a) + inner·(x − μ) + outer; G itself where the gate is closed, and x is not read there."""
    _, sample, c, inside = _own(channels, block_c)
    p = tl.program_id(1) * block_p + tl.arange(0, block_p)
    mask = inside[:, None] & (p < pixels)[None, :]
    end = pixels
    if gated:
        end = tl.where(tl.load(gate) != 0, pixels, 0)
    place = sample.to(tl.int64) * channels * pixels + c[:, None] * step_c + p[None, :] * step_p
    slope = tl.load(grad + place, mask=mask, other=0)
    value = tl.load(x + place, mask=mask & (p < end)[None, :], other=0).to(tl.float32)
    wait(early)
    plane = batch * channels
    row = sample * channels + c
    known = inside & (end > 0)
    mean = tl.load(rows + row, mask=known, other=0)[:, None]
    scale = tl.load(rows + row + 3 * plane, mask=known, other=0)[:, None]
    outer = tl.load(pulls + row, mask=known, other=0)[:, None]
    inner = tl.load(pulls + row + plane, mask=known, other=0)[:, None]
    wide = slope.to(tl.float32)
    new = (wide + scale * wide + (inner * (value - mean) + outer)).to(slope.dtype)
    if gated:
        new = tl.where(tl.load(gate) != 0, new, slope)
    tl.store(out + place, new, mask=mask)
