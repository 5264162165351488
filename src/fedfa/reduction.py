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
from fedfa.rows import cut, in_a_row, joined, owners

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
    counted: Tensor
    """How many clients weighed in, where the statistic is: on a GPU nobody need wait for it."""

    @property
    def clients(self) -> int:
        """How many clients weighed in."""
        return int(self.counted)


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
        self._shapes: dict[str, torch.Size] | None = None
        self._types: list[torch.dtype] = []
        self._high = self._low = torch.empty(0, dtype=torch.float64)

    @torch.no_grad()
    def add(self, tensors: Mapping[str, Tensor], weight: int = 1, row: Tensor | None = None) -> None:
        """Add tensors; `row` is all of them in one, if that is at hand."""
        if self._shapes is None:
            self._shapes = {name: tensor.shape for name, tensor in tensors.items()}
            self._types = [tensor.dtype for tensor in tensors.values()]
        if not self._shapes:
            return
        flat = joined([tensors[name] for name in self._shapes]) if row is None else row
        fused = _fused(flat)
        if not self._high.numel():
            self._high, self._low = (fused.started if fused is not None else _started)(flat, weight)
        elif fused is not None:
            fused.add(self._high, self._low, flat, weight)
        else:
            size = CHUNK if flat.device.type == "cpu" else flat.numel()
            for part, high, low in zip(flat.split(size), self._high.split(size), self._low.split(size), strict=True):
                _two_sum_(high, low, part.double().mul_(weight))

    def divided(self, by: int) -> dict[str, Tensor]:
        """The sum over `by`, in the tensors' own types."""
        shapes = self._shapes or {}
        types = set(self._types)
        mean = self._mean(by, types.pop() if len(types) == 1 else torch.float64)  # one launch, not one a tensor
        found = zip(shapes, cut(mean, list(shapes.values())), self._types, strict=True)
        return {name: part if part.dtype == type else part.to(type) for name, part, type in found}

    def _mean(self, by: int, type: torch.dtype) -> Tensor:
        if type in (torch.float32, torch.float64) and (fused := _fused(self._high)) is not None:
            mean: Tensor = fused.divided(self._high, self._low, by, type)
            return mean
        return (self._high + self._low).div_(by).to(type)


def _started(row: Tensor, weight: int) -> tuple[Tensor, Tensor]:
    """The sum of one term, as its high and low: what adding it to zeros gives (so there is no −0 in a sum)."""
    high = torch.zeros(row.shape, dtype=torch.float64, device=row.device).add_(row, alpha=weight)
    return high, torch.zeros_like(high)


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
    """The same arithmetic as single kernels, where there is a GPU that runs them."""
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
        self._counters: Tensor | None = None
        self._reporting: Tensor | None = None
        self._centre: Tensor | None = None
        self._owners = torch.empty(0, dtype=torch.int64)
        self._spread: dict[str, torch.Size] = {}
        self._expected = expected

    @torch.no_grad()
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
        if self._integers:
            counters = torch.cat([update.model[name].flatten() for name in self._integers]) * update.weight
            self._counters = counters if self._counters is None else self._counters + counters
        self._means.add(report.means)
        if report.spreads:
            self._add_spreads(report.spreads)

    def _add_spreads(self, spreads: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Deviations from the centres and their squares, all statistics in a row; a weight of 0 takes one out."""
        if self._centre is None:
            self._centre = self._centres_of(spreads)
            self._spread = {name: value.shape for name, (value, _) in spreads.items()}
            self._owners = owners(tuple(map(torch.Size.numel, self._spread.values())), self._centre.device)
        values = torch.cat([spreads[name][0].flatten() for name in self._spread])
        weights = torch.cat([spreads[name][1].reshape(1) for name in self._spread])
        deviation = (values - self._centre) * weights.index_select(0, self._owners)  # in float64, as the centre is
        self._moments.add({"": (row := torch.cat((deviation, deviation * deviation)))}, row=row)
        self._reporting = weights if self._reporting is None else self._reporting + weights

    def _centres_of(self, spreads: Mapping[str, tuple[Tensor, Tensor]]) -> Tensor:
        """The points that deviations are measured from, in a row; 0 where there are none yet."""
        parts = [
            self._centres[name].expand_as(value) if name in self._centres else torch.zeros_like(value)
            for name, (value, _) in spreads.items()
        ]
        return torch.cat([part.flatten() for part in parts]).double()

    def result(self) -> Reduced:
        """The means and variances of what was added."""
        if not self.clients:
            raise ValueError("nothing was added")
        model = self._model.divided(self._weight)
        if self._counters is not None:
            parts = cut(self._counters // self._weight, [like.shape for like in self._integers.values()])
            found = zip(self._integers.items(), parts, strict=True)
            model |= {name: part.to(like.dtype) for (name, like), part in found}
        return Reduced(self.clients, model, self._means.divided(self.clients), self._across())

    def _across(self) -> dict[str, Across]:
        if self._centre is None or self._reporting is None:
            return {}
        counts = self._reporting.clamp_min(1).index_select(0, self._owners)
        deviation, square = self._moments.divided(1)[""].view(2, -1) / counts
        # A difference of two means: rounding could take it below 0.
        variance = (square - deviation.square()).clamp_min_(0).float()
        mean = (deviation + self._centre).float()
        shapes = list(self._spread.values())
        found = zip(cut(mean, shapes), cut(variance, shapes), self._reporting.unbind(), strict=True)
        return {name: Across(*across) for name, across in zip(self._spread, found, strict=True)}


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


@torch.no_grad()
def numbers_are_good(update: Update) -> Tensor:
    """Whether every number of an update is finite, and every weight 0 or 1, as a tensor: nobody has to wait for it
    yet."""
    total = _witness(update.row if update.row is not None else in_a_row(update.model))
    reported = dict(_reported(update.report))
    if reported:
        total = total + _witness(in_a_row(reported))
    good = torch.isfinite(total)
    if update.report.spreads:
        weights = torch.cat([weight.reshape(1) for _, weight in update.report.spreads.values()])
        good = good & ((weights == 0) | (weights == 1)).all()
    return good


def _witness(row: Tensor) -> Tensor:
    """A number that is finite just where all of the row's are: their sum, in float64, which float32 cannot overflow."""
    if (fused := _fused(row)) is not None:
        found: Tensor = fused.witness(row)
        return found
    return row.sum(dtype=torch.float64)


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
