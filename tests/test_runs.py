"""Run folders: what is in them, and what becomes of damage."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

import fedfa
from fedfa import Run, UserError
from fedfa.engines.base import Score
from fedfa.files import locked, write_tensors, write_text
from fedfa.runs import find_run
from fedfa.server import Evaluation, Record, Watcher
from fedfa.state import ServerState

Play = Callable[..., Run]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# The folder


def test_what_a_run_leaves_behind(play: Play, tmp_path: Path) -> None:
    run = play()
    assert run.folder == tmp_path / "runs" / run.experiment.title
    assert names(run.folder) == {
        ".lock", "experiment.toml", "provenance.json", "federation.json", "metrics.jsonl", "tensorboard", "checkpoints",
            "done",
    }  # fmt: skip
    assert names(run.folder / "checkpoints") == {"round-00003.safetensors", "best.safetensors"}
    assert fedfa.load(run.folder / "experiment.toml").title == run.experiment.title
    done = json.loads((run.folder / "done").read_text())
    assert done["rounds"] == 3 and done["seconds"] >= 0


def test_the_last_checkpoints_are_those_of_the_last_rounds(play: Play) -> None:
    """Also where names have more digits than others."""
    run = play()
    latest = run.latest()
    assert latest is not None
    for round in (99_990, 100_000, 100_010):
        run.checkpoint(replace(latest[0], round=round), None, keep=2)
    assert run.restarts() == [100_000, 100_010]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="open files are looked up in Linux's /proc")
def test_a_folder_is_free_again_though_a_child_has_its_lock_open(tmp_path: Path) -> None:
    """As one that another thread starts has it, until it becomes another program."""
    with locked(tmp_path) as ours:
        assert ours
        (own,) = [fd for fd in Path("/proc/self/fd").iterdir() if os.path.realpath(fd) == str(tmp_path / ".lock")]
        os.set_inheritable(int(own.name), True)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], close_fds=False)
    try:
        with locked(tmp_path) as ours:
            assert ours
    finally:
        child.kill()
        child.wait()


def test_private_tensors_are_kept_in_the_folder(play: Play) -> None:
    run = play(momentum=0.9, optimizer_state="kept")
    assert names(run.folder / "memory") == {"north", "south", "west"}
    assert names(run.folder / "memory" / "north") == {"2.safetensors", "3.safetensors"}


def test_a_line_a_round(play: Play) -> None:
    run = play(rounds=2)
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert lines == run.metrics and len(lines) == 2
    for number, line in enumerate(lines, start=1):
        assert line["round"] == number
        assert line["clients"] == ["north", "south", "west"]
        assert line["refused"] == {}
        assert 0 < line["loss"] < 5 and line["seconds"] > 0
        for split, size in (("val", 6), ("test", 8)):
            found = line[split]
            assert list(found["clients"]) == ["north", "south", "west"]
            assert all(
                (value * size).is_integer() for value in found["clients"].values()
            )  # an accuracy of `size` images
            assert found["mean"] == pytest.approx(sum(found["clients"].values()) / 3, abs=1e-12)
            assert found["unseen"] is None and found["gap"] is None
            assert all(loss > 0 for loss in found["losses"].values())


def test_bytes_are_the_model_s(play: Play) -> None:
    # 112 + 4 of the convolution, 4·4 floats and a 64-bit counter of BatchNorm, 195 of the output
    size = 4 * (112 + 16 + 195) + 8
    line = play(rounds=1).metrics[0]
    assert (line["bytes_down"], line["bytes_up"]) == (size, size)
    line = play(rounds=1, algorithm="fedfa").metrics[0]  # γ down, mean and std up: 2·4 floats each
    assert (line["bytes_down"], line["bytes_up"]) == (size + 32, size + 32)


def test_rounds_between_evaluations_have_no_scores_and_the_last_has(play: Play) -> None:
    lines = play(rounds=5, evaluate_every=2).metrics
    assert [("test" in line, "val" in line) for line in lines] == [
        (False, False), (True, True), (False, False), (True, True), (True, True),
    ]  # fmt: skip


def test_provenance(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/fedfa", "run", "tiny"])
    run = play()
    found = json.loads((run.folder / "provenance.json").read_text())
    assert found == run.provenance
    assert found["format"] == 1
    assert found["fedfa"] == fedfa.__version__ and found["torch"] == torch.__version__
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["command"] == ["fedfa", "run", "tiny"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", found["started"])
    assert found["threads"] == 1 and found["device"] == "cpu" and found["hardware"] == "CPU" and found["cores"] >= 1
    assert found["metric"] == "accuracy"
    assert found["samples"] == {"north": [14, 6, 8], "south": [10, 6, 8], "west": [7, 6, 8]}
    assert found["parameters"] == 112 + 8 + 195
    assert found["platform"] and found["numpy"]
    assert "resumed" not in found


def test_provenance_names_the_commit(play: Play) -> None:
    commit = play(rounds=1).provenance["commit"]
    here = Path(fedfa.__file__).parent
    git = subprocess.run(["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    assert (commit or "").removesuffix("+") == git.stdout.strip()


def test_a_copy_of_the_code_is_told_its_commit(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDFA_COMMIT", "abc123")
    assert play(rounds=1).provenance["commit"] == "abc123"


# The same call again


class Counter(Watcher):
    def __init__(self) -> None:
        self.trained: list[str] = []
        self.started: list[int] = []

    def run_started(self, run: Run, round: int) -> None:
        self.started.append(round)

    def client_done(self, client: str, loss: Any, refused: str | None) -> None:
        self.trained.append(client)


def test_a_complete_run_is_returned_as_it_is(play: Play) -> None:
    first = play()
    before = {path: path.stat().st_mtime_ns for path in first.folder.rglob("*")}
    counter = Counter()
    second = play(watcher=counter)
    assert second.folder == first.folder and second.metrics == first.metrics
    assert counter.trained == [] and counter.started == []
    assert {path: path.stat().st_mtime_ns for path in first.folder.rglob("*")} == before
    assert fedfa.resume(first.folder).metrics == first.metrics


def test_another_setting_is_another_run(play: Play, tmp_path: Path) -> None:
    assert play().folder != play(lr=0.06).folder
    assert len(names(tmp_path / "runs")) == 2


def test_force_starts_anew(play: Play) -> None:
    first = play()
    (first.folder / "notes.txt").write_text("of the old run")
    counter = Counter()
    second = play(force=True, watcher=counter)
    assert counter.started == [0] and len(counter.trained) == 9
    assert second.folder == first.folder and "notes.txt" not in names(second.folder)
    assert [line["loss"] for line in second.metrics] == [line["loss"] for line in first.metrics]


def test_force_where_there_is_nothing_yet(play: Play) -> None:
    assert play(force=True).done


def test_force_deletes_nothing_if_the_new_run_cannot_be_built(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    first = play()

    def broken(*_: Any) -> None:
        raise UserError("no such data here")

    monkeypatch.setattr(fedfa.SOURCES["tiny"], "build", broken)
    with pytest.raises(UserError, match="no such data here"):
        play(force=True)
    assert Run(first.folder).metrics == first.metrics


def test_force_starts_anew_over_a_damaged_folder(play: Play) -> None:
    first = play()
    (first.folder / "provenance.json").write_text("{")
    with pytest.raises(UserError, match=r"cannot be read: Expecting property name"):
        play()
    assert play(force=True).done


# What is not a run


def test_what_is_not_a_run(tmp_path: Path, play: Play) -> None:
    with pytest.raises(UserError, match=rf"^no run at {tmp_path / 'x'}$"):
        find_run(tmp_path / "x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"is not a run: it has no experiment.toml"):
        fedfa.resume(tmp_path / "empty")
    run = play(rounds=1)
    with pytest.raises(UserError, match=rf"^{tmp_path / 'runs'} holds 1 runs; name one, such as {run.folder}$"):
        fedfa.resume(tmp_path / "runs")
    with pytest.raises(UserError, match="is not a run"):
        find_run(run.folder / "metrics.jsonl")


@pytest.mark.parametrize("content", ["", "{", "\x00"])
def test_damaged_provenance(play: Play, content: str) -> None:
    run = play(rounds=1)
    (run.folder / "provenance.json").write_text(content)
    with pytest.raises(UserError, match=r"cannot be read: "):
        find_run(run.folder)
    (run.folder / "provenance.json").unlink()
    with pytest.raises(UserError, match=r"cannot be read: .*No such file"):
        find_run(run.folder)


def test_a_folder_that_was_never_whole_is_started_anew(play: Play, tmp_path: Path, tiny: dict[str, Any]) -> None:
    """A crash between provenance and config: the config is written last."""
    folder = tmp_path / "runs" / fedfa.load(tiny).title
    folder.mkdir(parents=True)
    (folder / "provenance.json").write_text("{")
    assert play().rounds == 3


def test_a_root_that_is_a_file(tmp_path: Path, tiny: dict[str, Any]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"^cannot write to .*/file/tiny-.*: Not a directory$"):
        fedfa.run(tiny, root=tmp_path / "file")
    assert names(tmp_path) == {"file"}


def test_a_run_that_cannot_be_built_leaves_no_folder(play: Play, tmp_path: Path) -> None:
    with pytest.raises(UserError):
        play(held_out="nobody")
    assert not (tmp_path / "runs").exists()


# A metrics file that was cut off


def test_metrics_cut_off_anywhere_are_the_whole_lines(play: Play) -> None:
    run = play(rounds=2)
    path = run.folder / "metrics.jsonl"
    data = path.read_bytes()
    lines, first = run.metrics, data.index(b"\n")
    for length in range(0, len(data) + 1, 7):
        path.write_bytes(data[:length])
        whole = 0 if length < first else 1 if length < len(data) - 1 else 2
        assert run.metrics == lines[:whole] and run.rounds == whole
    path.write_bytes(data[: first + 30] + b"\x00" * 50)  # what a power cut may leave
    assert run.metrics == lines[:1]
    path.unlink()
    assert run.metrics == [] and run.rounds == 0


def test_truncate_drops_later_rounds_and_what_was_cut_off(play: Play) -> None:
    run = play(rounds=3)
    lines = run.metrics
    with open(run.folder / "metrics.jsonl", "a") as file:
        file.write('{"round": 4, "lo')
    run.truncate(2)
    assert (run.folder / "metrics.jsonl").read_text().count("\n") == 2
    assert run.metrics == lines[:2]


def test_a_record_s_line() -> None:
    scores = {"a": Score(0.5, 1.0, 4), "b": Score(0.75, 0.5, 4), "c": Score(0.25, 2.0, 4)}
    found = Evaluation(scores, mean=0.625, unseen=0.25)
    line = Record(3, ["a", "b"], 0.1, {"b": "why"}, 10, 20, test=found).as_json()
    assert line == {
        "round": 3,
        "clients": ["a", "b"],
        "loss": 0.1,
        "refused": {"b": "why"},
        "bytes_down": 10,
        "bytes_up": 20,
        "test": {
            "mean": 0.625,
            "unseen": 0.25,
            "gap": 0.375,
            "clients": {"a": 0.5, "b": 0.75, "c": 0.25},
            "losses": {"a": 1.0, "b": 0.5, "c": 2.0},
        },
    }


# Checkpoints


@pytest.mark.parametrize(
    ("every", "keep", "wanted"), [(1, 2, [4, 5]), (2, 2, [4, 5]), (2, 9, [2, 4, 5]), (10, 2, [5]), (1, 1, [5])]
)
def test_the_last_few_checkpoints_are_kept(play: Play, every: int, keep: int, wanted: list[int]) -> None:
    run = play(rounds=5, checkpoint_every=every, keep_checkpoints=keep)
    assert run.restarts() == wanted
    assert names(run.folder / "checkpoints") == {f"round-{n:05d}.safetensors" for n in wanted} | {"best.safetensors"}


def test_a_checkpoint_holds_the_server_s_state(play: Play) -> None:
    run = play(algorithm="fedfa")
    latest = run.latest()
    assert latest is not None
    server, best = latest
    assert (server.round, server.population) == (3, 3)
    assert best == max(line["val"]["mean"] for line in run.metrics)
    assert {
        "stage.0.weight",
        "stage.1.running_mean",
        "stage.1.num_batches_tracked",
        "head.3.bias",
    } <= server.model.keys()
    assert server.memory.keys() == {"augments.0.gamma_mean", "augments.0.gamma_std"}
    assert server.centres.keys() == {"augments.0.mean", "augments.0.std"}
    # 14, 10 and 7 samples are 4, 3 and 2 batches: 3 a round on average
    assert server.model["stage.1.num_batches_tracked"].item() == 9
    file = load_file(run.folder / "checkpoints" / "round-00003.safetensors")
    assert torch.equal(file["model/head.3.bias"], server.model["head.3.bias"])


class States(Watcher):
    """Copies of the checkpoint after every round."""

    def __init__(self) -> None:
        self.run: Run | None = None
        self.states: dict[int, ServerState] = {}

    def run_started(self, run: Run, round: int) -> None:
        self.run = run

    def round_started(self, round: int, clients: Any) -> None:
        assert self.run is not None
        latest = self.run.latest()
        if latest is not None:
            self.states[latest[0].round] = latest[0]


def test_best_is_the_state_after_the_round_that_did_best_on_validation_data(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    means = [0.2, 0.5, 0.1, 0.5, 0.4, 0.3]

    def scripted(server: ServerState, *_: Any) -> dict[str, Evaluation]:
        return {"val": Evaluation({}, means[server.round - 1]), "test": Evaluation({}, 0.9)}

    monkeypatch.setattr("fedfa.server.evaluate", scripted)
    states = States()
    run = play(rounds=6, checkpoint_every=1, watcher=states)
    best = run.best()
    assert best is not None and best.round == 2  # the first of equals
    wanted = states.states[2].model
    assert all(torch.equal(best.model[name], tensor) for name, tensor in wanted.items())
    assert not torch.equal(best.model["head.3.bias"], states.states[5].model["head.3.bias"])
    latest = run.latest()
    assert latest is not None and latest[1] == 0.5


def test_a_run_without_validation_data_has_no_best(play: Play) -> None:
    run = play(**{"source.val": 0})
    assert run.best() is None and run.done
    assert all("val" not in line and "test" in line for line in run.metrics)


DAMAGE = {"empty": lambda data: b"", "cut": lambda data: data[: len(data) // 2], "noise": lambda data: b"\x00" * 64}


def test_a_damaged_mark_of_completion_hides_no_lost_rounds(play: Play) -> None:
    run = play(rounds=3)
    (run.folder / "done").write_text("")
    assert find_run(run.folder).done, "all of its rounds are there"
    lines = (run.folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    for kept in (lines[:1], lines[1:], [lines[0], *lines], lines[::-1], [*lines[:2], lines[2].replace("3", '"x"', 1)]):
        (run.folder / "metrics.jsonl").write_text("".join(kept))
        with pytest.raises(UserError, match="is marked as complete with 3 rounds, and its metrics"):
            find_run(run.folder)


def test_a_full_disk_is_an_error_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensors: Any, part: Path, meta: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_tensors(tmp_path / "y.safetensors", {"a": torch.zeros(2)})
    assert caught.value.errno == errno.ENOSPC and caught.value.filename.endswith("y.safetensors")


class Told(Watcher):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def noticed(self, line: str) -> None:
        self.lines.append(line)


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9, "optimizer_state": "kept"}], ids=["fresh", "kept"])
def test_a_damaged_checkpoint_is_passed_over(
    play: Play, assert_same: Callable[[Run, Run], None], kind: str, settings: dict[str, Any]
) -> None:
    settings = {"rounds": 6, "checkpoint_every": 2, **settings}
    straight = play("straight", **settings)
    run = play(**settings)
    path = run.folder / "checkpoints" / "round-00006.safetensors"
    for damaged, start in (([6], 4), ([4, 6], 0)):
        (run.folder / "done").unlink()
        for round in damaged:
            file = path.with_name(f"round-{round:05d}.safetensors")
            file.write_bytes(DAMAGE[kind](file.read_bytes()))
        told = Told()
        assert_same(fedfa.resume(run.folder, watcher=told), straight)
        assert Run(run.folder).provenance["resumed"][-1]["round"] == start
        assert len(told.lines) == len(damaged)
        assert re.fullmatch(rf"{path} is damaged \(.+\): it is passed over, and what .* is played again", told.lines[0])


@pytest.mark.parametrize("line", ['{"x": 1}', None], ids=["another", "missing"])
def test_records_that_cannot_be_read_are_kept_aside_and_played_again(
    play: Play, assert_same: Callable[[Run, Run], None], line: str | None
) -> None:
    straight = play("straight", rounds=6, checkpoint_every=2, keep_checkpoints=9)
    run = play(rounds=6, checkpoint_every=2, keep_checkpoints=9)
    (run.folder / "done").unlink()
    path = run.folder / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], *([line] if line else []), *lines[3:]]) + "\n")
    before = path.read_text()
    assert run.rounds == len(run.metrics) == 2
    told = Told()
    assert_same(fedfa.resume(run.folder, watcher=told), straight)
    assert Run(run.folder).provenance["resumed"][-1]["round"] == 2
    assert [re.sub(r".*/", "", line) for line in told.lines] == [
        f"metrics.jsonl cannot be read beyond round 2, and round-0000{round}.safetensors is later: "
        "it is passed over, and what came after the one before it is played again"
        for round in (6, 4)
    ]
    assert (run.folder / "metrics.damaged.jsonl").read_text() == before


def test_a_damaged_checkpoint_does_not_push_out_a_whole_one(play: Play) -> None:
    """It would be among the last few that are kept, until its round is played."""

    class Stop(Watcher):
        def round_started(self, round: int, clients: Any) -> None:
            if round == 4:
                raise KeyboardInterrupt

    run = play(rounds=4, checkpoint_every=1, keep_checkpoints=2)
    (run.folder / "done").unlink()
    (run.folder / "checkpoints" / "round-00004.safetensors").write_bytes(b"")
    (run.folder / "checkpoints" / "round-00003.safetensors").write_bytes(b"")
    with pytest.raises(KeyboardInterrupt):
        fedfa.resume(run.folder, watcher=Stop())
    latest = run.latest()
    assert latest is not None and latest[0].round == 3


def test_a_checkpoint_that_cannot_be_read_now_is_not_given_up(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    run = play(rounds=2, checkpoint_every=1)
    (run.folder / "done").unlink()

    def refused(path: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("fedfa.runs.read_tensors", refused)
    with pytest.raises(UserError, match=r"round-00002.safetensors cannot be read: .*Input/output error"):
        fedfa.resume(run.folder)
    assert run.rounds == 2 and run.restarts() == [1, 2]


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9, "optimizer_state": "kept"}], ids=["fresh", "kept"])
def test_after_deleting_a_damaged_checkpoint_the_numbers_are_the_same(
    play: Play, assert_same: Callable[[Run, Run], None], settings: dict[str, Any]
) -> None:
    settings = {"rounds": 6, "checkpoint_every": 2, **settings}
    straight = play("straight", **settings)
    run = play(**settings)
    (run.folder / "done").unlink()
    (run.folder / "checkpoints" / "round-00006.safetensors").unlink()
    assert_same(fedfa.resume(run.folder), straight)
    (run.folder / "done").unlink()
    for path in (run.folder / "checkpoints").iterdir():
        path.unlink()
    assert_same(fedfa.resume(run.folder), straight)
    assert [note["round"] for note in Run(run.folder).provenance["resumed"]] == [4, 0]


# One process at a time


HOLD = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_that_another_process_works_on(play: Play, spawn: Any, force: bool) -> None:
    run = play()
    (run.folder / "done").unlink()
    holder = spawn([sys.executable, "-c", HOLD, str(run.folder / ".lock")], stdin=subprocess.PIPE)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(UserError, match=rf"^another process is at work on {run.folder}$"):
        play(force=force)
    assert run.metrics and run.latest() is not None
    holder.stdin.close()
    holder.wait()
    assert play(force=force).done


def test_a_lock_ends_with_its_block(tmp_path: Path) -> None:
    with locked(tmp_path) as first, locked(tmp_path) as second:
        assert first and not second
    with locked(tmp_path) as third:
        assert third


def test_a_file_system_without_locks_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(tmp_path) as ours:
        assert ours


# Files


def test_a_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "file"
    write_text(path, "old")
    with monkeypatch.context() as patch:
        patch.setattr("fedfa.files.os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            write_text(path, "new")
    assert path.read_bytes() == b"old"
    write_text(path, "new")
    assert path.read_bytes() == b"new" and path in path.parent.iterdir()


def test_a_checkpoint_without_its_records_is_not_gone_back_to(play: Callable[..., Run], tmp_path: Path) -> None:
    """As after a power cut that took the end of metrics.jsonl: rounds are played again, and none is missing."""
    whole = play(rounds=6, checkpoint_every=2)
    numbers = [line["loss"] for line in whole.metrics]
    path = whole.folder / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:5]))
    (whole.folder / "done").unlink()
    again = fedfa.resume(whole.folder)
    assert [line["round"] for line in again.metrics] == [1, 2, 3, 4, 5, 6]
    assert [line["loss"] for line in again.metrics] == numbers


def test_numbers_that_are_not_finite_are_null(play: Callable[..., Run]) -> None:
    run = play(lr=1e30, rounds=2)
    text = (run.folder / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    assert run.metrics[-1]["refused"]


def test_a_report_needs_no_registry(hand_made: Callable[..., Run]) -> None:
    run = hand_made("one", [{"a": 0.5}])
    config = run.folder / "experiment.toml"
    config.write_text(config.read_text().replace('"fedavg"', '"somebodys-own"'))
    assert "somebodys-own" in str(fedfa.compare(run.folder))
