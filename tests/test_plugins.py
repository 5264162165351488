"""Methods from outside the package: an installed package's entry point, and a registry call."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import fedfa
from fedfa import Algorithm, UserError
from fedfa.engines.client import Client
from fedfa.registry import Registry

MODULE = '''
"""A package that knows fedfa, and that fedfa does not know."""
from dataclasses import dataclass

import torch
from fedfa import Algorithm
from fedfa.augmentation import Augmentation


@dataclass(frozen=True)
class Shrink(Algorithm):
    """FedAvg whose clients send a part of their model."""

    by: float = 0.5

    def end(self, client):
        with torch.no_grad():
            for parameter in client.model.parameters():
                parameter.mul_(self.by)


@dataclass(frozen=True)
class Quiet(Augmentation):
    def mix(self, batch, draws, streams):
        return batch
'''
ENTRY_POINTS = """[fedfa.algorithms]
shrink = shrinking:Shrink
fedavg = shrinking:Shrink
gone = shrinking:Gone

[fedfa.augmentations]
quiet = shrinking:Quiet
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder like a site-packages with a package in it, as pip lays it out."""
    folder = tmp_path / "site"
    info = folder / "shrinking-1.2.dist-info"
    info.mkdir(parents=True)
    (folder / "shrinking.py").write_text(MODULE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shrinking\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


def fedfa_command(
    command: Sequence[str], installed: Path, words: Sequence[str], folder: Path
) -> subprocess.CompletedProcess[str]:
    found = os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": found, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, *words], capture_output=True, text=True, env=environment, cwd=folder, check=False)


def test_an_entry_point_runs_resumes_and_is_listed(
    installed: Path, command: list[str], tiny_file: Path, tmp_path: Path
) -> None:
    listed = fedfa_command(command, installed, ["list"], tmp_path)
    assert "shrink " in listed.stdout and "from shrinking 1.2" in listed.stdout
    assert "(shrinking 1.2 has one of this name too, which is not used)" in listed.stdout

    words = ["run", str(tiny_file), "algorithm=shrink", "algorithm.by=0.25", "augmentation=quiet", "rounds=2"]
    ran = fedfa_command(command, installed, words, tmp_path)
    assert ran.returncode == 0, ran.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    noted = json.loads((folder / "provenance.json").read_text())["plugins"]
    assert noted == {"algorithm shrink": "shrinking 1.2", "augmentation quiet": "shrinking 1.2"}

    (folder / "done").unlink()
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    for checkpoint in folder.glob("checkpoints/*"):
        checkpoint.unlink()
    resumed = fedfa_command(command, installed, ["resume", str(folder)], tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    again = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["test"] for line in again] == [json.loads(line)["test"] for line in lines]


def test_what_a_package_names_and_does_not_have(
    installed: Path, command: list[str], tiny_file: Path, tmp_path: Path
) -> None:
    ran = fedfa_command(command, installed, ["run", str(tiny_file), "algorithm=gone"], tmp_path)
    assert ran.returncode == 2 and len(ran.stderr.splitlines()) == 1
    assert "algorithm 'gone' cannot be had from shrinking 1.2" in ran.stderr
    unknown = fedfa_command(command, installed, ["run", str(tiny_file), "algorithm=shrik"], tmp_path)
    assert "did you mean 'shrink'?" in unknown.stderr
    words = ["run", str(tiny_file), "algorithm=shrink", "algorithm.bye=1"]
    settings = fedfa_command(command, installed, words, tmp_path)
    assert "algorithm 'shrink' has no setting 'bye'; did you mean 'by'?" in settings.stderr


def test_a_package_that_is_gone_again(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(installed))
    registry: Registry[object] = Registry("algorithm", {})
    assert "shrink" in registry and len(registry) == 3
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"^algorithm 'shrink' cannot be had from shrinking 1.2: No module named"):
        registry.find("shrink")


def test_a_registry_call(tiny: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What docs/algorithms.md shows."""

    @dataclass(frozen=True)
    class Frozen(Algorithm):
        """Clients send back what they got."""

        def end(self, client: Client) -> None:
            client.slot.load(client.received)

    for name in ("_targets", "_lines"):
        monkeypatch.setattr(fedfa.ALGORITHMS, name, dict(getattr(fedfa.ALGORITHMS, name)))
    fedfa.ALGORITHMS.register("frozen", Frozen, "clients send back what they got")
    run = fedfa.run(tiny, root=tmp_path, algorithm="frozen", rounds=2)
    last = run.latest()
    assert last is not None
    start = fedfa.run(tiny, root=tmp_path, algorithm="frozen", rounds=1).latest()
    assert start is not None
    assert all(torch.equal(last[0].model[name], tensor) for name, tensor in start[0].model.items())
