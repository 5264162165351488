"""What a report is of: runs in series, series in panels, and their statistics."""

from __future__ import annotations

import functools
import json
import math
import operator
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from studies import CLIENTS, entry, study

from fedfa import Run, UserError
from fedfa.paper import paper_table
from fedfa.report.beside import Printed, printed, single_runs
from fedfa.report.entry import Entry
from fedfa.report.page import page
from fedfa.report.payload import LEVELS, POINTS, payload, thinned
from fedfa.report.study import Study, collect
from fedfa.report.tables import results
from fedfa.reproduce.summary import summary_of, write_summary
from fedfa.runs import find_run
from fedfa.statistics import Summary, summarise

HandMade = Callable[..., Run]


def scores(*values: float) -> list[dict[str, float]]:
    """The same value at all clients, a round each."""
    return [dict.fromkeys(CLIENTS, value) for value in values]


# Series and panels


def test_runs_that_differ_by_their_seed_are_one_series() -> None:
    (panel,) = study(
        entry(scores(0.5), seed=1), entry(scores(0.7), seed=0), entry(scores(0.6), algorithm="fedfa"),
        entry(scores(0.6), algorithm="fedfa", **{"algorithm.p": 0.3}),
        entry(scores(0.6), seed=2, device="cpu", threads=3, checkpoint_every=7, name="other", **{"source.path": "y"}),
    ).panels  # fmt: skip
    assert [series.label for series in panel.series] == ["fedavg", "fedfa p=0.3", "fedfa p=0.5"]
    assert [one.seed for one in panel.series[0].used] == [0, 1, 2]
    assert panel.series[0].by_seed("last") == {0: 0.7, 1: 0.5, 2: 0.6}
    assert panel.series[0].summary("last") == summarise([0.7, 0.5, 0.6])
    assert panel.series[1].summary("last", "nobody") is None


def test_a_federation_is_a_panel() -> None:
    found = study(
        entry(scores(0.5)),
        entry(scores(0.5), held_out=("dslr",)),
        entry(scores(0.5), partition="iid"),
        entry(scores(0.5), metric="dice"),
    )
    assert [panel.title for panel in found.panels] == [
        "office_caltech10 partition=natural",
        "office_caltech10 partition=natural, dslr held out",
        "office_caltech10 partition=iid",
        "office_caltech10 partition=natural",
    ]
    assert found.panels[1].client_title("dslr") == "dslr (unseen)"


def test_runs_of_other_lengths_are_compared_with_nothing() -> None:
    """Such as those of a table of costs: three rounds are no result beside 400."""
    found = study(entry(scores(0.5, 0.6)), entry(scores(0.1)), entry(scores(0.6, 0.7), algorithm="fedfa"))
    assert [panel.title for panel in found.panels] == ["office_caltech10 rounds=2", "office_caltech10 rounds=1"]
    assert [series.label for series in found.panels[0].series] == ["fedavg", "fedfa"]
    assert [len(panel.compared("last", 0)) for panel in found.panels] == [1, 0]


def test_a_federation_is_told_from_others_of_its_name() -> None:
    """One's own folders are called what the experiment is called."""
    found = study(
        entry(scores(0.5), **{"split.fraction": 1.0}),
        entry(scores(0.5), name="eyes", **{"source.name": "segmentation_folders", "split.fraction": 0.5}),
        entry(scores(0.5), name="skin", **{"source.name": "segmentation_folders", "split.fraction": 0.25}),
        entry(scores(0.5), name="one", **{"source.name": "image_folders", "split.fraction": 0.25}),
        entry(scores(0.5), name="two", **{"source.name": "image_folders", "split.fraction": 0.25}),
        entry(scores(0.5), name="two", **{"source.name": "image_folders", "split.fraction": 0.5}),
    )
    assert [panel.title for panel in found.panels] == ["office_caltech10", "eyes", "skin", "image_folders", "two"]


def test_fedavg_comes_first_and_is_what_others_are_compared_with() -> None:
    (panel,) = study(entry(scores(0.5), algorithm="fedfa"), entry(scores(0.4))).panels
    assert [series.label for series in panel.series] == ["fedavg", "fedfa"] and panel.baseline == 0
    (panel,) = study(entry(scores(0.5), algorithm="fedfa"), entry(scores(0.4), done=False)).panels
    assert [series.label for series in panel.series] == ["fedavg", "fedfa"] and panel.baseline == 1
    (panel,) = study(entry(scores(0.5), algorithm="fedfa"), entry(scores(0.4), algorithm="fedbn")).panels
    assert [series.label for series in panel.series] == ["fedbn", "fedfa"] and panel.baseline == 0


def test_what_others_are_compared_with_has_no_augmentation_and_most_seeds() -> None:
    (panel,) = study(
        entry(scores(0.5), augmentation="cutmix"), entry(scores(0.5), lr=0.1),
        entry(scores(0.5), lr=0.2), entry(scores(0.6), lr=0.2, seed=1),
    ).panels  # fmt: skip
    assert [series.augmented for series in panel.series] == [False, False, True]
    base = panel.series[panel.baseline]
    assert base.config["lr"] == 0.2 and len(base.used) == 2


def test_a_method_is_compared_with_the_fedavg_that_it_has_most_in_common_with() -> None:
    """The same seeds and transforms: what a transform does is not a method's doing."""
    runs = [
        entry(scores(value + seed / 100), seed, algorithm=name, transforms=transforms, **settings)
        for value, name, transforms, settings in (
            (0.5, "fedavg", [], {}), (0.6, "fedavg", ["flip"], {}), (0.65, "fedfa", ["flip"], {}),
            (0.52, "fedfa", [], {}), (0.53, "fedfa", [], {"network.stages": [1]}),
            (0.7, "fedavg", ["flip"], {"augmentation": "mixup"}),
        )
        for seed in range(2)
    ]  # fmt: skip
    (panel,) = study(*runs).panels
    found = {one.series.label: (one.base.label, round(100 * one.difference.mean, 6)) for one in panel.compared("last")}
    flip, plain = "fedavg transforms=flip", "fedavg transforms=none"
    main, other = (flip, plain) if panel.series[panel.baseline].label == flip else (plain, flip)
    assert found == {
        other: (main, 10 if main == plain else -10),
        f"{flip} augmentation=mixup": (flip, 10),
        "fedfa transforms=flip": (flip, 5),
        "fedfa transforms=none": (plain, 2),
        "fedfa transforms=none network.stages=1": (plain, 3),
    }
    assert panel.base_title == "own fedavg" and {base.label for base in panel.bases} == {flip, plain}
    assert all(one.base is panel.series[panel.baseline] for one in panel.compared("last", panel.baseline))
    table = results(panel, "last")
    assert "− own fedavg" in [column.title for column in table.columns]
    assert f"Differences to the one with most settings in common of {flip}, {plain} are" in table.caption
    assert set(payload(study(*runs))["panels"][0]["differences"]["last"]) > {"own"}
    alone = study(*runs[:2], *runs[6:8])
    assert alone.panels[0].base_title == "fedavg"
    assert "own" not in payload(alone)["panels"][0]["differences"]["last"]


def test_names_say_what_is_not_usual() -> None:
    """And where nothing is usual, all: with two learning rates neither goes without saying."""
    (panel,) = study(
        *(entry(scores(0.5), algorithm=name) for name in ("fedavg", "fedprox", "fedbn", "fedfa")),
        entry(scores(0.5), algorithm="fedsam", optimizer="adam", lr=0.02),
        entry(scores(0.5), algorithm="fedfa", **{"algorithm.p": 0.3}),
    ).panels
    assert [series.label for series in panel.series] == [
        "fedavg", "fedbn", "fedfa p=0.3", "fedfa p=0.5", "fedprox", "fedsam optimizer=adam lr=0.02",
    ]  # fmt: skip
    assert panel.usual == ("optimizer=sgd", "lr=0.01")
    (panel,) = study(entry(scores(0.5)), entry(scores(0.5), algorithm="fedfa", lr=0.02)).panels
    assert [series.label for series in panel.series] == ["fedavg lr=0.01", "fedfa lr=0.02"] and panel.usual == ()
    rates = [entry(scores(0.5), algorithm="fedfa", **{"algorithm.p": p}) for p in (0.1, 0.3, 0.5, 0.7, 0.9)]
    kept = entry(scores(0.5), algorithm={"name": "fedfa", "statistics": "kept"})
    (panel,) = study(*rates, kept).panels
    assert "fedfa p=0.5 statistics=kept" in [series.label for series in panel.series]
    assert panel.usual == ("fedfa statistics=paper",), "of an algorithm's settings it says whose they are"


def test_a_setting_that_was_not_there_yet_has_its_default() -> None:
    old = entry(scores(0.5), 0, algorithm="fedmix")
    del old.config["algorithm"]["products"]
    new = [entry(scores(0.5), 1, algorithm="fedmix"), entry(scores(0.5), 0, algorithm="fedmix", lr=0.02)]
    (panel,) = study(old, *new).panels
    assert [series.label for series in panel.series] == ["fedmix lr=0.01", "fedmix lr=0.02"]
    assert [len(series.entries) for series in panel.series] == [2, 1]
    assert "products" not in old.config["algorithm"], "what is shown is what was run"


def test_a_single_run_is_not_the_best_where_others_have_seeds() -> None:
    lucky = entry(scores(0.9), algorithm="fedprox")
    (panel,) = study(entry(scores(0.5), 0), entry(scores(0.6), 1), lucky).panels
    assert [series.label for series in panel.ranked] == ["fedavg"]
    (panel,) = study(entry(scores(0.5), 0), lucky).panels
    assert [series.label for series in panel.ranked] == ["fedavg", "fedprox"]


def test_titles_of_a_report() -> None:
    assert study(entry(scores(0.5))).title == "office_caltech10"
    few = [entry(scores(0.5), **{"split.fraction": share}) for share in (0.25, 0.5)]
    assert study(*few).title == "office_caltech10 split.fraction=0.25 · office_caltech10 split.fraction=0.5"
    many = [*(entry(scores(0.5), **{"split.fraction": share / 10}) for share in range(1, 6))]
    many.append(entry(scores(0.5), source={"name": "pacs", "path": "y"}))
    assert study(*many).title == "office_caltech10 · pacs"


def test_numbers_come_from_complete_runs_where_there_are_any() -> None:
    (panel,) = study(
        entry(scores(0.5, 0.6), seed=0), entry(scores(0.1), seed=1, done=False, rounds=2),
        entry(scores(0.3), algorithm="fedfa", done=False, rounds=2), entry([], algorithm="fedbn", done=False, rounds=2),
    ).panels  # fmt: skip
    fedavg, fedbn, fedfa = panel.series
    assert fedavg.complete and fedavg.by_seed("last") == {0: 0.6}
    assert not fedfa.complete and fedfa.by_seed("last") == {0: 0.3}
    assert fedfa.entries[0].status == "incomplete: 1 of 2 rounds"
    assert not fedbn.complete and fedbn.used == () and fedbn.summary("last") is None
    assert panel.comparable == (fedavg,) and panel.compared("last", 0) == panel.compared("last", 2) == []


def test_one_run_a_seed() -> None:
    (panel,) = study(entry(scores(0.5)), entry(scores(0.7), device="cpu")).panels
    (series,) = panel.series
    assert len(series.entries) == 2 and len(series.used) == 1


# Differences


def test_differences_are_paired_and_corrected() -> None:
    base = [entry(scores(value), seed) for seed, value in enumerate((0.50, 0.60, 0.70))]
    one = [entry(scores(value), seed, algorithm="fedfa") for seed, value in enumerate((0.52, 0.63, 0.71))]
    two = [entry(scores(value), seed, algorithm="fedbn") for seed, value in enumerate((0.51, 0.58, 0.72, 0.9))]
    (panel,) = study(*base, *one, *two).panels
    bn, fa = panel.compared("last", 0)
    assert (bn.series.label, fa.series.label) == ("fedbn", "fedfa")
    assert fa.difference.n == bn.difference.n == 3  # the seeds that both have
    assert fa.difference.mean == pytest.approx(0.02, abs=1e-12)
    # t = 0.02/(0.01/√3) = 2√3, two degrees of freedom: p = 1 − t/√(2 + t²)
    p = 1 - 12**0.5 / 14**0.5
    assert fa.difference.p == pytest.approx(p, abs=1e-9) and fa.holm == pytest.approx(2 * p, abs=1e-9)
    assert bn.difference.p is not None and bn.holm == max(bn.difference.p, 2 * p)


# Where runs come from


def test_a_folder_of_runs_a_run_and_a_summary(hand_made: HandMade, tmp_path: Path) -> None:
    tests = [{"a": 0.5, "b": 0.25}]
    runs = [hand_made(f"runs/{seed}", tests, tests, seed=seed) for seed in range(3)]
    summary = write_summary(summary_of(runs[2]), tmp_path / "summaries")
    for paths in ([tmp_path / "runs"], [run.folder for run in runs], [runs[0].folder, runs[1].folder, summary.parent]):
        found = Study.of([*paths, runs[0].folder])
        (panel,) = found.panels
        assert [one.seed for one in panel.series[0].entries] == [0, 1, 2] and not found.broken
        assert panel.series[0].by_seed("last") == dict.fromkeys(range(3), 0.375)
        assert panel.series[0].by_seed("best", "a") == dict.fromkeys(range(3), 0.5)
    both = Study.of([summary, runs[2].folder])
    assert [one.folder for one in both.entries] == [runs[2].folder], "which has more than its summary"


def test_mnist_by_writer_is_not_called_emnist(hand_made: HandMade) -> None:
    """Both are read by the same source, which takes whatever is divided by writers."""
    run = hand_made("run", [{"a": 0.5}])
    runs = [
        Entry(
            "one",
            {**run.config, "name": "mnist-writers", "source": {"name": "emnist"}},
            run.provenance,
            run.metrics,
            True,
        )
    ]
    assert [panel.title for panel in study(*runs).panels] == ["mnist-writers"]


def test_titles_have_as_many_digits_as_tell_them_apart() -> None:
    runs = [entry(scores(0.5), **{"split.fraction": share}) for share in (1 / 6, 0.1667, 0.5)]
    assert sorted(panel.title.partition("split.fraction=")[2] for panel in study(*runs).panels) == [
        "0.16667",
        "0.1667",
        "0.5",
    ]


def test_older_runs_are_completed_where_there_are_other_data_too(hand_made: HandMade, tmp_path: Path) -> None:
    tests = [{"a": 0.5}]
    for number, (seed, data) in enumerate([(0, "one"), (1, "one"), (0, "two")]):
        path = write_summary(summary_of(hand_made(f"run{number}", tests, seed=seed)), tmp_path / "summaries")
        found = json.loads(path.read_text())
        found["provenance"]["data"] = data
        if number == 1:
            del found["config"]["dice"]
        path.write_text(json.dumps(found))
    panels = Study.of([tmp_path / "summaries"]).panels
    configs = [entry.config for panel in panels for series in panel.series for entry in series.entries]
    assert len(configs) == 3 and not any("data" in config["source"] for config in configs), "as they were"
    assert sorted(len(series.entries) for panel in panels for series in panel.series) == [1, 2]


def test_what_cannot_be_read_is_told(hand_made: HandMade, tmp_path: Path) -> None:
    tests = [{"a": 0.5}]
    whole = hand_made("runs/whole", tests, tests)
    hand_made("runs/no-config", tests).folder.joinpath("experiment.toml").unlink()
    hand_made("runs/cut", tests).folder.joinpath("provenance.json").write_text("{")
    hand_made("runs/empty", tests).folder.joinpath("provenance.json").write_text("{}")
    (tmp_path / "other.json").write_text('{"a": 1}')
    entries, broken = collect([tmp_path / "runs", tmp_path / "other.json"])
    assert [one.folder for one in entries] == [whole.folder]
    assert {Path(place).name for place in broken} == {"no-config", "cut", "empty", "other.json"}
    assert all(why and "\n" not in why for why in broken.values())


def leaves(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Places in plain data, from the outside in."""
    if at:
        yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from leaves(item, (*at, key))


def test_a_summary_with_any_other_value_is_told_of_or_shown(hand_made: HandMade, tmp_path: Path) -> None:
    """By hand, by a disk, by another version: nothing is found out only in the middle of a page."""
    tests = [{"a": 0.5, "b": 0.25}, {"a": 0.75, "b": 0.5}]
    beside = write_summary(summary_of(hand_made("whole", tests, tests, seed=1)), tmp_path / "summaries")
    path = write_summary(summary_of(hand_made("other", tests, tests)), tmp_path / "summaries")
    whole = path.read_text()
    told = 0
    for place in leaves(json.loads(whole)):
        for value in (None, "x", -1, 0.5, math.nan, True, [], [[]], {}):
            changed = json.loads(whole)
            functools.reduce(operator.getitem, place[:-1], changed)[place[-1]] = value
            path.write_text(json.dumps(changed))
            found = Study.of([path.parent])
            page(found)
            assert len(found.entries) + len(found.broken) == 2 and str(beside) not in found.broken
            told += len(found.broken)
    assert told > 300, "most of them"


def test_a_config_and_a_provenance_are_those_of_a_run(hand_made: HandMade) -> None:
    run = hand_made("run", [{"a": 0.5}])
    config, provenance = run.folder / "experiment.toml", run.folder / "provenance.json"
    config.write_text(config.read_text().replace("seed = 0", 'seed = "0"'))
    with pytest.raises(UserError, match=r"cannot be read: experiment.toml seed: Input should be a valid integer$"):
        find_run(run.folder)
    config.write_text(
        config.read_text().replace('seed = "0"', "seed = 0\nlr_decay = nan").replace("lr_decay = 1.0", "")
    )
    with pytest.raises(
        UserError, match=r"experiment.toml has a setting that is no text, finite number, list or table$"
    ):
        find_run(run.folder)
    config.write_text(config.read_text().replace("nan", "1.0"))
    assert find_run(run.folder).config["seed"] == 0
    provenance.write_text(json.dumps({**run.provenance, "samples": 3}))
    with pytest.raises(UserError, match=r"provenance.json samples: Input should be a valid dictionary$"):
        find_run(run.folder)


@pytest.mark.parametrize("kind", ["nothing", "empty", "no runs", "broken"])
def test_nothing_to_report(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x"
    if kind != "nothing":
        path.mkdir()
    if kind == "no runs":
        (path / "notes.txt").write_text("")
    if kind == "broken":
        (path / "x.json").write_text("[]")
    with pytest.raises(UserError, match=r"^(no run at|.* is not a run, and holds none|there is nothing to report: )"):
        Study.of([path])
    with pytest.raises(UserError, match=r"^there is nothing to report: name one run or more$"):
        Study.of([])


# The paper's numbers


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, 78.5),
        ({"algorithm": "fedfa"}, 83.1),
        ({"algorithm": "fedfa", "algorithm.p": 0.3}, None),
        ({"algorithm": "fedfa", "algorithm.momentum": 0.9}, None),
        ({"algorithm": "fedfa", "algorithm.statistics": "kept"}, None),
        ({"algorithm": "fedfa", "network.stages": [1, 2]}, 80.0),
        ({"algorithm": "fedfa", "network.stages": [2, 5]}, None),  # which the paper does not have
        ({"algorithm": "fedfa-c", "network.stages": [1, 2]}, None),
        ({"algorithm": "fedfa-c"}, 79.5),
        ({"algorithm": "fedfa-direct"}, 80.6),
        ({"algorithm": "scaffold"}, None),
        ({"augmentation": "mixstyle"}, 79.9),
        ({"algorithm": "fedfa", "augmentation": "manifold-mixup"}, 83.6),
        ({"algorithm": "fedprox", "augmentation": "mixup"}, None),
        ({"augmentation": "dsu"}, None),
        ({"held_out": ["dslr"]}, 71.9),
        ({"held_out": ["dslr", "amazon"]}, None),
        ({"partition": "iid"}, None),
        ({"split.fraction": "1/6"}, None),
        ({"source": {"name": "pacs", "path": "x"}}, None),
        ({"source": {"name": "domainnet", "path": "x"}}, 62.8),
        ({"source": {"name": "prostate", "path": "x"}, "split.fraction": "1/6"}, 86.5),
        ({"source": {"name": "prostate", "path": "x"}, "split.fraction": "2/6"}, 89.3),
        ({"source": {"name": "prostate", "path": "x"}}, 92.1),
        ({"source": {"name": "prostate", "path": "x"}, "split.fraction": 0.7}, None),
        ({"source": {"name": "cifar10", "path": "x"}, "partition": {"name": "dirichlet", "alpha": 0.3}}, 69.2),
        ({"source": {"name": "cifar10", "path": "x"}, "partition": {"name": "dirichlet", "alpha": 0.5}}, None),
        ({"source": {"name": "cifar10", "path": "x"}, "partition": "iid"}, None),
        ({"source": {"name": "emnist", "path": "x"}, "algorithm": "fedfa"}, 87.8),
        ({"source": {"name": "emnist", "path": "x"}, "partition": "iid"}, None),
    ],
)
def test_the_paper_s_number_stands_beside_the_same_federation_and_method(
    settings: dict[str, Any], wanted: float | None
) -> None:
    """Where clients are the paper's."""
    source = settings.get("source", {"name": "office"})["name"]
    names = {"domainnet": "domainnet-main", "prostate": "prostate-mini"}
    clients = paper_table(names[source]).columns if source in names else CLIENTS
    made = entry([dict.fromkeys(clients, 0.5)], **settings)
    made.provenance["classes"] = 62
    (panel,) = study(made).panels
    found = printed(panel, panel.series[0])
    assert (found and found.average) == wanted


@pytest.mark.parametrize(
    ("source", "clients", "classes"),
    [
        ("emnist", CLIENTS, 10),
        ("emnist", CLIENTS, None),
        ("prostate", ("Skyra", "TrioTim"), None),
        ("office_caltech10", CLIENTS[:3], 10),
    ],
)
def test_other_data_that_are_read_in_the_same_way_have_no_number_of_the_paper_s(
    source: str, clients: tuple[str, ...], classes: int | None
) -> None:
    """MNIST by writer is read as EMNIST is."""
    made = entry([dict.fromkeys(clients, 0.5)], source={"name": source, "path": "x"}, algorithm="fedfa")
    if classes is not None:
        made.provenance["classes"] = classes
    (panel,) = study(made).panels
    assert printed(panel, panel.series[0]) is None


def test_two_folders_of_data_are_two_federations() -> None:
    """They differ by no setting but where they lie."""
    runs = [entry(scores(score), seed) for score, seed in ((0.25, 0), (0.75, 0), (0.5, 1))]
    for run, data in zip(runs, ("a" * 16, "b" * 16, "a" * 16), strict=True):
        run.provenance["data"] = data
    found = study(*runs)
    assert [panel.title for panel in found.panels] == [f"office_caltech10 data={sign * 16}" for sign in "ab"]
    assert [panel.series[0].by_seed("last") for panel in found.panels] == [{0: 0.25, 1: 0.5}, {0: 0.75}]
    del runs[1].provenance["data"]  # an older run does not tell
    assert len(study(*runs).panels) == 1


def test_the_paper_s_numbers_by_client() -> None:
    (panel,) = study(entry(scores(0.5))).panels
    assert printed(panel, panel.series[0]) == Printed(78.5, dict(zip(CLIENTS, (84.4, 66.7, 75.0, 88.1), strict=True)))


# What the browser is given


@pytest.mark.parametrize("count", [1, 2, POINTS - 1, POINTS, POINTS + 1, 400, 5000])
def test_curves_are_thinned_to_real_rounds(count: int) -> None:
    rounds = list(range(3, 3 + count))
    found = thinned(rounds)
    assert found[0] == 3 and found[-1] == 2 + count and len(found) <= POINTS
    assert found == sorted(set(found)) and set(found) <= set(rounds)
    assert len(found) == count or len(found) > POINTS // 2


def test_numbers_by_hand() -> None:
    found = payload(
        study(entry(scores(0.25, 0.5), 0), entry(scores(0.75, 0.5), 1), entry(scores(0.5, 0.5), 1, algorithm="fedfa"))
    )
    (panel,) = found["panels"]
    one, other = panel["series"]
    assert one["label"] == "fedavg" and one["seeds"] == [0, 1] and other["seeds"] == [1]
    curve = one["curves"]["test/mean"]
    assert curve["x"] == [1, 2] and curve["y"] == [50.0, 50.0]
    assert curve["sd"] == [pytest.approx(35.355, abs=1e-3), 0.0] and curve["each"] == [[25.0, 50.0], [75.0, 50.0]]
    assert curve["half"] == pytest.approx(12.706 / 2**0.5, abs=1e-3)  # Student's t with one degree of freedom
    assert one["curves"]["loss/mean"]["y"] == [1.0, 0.5]
    assert panel["bars"]["last"]["amazon"] == [[50.0, 50.0, 50.0], [50.0, None, None]]
    assert panel["differences"]["last"] == {
        "0": [[1, 1, 0.0, None, None, None, None]],
        "1": [[0, 1, 0.0, None, None, None, None]],
    }
    assert panel["federation"] is None and panel["traces"] == []
    json.dumps(found, allow_nan=False)


def test_traces_are_bytes_and_quantiles(play: Callable[..., Run]) -> None:
    run = play(algorithm="fedfa", **{"algorithm.p": 1.0})
    (panel,) = payload(Study.of([run.folder]))["panels"]
    (traces,) = panel["traces"]
    assert traces["rounds"] == [1, 2, 3] and traces["label"] == "fedfa"
    name = "augments.0.gamma_mean"
    assert traces["titles"][name] == ["1: augments.0", "γ of the mean μ"]
    found, kept = traces["fields"][name], [tensors[name] for _, tensors in run.traces()]
    assert found["all"] == 4 and found["channels"] is None
    assert found["low"] == pytest.approx(min(float(t.min()) for t in kept), rel=1e-3)
    assert [row[-1] for row in found["quantiles"]] == pytest.approx(
        [float(kept[-1].double().quantile(level)) for level in LEVELS], rel=1e-3, abs=1e-6
    )
    federation = panel["federation"]
    assert federation["clients"] == ["north", "south", "west"] and federation["labels"]["train"][0] == [5, 5, 4]


def test_single_runs_of_the_paper_are_judged_by_where_one_more_would_fall() -> None:
    ours = summarise([0.80, 0.82, 0.84])  # 82 ± 4.303·2·√(4/3) = 72.1 to 91.9
    found: dict[str, tuple[float | None, Summary | None]] = {
        "inside": (72.2, ours),
        "none of the paper's": (None, ours),
        "one run of ours": (10.0, summarise([0.8])),
        "none of ours": (10.0, None),
    }
    told = "The paper's single runs are where one more run of ours would fall"
    assert single_runs(found) == f"{told}."
    assert single_runs({**found, "below": (72.0, ours)}) == f"{told} except that of below."
    assert single_runs({"below": (72.0, ours), "above": (92.0, ours)}) == f"{told} except those of below, above."
    assert single_runs({"none of ours": (10.0, None)}) == ""


# Clients held out in turn


def turn(held_out: str, *rounds: tuple[float, float, float], **settings: Any) -> Entry:
    """A run with three clients, of which one is held out."""
    names = ("amazon", "dslr", "webcam")
    return entry([dict(zip(names, values, strict=True)) for values in rounds], held_out=(held_out,), **settings)


def test_clients_held_out_in_turn_are_a_panel_of_their_own() -> None:
    """Every client's number is of the run that it took no part in; seen are the others, in each run."""
    found = study(
        turn("dslr", (0.9, 0.5, 0.7)), turn("amazon", (0.4, 0.8, 0.6)),
        turn("dslr", (0.9, 0.7, 0.7), algorithm="fedfa"), turn("amazon", (0.6, 0.8, 0.6), algorithm="fedfa"),
    )  # fmt: skip
    assert [panel.title for panel in found.panels] == [
        "office_caltech10, amazon, dslr held out in turn",
        "office_caltech10, amazon held out",
        "office_caltech10, dslr held out",
    ]
    every = study(*(turn(name, (0.4, 0.8, 0.6)) for name in ("amazon", "dslr", "webcam")))
    assert every.panels[0].title == "office_caltech10, every client held out in turn"
    whole, *single = found.panels
    assert whole.in_turn and all(panel.within and not panel.in_turn for panel in single)
    assert whole.clients == ("amazon", "dslr") and whole.client_title("dslr") == "dslr" and whole.primary == "unseen"
    fedavg, fedfa = whole.series
    for who, wanted in {"amazon": 0.4, "dslr": 0.5, "unseen": 0.45, "mean": 0.75, "gap": 0.3}.items():
        assert fedavg.by_seed("last", who) == {0: pytest.approx(wanted)}
    (one,) = whole.compared("last", 0)
    assert one.difference.mean == pytest.approx(0.2) and one.series is fedfa
    assert fedavg.used[0].curve("test", "unseen") == {1: pytest.approx(0.45)}
    assert fedavg.used[0].cost()["seconds"] == 0.5 and len(found.entries) == 4


def test_each_run_of_a_turn_has_its_own_best_round() -> None:
    """Round 1 for the one, which then gets worse, and round 2 for the other."""
    (whole, *_) = study(
        turn("amazon", (0.4, 0.8, 0.8), (0.1, 0.7, 0.7)), turn("dslr", (0.6, 0.2, 0.6), (0.9, 0.5, 0.9))
    ).panels
    (series,) = whole.series
    assert series.by_seed("best", "unseen") == {0: pytest.approx((0.4 + 0.5) / 2)}
    assert series.by_seed("last", "unseen") == {0: pytest.approx((0.1 + 0.5) / 2)}


def test_a_turn_is_of_the_methods_and_seeds_that_hold_out_all() -> None:
    one = (0.5, 0.5, 0.5)
    (whole, *_) = study(
        turn("amazon", one), turn("dslr", one), turn("amazon", one, seed=1), turn("dslr", one, algorithm="fedfa")
    ).panels
    assert [(series.label, [run.seed for run in series.used]) for series in whole.series] == [("fedavg", [0])]
    assert whole.lacking == ("fedavg, seed 1", "fedfa"), "which the page says"
    apart = study(turn("amazon", one), turn("dslr", one, algorithm="fedfa"), turn("dslr", one, seed=1)).panels
    assert not any(panel.in_turn or panel.within for panel in apart)
    apart = study(turn("amazon", one), turn("dslr", one, metric="dice")).panels
    assert not any(panel.in_turn or panel.within for panel in apart)


def test_the_papers_average_is_of_all_clients() -> None:
    def beside(*names: str) -> Printed | None:
        panel = study(*(entry(scores(0.5), held_out=(name,)) for name in names)).panels[0]
        assert panel.in_turn
        return printed(panel, panel.series[0])

    found = beside(*CLIENTS)
    assert found is not None and found.average == 60.4 and found.clients["dslr"] == 71.9 and found.unseen
    assert beside("amazon", "dslr") is None
