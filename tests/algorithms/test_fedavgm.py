"""FedAvgM by hand."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from playing import TWO, algorithm, play, steps_by_hand, uneven


def test_three_rounds_by_hand(tmp_path: Path) -> None:
    """avg = (w + 2)/2. Round 1, w = 0: avg = 1, w⁺ = 1 − ½·0 = 1, v = 0 + (0 − 1) = −1.
    Round 2: avg = 1.5, w⁺ = 1.5 + ½·1 = 2, v = −½ + (1 − 1.5) = −1.
    Round 3: avg = 2, w⁺ = 2 + ½·1 = 2.5. FedAvg: 1, 1.5, 1.75."""
    found = [steps_by_hand(algorithm("fedavgm", beta=0.5), TWO, tmp_path, rounds=r)[0] for r in (1, 2, 3)]
    assert found == [1.0, 2.0, 2.5]
    assert [steps_by_hand(algorithm("fedavg"), TWO, tmp_path, rounds=r)[0] for r in (1, 2, 3)] == [1.0, 1.5, 1.75]


def test_momentum_is_the_parameters_alone(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(36, 3))
    server = play(algorithm("fedavgm"), model, uneven(), tmp_path, rounds=2).server
    assert sorted(name.partition("/")[2] for name in server.memory) == sorted(n for n, _ in model.named_parameters())
