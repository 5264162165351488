"""What is published is made of the runs that are published with it."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from typer.testing import CliRunner

from fedfa import statistics
from fedfa.cli import app
from fedfa.paper import paper_table
from fedfa.reproduce.summary import read_summary
from fedfa.statistics import Rule

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"


WRITERS = "FedProx,FedSAM,FedAvgM,FedRobust,FedMix,FedFA"
VARIANTS = ["office-main-plain", "office-variants-plain"]
TURNED = ["office-main", "office-variants"]
TRANSFORMS = "FedAvg, flip and rotation,FedFA,FedFA, flip and rotation"
SIXTH = ["split.fraction=0.1667", "split.smallest=32"]
FUNDUS_COST = "fundus-cost-rounds-3-split.fraction-0.1667-split.smallest-32"
FUSION = "FedAvg,direct fusion,total,FedFA, corrected,FedFA, kept,FedFA, released"


@pytest.mark.parametrize(
    ("name", "words", "folders"),
    [
        ("office-main-plain", ["office-main", "--variant", "plain"], ["office-main-plain"]),
        ("office-main", ["office-main", "--only", "FedProx,FedSAM,FedAvgM,FedBN,FedFA"], ["office-main"]),
        (
            "office-main-code",
            ["office-main", "--variant", "code", "--only", "FedSAM", "--seeds", "3"],
            ["office-main-plain", "office-main-code"],
        ),
        ("office-transforms", ["office-transforms", "--only", TRANSFORMS], ["office-main", "office-main-plain"]),
        ("office-unseen", ["office-unseen", "--only", "FedFA"], ["office-unseen"]),
        ("pacs-unseen", ["pacs-unseen", "--only", "FedFA"], ["pacs-unseen"]),
        ("fundus-mini", ["fundus-mini", "--only", "FedFA"], ["fundus-mini"]),
        ("fundus-fractions", ["fundus-fractions", "--only", "FedFA"], ["fundus-mini", "fundus-fractions"]),
        ("office-augmentations", ["office-augmentations"], ["office-main", "office-augmentations"]),
        ("office-alpha-p", ["office-alpha-p"], ["office-main", "office-alpha-p"]),
        ("office-layers", ["office-layers"], ["office-main", "office-layers"]),
        ("office-adam-small", ["office-adam", "--variant", "small"], ["office-adam-small"]),
        (
            "office-fedmix-plain",
            ["office-fedmix", "--variant", "plain", "--only", "FedMix,FedMix, averaged"],
            ["office-main-plain", "office-fedmix-plain"],
        ),
        ("pacs-main", ["pacs-main"], ["pacs-main"]),
        ("office-cost-rounds-3", ["office-cost", "--rounds", "3", "--seeds", "1"], ["office-cost"]),
        (FUNDUS_COST, ["fundus-cost", "--rounds", "3", "--seeds", "1", *SIXTH], ["fundus-cost"]),
        ("cifar10-dir0.6", ["cifar10-dir0.6", "--only", "FedFA"], ["cifar10-dir0.6"]),
        ("cifar10-dir0.3", ["cifar10-dir0.3", "--only", "FedFA", "--seeds", "1"], ["cifar10-dir0.3"]),
        (
            "cifar10-dir0.6-text",
            ["cifar10-dir0.6", "--variant", "text", "--only", "FedAvgM,FedProx,FedFA"],
            ["cifar10-dir0.6-text"],
        ),
        ("cifar10-dir0.3-text", ["cifar10-dir0.3", "--variant", "text", "--only", "FedFA"], ["cifar10-dir0.3-text"]),
        ("office-variants", ["office-variants"], TURNED),
        ("office-fusion", ["office-fusion", "--only", FUSION], ["office-main", "office-fusion"]),
        ("office-variants-plain", ["office-variants", "--variant", "plain"], VARIANTS),
        (
            "office-fusion-plain",
            ["office-fusion", "--variant", "plain", "--only", FUSION],
            ["office-main-plain", "office-fusion-plain"],
        ),
        ("office-precision-plain", ["office-precision", "--variant", "plain"], ["."]),
        ("digits-variants", ["digits-variants"], ["digits-variants"]),
        (
            "digits-variants-tuned",
            ["digits-variants", "--tuned", str(RESULTS / "digits-variants-tuned" / "tuned.toml")],
            ["digits-variants-tuned"],
        ),
        (
            "digits-main-tuned",
            [
                *("digits-main", "--only", "FedAvgM,FedProx,FedSAM,FedRobust"),
                *("--tuned", str(RESULTS / "digits-main-tuned" / "tuned.toml")),
            ],
            ["digits-variants-tuned", "digits-main-tuned"],
        ),
        ("digits-main", ["digits-main"], ["digits-variants", "digits-main"]),
        ("digits-fedmix", ["digits-fedmix"], ["digits-variants", "digits-main", "digits-fedmix"]),
        (
            "digits-fedmix-tuned",
            [
                *("digits-fedmix", "--only", "FedMix, averaged", "--seeds", "10"),
                *("--tuned", str(RESULTS / "digits-fedmix-tuned" / "tuned.toml")),
            ],
            ["digits-variants-tuned", "digits-fedmix-tuned"],
        ),
        ("digits-fusion", ["digits-fusion"], ["digits-variants", "digits-fusion"]),
        ("digits-augmentations", ["digits-augmentations"], ["digits-variants", "digits-augmentations"]),
        (
            "digits-augmentations-tuned",
            [
                *("digits-augmentations", "--only", "Manifold Mixup,CutMix", "--seeds", "10"),
                *("--tuned", str(RESULTS / "digits-augmentations-tuned" / "tuned.toml")),
            ],
            ["digits-variants-tuned", "digits-augmentations-tuned"],
        ),
        ("digits-layers", ["digits-layers"], ["digits-variants", "digits-layers"]),
        ("digits-alpha-p", ["digits-alpha-p"], ["digits-variants", "digits-alpha-p"]),
        ("digits-unseen", ["digits-unseen"], ["digits-unseen"]),
        ("mnist-writers", ["mnist-writers", "--seeds", "3", "--only", WRITERS], ["mnist-writers"]),
        (
            "mnist-writers-table",
            ["mnist-writers", "--variant", "table", "--seeds", "3", "--only", WRITERS],
            ["mnist-writers-table"],
        ),
    ],
)
def test_a_table_is_made_of_its_runs(name: str, words: list[str], folders: list[str], tmp_path: Path) -> None:
    sources = [word for folder in folders for word in ("--from", str(RESULTS / folder))]
    asked = ["reproduce", *words, "--table-only", "--quiet", *sources]
    made = CliRunner().invoke(app, [*asked, "--out", str(tmp_path)])
    assert made.exit_code == 0, made.output
    files = [path for path in (tmp_path / "tables").iterdir() if path.suffix != ".png"]
    assert {path.suffix for path in files} == {".md", ".csv", ".tex"} and tmp_path / "tables" / f"{name}.md" in files
    for path in files:
        assert path.read_text() == (RESULTS / "tables" / path.name).read_text(), path.name


def cells(table: str) -> dict[str, list[str]]:
    """The rows of a table of ours, by name; of its last group, where it has groups."""
    lines = (RESULTS / "tables" / f"{table}.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    counted = re.compile(r"\d+(/\d+)?")  # seeds come second, but in the paper's own table
    return {row[0]: row for row in rows if len(row) > 3 and counted.fullmatch(row[1])}


def test_pages_quote_the_tables() -> None:
    """Rows of README and of the results' page hold the tables' own numbers, in their order."""
    front, page = (ROOT / "README.md").read_text(), (RESULTS / "README.md").read_text()
    for row in cells("office-main-plain").values():
        assert f"| {' | '.join([*row[:11], *row[-2:]])} |" in page
        assert f"| {' | '.join([*row[:2], *row[6:11], *row[-2:]])} |" in front
    for row in cells("office-main").values():
        assert f"| {' | '.join([*row[:11], *row[-2:]])} |" in page
        assert f"| {' | '.join([*row[:2], *row[6:11], *row[-2:]])} |" in front
    for row in cells("office-main-code").values():
        assert f"| {' | '.join([*row[:11], *row[-2:]])} |" in page
    for row in cells("office-unseen").values():
        assert f"| {' | '.join([*row[:13], *row[-2:]])} |" in page
        assert f"| {' | '.join([*row[:2], *row[6:8], *row[10:13], *row[-2:]])} |" in front
    for row in cells("pacs-unseen").values():
        assert f"| {' | '.join(row[:13])} |" in page
        assert f"| {' | '.join([*row[:2], *row[6:8], *row[10:13]])} |" in front
    for row in (*cells("fundus-mini").values(), *cells("fundus-fractions").values()):
        assert f"| {' | '.join(row[:9])} |" in page
    for row in (*cells("cifar10-dir0.6-text").values(), *cells("cifar10-dir0.3-text").values()):
        assert f"| {' | '.join([*row[:6], *row[-4:]])} |" in page
    for row in (*cells("cifar10-dir0.6").values(), *cells("cifar10-dir0.3").values()):
        assert f"| {' | '.join([*row[:6], *row[7:]])} |" in page
    for row in (*cells("office-cost-rounds-3").values(), *cells(FUNDUS_COST).values()):
        assert f"| {' | '.join([row[0], *row[2:]])} |" in page
    for row in cells("pacs-main").values():
        assert f"| {' | '.join(row[:11])} |" in page
    for row in cells("office-augmentations").values():
        assert f"| {' | '.join([*row[:2], *row[6:11], *row[-2:]])} |" in page
    adam = cells("office-adam-small")
    assert all(f"| {' | '.join(row[:11])} |" in page for row in adam.values())
    assert f"for FedAvg by {adam['FedAvg, Adam'][8].strip('+')} points" in words()
    for row in cells("office-alpha-p").values():
        assert f"| {' | '.join([*row[:2], *row[6:13]])} |" in page
    for row in cells("office-layers").values():
        assert f"| {' | '.join([*row[:2], *row[6:13], row[-1]])} |" in page
    for row in cells("office-fedmix-plain").values():
        assert f"| {' | '.join(row[:13])} |" in page
    for row in cells("office-transforms").values():
        assert f"| {' | '.join(row[:11])} |" in page
    kinds = ["main", "variants", "fusion", "augmentations"]
    kinds += [f"{kind}-tuned" for kind in ("main", "variants", "augmentations", "fedmix")]
    for kind in (*kinds, "layers", "alpha-p"):
        for row in cells(f"digits-{kind}").values():
            assert f"| {' | '.join(row[:10])} |" in page
    for row in cells("digits-fedmix").values():
        assert f"| {' | '.join([*row[:10], row[-1]])} |" in page
    for row in cells("digits-unseen").values():
        assert f"| {' | '.join(row[:12])} |" in page
    for kind in ("variants", "variants-plain", "fusion", "fusion-plain"):
        for row in cells(f"office-{kind}").values():
            assert f"| {' | '.join([*row[:11], *row[-2:]])} |" in page
    for name, row in cells("office-precision-plain").items():
        assert f"| {name} | {row[6]} | {row[7]} | {row[-2]} | {row[-1]} |" in page
    drawn = (RESULTS / "tables" / "mnist-writers-table.md").read_text()
    assert "mean over 100 clients" in drawn, "each seed draws a hundred writers, of 179 in all"
    for row in cells("mnist-writers-table").values():
        assert f"| {' | '.join([*row[:6], *row[7:9]])} |" in page
    for name, row in cells("mnist-writers").items():
        assert f"| {name} | {row[2]} | {row[3]} | {row[-2]} | {row[-1]} |" in page
    difference = cells("office-precision-plain")["FedFA, bf16"]
    assert f"{difference[8]} points, 95 % {difference[9]}" in page
    assert f"{difference[8]} points, 95 % {difference[9]}" in (ROOT / "docs" / "engines.md").read_text()


def averages(name: str, folders: list[str]) -> dict[int, float]:
    """A method's average over clients after the last round, by seed."""
    found = {}
    for path in (path for folder in folders for path in (RESULTS / folder).glob(f"*-{name}-seed*.json")):
        run = read_summary(path)
        scores = run.selected["last"].clients
        found[run.seed] = 100 * sum(scores.values()) / len(scores)
    return found


@pytest.mark.parametrize(
    ("name", "folders", "wanted"),
    [
        ("fedbn", VARIANTS, "FedBN is {:.1f} points above FedFA, 95 % [{:+.1f}, {:+.1f}], paired on all ten seeds"),
        ("fedbn", TURNED, "and {:.1f} above FedFA, 95 % [{:+.1f}, {:+.1f}], on all ten seeds (paired"),
        ("fedsam", VARIANTS, "FedSAM and FedAvgM are level with FedFA ({:.1f} [{:+.1f}, {:+.1f}] and"),
        ("fedavgm", VARIANTS, "and {:+.1f} [{:+.1f}, {:+.1f}])"),
        ("fedfa-c", VARIANTS, "FedFA-C is where FedFA is on the same seeds ({:+.1f} [{:+.1f}, {:+.1f}];"),
        ("fedfa-c", TURNED, "with flip and rotation {:+.1f} [{:+.1f}, {:+.1f}]; the paper has it"),
        ("fedfa-r", VARIANTS, "FedFA-R is lower ({:+.1f} [{:+.1f}, {:+.1f}];"),
        ("fedfa-r", TURNED, "with them {:+.1f} [{:+.1f}, {:+.1f}]; the paper: 4.5 below"),
        (
            "fedsam",
            ["digits-variants", "digits-main"],
            "more than FedFA here: {:.1f} points, 95 % [{:+.1f}, {:+.1f}], on all ten seeds",
        ),
        (
            "fedsam",
            ["digits-variants-tuned", "digits-main-tuned"],
            "tuned FedSAM - tuned FedFA is {:+.1f} [{:+.1f}, {:+.1f}].",
        ),
        (
            "fedmix",
            ["digits-variants-tuned", "digits-fedmix-tuned"],
            "Tuned FedMix - tuned FedFA is {:+.1f} [{:+.1f}, {:+.1f}], on all ten seeds",
        ),
        ("fedfa-c", ["digits-variants"], "does as well: {:+.1f} [{:+.1f}, {:+.1f}] to FedFA, paired on ten seeds."),
    ],
)
def test_differences_to_fedfa_are_what_the_page_says(name: str, folders: list[str], wanted: str) -> None:
    other, ours = averages(name, folders), averages("fedfa", folders)
    gaps = [other[seed] - ours[seed] for seed in sorted(other)]
    assert wanted.format(*interval(gaps)) in words()
    assert "], on all ten seeds" not in wanted or min(gaps) > 0


def interval(gaps: list[float]) -> tuple[float, float, float]:
    mean, error = float(np.mean(gaps)), float(scipy.stats.sem(gaps))
    low, high = scipy.stats.t.interval(0.95, len(gaps) - 1, mean, error)
    return mean, float(low), float(high)


def test_what_flip_and_rotation_do_is_what_the_page_says() -> None:
    folders = ("office-main", "office-main-plain")
    turned, plain = ({name: averages(name, [folder]) for name in ("fedavg", "fedfa")} for folder in folders)
    gains = {name: [turned[name][seed] - plain[name][seed] for seed in range(10)] for name in turned}
    ours = "FedFA {:.1f} points [{:+.1f}, {:+.1f}]".format(*interval(gains["fedfa"]))
    others = "FedAvg {:.1f} [{:+.1f}, {:+.1f}]".format(*interval(gains["fedavg"]))
    assert f"{ours} and {others} on the same seeds" in words()
    more = [a - b for a, b in zip(gains["fedfa"], gains["fedavg"], strict=True)]
    assert "({:.1f} points more with, [{:+.1f}, {:+.1f}])".format(*interval(more)) in words()
    low, high = foreseen([turned["fedfa"][seed] - turned["fedavg"][seed] for seed in range(10)])
    assert f"which one more seed might show too ({low:+.1f} to {high:+.1f})" in words()
    for name, told in (
        ("fedbn", "FedBN {:.1f} [{:+.1f}, {:+.1f}], and FedSAM nothing"),
        ("fedsam", "({:+.1f} [{:+.1f}, {:+.1f}])"),
    ):
        with_, without = averages(name, ["office-main"]), averages(name, ["office-main-plain"])
        assert told.format(*interval([with_[seed] - without[seed] for seed in sorted(with_)])) in words()
    for name, told in (
        ("fedsam", "FedFA is {:.1f} points above it [{:+.1f}, {:+.1f}], on all ten seeds"),
        ("fedavgm", "and {:.1f} below FedFA [-{:.1f}, -{:.1f}]. FedProx is"),
        ("fedprox", "and {:.1f} below FedFA [-{:.1f}, -{:.1f}]; FedFA is above both on all ten seeds"),
    ):
        behind = [turned["fedfa"][seed] - score for seed, score in averages(name, ["office-main"]).items()]
        mean, low, high = interval(behind)
        assert told.format(mean, *((low, high) if name == "fedsam" else (high, low))) in words()
        assert len(behind) == 10 and min(behind) > 0
    of_tf32 = dict.fromkeys(("fedprox", "fedavgm", "fedbn"), 0)
    for path in (RESULTS / "office-main").glob("*.json"):
        run = read_summary(path)
        if run.arithmetic == "tf32":
            of_tf32[run.config["algorithm"]["name"]] += 1
    assert of_tf32 == {"fedprox": 9, "fedavgm": 9, "fedbn": 2}, "as the page says"
    low, high = foreseen([score - turned["fedfa"][seed] for seed, score in averages("fedbn", ["office-main"]).items()])
    assert f"hardly show ({low:+.1f} to {high:+.1f} for FedBN - FedFA)" in words()


def test_fedsam_on_adam_is_as_the_page_says() -> None:
    adam, sgd, plain = (
        averages(name, [folder])
        for name, folder in (
            ("fedsam", "office-main-code"),
            ("fedsam", "office-main-plain"),
            ("fedavg", "office-main-plain"),
        )
    )
    less, change = (interval([adam[seed] - other[seed] for seed in range(3)]) for other in (plain, sgd))
    assert f"{-less[0]:.1f} points below FedAvg [{less[1]:+.1f}, {less[2]:+.1f}]" in words()
    assert f"{-change[0]:.1f} below FedSAM on SGD [{change[1]:+.1f}, {change[2]:+.1f}], in all three seeds" in words()
    assert max(adam[seed] - sgd[seed] for seed in range(3)) < 0


def test_what_tuning_does_is_what_the_page_says() -> None:
    gains = {}
    for name in ("fedavg", "fedfa"):
        tuned, plain = (averages(name, [folder]) for folder in ("digits-variants-tuned", "digits-variants"))
        gains[name] = interval([tuned[seed] - plain[seed] for seed in range(10)])
    ours = "FedFA {:.1f} [{:+.1f}, {:+.1f}]".format(*gains["fedfa"])
    assert "FedAvg gains {:.1f} points [{:+.1f}, {:+.1f}]".format(*gains["fedavg"]) + f", {ours}" in words()


def test_unseen_domains_of_digits_are_as_the_page_says() -> None:
    domains = ("mnist", "mnistm", "usps")
    found: dict[str, dict[tuple[str, int], tuple[float, float]]] = {}
    for path in (RESULTS / "digits-unseen").glob("*.json"):
        run = read_summary(path)
        last = run.selected["last"]
        assert last.unseen is not None
        place = (run.config["held_out"][0], run.seed)
        found.setdefault(run.config["algorithm"]["name"], {})[place] = (100 * last.unseen, 100 * last.mean)

    def told(name: str, other: str, where: tuple[str, ...] = domains, seen: bool = False, form: str = "{:+.1f}") -> str:
        one, base = found[name], found[other]
        gaps = [sum(one[at, s][seen] - base[at, s][seen] for at in where) / len(where) for s in range(5)]
        return f"{form} [{{:+.1f}}, {{:+.1f}}]{', on all five' * (min(gaps) > 0)}".format(*interval(gaps))

    assert f"on MNIST-M, {told('fedfa', 'fedavg', ('mnistm',), form='{:.1f} points')} seeds" in words()
    assert f"USPS ({told('fedfa', 'fedavg', ('usps',))})" in words()
    assert f"trained with it gains {told('fedfa', 'fedavg', seen=True, form='{:.1f}')}." in words()
    assert f"{told('fedsam', 'fedavg', form='{:.1f} points above FedAvg')} seeds" in words()
    assert f"{told('fedsam', 'fedfa', form='{:.1f} above FedFA')} (unc" in words()
    assert f"loses {told('fedmix', 'fedavg', form='{:.1f}').removeprefix('-')}." in words()


def test_augmentations_of_digits_against_fedfa_are_as_the_page_says() -> None:
    ours, others = averages("fedfa", ["digits-variants"]), {}
    for path in (RESULTS / "digits-augmentations").glob("*-fedavg-*.json"):
        run = read_summary(path)
        gap = 100 * run.selected["last"].mean - ours[run.seed]
        others.setdefault(run.config["augmentation"]["name"], []).append(gap)
    told = {name: "{:+.1f} [{:+.1f}, {:+.1f}]".format(*interval(gaps)).replace("+0.0", "0.0").replace("-0.0", "0.0")
            for name, gaps in others.items() if len(gaps) == 3}  # fmt: skip
    wanted = f"CutMix alone: {told['cutmix']}; Manifold Mixup {told['manifold-mixup']}, Mixup {told['mixup']}"
    assert f"{wanted}, MoEx {told['moex']}." in words()


def test_what_total_variance_does_to_digits_is_what_the_page_says() -> None:
    less: dict[tuple[str, str], list[float]] = {}
    others = {name: averages(name, ["digits-variants"]) for name in ("fedfa", "fedavg")}
    for path in (RESULTS / "digits-fusion").glob("*-fedfa-total-seed*.json"):
        run = read_summary(path)
        for name, scores in others.items():
            key = (run.config["algorithm"]["statistics"], name)
            less.setdefault(key, []).append(scores[run.seed] - 100 * run.selected["last"].mean)
    assert {len(gaps) for gaps in less.values()} == {10}
    wrong = [less[statistics, name] for name in ("fedfa", "fedavg") for statistics in ("corrected", "kept")]
    assert min(min(gaps) for gaps in wrong) > 0
    ours = [interval(gaps) for gaps in wrong[:2]]
    told = "{:.1f} points [{:.1f}, {:.1f}] and {:.1f} [{:.1f}, {:.1f}] below FedFA, on all ten seeds"
    assert told.format(*ours[0], *ours[1]) in words()
    means = [float(np.mean(gaps)) for gaps in wrong[2:]]
    assert "{:.1f} and {:.1f} below FedAvg, on all ten again".format(*means) in words()


@pytest.mark.parametrize(
    ("table", "what", "wanted"),
    [
        (
            "office-unseen",
            "mean",
            "It is {:.1f} points [{:+.1f}, {:+.1f}] better on the clients that it has trained with",
        ),
        ("office-unseen", "gap", "({:.1f} points more, [{:+.1f}, {:+.1f}])"),
        ("pacs-unseen", "mean", "on the clients that it has trained with, {:.1f} points [{:+.1f}, {:+.1f}], so"),
        ("pacs-unseen", "gap", "gap stays ({:.1f} points more, [{:+.1f}, {:+.1f}])"),
    ],
)
def test_unseen_clients_are_as_the_page_says(table: str, what: str, wanted: str) -> None:
    found = {}
    for name in ("fedavg", "fedfa"):
        runs = [read_summary(path) for path in (RESULTS / table).glob(f"*-{name}-seed*.json")]
        scores = {seed: [getattr(run.selected["last"], what) for run in runs if run.seed == seed] for seed in range(5)}
        assert {len(own) for own in scores.values()} == {4}
        found[name] = {seed: 100 * sum(own) / 4 for seed, own in scores.items()}
    assert wanted.format(*interval([found["fedfa"][seed] - found["fedavg"][seed] for seed in range(5)])) in words()


def words() -> str:
    return " ".join((RESULTS / "README.md").read_text().split()).replace("−", "-")


def test_what_one_more_seed_would_show_is_what_the_page_says() -> None:
    other, ours = averages("fedavg", VARIANTS), averages("fedfa", VARIANTS)
    low, high = foreseen([ours[seed] - other[seed] for seed in sorted(ours)])
    assert f"of one more seed would be {low:+.1f} to {high:+.1f} (95 %)" in words()
    low, high = foreseen([score - ours[seed] for seed, score in averages("fedbn", VARIANTS).items()])
    assert f"(one more seed: {low:+.1f} to {high:+.1f} for FedBN - FedFA; the paper -2.6)" in words()


def foreseen(gaps: list[float]) -> tuple[float, float]:
    """Where one more would be."""
    wide = float(np.std(gaps, ddof=1)) * (1 + 1 / len(gaps)) ** 0.5
    low, high = scipy.stats.t.interval(0.95, len(gaps) - 1, float(np.mean(gaps)), wide)
    return float(low), float(high)


def test_rounds_chosen_on_test_images_are_what_the_page_says() -> None:
    best = {}
    for name in ("fedavg", "fedfa"):
        tested = [
            [line["test"]["mean"] for line in statistics.tested_rounds(read_summary(path).metrics)]
            for path in (RESULTS / "office-main-plain").glob(f"*-{name}-seed*.json")
        ]
        assert {len(scores) for scores in tested} == {58}
        best[name] = 100 * float(np.mean([max(scores) for scores in tested]))
    assert f"FedAvg would have {best['fedavg']:.1f} and FedFA {best['fedfa']:.1f}" in words()


def by_rounds(table: str) -> dict[int, list[float]]:
    """The test metric in % by round: of FedAvg and FedFA, over seeds."""
    by_round: dict[int, list[float]] = {}
    with open(RESULTS / "tables" / f"{table}-curves.csv", newline="") as file:
        for line in csv.DictReader(file):
            if line["split"] == "test" and line["row"] in ("FedAvg", "FedFA"):
                by_round.setdefault(int(line["round"]), []).append(100 * float(line["mean"]))
    return by_round


def test_how_cifar_10_goes_is_what_the_page_says() -> None:
    by_round = by_rounds("cifar10-dir0.6-text")
    early, *later, last = (" and ".join(f"{score:.1f}" for score in by_round[number]) for number in (30, 55, 80, 100))
    told = f"{early} % after 30 rounds, {later[0]} after 55, {later[1]} after 80, {last} at the end"
    assert told in words()
    for alpha in ("0.6", "0.3"):
        plain, ours = (averages(name, [f"cifar10-dir{alpha}-text"]) for name in ("fedavg", "fedfa"))
        assert all(ours[seed] < plain[seed] for seed in range(3)), "FedFA is below FedAvg in all six pairs of runs"


def test_augmentations_on_office_caltech_10_are_as_the_page_says() -> None:
    """Against FedFA, and together with it against alone, paired on three seeds."""
    scores: dict[tuple[str, str], list[float]] = {}
    for folder in ("office-main", "office-augmentations"):
        for run in sorted(map(read_summary, (RESULTS / folder).glob("*.json")), key=lambda run: run.seed):
            key = run.config["algorithm"]["name"], run.config["augmentation"]["name"]
            scores.setdefault(key, []).append(100 * run.selected["last"].mean)
    ours = scores["fedfa", "none"]
    alone = {name for method, name in scores if method == "fedavg" and name != "none"}
    both = sorted(name for method, name in scores if method == "fedfa" and name != "none")
    assert len(alone) == 6 and len(both) == 4
    assert min(float(np.mean(np.subtract(scores["fedavg", name], ours[:3]))) for name in alone) > -0.1
    told = [interval(list(np.subtract(scores["fedfa", name], ours[:3]))) for name in ("mixup", "manifold-mixup")]
    mixup, manifold = ("{:.1f} [{:+.1f}, {:+.1f}]".format(*one) for one in told)
    assert f"with Mixup by {mixup}, with Manifold Mixup by {manifold}," in words()
    added = np.mean([np.subtract(scores["fedfa", name], scores["fedavg", name]) for name in both], axis=0)
    assert "FedFA adds {:.1f} [{:+.1f}, {:+.1f}] to what".format(*interval(list(added))) in words()
    assert "by {:.1f}, {:.1f} and {:.1f} in the three seeds".format(*added) in words()


def test_p_and_alpha_on_office_caltech_10_are_as_the_page_says() -> None:
    """Against p = 0.5 and α = 0.99, paired on three seeds."""
    scores: dict[tuple[float, float], dict[int, float]] = {}
    for folder in ("office-main", "office-alpha-p"):
        for run in map(read_summary, (RESULTS / folder).glob("*-fedfa-seed*.json")):
            given = run.experiment.algorithm
            scores.setdefault((given["p"], given["momentum"]), {})[run.seed] = 100 * run.selected["last"].mean
    ours = scores.pop((0.5, 0.99))
    gaps = {key: [own[seed] - ours[seed] for seed in range(3)] for key, own in scores.items()}
    told = {key: "[{:+.1f}, {:+.1f}]".format(*interval(gap)[1:]) for key, gap in gaps.items()}
    means = {key: sum(own) / 3 for key, own in gaps.items()}
    assert (
        f"p = 0.7 is {means[0.7, 0.99]:.1f} points {told[0.7, 0.99]} above 0.5, in each of the three seeds" in words()
    )
    assert f"{-means[1.0, 0.99]:.1f} below it {told[1.0, 0.99]}" in words()
    assert (
        f"the last round is {-means[0.5, 0.0]:.1f} points lower {told[0.5, 0.0]}, lower in all three seeds" in words()
    )
    assert min(gaps[0.7, 0.99]) > 0 > max(gaps[0.5, 0.0])
    assert max(abs(mean) for (p, alpha), mean in means.items() if p == 0.5 and alpha) < 0.6
    high = [mean for (p, _), mean in means.items() if p >= 0.3 and p != 0.5]
    assert max([*high, 0.0]) - min([*high, 0.0]) < 1.25, "from 0.3 on all are within 1.2 points"


def test_sets_of_layers_on_office_caltech_10_are_as_the_page_says() -> None:
    """FFA after some stages against FedAvg and against FFA after all five, paired by seed."""
    plain, scores = averages("fedavg", ["office-main"]), {(1, 2, 3, 4, 5): averages("fedfa", ["office-main"])}
    for run in map(read_summary, (RESULTS / "office-layers").glob("*.json")):
        own = scores.setdefault(tuple(run.config["network"]["stages"]), {})
        own[run.seed] = 100 * run.selected["last"].mean
    assert len(scores) == 15
    whole = {stages: np.array([own[seed] for seed in range(3)]) for stages, own in scores.items()}
    every = whole[1, 2, 3, 4, 5]
    others = [own for stages, own in whole.items() if len(stages) < 5]
    by_seed = [plain[seed] for seed in range(3)]
    gains = list(np.mean(list(whole.values()), axis=0) - by_seed)
    assert "FFA gains {:.1f} [{:+.1f}, {:+.1f}] over FedAvg".format(*interval(gains)) in words()
    ahead = "{:.1f} [{:+.1f}, {:+.1f}] above the mean of the fourteen others".format(
        *interval(list(every - np.mean(others, axis=0)))
    )
    assert f"all five together are {ahead}, five of which are ahead" in words()
    means = {stages: float(own.mean()) for stages, own in whole.items()}
    assert sum(mean > every.mean() for mean in means.values()) == 5
    assert f"lie between {min(means.values()):.1f} and {max(means.values()):.1f}." in words()
    counts = [len(stages) for stages in whole]
    slopes = [float(np.polyfit(counts, [own[seed] for own in whole.values()], 1)[0]) for seed in range(3)]
    assert "A layer more is worth {:.1f} points [{:+.1f}, {:+.1f}]".format(*interval(slopes)) in words()
    rows = paper_table("office-layers").rows
    printed = [rows[f"{{{','.join(map(str, stages))}}}"][-1] for stages in whole]
    assert f"in each seed), and {np.polyfit(counts, printed, 1)[0]:.1f} in the paper" in words()
    alike = scipy.stats.spearmanr(printed, list(means.values())).statistic
    assert f"rank correlation {abs(alike):.1f})" in words()
    alone = {stages[0]: interval(list(own - by_seed)) for stages, own in whole.items() if len(stages) == 1}
    assert f"The fifth layer alone gains {alone[5][0]:.1f} and the first {alone[1][0]:.1f}, the smallest" in words()
    assert "below FedAvg, gains {:.1f} [{:+.1f}, {:+.1f}]".format(*alone[3]) in words()
    assert sorted(means, key=lambda stages: means[stages])[:2] == [(5,), (1,)]
    ends = whole[1, 5]
    assert "{{1,5}}, by {:.1f}, {:.1f} and {:.1f} points".format(*(ends[s] - plain[s] for s in range(3))) in words()
    assert "{{1,5}} is {:.1f} [{:+.1f}, {:+.1f}] from all five".format(*interval(list(ends - every))) in words()


def by_rule(folder: str) -> dict[tuple[str, int, Rule], float]:
    """What each rule selects of the runs in a folder, by algorithm and seed, in %."""
    return {
        (run.config["algorithm"]["name"], run.seed, rule): 100 * selected.mean
        for run in map(read_summary, (RESULTS / folder).glob("*.json"))
        for rule, selected in run.selected.items()
    }


def test_how_cifar_10_goes_with_ten_local_epochs_is_what_the_page_says() -> None:
    by_round = by_rounds("cifar10-dir0.6")
    assert "have {:.1f} and {:.1f} % after 30 rounds already".format(*by_round[30]) in words()
    found = by_rule("cifar10-dir0.6")
    first, second, third = (found["fedfa", seed, "last"] - found["fedavg", seed, "last"] for seed in range(3))
    assert f"{first:.1f} ahead after the last round of the first seed, {-second:.1f} behind in the second" in words()
    assert f"in the second and {-third:.1f} in the third. Over" in words()
    first, second, third = (found["fedfa", seed, "last20"] - found["fedavg", seed, "last20"] for seed in range(3))
    steady = f"ahead by {first:.1f} and {second:.1f} in the first two, and behind by {-third:.1f} in the third"
    assert steady in words()
    highest = max(score for (_, _, rule), score in found.items() if rule == "last")
    assert 76.3 - highest > 2.3, "above all six of our runs by 2.3 points or more"
    more = by_rule("cifar10-dir0.3")
    last, steady_gap = (more["fedfa", 0, rule] - more["fedavg", 0, rule] for rule in ("last", "last20"))
    rounds = [by_rounds("cifar10-dir0.3")[number] for number in range(81, 101)]
    ahead = sum(ours > plain for plain, ours in rounds)
    assert f"{last:.1f} points ahead after the last round and {steady_gap:.1f} over the last 20" in words()
    assert f"of which it is ahead in {ahead}; the paper has 2.7" in words()


def test_what_pacs_shows_is_what_the_page_says() -> None:
    found = {name: averages(name, ["pacs-main"]) for name in ("fedavg", "fedfa", "fedbn")}
    more, plain = ([found["fedbn"][seed] - found[name][seed] for seed in range(3)] for name in ("fedfa", "fedavg"))
    assert "and {:.1f} [{:+.1f}, {:+.1f}] over FedFA, on all three seeds".format(*interval(more)) in words()
    assert "{:.1f} points over FedAvg [{:+.1f}, {:+.1f}]".format(*interval(plain)) in words()
    assert min(more) > 0
    means = []
    for name in ("fedprox", "fedsam", "fedrobust", "fedavgm", "fedmix"):
        behind = [found["fedfa"][seed] - score for seed, score in averages(name, ["pacs-main"]).items()]
        assert min(behind) > 0, "on every seed"
        means.append(float(np.mean(behind)))
    assert f"above each of the other five on every seed, by {min(means):.1f} points or more on average" in words()


def test_where_fedmix_goes_below_zero_is_what_the_page_says() -> None:
    plain = [read_summary(path) for path in (RESULTS / "digits-main").glob("*-fedmix-seed*.json")]
    assert len(plain) == 10 and all(min(line["loss"] for line in run.metrics) < 0 for run in plain)
    ends = sorted(end for run in plain if (end := run.metrics[-1]["loss"]) < 0)
    told = ", ".join(f"{end:.0f}" for end in ends[:-1])
    assert f"below zero in all ten seeds, and in four it ends there, at {told} and {ends[-1]:.0f}, though" in words()
    lowest: dict[tuple[str, float, int], list[float]] = {}
    for folder in ("digits-main", "digits-fedmix"):
        for run in map(read_summary, (RESULTS / folder).glob("*-fedmix-seed[0-4]-*.json")):
            given = run.experiment.algorithm
            key = given.get("products", "summed"), given["lam"], given["average"]
            lowest.setdefault(key, []).append(min(line["loss"] for line in run.metrics))
    below = {key: sum(loss < 0 for loss in losses) for key, losses in lowest.items() if len(losses) == 5}
    lowest_plain = min(
        line["loss"]
        for path in (RESULTS / "office-main-plain").glob("*-fedmix-seed*.json")
        for line in read_summary(path).metrics
    )
    assert lowest_plain > 0.3 and "but stays above 0.3 in all ten seeds" in words()
    assert below == {("summed", 0.1, 5): 5, ("averaged", 0.1, 5): 0, ("summed", 0.05, 5): 1, ("summed", 0.1, 0): 5}
    assert "below zero in all five seeds on the way; averaged, in none" in words()
    assert "below zero in one seed of five" in words()


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("cutmix", "Tuned CutMix - tuned FedFA is {:+.1f} [{:+.1f}, {:+.1f}], on all ten seeds"),
        ("manifold-mixup", "tuned Manifold Mixup - tuned FedFA is {:+.1f} [{:+.1f}, {:+.1f}]."),
    ],
)
def test_tuned_augmentations_against_tuned_fedfa_are_as_the_page_says(name: str, wanted: str) -> None:
    runs = map(read_summary, (RESULTS / "digits-augmentations-tuned").glob("*.json"))
    found = {run.seed: 100 * run.selected["last"].mean for run in runs if run.config["augmentation"]["name"] == name}
    ours = averages("fedfa", ["digits-variants-tuned"])
    gaps = [found[seed] - ours[seed] for seed in range(10)]
    assert wanted.format(*interval(gaps)) in words()
    assert "all ten" not in wanted or min(gaps) > 0
