"""Everything learns: whole runs on the embedded federations, several seeds. Minutes, so not among the default tests."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedfa

pytestmark = pytest.mark.slow


ALGORITHMS = [name for name in fedfa.ALGORITHMS if name.startswith(("fed", "scaffold"))]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_digits(tmp_path: Path, algorithm: str, seed: int) -> None:
    """Chance is 10 %. After 50 rounds every algorithm reads more than 70 % of the digits, on average over sites; but
    FedHarmo, which takes brightness and contrast out of the images, may still be at half of them: one seed of three
    was on its plateau until round 40."""
    run = fedfa.run("digit-sites", root=tmp_path, algorithm=algorithm, rounds=50, seed=seed)
    last = [line["test"]["mean"] for line in run.metrics[-5:]]
    assert sum(last) / 5 > (0.5 if algorithm == "fedharmo" else 0.7)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("algorithm", ["fedavg", "fedfa"])
@pytest.mark.parametrize("augmentation", [name for name in fedfa.AUGMENTATIONS if name != "none"])
def test_digits_with_an_augmentation(tmp_path: Path, algorithm: str, augmentation: str, seed: int) -> None:
    run = fedfa.run("digit-sites", root=tmp_path, algorithm=algorithm, augmentation=augmentation, rounds=50, seed=seed)
    last = [line["test"]["mean"] for line in run.metrics[-5:]]
    assert sum(last) / 5 > 0.7


@pytest.mark.parametrize("algorithm", ["fedavg", "fedfa", "fedbn", "fedharmo", "fedmix"])
def test_phantoms(tmp_path: Path, algorithm: str) -> None:
    """Thresholding brightness, with the best window for each site, gives a Dice below 0.3. FedMix's moves by 0.2 and
    more from one round to the next, and with the number of threads: the same seed ended at 0.49 with one and at 0.39
    with two, which is too low. Over six rounds these are 0.52 and 0.50, and the others are at 0.67 and above."""
    run = fedfa.run("phantom-sites", root=tmp_path, algorithm=algorithm, rounds=12)
    last = [line["test"]["mean"] for line in run.metrics[-6:]]
    assert sum(last) / 6 > (0.45 if algorithm == "fedmix" else 0.6)
    assert last[-1] > 0.4


def test_a_site_that_never_trained(tmp_path: Path) -> None:
    run = fedfa.run("digit-sites", root=tmp_path, algorithm="fedfa", rounds=50, held_out="fax")
    test = run.metrics[-1]["test"]
    assert test["unseen"] == test["clients"]["fax"] > 0.4
    assert test["gap"] == pytest.approx(test["mean"] - test["unseen"])
