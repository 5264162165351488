"""`fedfa tune`: the same budget for every row, judged by validation data alone, kept apart from untuned results."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedfa
from fedfa import Run, UserError
from fedfa.cli import app
from fedfa.experiment import parse_overrides
from fedfa.reproduce.play import Tuned, read_tuned
from fedfa.reproduce.table import Choice, find_table, lay_out
from fedfa.reproduce.tune import STRENGTHS, best_of, compared, find_target, trials, validation

QUICK = ["--rounds", "1", "split.fraction=0.1", "device=cpu", "-q"]


def command(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output
    return result.output


def test_every_row_has_the_same_budget_and_the_same_learning_rates() -> None:
    experiments = {cell.row: cell.experiment for cell in lay_out(find_table("office-main"), Choice(seeds=1))}
    tried = {row: trials(experiment, row, 6, seed=3) for row, experiment in experiments.items()}
    rates = {row: [settings.get("lr") for settings in found] for row, found in tried.items()}
    assert all(found == rates["FedAvg"] for found in rates.values())
    assert rates["FedAvg"][0] is None and len(set(rates["FedAvg"])) == 6
    assert all(0.001 <= rate <= 0.1 for rate in rates["FedAvg"][1:])
    assert tried["FedFA"] == trials(experiments["FedFA"], "FedFA", 6, seed=3)
    assert tried["FedFA"] != trials(experiments["FedFA"], "FedFA", 6, seed=4)
    assert {key for settings in tried["FedProx"] for key in settings} == {"lr", "algorithm.mu"}


def test_every_strength_is_a_setting_and_every_draw_is_valid() -> None:
    for component, known in STRENGTHS.items():
        for name in known:
            experiment = fedfa.load("digit-sites", {component: name})
            for settings in trials(experiment, name, 20, seed=0):
                assert fedfa.load(experiment, settings)


def test_what_a_table_compares_is_not_drawn() -> None:
    cells = lay_out(find_table("office-alpha-p"), Choice(seeds=1))
    assert compared(cells) == {"algorithm.p"}
    named = next(cell for cell in cells if cell.row == "p = 0.1")
    assert all(set(found) <= {"lr"} for found in trials(named.experiment, named.row, 4, 0, compared(cells)))
    assert compared(lay_out(find_table("office-main"), Choice(seeds=1))) == frozenset()


def test_a_search_shows_validation_data_alone(tmp_path: Path) -> None:
    settings = ["--only", "FedFA", "--trials", "1", "--rounds", "1", "split.fraction=0.1", "device=cpu"]
    told = command("tune", "digit-sites", *settings, "-o", tmp_path)
    assert re.search(r"round 1/1, validation \d+\.\d %", told) and "test " not in told


def test_the_same_search_with_other_rows_adds_to_its_file(tmp_path: Path) -> None:
    words = ["tune", "digit-sites", "--trials", "1", *QUICK, "-o", tmp_path]
    path = tmp_path / "tuned" / "digit-sites-rounds-1-split.fraction-0.1.toml"
    command(*words, "--only", "FedFA")
    command(*words, "--only", "FedProx")
    found = tomllib.loads(path.read_text())
    assert set(found["rows"]) == {"FedAvg", "FedProx", "FedFA"}
    assert found["judged_by"] == "validation data alone: mean over clients, over its one round"
    command(*words, "--only", "FedProx", "lr=0.01")
    found = tomllib.loads(path.with_name("digit-sites-lr-0.01-rounds-1-split.fraction-0.1.toml").read_text())
    assert set(found["rows"]) == {"FedAvg", "FedProx"}, "another search"
    assert len(tomllib.loads(path.read_text())["rows"]) == 3
    command(*words, "--only", "FedProx", "lr=0.01", "--file", path)
    found = tomllib.loads(path.read_text())
    assert set(found["rows"]) == {"FedAvg", "FedProx"}, "another search in its place, as it was asked for"
    assert found["rows"]["FedProx"] == {"lr": 0.01, "split.fraction": 0.1}, "what it was tuned with belongs to it"


def test_combined_methods_have_both_strengths() -> None:
    experiment = fedfa.load("digit-sites", {"algorithm": "fedfa", "augmentation": "mixup"})
    assert set(trials(experiment, "both", 2, 0)[1]) == {"lr", "algorithm.p", "augmentation.alpha"}


def test_test_data_are_not_looked_at(hand_made: Callable[..., Run]) -> None:
    run = hand_made("run", [{"north": 0.9}, {"north": 0.1}], [{"north": 0.2}, {"north": 0.4}])
    assert validation(run) == pytest.approx(0.3)
    with pytest.raises(UserError, match="no validation data"):
        validation(hand_made("none", [{"north": 0.9}]))


def test_the_best_is_the_first_of_equals() -> None:
    means = {("A", 0): 0.5, ("A", 1): 0.7, ("A", 2): 0.7}
    assert best_of("A", [{}, {}, {}], means) == 1


def test_tuned_settings_are_used_and_kept_apart(tmp_path: Path) -> None:
    told = command("tune", "digit-sites", "--trials", "2", "--only", "FedFA", *QUICK, "-o", tmp_path)
    path = tmp_path / "tuned" / "digit-sites-rounds-1-split.fraction-0.1.toml"
    assert str(path) in told and "as it stands" in told
    found = tomllib.loads(path.read_text())
    assert found["table"] == "digit-sites" and found["trials"] == 2
    assert {row: len(tried) for row, tried in found["tried"].items()} == {"FedAvg": 2, "FedFA": 2}
    for row, tried in found["tried"].items():
        best = max(tried, key=lambda settings: settings["validation"])
        own = {key: value for key, value in best.items() if key != "validation"}
        assert found["rows"][row] == {"split.fraction": 0.1, **own}, "what it was tuned with belongs to it"
    before = set((tmp_path / "tuned" / "runs").iterdir())
    assert len(before) == 4 and not list(tmp_path.glob("digit-sites-*")), "trials are not among a table's runs"
    command("tune", "digit-sites", "--trials", "2", "--only", "FedFA", *QUICK, "-o", tmp_path)
    assert set((tmp_path / "tuned" / "runs").iterdir()) == before  # what was tried is not tried again
    words = ["digit-sites", "--seeds", "1", "--only", "FedFA", *QUICK, "-o", tmp_path]
    assert "tuned on validation data" in command("reproduce", *words, "--tuned", path)
    assert "tuned on validation data" not in command("reproduce", *words)
    more = ["digit-sites", "--seeds", "1", "--only", "FedFA", "--rounds", "2", *QUICK[2:], "-o", tmp_path]
    told = command("reproduce", *more, "--tuned", path, "--table-only")
    assert "tuned on validation data over 1 round, 2 rounds" in " ".join(told.split()), (
        "which may not be what suits two"
    )
    names = {file.name for file in (tmp_path / "tables").glob("*.md")}
    assert names == {"digit-sites-rounds-1-split.fraction-0.1.md", "digit-sites-tuned-rounds-1-split.fraction-0.1.md"}


def test_what_all_trials_had_is_told_and_what_was_searched_for_is_not_changed(tmp_path: Path) -> None:
    for share in (0.1, 0.2):
        words = ["digit-sites", "--only", "FedFA", "--rounds", "1", "device=cpu", "-q", "-o", tmp_path]
        path = tmp_path / f"{share}.toml"
        command("tune", *words, "--trials", "2", f"split.fraction={share}", "--file", path)
        for more in ([], [f"split.fraction={share}"]):
            told = command("reproduce", *words, "--seeds", "1", "--tuned", path, *more)
            assert f"tuned on validation data, 1 round, with split.fraction={share}: " in " ".join(told.split())
    names = {file.name for file in (tmp_path / "tables").glob("*.md")}
    assert names == {f"digit-sites-tuned-rounds-1-split.fraction-{share}.md" for share in (0.1, 0.2)}
    told = command("reproduce", *words, "--tuned", path, "lr=0.01", code=2)
    assert "lr was searched for by" in told or "was tuned for" in told


def test_other_files_are_not_written_over(tmp_path: Path) -> None:
    table = tmp_path / "own.toml"
    table.write_text(before := "title = 'Mine'\nbase = 'digit-sites'\n[rows]\nA = {}\n")
    words = ["tune", table, *QUICK, "-o", tmp_path]
    assert "is no file of `fedfa tune`, and stays as it is" in command(*words, "--file", table, code=2)
    assert table.read_text() == before
    path = tmp_path / "found.toml"
    command(*words, "--trials", "1", "--file", path)
    found = path.read_text()
    assert "was of another search" in command(*words, "--trials", "2", "--file", path)
    assert path.with_name("found.before.toml").read_text() == found != path.read_text()
    second = path.read_text()
    command(*words, "--trials", "3", "--file", path)
    assert path.with_name("found.before.toml").read_text() == found
    assert path.with_name("found.before-2.toml").read_text() == second


def test_the_command_that_is_printed_works(tmp_path: Path) -> None:
    table = tmp_path / "own.toml"
    table.write_text(
        "title = 'Mine'\nbase = 'digit-sites'\n[rows]\nA = {}\nB = {lr = 0.1}\n"
        "[variants.v]\nwhy = 'w'\nsettings = {batch_size = 8}\n"
    )
    told = command("tune", table, "--trials", "1", "--variant", "v", "--only", "A", *QUICK, "-o", tmp_path)
    words = shlex.split(told.rpartition("use it with: ")[2])
    assert words[:2] == ["fedfa", "reproduce"]
    command(*words[1:], "--seeds", "1", *QUICK, "-o", tmp_path)
    told = command(
        "tune", "phantom-sites", "--trials", "2", "--rounds", "1", "split.fraction=0.2", "-q", "-o", tmp_path
    )
    words = shlex.split(told.rpartition("use it with: ")[2])
    assert words[:3] == ["fedfa", "run", "phantom-sites"]
    assert fedfa.load(words[2], parse_overrides(words[3:])).split["fraction"] == 0.2, "what all trials had"


def test_an_experiment_is_a_table_of_one_row(tiny_file: Path) -> None:
    assert list(find_target("phantom-sites").rows) == ["fedfa"]
    assert list(find_target(str(tiny_file)).rows) == ["fedavg"]
    assert find_target("digit-sites") == find_table("digit-sites")
    with pytest.raises(UserError, match="no table or experiment 'office-mian'; did you mean 'office-main'"):
        find_target("office-mian")


def test_settings_for_another_table_are_refused(tmp_path: Path) -> None:
    table, path = find_table("digit-sites"), tmp_path / "tuned.toml"
    path.write_text('table = "digit-sites"\nvariant = "paper"\n[rows.FedAvg]\nlr = 0.1\n')
    assert read_tuned(path, table, "", ["FedAvg"]) == Tuned({"FedAvg": {"lr": 0.1}})
    with pytest.raises(UserError, match="no settings for FedFA"):
        read_tuned(path, table, "", ["FedAvg", "FedFA"])
    with pytest.raises(UserError, match="tuned for variant 'paper', not 'code'"):
        read_tuned(path, table, "code", ["FedAvg"])
    with pytest.raises(UserError, match="tuned for table 'digit-sites', not 'office-main'"):
        read_tuned(path, find_table("office-main"), "", ["FedAvg"])
