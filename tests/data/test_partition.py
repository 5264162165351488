"""Partitions: who has what, in which proportions, and the same everywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import make_masks, make_pool

from fedfa.data.partition import IID, Dirichlet, Drawn, Natural, Sizes, apportion, deal_sizes
from fedfa.errors import UserError


def listed(parts: Any) -> dict[str, list[int]]:
    return {name: part.tolist() for name, part in parts.items()}


# By site


def test_by_site() -> None:
    pool = make_pool([0] * 6, sites=["zoo", "ape", "zoo", "ape", "bee", "zoo"])
    assert listed(Natural().divide(pool, 0)) == {"ape": [1, 3], "bee": [4], "zoo": [0, 2, 5]}
    assert list(Natural(smallest=2).divide(pool, 0)) == ["ape", "zoo"]
    assert list(Natural(smallest=3).divide(pool, 5)) == ["zoo"]


def test_some_of_the_writers() -> None:
    pool = make_pool([0] * 200, sites=[f"w{number // 4:02d}" for number in range(200)])
    one, same, other = (Natural(clients=10).divide(pool, seed) for seed in (0, 0, 1))
    assert len(one) == 10 and list(one) == list(same) == sorted(one) and list(one) != list(other)
    assert all(len(part) == 4 for part in one.values())
    whole = Natural().divide(pool, 0)
    assert all((one[name] == whole[name]).all() for name in one)


def test_data_without_sites_say_what_to_do() -> None:
    with pytest.raises(
        UserError, match="made-up does not say where its samples come from: say partition=dirichlet, sizes"
    ):
        Natural().divide(make_pool([0] * 3, sites=[""] * 3), 0)
    with pytest.raises(UserError, match="made-up: 2 samples belong to no site"):
        Natural().divide(make_pool([0] * 3, sites=["a", "", ""]), 0)
    with pytest.raises(UserError, match=r"has 1 sites of at least 1 samples, not 2: lower partition.clients"):
        Natural(clients=2).divide(make_pool([0] * 3), 0)
    with pytest.raises(UserError, match="has 0 sites of at least 4 samples, not 1"):
        Natural(smallest=4).divide(make_pool([0] * 3), 0)


# Drawn


PARTITIONS = [IID(5), Sizes(5, smallest=3), Sizes(5, "power", 1.5, 2), Dirichlet(5, 0.4, 2), Dirichlet(3, 5.0, 1)]


@settings(deadline=None, max_examples=120)
@given(data=st.data(), partition=st.sampled_from(PARTITIONS), seed=st.integers(0, 9))
def test_every_sample_once_and_groups_whole(data: st.DataObject, partition: Drawn, seed: int) -> None:
    count = data.draw(st.integers(60, 150))
    labels = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    pairs = data.draw(st.integers(0, 10))
    groups = [*range(count - pairs), *range(pairs)]
    given_ = data.draw(st.lists(st.sampled_from(["", "", "train", "test"]), min_size=count, max_size=count))
    pool = make_pool(labels, groups=groups, given=given_)
    parts = partition.divide(pool, seed)
    assert len(parts) == partition.clients
    assert sorted(n for part in parts.values() for n in part.tolist()) == list(range(count))
    owner = {n: name for name, part in parts.items() for n in part.tolist()}
    free = [n for n in range(count) if given_[n] != "test"]
    owners: dict[int, set[str]] = {}
    for n in free:
        owners.setdefault(groups[n], set()).add(owner[n])
    assert all(len(names) == 1 for names in owners.values())
    smallest = getattr(partition, "smallest", 1)
    in_free = [sum(owner[n] == name for n in free) for name in parts]
    assert min(in_free) >= (smallest - 1 if isinstance(partition, Sizes) and pairs else smallest if not pairs else 1)
    tested = [sum(given_[n] == "test" for n in part.tolist()) for part in parts.values()]
    assert max(tested) - min(tested) <= 1, "dealt out evenly"
    assert listed(parts) == listed(partition.divide(pool, seed))


def test_names_are_in_order() -> None:
    assert list(IID(12).divide(make_pool([0] * 30), 0))[:3] == ["client-00", "client-01", "client-02"]
    assert list(IID(3).divide(make_pool([0] * 30), 0)) == ["client-0", "client-1", "client-2"]


def test_equal_parts() -> None:
    assert [len(part) for part in IID(4).divide(make_pool([0] * 10), 0).values()] == [3, 3, 2, 2]


def test_a_given_test_part_is_dealt_out_class_by_class() -> None:
    """As CIFAR-10 has it, in small: 5 clients, 100 test images of 10 classes; each gets 2 of each class."""
    labels = [n % 10 for n in range(600)]
    pool = make_pool(labels, given=["train"] * 500 + ["test"] * 100)
    for part in Dirichlet(5, 0.5).divide(pool, 0).values():
        tested = part[part >= 500]
        assert np.bincount(np.array(labels)[tested]).tolist() == [2] * 10


def test_dirichlet_shares_have_the_right_spread() -> None:
    """Over 400 classes of 200 samples, a client's share of a class has mean 1/10 and variance
    (1/10)(9/10)/(10α + 1)."""
    classes, per_class = 400, 200
    pool = make_pool([n // per_class for n in range(classes * per_class)])
    for alpha, wanted in ((0.3, 0.09 / 4), (5.0, 0.09 / 51)):
        parts = Dirichlet(10, alpha).divide(pool, 0)
        shares = np.stack([np.bincount(part // per_class, minlength=classes) for part in parts.values()]) / per_class
        assert abs(shares.mean() - 0.1) < 1e-9
        assert shares.var() == pytest.approx(wanted, rel=0.12, abs=2e-4)


def test_dirichlet_is_the_same_on_every_machine() -> None:
    """Pinned: a change here changes every federation that anyone has drawn."""
    parts = Dirichlet(3, 0.5, 2).divide(make_pool([n % 3 for n in range(24)]), 0)
    assert listed(parts) == {
        "client-0": [0, 1, 2, 3, 4, 6, 9, 12, 15, 16, 18, 20, 21, 22],
        "client-1": [7, 10],
        "client-2": [5, 8, 11, 13, 14, 17, 19, 23],
    }


def test_dirichlet_of_the_paper() -> None:
    labels = np.arange(50_000) % 10
    sizes = [len(part) for part in Dirichlet(100, 0.3).divide(make_pool(labels.tolist()), 0).values()]
    assert sum(sizes) == 50_000 and min(sizes) >= 10 and max(sizes) > 1000


def test_what_dirichlet_cannot_do() -> None:
    line = (
        "none of 1000 draws with alpha=0.01 gave each of 20 clients 10 of the 210 samples of made-up: raise partition.a"
    )
    with pytest.raises(UserError, match=line):
        Dirichlet(20, 0.01).divide(make_pool([n % 3 for n in range(210)]), 0)
    with pytest.raises(UserError, match="dirichlet divides classes, and made-up has masks: say partition=sizes"):
        Dirichlet(2).divide(make_masks(30), 0)
    with pytest.raises(UserError, match=r"made-up has 3 samples or groups for 5 clients: lower partition.clients"):
        IID(5).divide(make_pool([0] * 6, groups=[0, 0, 1, 1, 2, 2]), 0)


def test_sizes_follow_their_law() -> None:
    pool = make_masks(40_000)
    sizes = np.array([len(part) for part in Sizes(200, "lognormal", 0.8, 1).divide(pool, 0).values()])
    assert sizes.sum() == 40_000
    assert np.log(sizes).std() == pytest.approx(0.8, rel=0.15)
    power = np.array(sorted((len(part) for part in Sizes(20, "power", 1.0, 1).divide(pool, 0).values()), reverse=True))
    harmonic = (1 / np.arange(1, 21)).sum()
    assert np.abs(power - 1 - (40_000 - 20) / np.arange(1, 21) / harmonic).max() <= 1
    assert len({len(part) for part in Sizes(20, spread=0).divide(pool, 0).values()}) == 1
    with pytest.raises(UserError, match="90 samples of made-up are too few for 10 clients of 10: lower partition"):
        Sizes(10).divide(make_masks(90), 0)


@given(st.integers(0, 1000), st.lists(st.floats(0.01, 100), min_size=1, max_size=20))
def test_apportioning(total: int, shares: list[float]) -> None:
    counts = apportion(total, np.array(shares))
    assert counts.sum() == total
    assert np.abs(counts - total * np.array(shares) / sum(shares)).max() < 1 + 1e-9


def test_dealing_by_size() -> None:
    client = deal_sizes(np.ones(10, dtype=int), np.array([0, 7, 3]), np.random.default_rng(0))
    assert np.bincount(client, minlength=3).tolist() == [0, 7, 3]


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: Natural(clients=-1), "clients is at least 1, or 0 for all, not -1"),
        (lambda: Natural(smallest=0), "smallest is at least 1, not 0"),
        (lambda: IID(0), "clients is at least 1, not 0"),
        (lambda: Dirichlet(alpha=0), "alpha is above 0, not 0"),
        (lambda: Dirichlet(alpha=float("nan")), "alpha is above 0, not nan"),
        (lambda: Dirichlet(smallest=0), "smallest is at least 1, not 0"),
        (lambda: Sizes(spread=-1), "spread is between 0 and 10, not -1"),
        (lambda: Sizes(smallest=0), "smallest is at least 1, not 0"),
    ],
)
def test_settings_that_make_no_sense(make: Any, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        make()
