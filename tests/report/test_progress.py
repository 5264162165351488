"""What a run shows while it goes on, in a terminal and in a pipe."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import fedfa
from fedfa import Run
from fedfa.report import progress
from fedfa.report.compare import compare
from fedfa.report.progress import Lively, Plain, print_comparison, watch

HandMade = Callable[..., Run]


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Console:
    """A terminal that remembers what was shown."""
    console = Console(record=True, force_terminal=True, width=140, height=50, file=io.StringIO(), color_system=None)
    monkeypatch.setattr(progress, "console", console)
    return console


def shown(screen: Console) -> str:
    """The last table and bar on the screen, which is drawn over and over."""
    text = screen.export_text()
    *_, last = re.finditer(r"client +samples", text)
    return text[last.start() :]


def row(text: str, name: str) -> list[str]:
    (line,) = (line for line in text.splitlines() if line.split()[:1] == [name])
    return line.split()


def test_a_terminal_shows_clients_losses_accuracy_and_rounds(
    screen: Console, tmp_path: Path, tiny: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    told: dict[str, float] = {}

    class Listening(Lively):
        def client_done(self, client: str, loss: Any, refused: str | None) -> None:
            super().client_done(client, loss, refused)
            told[client] = float(loss)

    with Listening() as watcher:
        run = fedfa.run(tiny, root=tmp_path, watcher=watcher)
    text = shown(screen)
    last = run.metrics[-1]
    assert row(text, "client") == ["client", "samples", "loss", "test", "accuracy", "curve"]
    for name, samples in (("north", "14"), ("south", "10"), ("west", "7")):
        found = row(text, name)
        assert found[:5] == [name, samples, f"{told[name]:.3f}", f"{100 * last['test']['clients'][name]:.1f}", "%"]
        assert len(found[5]) == 3  # a bar a round
    assert row(text, "mean")[:3] == ["mean", f"{last['loss']:.3f}", f"{100 * last['test']['mean']:.1f}"]
    assert row(text, "round")[:2] == ["round", "3/3"] and "clients 3/3" in text
    assert capsys.readouterr().out == (f"fedavg on tiny, 3 clients, tiny-net, seed 0, cpu; results in {run.folder}\n")


def test_a_terminal_shows_who_is_held_out_and_who_was_left_out(
    screen: Console, tmp_path: Path, tiny: dict[str, Any]
) -> None:
    with Lively() as watcher:
        fedfa.run(tiny, root=tmp_path, watcher=watcher, algorithm="poison", held_out="west")
    text = shown(screen)
    assert row(text, "south")[:5] == ["south", "3", "left", "out", "10"] and row(text, "south")[5] == "–"
    assert row(text, "west")[:5] == ["west", "(held", "out)", "7", "–"]
    assert "left out" not in " ".join(row(text, "north"))


def test_names_with_brackets_are_names(screen: Console, tmp_path: Path, tiny: dict[str, Any]) -> None:
    """Rich takes [red] for a colour and [/x] for a mistake."""
    names = ["[red]site", "a[/x]", "Zürich"]
    with Lively() as watcher:
        fedfa.run(tiny, root=tmp_path, watcher=watcher, **{"source.names": names})
    text = shown(screen)
    assert [row(text, name)[0] for name in names] == names


def test_many_clients_do_not_flood_the_screen(screen: Console, tmp_path: Path, tiny: dict[str, Any]) -> None:
    many = {"source.names": [f"site{n:02d}" for n in range(20)], "source.train": [4] * 20}
    with Lively() as watcher:
        fedfa.run(tiny, root=tmp_path, watcher=watcher, rounds=1, **many)
    text = shown(screen)
    assert "site11" in text and "site12" not in text and "… 8 more" in text


def test_a_resumed_run_goes_on_at_its_round(
    screen: Console, tmp_path: Path, tiny: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    class Stop(Plain):
        def round_started(self, round: int, clients: Any) -> None:
            if round == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedfa.run(tiny, root=tmp_path, watcher=Stop(), rounds=4)
    with Lively() as watcher:
        fedfa.run(tiny, root=tmp_path, watcher=watcher, rounds=4)
    assert ", cpu, from round 2; results in " in capsys.readouterr().out
    text = shown(screen)
    assert row(text, "round")[1] == "4/4" and len(row(text, "north")[5]) == 4  # bars of all four rounds


def test_a_screen_that_never_started_closes(screen: Console) -> None:
    with Lively():
        pass
    assert screen.export_text() == ""


# A pipe


def test_a_pipe_gets_the_first_and_the_last_round_and_bad_news(
    tmp_path: Path, tiny: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 1e9)
    run = fedfa.run(tiny, root=tmp_path, watcher=Plain(), rounds=4)
    lines = capsys.readouterr().out.splitlines()
    first, last = run.metrics[0], run.metrics[3]
    assert len(lines) == 3
    assert lines[0].startswith("fedavg on tiny, 3 clients, tiny-net, seed 0, cpu; results in /")
    assert lines[1].startswith(
        f"round 1/4  loss {first['loss']:.3f}  test {100 * first['test']['mean']:.1f} %  (north "
    )
    assert lines[2].startswith(f"round 4/4  loss {last['loss']:.3f}")
    scores = last["test"]["clients"]
    assert lines[2].endswith("(" + ", ".join(f"{name} {100 * value:.1f}" for name, value in scores.items()) + ")")


def test_a_pipe_gets_a_line_every_few_seconds(
    tmp_path: Path, tiny: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0)
    fedfa.run(tiny, root=tmp_path, watcher=Plain(), rounds=4)
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()[1:]] == ["1/4", "2/4", "3/4", "4/4"]


def test_a_pipe_gets_every_update_that_was_left_out(
    tmp_path: Path, tiny: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 1e9)
    fedfa.run(tiny, root=tmp_path, watcher=Plain(), algorithm="poison", rounds=3)
    lines = capsys.readouterr().out.splitlines()[1:]
    assert len(lines) == 3
    assert all(line.endswith("[south left out: stage.0.weight is not finite]") for line in lines)


# What came of it


def result_lines(play: Callable[[Any], Run], capsys: pytest.CaptureFixture[str]) -> list[str]:
    watch(play, quiet=True)
    return capsys.readouterr().out.splitlines()


def test_the_result(hand_made: HandMade, capsys: pytest.CaptureFixture[str]) -> None:
    run = hand_made("one", [{"a": 0.5, "b": 0.25}, {"a": 0.75, "b": 0.5}], [{"a": 0.9, "b": 0.9}, {"a": 0.1, "b": 0.1}])
    assert result_lines(lambda _: run, capsys) == [
        "fedavg: test accuracy 62.5 % after round 2; best by validation 37.5 % (round 1)",
        f"results in {run.folder}",
    ]


def test_the_result_with_held_out_clients_and_updates_left_out(
    hand_made: HandMade, capsys: pytest.CaptureFixture[str]
) -> None:
    run = hand_made("one", [{"a": 0.5, "b": 0.75}], unseen=["b"], refused=[{"a": "why"}], metric="dice")
    assert result_lines(lambda _: run, capsys) == [
        "fedavg: test dice 50.0 % after round 1, 75.0 % on unseen clients (gap -25.0)",
        "1 update was left out; metrics.jsonl says which and why",
        f"results in {run.folder}",
    ]


def test_a_run_that_is_complete_already_says_so(hand_made: HandMade, capsys: pytest.CaptureFixture[str]) -> None:
    run = hand_made("one", [{"a": 0.5}])
    watch(lambda _: run, quiet=False)
    assert capsys.readouterr().out.startswith("this run is complete already (1 rounds); `fedfa run … --force` starts")


def test_a_folder_with_brackets_and_spaces_is_printed_as_it_is(
    tmp_path: Path, tiny: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "my [bold]runs[/x]"

    def stopped(watcher: Any) -> Run:
        watcher.round_started = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        return fedfa.run(tiny, root=root, watcher=watcher)

    with pytest.raises(KeyboardInterrupt):
        watch(stopped, quiet=True)
    (folder,) = root.iterdir()
    assert capsys.readouterr().err == f"stopped after round 0; go on with: fedfa resume '{folder}'\n"
    watch(lambda watcher: fedfa.resume(folder, watcher), quiet=True)
    assert capsys.readouterr().out.splitlines()[-1] == f"results in {folder}"


# Comparisons


def test_a_comparison_in_a_terminal(hand_made: HandMade, screen: Console) -> None:
    one = hand_made("one", [{"a": 0.5, "[b]": 0.25}, {"a": 0.75, "[b]": 0.5}])
    two = hand_made("two", [{"a": 0.5, "[b]": 0.25}, {"a": 0.25, "[b]": 0.5}], seed=1)
    print_comparison(compare(one, two), None, None)
    lines = [line.split() for line in screen.export_text().splitlines()]
    assert lines[0][:2] == ["test", "accuracy,"]
    assert lines[1][:4] == ["run", "rounds", "a", "[b]"] and lines[1][-1] == "curve"
    assert lines[2][:6] == ["fedavg", "seed=0", "2", "75.0", "50.0", "62.5"] and lines[2][-1] == "▁█"
    assert lines[3][:6] == ["fedavg", "seed=1", "2", "25.0", "50.0", "37.5"] and lines[3][-1] == "▁▁"


def test_a_loss_may_be_a_tensor_of_any_device(screen: Console, hand_made: HandMade) -> None:
    with Lively() as watcher:
        watcher.run_started(hand_made("one", [{"a": 0.5}]), 0)
        watcher.round_started(1, ["a"])
        watcher.client_done("a", torch.tensor(0.25, dtype=torch.float64), None)
    assert row(shown(screen), "a")[:3] == ["a", "5", "0.250"]
