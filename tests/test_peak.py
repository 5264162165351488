"""Peak memory: it rises with what is allocated, starts anew, and is on record."""

from __future__ import annotations

import mmap
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedfa import Run, peak
from fedfa.peak import Peak
from fedfa.task import Classification

CPU = torch.device("cpu")
RISING = """
import mmap, torch
from fedfa.peak import Peak
one = Peak(torch.device("cpu"))
held = mmap.mmap(-1, 64 << 20)
held.write(bytes(64 << 20))
high = one.read()
held.close()
print(high, Peak(torch.device("cpu")).read())
"""
"""In a process of its own, and by a mapping of its own: one that has freed much has room that it does not give back."""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux lets a process start its peak anew")
def test_the_peak_rises_and_starts_anew() -> None:
    if not peak.CLEAR.exists():
        pytest.skip("this kernel has no clear_refs")
    found = subprocess.run([sys.executable, "-c", RISING], capture_output=True, text=True, check=True)
    high, low = map(int, found.stdout.split())
    assert high - low > 48 << 20


def test_where_the_system_says_less(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peak, "STATUS", tmp_path / "none")
    monkeypatch.setattr(peak, "CLEAR", tmp_path / "no" / "place")
    found = Peak(CPU).read()
    assert found is not None and found > 10 << 20


def test_it_is_in_the_provenance(play: Callable[..., Run]) -> None:
    run = play()
    assert 10 << 20 < Run(run.folder).provenance["memory"] < 1 << 40


def test_training_is_told_from_evaluation(play: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the first evaluation, which here takes 256 MiB for itself."""
    plain = Classification.scores

    def hungry(self: Classification, output: Tensor, y: Tensor) -> Tensor:
        with mmap.mmap(-1, 256 << 20) as held:
            held.write(bytes(256 << 20))
        return plain(self, output, y)

    monkeypatch.setattr(Classification, "scores", hungry)
    found = Run(play(rounds=3, evaluate_every=2).folder).provenance
    assert found["memory"] - found["training_memory"] > 192 << 20
    assert "training_memory" not in Run(play(rounds=3, evaluate_every=1).folder).provenance
