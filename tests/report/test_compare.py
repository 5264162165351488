"""Comparisons: every number against run folders written by hand."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedfa
from fedfa import Run, UserError, compare
from fedfa.report.compare import BARS, Comparison, cell, labels, sparkline, told_apart, usual

HandMade = Callable[..., Run]

TESTS = [{"a": 0.5, "b": 0.25}, {"a": 0.75, "b": 0.5}, {"a": 0.625, "b": 0.375}]
VALS = [{"a": 0.1, "b": 0.1}, {"a": 0.3, "b": 0.3}, {"a": 0.9, "b": 0.1}]


def test_a_run_in_numbers(hand_made: HandMade) -> None:
    run = hand_made("one", TESTS, VALS)
    (found,) = compare(run).runs
    assert found.rounds == 3
    assert found.last == 0.5
    assert found.recent == pytest.approx((0.375 + 0.625 + 0.5) / 3, abs=1e-12)
    assert (found.best, found.best_round) == (0.5, 3)  # validation: 0.1, 0.3, 0.5
    assert found.clients == {"a": 0.625, "b": 0.375}
    assert found.curve == [(1, 0.375), (2, 0.625), (3, 0.5)]
    assert found.seconds == 1.5 and found.refused == 0 and found.metric == "accuracy"
    assert found.unseen is None and found.gap is None


def test_the_table(hand_made: HandMade) -> None:
    table = compare(hand_made("one", TESTS, VALS), hand_made("two", TESTS[:2], VALS[:2], algorithm="fedfa"))
    assert table.clients == ["a", "b"]
    assert table.rows() == [
        {"run": "fedavg rounds=3", "rounds": 3, "a": 62.5, "b": 37.5, "last": 50.0, "last 20": 50.0,
         "best by val": 50.0, "s/round": 0.5},
        {"run": "fedfa rounds=2", "rounds": 2, "a": 75.0, "b": 50.0, "last": 62.5, "last 20": 50.0,
         "best by val": 62.5, "s/round": 0.5},
    ]  # fmt: skip
    assert str(table).splitlines() == [
        "run              rounds     a     b  last  last 20  best by val  s/round",
        "fedavg rounds=3       3  62.5  37.5  50.0     50.0         50.0      0.5",
        "fedfa rounds=2        2  75.0  50.0  62.5     50.0         62.5      0.5",
    ]


def test_the_best_round_is_chosen_on_validation_data_and_the_first_of_equals(hand_made: HandMade) -> None:
    tests = [{"a": 0.1}, {"a": 0.2}, {"a": 0.9}, {"a": 0.4}]
    vals = [{"a": 0.3}, {"a": 0.8}, {"a": 0.1}, {"a": 0.8}]
    (found,) = compare(hand_made("one", tests, vals)).runs
    assert (found.best, found.best_round) == (0.2, 2)


def test_without_validation_data_there_is_no_best(hand_made: HandMade) -> None:
    """Test data never choose a round."""
    found = compare(hand_made("one", TESTS))
    assert (found.runs[0].best, found.runs[0].best_round) == (None, None)
    assert found.rows()[0]["best by val"] is None and "–" in str(found)


def test_recent_is_over_the_last_twenty_rounds(hand_made: HandMade) -> None:
    tests = [{"a": 0.0}] * 5 + [{"a": number / 20} for number in range(20)]
    (found,) = compare(hand_made("one", tests)).runs
    assert found.recent == pytest.approx(sum(range(20)) / 400, abs=1e-12)
    assert found.last == 0.95


def test_held_out_clients_and_refused_updates_have_columns_where_there_are_any(hand_made: HandMade) -> None:
    refused = [{"a": "why"}, {"a": "why", "b": "why"}]
    held_out = hand_made("one", TESTS, VALS, unseen=["b"], refused=refused)
    plain = hand_made("two", TESTS, VALS)
    first, second = compare(held_out, plain).rows()
    assert (first["last"], first["unseen"], first["gap"], first["refused"]) == (62.5, 37.5, 25.0, 3)
    assert (second["last"], second["unseen"], second["gap"], second["refused"]) == (50.0, None, None, 0)
    assert "–" in str(compare(held_out, plain)).splitlines()[2]
    assert not {"unseen", "gap", "refused"} & compare(plain).rows()[0].keys()


def test_runs_with_other_clients_leave_gaps(hand_made: HandMade) -> None:
    table = compare(hand_made("one", TESTS), hand_made("two", [{"b": 0.5, "c": 1.0}]))
    assert table.clients == ["a", "b", "c"]
    first, second = table.rows()
    assert (first["a"], first["b"], first["c"]) == (62.5, 37.5, None)
    assert (second["a"], second["b"], second["c"]) == (None, 50.0, 100.0)


# Labels


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ([{}], ["fedavg"]),
        ([{}, {"algorithm": "fedfa"}], ["fedavg", "fedfa"]),
        ([{"seed": 0}, {"seed": 1}], ["fedavg seed=0", "fedavg seed=1"]),
        ([{}, {"algorithm": "fedfa", "seed": 1}], ["fedavg seed=0", "fedfa seed=1"]),
        ([{"lr": 0.1}, {"lr": 0.2, "epochs": 2}], ["fedavg epochs=1 lr=0.1", "fedavg epochs=2 lr=0.2"]),
        (
            [{"algorithm": "fedfa"}, {"algorithm": "fedfa", "algorithm.p": 0.3}, {}],
            ["fedfa p=0.5", "fedfa p=0.3", "fedavg"],
        ),
        (
            [{"network.dropout": 0.1}, {"network": "lenet"}],
            ["fedavg network=tiny-net", "fedavg network=lenet"],
        ),
        (
            [{"augmentation": "mixstyle"}, {"augmentation": "mixstyle", "augmentation.p": 0.1}, {}],
            [
                "fedavg augmentation=mixstyle augmentation.p=0.5",
                "fedavg augmentation=mixstyle augmentation.p=0.1",
                "fedavg augmentation=none",
            ],
        ),
        (
            [{"held_out": ["north", "west"]}, {"held_out": "south"}, {}],
            ["fedavg held_out=north+west", "fedavg held_out=south", "fedavg held_out=none"],
        ),
        (
            [{"transforms": ["flip", "rotate"]}, {"transforms": ["flip"]}, {}],
            ["fedavg transforms=flip+rotate", "fedavg transforms=flip", "fedavg transforms=none"],
        ),
        (
            [{"transforms": [{"name": "rotate", "degrees": d, "fill": "zeros"}]} for d in (5.0, 9.0)],
            [f"fedavg transforms=rotate(degrees={d}, fill=zeros)" for d in (5.0, 9.0)],
        ),
        ([{"lr": 1 / 6}, {"lr": 1.0}], ["fedavg lr=0.1667", "fedavg lr=1"]),
        (
            [{"lr": 0.12345}, {"lr": 0.12346}, {"lr": 1 / 3}],
            [f"fedavg lr={x}" for x in ("0.12345", "0.12346", "0.3333")],
        ),
        ([{"description": "x"}, {"checkpoint_every": 3}], ["fedavg (run0)", "fedavg (run1)"]),
    ],
)
def test_labels_tell_runs_apart(hand_made: HandMade, settings: list[dict[str, Any]], wanted: list[str]) -> None:
    runs = [hand_made(f"run{number}", TESTS, **given) for number, given in enumerate(settings)]
    assert labels(runs) == wanted


def test_what_one_config_leaves_out_the_others_say() -> None:
    """TOML has no null: a name without a setting must not be taken for one that has the usual value."""
    said = [{"algorithm.name": name, "network.name": "net", "network.stages": [1]} for name in ("a", "b", "c", "d")]
    silent = {"algorithm.name": "d", "network.name": "net"}
    assert told_apart([*said, silent], "algorithm.name", brief=True) == [
        *(f"{name} network.stages=1" for name in ("a", "b", "c", "d")), "d",
    ]  # fmt: skip
    assert usual([*said, silent], "algorithm.name") == []
    assert told_apart([*said, said[0]], "algorithm.name", brief=True) == ["a", "b", "c", "d", "a"]
    other = {"algorithm.name": "d", "network.name": "other", "network.deep": 3}
    assert told_apart([said[0], other], "algorithm.name") == ["a network=net", "d network=other"]


# What cannot be compared


def test_what_cannot_be_compared(hand_made: HandMade, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^nothing to compare: name one run or more$"):
        compare()
    with pytest.raises(UserError, match=r"has no evaluated round yet$"):
        compare(hand_made("empty", []))
    with pytest.raises(UserError, match=rf"^no run at {tmp_path / 'nothing'}$"):
        compare(tmp_path / "nothing")
    hand_made("one", TESTS)
    with pytest.raises(UserError, match=rf"holds 2 runs; name one, such as {tmp_path / 'empty'}$"):
        compare(tmp_path)


def test_a_folder_will_do(hand_made: HandMade) -> None:
    run = hand_made("one", TESTS)
    assert compare(str(run.folder)).rows() == compare(run.folder).rows() == compare(run).rows()


def test_rounds_that_were_not_evaluated_are_passed_over(tmp_path: Path, tiny: dict[str, Any]) -> None:
    run = fedfa.run(tiny, root=tmp_path, rounds=5, evaluate_every=2)
    (found,) = compare(run).runs
    assert [round for round, _ in found.curve] == [2, 4, 5]
    assert found.last == run.metrics[-1]["test"]["mean"]
    assert found.seconds == pytest.approx(sum(line["seconds"] for line in run.metrics), abs=1e-9)


# Files


def test_the_csv_has_a_row_a_run_round_split_and_client(hand_made: HandMade, tmp_path: Path) -> None:
    table = compare(hand_made("one", TESTS, VALS), hand_made("two", TESTS[:1], algorithm="fedfa"))
    path = table.write_csv(tmp_path / "curves.csv")
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * 2 * 2 + 2
    assert rows[0] == {
        "run": "fedavg rounds=3", "round": "1", "split": "val", "client": "a", "metric": "0.1", "loss": "0.9",
    }  # fmt: skip
    assert [float(row["metric"]) for row in rows if row["split"] == "test" and row["client"] == "a"] == [
        0.5, 0.75, 0.625, 0.5,
    ]  # fmt: skip
    assert [float(row["loss"]) for row in rows if row["run"] == "fedfa rounds=1"] == [0.5, 0.75]


def test_the_csv_keeps_odd_names(hand_made: HandMade, tmp_path: Path) -> None:
    names = ['with "quotes", commas', "Zürich", "two\nlines"]
    path = compare(hand_made("one", [dict.fromkeys(names, 0.5)])).write_csv(tmp_path / "curves.csv")
    with open(path, newline="") as file:
        assert [row["client"] for row in csv.DictReader(file)] == names


def test_the_picture_is_a_png(hand_made: HandMade, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [hand_made(f"run{n}", TESTS[: n % 3 + 1], seed=n) for n in range(9)]  # more than there are colours
    path = compare(*runs).write_png(tmp_path / "curves.png")
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert (int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")) == (1500, 600)
    assert len(data) > 10_000


def test_the_picture_shows_the_numbers(hand_made: HandMade, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    kept: list[Any] = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, path: kept.append(self))
    compare(hand_made("one", TESTS), hand_made("two", TESTS[:2], algorithm="fedfa")).write_png(tmp_path / "x.png")
    left, right = kept[0].axes
    assert [list(line.get_ydata()) for line in left.lines] == [[37.5, 62.5, 50.0], [37.5, 62.5]]
    assert [text.get_text() for text in left.get_legend().get_texts()] == ["fedavg rounds=3", "fedfa rounds=2"]
    assert [bar.get_height() for bar in right.patches] == [62.5, 37.5, 50.0, 75.0, 50.0, 62.5]
    assert [label.get_text() for label in right.get_xticklabels()] == ["a", "b", "mean"]


def test_the_picture_needs_matplotlib(hand_made: HandMade, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"^a picture needs matplotlib: pip install 'fedfa\[demo\]'$"):
        compare(hand_made("one", TESTS)).write_png(tmp_path / "x.png")


# Bars and cells


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], BARS),
        ([7, 0], "█▁"),
        ([0.5], "▁"),
        ([0.3, 0.3, 0.3], "▁▁▁"),
        ([-1, 0, 1], "▁▅█"),
    ],
)
def test_sparkline(values: list[float], wanted: str) -> None:
    assert sparkline(values) == wanted


def test_a_long_sparkline_is_cut_to_its_width_and_keeps_its_shape() -> None:
    line = sparkline(list(range(1000)), width=8)
    assert line == BARS
    assert len(sparkline([0.0] * 25)) == 24 and len(sparkline([0.0] * 23)) == 23


@pytest.mark.parametrize(
    ("value", "wanted"), [(None, "–"), (62.46, "62.5"), (100.0, "100.0"), (0.123, "0.123"), (-3.25, "-3.2"), (7, "7")]
)
def test_cells(value: Any, wanted: str) -> None:
    assert cell(value) == wanted


def test_a_comparison_is_of_runs(hand_made: HandMade) -> None:
    run = hand_made("one", TESTS)
    assert Comparison([run]).runs[0].run is run


def test_different_metrics_do_not_compare(hand_made: HandMade) -> None:
    one, two = hand_made("one", TESTS, VALS), hand_made("two", TESTS, VALS)
    two.provenance["metric"] = "dice"
    with pytest.raises(UserError, match=r"^runs with different metrics do not compare: accuracy, dice$"):
        compare(one, two)
