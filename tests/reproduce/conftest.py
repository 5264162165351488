"""Every data set that a table needs, small and made up, in its own layout under one folder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

TREES = {
    "office_caltech10": (
        ("amazon", "caltech", "dslr", "webcam"),
        ("backpack", "bike", "calculator", "headphones", "keyboard", "laptop", "monitor", "mouse", "mug", "projector"),
    ),
    "domainnet": (
        ("clipart", "infograph", "painting", "quickdraw", "real", "sketch"),
        ("bird", "feather", "headphones", "ice_cream", "teapot", "tiger", "whale", "windmill", "wine_glass", "zebra"),
    ),
    "pacs": (
        ("art_painting", "cartoon", "photo", "sketch"),
        ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person"),
    ),
}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that no test shares with the user, and no data but the test's own."""
    monkeypatch.setenv("FEDFA_CACHE", str(tmp_path_factory.getbasetemp() / "cache of made-up data"))
    monkeypatch.delenv("FEDFA_DATA", raising=False)


@pytest.fixture(scope="session")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that holds all data sets by their usual names."""
    image, nibabel = pytest.importorskip("PIL.Image"), pytest.importorskip("nibabel")
    root = tmp_path_factory.mktemp("made up")
    rng = np.random.default_rng(0)

    def picture(path: Path, pixels: np.ndarray) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        image.fromarray(pixels).save(path)

    for name, (sites, classes) in TREES.items():
        for site in sites:
            for kind in classes:
                for number in range(3):
                    picture(root / name / site / kind / f"{number}.png", _noise(rng, 24))
    for site in ("drishti-gs", "refuge", "rim-one-v3"):
        for number in range(10):
            mask = np.zeros((24, 24), np.uint8)
            mask[6:18, 6:18], mask[10:14, 10:14] = 1, 2
            picture(root / "fundus" / site / "images" / f"{number}.png", _noise(rng, 24))
            picture(root / "fundus" / site / "masks" / f"{number}.png", mask)
    for site in ("BIDMC", "HK", "I2CVB", "BMC", "RUNMC", "UCL"):
        (root / "prostate" / site).mkdir(parents=True)
        for number in range(5):
            gland = np.zeros((16, 16, 4), np.uint8)
            gland[4:12, 4:12] = 1
            voxels = rng.integers(0, 1000, (16, 16, 4)).astype(np.int16)
            for content, ending in ((voxels, ""), (gland, "_segmentation")):
                path = root / "prostate" / site / f"Case{number:02d}{ending}.nii.gz"
                nibabel.save(nibabel.Nifti1Image(content, np.eye(4)), path)
    (root / "cifar10").mkdir()
    for batch in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        records = rng.integers(0, 256, (40, 3073), dtype=np.uint8)
        records[:, 0] = np.arange(40) % 10
        records.tofile(root / "cifar10" / f"{batch}.bin")
    (root / "digits").mkdir()
    shapes = {"x": (28, 28), "mnistm_x": (32, 32, 3), "usps_x": (16, 16)}
    digits: dict[str, dict[str, np.ndarray]] = {"mnist_by_writer.npz": {}, "digits.npz": {}}
    for kind, shape in shapes.items():
        own = digits["mnist_by_writer.npz" if kind == "x" else "digits.npz"]
        for side, count in (("train", 40), ("test", 10)):
            own[f"{kind}_{side}"] = rng.integers(0, 256, (count, *shape), dtype=np.uint8)
            own[f"{kind[:-1]}y_{side}"] = np.arange(count) % 10
    for name, arrays in digits.items():
        np.savez(root / "digits" / name, **arrays)
    for name in ("emnist", "femnist"):
        folder = root / name / "data" / "all_data"
        folder.mkdir(parents=True)
        users = [f"f{number:04d}" for number in range(6)]
        data = {
            user: {"x": rng.random((12, 784)).round(2).tolist(), "y": [int(y) for y in rng.integers(0, 10, 12)]}
            for user in users
        }
        document = {"users": users, "num_samples": [12] * len(users), "user_data": data}
        (folder / "all_data_0.json").write_text(json.dumps(document))
    return root


def _noise(rng: np.random.Generator, size: int) -> np.ndarray:
    return rng.integers(0, 256, (size, size, 3), dtype=np.uint8)
