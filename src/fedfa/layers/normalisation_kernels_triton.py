"""Triton kernels of batch normalisation, with or without ReLU, which :mod:`fedfa.layers.normalisation_triton` launches.

Features are seen as rows of channels, a row a pixel. Forward: `moments` (reads the features: mean and squared
deviations of some rows), `finish` (small: those of all rows, running statistics, and a table of what every channel
needs), `apply`. Backward: `sums` (Σ g and Σ g·(x − μ), g the gradient before the ReLU), `finish_sums` (small), `spread`
(dx). The gradient of that gradient, which FedMix takes: `second_sums`, `second_finish`, `second_spread`. Whether the
ReLU let a value through is computed again, so that nothing but the features is kept. In evaluation the table is made of
the running statistics, by `settle`.

Sums are float32, in an order that shapes alone decide.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fedfa.layers.early_triton import let_follow, wait

SHARED = ["rows", "chunk", "parts_made"]
"""Arguments whose value is not worth a compilation of its own."""


@triton.jit
def _chunk(rows, channels, chunk, block_c: tl.constexpr):
    """A program's channels, which of them there are, and the first and the last of its rows."""
    c = (tl.program_id(1) * block_c + tl.arange(0, block_c))[None, :]
    first = tl.program_id(0) * chunk
    return c, c < channels, first, tl.minimum(first + chunk, rows)


@triton.jit
def _tile(rows, channels, block_r: tl.constexpr, block_c: tl.constexpr):
    """A program's channels, which of them there are, where its values lie, and which of those there are."""
    c = (tl.program_id(1) * block_c + tl.arange(0, block_c))[None, :]
    inside = c < channels
    r = (tl.program_id(0) * block_r + tl.arange(0, block_r))[:, None]
    return c, inside, r * channels + c, (r < rows) & inside


@triton.jit
def _few(parts_made, channels, block_p: tl.constexpr, block_c: tl.constexpr):
    """Of a small kernel: a program's channels, which of them there are, all parts, and which of those there are."""
    c = (tl.program_id(0) * block_c + tl.arange(0, block_c))[None, :]
    inside = c < channels
    i = tl.arange(0, block_p)[:, None]
    return c, inside, i, (i < parts_made) & inside


@triton.jit(do_not_specialize=SHARED)
def moments(x, parts, rows, channels, chunk, early: tl.constexpr, block_r: tl.constexpr, block_c: tl.constexpr):
    """Mean and sum of squared deviations of every channel over a chunk of rows, into `parts` (chunks, 2, C). Values are
    measured from the chunk's first one, so that squares lose nothing to a large mean."""
    wait(early)
    c, inside, first, last = _chunk(rows, channels, chunk, block_c)
    pivot = tl.load(x + first * channels + c, mask=inside, other=0).to(tl.float32)
    total = tl.zeros([block_r, block_c], tl.float32)
    square = tl.zeros([block_r, block_c], tl.float32)
    for start in range(first, last, block_r):
        r = (start + tl.arange(0, block_r))[:, None]
        mask = (r < last) & inside
        value = tl.load(x + r * channels + c, mask=mask, other=0).to(tl.float32)
        value = tl.where(mask, value - pivot, 0.0)
        total += value
        square += value * value
    let_follow(early)
    count = (last - first) * 1.0
    gap = tl.sum(total, 0, keep_dims=True) / count
    deviation = tl.sum(square, 0, keep_dims=True) - gap * gap * count
    spot = parts + tl.program_id(0) * 2 * channels + c
    tl.store(spot, pivot + gap, mask=inside)
    tl.store(spot + channels, tl.where(deviation < 0, 0.0, deviation), mask=inside)


@triton.jit
def _follow(running, now, c, inside, momentum):
    before = tl.load(running + c, mask=inside, other=0)
    tl.store(running + c, before + momentum * (now - before), mask=inside)


@triton.jit(do_not_specialize=SHARED)
def finish(
    parts, weight, offset, running_mean, running_var, batches, table,
    rows, channels, chunk, parts_made, momentum, eps,
    shifted: tl.constexpr, tracked: tl.constexpr, counted: tl.constexpr, early: tl.constexpr,
    block_p: tl.constexpr, block_c: tl.constexpr,
):  # fmt: skip
    """From `parts` to `table` (3, C): mean, 1/std, and weight/std. Moves the running statistics too."""
    let_follow(early)
    wait(early)
    c, inside, i, mask = _few(parts_made, channels, block_p, block_c)
    own = tl.load(parts + i * 2 * channels + c, mask=mask, other=0)
    square = tl.load(parts + i * 2 * channels + channels + c, mask=mask, other=0)
    count = tl.where(mask, tl.minimum(rows - i * chunk, chunk), 0) * 1.0
    pivot = tl.load(parts + c, mask=inside, other=0)
    mean = pivot + tl.sum(tl.where(mask, count * (own - pivot), 0.0), 0, keep_dims=True) / rows
    gap = tl.where(mask, own - mean, 0.0)
    variance = tl.sum(square + count * gap * gap, 0, keep_dims=True) / rows
    inverse = 1 / tl.sqrt_rn(variance + eps)
    tl.store(table + c, mean, mask=inside)
    tl.store(table + channels + c, inverse, mask=inside)
    tl.store(table + 2 * channels + c, inverse * tl.load(weight + c, mask=inside, other=0), mask=inside)
    if tracked:
        if shifted:
            mean += tl.load(offset + c, mask=inside, other=0)
        _follow(running_mean, mean, c, inside, momentum)
        _follow(running_var, variance * (rows / (rows - 1.0)), c, inside, momentum)
    if counted:
        tl.store(batches, tl.load(batches) + 1, mask=tl.program_id(0) == 0)


@triton.jit
def settle(
    weight, offset, running_mean, running_var, table, channels, eps, shifted: tl.constexpr, block_c: tl.constexpr
):
    """The table of running statistics."""
    c = tl.program_id(0) * block_c + tl.arange(0, block_c)
    inside = c < channels
    mean = tl.load(running_mean + c, mask=inside, other=0)
    if shifted:
        mean -= tl.load(offset + c, mask=inside, other=0)
    inverse = 1 / tl.sqrt_rn(tl.load(running_var + c, mask=inside, other=0) + eps)
    tl.store(table + c, mean, mask=inside)
    tl.store(table + channels + c, inverse, mask=inside)
    tl.store(table + 2 * channels + c, inverse * tl.load(weight + c, mask=inside, other=0), mask=inside)


@triton.jit
def _normal(value, table, bias, c, inside, channels):
    """What the ReLU is given, and the deviation from the mean that it comes from."""
    deviation = value.to(tl.float32) - tl.load(table + c, mask=inside, other=0)
    scale = tl.load(table + 2 * channels + c, mask=inside, other=0)
    return deviation * scale + tl.load(bias + c, mask=inside, other=0), deviation, scale


@triton.jit(do_not_specialize=SHARED)
def apply(
    x, table, bias, out, rows, channels,
    relu: tl.constexpr, early: tl.constexpr, block_r: tl.constexpr, block_c: tl.constexpr,
):  # fmt: skip
    c, inside, spot, mask = _tile(rows, channels, block_r, block_c)
    value = tl.load(x + spot, mask=mask, other=0)
    wait(early)
    normal, _, _ = _normal(value, table, bias, c, inside, channels)
    if relu:
        normal = tl.where(normal <= 0, 0.0, normal)  # NaN stays
    let_follow(early)
    tl.store(out + spot, normal.to(value.dtype), mask=mask)


@triton.jit
def _behind(x, grad, table, bias, spot, mask, c, inside, channels, relu: tl.constexpr):
    """The gradient before the ReLU, and the features' deviation and scale."""
    value = tl.load(x + spot, mask=mask, other=0)
    slope = tl.load(grad + spot, mask=mask, other=0).to(tl.float32)
    normal, deviation, scale = _normal(value, table, bias, c, inside, channels)
    if relu:
        slope = tl.where(normal <= 0, 0.0, slope)
    return slope, deviation, scale


@triton.jit(do_not_specialize=SHARED)
def sums(
    x, grad, table, bias, parts, rows, channels, chunk,
    relu: tl.constexpr, early: tl.constexpr, block_r: tl.constexpr, block_c: tl.constexpr,
):  # fmt: skip
    """Σ g and Σ g·(x − μ) of every channel over a chunk of rows, into `parts` (chunks, 2, C)."""
    wait(early)
    c, inside, first, last = _chunk(rows, channels, chunk, block_c)
    outer = tl.zeros([block_r, block_c], tl.float32)
    inner = tl.zeros([block_r, block_c], tl.float32)
    for start in range(first, last, block_r):
        r = (start + tl.arange(0, block_r))[:, None]
        mask = (r < last) & inside
        slope, deviation, _ = _behind(x, grad, table, bias, r * channels + c, mask, c, inside, channels, relu)
        outer += slope
        inner += tl.where(mask, slope * deviation, 0.0)
    let_follow(early)
    spot = parts + tl.program_id(0) * 2 * channels + c
    tl.store(spot, tl.sum(outer, 0, keep_dims=True), mask=inside)
    tl.store(spot + channels, tl.sum(inner, 0, keep_dims=True), mask=inside)


@triton.jit(do_not_specialize=SHARED)
def finish_sums(
    parts, table, pulls, grads, rows, channels, parts_made,
    early: tl.constexpr, block_p: tl.constexpr, block_c: tl.constexpr,
):  # fmt: skip
    """From `parts` to `grads` (3, C), of weight, bias and offset (0), and to `pulls` (2, C): what all of a channel's
    rows pull at each of them, outright and by its deviation."""
    let_follow(early)
    wait(early)
    c, inside, i, mask = _few(parts_made, channels, block_p, block_c)
    outer = tl.sum(tl.load(parts + i * 2 * channels + c, mask=mask, other=0), 0, keep_dims=True)
    inner = tl.sum(tl.load(parts + i * 2 * channels + channels + c, mask=mask, other=0), 0, keep_dims=True)
    inverse = tl.load(table + channels + c, mask=inside, other=0)
    tl.store(grads + c, inner * inverse, mask=inside)
    tl.store(grads + channels + c, outer, mask=inside)
    tl.store(grads + 2 * channels + c, tl.zeros_like(outer), mask=inside)
    tl.store(pulls + c, outer / rows, mask=inside)
    tl.store(pulls + channels + c, inner * inverse * inverse / rows, mask=inside)


@triton.jit(do_not_specialize=SHARED)
def spread(
    x, grad, table, bias, pulls, out, rows, channels,
    relu: tl.constexpr, early: tl.constexpr, block_r: tl.constexpr, block_c: tl.constexpr,
):  # fmt: skip
    """dx = weight/std·(g − mean of g − (x − μ)·mean of g·(x − μ)/var)."""
    c, inside, spot, mask = _tile(rows, channels, block_r, block_c)
    slope, deviation, scale = _behind(x, grad, table, bias, spot, mask, c, inside, channels, relu)
    wait(early)
    outer = tl.load(pulls + c, mask=inside, other=0)
    inner = tl.load(pulls + channels + c, mask=inside, other=0)
    let_follow(early)
    tl.store(out + spot, (scale * (slope - outer - deviation * inner)).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=SHARED)
def second_sums(
    x, grad, turn, table, bias, parts, rows, channels, chunk,
    relu: tl.constexpr, early: tl.constexpr, block_r: tl.constexpr, block_c: tl.constexpr,
):  # fmt: skip
    """Of every channel over a chunk of rows: Σ g, Σ g·(x − μ), Σ h, Σ h·(x − μ) and Σ g·h, with h (`turn`) the gradient
    with respect to dx, into `parts` (chunks, 5, C)."""
    wait(early)
    c, inside, first, last = _chunk(rows, channels, chunk, block_c)
    g = tl.zeros([block_r, block_c], tl.float32)
    gu = tl.zeros([block_r, block_c], tl.float32)
    h = tl.zeros([block_r, block_c], tl.float32)
    hu = tl.zeros([block_r, block_c], tl.float32)
    gh = tl.zeros([block_r, block_c], tl.float32)
    for start in range(first, last, block_r):
        r = (start + tl.arange(0, block_r))[:, None]
        mask = (r < last) & inside
        spot = r * channels + c
        slope, deviation, _ = _behind(x, grad, table, bias, spot, mask, c, inside, channels, relu)
        deviation = tl.where(mask, deviation, 0.0)
        own = tl.load(turn + spot, mask=mask, other=0).to(tl.float32)
        g += slope
        gu += slope * deviation
        h += own
        hu += own * deviation
        gh += slope * own
    let_follow(early)
    spot = parts + tl.program_id(0) * 5 * channels + c
    tl.store(spot, tl.sum(g, 0, keep_dims=True), mask=inside)
    tl.store(spot + channels, tl.sum(gu, 0, keep_dims=True), mask=inside)
    tl.store(spot + 2 * channels, tl.sum(h, 0, keep_dims=True), mask=inside)
    tl.store(spot + 3 * channels, tl.sum(hu, 0, keep_dims=True), mask=inside)
    tl.store(spot + 4 * channels, tl.sum(gh, 0, keep_dims=True), mask=inside)


@triton.jit
def _summed(parts, i, c, mask, channels, number: tl.constexpr):
    return tl.sum(tl.load(parts + (i * 5 + number) * channels + c, mask=mask, other=0), 0, keep_dims=True)


@triton.jit(do_not_specialize=SHARED)
def second_finish(
    parts, table, pull, own, rows, channels, parts_made,
    pulled: tl.constexpr, early: tl.constexpr, block_p: tl.constexpr, block_c: tl.constexpr,
):  # fmt: skip
    """From `parts` to `own` (7, C): the means of g and h, e, f, k and b of `second_spread`, and the weight's gradient.
    `pull` (3, C) has the gradients with respect to those of weight and bias."""
    let_follow(early)
    wait(early)
    c, inside, i, mask = _few(parts_made, channels, block_p, block_c)
    g = _summed(parts, i, c, mask, channels, 0) / rows
    h = _summed(parts, i, c, mask, channels, 2) / rows
    inverse = tl.load(table + channels + c, mask=inside, other=0)
    scale = tl.load(table + 2 * channels + c, mask=inside, other=0)
    q = _summed(parts, i, c, mask, channels, 1) * inverse / rows
    d = _summed(parts, i, c, mask, channels, 3) * inverse / rows
    shared = _summed(parts, i, c, mask, channels, 4) / rows - g * h
    e = -scale * inverse * d
    f = -scale * inverse * inverse * (shared - 3 * q * d)
    b = tl.zeros_like(e)
    if pulled:
        a = tl.load(pull + c, mask=inside, other=0) * inverse
        e += a
        f -= a * inverse * q
        b += tl.load(pull + channels + c, mask=inside, other=0)
    tl.store(own + c, g, mask=inside)
    tl.store(own + channels + c, h, mask=inside)
    tl.store(own + 2 * channels + c, e, mask=inside)
    tl.store(own + 3 * channels + c, f, mask=inside)
    tl.store(own + 4 * channels + c, -scale * inverse * q, mask=inside)
    tl.store(own + 5 * channels + c, b, mask=inside)
    tl.store(own + 6 * channels + c, rows * inverse * (shared - q * d), mask=inside)


@triton.jit(do_not_specialize=SHARED)
def second_spread(
    x, grad, turn, table, bias, own, back, out, rows, channels,
    relu: tl.constexpr, early: tl.constexpr, block_r: tl.constexpr, block_c: tl.constexpr,
):  # fmt: skip
    """With respect to the gradient, weight/std·(h − mean of h) + e·(x − μ) + b where the ReLU let it through, into
    `back`; to the features, f·(x − μ) + e·(g − mean of g) + k·(h − mean of h), into `out`."""
    c, inside, spot, mask = _tile(rows, channels, block_r, block_c)
    value = tl.load(x + spot, mask=mask, other=0)
    slope = tl.load(grad + spot, mask=mask, other=0).to(tl.float32)
    turned = tl.load(turn + spot, mask=mask, other=0).to(tl.float32)
    wait(early)
    normal, deviation, scale = _normal(value, table, bias, c, inside, channels)
    g = tl.load(own + c, mask=inside, other=0)
    h = tl.load(own + channels + c, mask=inside, other=0)
    e = tl.load(own + 2 * channels + c, mask=inside, other=0)
    f = tl.load(own + 3 * channels + c, mask=inside, other=0)
    k = tl.load(own + 4 * channels + c, mask=inside, other=0)
    b = tl.load(own + 5 * channels + c, mask=inside, other=0)
    behind = scale * (turned - h) + e * deviation + b
    if relu:
        slope = tl.where(normal <= 0, 0.0, slope)
        behind = tl.where(normal <= 0, 0.0, behind)
    ahead = f * deviation + e * (slope - g) + k * (turned - h)
    tl.store(back + spot, behind.to(back.dtype.element_ty), mask=mask)
    tl.store(out + spot, ahead.to(out.dtype.element_ty), mask=mask)
