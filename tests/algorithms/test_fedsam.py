"""FedSAM by hand, and what its second pass must leave alone; FedHarmo's perturbation is the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fedfa.algorithms.base import Algorithm
from fedfa.augmentation import DSU
from fedfa.engines.client import Local
from fedfa.layers.ffa import FFA
from playing import algorithm, play, points, steps_by_hand, uneven

TWO_PASSES = [algorithm("fedsam", rho=0.3), algorithm("fedharmo", alpha=0.3)]


def test_global_norm_by_hand(tmp_path: Path) -> None:
    """f = 0.6·p + 0.8·q, g = r·(0.6, 0.8) with r = f − y, so ‖g‖ = |r| and f at the ascent point is f ± ρ.
    From 0 with ρ = ¼: a (y = 1): r = −1.25, p = ½·1.25·0.6 = 0.375, q = 0.5;  b (y = 3): r = −3.25, p = 0.975, q = 1.3.
    Means 0.675 and 0.9; FedAvg's are 0.6 and 0.8; with a norm a tensor, f would move by 1.4·ρ: 0.705 and 0.94."""
    data = points(a=[([0.6, 0.8], 1)], b=[([0.6, 0.8], 3)])
    found = steps_by_hand(algorithm("fedsam", rho=0.25), data, tmp_path, 0.0, 0.0)
    assert found == pytest.approx([0.675, 0.9], rel=1e-6)
    assert steps_by_hand(algorithm("fedavg"), data, tmp_path, 0.0, 0.0) == pytest.approx([0.6, 0.8], rel=1e-6)


def test_no_gradient_no_step(tmp_path: Path) -> None:
    """Where the residual is 0, ‖g‖ = 0 is not divided by."""
    assert steps_by_hand(algorithm("fedsam", rho=0.25), points(a=[([1.0], 1)]), tmp_path, 1.0) == [1.0]


class Marked(nn.Module):
    """Dropout on ones, whose masks and FFA's draws can be read afterwards, forward by forward."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        mask = self.dropout(torch.ones_like(x))
        self.masks.append(mask.detach().clone())
        return x * mask


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        DSU(p=1.0).layer(3, 1),
        nn.Flatten(),
        Marked(),
        nn.Linear(36, 3),
    )


@pytest.mark.parametrize("given", TWO_PASSES, ids=["fedsam", "fedharmo"])
class TestPasses:
    local = Local(epochs=2, batch_size=4, lr=0.1)

    def test_both_see_the_same_draws(self, given: Algorithm, tmp_path: Path) -> None:
        played = play(given, network(), uneven(), tmp_path, local=self.local)
        masks = played.engine.slot.model[5].masks
        steps = sum(update.steps for update in played.sent.values())
        training = masks[: 2 * steps]  # evaluation comes after
        assert len(training) == 2 * steps == 32
        assert all(torch.equal(*pair) for pair in zip(training[::2], training[1::2], strict=True))
        assert not torch.equal(training[0], training[2]), "every step draws anew"

    def test_both_see_the_same_noise(self, given: Algorithm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[Tensor] = []
        forward = FFA.forward

        def watched(layer: FFA, x: Tensor) -> Tensor:
            if layer.training:
                seen.append(layer.drawn.noise)
            return forward(layer, x)

        monkeypatch.setattr(FFA, "forward", watched)
        play(given, network(), uneven(), tmp_path, local=self.local)
        assert len(seen) == 32
        assert all(torch.equal(*pair) for pair in zip(seen[::2], seen[1::2], strict=True))
        assert not torch.equal(seen[0], seen[2])

    def test_statistics_move_once_a_step(self, given: Algorithm, tmp_path: Path) -> None:
        played = play(given, network(), uneven(), tmp_path, local=self.local)
        for update in played.sent.values():
            assert update.model["1.num_batches_tracked"].item() == update.steps
        layer = played.engine.slot.model[3]
        total = sum(update.steps for update in played.sent.values())
        assert layer.batches.item() == total == 16, "DSU's count, which no algorithm resets"

    def test_statistics_are_the_first_passes(self, given: Algorithm, tmp_path: Path) -> None:
        """After one step, the running mean is a tenth of the convolution's mean where the model stood."""
        model = network()
        local = Local(batch_size=100, lr=0.1)
        data = uneven()
        played = play(given, model, data, tmp_path, local=local)
        x, _ = data.batch(data.clients["a"].train)
        x = given.inputs(x, given.broadcast(played.server))
        mean = model[0](x).mean((0, 2, 3)) / 10
        torch.testing.assert_close(played.sent[1, "a"].model["1.running_mean"], mean.detach(), rtol=1e-5, atol=1e-6)

    def test_parameters_come_back_to_the_bit(self, given: Algorithm, tmp_path: Path) -> None:
        """At rate 0 nothing moves: w + e − e would."""
        played = play(given, network(), uneven(), tmp_path, local=Local(batch_size=4, lr=0.0))
        for name, _ in network().named_parameters():
            assert torch.equal(played.sent[1, "a"].model[name], played.states[0].model[name])

    def test_clipping_is_of_the_gradient_that_is_stepped_along(self, given: Algorithm, tmp_path: Path) -> None:
        local = Local(batch_size=100, lr=0.1, clip=1e-3)
        played = play(given, network(), uneven(), tmp_path, local=local)
        before, after = played.states[0].model, played.sent[1, "a"].model
        names = [name for name, _ in network().named_parameters()]
        moved = torch.cat([(after[name] - before[name]).flatten() for name in names]).norm().item()
        assert moved == pytest.approx(1e-4, rel=1e-2)
