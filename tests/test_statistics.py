"""Means, intervals, paired tests and corrections against SciPy and hand-computed cases; rules on hand-made runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedfa import Run, UserError
from fedfa.statistics import Summary, holm, paired, select, summarise

stats = pytest.importorskip("scipy.stats")
Numbers = st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=12)


def test_summary_of_four_numbers_by_hand() -> None:
    found = summarise([1, 2, 3, 4])
    assert (found.n, found.mean) == (4, 2.5)
    assert found.sd == pytest.approx(math.sqrt(5 / 3))
    half = 3.182446 * math.sqrt(5 / 3) / 2  # t at 0.975 with 3 degrees of freedom, from any table
    assert (found.low, found.high) == pytest.approx((2.5 - half, 2.5 + half), abs=1e-6)


def test_one_value_has_no_interval() -> None:
    assert summarise([0.5]) == Summary(1, 0.5, None, None, None)
    with pytest.raises(ValueError, match="nothing"):
        summarise([])


def test_where_one_more_value_would_fall() -> None:
    """By hand, and by drawing one more: 95 of 100 are inside."""
    found = summarise([1, 2, 3, 4])
    half = 3.1824463 * 1.2909944 * math.sqrt(1 + 1 / 4)
    assert found.one_more == pytest.approx((2.5 - half, 2.5 + half))
    assert summarise([0.5]).one_more is None
    draws = np.random.default_rng(0).normal(size=(4000, 6))
    bounds = [summarise(row[:5]).one_more for row in draws]
    inside = [both is not None and both[0] <= row[5] <= both[1] for both, row in zip(bounds, draws, strict=True)]
    assert 0.94 < np.mean(inside) < 0.96


@given(Numbers)
def test_interval_is_scipys(values: list[float]) -> None:
    found = summarise(values)
    error = stats.sem(values)
    if error > 1e-9:
        low, high = stats.t.interval(0.95, len(values) - 1, loc=found.mean, scale=error)
        assert (found.low, found.high) == pytest.approx((low, high), rel=1e-9, abs=1e-9)


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), min_size=3, max_size=12))
def test_paired_test_is_scipys(pairs: list[tuple[int, int]]) -> None:
    a, b = ({seed: float(pair[side]) for seed, pair in enumerate(pairs)} for side in (0, 1))
    found = paired(a, b)
    assert found is not None
    if len({x - y for x, y in pairs}) > 1:
        wanted = stats.ttest_rel(list(a.values()), list(b.values()))
        assert found.p == pytest.approx(wanted.pvalue)
        interval = wanted.confidence_interval(0.95)
        assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    else:
        assert found.p is None


def test_equal_differences_have_no_interval() -> None:
    """One without width would have every one of them differ from zero for sure."""
    found = paired({0: 0.5, 1: 0.6}, {0: 0.49, 1: 0.59})
    assert found is not None and found.mean == pytest.approx(0.01)
    assert (found.interval, found.p) == (None, None)


def test_only_common_seeds_are_paired() -> None:
    found = paired({0: 5.0, 1: 7.0, 9: 100.0}, {1: 4.0, 0: 4.0, 7: -100.0})
    assert found is not None
    assert (found.n, found.mean) == (2, 2.0)
    assert paired({0: 1.0}, {1: 1.0}) is None
    alone = paired({0: 3.0}, {0: 1.0})
    assert alone is not None
    assert (alone.mean, alone.low, alone.p) == (2.0, None, None)


def test_differences_that_are_equal_but_for_roundings_have_no_p() -> None:
    """One of 59 images more in every seed, in floats and in the six digits of a summary."""
    one, other = ({seed: (count + more) / 59 for seed, count in enumerate((35, 40, 51))} for more in (1, 0))
    for digits in (16, 6):
        found = paired(*({seed: round(value, digits) for seed, value in by.items()} for by in (one, other)))
        assert found is not None and found.mean == pytest.approx(1 / 59, abs=1e-6) and found.p is None
    real = paired({0: 0.5, 1: 0.6, 2: 0.7}, {0: 0.5, 1: 0.59, 2: 0.69})
    assert real is not None and real.p == pytest.approx(stats.ttest_1samp([0.0, 0.01, 0.01], 0).pvalue)


def test_pairing_takes_out_what_seeds_share() -> None:
    luck = [0.0, 10.0, -10.0, 5.0]
    a = {seed: value + 1 + 0.1 * seed for seed, value in enumerate(luck)}
    found = paired(a, dict(enumerate(luck)))
    assert found is not None and found.p is not None
    assert found.p < 0.01 and found.low is not None and found.low > 0


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])  # Wikipedia's example
    assert holm([]) == []
    assert holm([0.6, 0.7]) == [1.0, 1.0]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_is_never_below_and_never_worse_than_bonferroni(ps: list[float]) -> None:
    corrected = holm(ps)
    for p, q in zip(ps, corrected, strict=True):
        assert p <= q <= min(1.0, len(ps) * max(ps)) + 1e-12
    assert corrected[ps.index(min(ps))] == min(1.0, len(ps) * min(ps))


def test_rules_pick_their_rounds(hand_made: Callable[..., Run]) -> None:
    tests: list[dict[str, float]] = [{"north": number / 100, "south": number / 50} for number in range(1, 31)]
    vals: list[dict[str, float]] = [{"north": 0.9 if number in (4, 7) else 0.1} for number in range(1, 31)]
    run = hand_made("rules", tests, vals)
    last, last20, best = (select(run, rule) for rule in ("last", "last20", "best"))
    assert last.clients == {"north": 0.3, "south": 0.6}
    assert last.mean == pytest.approx(0.45)
    assert last20.clients == pytest.approx({"north": 0.205, "south": 0.41})
    assert last20.mean == pytest.approx(0.3075)
    assert best.clients == {"north": 0.04, "south": 0.08}  # round 4: the first of equals
    assert (last.unseen, last.gap) == (None, None)


def test_the_last_twenty_rounds_are_rounds_and_not_evaluations(hand_made: Callable[..., Run]) -> None:
    """Evaluated every tenth round, two of the last twenty count, and not all twenty evaluations of the run."""
    run = hand_made("sparse", [{"north": number / 1000} for number in range(1, 401)])
    file = run.folder / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        if line["round"] % 10:
            del line["test"]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert select(Run(run.folder), "last20").mean == pytest.approx((0.39 + 0.40) / 2)


def test_unseen_clients_and_gap(hand_made: Callable[..., Run]) -> None:
    tests = [{"north": 0.5, "south": 0.7, "west": 0.2}, {"north": 0.7, "south": 0.9, "west": 0.4}]
    found = select(hand_made("unseen", tests, unseen=["west"]), "last20")
    assert found.mean == pytest.approx(0.7)
    assert found.unseen == pytest.approx(0.3)
    assert found.gap == pytest.approx(0.4)


def test_test_data_never_choose_a_round(hand_made: Callable[..., Run]) -> None:
    run = hand_made("none", [{"north": 0.5}, {"north": 0.4}])
    assert select(run, "last").mean == 0.4
    with pytest.raises(UserError, match="no validation data"):
        select(run, "best")


def test_a_run_without_an_evaluated_round(hand_made: Callable[..., Run], **_: Any) -> None:
    with pytest.raises(UserError, match="no evaluated round"):
        select(hand_made("empty", []), "last")
