"""Splits: sizes worked out by hand, groups on one side, seeds, fractions, and the sizes in the paper's tables."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import everything, make_masks, make_pool, sizes

from fedfa.data.federation import ClientIndex
from fedfa.data.splits import Shares, Splits, in_random_order, pick, reduce, share, split

OFFICE = Shares(0.2, 0.32)
PROSTATE = Shares(0.2, 0.2, "down")


# Sizes


@pytest.mark.parametrize(
    ("shares", "count", "wanted"),
    [
        # Tables of the paper's appendix.
        (OFFICE, 958, (459, 307, 192)),
        (OFFICE, 1123, (538, 360, 225)),
        (OFFICE, 157, (75, 50, 32)),
        (OFFICE, 295, (141, 95, 59)),
        (PROSTATE, 260, (156, 52, 52)),
        (PROSTATE, 156, (94, 31, 31)),
        (PROSTATE, 466, (280, 93, 93)),
        (PROSTATE, 382, (230, 76, 76)),
        (PROSTATE, 410, (246, 82, 82)),
        (PROSTATE, 175, (105, 35, 35)),
        # By hand: ⌈0.2·7⌉ = 2, ⌈5/4⌉ = 2; ⌊1.4⌋ = 1, ⌊6/4⌋ = 1.
        (Shares(), 7, (3, 2, 2)),
        (Shares(rounding="down"), 7, (5, 1, 1)),
        (Shares(0, 0), 7, (7, 0, 0)),
        (Shares("1/3", "1/3"), 9, (3, 3, 3)),
        # Too few for three parts: training comes first, then testing.
        (Shares(), 0, (0, 0, 0)),
        (Shares(), 1, (1, 0, 0)),
        (Shares(), 2, (1, 0, 1)),
        (Shares(), 3, (1, 1, 1)),
        (Shares(0.9, 0.05), 2, (1, 0, 1)),
        (Shares(0, 0.9), 1, (1, 0, 0)),
    ],
)
def test_sizes(shares: Shares, count: int, wanted: tuple[int, int, int]) -> None:
    assert shares.sizes(count) == wanted


def test_a_part_that_the_data_bring_is_not_taken_from_the_rest() -> None:
    assert Shares("1/6", "1/12", "down").sizes(50_000, test=False) == (45_000, 5_000, 0)
    assert Shares(0.2, 0.2).sizes(10, test=True, val=False) == (8, 0, 2)


@given(st.integers(0, 3000), st.integers(0, 99), st.integers(0, 99), st.sampled_from(["up", "down"]))
def test_sizes_are_the_shares_to_within_one_sample(count: int, test: int, val: int, rounding: str) -> None:
    if test + val >= 100:
        return
    train, validating, testing = Shares(test / 100, val / 100, rounding).sizes(count)  # type: ignore[arg-type]  # a word of a few
    assert train + validating + testing == count and min(train, validating, testing) >= 0
    assert train >= (count > 0)
    if count > 200:
        assert abs(testing - test * count / 100) < 1
        assert abs(validating - val * count / 100) <= 2


def test_a_share_is_the_fraction_that_was_meant() -> None:
    assert share(0.2, "test") == Fraction(1, 5) and share("1/6", "x") == share(1 / 6, "x") == Fraction(1, 6)
    for wrong in ("a sixth", "1/0", "nan", float("inf"), ""):
        with pytest.raises(ValueError, match="test is a number between 0 and 1, or such as '1/6', not"):
            share(wrong, "test")
    for wrong in (-0.1, "7/6", 1.5):
        with pytest.raises(ValueError, match="test is a share, between 0 and 1, not"):
            share(wrong, "test")


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"test": 0.5, "val": 0.5}, "test=0.5 and val=0.5 leave nothing to train on"),
        ({"fraction": 0}, "fraction is above 0"),
        ({"fraction": "7/6"}, "fraction is a share, between 0 and 1, not 7/6"),
        ({"smallest": 0}, "smallest is at least 1, not 0"),
        ({"seed": -1}, "seed is at least 0, not -1"),
        ({"file": "a.tsv", "test": 0.2, "by": "slice"}, "file says where each sample goes; leave test, by out"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, object], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        Splits(**settings)  # type: ignore[arg-type]  # wrong or mixed settings are the point


def test_the_same_settings_are_written_one_way() -> None:
    assert Splits(fraction="1/6", test="0.2", by="slice") == Splits(fraction=1 / 6, test=0.2, by="sample")


# Order


def test_every_beginning_of_the_order_has_each_kind_in_its_share() -> None:
    kinds = np.array([0] * 60 + [1] * 30 + [2] * 10)
    order = in_random_order(100, kinds, np.random.default_rng(0))
    assert sorted(order) == list(range(100))
    for length in range(1, 101):
        counts = np.bincount(kinds[order[:length]], minlength=3)
        assert np.abs(counts - length * np.array([0.6, 0.3, 0.1])).max() <= 1.5


def test_the_order_is_random_within_and_between_kinds() -> None:
    kinds = np.array([0, 0, 0, 1, 1, 1])
    firsts = Counter(int(in_random_order(6, kinds, np.random.default_rng(seed))[0]) for seed in range(600))
    assert sorted(firsts) == list(range(6)) and min(firsts.values()) > 60  # 100 each, ±4 sd


# Groups


def test_picking_by_hand() -> None:
    weight = np.array([5, 5, 4, 3])
    assert sorted(pick(np.array([0, 1, 2, 3]), weight, 7, 1)) == [2, 3], "4 + 3, where 5 and 5 + 5 are further off"
    assert pick(np.array([0, 1, 2, 3]), weight, 5, 1).tolist() == [0]
    assert sorted(pick(np.array([1, 0, 2, 3]), weight, 10, 1)) == [0, 1]
    assert pick(np.array([0, 1]), weight, 9, 1).tolist() in ([0], [1]), "one is left for others"
    assert pick(np.array([2]), weight, 3, 1).tolist() == []
    assert pick(np.array([0, 1, 2]), weight, 0, 1).tolist() == []
    assert pick(np.array([0, 1, 3]), weight, 1, 1).tolist() == [3], "no side stays empty: the smallest"


def test_cases_of_many_slices_come_as_near_as_they_can() -> None:
    """Five cases of 20, 21, 22, 23 and 24 slices: of 110, 22 test and 22 validate; one case each, the nearest."""
    groups = [number for number, slices in enumerate((20, 21, 22, 23, 24)) for _ in range(slices)]
    for seed in range(10):
        index = split(make_masks(110, groups=groups), {"here": np.arange(110)}, PROSTATE, seed)["here"]
        train, val, test = sizes(index)
        assert test == 22 and val in (21, 23) and train == 110 - test - val


@pytest.mark.parametrize("cases", [1, 2, 3, 4])
def test_few_cases(cases: int) -> None:
    """With one case all of it trains; a second one tests, a third one validates."""
    groups = [number for number in range(cases) for _ in range(20)]
    pool = make_masks(20 * cases, groups=groups)
    index = split(pool, {"here": np.arange(20 * cases)}, PROSTATE, 0)["here"]
    assert sizes(index) == {1: (20, 0, 0), 2: (20, 0, 20), 3: (20, 20, 20), 4: (40, 20, 20)}[cases]


def test_duplicates_do_not_change_the_sizes() -> None:
    """958 images of which 34 are pairs, as in Amazon: the paper's sizes, and no pair apart."""
    groups = list(range(924)) + [number for number in range(17) for _ in range(2)]
    pool = make_pool([number % 10 for number in range(958)], groups=groups)
    places = Counter()
    for seed in range(20):
        index = split(pool, {"here": np.arange(958)}, OFFICE, seed)["here"]
        assert sizes(index) == (459, 307, 192)
        side = {n: part for part in ("train", "val", "test") for n in index.of(part).tolist()}  # type: ignore[arg-type]  # a word of a few
        for number in range(17):
            members = [place for place, group in enumerate(groups) if group == number]
            assert len({side[member] for member in members}) == 1
            places[side[members[-1]]] += 1
    # The pairs are dealt like all others: about 48, 32 and 20 % of 340.
    assert 120 < places["train"] < 210 and 70 < places["val"] < 150 and 35 < places["test"] < 105


def test_a_group_at_two_clients_stands_on_one_side() -> None:
    groups = [*range(10), *range(10)]
    pool = make_pool([0] * 20, sites=["a"] * 10 + ["b"] * 10, groups=groups)
    for seed in range(10):
        clients = split(pool, {"a": np.arange(10), "b": np.arange(10, 20)}, Shares(), seed)
        for part in ("train", "val", "test"):
            mine, theirs = (clients[name].of(part) for name in "ab")  # type: ignore[arg-type]  # a word of a few
            assert torch.equal(mine, theirs - 10)


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_every_sample_once_groups_whole_and_sizes_right(data: st.DataObject) -> None:
    groups = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=120))
    sites = data.draw(st.lists(st.sampled_from("ab"), min_size=len(groups), max_size=len(groups)))
    shares = data.draw(st.sampled_from([OFFICE, PROSTATE, Shares(), Shares(0.5, 0.1), Shares(0, 0.2)]))
    seed, stratify = data.draw(st.integers(0, 5)), data.draw(st.booleans())
    pool = make_pool([group % 3 for group in groups], sites=sites, groups=groups)
    members = {site: np.array([n for n, own in enumerate(sites) if own == site], dtype=np.int64) for site in sites}
    clients = split(pool, members, shares, seed, stratify)
    assert clients.keys() == members.keys()
    side = {}
    for name, index in clients.items():
        assert everything(index) == members[name].tolist()
        side.update({n: part for part in ("train", "val", "test") for n in index.of(part).tolist()})  # type: ignore[arg-type]  # a word of a few
    assert all(len({side[n] for n, own in enumerate(groups) if own == group}) == 1 for group in set(groups))
    single = [name for name in members if Counter(groups).most_common(1)[0][1] == 1]
    for name in single:
        assert sizes(clients[name]) == shares.sizes(len(members[name]))


@settings(deadline=None, max_examples=60)
@given(st.integers(3, 200), st.integers(0, 2), st.sampled_from([OFFICE, PROSTATE]))
def test_a_few_pairs_among_many_cost_no_exactness(count: int, seed: int, shares: Shares) -> None:
    pairs = count // 5
    groups = [*range(count), *range(pairs)]
    index = split(make_pool([0] * len(groups), groups=groups), {"here": np.arange(len(groups))}, shares, seed)["here"]
    assert sizes(index) == shares.sizes(len(groups))


# Seeds and strata


def test_seeds() -> None:
    pool = make_pool([number % 3 for number in range(90)])
    one, same, other = (split(pool, {"here": np.arange(90)}, Shares(), seed)["here"] for seed in (1, 1, 2))
    assert torch.equal(one.test, same.test) and not torch.equal(one.test, other.test)


def test_a_client_is_divided_the_same_whatever_the_others_are() -> None:
    pool = make_pool([0] * 60, sites=["a"] * 30 + ["b"] * 30)
    both = split(pool, {"b": np.arange(30, 60), "a": np.arange(30)}, Shares(), 0)
    alone = split(pool, {"b": np.arange(30, 60)}, Shares(), 0)
    assert torch.equal(both["b"].test, alone["b"].test)


def test_the_draw_is_the_same_on_every_machine() -> None:
    """Pinned: a change here changes every split that anyone has drawn."""
    index = split(make_pool([0, 1] * 10), {"here": np.arange(20)}, Shares(), 0)["here"]
    assert (index.val.tolist(), index.test.tolist()) == ([10, 11, 13, 18], [0, 1, 2, 9])


def test_strata() -> None:
    labels = [0] * 50 + [1] * 30 + [2] * 20
    index = split(make_pool(labels), {"here": np.arange(100)}, Shares(), 3)["here"]
    counts = [np.bincount(np.array(labels)[part], minlength=3) for part in (index.train, index.val, index.test)]
    assert [c.sum() for c in counts] == [60, 20, 20]
    assert np.abs(counts - np.array([[30, 18, 12], [10, 6, 4], [10, 6, 4]])).max() <= 1
    loose = {
        tuple(
            np.bincount(np.array(labels)[split(make_pool(labels), {"x": np.arange(100)}, Shares(), s, False)["x"].test])
        )
        for s in range(12)
    }
    assert len(loose) > 4, "without strata, chance decides"


# A split that the data bring


def test_a_given_split_is_kept() -> None:
    given_ = ["train"] * 6 + ["test"] * 3 + [""] * 2 + ["val"]
    index = split(make_pool([0] * 12, given=given_), {"here": np.arange(12)}, Shares(), 0)["here"]
    assert index.test.tolist() == [6, 7, 8] and index.val.tolist() == [11]
    assert index.train.tolist() == [0, 1, 2, 3, 4, 5, 9, 10]


def test_validation_comes_out_of_training_where_only_a_test_part_is_given() -> None:
    given_ = ["train"] * 8 + ["test"] * 4
    index = split(make_pool([0] * 12, given=given_), {"here": np.arange(12)}, Shares(0.2, 0.2), 0)["here"]
    assert index.test.tolist() == [8, 9, 10, 11] and sizes(index) == (6, 2, 4)  # ⌈0.25·8⌉


# Fractions


def test_mini_prostate_as_in_the_paper() -> None:
    """max(32, n/6) of 156, 94, 280, 230, 246 and 105 training slices."""
    clients, start = {}, 0
    for name, count in zip("abcdef", (156, 94, 280, 230, 246, 105), strict=True):
        index = torch.arange(start, start + count)
        clients[name] = ClientIndex(index, index[:0], index[:0])
        start += count
    mini = reduce(clients, Splits(fraction="1/6", smallest=32), None, 0)
    assert [len(mini[name].train) for name in "abcdef"] == [32, 32, 46, 38, 41, 32]
    sixths = [
        [len(reduce(clients, Splits(fraction=f"{k}/6"), None, 0)[n].train) for n in "abcdef"] for k in range(1, 7)
    ]
    assert sixths == [[k * n // 6 for n in (156, 94, 280, 230, 246, 105)] for k in range(1, 7)]


@settings(deadline=None)
@given(st.integers(1, 80), st.integers(0, 3), st.lists(st.integers(1, 100), min_size=2, max_size=2))
def test_a_smaller_fraction_lies_inside_a_larger_one(count: int, seed: int, percents: list[int]) -> None:
    index = torch.arange(count) * 3
    clients = {"x": ClientIndex(index, torch.tensor([1]), torch.tensor([2]))}
    labels = np.arange(3 * count) % 4
    low, high = (reduce(clients, Splits(fraction=p / 100), labels, seed)["x"] for p in sorted(percents))
    assert set(low.train.tolist()) <= set(high.train.tolist()) <= set(index.tolist())
    assert len(low.train) == max(1, min(percents) * count // 100)
    assert low.val.tolist() == [1] and low.test.tolist() == [2]
    assert low.train.tolist() == sorted(low.train.tolist())


def test_fractions_and_splits_are_drawn_apart() -> None:
    """A fraction changes nothing of validation and test, and the whole is the whole."""
    pool = make_pool([n % 5 for n in range(100)])
    clients = split(pool, {"here": np.arange(100)}, Shares(), 0)
    assert reduce(clients, Splits(), None, 0) == clients
    half = reduce(clients, Splits(fraction=0.5), np.asarray(pool.labels), 0)["here"]
    assert np.bincount(np.asarray(pool.labels)[half.train]).tolist() == [6] * 5, "strata, here too"
