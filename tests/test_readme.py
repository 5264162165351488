"""The README's examples run as they stand."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import fedfa
from fedfa.experiment import load, parse_overrides

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
COMMANDS = re.findall(r"^    fedfa (run|show) (.*?)(?:  +#.*)?$", README, flags=re.MULTILINE)


def test_there_are_examples() -> None:
    assert len(BLOCKS) == 2 and len(COMMANDS) >= 3


@pytest.mark.parametrize("block", BLOCKS)
def test_python(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(block.replace("rounds=20", "rounds=1"), "README.md", "exec"), {})


def test_a_method_of_your_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of docs/algorithms.md."""
    text = (Path(__file__).parents[1] / "docs" / "algorithms.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    for name in ("_targets", "_lines"):
        monkeypatch.setattr(fedfa.ALGORITHMS, name, dict(getattr(fedfa.ALGORITHMS, name)))
    exec(compile(block.replace("rounds=5", "rounds=1"), "algorithms.md", "exec"), {"__name__": __name__})
    (run,) = (tmp_path / "runs").iterdir()
    assert "signed-sgd" in run.name


@pytest.mark.parametrize(("command", "words"), COMMANDS)
def test_experiments_on_the_command_line(command: str, words: str) -> None:
    name, *overrides = shlex.split(words)
    load("digit-sites" if name == "my.toml" else name, parse_overrides(overrides))


def test_ffa_example_is_ten_lines() -> None:
    assert len([line for line in BLOCKS[0].splitlines() if line.strip()]) <= 10
