"""Which client each sample belongs to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from fedfa.data.pool import Pool
from fedfa.data.splits import Index, classes_of, draws, in_random_order
from fedfa.errors import UserError

TRIES = 1000


class Partition(Protocol):
    """A dataclass whose fields are settings."""

    def divide(self, pool: Pool, seed: int) -> Mapping[str, Index]:
        """Each client's samples, as indices into the pool; no sample belongs to two clients."""
        ...


@dataclass(frozen=True)
class Natural:
    """As the data come: a client a site (a domain, a hospital, a writer).

    Attributes:
        clients: how many of the sites, drawn by chance; 0 for all.
        smallest: sites with fewer samples are left out.
    """

    clients: int = 0
    smallest: int = 1

    def __post_init__(self) -> None:
        if self.clients < 0:
            raise ValueError(f"clients is at least 1, or 0 for all, not {self.clients}")
        if self.smallest < 1:
            raise ValueError(f"smallest is at least 1, not {self.smallest}")

    def divide(self, pool: Pool, seed: int) -> dict[str, Index]:
        names, site, sizes = np.unique(np.asarray(pool.sites, dtype=np.str_), return_inverse=True, return_counts=True)
        if (names == "").all():
            raise UserError(
                f"{pool.name} does not say where its samples come from: say partition=dirichlet, sizes or iid"
            )
        if (names == "").any():
            raise UserError(f"{pool.name}: {sizes[names == ''][0]} samples belong to no site")
        eligible = np.flatnonzero(sizes >= self.smallest)
        if len(eligible) < max(self.clients, 1):
            raise UserError(
                f"partition: {pool.name} has {len(eligible)} sites of at least {self.smallest} samples, "
                f"not {max(self.clients, 1)}: lower partition.clients or partition.smallest"
            )
        if self.clients:
            eligible = np.sort(draws(seed, "sites").choice(eligible, self.clients, replace=False))
        by_site = np.split(np.argsort(site, kind="stable"), np.cumsum(sizes)[:-1])
        return {str(names[number]): by_site[number] for number in eligible}


@dataclass(frozen=True)
class Drawn(ABC):
    """Simulated clients, whatever the samples' sites. Groups are not cut: a sample and its duplicates, or all slices
    of a patient, go to one client.

    Where a data set brings a test part of its own, only the rest is divided as the partition says. The test part is
    dealt out evenly, class by class, so that the mean over clients is the accuracy on all of it (exactly so where
    it divides by the number of clients).
    """

    clients: int = 100

    def __post_init__(self) -> None:
        if self.clients < 1:
            raise ValueError(f"clients is at least 1, not {self.clients}")

    @abstractmethod
    def assign(self, pool: Pool, kinds: NDArray[Any] | None, weight: NDArray[Any], rng: np.random.Generator) -> Index:
        """The client's number for each of the units (groups), which have a class and a weight in samples."""

    def divide(self, pool: Pool, seed: int) -> dict[str, Index]:
        given, labels = np.asarray(pool.given), classes_of(pool)
        client = np.empty(len(pool), dtype=np.int64)
        free = np.flatnonzero((given != "test") & (given != "val"))
        groups = np.asarray(pool.groups)[free]
        units, first, unit = np.unique(groups, return_index=True, return_inverse=True)
        if len(units) < self.clients:
            raise UserError(
                f"partition: {pool.name} has {len(units)} samples or groups for {self.clients} clients: "
                "lower partition.clients"
            )
        kinds = None if labels is None else labels[free][first]
        weight = np.bincount(unit)
        client[free] = self.assign(pool, kinds, weight, draws(seed, "partition"))[unit]
        for part in ("test", "val"):
            fixed = np.flatnonzero(given == part)
            order = draws(seed, "deal", part).permutation(fixed)
            if labels is not None:
                order = order[np.argsort(labels[order], kind="stable")]
            client[order] = np.arange(len(order)) % self.clients
        digits = len(str(self.clients - 1))
        members = np.split(np.argsort(client, kind="stable"), np.cumsum(np.bincount(client, minlength=self.clients)))
        return {f"client-{number:0{digits}d}": members[number] for number in range(self.clients)}


@dataclass(frozen=True)
class IID(Drawn):
    """Equal parts by chance: clients differ in nothing."""

    def assign(self, pool: Pool, kinds: NDArray[Any] | None, weight: NDArray[Any], rng: np.random.Generator) -> Index:
        return deal_sizes(weight, apportion(int(weight.sum()), np.ones(self.clients)), rng)


@dataclass(frozen=True)
class Sizes(Drawn):
    """Clients that differ in how much they have, not in what.

    Attributes:
        law: of the sizes: `lognormal`, exp(spread·z) with z normal; or `power`, rank^(−spread).
        spread: 0 for equal sizes.
        smallest: samples that every client has at least.
    """

    law: Literal["lognormal", "power"] = "lognormal"
    spread: float = 1.0
    smallest: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.spread <= 10:
            raise ValueError(f"spread is between 0 and 10, not {self.spread}")
        if self.smallest < 1:
            raise ValueError(f"smallest is at least 1, not {self.smallest}")

    def assign(self, pool: Pool, kinds: NDArray[Any] | None, weight: NDArray[Any], rng: np.random.Generator) -> Index:
        spare = int(weight.sum()) - self.clients * self.smallest
        if spare < 0:
            raise UserError(
                f"partition sizes: {weight.sum()} samples of {pool.name} are too few for {self.clients} clients "
                f"of {self.smallest}: lower partition.clients or partition.smallest"
            )
        if self.law == "lognormal":
            shares = np.exp(self.spread * rng.standard_normal(self.clients))
        else:
            shares = rng.permutation(np.arange(1.0, self.clients + 1) ** -self.spread)
        return deal_sizes(weight, self.smallest + apportion(spare, shares), rng)


@dataclass(frozen=True)
class Dirichlet(Drawn):
    """Clients that differ in their classes: each class is divided among them in shares drawn from Dir(α) (Yurochkin
    et al., 2019; Hsu et al., 2019). Small α: few classes a client, and sizes that differ too.

    Attributes:
        alpha: concentration α.
        smallest: samples that every client has at least: the shares are drawn again until it is so.
    """

    alpha: float = 0.5
    smallest: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.alpha < float("inf"):
            raise ValueError(f"alpha is above 0, not {self.alpha}")
        if self.smallest < 1:
            raise ValueError(f"smallest is at least 1, not {self.smallest}")

    def assign(self, pool: Pool, kinds: NDArray[Any] | None, weight: NDArray[Any], rng: np.random.Generator) -> Index:
        if kinds is None:
            raise UserError(
                f"partition dirichlet divides classes, and {pool.name} has masks: say partition=sizes or partition=iid"
            )
        _, kind = np.unique(kinds, return_inverse=True)
        totals = np.bincount(kind, weights=weight)
        for _ in range(TRIES):
            shares = rng.dirichlet(np.full(self.clients, self.alpha), len(totals))
            ends = np.rint(np.cumsum(shares, axis=1) * totals[:, None])
            sizes = np.diff(ends, axis=1, prepend=0)
            if sizes.sum(0).min() < self.smallest:
                continue
            client = np.empty(len(kind), dtype=np.int64)
            for number, counts in enumerate(sizes):
                units = np.flatnonzero(kind == number)
                client[units] = deal_sizes(weight[units], counts, rng)
            if np.bincount(client, weights=weight, minlength=self.clients).min() >= self.smallest:
                return client
        raise UserError(
            f"partition dirichlet: none of {TRIES} draws with alpha={self.alpha} gave each of {self.clients} clients "
            f"{self.smallest} of the {int(weight.sum())} samples of {pool.name}: raise partition.alpha, or lower "
            "partition.clients or partition.smallest"
        )


def apportion(total: int, shares: NDArray[Any]) -> Index:
    """Whole numbers that sum to `total`, in proportion to `shares` to within one (largest remainders)."""
    exact = total * shares / shares.sum()
    counts: Index = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: total - counts.sum()]] += 1
    return counts


def deal_sizes(weight: NDArray[Any], counts: NDArray[Any], rng: np.random.Generator) -> Index:
    """The client's number of each unit, where units are taken in a random order and client k's samples end at
    counts[0] + … + counts[k]: exactly, where each unit is one sample; else a unit goes where its middle falls."""
    order = in_random_order(len(weight), None, rng)
    middle = np.cumsum(weight[order]) - (weight[order] + 1) / 2
    client = np.empty(len(weight), dtype=np.int64)
    client[order] = np.minimum(np.searchsorted(np.cumsum(counts), middle, side="right"), len(counts) - 1)
    return client
