"""FedRobust by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fedfa.engines.client import Local
from playing import Line, Squares, algorithm, play, points, uneven, weights

SETTINGS = {"map_rate": 0.5, "shift_rate": 0.25, "map_penalty": 0.5, "shift_penalty": 1.0}


def test_two_steps_by_hand(tmp_path: Path) -> None:
    """One client, x = 1, y = 0, w = 1, rate ¼; the loss is ½(w(Λ + δ))², its slope in Λ and in δ is r·w, r = w(Λ + δ).

    Step 1: r·w = 1, no penalty yet: Λ = 1 + ½·1 = 1.5, δ = 0 + ¼·1 = 0.25, x' = 1.75.
            w: g = w·x'² = 3.0625, w = 1 − 0.765625 = 0.234375.
    Step 2: r·w = w²·1.75 = 0.096130371; penalties' slopes 2·½·0.5 = 0.5 and 2·1·0.25 = 0.5:
            Λ = 1.5 + ½(0.096130371 − 0.5) = 1.2980651855, δ = 0.25 + ¼(0.096130371 − 0.5) = 0.1490325928.
            x' = 1.4470977783, g = 0.234375·x'² = 0.4908028078, w = 0.234375 − ¼·0.4908028078 = 0.111674298.
    FedAvg: w = 1 − ¼ = 0.75, then 0.5625."""
    data = points(a=[([1.0], 0), ([1.0], 0)])
    local = Local(batch_size=1, lr=0.25)
    played = play(algorithm("fedrobust", **SETTINGS), Line(1.0), data, tmp_path, local=local, task=Squares())
    assert played.kept("a")["map"].shape == (1, 1) and played.kept("a")["shift"].shape == (1,)
    assert played.kept("a")["map"].item() == pytest.approx(1.2980651855, rel=1e-6)
    assert played.kept("a")["shift"].item() == pytest.approx(0.1490325928, rel=1e-6)
    assert weights(played) == pytest.approx([0.111674298], rel=1e-6)
    plain = play(algorithm("fedavg"), Line(1.0), data, tmp_path / "plain", local=local, task=Squares())
    assert weights(plain) == [0.5625]


def test_matrix_mixes_channels_by_rows(tmp_path: Path) -> None:
    """w = (1, 0), x = (0.6, 0.8), y = 0: r = 0.6, dℓ/dΛ = r·w·xᵀ has a first row of 0.36 and 0.48 and a second of 0."""
    data = points(a=[([0.6, 0.8], 0)])
    local = Local(batch_size=1, lr=0.25)
    played = play(algorithm("fedrobust", **SETTINGS), Line(1.0, 0.0), data, tmp_path, local=local, task=Squares())
    torch.testing.assert_close(played.kept("a")["map"], torch.tensor([[1.18, 0.24], [0.0, 1.0]]))
    torch.testing.assert_close(played.kept("a")["shift"], torch.tensor([0.15, 0.0]))


def test_ascent_goes_on_from_round_to_round(tmp_path: Path) -> None:
    """Two rounds of a step are the two steps by hand: Λ and δ are the client's memory, not the round's."""
    data = points(a=[([1.0], 0)])
    local = Local(batch_size=1, lr=0.25)
    given = algorithm("fedrobust", **SETTINGS)
    played = play(given, Line(1.0), data, tmp_path, rounds=2, local=local, task=Squares())
    assert weights(played) == pytest.approx([0.111674298], rel=1e-6)


def test_ascent_moves_no_statistics_and_evaluation_sees_the_images(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(36, 3))
    data = uneven()
    played = play(algorithm("fedrobust", shift_rate=5.0), model, data, tmp_path, rounds=2)
    assert played.sent[1, "a"].model["1.num_batches_tracked"].item() == played.sent[1, "a"].steps == 3
    assert played.records[-1].test is not None
    model.load_state_dict(dict(played.model))
    x, y = data.batch(data.clients["a"].test)
    loss = nn.functional.cross_entropy(model.eval()(x), y).item()
    assert played.records[-1].test.clients["a"].loss == pytest.approx(loss, rel=1e-5)
