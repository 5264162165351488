"""`fedfa reproduce`: interrupted and continued to the same table; made from run folders and from summaries."""

from __future__ import annotations

import csv
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fedfa.cli import app
from fedfa.reproduce.names import changes, file_name
from fedfa.reproduce.render import _parts
from fedfa.reproduce.table import Choice, find_table
from fedfa.runs import find_run

SMALL = ["--seeds", "2", "--rounds", "3", "split.fraction=0.2", "device=cpu"]
CALLED = "digit-sites-rounds-3-split.fraction-0.2"
"""What its files are called."""
ONE = "rounds-1-split.fraction-0.1"
"""What those of the smallest runs have in their names."""


def fedfa(*words: Any, code: int = 0) -> str:
    """The command, in this process; what it printed."""
    result = CliRunner().invoke(app, ["reproduce", *map(str, words)])
    assert result.exit_code == code, result.output
    return result.output


def rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small table, run without a break."""
    out = tmp_path_factory.mktemp("whole")
    fedfa("digit-sites", *SMALL, "-o", out, "--summaries", out / "summaries", "-q")
    return out


def test_list_of_tables() -> None:
    lines = fedfa().splitlines()
    assert any(re.match(r"office-main +Office-Caltech 10 +80  Office-Caltech 10, main table", line) for line in lines)
    assert any(re.match(r"digit-sites +embedded +9 ", line) for line in lines)


def test_the_table_and_its_files(whole: Path) -> None:
    found = rows(whole / "tables" / f"{CALLED}.csv")
    assert [row["row"] for row in found] == ["FedAvg", "FedProx", "FedFA"]
    assert all(row["seeds"] == row["of"] == "2" for row in found)
    clients = ("fax", "phone", "scanner", "tablet")
    for row in found:
        mean = sum(float(row[client]) for client in clients) / 4
        assert mean == pytest.approx(float(row["average"]), abs=1e-3)
        assert float(row["average_low"]) < float(row["average"]) < float(row["average_high"])
        for column in ("last_20", "best_by_val"):
            assert 0 <= float(row[column]) <= 100
    first, *others = found
    assert first["difference"] == ""
    for row in others:
        gained = float(row["average"]) - float(first["average"])
        assert float(row["difference"]) == pytest.approx(gained, abs=1e-3)
    markdown = (whole / "tables" / f"{CALLED}.md").read_text()
    assert "by the rule 'last round'" in markdown and "| FedFA | 2 |" in markdown
    assert r"\toprule" in (whole / "tables" / f"{CALLED}.tex").read_text()
    curves = rows(whole / "tables" / f"{CALLED}-curves.csv")
    assert {(row["row"], row["split"], row["round"]) for row in curves} >= {
        ("FedFA", "test", "3"),
        ("FedAvg", "loss", "1"),
    }


def test_a_second_time_nothing_is_run(whole: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole.glob("*/metrics.jsonl")}
    told = fedfa("digit-sites", *SMALL, "-o", whole)
    assert "round 1/3" not in told and "− FedAvg" in told
    assert {path: path.stat().st_mtime_ns for path in whole.glob("*/metrics.jsonl")} == before


def test_the_same_table_from_summaries_alone(whole: Path, tmp_path: Path) -> None:
    fedfa("digit-sites", *SMALL, "--table-only", "--from", whole / "summaries", "-o", tmp_path)
    for ending in (".csv", ".md", ".tex", "-curves.csv"):
        name = f"{CALLED}{ending}"
        assert (tmp_path / "tables" / name).read_text() == (whole / "tables" / name).read_text()
    (first, *_) = (whole / "summaries").glob("*.json")
    assert str(whole) not in first.read_text()


def test_the_caption_names_what_changes_numbers_and_nothing_else(whole: Path, tmp_path: Path) -> None:
    made = fedfa("digit-sites", *SMALL, "trackers=[]", "lanes=3", "--table-only", "--from", whole, "-o", tmp_path)
    assert "3 rounds, with split.fraction=0.2: test accuracy" in " ".join(made.split())


def test_missing_runs_are_shown_as_missing(whole: Path, tmp_path: Path) -> None:
    words = ["digit-sites", "--seeds", "3", *SMALL[2:], "--table-only", "--from", whole / "summaries", "-o", tmp_path]
    told = fedfa(*words)
    assert "3 of 9 runs are missing: 'FedAvg, seed 2'" in told
    assert [(row["seeds"], row["of"]) for row in rows(tmp_path / "tables" / f"{CALLED}.csv")] == [("2", "3")] * 3
    told = fedfa("digit-sites", "--rounds", "4", "--table-only", "--from", whole / "summaries", "-o", tmp_path)
    assert "9 of 9 runs are missing" in told and re.search(r"FedFA +0/3 +missing", told)


def test_rules_and_rows(whole: Path, tmp_path: Path) -> None:
    words = ["digit-sites", *SMALL, "--table-only", "--from", whole, "-o", tmp_path]
    told = fedfa(*words, "--rule", "best", "--only", "fedfa")
    assert "by the rule 'best by validation'" in told and "FedProx" not in told
    best = {row["row"]: row["average"] for row in rows(tmp_path / "tables" / f"{CALLED}-by-best.csv")}
    fedfa(*words)
    last = {row["row"]: row["best_by_val"] for row in rows(tmp_path / "tables" / f"{CALLED}.csv")}
    assert best["FedFA"] == last["FedFA"]


def test_interrupted_and_continued_to_the_same_table(
    whole: Path, tmp_path: Path, spawn: Callable[..., Any], wait_for: Callable[..., None]
) -> None:
    words = [sys.executable, "-m", "fedfa", "reproduce", "digit-sites", *SMALL, "-o", str(tmp_path)]
    for wanted in (1, 3):
        process = spawn(words)
        wait_for(lambda: _rounds(tmp_path) > wanted)  # noqa: B023  # called before the next turn
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
        assert process.returncode == 130, told
        assert re.search(r"stopped; \d of these \d runs (is|are) done: the same command goes on", told)
        assert "Traceback" not in told
    fedfa(*words[4:])
    for ending in (".csv", ".md", ".tex"):
        name = f"{CALLED}{ending}"
        assert (tmp_path / "tables" / name).read_text() == (whole / "tables" / name).read_text()


def _rounds(folder: Path) -> int:
    return sum(path.read_text().count("\n") for path in folder.glob("*/metrics.jsonl"))


def test_unseen_clients(tmp_path: Path) -> None:
    words = [
        "digit-sites-unseen",
        "--seeds",
        "1",
        "--rounds",
        "1",
        "--only",
        "FedFA",
        "split.fraction=0.1",
        "device=cpu",
    ]
    told = fedfa(*words, "-o", tmp_path)
    assert "on clients that did not take part" in told
    found = rows(tmp_path / "tables" / f"digit-sites-unseen-{ONE}.csv")
    assert [row["row"] for row in found] == ["FedAvg", "FedFA"]
    for row in found:
        assert float(row["gap"]) == pytest.approx(float(row["seen"]) - float(row["average"]), abs=1e-3)
        clients = [float(row[name]) for name in ("fax", "phone", "scanner", "tablet")]
        assert float(row["average"]) == pytest.approx(sum(clients) / 4, abs=1e-3)
    if find_spec("matplotlib"):
        assert (tmp_path / "tables" / f"digit-sites-unseen-{ONE}-curves.png").stat().st_size > 10_000


def test_clients_that_settings_hold_out_are_marked(tmp_path: Path) -> None:
    words = ["digit-sites", "held_out=fax", "--seeds", "1", "--rounds", "1", "--only", "FedFA", "split.fraction=0.1"]
    told = " ".join(fedfa(*words, "device=cpu", "-o", tmp_path).split())
    assert "fax (unseen)" in told and "fax took no part, and the average is of the others" in told
    for row in rows(tmp_path / "tables" / f"digit-sites-held-out-fax-{ONE}.csv"):
        seen = [float(row[name]) for name in ("phone", "scanner", "tablet")]
        assert float(row["average"]) == pytest.approx(sum(seen) / 3, abs=1e-3) and float(row["fax"]) >= 0


def test_costs_are_measured_in_processes_of_their_own(tmp_path: Path) -> None:
    words = ["digit-sites-cost", "--seeds", "1", "--only", "FedMix,FedFA", "--rounds", "3", "split.fraction=0.2"]
    told = fedfa(*words, "-o", tmp_path, "device=cpu")
    assert "÷ FedAvg" in told
    found = {row["row"]: row for row in rows(tmp_path / "tables" / "digit-sites-cost-rounds-3-split.fraction-0.2.csv")}
    model = 4 * 62_006
    assert float(found["FedAvg"]["bytes_up"]) == float(found["FedAvg"]["bytes_down"]) >= model
    extra = float(found["FedFA"]["bytes_up"]) - float(found["FedAvg"]["bytes_up"])
    assert extra == 2 * 4 * (6 + 16)  # mean and std of every channel
    assert float(found["FedFA"]["bytes_more"]) == 2 * extra and "+352 B" in told
    assert float(found["FedAvg"]["bytes_more"]) == 0
    assert float(found["FedMix"]["bytes_once"]) > 0 == float(found["FedAvg"]["bytes_once"])
    assert float(found["FedAvg"]["seconds_ratio"]) == float(found["FedAvg"]["memory_ratio"]) == 1
    assert float(found["FedMix"]["memory"]) > 1e8
    (folder,) = tmp_path.glob("digit-sites-fedmix-*")
    run = find_run(folder)
    assert ["test" in line for line in run.metrics] == [False, False, True]
    assert (
        float(found["FedMix"]["seconds"]) == run.metrics[1]["seconds"]
    )  # neither the first round nor an evaluated one
    assert float(found["FedMix"]["memory"]) == run.provenance["training_memory"] <= run.provenance["memory"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["no-such"], "no table 'no-such'"),
        (["office-main"], "office-main needs Office-Caltech 10 in data/office_caltech10"),
        (["prostate-mini"], "fedfa reproduce fundus-mini"),
        (["domainnet-main", "--data", "."], "domainnet-main needs DomainNet; a stand-in, as an experiment of its own"),
        (["digit-sites", "--rule", "median"], "--rule is last, last20, best, not 'median'"),
        (["digit-sites", "--only", "fedsomething"], "digit-sites has no row 'fedsomething'"),
        (["office-fusion", "--only", "FedFA, kep"], "office-fusion has no row 'kep'"),  # before it asks for data
        (["digit-sites", "rouns=3"], "unknown key 'rouns'"),
        (["digit-sites", "--table-only", "--from", "nowhere"], "there is no folder nowhere"),
        (["digit-sites", "--tuned", "nowhere.toml"], "no file nowhere.toml"),
        (["digit-sites", "seed=3"], "say how many with --seeds"),
        (["digit-sites", "threads=100000"], "threads: should be less than or equal to 1024, not 100000"),
        (["digit-sites", "held_out=nobody"], "held_out: digit-sites has no client 'nobody'"),
        (["digit-sites-unseen", "held_out=fax"], "digit-sites-unseen holds out one client after the other"),
        (["digit-sites", "engine=captured", "device=cpu"], "engine=captured needs a CUDA device"),
        (["office-main", "--variant", "coed"], "office-main has no variant 'coed'"),  # before it asks for data, too
        (["rounds=3"], "which table? `fedfa reproduce` lists them"),
        (["--only", "FedFA"], "which table? `fedfa reproduce` lists them"),
        (["digit-sites", "digit-site"], "no table 'digit-site'; did you mean 'digit-sites'?"),
        (["digit-sites", "digits-fedmix", "--only", "FedProx"], "digits-fedmix has no row 'FedProx'"),
    ],
)
def test_bad_input_is_one_line(
    words: Sequence[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    output = fedfa(*words, code=2)
    assert told in output and len(output.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("name = '../escaped'", "the name '../escaped': letters, digits"),
        ("reference = 'C'", "reference: there is no row 'C'"),
        ("settings = {seed = 7}", "seed is not a setting of a table"),
        ("held_out = ['fax']\nsettings = {held_out = ['phone']}", "held_out is said for the table"),
        ("rulle = 'last'", "rulle: a table has no such key; did you mean 'rule'?"),
        ("[groups]", "[groups] is empty: leave it out"),
        ("[groups]\n'a b' = {}\n'a-b' = {}", "two groups differ in signs alone"),
        ("[variants.v]\nwhy = 'w'\nrows.Z = {}", "variant v: there is no row 'Z'"),
        ("[paper]\nx = 'office-main'", "paper: there is no group 'x'"),
    ],
)
def test_a_table_of_one_s_own_with_a_mistake_is_one_line(lines: str, told: str, tmp_path: Path) -> None:
    table, start = tmp_path / "own.toml", "title = 'Mine'\nbase = 'digit-sites'\nseeds = 1\n"
    rows = "[rows]\nA = {}\n"
    table.write_text(start + (lines + "\n" + rows if not lines.startswith("[") else rows + lines + "\n"))
    output = fedfa(table, "-o", tmp_path / "runs", code=2)
    assert told in output and len(output.splitlines()) == 1 and not (tmp_path / "runs").exists()


def test_rows_of_two_metrics_are_no_table(tmp_path: Path) -> None:
    table = tmp_path / "own.toml"
    table.write_text(
        "title = 'Mine'\nbase = 'digit-sites'\nseeds = 1\n[rows]\nA = {}\n"
        "B = {source = 'phantom-sites', network = 'unet'}\n"
    )
    output = fedfa(table, "--rounds", "1", "split.fraction=0.1", "device=cpu", "-o", tmp_path / "runs", code=2)
    assert "own: rows with different metrics do not compare: accuracy, dice" in output


def test_a_mistake_leaves_a_table_as_it_was(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "runs")
    table = tmp_path / "runs" / "tables" / f"{CALLED}.md"
    before = table.read_text()
    fedfa("digit-sites", *SMALL, "held_out=nobody", "-o", tmp_path / "runs", code=2)
    fedfa("digit-sites", "--rounds", "4", "--table-only", "--from", tmp_path / "runs", "-o", tmp_path / "runs")
    assert table.read_text() == before


def test_data_that_no_table_needs_are_told_of(whole: Path, tmp_path: Path) -> None:
    words = ["digit-sites", *SMALL, "--table-only", "--from", str(whole), "-o", str(tmp_path), "--data", "."]
    result = CliRunner().invoke(app, ["reproduce", *words])
    assert result.exit_code == 0 and "--data . is not read: digit-sites needs none" in result.stderr


def test_what_was_left_out_is_told(tmp_path: Path) -> None:
    """A row whose updates were all refused has the numbers of the initial weights."""
    table = tmp_path / "own.toml"
    groups = "[groups]\nall = {}\nfew = {split = {fraction = 0.001, smallest = 1}}\n"
    table.write_text(f"title = 'Mine'\nbase = 'digit-sites'\nseeds = 1\n[rows]\nA = {{}}\nB = {{lr = 1e30}}\n{groups}")
    words = ["--rounds", "2", "device=cpu", "-o", tmp_path]
    told = fedfa(table, *words)
    assert re.search(
        r"Updates were left out: B, all 8 of 8 \((mostly: )?\S+ is not finite\); "
        r"A, few 8 of 8 \(has no batch to train on \(1 training samples\)\); B, few 8 of 8 \(has no batch",
        told,
    )
    told = CliRunner().invoke(app, ["tune", str(table), "--trials", "1", *map(str, words)]).output
    assert "updates were left out in 2 of 2 trials: A 1, B 1" in told


def test_a_client_is_absent_where_its_rows_hold_it_out(tmp_path: Path) -> None:
    table = tmp_path / "own.toml"
    rows = "[rows]\nall = {}\n'without fax' = {held_out = 'fax'}\n"
    table.write_text(f"title = 'Mine'\nbase = 'digit-sites'\nseeds = 1\n{rows}")
    words = ["--rounds", "1", "device=cpu", "-o", tmp_path]
    told = fedfa(table, *words)
    assert "took no part, and the average" not in told and "(unseen)" not in told
    assert "fax took no part in without fax, whose average is of the others." in told
    rows = "[rows]\nFedAvg = {}\n[groups]\nall = {}\n'no fax' = {held_out = 'fax'}\n"
    table.write_text(f"title = 'Mine'\nbase = 'digit-sites'\nseeds = 1\n{rows}")
    whole, without = fedfa(table, *words).split("Mine, no fax")[:2]
    assert "took no part" not in whole and "(unseen)" not in whole
    assert "; fax took no part, and the average is of the others." in without and "fax (unseen)" in without


def test_the_paper_s_numbers_stand_beside_its_own_clients_alone(made_up: Path, tmp_path: Path) -> None:
    shutil.copytree(made_up / "office_caltech10", tmp_path / "data" / "office_caltech10")
    small = ["--seeds", "1", "--rounds", "1", "network.width=0.05", "source.size=64", "batch_size=4", "device=cpu"]
    words = ["--data", tmp_path / "data", *small, "-o", tmp_path / "runs"]
    assert "one run" in fedfa("office-main", "--only", "FedFA", *words)
    told = fedfa("office-main", "--only", "FedFA", *words, "held_out=webcam")
    assert "one run" not in told and "other clients: these runs are with webcam held out." in told
    shutil.rmtree(tmp_path / "data" / "office_caltech10" / "caltech")
    words[-1] = tmp_path / "others"
    told = fedfa("office-main", "--only", "FedFA", *words)
    assert "office_caltech10: site caltech is missing" in told
    told += fedfa("office-variants", "--only", "FedFA", *words)
    assert "one run" not in told and told.count("other clients: these runs are without caltech.") == 2


def test_what_rows_are_called_by_is_not_changed(tmp_path: Path) -> None:
    words = ["--table-only", "--from", tmp_path, "-o", tmp_path]
    told = fedfa("digit-sites", "algorithm=fedsam", *words, code=2)
    assert "digit-sites: 'FedAvg' and 'FedProx' differ in algorithm, so it cannot be changed for all" in told
    assert told == fedfa("digit-sites", "--only", "FedAvg", "algorithm=fedsam", *words, code=2), "it would be no FedAvg"
    told = fedfa("prostate-fractions", "split.fraction=0.5", "split.smallest=1", *words, code=2)
    assert "'1/6, FedFA' and '2/6, FedAvg' differ in split.fraction" in told
    table = tmp_path / "own.toml"
    table.write_text("title = 'Mine'\nbase = 'digit-sites'\n[rows]\nA = {}\nB = {clip = 1.0}\n")
    assert "'A' and 'B' differ in clip" in fedfa(table, "clip=2.0", *words, code=2)
    assert "none of its runs" not in fedfa(table, "lr=0.5", *words), "what they have in common is"


def test_tables_that_make_no_sense_of_names(tmp_path: Path) -> None:
    table = tmp_path / "own.toml"
    start = "title = 'Mine'\nbase = 'digit-sites'\n"
    for more, told in (
        ("[rows]\nA = {}\n[variants.'a/../../b']\nwhy = 'x'\n", "the name 'a/../../b'"),
        ("[rows]\nA = {}\n[variants.paper]\nwhy = 'x'\n", "variant paper: that is what the table is called"),
        ("[rows]\nA = {}\n[groups]\n'' = {}\ncurves = {lr = 0.2}\n", "a group may not be called curves"),
        ("held_out = ['']\n[rows]\nA = {}\n", "held_out: names of clients"),
        ("held_out = ['fax', 'fax']\n[rows]\nA = {}\n", "held_out: names of clients"),
        ("[rows]\n'A\\nB' = {}\n".replace("'", '"'), "titles and rows' names are printed"),
        ("[rows]\n'' = {}\n", "titles and rows' names are printed"),
        ("[rows]\nA = {}\n[groups]\n'\\u001b' = {}\n".replace("'", '"'), "groups' names are printed"),
        ("seeds = 1000000000\n[rows]\nA = {}\n", "seeds: Input should be less than or equal to 1000"),
        ("like = 'sub/own'\n[rows]\nA = {}\n", "sub/own.toml"),
        ("like = 'a\\u0000b'\n[rows]\nA = {}\n".replace("'", '"'), "cannot be read"),
        (f"x = {'[' * 5000}{']' * 5000}\n", "cannot be read"),
    ):
        table.write_text(start + more)
        assert told in fedfa(table, "-o", tmp_path / "runs", code=2)


def test_rounds_said_twice(tmp_path: Path) -> None:
    told = fedfa("digit-sites", "--rounds", "2", "rounds=3", "-o", tmp_path, code=2)
    assert "--rounds 2 and rounds=3: say one of them" in told
    assert "are missing" in fedfa("digit-sites", "--rounds", "2", "rounds=2", "--table-only", "-o", tmp_path)


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = f"{sys.executable} -m fedfa reproduce | head -n 1"
    found = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (0, "") and found.stdout.startswith("table")


def test_folders_that_cannot_be_written_are_told_of_first(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    told = fedfa("digit-sites", *SMALL, "--summaries", tmp_path / "file" / "sub", "-o", tmp_path / "runs", code=2)
    assert "--summaries: " in told and told.endswith("file is a file, not a folder\n")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "latin1"])
def test_output_of_other_encodings(whole: Path, tmp_path: Path, encoding: str) -> None:
    """The table's minus and dash are not in all of them, and its files are UTF-8 in any case."""
    words = [sys.executable, "-m", "fedfa", "reproduce", "digit-sites", *SMALL, "--table-only", "--from", str(whole)]
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    found = subprocess.run([*words, "-o", str(tmp_path)], capture_output=True, env=environment, check=False)
    assert found.returncode == 0, found.stderr
    assert "- FedAvg" in found.stdout.decode(encoding)
    assert (tmp_path / "tables" / f"{CALLED}.md").read_text("utf-8") == (whole / "tables" / f"{CALLED}.md").read_text()


def test_damaged_runs(whole: Path, tmp_path: Path) -> None:
    """One that was cut is told of; folders that are no runs any more stand in nobody's way."""
    shutil.copytree(whole, tmp_path / "runs", ignore=shutil.ignore_patterns("summaries"))
    first, second, third, *_ = sorted(done.parent for done in (tmp_path / "runs").glob("*/done"))
    (second / "experiment.toml").unlink()  # as where a process was killed before it wrote it, or while it deleted
    (third / "experiment.toml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "runs" / "notes.json").write_text("{}")
    told = fedfa("digit-sites", *SMALL, "--table-only", "-o", tmp_path / "runs")
    assert "2 of 6 runs are missing" in told
    lines = (first / "metrics.jsonl").read_text().splitlines(keepends=True)
    (first / "metrics.jsonl").write_text(lines[0])
    told = fedfa("digit-sites", *SMALL, "-o", tmp_path / "runs", code=2)
    assert "is marked as complete with 3 rounds, and its metrics.jsonl has 1" in told.splitlines()[-1]
    assert re.search(r"FedProx +2 ", told), "which stops no other run"


def test_what_is_tuned_is_not_changed_besides(tmp_path: Path) -> None:
    tuned = tmp_path / "tuned.toml"
    tuned.write_text('table = "digit-sites"\nvariant = "paper"\n[rows.FedAvg]\nlr = 0.1\n[rows.FedFA]\nlr = 0.2\n')
    words = ["digit-sites", "--only", "FedFA", "--tuned", tuned, "-o", tmp_path / "runs"]
    assert "lr: 0.1 was tuned for FedAvg: leave it out" in fedfa(*words, "lr=0.3", code=2)
    for rows in ("rows = 3", "rows = [1]", "[rows]\nFedAvg = 3", "rounds = 'many'"):
        tuned.write_text(f'table = "digit-sites"\nvariant = "paper"\n{rows}\n')
        assert "is not a file of `fedfa tune`" in fedfa(*words, code=2)


def test_terminated(whole: Path, tmp_path: Path, spawn: Callable[..., Any], wait_for: Callable[..., None]) -> None:
    """As a scheduler ends a process and all that it has started: each run writes a checkpoint, long before its next."""
    words = [
        sys.executable,
        "-m",
        "fedfa",
        "reproduce",
        "digit-sites",
        "--seeds",
        "1",
        "--rounds",
        "2000",
        "device=cpu",
    ]
    words += ["checkpoint_every=2000", "split.fraction=0.2", "--at-once", "2", "-o", str(tmp_path)]
    process = spawn(words)
    wait_for(lambda: _rounds(tmp_path) > 1)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    workers = children.read_text().split() if children.exists() else []
    for number in (process.pid, *map(int, workers)):
        os.kill(number, signal.SIGTERM)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 143 and "the same command goes on" in told and "Traceback" not in told
    begun = [path.parent for path in tmp_path.glob("*/metrics.jsonl") if path.read_text()]
    assert begun and all(list(folder.glob("checkpoints/round-*.safetensors")) for folder in begun)


def test_a_run_that_fails_ends_no_other(tmp_path: Path) -> None:
    table = tmp_path / "own.toml"
    table.write_text(
        "title = 'Mine'\nbase = 'digit-sites'\nseeds = 1\n"
        "[rows]\nGood = {algorithm = 'fedavg'}\nBad = {algorithm = 'fedavg', held_out = 'nobody'}\n"
    )
    output = fedfa(table, "--rounds", "1", "split.fraction=0.1", "-o", tmp_path / "runs", code=2)
    assert "1 run failed, such as Bad, seed 0" in output and "no client 'nobody'" in output
    assert [row["seeds"] for row in rows(tmp_path / "runs" / "tables" / f"own-{ONE}.csv")] == [
        "1",
        "0",
    ]


def test_a_table_that_is_too_wide_comes_in_parts() -> None:
    assert _parts([6, 5, 10, 10, 10], 200) == [[1, 2, 3, 4]]
    assert _parts([6, 5, 10, 10, 10], 30) == [[1, 2], [3, 4]]
    assert _parts([6, 50, 50], 30) == [[1], [2]]


def test_data_that_cannot_be_read_are_told_of_once(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    output = fedfa("office-main", "--data", tmp_path / "pictures", "-o", tmp_path / "runs", code=2)
    assert len(output.splitlines()) == 1 and "office_caltech10" in output
    assert not (tmp_path / "runs").exists()


def test_data_are_read_before_any_tables_runs(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text("title = 'Mine'\nbase = 'digit-sites'\nseeds = 1\n[rows]\nA = {rounds = 1}\n")
    (tmp_path / "data").mkdir()
    words = [tmp_path / "own.toml", "office-main", "--data", tmp_path / "data", "-o", tmp_path / "runs"]
    assert "office-main needs Office-Caltech 10" in fedfa(*words, code=2)
    assert not (tmp_path / "runs").exists()


def folders_of_images(root: Path, turned: bool) -> Path:
    """Two clients with dark and bright images, 12 a class; in the other set, the other way round."""
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    for client in ("a", "b"):
        for kind, light in (("dark", 20), ("bright", 200)):
            place = root / client / kind
            place.mkdir(parents=True)
            for number in range(12):
                pixels = rng.integers(40, size=(16, 16, 3)) + (220 - light if turned else light)
                image.fromarray(pixels.astype(np.uint8)).save(place / f"{number}.png")
    return root


def table_of_images(folder: Path, *rows: str) -> Path:
    """A table of one's own images, which `source.path` is to say the place of."""
    path = folder / "own.toml"
    start = "title = 'Mine'\nbase = 'digit-sites'\nseeds = 1\n"
    common = "settings = {source = {name = 'image_folders', path = '.', size = 16}, rounds = 1}\n"
    path.write_text("\n".join([f"{start}{common}[rows]", *rows, ""]))
    return path


def test_runs_on_other_data_are_not_taken_for_these(tmp_path: Path) -> None:
    """Two folders that differ by nothing but where they lie and what is in the images."""
    table = table_of_images(tmp_path, "A = {}")
    one, other = (folders_of_images(tmp_path / name, name == "other") for name in ("one", "other"))
    out, small = tmp_path / "runs", ["device=cpu", "--summaries", tmp_path / "summaries"]
    assert "runs 0/1" in fedfa(table, f"source.path={one}", "-o", out, *small)
    assert "runs 0/1" in fedfa(table, f"source.path={other}", "-o", out, *small)
    moved = one.rename(tmp_path / "moved")
    told = fedfa(table, f"source.path={moved}", "-o", out, *small)
    assert "runs 0/" not in told and len(list(out.glob("*/done"))) == 2, "the same images elsewhere are the same"
    data = {find_run(done.parent).provenance["data"] for done in out.glob("*/done")}
    assert len(data) == 2
    told = fedfa(table, "--table-only", "--from", tmp_path / "summaries", "-o", out)
    assert "These runs are of several sets of data" in told, "which no data at hand tell apart"


def test_a_table_that_mixes_data_says_so(tmp_path: Path) -> None:
    table = table_of_images(tmp_path, "A = {algorithm = 'fedavg'}", "B = {algorithm = 'fedfa'}")
    one, other = (folders_of_images(tmp_path / name, name == "other") for name in ("one", "other"))
    fedfa(table, f"source.path={one}", "--only", "A", "-o", tmp_path / "first", "device=cpu")
    fedfa(table, f"source.path={other}", "-o", tmp_path / "second", "device=cpu")
    told = fedfa(table, "--table-only", "--from", tmp_path / "first", "--from", tmp_path / "second", "-o", tmp_path)
    assert "These runs are of several sets of data" in told
    one.rename(tmp_path / "gone")  # summaries serve where the data are absent
    words = [table, f"source.path={one}", "--only", "A", "--from", tmp_path / "first", "-o", tmp_path]
    assert "wrote" in fedfa(*words)


def test_data_that_were_exchanged_are_told_of(tmp_path: Path) -> None:
    """At the same place: the run that is there is of the old ones, and has the name of one of the new."""
    table = table_of_images(tmp_path, "A = {}")
    one, other = (folders_of_images(tmp_path / name, name == "other") for name in ("one", "other"))
    words = [table, f"source.path={one}", "-o", tmp_path / "runs", "device=cpu"]
    fedfa(*words)
    shutil.rmtree(one)
    other.rename(one)
    told = fedfa(*words, code=2)
    assert "1 of the runs that are there is of other data" in told and "was played on other data than" in told
    (folder,) = tmp_path.glob("runs/*fedfa*")
    (folder / "done").unlink()  # as if it had been stopped: it does not go on with other images
    assert "was started with other data" in fedfa(*words, code=2)


def test_an_edited_file_of_splits_makes_other_runs(tmp_path: Path) -> None:
    table, splits = tmp_path / "own.toml", tmp_path / "splits.tsv"
    one = folders_of_images(tmp_path / "one", False)
    source = ["--source", "image_folders", one, "source.size=16"]
    for seed in (0, 1):
        made = CliRunner().invoke(app, ["data", "split", *map(str, source), f"seed={seed}", "-o", str(splits)])
        assert made.exit_code == 0, made.output
        table.write_text(
            "title = 'Mine'\nbase = 'digit-sites'\nseeds = 1\n[rows]\n"
            f"A = {{source = {{name = 'image_folders', path = '{one}', size = 16}}, rounds = 1, "
            f"'split.file' = '{splits}'}}\n"
        )
        assert "runs 0/1" in fedfa(table, "-o", tmp_path / "runs", "device=cpu", "--summaries", tmp_path / "kept")
    assert len(list((tmp_path / "runs").glob("*/done"))) == 2
    assert all(str(tmp_path) not in path.read_text() for path in (tmp_path / "kept").iterdir())


def test_a_precision_that_is_asked_for_is_what_runs_have(whole: Path, tmp_path: Path) -> None:
    words = ["digit-sites", *SMALL, "--table-only", "--from", whole, "-o", tmp_path]
    assert "are missing" not in fedfa(*words)
    assert "6 of 6 runs are missing" in fedfa(*words, "precision=bf16")


def test_runs_of_two_precisions_are_told_of(tmp_path: Path) -> None:
    """Before they are played beside each other, and below the table that has both."""
    table = tmp_path / "own.toml"
    table.write_text(
        "title = 'Mine'\nbase = 'digit-sites'\nseeds = 2\nsettings = {rounds = 1}\n"
        "[rows]\nA = {algorithm = 'fedavg'}\nB = {algorithm = 'fedfa'}\n"
    )
    words = [table, "device=cpu", "-o", tmp_path / "runs"]
    assert "those to come" not in fedfa(*words, "--only", "A", "precision=bf16")
    told = fedfa(*words, "--seeds", 1)
    assert "own: 1 of the runs that are there is in bf16, and those to come in float32: precision=bf16 has all" in told
    assert "Runs are in bf16, but in float32 those of B: a part of a difference may be the precision's." in told
    told = fedfa(*words)
    assert "own: 2 of the runs that are there are in bf16, and those to come" in told
    told = fedfa(*words, "--table-only")
    assert "those to come" not in told and "those of B: a part" in told
    assert "Runs are" not in fedfa(*words, "precision=bf16") and len(list(tmp_path.glob("runs/*/done"))) == 6
    files = [path.read_text() for path in (tmp_path / "runs" / "tables").glob("own.[mt]*")]
    assert len(files) == 2 and all("may be the precision" in text for text in files)


def test_a_table_may_be_called_as_the_papers_are(tmp_path: Path) -> None:
    table = tmp_path / "my-paper.toml"
    table.write_text("title = 'Mine'\nbase = 'digit-sites'\nseeds = 1\nsettings = {rounds = 1}\n[rows]\nA = {}\n")
    fedfa(table, "device=cpu", "-o", tmp_path / "runs")
    assert (tmp_path / "runs" / "tables" / "my-paper.csv").is_file()


def test_an_edited_run_is_not_taken_for_what_its_folder_says(tmp_path: Path) -> None:
    words = ["digit-sites", "--only", "FedAvg", *SMALL, "-o", tmp_path]
    fedfa(*words)
    folder = next(tmp_path.glob("*-seed0-*"))
    file = folder / "experiment.toml"
    file.write_text(file.read_text().replace("lr = 0.05", "lr = 0.5"))
    assert "which was edited: put that back" in fedfa(*words, code=2)
    (folder / "done").unlink()  # nor does it go on as another one
    assert "which was edited: put that back" in fedfa(*words, code=2)
    ran = CliRunner().invoke(app, ["run", str(file), "lr=0.05", "-o", str(tmp_path)])
    assert ran.exit_code == 2 and "which was edited" in ran.output


def test_what_a_caption_says_of_rounds_and_of_what_was_searched_for(tmp_path: Path) -> None:
    table = tmp_path / "own.toml"
    table.write_text("title = 'Mine'\nbase = 'digit-sites'\nseeds = 1\n[rows]\nA = {rounds = 1}\nB = {rounds = 2}\n")
    assert "Mine, 1 to 2 rounds: test" in fedfa(table, "device=cpu", "-o", tmp_path)
    table.write_text("title = 'Mine'\nbase = 'digit-sites'\nseeds = 1\nsettings = {rounds = 1}\n[rows]\nA = {}\n")
    (tmp_path / "tuned.toml").write_text(
        "table = 'own'\nvariant = 'paper'\njudged_by = 'a hand'\nsettings = {lr = 0.1}\n"
        "rows = {A = {lr = 0.18}}\ntried = {A = [{lr = 0.1, validation = 0.1}, {lr = 0.18, validation = 0.2}]}\n"
    )
    told = fedfa(table, "device=cpu", "-o", tmp_path, "--tuned", tmp_path / "tuned.toml")
    assert "with lr=0.1" not in told and "tuned on validation data, 1 round: test" in told


def test_damaged_folders_are_told_of_and_a_summary_may_be_named_itself(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "runs")
    folder = next((tmp_path / "runs").glob("*fedfa-seed0*"))
    (folder / "metrics.jsonl").write_text("")
    words = ["digit-sites", *SMALL, "--table-only", "-o", tmp_path / "out", "--from"]
    told = fedfa(*words, tmp_path / "runs")
    assert f"{folder} is marked as complete" in told and "passed over" in told
    summary = next((whole / "summaries").glob("*fedfa-seed0*"))
    assert "5 of 6 runs are missing" in fedfa(*words, summary)
    both = ["--from", whole / "summaries", "--only", "FedFA"]
    assert "missing" not in fedfa(*words, summary, *both)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("held_out = 'fax'", "held_out: is a list, such as ['a', 'b'], not 'fax'"),
        ("paper = 3", "paper: is "),
        ("[rows]\nA = 'fedavg'", "rows.A: is settings in braces, such as {lr = 0.1}, not 'fedavg'"),
        ("[rows]", "rows: has no entry"),
        ("like = 3", "like is the name of a file beside it, not 3"),
        ("title = 3", "title: is text in quotes, not 3"),
    ],
)
def test_a_tables_mistakes_are_told_in_its_own_words(text: str, told: str, tmp_path: Path) -> None:
    start = ["base = 'digit-sites'", *(["title = 'Mine'"] if "title" not in text else [])]
    end = ["[rows]", "A = {}"] if "[rows]" not in text else []
    (tmp_path / "own.toml").write_text("\n".join([*start, text, *end, ""]), "utf-8-sig")  # as some editors begin files
    assert told in fedfa(tmp_path / "own.toml", code=2)


@pytest.mark.parametrize("where", ["settings", "groups", "variant", "rows", "tuned"])
def test_a_precision_that_a_table_names_anywhere_is_met(where: str, tmp_path: Path) -> None:
    """Runs of another one are there, and are not taken for it."""
    start = "title = 'Mine'\nbase = 'digit-sites'\nseeds = 1\n"
    half = "precision = 'bf16'"
    plain = {"settings": "settings = {rounds = 1}\n", "rows": "[rows]\nA = {}\nB = {lr = 0.01}\n"}
    texts = {
        "settings": {**plain, "settings": f"settings = {{rounds = 1, {half}}}\n"},
        "groups": {**plain, "groups": f"[groups]\nx = {{precision = 'tf32'}}\ny = {{{half}}}\n"},
        "variant": {**plain, "variants": f"[variants.half]\nwhy = 'to see'\nsettings = {{{half}}}\n"},
        "rows": {**plain, "rows": f"[rows]\nA = {{{half}}}\nB = {{lr = 0.01, {half}}}\n"},
        "tuned": plain,
    }
    table, out = tmp_path / "own.toml", tmp_path / "runs"
    table.write_text(start + "".join(plain.values()))
    words = [table, "device=cpu", "-o", out]
    fedfa(*words)
    table.write_text(start + "".join(texts[where].values()))
    words += ["--variant", "half"] * (where == "variant")
    if where == "tuned":
        tuned = tmp_path / "tuned.toml"
        rows_ = "".join(f"[rows.{row}]\n{half}\n" for row in "AB")
        tuned.write_text(f"table = 'own'\nvariant = 'paper'\njudged_by = 'a hand'\n{rows_}")
        words += ["--tuned", tuned]
    assert "2 of the runs" not in fedfa(*words)
    kinds = [find_run(done.parent).config["precision"] for done in out.glob("*/done")]
    assert sorted(kinds) == ["bf16", "bf16", "tf32", "tf32"]
    told = fedfa(*words, "--table-only")
    assert "are missing" not in told and "may be the precision" not in told


def test_of_two_precisions_a_table_takes_the_one_that_most_of_it_has(tmp_path: Path) -> None:
    table = tmp_path / "own.toml"
    table.write_text(
        "title = 'Mine'\nbase = 'digit-sites'\nseeds = 1\nsettings = {rounds = 1}\n[rows]\nA = {}\nB = {lr = 0.01}\n"
    )
    words = [table, "device=cpu", "-o", tmp_path / "runs"]
    fedfa(*words, "precision=bf16")
    fedfa(*words, "--only", "A", "precision=tf32")  # the latest, and not of B
    assert len(list(tmp_path.glob("runs/*/done"))) == 3
    assert "may be the precision" not in fedfa(*words, "--table-only")
    assert "are missing" not in fedfa(*words, "--only", "A", "--table-only", "precision=float32"), "tf32 on a CPU is"


def test_a_trial_leaves_the_whole_tables_files_as_they_are(whole: Path, tmp_path: Path) -> None:
    """Files are named by what makes other numbers, and by nothing else."""
    table = find_table("digit-sites")

    def called(**overrides: Any) -> str:
        choice = Choice(overrides=overrides)
        return file_name(table, choice, changes(table, choice))

    own = {"source.path": "/data", "device": "cpu", "lanes": 3, "rounds": 40}  # 40 is what it has
    assert called() == called(**own) == "digit-sites"
    assert called(rounds=3, **{"split.fraction": 0.2}, device="cpu") == CALLED
    assert called(split={"fraction": 0.5}, **{"split.fraction": 0.5}) == "digit-sites-split.fraction-0.5", (
        "one is enough"
    )
    assert called(precision="bf16") == "digit-sites-precision-bf16", "which counts where it is said"
    many = {"split.fraction": 0.25, "optimizer_state": "kept", "momentum": 0.95, "weight_decay": 0.0005, "clip": 1.5}
    assert re.fullmatch(r"digit-sites-[0-9a-f]{8}", called(**many)) and called(**many) != called(**many, lr=0.02)
    assert {path.name for path in (whole / "tables").glob("*.md")} == {f"{CALLED}.md"}


def test_groups_have_files_of_their_own(tmp_path: Path) -> None:
    table = tmp_path / "own.toml"
    table.write_text(
        "title = 'Mine'\nbase = 'digit-sites'\nseeds = 1\n[rows]\nA = {}\n"
        "[groups]\n'1/6' = {}\nall = {}\n[variants.slow]\nwhy = 'to see'\nsettings = {lr = 0.01}\n"
    )
    words = [table, "--variant", "slow", "--rounds", "1", "split.fraction=0.1", "device=cpu", "-o", tmp_path]
    assert "no file was written" in fedfa(*words, "--table-only") and not (tmp_path / "tables").exists()
    fedfa(*words)
    made = {path.name for path in (tmp_path / "tables").iterdir() if path.suffix != ".png"}
    endings = {".md", ".tex", "-1-6.csv", "-all.csv", "-curves.csv"}
    assert made == {f"own-slow-{ONE}{ending}" for ending in endings}


def test_rows_that_are_the_same_are_run_once(tmp_path: Path) -> None:
    table = tmp_path / "own.toml"
    table.write_text("title = 'Mine'\nbase = 'digit-sites'\nseeds = 1\n[rows]\nA = {}\nB = {}\n")
    told = fedfa(table, "--rounds", "1", "split.fraction=0.1", "device=cpu", "-o", tmp_path / "runs")
    assert "runs 0/1" in told
    one, other = rows(tmp_path / "runs" / "tables" / f"own-{ONE}.csv")
    assert one["average"] == other["average"] and float(other["difference"]) == 0


def test_several_tables_share_their_runs(tmp_path: Path) -> None:
    """Those of all are played together, and one that two tables have is played once."""
    start = "title = 'Mine'\nbase = 'digit-sites'\nseeds = 1\n[rows]\nFedAvg = {}\n"
    for name, rule in (("first", "fedprox"), ("second", "fedsam")):
        (tmp_path / f"{name}.toml").write_text(start + f"Other = {{algorithm = '{rule}'}}\n")
    small = ["--rounds", "1", "split.fraction=0.1", "device=cpu", "--summaries", tmp_path / "summaries"]
    told = fedfa(tmp_path / "first.toml", tmp_path / "second.toml", *small, "-o", tmp_path / "runs")
    assert "runs 0/3" in told and "first, FedAvg, seed 0" in told and "Mine, 1 round, with" in told
    made = [rows(tmp_path / "runs" / "tables" / f"{name}-{ONE}.csv") for name in ("first", "second")]
    assert made[0][0] == made[1][0] and [row["seeds"] for table in made for row in table] == ["1"] * 4
    assert len(list((tmp_path / "summaries").iterdir())) == 3
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "first.toml").write_text(start)
    output = fedfa(tmp_path / "first.toml", tmp_path / "more" / "first.toml", code=2)
    assert "two tables are called first" in output
