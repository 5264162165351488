"""Summaries of runs: small, whole enough for tables, the same wherever they were made; and the numbers made of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fedfa
from fedfa import Run, UserError
from fedfa.reproduce import pictures
from fedfa.reproduce.render import tables
from fedfa.reproduce.results import AVERAGE, Results, costs, curve, gather
from fedfa.reproduce.summary import (
    RunSummary,
    find_summaries,
    identity,
    read_summary,
    summary_of,
    write_summary,
)
from fedfa.reproduce.table import Cell, Choice, Table, lay_out
from fedfa.statistics import RULES, holm, paired, select

stats = pytest.importorskip("scipy.stats")


def test_a_summary_selects_what_the_run_selects(hand_made: Callable[..., Run], tmp_path: Path) -> None:
    tests = [{"north": 0.01 * number, "south": 0.5, "west": 0.3} for number in range(1, 61)]
    vals = [{"north": 0.9 if number == 7 else 0.1} for number in range(1, 61)]
    run = hand_made("run", tests, vals, unseen=["west"])
    run.finish(30.0, memory=12345)
    found = read_summary(write_summary(summary_of(run), tmp_path))
    assert found == summary_of(run) and found.done
    for rule in RULES:
        one, other = select(run, rule), found.selected[rule]
        assert (one.mean, one.unseen, one.gap) == pytest.approx((other.mean, other.unseen, other.gap), abs=1e-6)
        assert one.clients == pytest.approx(other.clients, abs=1e-6)
    assert [line["test"]["mean"] for line in found.metrics] == pytest.approx(
        [line["test"]["mean"] for line in run.metrics], abs=1e-6
    )
    assert found.metrics[10]["test"]["clients"] == {}  # neither among the last 20 nor the best
    assert found.provenance["memory"] == 12345
    assert len((tmp_path / "run.json").read_text()) < 10_000


def test_equal_rounds_stay_equal_in_a_summary(hand_made: Callable[..., Run], tmp_path: Path) -> None:
    """Three clients' 0.1, 0.2 and 0.3 have another mean in another order: by a rounding error the later is better."""
    vals = [{"a": a, "b": b, "c": c} for a, b, c in [(0.3, 0.2, 0.1), (0.1, 0.2, 0.3), *[(0.0, 0.0, 0.0)] * 30]]
    run = hand_made("run", [{"a": 0.5, "b": 0.1 * (number < 1), "c": 0.2} for number in range(32)], vals)
    first, second = (line["val"]["mean"] for line in run.metrics[:2])
    assert first < second < first + 1e-9
    found = read_summary(write_summary(summary_of(run), tmp_path))
    assert found.selected["best"].clients == select(run, "best").clients == {"a": 0.5, "b": 0.1, "c": 0.2}


def test_a_real_run_comes_back(play: Callable[..., Run], tmp_path: Path) -> None:
    run = play(held_out="west", evaluate_every=2)
    found = read_summary(write_summary(summary_of(run), tmp_path))
    assert found.metrics == summary_of(run).metrics
    assert found.identity == identity(run.experiment)


def test_groups_on_other_data_have_clients_of_their_own(hand_made: Callable[..., Run]) -> None:
    table = Table(name="own", title="Own", base="digit-sites", seeds=1, rows={"A": {}}, groups={"one": {}, "two": {}})
    runs = {"one": hand_made("one", [{"north": 0.5}]), "two": hand_made("two", [{"east": 0.5, "west": 0.7}])}
    cells = [replace(cell, experiment=runs[cell.group].experiment) for cell in lay_out(table, Choice())]
    results = gather(table, cells, lambda cell: summary_of(runs[cell.group]), "last")
    assert results.columns("one") == ["north"] and results.columns("two") == ["east", "west"]
    assert (results.clients("one"), results.clients("two")) == (1, 2)


def test_a_picture_shows_what_its_table_does(hand_made: Callable[..., Run]) -> None:
    """Where settings hold a client out, the average is of the others."""
    pytest.importorskip("matplotlib")
    run = hand_made("one", [{"north": 0.5, "south": 0.9}], unseen=["south"])
    table = Table(name="own", title="Own", base="digit-sites", seeds=1, rows={"A": {}})
    cells = [replace(cell, experiment=run.experiment) for cell in lay_out(table, Choice())]
    results = gather(table, cells, lambda _: summary_of(run), "last")
    (row,) = results.groups[""]
    panel = pictures._panel("Own", [row])
    assert panel.primary == "mean" and panel.series[0].entries[0].selected["last"].mean == 0.5


def test_what_does_not_make_it_another_experiment(tiny: dict[str, Any]) -> None:
    same = [{}, {"device": "cuda"}, {"engine": "sequential"}, {"threads": 0}, {"lanes": 3}, {"trackers": []}]
    assert len({identity(fedfa.load(tiny, settings)) for settings in same}) == 1
    assert len({identity(fedfa.load(tiny, {"precision": p})) for p in ("tf32", "bf16")}) == 1
    other: list[Mapping[str, Any]] = [{}, {"seed": 1}, {"lr": 0.1}, {"algorithm": "fedfa"}, {"held_out": "west"}]
    assert len({identity(fedfa.load(tiny, settings)) for settings in other}) == len(other)
    paths = [fedfa.load(tiny, {"source": {"name": "pacs", "path": path}}) for path in ("/here", "/there")]
    assert identity(paths[0]) == identity(paths[1]) and paths[0].title != paths[1].title


def test_settings_that_came_later_have_their_defaults(hand_made: Callable[..., Run]) -> None:
    run = hand_made("run", [{"north": 0.5}])
    summary = summary_of(run)
    old = {key: value for key, value in summary.config.items() if key not in ("clip", "lr_decay", "trackers")}
    assert RunSummary("old", old, {}, [], True).identity == summary.identity
    assert RunSummary("odd", {**old, "no_longer": 1}, {}, [], True).identity is None


def test_summaries_are_found_in_folders_of_runs_and_of_files(hand_made: Callable[..., Run], tmp_path: Path) -> None:
    done, stopped = hand_made("all/a", [{"north": 0.5}]), hand_made("all/b", [{"north": 0.6}], seed=1)
    done.finish(1.0)
    elsewhere = hand_made("elsewhere", [{"north": 0.7}], seed=2)
    elsewhere.finish(1.0)
    write_summary(summary_of(elsewhere), tmp_path / "all" / "kept")
    found = find_summaries(tmp_path / "all")
    assert set(found) == {identity(done.experiment), identity(elsewhere.experiment)}
    assert identity(stopped.experiment) not in found


def test_files_that_are_no_summaries(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for other in ("{}", "[1]", '{"format": 1, "notes": "mine"}'):
        (tmp_path / "a.json").write_text(other)
        assert find_summaries(tmp_path) == {}, "other files are passed over"
    (tmp_path / "a.json").write_text("{")
    assert find_summaries(tmp_path) == {} and not capsys.readouterr().err, "nor is every JSON file ours that is damaged"
    named = tmp_path / "digits-fedavg-seed0-0123abcd.json"
    for broken in ("{", '{"format": 1, "config": {}}'):
        named.write_text(broken)
        assert find_summaries(tmp_path) == {}, "a damaged one stops no table"
        (told,) = capsys.readouterr().err.splitlines()
        assert f"{named} is not the summary of a run" in told and told.endswith("passed over")
    (tmp_path / "a.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(UserError, match="format 99"):
        read_summary(tmp_path / "a.json")
    with pytest.raises(UserError, match="there is no folder"):
        find_summaries(tmp_path / "nowhere")


# Results


def made(
    tiny: dict[str, Any], scores: Mapping[str, Mapping[tuple[int, str], float]], held_out: tuple[str, ...] = ()
) -> Results:
    """Results of runs with one test metric each, by row, seed and held-out client."""
    rows = {name: {} for name in scores}
    table = Table(name="mine", title="Mine", base="tiny", rows=rows, held_out=held_out)
    cells = [
        Cell("", row, seed, client, fedfa.load(tiny, {"seed": seed, **({"held_out": client} if client else {})}))
        for row in scores
        for seed in range(4)
        for client in held_out or ("",)
    ]

    def find(cell: Cell) -> RunSummary | None:
        value = scores[cell.row].get((cell.seed, cell.held_out))
        if value is None:
            return None
        unseen, gap = (value, 0.1) if cell.held_out else (None, None)
        mean = value + 0.1 if cell.held_out else value
        test = {"mean": mean, "unseen": unseen, "gap": gap, "clients": {"north": value}}
        line = {"round": 1, "loss": 1 - value, "clients": ["?"], "refused": {}, "test": test, "val": test}
        first = {**line, "seconds": 9.0, "bytes_up": 10, "bytes_down": 25}
        rest = [{**line, "round": number, "seconds": 1 + value, "bytes_up": 10, "bytes_down": 20} for number in (2, 3)]
        return RunSummary("run", cell.experiment.model_dump(), {"metric": "accuracy"}, [first, *rest], True)

    return gather(table, cells, find, "last")


def test_differences_are_paired_and_corrected(tiny: dict[str, Any]) -> None:
    base = {(seed, ""): value for seed, value in enumerate((0.5, 0.6, 0.55, 0.7))}
    better = {(seed, ""): value for seed, value in enumerate((0.56, 0.64, 0.63, 0.75))}
    worse = {(seed, ""): value for seed, value in enumerate((0.5, 0.5, 0.6, 0.6))}
    first, second, third = made(tiny, {"base": base, "better": better, "worse": worse}).groups[""]
    assert first.difference is None and first.p is None
    ps = [stats.ttest_rel(list(row.values()), list(base.values())).pvalue for row in (better, worse)]
    assert second.difference is not None and third.difference is not None
    assert (second.difference.p, third.difference.p) == pytest.approx(tuple(ps))
    assert (second.p, third.p) == pytest.approx(tuple(holm(ps)))
    assert second.difference == paired(
        {seed: value for (seed, _), value in better.items()}, {seed: value for (seed, _), value in base.items()}
    )


def test_a_seed_counts_when_all_its_clients_were_held_out(tiny: dict[str, Any]) -> None:
    scores = {(seed, client): 0.5 + 0.1 * seed for seed in range(3) for client in ("north", "south")}
    del scores[2, "south"]
    results = made(tiny, {"A": scores}, ("north", "south"))
    (row,) = results.groups[""]
    assert row.series.seeds == [0, 1] and row.series.wanted == 4
    average, north = row.get("last", AVERAGE), row.get("last", "north")
    assert average is not None and (average.n, average.mean) == (2, pytest.approx(0.55))
    assert north is not None and north.n == 3
    gap = row.get("last", "gap")
    assert gap is not None and gap.mean == pytest.approx(0.1)
    assert len(results.missing) == 3 and results.columns("") == ["north", "south"]


def test_curves_of_unseen_clients_are_of_those_and_over_seeds(tiny: dict[str, Any]) -> None:
    scores = {
        (seed, client): 0.5 + 0.1 * seed + (client == "south") / 5 for seed in range(2) for client in ("north", "south")
    }
    (series,) = made(tiny, {"A": scores}, ("north", "south")).series
    found = curve(series, "test")[3]
    assert (found.n, found.mean) == (2, pytest.approx(0.65))  # 0.6 and 0.7, and not four runs, nor the seen clients
    assert curve(series, "loss")[3].n == 2


def test_costs_of_other_machines_or_beside_other_runs_are_not_compared(tiny: dict[str, Any]) -> None:
    results = made(
        tiny, {"A": {(0, ""): 0.5, (1, ""): 0.5, (2, ""): 0.5}, "B": {(0, ""): 0.5, (1, ""): 0.5, (2, ""): 0.5}}
    )
    runs = results.series[1].runs
    for (_, run), told in zip(runs, ({}, {"hardware": "NVIDIA H200"}, {"beside": 5}), strict=True):
        run.provenance.update(told)
    assert costs(results.series[1])["seconds"].keys() == {0, 1}
    table = replace(results, table=results.table.model_copy(update={"kind": "cost"}))
    (told,) = tables(table, "")
    ratio = told.rows[1][-3]
    assert ratio.text == "1.00", "of one seed, whose runs were on one machine, each by itself"


def test_costs_and_curves(tiny: dict[str, Any]) -> None:
    results = made(tiny, {"A": {(0, ""): 0.5, (1, ""): 0.7}})
    (series,) = results.series
    assert costs(series) == {
        "up": {0: 10, 1: 10},
        "down": {0: 20, 1: 20},
        "once": {0: 5, 1: 5},
        "seconds": {0: 1.5, 1: 1.7},
    }
    found = curve(series, "loss")
    assert list(found) == [1, 2, 3] and found[2].mean == pytest.approx(0.4) and found[2].n == 2
