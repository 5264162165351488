"""What the server gets of its clients' updates: means and variances, never the updates themselves.

Sums are exact, so they have no order: adding a client's values to a sum of two float64 numbers (double-double,
106 bits) loses nothing, as long as one entry's contributions lie within 2⁵⁰ of each other in size. There is one
division at the end. A client's contribution can therefore be added when it arrives and be forgotten, and the
result is the same to the bit whatever the order of arrival was, and however many sums it went through.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType

import torch
from torch import Tensor

from fedfa.kernels import kernels

CHUNK = 1 << 15
"""Entries added at a time on the CPU: what an addition needs besides the sum stays in the cache."""


class BadUpdate(Exception):
    """An update that must not enter the sum, with the reason in a line."""


@dataclass(frozen=True)
class Report:
    """What a client tells the server besides its model. Every client weighs the same here."""

    means: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors whose mean over clients the server gets; of integers, rounded towards 0."""
    spreads: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Tensors whose mean and variance over clients the server gets, each with a weight of 0 or 1 (an integer
    scalar): with 0 the client is left out of that tensor."""


@dataclass(frozen=True)
class Update:
    """What one client sends after its local training. The tensors may be views of the client's model: they are
    good until the next client trains."""

    client: str
    weight: int
    """In the average of models: 1, or the number of training samples."""
    model: Mapping[str, Tensor]
    report: Report = field(default_factory=Report)
    steps: int = 0
    loss: Tensor | None = None
    """Mean training loss over the round's samples."""
    row: Tensor | None = None
    """The model's floating-point entries in one row, in their order, where the engine has laid them out so."""
    sound: bool = False
    """Whether an engine in this very process has checked all of it already."""


@dataclass(frozen=True)
class Across:
    """A statistic over the clients that weighed in, per entry."""

    mean: Tensor
    variance: Tensor
    """Biased: divided by the number of clients (Eq. shareing)."""
    clients: int


@dataclass(frozen=True)
class Reduced:
    """A round's updates, put together."""

    clients: int
    model: Mapping[str, Tensor]
    means: Mapping[str, Tensor]
    spreads: Mapping[str, Across]


class ExactSum:
    """Σ wᵢ·vᵢ of named tensors, with integer weights, independent of the order of its terms."""

    def __init__(self) -> None:
        self._like: dict[str, Tensor] | None = None
        self._high = self._low = torch.empty(0, dtype=torch.float64)

    def add(self, tensors: Mapping[str, Tensor], weight: int = 1, row: Tensor | None = None) -> None:
        """Add tensors; `row` is all of them in one, if that is at hand."""
        if self._like is None:
            self._like = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
        if not self._like:
            return
        flat = torch.cat([tensors[name].detach().reshape(-1) for name in self._like]) if row is None else row
        if not self._high.numel():
            self._high = torch.zeros(flat.shape, dtype=torch.float64, device=flat.device)
            self._low = torch.zeros_like(self._high)
        if (fused := _fused(flat)) is not None:
            fused.add(self._high, self._low, flat, weight)
            return
        size = CHUNK if flat.device.type == "cpu" else flat.numel()
        for part, high, low in zip(flat.split(size), self._high.split(size), self._low.split(size), strict=True):
            _two_sum_(high, low, part.double().mul_(weight))

    def divided(self, by: int) -> dict[str, Tensor]:
        """The sum over `by`, in the tensors' own types."""
        like = self._like or {}
        mean = (self._high + self._low).div_(by)
        if len(types := {tensor.dtype for tensor in like.values()}) == 1:
            mean = mean.to(types.pop())  # one launch, not one a tensor
        parts = mean.split([tensor.numel() for tensor in like.values()])
        return {name: part.view(t.shape).to(t.dtype) for (name, t), part in zip(like.items(), parts, strict=True)}


def _two_sum_(high: Tensor, low: Tensor, value: Tensor) -> None:
    """Add `value` to high + low in place, keeping what does not fit into `high` in `low` (Knuth's two-sum)."""
    total = high + value
    rounded = total - high
    value -= rounded
    value += high - (total - rounded)  # what `total` lost
    low += value
    torch.add(total, low, out=high)
    low -= total.sub_(high).neg_()  # low ← low − (high − total), what the new `high` took up


def _fused(flat: Tensor) -> ModuleType | None:
    """The same addition as one kernel, where there is a GPU that runs it."""
    return kernels("fedfa.reduction_triton", flat.device) if flat.dtype in (torch.float32, torch.float64) else None


class Reduction:
    """Takes updates one at a time and keeps their sums.

    `like` is the model as the server knows it, and `expected` what clients report besides (None: the first client
    shows it): an update of another shape is refused with :class:`BadUpdate`, as is one with a number that is not
    finite. `centres` are the points that deviations are measured from.
    """

    def __init__(
        self,
        like: Mapping[str, Tensor],
        centres: Mapping[str, Tensor] | None = None,
        expected: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._like = dict(like)
        self._integers = {name: tensor for name, tensor in self._like.items() if not tensor.is_floating_point()}
        self._centres = dict(centres or {})
        self.clients = 0
        self._weight = 0
        self._model, self._means, self._moments = ExactSum(), ExactSum(), ExactSum()
        self._counters: Tensor | int = 0
        self._reporting: Tensor | int = 0
        self._centre: Tensor | None = None
        self._sizes: dict[str, int] = {}
        self._expected = expected

    def add(self, update: Update) -> None:
        """Add one client's update, or raise :class:`BadUpdate` and leave the sums as they are."""
        if not update.sound:
            check(update, self._like, self._expected)
        report = update.report
        if self._expected is None:
            self._expected = {name: torch.empty_like(tensor, device="meta") for name, tensor in _reported(report)}
        self.clients += 1
        self._weight += update.weight
        floats = {name: t for name, t in update.model.items() if t.is_floating_point()}
        self._model.add(floats, update.weight, update.row)
        counters = [update.model[name].reshape(-1) for name in self._integers]
        if counters:
            self._counters = self._counters + torch.cat(counters) * update.weight
        self._means.add(report.means)
        if report.spreads:
            self._add_spreads(report.spreads)

    def _add_spreads(self, spreads: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Deviations from the centres and their squares, all statistics in a row; a weight of 0 takes one out."""
        if self._centre is None:
            self._sizes = {name: value.numel() for name, (value, _) in spreads.items()}
            zero = torch.zeros((), dtype=torch.float64)
            parts = [self._centres.get(n, zero.to(v.device)).double().expand_as(v) for n, (v, _) in spreads.items()]
            self._centre = torch.cat([part.reshape(-1) for part in parts])
        values = torch.cat([spreads[name][0].detach().reshape(-1).double() for name in self._sizes])
        weights = torch.stack([spreads[name][1].reshape(()) for name in self._sizes])
        each = torch.cat([weights[i].expand(size) for i, size in enumerate(self._sizes.values())])
        deviation = (values - self._centre) * each
        self._moments.add({"": (row := torch.cat((deviation, deviation * deviation)))}, row=row)
        self._reporting = self._reporting + weights

    def result(self) -> Reduced:
        """The means and variances of what was added."""
        if not self.clients:
            raise ValueError("nothing was added")
        model = self._model.divided(self._weight)
        if isinstance(self._counters, Tensor):
            parts = (self._counters // self._weight).split([tensor.numel() for tensor in self._integers.values()])
            found = zip(self._integers.items(), parts, strict=True)
            model |= {name: part.view(like.shape).to(like.dtype) for (name, like), part in found}
        return Reduced(self.clients, model, self._means.divided(self.clients), self._across())

    def _across(self) -> dict[str, Across]:
        if self._centre is None or not isinstance(self._reporting, Tensor):
            return {}
        clients = self._reporting.tolist()
        sizes = list(self._sizes.values())
        counts = torch.cat([c.expand(n) for c, n in zip(self._reporting.clamp_min(1), sizes, strict=True)])
        deviation, square = self._moments.divided(1)[""].view(2, -1) / counts
        # A difference of two means: rounding could take it below 0.
        variance = (square - deviation.square()).clamp_min_(0).float()
        mean = (deviation + self._centre).float()
        shapes = self._expected or {}
        return {
            name: Across(m.view(shapes[name].shape), v.view(shapes[name].shape), n)
            for name, m, v, n in zip(self._sizes, mean.split(sizes), variance.split(sizes), clients, strict=True)
        }


def check(update: Update, like: Mapping[str, Tensor], expected: Mapping[str, Tensor] | None = None) -> None:
    """Raise :class:`BadUpdate` where an update is misshapen or not finite. Run by the client before it sends,
    and by the server before it adds."""
    if update.weight < 1:
        raise BadUpdate(f"its weight is {update.weight}")
    _compare(update.model, like, "its entries are not the model's")
    sent = dict(_reported(update.report))
    if expected is not None:
        _compare(sent, expected, "what it reports besides its model is not what is asked for")
    weights = {name: weight for name, (_, weight) in update.report.spreads.items()}
    for name, weight in weights.items():
        if weight.is_floating_point() or weight.numel() != 1:
            raise BadUpdate(f"{name}'s weight is not 0 or 1")
    if bool(numbers_are_good(update)):
        return
    for name, tensor in (*update.model.items(), *sent.items()):
        if not bool(torch.isfinite(tensor).all()):
            raise BadUpdate(f"{name} is not finite")
    bad = next(name for name, weight in weights.items() if int(weight) not in (0, 1))
    raise BadUpdate(f"{bad}'s weight is not 0 or 1")


def numbers_are_good(update: Update) -> Tensor:
    """Whether every number of an update is finite, and every weight 0 or 1, as a tensor: nobody has to wait for it
    yet. A sum in float64 is finite just where all of its float32 terms are."""
    row = update.row if update.row is not None else in_a_row(update.model)
    total = row.sum(dtype=torch.float64)
    reported = dict(_reported(update.report))
    if reported:
        total = total + in_a_row(reported).sum(dtype=torch.float64)
    good = torch.isfinite(total)
    if update.report.spreads:
        weights = torch.stack([weight.reshape(()) for _, weight in update.report.spreads.values()])
        good = good & ((weights == 0) | (weights == 1)).all()
    return good


def in_a_row(tensors: Mapping[str, Tensor]) -> Tensor:
    """The floating-point ones of the tensors, one after another."""
    rows = [tensor.detach().reshape(-1) for tensor in tensors.values() if tensor.is_floating_point()]
    return torch.cat(rows) if rows else torch.zeros(0)


def _compare(sent: Mapping[str, Tensor], like: Mapping[str, Tensor], complaint: str) -> None:
    if sent.keys() != like.keys():
        raise BadUpdate(f"{complaint}: {', '.join(sorted(sent.keys() ^ like.keys())[:3])}")
    for name, tensor in sent.items():
        if tensor.shape != like[name].shape or tensor.dtype != like[name].dtype:
            raise BadUpdate(
                f"{name} is {tuple(tensor.shape)} {tensor.dtype}, not {tuple(like[name].shape)} {like[name].dtype}"
            )


def _reported(report: Report) -> Iterable[tuple[str, Tensor]]:
    yield from report.means.items()
    yield from ((name, value) for name, (value, _) in report.spreads.items())
