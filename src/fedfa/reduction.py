"""What the server gets of its clients' updates: means and variances, never the updates themselves.

Sums are exact, so they have no order: adding a client's values to a sum of two float64 numbers (double-double,
106 bits) loses nothing, as long as one entry's contributions lie within 2⁵⁰ of each other in size. There is one
division at the end. A client's contribution can therefore be added when it arrives and be forgotten, and the
result is the same to the bit whatever the order of arrival was, and however many sums it went through.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

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
    finite: bool | None = None
    """Whether all of it is finite, where an engine in this very process has looked."""


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
        size = CHUNK if flat.device.type == "cpu" else flat.numel()
        for part, high, low in zip(flat.split(size), self._high.split(size), self._low.split(size), strict=True):
            _two_sum_(high, low, part.double().mul_(weight))

    def divided(self, by: int) -> dict[str, Tensor]:
        """The sum over `by`, in the tensors' own types."""
        like = self._like or {}
        mean = (self._high + self._low).div_(by)
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
        self._centres = dict(centres or {})
        self.clients = 0
        self._weight = 0
        self._model, self._means, self._moments = ExactSum(), ExactSum(), ExactSum()
        self._counters: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}
        self._expected = expected

    def add(self, update: Update) -> None:
        """Add one client's update, or raise :class:`BadUpdate` and leave the sums as they are."""
        check(update, self._like, self._expected)
        report = update.report
        if self._expected is None:
            self._expected = {name: torch.empty_like(tensor, device="meta") for name, tensor in _reported(report)}
        self.clients += 1
        self._weight += update.weight
        floats = {name: t for name, t in update.model.items() if t.is_floating_point()}
        self._model.add(floats, update.weight, update.row)
        for name, tensor in update.model.items():
            if not tensor.is_floating_point():
                self._counters[name] = self._counters.get(name, torch.zeros_like(tensor)) + tensor * update.weight
        self._means.add(report.means)
        moments: dict[str, Tensor] = {}
        for name, (value, weight) in report.spreads.items():
            wide = value.double()
            deviation = (wide - self._centres[name] if name in self._centres else wide) * weight
            moments[f"{name}/1"], moments[f"{name}/2"] = deviation, deviation * deviation
            self._weights[name] = self._weights.get(name, torch.zeros_like(weight)) + weight
        self._moments.add(moments)

    def result(self) -> Reduced:
        """The means and variances of what was added."""
        if not self.clients:
            raise ValueError("nothing was added")
        model = self._model.divided(self._weight)
        model |= {name: total // self._weight for name, total in self._counters.items()}
        moments = self._moments.divided(1)
        spreads = {name: self._across(name, moments) for name in self._weights}
        return Reduced(self.clients, model, self._means.divided(self.clients), spreads)

    def _across(self, name: str, moments: Mapping[str, Tensor]) -> Across:
        clients = int(self._weights[name])
        deviation = moments[f"{name}/1"] / max(clients, 1)
        # A difference of two means: rounding could take it below 0.
        variance = (moments[f"{name}/2"] / max(clients, 1) - deviation.square()).clamp_min_(0)
        mean = deviation + self._centres[name] if name in self._centres else deviation
        return Across(mean.float(), variance.float(), clients)


def check(update: Update, like: Mapping[str, Tensor], expected: Mapping[str, Tensor] | None = None) -> None:
    """Raise :class:`BadUpdate` where an update is misshapen or not finite. Run by the client before it sends,
    and by the server before it adds."""
    if update.weight < 1:
        raise BadUpdate(f"its weight is {update.weight}")
    _compare(update.model, like, "its entries are not the model's")
    sent = dict(_reported(update.report))
    if expected is not None:
        _compare(sent, expected, "what it reports besides its model is not what is asked for")
    _check_weights(update.report.spreads)
    if update.finite or (update.finite is None and bool(finite(update))):
        return
    named = [*update.model.items(), *sent.items()]
    bad = next(name for name, tensor in named if not bool(torch.isfinite(tensor).all()))
    raise BadUpdate(f"{bad} is not finite")


def finite(update: Update) -> Tensor:
    """Whether every number of an update is finite, as a tensor: nobody has to wait for it yet. A sum in float64 is
    finite just where all of its float32 terms are."""
    row = update.row if update.row is not None else in_a_row(update.model)
    total = row.sum(dtype=torch.float64)
    reported = dict(_reported(update.report))
    if reported:
        total = total + in_a_row(reported).sum(dtype=torch.float64)
    return torch.isfinite(total)


def in_a_row(tensors: Mapping[str, Tensor]) -> Tensor:
    """The floating-point ones of the tensors, one after another."""
    rows = [tensor.detach().reshape(-1) for tensor in tensors.values() if tensor.is_floating_point()]
    return torch.cat(rows) if rows else torch.zeros(0)


def _check_weights(spreads: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    for name, (_, weight) in spreads.items():
        if weight.is_floating_point() or weight.numel() != 1:
            raise BadUpdate(f"{name}'s weight is not 0 or 1")
    if spreads:
        weights = torch.stack([weight.reshape(()) for _, weight in spreads.values()]).tolist()
        for name, number in zip(spreads, weights, strict=True):
            if number not in (0, 1):
                raise BadUpdate(f"{name}'s weight is not 0 or 1")


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
