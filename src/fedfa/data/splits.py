"""How each client's samples are divided into training, validation and test parts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fedfa.data.federation import ClientIndex, Split
from fedfa.data.pool import Pool
from fedfa.streams import derive

Index = NDArray[np.int64]
Rounding = Literal["up", "down"]
SIDES: tuple[Split, ...] = ("train", "val", "test")
TRAIN, VAL, TEST = range(3)
Sizes = tuple[int, int, int]
"""Samples that train, validate and test."""
MOST_UNITS = 512
"""Groups of a client up to which the best of all combinations is looked for where filling up in turn does not fit."""


def draws(seed: int, *name: int | str) -> np.random.Generator:
    """The generator of the draws of this name: counter-based (Philox), the same on every machine."""
    return np.random.Generator(np.random.Philox(derive(seed, "division", *name)))


def share(value: float | str, what: str) -> Fraction:
    """A share between 0 and 1, from a number or from text such as '1/6', as the fraction that was meant. In binary
    0.07·100 is a little above 7, and rounded up it would be 8."""
    try:
        fraction = Fraction(value).limit_denominator(10_000)
    except (ValueError, ZeroDivisionError, OverflowError):
        raise ValueError(f"{what} is a number between 0 and 1, or such as '1/6', not {value!r}") from None
    if not 0 <= fraction <= 1:
        raise ValueError(f"{what} is a share, between 0 and 1, not {value}")
    return fraction


@dataclass(frozen=True)
class Shares:
    """What part of a client's samples is held out. A source with an attribute `shares` has such of its own.

    Test takes t·n of n samples, and validation v/(1−t) of what is left; training keeps the rest. Rounded `up`, with
    t = 0.2 and v = 0.32, these are the paper's sizes of Office-Caltech 10 (958 → 459/307/192); rounded `down`, with
    0.2 and 0.2, those of ProstateMRI (466 → 280/93/93).
    """

    test: float | str = 0.2
    val: float | str = 0.2
    rounding: Rounding = "up"

    def __post_init__(self) -> None:
        if share(self.test, "test") + share(self.val, "val") >= 1:
            raise ValueError(f"test={self.test} and val={self.val} leave nothing to train on")

    def sizes(self, count: int, test: bool = True, val: bool = True) -> Sizes:
        """How many of `count` samples train, validate and test. Where the data bring a test or a validation part of
        their own, nothing is taken for it. One sample trains, whatever the shares; of two, the other one tests."""
        t, v = share(self.test, "test"), share(self.val, "val")
        rounded = math.ceil if self.rounding == "up" else math.floor
        testing = rounded(t * count) if test else 0
        validating = rounded(v / (1 - t) * (count - testing)) if val else 0
        if count and testing + validating >= count:
            validating = max(0, min(validating, count - testing - 1))
            testing = min(testing, count - 1)
        return count - testing - validating, validating, testing


@dataclass(frozen=True)
class Splits:
    """How each client's samples are divided, and how many of the training samples are used.

    Attributes:
        test: share that is tested on; None takes the source's own (a fifth, unless it says otherwise).
        val: share that is validated on, likewise.
        rounding: of those two sizes, `up` or `down`; None takes the source's own.
        by: `group` keeps slices of one patient, and byte-identical files, on one side; `sample` (or `slice`: the
            authors' released code) does not, and tests on what it has as good as trained on.
        stratify: whether the parts have each class in the same share, to within rounding.
        given: whether the split that a data set brings is kept.
        fraction: share of the training samples that is used, such as 1/6; a smaller one lies inside a larger one.
        smallest: training samples that a fraction leaves at least (the paper's mini-ProstateMRI: 1/6, but 32).
        seed: of partition and split; None follows the experiment's.
        file: a file with clients and splits, one line a sample, instead of drawing them.
    """

    test: float | str | None = None
    val: float | str | None = None
    rounding: Rounding | None = None
    by: Literal["group", "sample", "slice"] = "group"
    stratify: bool = True
    given: bool = True
    fraction: float | str = 1.0
    smallest: int = 1
    seed: int | None = None
    file: str = ""

    def __post_init__(self) -> None:
        for key in ("test", "val", "fraction"):  # written one way, so that the same settings have the same name
            value = getattr(self, key)
            if value is not None:
                object.__setattr__(self, key, float(share(value, key)))
        if self.by == "slice":
            object.__setattr__(self, "by", "sample")
        if not self.fraction:
            raise ValueError("fraction is above 0")
        if self.smallest < 1:
            raise ValueError(f"smallest is at least 1, not {self.smallest}")
        if self.seed is not None and self.seed < 0:
            raise ValueError(f"seed is at least 0, not {self.seed}")
        if self.file and self.drawn():
            raise ValueError(f"file says where each sample goes; leave {', '.join(self.drawn())} out")
        self.shares(Shares(0, 0))

    def drawn(self) -> list[str]:
        """The settings, of those that a file of splits decides, that are not as they are by default."""
        plain = {"test": None, "val": None, "rounding": None, "by": "group", "stratify": True, "given": True}
        return [key for key, value in plain.items() if getattr(self, key) != value]

    def shares(self, own: Shares) -> Shares:
        """The shares, from the source's `own` where nothing is said."""
        chosen: dict[str, Any] = {key: getattr(self, key) for key in ("test", "val", "rounding")}
        return Shares(**{key: getattr(own, key) if value is None else value for key, value in chosen.items()})


def split(
    pool: Pool, members: Mapping[str, Index], shares: Shares, seed: int, stratify: bool = True
) -> dict[str, ClientIndex]:
    """Divide each client's samples. Its draws depend on the seed, its name and its samples alone, except that a group
    which stands at several clients goes where it went at the first of them."""
    given = np.asarray(pool.given)
    ours = (not (given == "test").any(), not (given == "val").any())
    groups, labels = np.asarray(pool.groups), classes_of(pool) if stratify else None
    shared = _shared(groups, members)
    elsewhere: dict[int, int] = {}
    clients = {}
    for name in sorted(members):
        samples = np.sort(members[name])
        side = np.full(len(samples), TRAIN)
        side[given[samples] == "test"], side[given[samples] == "val"] = TEST, VAL
        free = np.flatnonzero(side == TRAIN)
        kinds = None if labels is None else labels[samples[free]]
        mine = groups[samples[free]]
        side[free] = _sides(mine, kinds, shares.sizes(len(free), *ours), elsewhere, draws(seed, "split", name))
        known = np.isin(mine, shared)
        elsewhere.update(zip(mine[known].tolist(), side[free][known].tolist(), strict=True))
        clients[name] = client_index(samples, side)
    return clients


def client_index(samples: Index, side: NDArray[Any]) -> ClientIndex:
    return ClientIndex(*(torch.from_numpy(samples[side == part].astype(np.int64)) for part in range(3)))


def classes_of(pool: Pool) -> NDArray[Any] | None:
    """Every sample's class; None where the labels are masks."""
    return np.asarray(pool.labels) if pool.task == "classification" else None


def _shared(groups: NDArray[Any], members: Mapping[str, Index]) -> NDArray[Any]:
    """Groups with samples at several clients."""
    found = [np.unique(groups[samples]) for samples in members.values()]
    numbers, clients = np.unique(np.concatenate(found), return_counts=True)
    return numbers[clients > 1]


def _sides(
    groups: NDArray[Any],
    kinds: NDArray[Any] | None,
    sizes: Sizes,
    elsewhere: Mapping[int, int],
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """The side of every sample of a client: whole groups, in a random order, go to test and validation until those
    are full; the rest trains."""
    units, first, unit = np.unique(groups, return_index=True, return_inverse=True)
    weight = np.bincount(unit, minlength=len(units))
    decided = np.array([elsewhere.get(number, -1) for number in units.tolist()] if elsewhere else [-1] * len(units))
    order = in_random_order(len(units), None if kinds is None else kinds[first], rng)
    order = order[decided[order] < 0]
    side = np.where(decided < 0, TRAIN, decided)
    for part, others in ((TEST, 1 + (sizes[VAL] > 0)), (VAL, 1)):
        wanted = sizes[part] - weight[decided == part].sum()
        taken = pick(order, weight, int(wanted), max(1, min(others, len(order) - 1)))
        side[taken] = part
        order = order[~np.isin(order, taken)]
    return np.asarray(side[unit], dtype=np.int64)


def in_random_order(count: int, kinds: NDArray[Any] | None, rng: np.random.Generator) -> Index:
    """A random order of `count` items in which, given their `kinds`, every beginning has each kind in its share.

    The i-th of n items of a kind stands at (i + u)/n, with one u in 0–1 for all of the kind.
    """
    order = rng.permutation(count)
    if kinds is None or not count:
        return order
    _, kind, sizes = np.unique(kinds[order], return_inverse=True, return_counts=True)
    by_kind = np.argsort(kind, kind="stable")
    number = np.empty(count)
    number[by_kind] = np.arange(count) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    place = (number + rng.random(len(sizes))[kind]) / sizes[kind]
    return order[np.argsort(place, kind="stable")]


def pick(order: Index, weight: NDArray[Any], wanted: int, leave: int) -> Index:
    """Units from the front of `order` that together weigh `wanted`; `leave` units are left for others.

    A unit that no longer fits is passed over. Where that does not fill up exactly, as with cases of many slices, the
    combination that comes nearest is taken instead (the lighter of two as near); and where the other sides would get
    none, the one unit that comes nearest.
    """
    if wanted <= 0 or len(order) <= leave:
        return order[:0]
    taken, room = [], wanted
    for unit in order.tolist():
        if weight[unit] <= room:
            taken.append(unit)
            room -= int(weight[unit])
            if not room:
                break
    if room and len(order) <= MOST_UNITS:
        taken = _nearest(order.tolist(), weight, wanted)
    if not taken or len(order) - len(taken) < leave:
        taken = [int(order[np.argmin(np.abs(weight[order] - wanted))])]
    return np.array(taken, dtype=np.int64)


def _nearest(order: Sequence[int], weight: NDArray[Any], wanted: int) -> list[int]:
    """The units, early ones first, whose weights sum as near to `wanted` as any do: subset sums as bits of a number."""
    reach = [1]
    for unit in order:
        reach.append(reach[-1] | reach[-1] << int(weight[unit]))
    sums = reach[-1]
    total = min((s for s in range(1, sums.bit_length()) if sums >> s & 1), key=lambda s: abs(s - wanted))
    taken = []
    for unit, before in zip(reversed(order), reversed(reach[:-1]), strict=True):
        if not before >> total & 1:  # not to be had without this unit
            taken.append(unit)
            total -= int(weight[unit])
    return taken


def reduce(
    clients: Mapping[str, ClientIndex], splits: Splits, labels: NDArray[Any] | None, seed: int
) -> dict[str, ClientIndex]:
    """Each client with a fraction of its training samples: ⌊fraction·n⌋, but `smallest` where it has as many.

    The order in which samples are taken does not depend on the fraction, so that a sixth lies inside two sixths. It
    goes by sample, not by group: what is left out stands on no side.
    """
    fraction = share(splits.fraction, "fraction")
    if fraction == 1:
        return dict(clients)
    reduced = {}
    for name, index in clients.items():
        train = index.train.numpy()
        kept = max(splits.smallest, math.floor(fraction * len(train)))
        kinds = labels[train] if labels is not None and splits.stratify else None
        order = in_random_order(len(train), kinds, draws(seed, "fraction", name))
        reduced[name] = ClientIndex(torch.from_numpy(np.sort(train[order[:kept]])), index.val, index.test)
    return reduced
