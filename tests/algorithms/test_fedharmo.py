"""FedHarmo: by hand, and what amplitude normalisation does to images and leaves alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedfa.data.federation import ClientIndex, Federation
from playing import algorithm, play, points, steps_by_hand
from reference.rules import harmonised

SIZES = [(8, 8), (7, 7), (8, 11), (11, 8), (9, 30), (1, 1), (2, 3)]


def test_by_hand(tmp_path: Path) -> None:
    """Images of one pixel have but a mean: a's 1 and b's 0.6 both become 0.8. Labels 1 and 3, w = 0, rate ½.
    α = 0: a: g = −0.8, w = 0.4; b: g = −2.4, w = 1.2; mean 0.8. FedAvg: a ½·1, b ½·3·0.6 = 0.9; mean 0.7.
    α = ¼: uphill is w = −¼, f = −0.2: a: g = 0.8·(−1.2) = −0.96, w = 0.48; b: g = 0.8·(−3.2), w = 1.28; mean 0.88.
    α = ¼ and images as they are: a: ½·1.25 = 0.625; b: f = −0.15, g = 0.6·(−3.15), w = 0.945; mean 0.785."""
    data = points(a=[([1.0], 1)], b=[([0.6], 3)])
    for amplitude in ("window", "dc"):
        for alpha, wanted in ((0.0, 0.8), (0.25, 0.88)):
            given = algorithm("fedharmo", alpha=alpha, amplitude=amplitude)
            assert steps_by_hand(given, data, tmp_path) == pytest.approx([wanted], rel=1e-6)
    given = algorithm("fedharmo", alpha=0.25, amplitude="none")
    assert steps_by_hand(given, data, tmp_path) == pytest.approx([0.785], rel=1e-6)
    assert steps_by_hand(algorithm("fedavg"), data, tmp_path) == pytest.approx([0.7], rel=1e-6)


def pictures(size: tuple[int, int], counts: tuple[int, ...] = (3, 2)) -> Federation:
    """Clients with random images of a size, two channels."""
    draw = torch.Generator().manual_seed(5)
    total = sum(counts)
    images = torch.randint(0, 256, (total, 2, *size), generator=draw, dtype=torch.uint8)
    clients, first = {}, 0
    for name, count in zip("abcdef", counts, strict=False):
        own = torch.arange(first, first + count)
        clients[name] = ClientIndex(own, own[:0], own[:1])
        first += count
    return Federation("pictures", "classification", images, torch.zeros(total).long(), ("x", "y"), clients)


def model_for(data: Federation) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(data.images[0].numel(), 2))


def normalised(data: Federation, folder: Path, x: Tensor, **settings: object) -> Tensor:
    """What a network sees of images in this federation."""
    given = algorithm("fedharmo", **settings)
    played = play(given, model_for(data), data, folder)
    return given.inputs(x, given.broadcast(played.server))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("window", [0.0, 0.1, 0.3, 0.49])
def test_against_the_reference(size: tuple[int, int], window: float, tmp_path: Path) -> None:
    """Odd and even sides, not square, windows from the mean alone to nearly all."""
    data = pictures(size)
    x, _ = data.batch(torch.arange(5))
    wide = x.double().numpy()
    amplitude = np.abs(np.fft.fft2(wide))
    amplitude = (amplitude[:3].mean(0) + amplitude[3:].mean(0)) / 2
    reach = int(np.floor(window * min(size)))
    wanted = torch.from_numpy(harmonised(wide, amplitude, reach)).float()
    torch.testing.assert_close(normalised(data, tmp_path, x, window=window), wanted, rtol=1e-5, atol=2e-6)
    assert (wanted - x).abs().max() > 0.01


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("amplitude", ["window", "dc"])
def test_an_image_with_the_average_amplitude_stays(size: tuple[int, int], amplitude: str, tmp_path: Path) -> None:
    """Both clients have the same one image, so its amplitude is the average: nothing to replace."""
    data = pictures(size, (1, 1))
    data.images[1] = data.images[0]
    x, _ = data.batch(torch.arange(2))
    # A batch of one sample is dropped unless batches are of one; the shares are taken all the same.
    found = normalised(data, tmp_path, x, amplitude=amplitude, window=0.4)
    torch.testing.assert_close(found, x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_dc_changes_the_mean_of_a_channel_and_nothing_else(size: tuple[int, int], tmp_path: Path) -> None:
    data = pictures(size)
    x, _ = data.batch(torch.arange(5))
    found = normalised(data, tmp_path, x, amplitude="dc")
    means = x.mean((2, 3))
    average = (means[:3].mean(0) + means[3:].mean(0)) / 2  # clients count the same, whatever they hold
    torch.testing.assert_close(found.mean((2, 3)), average.expand(5, 2), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found - found.mean((2, 3), True), x - x.mean((2, 3), True), rtol=1e-4, atol=1e-6)


def test_phases_and_high_frequencies_stay(tmp_path: Path) -> None:
    data = pictures((12, 10))
    x, _ = data.batch(torch.arange(5))
    before, after = torch.fft.fft2(x), torch.fft.fft2(normalised(data, tmp_path, x, window=0.25))
    turn = before * after.conj()
    assert (turn.imag.abs() < 1e-3 * before.abs().amax()).all() and (turn.real > -1e-3).all()
    u = torch.fft.fftfreq(12, 1 / 12).abs().view(-1, 1)
    v = torch.fft.fftfreq(10, 1 / 10).abs()
    outside = (u > 2) | (v > 2)
    torch.testing.assert_close(after[..., outside], before[..., outside], rtol=1e-4, atol=1e-4)
    assert ((after.abs() - before.abs())[..., ~outside].abs() > 1e-3).any(0).all()


def test_evaluation_sees_normalised_images(tmp_path: Path) -> None:
    data = pictures((6, 5))
    given = algorithm("fedharmo", window=0.3)
    played = play(given, model_for(data), data, tmp_path, rounds=2)
    model = model_for(data)
    model.load_state_dict(dict(played.model))
    x, y = data.batch(data.clients["a"].test)
    assert played.records[-1].test is not None
    score = played.records[-1].test.clients["a"].loss
    seen = given.inputs(x, given.broadcast(played.server))
    assert score == pytest.approx(nn.functional.cross_entropy(model(seen), y).item(), rel=1e-5)
    assert score != pytest.approx(nn.functional.cross_entropy(model(x), y).item(), rel=1e-5)


def test_none_leaves_images_as_they_are(tmp_path: Path) -> None:
    data = pictures((6, 5))
    x, _ = data.batch(torch.arange(5))
    assert torch.equal(normalised(data, tmp_path, x, amplitude="none"), x)


def test_black_images_are_finite(tmp_path: Path) -> None:
    """Amplitude 0 has no phase: taken for 0, value and gradient finite."""
    data = pictures((6, 5))
    data.images[0] = 0
    x, _ = data.batch(torch.arange(5))
    assert torch.isfinite(normalised(data, tmp_path, x, window=0.4)).all()


def test_amplitude_is_frozen_after_the_first_round(tmp_path: Path) -> None:
    played = play(algorithm("fedharmo"), model_for(pictures((6, 5))), pictures((6, 5)), tmp_path, rounds=3)
    assert all(torch.equal(state.memory["amplitude"], played.server.memory["amplitude"]) for state in played.states)
