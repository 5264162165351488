"""Flower and the sequential engine give the same bits, for every algorithm: only the transport differs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hospitals import federate

import fedfa
from fedfa import Run
from fedfa.algorithms import ALGORITHMS

OWN = {
    "fedfa": {"algorithm.statistics": "kept"},
    "fedbn": {"algorithm.share_average": True, "held_out": "west"},
    "fedprox": {"optimizer": "adam", "optimizer_state": "kept", "weighting": "samples"},
    "fedmix": {"participation": 0.6},
    "fedavg": {"transforms": ["flip"], "augmentation": "mixstyle", "lr_decay": 0.9},
}
"""Settings besides the defaults, so that everything a site may keep or send is tried by some algorithm."""


@pytest.mark.parametrize("algorithm", [*list(ALGORITHMS)[:18], "hoard", "private"])
def test_the_same_bits_as_sequential(
    algorithm: str, tiny: dict[str, Any], tmp_path: Path, assert_same: Callable[[Run, Run], None]
) -> None:
    experiment = fedfa.load(
        tiny, {"algorithm": algorithm, "rounds": 2, "checkpoint_every": 1, **OWN.get(algorithm, {})}
    )
    alone = fedfa.run(experiment, root=tmp_path / "alone")
    together = federate(tmp_path, experiment.model_dump())
    assert_same(alone, together)
    assert together.provenance["engine"] == "flower"
