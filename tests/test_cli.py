"""The command line: happy paths, and every mistake in one line."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fedfa
from fedfa import Run

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # typer 0.20 on click 8.5
    from typer.testing import CliRunner, Result

    from fedfa.cli import app

HandMade = Callable[..., Run]
ANSI = re.compile(r"\x1b[\[\]()]")
SCORES = [{"a": 0.5, "b": 0.25}, {"a": 0.75, "b": 0.5}]


def fedfa_command(*words: str | Path) -> Result:
    """The command in this process: quick."""
    return CliRunner().invoke(app, [str(word) for word in words])


def output(*words: str | Path) -> list[str]:
    """Lines that the command prints where nothing is wrong."""
    result = fedfa_command(*words)
    assert result.exit_code == 0, result.stderr
    assert result.stderr == "" and not ANSI.search(result.stdout)
    return result.stdout.splitlines()


def complaint(*words: str | Path) -> str:
    """The one line that the command prints where the user is wrong."""
    result = fedfa_command(*words)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    (line,) = result.stderr.splitlines()
    assert line.startswith("fedfa: ") and result.stderr == f"{line}\n"
    return line.removeprefix("fedfa: ")


# Happy paths


def test_run_list_show_resume_and_compare(tiny_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "my runs"
    lines = output("run", tiny_file, "rounds=2", "-o", out)
    (folder,) = out.iterdir()
    run = Run(folder)
    assert lines[0] == f"fedavg on tiny, 3 clients, tiny-net, seed 0, cpu; results in {folder}"
    assert [line.split("  ")[0] for line in lines[1:3]] == ["round 1/2", "round 2/2"]
    last = run.metrics[-1]["test"]["mean"]
    assert lines[3].startswith(f"fedavg: test accuracy {100 * last:.1f} % after round 2; best by validation ")
    assert lines[4] == f"results in {folder}" and len(lines) == 5

    again = output("run", tiny_file, "rounds=2", "--out", out)
    assert again == ["this run is complete already (2 rounds); `fedfa run … --force` starts it anew", *lines[3:]]
    assert output("resume", folder) == again
    assert output("resume", folder, "--quiet") == lines[3:]
    assert output("run", tiny_file, "rounds=2", "--out", out, "--force") == lines

    output("run", tiny_file, "rounds=2", "algorithm=fedfa", "algorithm.p=0.3", "-q", "-o", out)
    png, table = tmp_path / "new" / "curves.png", tmp_path / "new" / "curves.csv"
    compared = output("compare", *sorted(out.iterdir()), "--png", png, "--csv", table)
    assert compared[0] == "test accuracy, % (clients and last: after the last round)"
    assert compared[1].split() == ["run", "rounds", "north", "south", "west", "last", "last", "20", "best", "by", "val",
                                   "s/round"]  # fmt: skip
    assert {line.split()[0] for line in compared[2:4]} == {"fedavg", "fedfa"}
    assert compared[-2:] == [f"wrote {png}", f"wrote {table}"]
    assert png.stat().st_size > 10_000 and len(table.read_text().splitlines()) == 1 + 2 * 2 * 2 * 3


def test_quiet_prints_the_result_alone(tiny_file: Path, tmp_path: Path) -> None:
    lines = output("run", tiny_file, "rounds=1", "-o", tmp_path / "runs", "--quiet")
    assert len(lines) == 2 and lines[0].startswith("fedavg: test accuracy ")


def test_a_built_in_experiment(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    lines = output("run", "digit-sites", "rounds=1", "threads=1", "algorithm=fedavg", "-o", tmp_path)
    assert lines[0].startswith("fedavg on digit-sites, 4 clients, lenet, seed 0, ")
    assert lines[-1].startswith(f"results in {tmp_path / 'digit-sites-fedavg-seed0-'}")


def test_held_out_clients_are_told_of(tiny_file: Path, tmp_path: Path) -> None:
    lines = output("run", tiny_file, "rounds=1", "held_out=west", "-q", "-o", tmp_path / "runs")
    assert re.search(r"after round 1, \d+\.\d % on unseen clients \(gap [+-]\d+\.\d\); best by", lines[0])


def test_updates_left_out_are_told_of(tiny_file: Path, tmp_path: Path) -> None:
    lines = output("run", tiny_file, "rounds=2", "algorithm=poison", "-o", tmp_path / "runs")
    assert lines[1].endswith("[south left out: stage.0.weight is not finite]")
    assert "2 updates were left out; metrics.jsonl says which and why" in lines


def test_show_prints_the_whole_config_which_can_be_run(tiny_file: Path, tmp_path: Path) -> None:
    text = "\n".join(output("show", tiny_file, "algorithm=fedfa", "algorithm.p=0.25", 'description=it\'s "mine"'))
    found = tomllib.loads(text)
    assert found["algorithm"]["p"] == 0.25 and found["rounds"] == 3 and found["description"] == 'it\'s "mine"'
    shown = tmp_path / "shown.toml"
    shown.write_text(text)
    assert output("show", shown) == text.split("\n")
    assert fedfa.load(shown).digest() == fedfa.load(tiny_file, {"algorithm": {"name": "fedfa", "p": 0.25}}).digest()


def test_list_names_everything() -> None:
    lines = output("list")
    titles = [line for line in lines if not line.startswith(" ")]
    assert titles == ["sources", "networks", "algorithms", "augmentations", "partitions", "transforms", "experiments"]
    named = {line.split()[0] for line in lines if line.startswith(" ")}
    for registry in (fedfa.ALGORITHMS, fedfa.NETWORKS, fedfa.SOURCES, fedfa.AUGMENTATIONS, fedfa.TRANSFORMS):
        assert set(registry) <= named
    assert {"digit-sites", "phantom-sites"} <= named
    assert all(len(line.split("  ")) >= 3 for line in lines if line.startswith(" "))  # each has a description


def test_version_and_help() -> None:
    assert output("--version") == [fedfa.__version__]
    lines = output("--help")
    assert lines == output("-h")
    for command in ("run", "resume", "list", "show", "compare", "data"):
        assert any(line.strip().startswith(command) for line in lines)
        assert output(command, "--help")[0].startswith("Usage: ")
    assert "\\[" not in "\n".join(output("run", "--help"))
    assert any(line.startswith("Usage: ") for line in fedfa_command().output.splitlines())


# Mistakes


@pytest.mark.parametrize(
    "words",
    [
        ("run",), ("reprodcue",), ("run", "digit-sites", "--nope"), ("reproduce", "digit-sites", "--seeds", "0"),
        ("reproduce", "digit-sites", "--rounds", "many"), ("data", "check"), ("resume", "a", "b"), ("flower", "up"),
    ],
)  # fmt: skip
def test_words_that_a_command_does_not_take_are_one_line(words: tuple[str, ...]) -> None:
    line = complaint(*words)
    assert re.search(r"; see \S.* --help$", line) and line.count("Did you mean") <= 1


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["no-such"], "no experiment 'no-such'; known are digit-sites, phantom-sites (or the path of a .toml file)"),
        (["digit-site"], "no experiment 'digit-site'; did you mean 'digit-sites'? (or the path of a .toml file)"),
        (["no-such.toml"], "no file no-such.toml"),
        (["TINY", "round=3"], "unknown key 'round'; did you mean 'rounds'?"),
        (["TINY", "rounds=0"], "rounds: should be greater than or equal to 1, not 0"),
        (
            ["TINY", "rounds=many"],
            "rounds: should be a valid integer, unable to parse string as an integer, not 'many'",
        ),
        (["TINY", "lr=inf"], "lr: should be a finite number, not inf"),
        (["TINY", "rounds"], "'rounds' is not key=value, such as rounds=5 or algorithm=fedfa"),
        (["TINY", "algorithm=fedav"], "no algorithm is named 'fedav'; did you mean 'fedavg'?"),
        (["TINY", "algorithm.p=0.3"], "algorithm 'fedavg' has no setting 'p'; it has none"),
        (["TINY", "algorithm=fedfa", "algorithm.p=2"], "algorithm: p is a probability, between 0 and 1, not 2.0"),
        (["TINY", "held_out=nort"], "held_out: tiny has no client 'nort'; did you mean 'north'?"),
        (
            ["TINY", "network=unet"],
            "network 'unet' does not take tiny: UNet takes images whose sides are multiples of 16",
        ),
        (["TINY", "device=cuda"], "device=cuda: torch sees 0 CUDA devices; say device=cpu"),
        (["TINY", "device=tpu"], "device: is auto, cpu, cuda, cuda:N or mps, not 'tpu'"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str], line: str, tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    given = [str(tiny_file) if word == "TINY" else word for word in words]
    assert complaint("run", *given).startswith(line)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.toml"]  # nothing is left behind
    if "device=cuda" not in words and not words[-1].startswith(("held_out", "network", "algorithm.p=2")):
        assert complaint("show", *given).startswith(line)


def test_an_error_of_several_lines_is_one_line(
    tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise ImportError("this needs monai:\n  pip install monai")

    monkeypatch.setattr(fedfa.SOURCES["tiny"], "build", broken)
    assert complaint("run", tiny_file, "-o", tmp_path) == "this needs monai:   pip install monai"


def test_a_broken_file_and_a_folder_that_is_a_file(tiny_file: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("rounds = = 1")
    assert complaint("run", broken) == f"{broken} cannot be read: Invalid value (at line 1, column 10)"
    assert complaint("run", tiny_file, "-o", broken).startswith(f"cannot write to {broken}/tiny-fedavg-seed0-")
    assert complaint("run", tiny_file, "-o", "/proc/no/such").startswith("cannot write to /proc/no/such/tiny-")


def test_compare_takes_all_runs_of_a_folder(hand_made: HandMade, tmp_path: Path) -> None:
    """What else commands make beside runs is passed over, but no run that happens to be called so."""
    tests = [{"a": 0.5}]
    runs = [hand_made("tuned", tests).folder, hand_made("other", tests, algorithm="fedfa").folder, tmp_path / "tables"]
    runs[-1].mkdir()
    assert {line.split()[0] for line in output("compare", *runs)[2:4]} == {"fedavg", "fedfa"}


def test_what_cannot_be_resumed_or_compared(hand_made: HandMade, tmp_path: Path) -> None:
    run, empty = hand_made("runs/one", SCORES), hand_made("runs/none", [])
    (tmp_path / "nothing").mkdir()
    for command in ("resume", "compare"):
        assert complaint(command, tmp_path / "x") == f"no run at {tmp_path / 'x'}"
        assert complaint(command, tmp_path / "nothing").endswith("/nothing is not a run: it has no experiment.toml")
        assert complaint(command, tmp_path / "runs") == (
            f"{tmp_path / 'runs'} holds 2 runs; name one, such as {tmp_path / 'runs' / 'none'}"
        )
    assert complaint("compare", run.folder, empty.folder) == f"{empty.folder} has no evaluated round yet"
    (run.folder / "provenance.json").write_text("{")
    assert complaint("compare", run.folder).startswith(f"{run.folder} cannot be read: Expecting property name")


def test_a_damaged_checkpoint_is_one_line(tiny_file: Path, tmp_path: Path) -> None:
    output("run", tiny_file, "-q", "-o", tmp_path / "runs")
    (folder,) = (tmp_path / "runs").iterdir()
    (folder / "done").unlink()
    (folder / "checkpoints" / "round-00003.safetensors").write_bytes(b"")
    result = fedfa_command("resume", folder)
    assert result.exit_code == 0 and (folder / "done").exists()
    (line,) = result.stderr.splitlines()
    assert "round-00003.safetensors is damaged (" in line


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--png", "/proc/curves.png"], "cannot write /proc/curves.png: "),
        (["--csv", "/proc/no/curves.csv"], "cannot write /proc/no/curves.csv: "),
        (["--png", "FILE/curves.png"], "cannot write FILE/curves.png: "),
        (["--csv", "FOLDER"], "cannot write FOLDER: it is a folder; name a file in it"),
        (["--csv", "FOLDER/one/metrics.jsonl"], "FOLDER/one/metrics.jsonl is there, and stays as it is"),
        (["--png", "FOLDER"], "cannot write FOLDER: it is a folder; name a file in it"),
        (["--png", "FOLDER/curves.xyz"], "cannot write FOLDER/curves.xyz: Format 'xyz' is not supported"),
    ],
)
def test_files_that_cannot_be_written(hand_made: HandMade, tmp_path: Path, words: list[str], line: str) -> None:
    pytest.importorskip("matplotlib")
    run = hand_made("one", SCORES)
    (tmp_path / "file").write_text("")
    places = {"FILE": str(tmp_path / "file"), "FOLDER": str(tmp_path)}
    for word, place in places.items():
        words, line = [given.replace(word, place) for given in words], line.replace(word, place)
    result = fedfa_command("compare", str(run.folder), *words)
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith(f"fedfa: {line}")


def test_what_tables_leave_beside_runs_is_passed_over(hand_made: HandMade, tmp_path: Path) -> None:
    run = hand_made("runs/one", SCORES)
    (tmp_path / "runs" / "tables").mkdir()
    result = fedfa_command("compare", str(run.folder), str(run.folder.parent / "tables"))
    assert result.exit_code == 0, "as by compare runs/*"
    assert "is not a run" in complaint("compare", str(run.folder.parent / "tables"))


def test_a_locked_folder_is_one_line(tiny_file: Path, tmp_path: Path) -> None:
    from fedfa.files import locked

    output("run", tiny_file, "-q", "-o", tmp_path / "runs")
    (folder,) = (tmp_path / "runs").iterdir()
    with locked(folder):
        assert complaint("run", tiny_file, "--force", "-o", tmp_path / "runs") == (
            f"another process is at work on {folder}"
        )
        (folder / "done").unlink()
        assert complaint("resume", folder) == f"another process is at work on {folder}"


# In a process of its own


def test_ctrl_c_prints_how_to_go_on_and_it_works(
    tiny_file: Path, tmp_path: Path, command: list[str], spawn: Any, wait_for: Any
) -> None:
    out = tmp_path / "a folder [with] a name so long that a terminal of eighty columns would break it in two"
    words = ["run", str(tiny_file), "algorithm=slow", "algorithm.pause=0.1", "rounds=5", "-o", str(out)]
    process = spawn([*command, *words])
    wait_for(lambda: process.poll() is not None or any(path.stat().st_size for path in out.glob("*/metrics.jsonl")))
    process.send_signal(signal.SIGINT)
    shown, told = process.communicate()
    assert process.returncode == 130, told
    assert "Traceback" not in told and not ANSI.search(shown + told)
    (folder,) = out.iterdir()
    rounds = Run(folder).rounds
    assert 1 <= rounds < 5 and not Run(folder).done
    assert told == f"stopped after round {rounds}; go on with: fedfa resume '{folder}'\n"
    program, *again = shlex.split(told.partition("go on with: ")[2])
    assert program == "fedfa"
    lines = output(*again)
    assert f"from round {rounds}; results in {folder}" in lines[0]
    assert lines[-1] == f"results in {folder}"
    straight = fedfa.run(folder / "experiment.toml", root=tmp_path / "straight", **{"algorithm.pause": 0.0})
    assert [line["test"] for line in Run(folder).metrics] == [line["test"] for line in straight.metrics]


def test_a_mistake_in_a_process_of_its_own(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fedfa", "run", "digit-sites", "rouns=3"],
        capture_output=True, text=True, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "fedfa: unknown key 'rouns'; did you mean 'rounds'?\n"


@pytest.mark.parametrize("ci", ["", "true"])
def test_a_terminal_shows_progress(tiny_file: Path, tmp_path: Path, command: list[str], spawn: Any, ci: str) -> None:
    """The live display on a real pseudo-terminal, which no other test of the command sees; plain lines in CI."""
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40", "OMP_NUM_THREADS": "1", "CI": ci}
    words = ["run", str(tiny_file), "-o", str(tmp_path / "runs")]
    process = spawn([*command, *words], stdout=theirs, stderr=theirs, stdin=theirs, env=environment)
    os.close(theirs)
    shown = b""
    while True:
        try:
            data = os.read(ours, 4096)
        except OSError:  # Linux: the other end is closed
            break
        if not data:
            break
        shown += data
    os.close(ours)
    text = shown.decode()
    assert process.wait() == 0, text
    assert "Traceback" not in text and bool(ANSI.search(text)) is not bool(ci)
    assert "north" in text and "3/3" in text and "fedavg: test accuracy " in text


@pytest.mark.parametrize("words", [["list"], ["show", "digit-sites"], ["--help"]])
def test_a_reader_that_goes_away(words: list[str]) -> None:
    """Such as `fedfa list | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "fedfa", *words], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
        )
    finally:
        os.close(writer)
    assert done.stderr == ""
    assert done.returncode in (0, 1)


def test_head_gets_its_line() -> None:
    line = f"{shlex.quote(sys.executable)} -m fedfa list | head -1"
    done = subprocess.run(line, shell=True, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("sources\n", "")
