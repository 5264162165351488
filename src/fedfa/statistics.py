"""Numbers over seeds: means with intervals, paired differences, Holm's correction; and which rounds of a run count.

SciPy is imported where a quantile or a p-value of Student's t is needed: ``pip install 'fedfa[report]'``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Protocol, get_args

from fedfa.errors import UserError

LEVEL = 0.95
DIGITS = 6
"""Digits of a metric that are kept, and that count."""
EQUAL = 10.0**-DIGITS
"""Differences that deviate by less are equal: what deviates are roundings, of floats or of a summary's digits."""
LAST = 20
"""Rounds that `last20` averages over."""
MOST_SEEDS = 1000
"""More are a slip of the finger: their runs alone would take a minute to lay out."""
Rule = Literal["last", "last20", "best"]
RULES: tuple[Rule, ...] = get_args(Rule)
TITLES: dict[Rule, str] = {
    "last": "last round",
    "last20": f"mean of the last {LAST} rounds",
    "best": "best by validation",
}


@dataclass(frozen=True)
class Summary:
    """Some values: their number, mean, standard deviation (n − 1), and a 95 % interval of the mean by Student's t. One
    value has neither deviation nor interval."""

    n: int
    mean: float
    sd: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Both ends of the mean's interval."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    @property
    def one_more(self) -> tuple[float, float] | None:
        """Where one more value would fall, 19 times of 20: mean ± t·sd·√(1 + 1/n), a prediction interval. That is what
        someone else's single run is to be compared with; the mean's interval is narrower, and closes with n."""
        if self.sd is None:
            return None
        half = self.sd * math.sqrt(1 + 1 / self.n) * _quantile(self.n)
        return self.mean - half, self.mean + half


@dataclass(frozen=True)
class Difference(Summary):
    """Differences a − b over the seeds that both have, with the p-value of the paired t-test, not corrected for
    being one of several. Where all differences are equal, or there are fewer than two, there is none, and no interval:
    one without width would claim to be sure."""

    p: float | None = None


def summarise(values: Iterable[float]) -> Summary:
    """Mean, deviation and interval of the values."""
    numbers = [float(value) for value in values]
    if not numbers:
        raise ValueError("there is nothing to summarise")
    mean, sd = _moments(numbers)
    if sd is None:
        return Summary(1, mean)
    half = sd / math.sqrt(len(numbers)) * _quantile(len(numbers))
    return Summary(len(numbers), mean, sd, mean - half, mean + half)


@cache
def _quantile(n: int) -> float:
    """Student's t that n values stay below, to either side, at our level."""
    return float(_student().stdtrit(n - 1, (1 + LEVEL) / 2))


def paired(a: Mapping[int, float], b: Mapping[int, float]) -> Difference | None:
    """a − b, seed by seed; None where no seed is common. Splits and initial weights are the same for both under a
    seed: what they share of good or bad luck drops out."""
    common = sorted(a.keys() & b.keys())
    if not common:
        return None
    found = summarise(a[seed] - b[seed] for seed in common)
    if not found.sd or found.sd <= EQUAL * max(1.0, abs(found.mean)):
        return Difference(found.n, found.mean, found.sd)
    t = found.mean / (found.sd / math.sqrt(found.n))
    p = float(2 * _student().stdtr(found.n - 1, -abs(t)))
    return Difference(found.n, found.mean, found.sd, found.low, found.high, p)


def holm(ps: Sequence[float]) -> list[float]:
    """P-values corrected for their number (Holm, 1979): the smallest times n, the next times n − 1, and so on, none
    below the one before it and none above 1. With these, the chance of any false claim in a table is at most the
    level."""
    order = sorted(range(len(ps)), key=lambda number: ps[number])
    corrected, highest = [0.0] * len(ps), 0.0
    for place, number in enumerate(order):
        highest = max(highest, min(1.0, (len(ps) - place) * ps[number]))
        corrected[number] = highest
    return corrected


class HasMetrics(Protocol):
    """What :func:`select` needs of a run."""

    @property
    def metrics(self) -> list[dict[str, Any]]: ...


@dataclass(frozen=True)
class Selected:
    """A run's test metrics by one rule, shares of 1: the mean over clients that took part, the mean over those held
    out, the gap between them, and every client's own."""

    mean: float
    unseen: float | None
    gap: float | None
    clients: dict[str, float]


def recent(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of evaluated rounds, those among the last 20: fewer where not every round is evaluated."""
    return [line for line in lines if line["round"] > lines[-1]["round"] - LAST]


def select(run: HasMetrics, rule: Rule) -> Selected:
    """A run's test metrics: after the `last` evaluated round, averaged over the last 20 rounds (`last20`), or after the
    round that did `best` on validation data (the first of equals). Test data never choose."""
    tested = tested_rounds(run.metrics)
    if not tested:
        raise UserError("the run has no evaluated round yet")
    lines = [best_round(tested)] if rule == "best" else recent(tested) if rule == "last20" else tested[-1:]
    found = [line["test"] for line in lines]
    return Selected(
        mean=_mean([line["mean"] for line in found]),
        unseen=_mean_or_none([line["unseen"] for line in found]),
        gap=_mean_or_none([line["gap"] for line in found]),
        clients={name: _mean([line["clients"][name] for line in found]) for name in found[-1]["clients"]},
    )


def select_all(run: HasMetrics) -> dict[Rule, Selected]:
    """A run's test metrics by every rule that it has numbers for: without validation data there is no `best`."""
    found: dict[Rule, Selected] = {}
    for rule in RULES:
        try:
            found[rule] = select(run, rule)
        except UserError:
            continue
    return found


def tested_rounds(metrics: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rounds that have test metrics."""
    return [line for line in metrics if "test" in line]


def better(one: float, other: float) -> bool:
    """Whether a metric is better than another by more than a rounding error."""
    return round(one, DIGITS) > round(other, DIGITS)


def best_round(tested: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The round that did best on validation data, the first of equals. Means that differ by rounding errors are equal:
    a summary of the run, which has fewer digits, chooses the same."""
    validated = [line for line in tested if "val" in line]
    if not validated:
        raise UserError("the run has no validation data, and test data must not choose a round")
    return max(validated, key=lambda line: (round(line["val"]["mean"], DIGITS), -line["round"]))


def _moments(numbers: Sequence[float]) -> tuple[float, float | None]:
    """Mean and standard deviation, the latter None for one number."""
    mean = _mean(numbers)
    if len(numbers) < 2:
        return mean, None
    return mean, math.sqrt(sum((number - mean) ** 2 for number in numbers) / (len(numbers) - 1))


def _mean(numbers: Sequence[float]) -> float:
    return math.fsum(numbers) / len(numbers)


def _mean_or_none(numbers: Sequence[float | None]) -> float | None:
    known = [number for number in numbers if number is not None]
    return _mean(known) if known else None


def _student() -> Any:
    """Where Student's t is: `scipy.stats` has it too, and takes half a second to import."""
    try:
        import scipy.special
    except ImportError:
        raise UserError("intervals need SciPy: pip install 'fedfa[report]'") from None
    return scipy.special
