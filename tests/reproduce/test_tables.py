"""Every table in `experiments/`: valid, its runs' configs built, and one of its rows run on made-up data; as a slow
test all of them."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fedfa
from fedfa import UserError, paper
from fedfa.cli import app
from fedfa.reproduce.play import split_names
from fedfa.reproduce.table import Choice, Table, chosen_rows, find_data, find_table, lay_out, table_names

NAMES = table_names()
SMALL: dict[str, dict[str, Any]] = {
    "alexnet": {"network.width": 0.05, "source.size": 64},
    "unet": {"network.width": 0.1, "source.size": 16},
    "resnet18": {"network.width": 0.05, "partition.clients": 4, "partition.smallest": 1, "participation": 0.5},
    "lenet": {},
}
"""What makes a table's network and federation small, besides two rounds of one epoch."""


def small(table: Table) -> dict[str, Any]:
    """Settings with which a run of the table takes a moment."""
    base = lay_out(table, Choice(seeds=1))[0].experiment
    settings = {"rounds": 2, "epochs": 1, "batch_size": 4, "device": "cpu", "threads": 1}
    settings |= SMALL[base.network["name"]]
    if base.source["name"] == "emnist":
        settings |= {"partition.clients": 4, "participation": 0.5}
    if base.source["name"] == "digit-sites":
        settings |= {"split.fraction": 0.1}
    return settings


def test_all_of_the_papers_tables_and_figures_are_there() -> None:
    named = {name for table in map(find_table, NAMES) for name in _papers(table)}
    assert named == set(paper.tables())
    assert {"office-convergence", "office-alpha-p", "office-cost", "office-transforms", "digit-sites"} <= set(NAMES)


def _papers(table: Table) -> set[str]:
    return set(table.paper.values()) if isinstance(table.paper, dict) else {table.paper} - {""}


@pytest.mark.parametrize("name", NAMES)
def test_every_run_has_a_valid_config(name: str) -> None:
    table = find_table(name)
    for variant in ("", *table.variants):
        cells = lay_out(table, Choice(seeds=2, variant=variant))
        assert len(cells) == table.runs() // table.seeds * 2
        titles = {cell.experiment.title for cell in cells}
        assert len(titles) == len(cells), "two rows are the same runs"
        assert {cell.experiment.seed for cell in cells} == {0, 1}
    assert table.first in table.rows
    if table.stand_in:
        other = find_table(table.stand_in)
        assert set(other.rows) == set(table.rows) and "place" in other.title and not other.paper
    if table.paper:
        for group in table.groups:
            found = table.paper_of(group)
            assert found is not None and set(found.rows) <= set(table.rows)
            if table.held_out:
                assert found.columns == table.held_out


@pytest.mark.parametrize("name", NAMES)
def test_a_row_runs_for_two_rounds(name: str, made_up: Path, tmp_path: Path) -> None:
    table = find_table(name)
    where = find_data(table, made_up)
    cell = lay_out(table, Choice(seeds=1, overrides={**small(table), **where}))[-1]
    run = fedfa.run(cell.experiment, root=tmp_path)
    assert run.done and run.rounds == 2
    assert not any(line["refused"] for line in run.metrics)
    if cell.held_out:
        assert run.metrics[-1]["test"]["unseen"] is not None


VARIANTS = [(name, variant) for name in NAMES for variant in ("", *find_table(name).variants)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_a_whole_table_runs_for_two_rounds(name: str, variant: str, made_up: Path, tmp_path: Path) -> None:
    """Every row and group by the command that a user gives, to the files of the table."""
    table = find_table(name)
    settings = [f"{key}={value}" for key, value in small(table).items() if key != "rounds"]
    words = ["reproduce", name, "--rounds", "2", "--seeds", "1", *settings, "--data", str(made_up), "-q"]
    result = CliRunner().invoke(app, [*words, "--variant", variant, "-o", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "missing" not in result.output and "other clients" not in result.output
    files = [path for path in (tmp_path / "tables").glob("*.csv") if not path.stem.endswith("curves")]
    assert len(files) == len(table.groups)
    for path in files:
        with open(path, newline="") as file:
            rows = list(csv.DictReader(file))
        assert [row["row"] for row in rows] == list(table.rows)
        value = "seconds" if table.kind == "cost" else "average"
        assert all(math.isfinite(float(row[value])) for row in rows)


def test_settings_are_the_papers() -> None:
    """The paper's table of settings, and what the text adds."""
    wanted: dict[str, dict[str, Any]] = {
        "office-main": {
            "rounds": 400,
            "epochs": 1,
            "batch_size": 32,
            "lr": 0.01,
            "optimizer": "sgd",
            "drop_last": True,
        },
        "domainnet-main": {"rounds": 400, "epochs": 1, "batch_size": 32, "lr": 0.01, "optimizer": "sgd"},
        "prostate-mini": {"rounds": 500, "epochs": 1, "batch_size": 16, "lr": 1e-4, "weight_decay": 1e-4},
        "emnist": {"rounds": 200, "epochs": 10, "batch_size": 10, "lr": 0.1, "participation": 0.05},
        "cifar10-dir0.6": {"rounds": 100, "epochs": 10, "batch_size": 10, "lr": 0.1, "participation": 0.1},
    }
    for name, settings in wanted.items():
        for cell in lay_out(find_table(name), Choice(seeds=1)):
            assert {key: getattr(cell.experiment, key) for key in settings} == settings
    networks = [lay_out(find_table(name), Choice(seeds=1))[0].experiment.network["name"] for name in wanted]
    assert networks == ["alexnet", "alexnet", "unet", "lenet", "resnet18"]
    alphas = [
        lay_out(find_table(f"cifar10-dir{alpha}"), Choice(seeds=1))[0].experiment.partition["alpha"]
        for alpha in (0.6, 0.3)
    ]
    assert alphas == [0.6, 0.3]


def test_variants_change_what_they_say() -> None:
    table = find_table("office-main")
    plain = {cell.row: cell.experiment for cell in lay_out(table, Choice(seeds=1))}
    code = {cell.row: cell.experiment for cell in lay_out(table, Choice(seeds=1, variant="code"))}
    assert [t["name"] for t in plain["FedAvg"].transforms] == ["flip", "rotate"] and not code["FedAvg"].transforms
    assert (plain["FedAvgM"].algorithm["beta"], code["FedAvgM"].algorithm["beta"]) == (0.9, 0.01)
    assert (plain["FedSAM"].optimizer, code["FedSAM"].optimizer) == ("sgd", "adam")
    assert code["FedProx"].optimizer == "sgd"
    assert lay_out(table, Choice(seeds=1, variant="paper")) == lay_out(table, Choice(seeds=1))
    with pytest.raises(UserError, match="no variant 'cod'; did you mean 'code'"):
        lay_out(table, Choice(variant="cod"))


def test_runs_are_laid_out_seed_by_seed_and_shared_between_tables() -> None:
    cells = lay_out(find_table("office-variants"), Choice(seeds=2))
    assert [cell.seed for cell in cells] == sorted(cell.seed for cell in cells)
    mains = {cell.experiment.title for cell in lay_out(find_table("office-main"), Choice(seeds=2))}
    shared = {cell.row for cell in cells if cell.experiment.title in mains}
    assert shared == {"FedAvg", "FedFA"}


def test_rows_are_chosen_by_name() -> None:
    table = find_table("office-layers")
    assert chosen_rows(table, ["{1,2}", "{5}"]) == ["FedAvg", "{1,2}", "{5}"]
    assert chosen_rows(table, []) == list(table.rows)
    assert chosen_rows(find_table("office-main"), ["fedfa"]) == ["FedAvg", "FedFA"]
    asked = split_names("FedFA, kept,total,direct fusion, kept")  # which have commas of their own
    assert chosen_rows(find_table("office-fusion"), asked) == ["FedFA", "total", "FedFA, kept", "direct fusion, kept"]
    with pytest.raises(UserError, match="office-main has no row 'FedFo'"):
        chosen_rows(find_table("office-main"), ["FedFo"])


# Files


def test_unknown_tables_and_bad_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no table 'office-mian'; did you mean 'office-main'"):
        find_table("office-mian")
    with pytest.raises(UserError, match="no file"):
        find_table(str(tmp_path / "no.toml"))
    path = tmp_path / "own.toml"
    path.write_text("title = 'x'\nbase = 'digit-sites'\n")
    with pytest.raises(UserError, match="rows"):
        find_table(str(path))
    path.write_text("title = 'x'\nbase = 'digit-sites'\nrow = 3\n[rows]\nA = {}\n")
    with pytest.raises(UserError, match="row: a table has no such key; did you mean 'rows'"):
        find_table(str(path))
    path.write_text("title = 'x'\nlike = 'own'\n")
    with pytest.raises(UserError, match="like itself"):
        find_table(str(path))
    path.write_text("title = 'x'\nbase = 'digit-sites'\n[rows]\nA = {algorithm = 'fedfoo'}\n")
    with pytest.raises(UserError, match=r"own, row 'A': .*fedfoo"):
        lay_out(find_table(str(path)), Choice())


def test_a_table_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text("title = 'Mine'\nbase = 'digit-sites'\nseeds = 2\n[rows]\nA = {algorithm = 'fedavg'}\nB = {}\n")
    table = find_table(str(path))
    assert (table.name, table.first, table.runs()) == ("own", "A", 4)


# Data


def test_data_are_found_in_their_own_folder_and_in_one_that_holds_it(
    made_up: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = find_table("fundus-mini")
    wanted = {"source.path": str((made_up / "fundus").resolve())}
    assert find_data(table, made_up) == wanted
    assert find_data(table, made_up / "fundus") == wanted
    monkeypatch.setenv("FEDFA_DATA", str(made_up))
    assert find_data(table, None) == wanted
    assert find_data(find_table("digit-sites"), None) == {}


def test_absent_data_name_the_folder_and_the_stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"domainnet-main needs DomainNet in data/domainnet.*fedfa reproduce pacs-main"):
        find_data(find_table("domainnet-main"), None)
    with pytest.raises(UserError) as error:
        find_data(find_table("office-main"), None)
    assert "stand-in" not in str(error.value)
    with pytest.raises(UserError, match="there is no folder"):
        find_data(find_table("office-main"), tmp_path / "nowhere")


def test_a_folder_that_holds_other_data_sets_is_not_taken_for_one(tmp_path: Path) -> None:
    (tmp_path / "pacs").mkdir()
    with pytest.raises(UserError, match=r"domainnet-main needs DomainNet, and .* has no folder domainnet; a stand-in"):
        find_data(find_table("domainnet-main"), tmp_path)
