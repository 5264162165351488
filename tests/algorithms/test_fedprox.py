"""FedProx by hand."""

from __future__ import annotations

from pathlib import Path

from fedfa.engines.client import Local
from playing import TWO, algorithm, steps_by_hand


def test_second_step_is_pulled_back(tmp_path: Path) -> None:
    """From w_t = 0 at rate ½ and μ = ½. Step 1 has w = w_t: a 0.5, b 1.5, as FedAvg. Step 2:
    a: g = (0.5 − 1) + ½·0.5 = −0.25, w = 0.625;  b: g = (1.5 − 3) + ½·1.5 = −0.75, w = 1.875;  mean 1.25.
    FedAvg: a 0.75, b 2.25, mean 1.5. Without the square (gradient μ/2·1 = ¼) b would end at 2.125, mean 1.375."""
    local = Local(epochs=2, batch_size=1, lr=0.5)
    assert steps_by_hand(algorithm("fedprox", mu=0.5), TWO, tmp_path, local=local) == [1.25]
    assert steps_by_hand(algorithm("fedavg"), TWO, tmp_path, local=local) == [1.5]


def test_anchor_is_this_rounds_model(tmp_path: Path) -> None:
    """Round 2 from w_t = 1.25, not from 0. a: 1.25 − ½·0.25 = 1.125, then g = 0.125 + ½·(−0.125) = 0.0625: 1.09375.
    b: 1.25 + ½·1.75 = 2.125, then g = −0.875 + ½·0.875 = −0.4375: 2.34375. Mean 1.71875."""
    local = Local(epochs=2, batch_size=1, lr=0.5)
    assert steps_by_hand(algorithm("fedprox", mu=0.5), TWO, tmp_path, local=local, rounds=2) == [1.71875]
