"""FedMix: by hand, its averages, and its third term, whose gradient takes a second backward."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from fedfa.engines.client import Local
from fedfa.task import Batch, Classification, Segmentation, Task
from playing import Line, Squares, algorithm, client_of, play, points, steps_by_hand, uneven

BATCHED = Local(batch_size=2, lr=0.5)


def test_by_hand(tmp_path: Path) -> None:
    """One client, samples (x, y) = (1, 1) and (1, 3), so x̄ = 1, ȳ = 2; λ = ½, w = 3, z = ½x, wz = 1.5.
    ℓ₁ = ½·mean ½(wz − y)²:    ½·mean(0.5·½, −1.5·½) = −0.125
    λ·ℓ(wz, ȳ) = ½·½(wz − 2)²: ½·(−0.5)·½           = −0.125
    λ·Σᵢ ∂ℓ₁/∂zᵢ·x̄ = ½·Σᵢ ½·½·(wzᵢ − yᵢ)·w = (w² − 4w)/8, slope (2w − 4)/8 = 0.25
    Together 0: w stays at 3. FedAvg: mean(3 − 1, 3 − 3) = 1, w = 2.5. Averaged over the batch once more, the third
    term's slope is 0.125: together −0.125, w = 3.0625. Without a second backward it would be 0."""
    data = points(a=[([1.0], 1), ([1.0], 3)])
    found = steps_by_hand(algorithm("fedmix", lam=0.5), data, tmp_path, 3.0, local=BATCHED)
    assert found == pytest.approx([3.0], abs=1e-6)
    smaller = steps_by_hand(algorithm("fedmix", lam=0.5, products="averaged"), data, tmp_path, 3.0, local=BATCHED)
    assert smaller == pytest.approx([3.0625], abs=1e-6)
    assert steps_by_hand(algorithm("fedavg"), data, tmp_path, 3.0, local=BATCHED) == [2.5]


class TestAverages:
    @pytest.mark.parametrize(("average", "groups"), [(5, 8), (4, 10), (0, 4), (100, 4), (1, 32)])
    def test_groups(self, average: int, groups: int, tmp_path: Path) -> None:
        """Sizes 11, 5, 9 and 7; a last smaller group counts too."""
        played = play(algorithm("fedmix", average=average), network(), uneven(), tmp_path, rounds=1)
        assert played.server.memory["images"].shape == (groups, 2, 6, 5)
        assert played.server.memory["labels"].shape == (groups, 3)
        torch.testing.assert_close(played.server.memory["labels"].sum(1), torch.ones(groups))

    def test_all_of_a_client_in_the_order_of_names(self, tmp_path: Path) -> None:
        data = uneven()
        memory = play(algorithm("fedmix", average=0), network(), data, tmp_path).server.memory
        for number, client in enumerate("abcd"):
            x, y = data.batch(data.clients[client].train)
            torch.testing.assert_close(memory["images"][number], x.mean(0))
            torch.testing.assert_close(memory["labels"][number], torch.bincount(y, minlength=3) / len(y))

    def test_groups_make_up_the_client(self, tmp_path: Path) -> None:
        """Whatever the order: groups of 4, 4 and 3 average to client a's mean, each group a mean of its own samples."""
        data = uneven()
        memory = play(algorithm("fedmix", average=4), network(), data, tmp_path).server.memory
        x, y = data.batch(data.clients["a"].train)
        sizes = torch.tensor([4.0, 4.0, 3.0])
        weighted = (memory["images"][:3] * sizes.view(-1, 1, 1, 1)).sum(0) / 11
        torch.testing.assert_close(weighted, x.mean(0))
        counts = memory["labels"][:3] * sizes.unsqueeze(1)
        torch.testing.assert_close(counts, counts.round(), rtol=0, atol=1e-5)
        torch.testing.assert_close(counts.sum(0), torch.bincount(y, minlength=3).float())

    def test_dense_labels(self, tmp_path: Path) -> None:
        data = uneven(task="segmentation")
        model = nn.Conv2d(2, 3, 1)
        memory = play(algorithm("fedmix", average=0), model, data, tmp_path, task=Segmentation()).server.memory
        assert memory["labels"].shape == (4, 3, 6, 5)
        _, y = data.batch(data.clients["b"].train)
        shares = torch.stack([(y == k).float().mean(0) for k in range(3)])
        torch.testing.assert_close(memory["labels"][1], shares)

    def test_every_client_shares_before_the_first_round(self, tmp_path: Path) -> None:
        """Also those that are not chosen; not those held out."""
        data = uneven(held_out={"e": 4})
        given = algorithm("fedmix", average=0)
        played = play(given, network(), data, tmp_path, participation=0.25, held_out=("e",))
        assert len(played.states[0].memory["images"]) == 4
        assert all(torch.equal(played.states[0].memory[k], played.server.memory[k]) for k in ("images", "labels"))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(36, 3))


def dense_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Tanh(), nn.Conv2d(3, 3, 1))


@pytest.mark.parametrize("task", [Classification(), Segmentation()], ids=["classification", "segmentation"])
def test_gradient_by_finite_differences(task: Task) -> None:
    """The gradient that the optimiser gets is the slope of the whole loss, third term and all, in float64; and the
    third term alone is λ times the slope of ℓ₁ where all samples move along x̄ together (so: a sum over them)."""
    dense = isinstance(task, Segmentation)
    data = uneven(task="segmentation" if dense else "classification")
    model = (dense_network() if dense else network()).double()
    given = algorithm("fedmix", lam=0.3)
    client = client_of(given, model, data, task=task)
    x, y = data.batch(data.clients["a"].train[:4])
    batch = Batch(x.double(), y)
    image = torch.rand(1, 2, 6, 5, dtype=torch.float64)
    label = torch.rand((1, 3, 6, 5) if dense else (1, 3), dtype=torch.float64)
    label = label / label.sum(1, keepdim=True)
    client.extras = {"images": image, "labels": label}
    given.gradients(client, batch)
    step, checked = 1e-5, 0
    for parameter in model.parameters():
        assert parameter.grad is not None
        at = parameter.detach().view(-1)
        for number in range(0, len(at), max(len(at) // 4, 1)):
            value = at[number].item()
            sides = []
            for side in (value + step, value - step):
                at[number] = side
                sides.append(whole(model, task, batch, image, label, 0.3))
            at[number] = value
            slope = (sides[0] - sides[1]) / (2 * step)
            assert parameter.grad.view(-1)[number].item() == pytest.approx(slope, rel=1e-5, abs=1e-7)
            checked += 1
    assert checked >= 15


def whole(model: nn.Module, task: Task, batch: Batch, image: torch.Tensor, label: torch.Tensor, lam: float) -> float:
    """FedMix's loss, its third term as a difference quotient of ℓ₁ along x̄."""
    with torch.no_grad():

        def first(shift: float) -> float:
            return (1 - lam) * task.loss(model((1 - lam) * batch.x + shift * image), batch.y).item()

        along = (first(1e-3) - first(-1e-3)) / 2e-3
        finer = (first(5e-4) - first(-5e-4)) / 1e-3
        along = (4 * finer - along) / 3  # Richardson: the error is of fourth order
        others = task.loss(model((1 - lam) * batch.x), label.expand(len(batch), *label.shape[1:])).item()
        return first(0.0) + lam * others + lam * along


def test_draws_come_one_a_step_from_a_stream_of_their_own(tmp_path: Path) -> None:
    """With averages that differ, another seed gives another result, and the same seed the same."""
    data = uneven()
    ends = [
        play(algorithm("fedmix", lam=0.4), network(), data, tmp_path / f"{n}", seed=seed).model["4.weight"]
        for n, seed in enumerate((0, 0, 1))
    ]
    assert torch.equal(ends[0], ends[1]) and not torch.equal(ends[0], ends[2])


def test_statistics_move_once_a_step(tmp_path: Path) -> None:
    played = play(algorithm("fedmix"), network(), uneven(), tmp_path)
    for update in played.sent.values():
        assert update.model["1.num_batches_tracked"].item() == update.steps


def test_lonely_client_mixes_with_itself(tmp_path: Path) -> None:
    played = play(algorithm("fedmix"), Line(1.0), points(a=[([1.0], 1)] * 3), tmp_path, local=BATCHED, task=Squares())
    assert played.server.memory["images"].shape == (1, 1, 1, 1) and not math.isnan(played.model["w0"].item())
