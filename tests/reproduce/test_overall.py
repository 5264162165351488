"""How a table's runs go: bars in a terminal, lines elsewhere, and the time that is left."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

import fedfa
from fedfa import UserError
from fedfa.engines.base import Score
from fedfa.reproduce import progress
from fedfa.reproduce.progress import Overall, duration
from fedfa.server import Evaluation, Record


def record(round: int) -> Record:
    return Record(round, ["north"], 0.5, test=Evaluation({"north": Score(0.25, 1.0, 4)}, 0.25))


@pytest.fixture
def experiments(tiny: dict[str, Any]) -> list[fedfa.Experiment]:
    return [fedfa.load(tiny, {"seed": seed}) for seed in range(3)]


def labels(experiments: list[fedfa.Experiment]) -> dict[str, str]:
    return {experiment.title: f"FedAvg, seed {experiment.seed}" for experiment in experiments}


def test_lines(
    experiments: list[fedfa.Experiment], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with Overall(labels(experiments), 9) as overall:
        watcher = overall.watch(experiments[0])
        watcher.run_started(None, 1)  # it goes on after round 1
        assert overall.left() == ""
        now[0] += 10
        watcher.round_done(record(2))
        watcher.round_done(record(3))  # too soon for another line
        watcher.noticed("a notice")
        watcher.noticed("a notice")
        overall.ended(experiments[0], None)
        overall.ended(experiments[1], None)  # it was complete already: three rounds less to play
        now[0] += 10
        assert overall.left() == "about 30 s left"
        overall.ended(experiments[2], UserError("no data"))
    told = capsys.readouterr()
    assert told.out == "runs 0/3, rounds 2/9; FedAvg, seed 0: round 2/3, test 25.0 %\n", "the first round tells nothing"
    assert told.err == "a notice\nFedAvg, seed 2: no data\n"


def test_quiet(experiments: list[fedfa.Experiment], capsys: pytest.CaptureFixture[str]) -> None:
    with Overall(labels(experiments), 9, quiet=True) as overall:
        watcher = overall.watch(experiments[0])
        watcher.run_started(None, 0)
        watcher.round_done(record(1))
    assert capsys.readouterr().out == ""


def test_bars(experiments: list[fedfa.Experiment], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    file = io.StringIO()
    monkeypatch.setattr(progress, "console", Console(file=file, force_terminal=True, width=120))
    with Overall(labels(experiments), 9) as overall:
        watcher = overall.watch(experiments[0])
        watcher.run_started(None, 0)
        for number in (1, 2, 3):
            watcher.round_done(record(number))
        watcher.noticed("[a notice]")
        overall.ended(experiments[0], None)
    shown = file.getvalue()
    assert "runs 1/3" in shown and "FedAvg, seed 0" in shown and "[a notice]" in shown and "left" in shown


def test_durations() -> None:
    assert [duration(seconds) for seconds in (5, 89, 100, 5000, 9000)] == ["5 s", "89 s", "2 min", "83 min", "2.5 h"]
