"""FedDyn by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fedfa.engines.client import Local
from playing import THREE, Line, Squares, algorithm, play, poisoned, steps_by_hand, uneven, weights


def test_two_rounds_by_hand(tmp_path: Path) -> None:
    """α = ½, rate ½; a makes two steps, b one. Round 1 from 0, ∇ᵢ = h = 0:
    a: g = −1, w = 0.5; g = −0.5 + ½·0.5 = −0.25, w = 0.625;  b: w = 1.5;  mean 1.0625.
    ∇_a = −½·0.625 = −0.3125, ∇_b = −0.75, h = −½·1.0625 = −0.53125, w = 1.0625 + 0.53125/½ = 2.125.
    Round 2 from 2.125: a: g = 1.125 + 0.3125 = 1.4375, w = 1.40625;
    g = 0.40625 + 0.3125 + ½·(1.40625 − 2.125) = 0.359375, w = 1.2265625;
    b: g = −0.875 + 0.75 = −0.125, w = 2.1875;  mean 1.70703125.
    h = −0.53125 − ½·(1.70703125 − 2.125) = −0.322265625, w = 1.70703125 + 0.64453125 = 2.3515625.
    FedAvg: 1.125 and 1.546875."""
    given, local = algorithm("feddyn", alpha=0.5), Local(batch_size=1, lr=0.5)
    first = play(given, Line(0.0), THREE, tmp_path / "1", 1, local, Squares())
    assert weights(first) == [2.125]
    assert [first.kept(name)["dual/w0"].item() for name in "ab"] == [-0.3125, -0.75]
    assert first.server.memory["h/w0"].item() == -0.53125
    second = play(given, Line(0.0), THREE, tmp_path / "2", 2, local, Squares())
    assert weights(second) == [2.3515625]
    assert second.kept("a")["dual/w0"].item() == -0.3125 - 0.5 * (1.2265625 - 2.125)
    assert second.server.memory["h/w0"].item() == -0.322265625
    assert steps_by_hand(algorithm("fedavg"), THREE, tmp_path, rounds=2) == [1.546875]


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_h_is_the_mean_of_all_clients_duals(participation: float, tmp_path: Path) -> None:
    """h − α·(|S|/N)·mean(wᵢ − w_t) keeps h = (1/N)·Σ∇ᵢ where models weigh the same, also if a client was refused."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3, bias=False), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(36, 3))
    given = poisoned(algorithm("feddyn", alpha=0.5), "a", 2)
    played = play(given, model, uneven(), tmp_path, 4, participation=participation)
    if participation == 1.0:
        assert list(played.records[1].refused) == ["a"]
    assert {name.partition("/")[2] for name in played.server.memory} == {n for n, _ in model.named_parameters()}
    for name, h in played.server.memory.items():
        kept = [played.kept(client).get(name.replace("h/", "dual/"), torch.zeros_like(h)) for client in "abcd"]
        torch.testing.assert_close(h, torch.stack(kept).mean(0), rtol=1e-4, atol=1e-6)
        assert h.abs().max() > 1e-3
