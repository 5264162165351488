"""The paper's numbers: averages recomputed, numbers that stand twice compared; what fails is flagged, and only that."""

from __future__ import annotations

import pytest

import fedfa
from fedfa import UserError, paper

TABLES = paper.tables()
FIRST = {"office": "office-main", "domainnet": "domainnet-main", "prostate": "prostate-mini"}


def test_averages_are_those_of_their_columns_but_for_flagged_ones() -> None:
    wrong = set()
    for name, table in TABLES.items():
        for row, numbers in table.rows.items():
            assert len(numbers) == len(table.columns) + 1
            if table.columns:
                mean = sum(numbers[:-1]) / len(table.columns)
                if abs(mean - numbers[-1]) > 0.1 + 1e-9:  # half a digit of the columns, and half of the average
                    wrong.add((name, row))
    assert wrong == {(c.table, c.row) for c in paper.contradictions() if c.kind == "average"}


def test_numbers_that_stand_twice_agree_but_for_flagged_ones() -> None:
    differ = set()
    for name, table in TABLES.items():
        for other in TABLES.values():
            if not same_runs(name, other.name):
                continue
            for row in table.rows.keys() & other.rows.keys():
                if table.average(row) != other.average(row):
                    differ.add((name, row, "average", other.name))
                for column in table.columns:
                    if other.columns and table.number(row, column) != other.number(row, column):
                        differ.add((name, row, column, other.name))
    flagged = {(c.table, c.row, c.column, c.other) for c in paper.contradictions() if c.kind == "twice"}
    assert differ == flagged


def same_runs(one: str, other: str) -> bool:
    """Whether two of the paper's tables show the same experiments: the second is the first on that benchmark."""
    if other == "prostate-1-6":
        return one in ("prostate-mini", "prostate-variants", "prostate-augmentations", "prostate-fusion")
    benchmark, _, kind = one.partition("-")
    return kind in ("variants", "augmentations", "fusion", "layers") and FIRST.get(benchmark) == other


def test_what_the_text_says_of_the_tables() -> None:
    """Gains that the paper's text states, from its tables."""
    for name, better, worse, gain in (
        ("office-main", "FedFA", "FedAvg", 4.6),
        ("domainnet-main", "FedFA", "FedAvg", 3.7),
        ("office-main", "FedFA", "FedMix", 3.3),
        ("prostate-mini", "FedFA", "FedAvg", 3.0),
        ("office-unseen", "FedFA", "FedMix", 1.7),
        ("domainnet-unseen", "FedFA", "FedMix", 1.6),
        ("prostate-unseen", "FedFA", "FedMix", 1.3),
        ("cifar10-dir0.6", "FedFA", "FedMix", 0.8),
        ("emnist", "FedFA", "FedMix", 1.2),
    ):
        one, other = TABLES[name].average(better), TABLES[name].average(worse)
        assert one is not None and other is not None
        assert one - other == pytest.approx(gain)


def test_every_contradiction_has_a_reason_and_a_table() -> None:
    for entry in paper.contradictions():
        assert entry.table in TABLES and len(entry.reason) > 20
        assert entry.kind in ("average", "twice", "text")


def test_looking_up() -> None:
    table = paper.paper_table("office-main")
    assert table.average("FedFA") == 83.1
    assert table.number("FedFA", "dslr") == 90.6
    assert table.average("FedFoo") is None and table.number("FedFA", "moon") is None
    with pytest.raises(UserError, match="office-main"):
        paper.paper_table("office-mian")


@pytest.mark.parametrize("network", ["alexnet", "unet"])
def test_cost_as_the_paper_counts_it(network: str) -> None:
    claim = paper.cost()[network]
    kind = fedfa.NETWORKS[network]
    channels = kind.stage_channels  # type: ignore[attr-defined]  # networks of ours have it
    assert 4 * 4 * sum(channels) / 1024 == claim["extra_kib"]
    classes, inputs = (10, 3) if network == "alexnet" else (2, 3)
    parameters = sum(p.numel() for p in kind(num_classes=classes, in_channels=inputs).parameters())
    assert round(parameters * 4 / 2**20, 1) == claim["model_mib"]
