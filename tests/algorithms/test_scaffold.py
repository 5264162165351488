"""SCAFFOLD by hand, and the identity that its variates keep."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fedfa.algorithms.base import Algorithm
from fedfa.engines.client import Local
from playing import THREE, Line, Played, Squares, algorithm, play, poisoned, steps_by_hand, uneven, weights


def by_hand(given: Algorithm, folder: Path, rounds: int, local: Local | None = None) -> Played:
    return play(given, Line(0.0), THREE, folder, rounds, local or Local(batch_size=1, lr=0.5), Squares())


def test_two_rounds_by_hand(tmp_path: Path) -> None:
    """Rate ½; a makes two steps, b one. Round 1, c = cᵢ = 0: a 0, 0.5, 0.75; b 1.5; mean 1.125.
    c_a = (0 − 0.75)/(2·½) = −0.75, c_b = (0 − 1.5)/(1·½) = −3, c = −1.875.
    Round 2: a steps along (w − 1) + 0.75 − 1.875 = w − 2.125: 1.125, 1.625, 1.875;
    b along (w − 3) + 3 − 1.875 = w − 1.875: 1.5; mean 1.6875. FedAvg: a 1.03125, b 2.0625, mean 1.546875.
    c_a = −0.75 + 1.875 + (1.125 − 1.875)/1 = 0.375, c_b = −3 + 1.875 + (1.125 − 1.5)/½ = −1.875, c = −0.75."""
    first = by_hand(algorithm("scaffold"), tmp_path / "1", 1)
    assert weights(first) == [1.125]
    assert [first.kept(name)["variate/w0"].item() for name in "ab"] == [-0.75, -3.0]
    assert first.server.memory["variate/w0"].item() == -1.875
    second = by_hand(algorithm("scaffold"), tmp_path / "2", 2)
    assert weights(second) == [1.6875]
    assert [second.kept(name)["variate/w0"].item() for name in "ab"] == [0.375, -1.875]
    assert second.server.memory["variate/w0"].item() == -0.75
    assert steps_by_hand(algorithm("fedavg"), THREE, tmp_path, rounds=2) == [1.546875]


def test_rate_is_this_rounds(tmp_path: Path) -> None:
    """The same with a rate of ¼ in round 2. a: 1.125 + ¼·1 = 1.375, + ¼·0.75 = 1.5625;
    c_a = −0.75 + 1.875 + (1.125 − 1.5625)/(2·¼) = 0.25.
    b: 1.125 + ¼·0.75 = 1.3125, c_b = −3 + 1.875 + (1.125 − 1.3125)/¼ = −1.875; c = (0.25 − 1.875)/2 = −0.8125."""
    played = by_hand(algorithm("scaffold"), tmp_path, 2, Local(batch_size=1, lr=0.5, lr_decay=0.5))
    assert weights(played) == [1.4375]
    assert [played.kept(name)["variate/w0"].item() for name in "ab"] == [0.25, -1.875]
    assert played.server.memory["variate/w0"].item() == -0.8125


def test_server_rate(tmp_path: Path) -> None:
    """w ← 0 + 2·(1.125 − 0); the variates know nothing of it."""
    played = by_hand(algorithm("scaffold", server_rate=2.0), tmp_path, 1)
    assert weights(played) == [2.25]
    assert played.server.memory["variate/w0"].item() == -1.875


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_server_variate_is_the_mean_of_all_clients(participation: float, weighting: str, tmp_path: Path) -> None:
    """c + (|S|/N)·mean(Δcᵢ) keeps c = (1/N)·Σcᵢ over all N, those that never took part counting with 0, whatever the
    models weigh, and also where a client was refused."""
    given = poisoned(algorithm("scaffold"), "a", 2)
    played = play(given, network(), uneven(), tmp_path, 4, participation=participation, weighting=weighting)
    if participation == 1.0:
        assert list(played.records[1].refused) == ["a"]
    for name, variate in played.server.memory.items():
        kept = [played.kept(client).get(name, torch.zeros_like(variate)) for client in "abcd"]
        torch.testing.assert_close(variate, torch.stack(kept).mean(0), rtol=1e-4, atol=1e-6)
        assert variate.abs().max() > 1e-3 or name.endswith("0.bias")  # BatchNorm takes that one's gradient away


def test_first_round_is_fedavg_and_parameters_alone_have_variates(tmp_path: Path) -> None:
    ours = play(algorithm("scaffold"), network(), uneven(), tmp_path / "a")
    plain = play(algorithm("fedavg"), network(), uneven(), tmp_path / "b")
    assert all(torch.equal(ours.model[name], plain.model[name]) for name in plain.model)
    assert {name.partition("/")[2] for name in ours.server.memory} == {n for n, _ in network().named_parameters()}
