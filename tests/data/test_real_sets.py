"""The real data sets, where they lie beside the checkout: counts as their README has them, and a round on each."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedfa
from fedfa.data.federate import divide, federate
from fedfa.data.partition import Dirichlet, Natural
from fedfa.data.splits import Splits
from fedfa.registries import SOURCES

pytestmark = pytest.mark.usefixtures("shared_cache")


@pytest.fixture(scope="session")
def unpacked(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Lay a set out as its users have it, once in a session."""
    pytest.importorskip("PIL")
    folder = tmp_path_factory.mktemp("unpacked")

    @cache
    def unpack(name: str) -> Path:
        subprocess.run([sys.executable, shared_data / "unpack.py", folder, name], check=True, capture_output=True)
        return folder

    return unpack


@pytest.fixture
def place(shared_data: Path, unpacked: Callable[[str], Path]) -> Callable[[str], str]:
    """Where a source finds its real files."""
    beside = {
        "office_caltech10": "office_caltech10",
        "pacs": "pacs",
        "segmentation_folders": "fundus",
        "prostate": "prostate_nifti",
        "digits": "digits",
    }

    def place(name: str) -> str:
        if name == "cifar10":
            return str(unpacked("cifar10") / "cifar-10-batches-bin")
        return str(unpacked("mnist_by_writer") / "femnist" if name == "emnist" else shared_data / beside[name])

    return place


def test_prostate(place: Any) -> None:
    pytest.importorskip("nibabel")
    pool = SOURCES["prostate"](place("prostate")).pool()
    cases = Counter((site, name.split("#")[0]) for site, name in zip(pool.sites, pool.names, strict=True))
    assert {site for site, _ in cases} == {"Skyra", "TrioTim"} and len(cases) == 4, "2 cases a scanner"
    assert sorted(cases.values()) == [19, 19, 21, 23] and not pool.problems
    assert pool.images.shape == (82, 3, 224, 224) and pool.labels.unique().tolist() == [0, 1]
    filled = pool.labels.float().mean((1, 2))
    assert filled.min() > 0 and 0.01 < filled.mean() < 0.2
    # The gland lies in the middle of the picture, and the slice's own channel is the middle one.
    rows = pool.labels.float().mean((0, 2))
    assert 80 < float((rows * torch.arange(224)).sum() / rows.sum()) < 144
    clients = divide(pool, Natural(), Splits(), 0)
    assert all(len(index.train) and len(index.test) and not len(index.val) for index in clients.values())


@pytest.mark.slow
def test_cifar10(place: Any) -> None:
    source = SOURCES["cifar10"](place("cifar10"))
    pool = source.pool()
    assert pool.images.shape == (60_000, 3, 32, 32) and Counter(pool.given) == {"train": 50_000, "test": 10_000}
    assert torch.bincount(pool.labels).tolist() == [6000] * 10 and not pool.problems
    # The channels' means and deviations that everybody normalises CIFAR-10's training images with.
    x = pool.images[:50_000].float().div(255)
    assert x.mean((0, 2, 3)).tolist() == pytest.approx([0.4914, 0.4822, 0.4465], abs=2e-4)
    assert x.std((0, 2, 3)).tolist() == pytest.approx([0.2470, 0.2435, 0.2616], abs=2e-4)
    clients = divide(pool, Dirichlet(100, 0.3), Splits(), 0, source)
    assert len(clients) == 100 and {len(index.test) for index in clients.values()} == {100}
    tested = torch.cat([index.test for index in clients.values()])
    assert torch.equal(tested.sort().values, torch.arange(50_000, 60_000)), "all of the test set, each image once"
    assert sum(len(index.train) for index in clients.values()) == pytest.approx(45_000, abs=100)


@pytest.mark.slow
def test_emnist(place: Any, shared_data: Path) -> None:
    pool = SOURCES["emnist"](place("emnist")).pool()
    data = np.load(shared_data / "mnist_by_writer" / "mnist_by_writer.npz")
    writers = np.unique(data["writer_train"])[:200]
    assert len(set(pool.sites)) == 200 and not pool.problems
    assert len(pool) == int(np.isin(data["writer_train"], writers).sum()) == 21_400
    first = data["writer_train"] == writers[7]
    mine = [n for n, site in enumerate(pool.sites) if site == f"f{writers[7]:04d}_00"]
    assert np.array_equal(pool.images[mine, 0].numpy(), data["x_train"][first]), "back to MNIST's own bytes"
    assert pool.labels[mine].tolist() == data["y_train"][first].tolist()


def test_digits(place: Any) -> None:
    source = SOURCES["digits"](place("digits"))
    pool = source.pool()
    assert Counter(zip(pool.sites, pool.given, strict=True)) == {
        ("mnist", "train"): 60_000,
        ("mnist", "test"): 10_000,
        ("mnistm", "train"): 3200,
        ("mnistm", "test"): 800,
        ("usps", "train"): 3200,
        ("usps", "test"): 800,
    }
    assert not pool.problems
    # MNIST's well-known mean and deviation, at its own size.
    x = pool.images[:60_000, 0].float().div(255)
    assert (float(x.mean()), float(x.std())) == pytest.approx((0.1307, 0.3081), abs=1e-4)


def test_office_has_the_paper_s_sizes_and_no_duplicate_apart(place: Any) -> None:
    pytest.importorskip("PIL")
    source = SOURCES["office_caltech10"](place("office_caltech10"), size=32)
    pool = source.pool()
    clients = divide(pool, Natural(), Splits(), 0, source)
    sizes = {name: (len(i.train), len(i.val), len(i.test)) for name, i in clients.items()}
    assert list(sizes.values()) == [(459, 307, 192), (538, 360, 225), (75, 50, 32), (141, 95, 59)]
    side = {n: part for i in clients.values() for part in ("train", "val", "test") for n in i.of(part).tolist()}  # type: ignore[arg-type]  # a word of a few
    groups = Counter(pool.groups)
    twice = [group for group, count in groups.items() if count > 1]
    assert len(twice) == 18
    assert all(len({side[n] for n, own in enumerate(pool.groups) if own == group}) == 1 for group in twice)


# A round on each

SMALL: dict[str, dict[str, Any]] = {
    "office_caltech10": {"source.size": 64, "network": {"name": "lenet"}},
    "pacs": {"source.size": 64, "network": {"name": "lenet"}},
    "segmentation_folders": {"source.size": 64, "network": {"name": "unet"}},
    "prostate": {"source.size": 64, "network": {"name": "unet"}},
    "digits": {"source.most": 120, "network": {"name": "lenet"}},
    "cifar10": {"network": {"name": "lenet"}, "partition": "dirichlet", "partition.clients": 100},
    "emnist": {"network": {"name": "lenet"}, "partition.clients": 6},
}
ALGORITHMS = ["fedavg", "fedfa", "fedbn", "scaffold", "fedmix"]
QUICK = [("digits", name) for name in ALGORITHMS] + [("prostate", "fedfa"), ("prostate", "fedbn")]
EVERY = [(source, name) for source in SMALL for name in ALGORITHMS if (source, name) not in QUICK]


@pytest.mark.parametrize(
    ("source", "algorithm"), [*QUICK, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in EVERY)]
)
def test_a_round(place: Any, tmp_path: Path, source: str, algorithm: str) -> None:
    """Few samples, one round: it trains, and every client is evaluated."""
    settings = dict(SMALL[source])
    config = {
        "source": {"name": source, "path": place(source)},
        "network": settings.pop("network"),
        "algorithm": algorithm,
        "rounds": 1,
        "batch_size": 8,
        "participation": 0.04 if source == "cifar10" else 1.0,
        "split.fraction": 0.02,
        "split.smallest": 8,
        "device": "cpu",
        "threads": 1,
        **settings,
    }
    dotted = {key: config.pop(key) for key in list(config) if "." in key}
    run = fedfa.run(config, root=tmp_path, **dotted)
    [record] = run.metrics
    assert not record["refused"] and record["loss"] > 0 and record["clients"]
    tested = [name for name, (_, _, test) in run.provenance["samples"].items() if test]
    scores = record["test"]["clients"]
    assert sorted(scores) == sorted(tested) and all(0 <= score <= 1 for score in scores.values())


def test_by_slice_is_the_released_behaviour(place: Any) -> None:
    pytest.importorskip("nibabel")
    source = SOURCES["prostate"](place("prostate"), size=64)
    released = federate(source, Natural(), Splits(by="slice"), 0)
    assert [(len(i.train), len(i.val), len(i.test)) for i in released.clients.values()] == [(24, 8, 8), (26, 8, 8)]
