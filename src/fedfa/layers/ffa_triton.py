"""FFA's arithmetic on CUDA: two launches forward and two backward of :mod:`fedfa.layers.ffa_kernels_triton`.

Needs Triton, so it is to be imported only once features on a GPU come. :func:`augment` is that of
:mod:`fedfa.layers.ffa`, whose ``_Augment`` has the mathematics; :func:`layer` is a layer's whole forward.

Nothing waits for the device and every block size follows from shapes, so all of it can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import triton
from torch import Tensor

from fedfa.layers import early_triton as early
from fedfa.layers import ffa_kernels_triton as kernels
from fedfa.layers.ffa import FFA, RANDOM_STD, Fusion, Spread, augment_reference

TILE = 4096
"""Elements that a program holds at once."""
HELD = 512
"""Samples times channels that the last program of some channels holds at once: few, so that all programs, which are
compiled with it, need few registers."""
PROGRAMS = 256
"""As many programs as keep every multiprocessor of a large GPU busy."""
SECTOR = 16
"""Channels side by side that a program reads at least: 32 bytes in half precision, what memory gives at once."""


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
    out, statistics = _Fused.apply(x, noise, *own, gate, eps, unbiased, counters(x), None, False)
    return out, statistics


def layer(ffa: FFA, x: Tensor, noise: Tensor, gate: Tensor | None) -> Tensor:
    """What a layer makes of features that are :func:`usable`. It reads γ and moves the running statistics on the way;
    where the gate is closed no statistics are taken."""
    running = Running(ffa.mean, ffa.std, ffa.batches, ffa.momentum) if ffa.tracking else None
    own, unbiased = terms(ffa.fusion, ffa.gamma_mean, ffa.gamma_std), ffa.statistics == "released"
    out: Tensor
    out, _ = _Fused.apply(x, noise, *own, gate, ffa.eps, unbiased, _counters_of(ffa, x), running, True)
    return out


def counters(x: Tensor) -> Tensor:
    """Zeros that programs count themselves in, which leave them at zero; one layer's at a time."""
    return torch.zeros(x.shape[1], dtype=torch.int32, device=x.device)


def _counters_of(ffa: FFA, x: Tensor) -> Tensor:
    """A layer's own counters, made once: zeros for every batch would be a launch more. What is made in a capture is
    zeroed by its graph alone, and is not kept."""
    known = _COUNTERS.get(ffa)
    if known is None or known.device != x.device:
        known = counters(x)
        if not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            _COUNTERS[ffa] = known
    return known


_COUNTERS: WeakKeyDictionary[FFA, Tensor] = WeakKeyDictionary()


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
        arrived: Tensor,
        running: Running | None,
        skip: bool,
    ) -> tuple[Tensor, Tensor]:
        out, rows, statistics = forward(x, noise, factor, offset, gate, eps, unbiased, arrived, running, skip)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(x, noise, rows, gate)
            ctx.arrived = arrived
            ctx.given = (factor, offset, eps, unbiased)
        ctx.mark_non_differentiable(statistics)
        ctx.set_materialize_grads(False)  # no zeros for the statistics, which have no gradient
        return out, statistics

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if grads[0] is None:
            return (None,) * 10
        x, noise, rows, gate = ctx.saved_tensors
        factor, offset, eps, unbiased = ctx.given
        if torch.is_grad_enabled():  # a graph of this backward is asked for: let autograd build it
            out, _ = augment_reference(x, noise, Spread(factor.together(), offset.together()), gate, eps, unbiased)
            (dx,) = torch.autograd.grad(out, x, grads[0], create_graph=True)
        else:
            dx = backward(grads[0], x, noise, rows, gate, unbiased, ctx.arrived)
        return (dx, *(None,) * 9)


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

    def chunks(self, block_c: int, block_p: int) -> tuple[int, int]:
        """Into how many chunks pixels are split, and their length: more than one where programs would be few."""
        programs = self.batch * triton.cdiv(self.channels, block_c)
        wanted = max(1, min(triton.cdiv(self.pixels, block_p), PROGRAMS // programs))
        chunk = triton.cdiv(triton.cdiv(self.pixels, wanted), block_p) * block_p
        return triton.cdiv(self.pixels, chunk), chunk

    def samples(self, block_c: int) -> int:
        """Samples that the last program of some channels holds at once."""
        held: int = triton.next_power_of_2(self.batch)
        return min(held, max(HELD // block_c, 1))

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
    arrived: Tensor,
    running: Running | None = None,
    skip: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Augmented features, what the backward needs of the batch (6, B, C), and its mean statistics (2, C).

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
            for shape in ((count, 2, batch, channels), (6, batch, channels), (2, channels))
        )
        opened = rows if gate is None else gate.view(torch.uint8)
        kernels.moments[launch.grid(block_c, count)](
            x, noise, opened, *_rows(factor, rows), *_rows(offset, rows), arrived, parts, rows, centres,
            *((rows, rows, rows) if running is None else running[:3]),
            batch, channels, pixels, chunk, launch.step_c, launch.step_p, *noise.stride(),
            float(factor.base), float(offset.base), 0.0 if running is None else 1 - running.momentum, float(eps),
            factored=factor.mean is not None, shifted=offset.mean is not None, tracked=running is not None,
            gated=gate is not None, skipped=skip and gate is not None, unbiased=unbiased,
            block_b=launch.samples(block_c), block_c=block_c, block_p=block_p, num_warps=_warps(block_c * block_p),
            **early.options(x.device),
        )  # fmt: skip
        block_c, block_p = launch.tile(0)
        kernels.apply[launch.grid(block_c, triton.cdiv(pixels, block_p))](
            x, opened, rows, out, batch, channels, pixels, launch.step_c, launch.step_p,
            gated=gate is not None, block_c=block_c, block_p=block_p, num_warps=_warps(block_c * block_p),
            **early.options(x.device),
        )  # fmt: skip
    return out, rows, centres


def backward(
    grad: Tensor, x: Tensor, noise: Tensor, rows: Tensor, gate: Tensor | None, unbiased: bool, arrived: Tensor
) -> Tensor:
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
        pulls = torch.empty((2, batch, channels), dtype=torch.float32, device=x.device)
        opened = rows if gate is None else gate.view(torch.uint8)
        kernels.sums[launch.grid(block_c, count)](
            x, grad, noise, opened, arrived, rows, parts, pulls,
            batch, channels, pixels, chunk, launch.step_c, launch.step_p, *noise.stride(),
            gated=gate is not None, unbiased=unbiased, block_b=launch.samples(block_c), block_c=block_c,
            block_p=block_p, num_warps=_warps(block_c * block_p), **early.options(x.device),
        )  # fmt: skip
        block_c, block_p = launch.tile(0)
        kernels.spread[launch.grid(block_c, triton.cdiv(pixels, block_p))](
            x, grad, opened, rows, pulls, out, batch, channels, pixels, launch.step_c, launch.step_p,
            gated=gate is not None, block_c=block_c, block_p=block_p, num_warps=_warps(block_c * block_p),
            **early.options(x.device),
        )  # fmt: skip
    return out


def _rows(term: Term, missing: Tensor) -> tuple[Tensor, Tensor]:
    """A term's values per channel, for μ and for σ. A kernel does not read the stand-in for those that are missing."""
    return (missing, missing) if term.mean is None or term.std is None else (term.mean, term.std)
