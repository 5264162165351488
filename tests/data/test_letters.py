"""EMNIST from LEAF's JSON, idx and mat files, and digits from three domains: written here in the real formats."""

from __future__ import annotations

import gzip
import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedfa.data.federate import divide
from fedfa.data.partition import Natural, Sizes
from fedfa.data.sources import leaf
from fedfa.data.sources.digits import Digits
from fedfa.data.sources.emnist import Emnist
from fedfa.data.sources.idx import read_idx
from fedfa.data.sources.leaf import users
from fedfa.data.sources.reading import Broken
from fedfa.data.splits import Splits
from fedfa.errors import UserError

Write = Callable[..., Path]


def idx(array: np.ndarray) -> bytes:
    return b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


# idx


def test_idx_files(tmp_path: Path) -> None:
    array = noise(5, 4, 3)
    for name, data in (
        ("plain", idx(array)),
        ("packed.gz", gzip.compress(idx(array))),
        ("odd", gzip.compress(idx(array))),
    ):
        (tmp_path / name).write_bytes(data)
        assert np.array_equal(read_idx(tmp_path / name, 3), array)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (idx(noise(5, 4, 3))[:-1], r"should hold 60 bytes \(5×4×3\), and holds 59"),
        (idx(noise(5, 4, 3)) + b"x", r"should hold 60 bytes \(5×4×3\), and holds more"),
        (idx(noise(5)), "has 1 dimensions, not 3"),
        (b"\0\0\x0d\x03" + bytes(12), "not an idx file of bytes: it starts with 00000d03"),
        (b"\x89PNG", "not an idx file of bytes: it starts with 89504e47"),
        (b"", "it starts with nothing"),
        (b"\0\0\x08\x03\0\0", "says it holds nothing"),
        (b"\0\0\x08\x03" + b"\xff" * 12, "which cannot be"),
        (gzip.compress(idx(noise(5, 4, 3)))[:-9], "gzip: "),
        (gzip.compress(idx(noise(900, 4, 3)))[:-2000], "gzip: "),
        (b"\x1f\x8bxxxxxxxxxxxx", "gzip: "),
    ],
    ids=lambda given: given if isinstance(given, str) else "",  # packed bytes hold the time, and would name the test
)
def test_damaged_idx_files(tmp_path: Path, data: bytes, says: str) -> None:
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(Broken, match=says):
        read_idx(tmp_path / "file", 3)


def test_an_idx_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(Broken, match=r"cannot be read \(No such file or directory\)"):
        read_idx(tmp_path / "none", 3)


# LEAF


@pytest.fixture
def write_leaf(tmp_path: Path) -> Write:
    """LEAF's JSON, from {writer: (images 0–1 (N, 784), labels)}."""

    def write(file: str, data: dict[str, tuple[Any, Any]], **extra: Any) -> Path:
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {
            "users": list(data),
            "num_samples": [len(y) for _, y in data.values()],
            **extra,
            "user_data": {name: {"x": np.asarray(x).tolist(), "y": list(y)} for name, (x, y) in data.items()},
        }
        path.write_text(json.dumps(document))
        return path

    return write


def written(count: int, seed: int = 0) -> tuple[np.ndarray, list[int]]:
    """Black (0) ink on white (1) paper, as LEAF has it, in steps of 1/255."""
    return 1 - noise(count, 784, seed=seed) / 255, [(seed + n) % 62 for n in range(count)]


def test_writers_are_sites_and_ink_is_bright(tmp_path: Path, write_leaf: Write) -> None:
    a, b, c = written(4, 1), written(3, 2), written(5, 60)
    write_leaf("data/all_data/all_data_0.json", {"f0001_41": a, "f0002_00": b})
    write_leaf("data/all_data/all_data_1.json", {"f0003_10": c}, hierarchies=["x{", '\\"'])
    pool = Emnist(str(tmp_path)).pool()
    assert pool.images.shape == (12, 1, 28, 28) and len(pool.classes) == 62
    assert pool.labels.tolist() == [*a[1], *b[1], *c[1]]
    assert [pool.classes[k] for k in c[1]] == ["y", "z", "0", "1", "2"]
    assert pool.sites == ["f0001_41"] * 4 + ["f0002_00"] * 3 + ["f0003_10"] * 5
    assert np.array_equal(pool.images[4].numpy().ravel(), noise(3, 784, seed=2)[0]), "inverted, to the bit"
    assert pool.names[5] == "data/all_data/all_data_0.json#f0002_00/1" and not pool.problems
    dark = Emnist(str(tmp_path), ink="dark").pool()
    assert torch.equal(255 - dark.images, pool.images)


def test_train_and_test_folders_are_a_given_split(tmp_path: Path, write_leaf: Write) -> None:
    write_leaf("data/all_data/all_data.json", {"z": written(3)})
    write_leaf("data/train/a.json", {"w1": written(8, 1), "w2": written(8, 2)})
    write_leaf("data/test/a.json", {"w1": written(2, 3), "w2": written(2, 4)})
    pool = Emnist(str(tmp_path)).pool()
    assert pool.given == ["train"] * 16 + ["test"] * 4 and set(pool.sites) == {"w1", "w2"}
    clients = divide(pool, Natural(), Splits(), 0, Emnist())
    assert [(len(i.train), len(i.val), len(i.test)) for i in clients.values()] == [(6, 2, 2)] * 2
    assert set(Emnist(str(tmp_path / "data" / "all_data")).pool().sites) == {"z"}


@pytest.mark.parametrize("piece", [1, 2, 7, 100, 1 << 20])
def test_json_cut_into_pieces_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    """The incremental parser gives what json.loads gives, wherever pieces end."""
    odd = {
        "a}b": {"x": [[1.5, -2e-3], []], "y": ['q"]{', "\\", '\\\\"', "é"]},
        "": {},
        "n": None,
        "s": "x\\",
        "t": [True],
    }
    document = {
        "first": 'a"{',
        "n": -12.5,
        "deep": [[{"k": ["]"]}]],
        "user_data": odd,
        "after": {"user": 1},
        "e": False,
    }
    path = tmp_path / "x.json"
    monkeypatch.setattr(leaf, "PIECE", piece)
    for text in (
        json.dumps(document),
        json.dumps(document, indent=3, ensure_ascii=False),
        " \n" + json.dumps(document),
    ):
        path.write_text(text, encoding="utf-8")
        assert dict(users(path)) == odd
    path.write_text('{"user_data": {}}')
    assert dict(users(path)) == {}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"user_data": {"a": {"x": [1, 2', "ends in the middle"),
        ('{"user_data": {"a": {"x": []}', "ends in the middle"),
        ('{"user_data": {"a', "ends in the middle"),
        ('{"users": ["a", "b', "ends in the middle"),
        ('{"user_data": {"a": {"x": [1,]}}}', "not JSON: "),
        ('{"user_data": {"a": nope}}', "not JSON: "),
        ('{"user_data": {"a" 1}}', "'1' where ':' should be"),
        ('{"user_data": {a: 1}}', "'a' where '\"' should be"),
        ('{"user_data": [1]}', r"'\[' where '\{' should be"),
        ("", "ends in the middle"),
        ("hello", "'h' where '{' should be"),
        ('{"user_data": {"a": ' + "[" * 100_000 + "]" * 100_000 + "}}", "not JSON: "),
    ],
)
def test_broken_json(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(Broken, match=says) as caught:
        list(users(path))
    assert "\n" not in str(caught.value)


def test_json_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b'{"user_data": {"\xff\xfe": 1}}')
    with pytest.raises(Broken, match="not JSON: 'utf-8' codec"):
        list(users(tmp_path / "x.json"))


def test_a_large_file_is_not_held_in_memory(tmp_path: Path) -> None:
    """10 MB with 40 writers, whose numbers would take 45 MB: at no time more than a few writers' worth, and pieces."""
    row = ", ".join(["0.123"] * 784)
    user = '{"x": [' + ", ".join([f"[{row}]"] * 45) + '], "y": [' + ", ".join(["1"] * 45) + "]}"
    path = tmp_path / "big.json"
    with open(path, "w") as file:
        file.write('{"users": [], "user_data": {' + ", ".join(f'"w{n}": {user}' for n in range(40)) + "}}")
    assert path.stat().st_size > 9e6
    tracemalloc.start()
    count = sum(len(data["y"]) for _, data in users(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 40 * 45 and peak < 8e6


def test_a_writer_who_is_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_leaf: Write
) -> None:
    monkeypatch.setattr(leaf, "MOST_CHARACTERS", 10_000)
    monkeypatch.setattr(leaf, "PIECE", 1000)
    with pytest.raises(Broken, match="a value has more than the 10,000 characters allowed"):
        list(users(write_leaf("a.json", {"a": written(20)})))


def test_damaged_writers_are_left_out(tmp_path: Path, write_leaf: Write) -> None:
    good = written(3)
    short, high, nan = (np.array(good[0]) for _ in range(3))
    high[1, 5], nan[0, 0] = 1.5, np.nan
    cases: dict[str, Any] = {
        "good": good,
        "short": (short[:, :700], good[1]),
        "fewer": (short[:2], good[1]),
        "high": (high, good[1]),
        "nan": (nan, good[1]),
        "half": (short, [1, 2, 3.5]),
        "class": (written(3, 9)[0], [1, 62, -1]),
        "empty": (np.empty((0, 784)), []),
        "words": ([["a"]], [1]),
    }
    path = write_leaf("all_data/a.json", cases)
    pool = Emnist(str(tmp_path)).pool()
    assert pool.sites == ["good"] * 3 + ["class"]
    name = "all_data/a.json"
    assert [(problem.file, problem.what) for problem in pool.problems] == [
        (name, "broken: writer short: x is 3×700 for 3 labels, not 3×784; left out"),
        (name, "broken: writer fewer: x is 2×784 for 3 labels, not 3×784; left out"),
        (name, "broken: writer high: x has numbers outside of 0–1; left out"),
        (name, "broken: writer nan: x has numbers outside of 0–1; left out"),
        (name, "broken: writer half: y has numbers that are not whole; left out"),
        (f"{name}#class", "2 labels are none of 0–61 (62); left out"),
        (name, "broken: writer empty: x is 0 for 0 labels, not 0×784; left out"),
        (name, "broken: writer words: has no lists x and y of numbers; left out"),
    ]
    path.write_text(path.read_text()[:60_000])
    cut = Emnist(str(tmp_path)).pool()
    assert cut.sites == ["good"] * 3
    assert cut.problems[-1].what == "broken: ends in the middle; the writers after that are left out"


# EMNIST's own files


@pytest.fixture
def by_class(tmp_path: Path) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Upright images, labels and writers of both sides."""
    return {
        side: (noise(count, 28, 28, seed=count), np.arange(count) % 62, np.arange(count) // 4)
        for side, count in (("train", 124), ("test", 62))
    }


def test_idx_by_class(tmp_path: Path, by_class: Any) -> None:
    """Images lie on their side in EMNIST's files."""
    folder = tmp_path / "gzip"
    folder.mkdir()
    for side, (images, labels, _) in by_class.items():
        on_side = np.ascontiguousarray(images.transpose(0, 2, 1))
        (folder / f"emnist-byclass-{side}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(on_side)))
        (folder / f"emnist-byclass-{side}-labels-idx1-ubyte").write_bytes(idx(labels.astype(np.uint8)))
        (folder / f"emnist-letters-{side}-images-idx3-ubyte").write_bytes(b"not read")
    pool = Emnist(str(tmp_path)).pool()
    assert np.array_equal(pool.images.numpy()[:124, 0], by_class["train"][0])
    assert np.array_equal(pool.images.numpy()[124:, 0], by_class["test"][0])
    assert pool.labels.tolist() == [*by_class["train"][1], *by_class["test"][1]]
    assert pool.given == ["train"] * 124 + ["test"] * 62 and set(pool.sites) == {""}
    assert pool.names[125] == "gzip/emnist-byclass-test-images-idx3-ubyte#1"
    clients = divide(pool, Sizes(10, smallest=4), Splits(), 0, Emnist())
    assert sum(len(index.test) for index in clients.values()) == 62
    (folder / "emnist-byclass-test-images-idx3-ubyte.gz").write_bytes(b"\x1f\x8b damaged")
    (folder / "emnist-byclass-train-labels-idx1-ubyte").write_bytes(idx(np.full(124, 70, np.uint8)))
    with pytest.raises(UserError, match=r"emnist: none of the 4 files .*124 labels are none"):
        Emnist(str(tmp_path)).pool()
    (folder / "emnist-byclass-train-labels-idx1-ubyte").unlink()
    (folder / "emnist-byclass-test-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(by_class["test"][0])))
    partly = Emnist(str(tmp_path)).pool()
    assert len(partly) == 62 and partly.problems[0].what == "the by-class labels for train are missing"


def test_mat_by_class(tmp_path: Path, by_class: Any) -> None:
    """MATLAB writes columns first; writers are sites."""
    savemat = pytest.importorskip("scipy.io").savemat
    dataset = {
        side: {
            "images": images.transpose(0, 2, 1).reshape(-1, 784),
            "labels": labels[:, None].astype(float),
            "writers": writers[:, None].astype(np.uint16),
        }
        for side, (images, labels, writers) in by_class.items()
    }
    savemat(
        tmp_path / "emnist-byclass.mat", {"dataset": {**dataset, "mapping": np.zeros((62, 2))}}, do_compression=True
    )
    pool = Emnist(str(tmp_path)).pool()
    assert np.array_equal(pool.images.numpy()[:124, 0], by_class["train"][0])
    assert pool.labels.tolist() == [*by_class["train"][1], *by_class["test"][1]]
    assert pool.sites[:5] == ["writer-0000"] * 4 + ["writer-0001"] and len(set(pool.sites)) == 31
    assert pool.names[124] == "emnist-byclass.mat#test/0"
    for damaged in ((tmp_path / "emnist-byclass.mat").read_bytes()[:300], b"nothing"):
        (tmp_path / "emnist-byclass.mat").write_bytes(damaged)
        with pytest.raises(UserError, match=r"none of the 1 files .*not MATLAB's dataset"):
            Emnist(str(tmp_path)).pool()


def test_no_letters(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"emnist: .* has neither LEAF's JSON files \(all_data/\*\.json\), nor"):
        Emnist(str(tmp_path)).pool()


# Digits


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """The three domains, MNIST by its idx files in a folder of its own."""
    folder = tmp_path / "digits"
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    arrays = {}
    for side, stem, count in (("train", "train", 30), ("test", "t10k", 10)):
        labels = (np.arange(count) % 10).astype(np.uint8)
        (raw / f"{stem}-images-idx3-ubyte").write_bytes(idx(noise(count, 28, 28, seed=count)))
        (raw / f"{stem}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))
        arrays |= {f"mnistm_x_{side}": noise(count, 32, 32, 3, seed=1 + count), f"mnistm_y_{side}": labels}
        arrays |= {f"usps_x_{side}": np.full((count, 16, 16), 10 * count // 5, np.uint8), f"usps_y_{side}": labels}
    np.savez(folder / "digits.npz", **arrays)
    return folder


def test_three_domains(three: Path) -> None:
    pool = Digits(str(three)).pool()
    assert pool.images.shape == (120, 3, 28, 28) and pool.classes == tuple("0123456789")
    assert {site: pool.sites.count(site) for site in pool.sites} == {"mnist": 40, "mnistm": 40, "usps": 40}
    mnist = [n for n, site in enumerate(pool.sites) if site == "mnist"]
    assert np.array_equal(pool.images[mnist[0]].numpy(), np.stack([noise(30, 28, 28, seed=30)[0]] * 3))
    usps = [n for n, site in enumerate(pool.sites) if site == "usps"]
    assert (pool.images[usps[0]] == 60).all() and pool.given[usps[0]] == "train"
    clients = divide(pool, Natural(), Splits(), 0, Digits())
    assert [(len(i.train), len(i.val), len(i.test)) for i in clients.values()] == [(22, 8, 10)] * 2 + [(30, 0, 10)], (
        "USPS is one image thirty times, and stays together"
    )


def test_sizes_and_channels_against_pillow(three: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    pool = Digits(str(three), size=20).pool()
    place = pool.names.index("mnistm/train#3")
    wanted = image.fromarray(noise(30, 32, 32, 3, seed=31)[3]).resize((20, 20), image.Resampling.BILINEAR)
    assert np.abs(pool.images[place].permute(1, 2, 0).numpy().astype(int) - np.asarray(wanted).astype(int)).max() <= 1
    grey = Digits(str(three), channels=1, size=32, most=7).pool()
    assert grey.images.shape == (42, 1, 32, 32)
    mean = noise(30, 32, 32, 3, seed=31)[0].mean(2)
    assert np.abs(grey.images[grey.names.index("mnistm/train#0"), 0].numpy() - mean).max() <= 0.5


def test_mnist_by_writer_beside(three: Path) -> None:
    beside = three.parent / "mnist_by_writer"
    beside.mkdir()
    x, y = noise(6, 28, 28), np.arange(6, dtype=np.uint8)
    np.savez(beside / "mnist_by_writer.npz", x_train=x, y_train=y, writer_train=y, x_test=x[:2], y_test=y[:2])
    pool = Digits(str(three)).pool()
    assert pool.sites.count("mnist") == 8, "the archive, and not the idx files"


def test_damaged_digits(three: Path) -> None:
    data = (three / "digits.npz").read_bytes()
    (three / "digits.npz").write_bytes(data[: len(data) // 2])
    (three / "MNIST" / "raw" / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.zeros(9, np.uint8))))
    pool = Digits(str(three)).pool()
    assert set(pool.sites) == {"mnist"} and len(pool) == 30
    told = {problem.file: problem.what for problem in pool.problems}
    assert told["digits.npz"].startswith("broken: ") and told["digits.npz"].endswith("; left out")
    assert told["t10k-images-idx3-ubyte"] == "broken: mnist test has labels uint8 (9,) for 10 images; left out"
    assert [problem.what for problem in pool.problems[-2:]] == ["domain mnistm is missing", "domain usps is missing"]


def test_an_archive_of_objects_is_not_unpickled(tmp_path: Path) -> None:
    np.savez(tmp_path / "digits.npz", usps_x_train=np.array([{}], dtype=object), usps_y_train=np.zeros(1, np.uint8))
    with pytest.raises(UserError, match=r"digits\.npz: broken: Object arrays cannot be loaded"):
        Digits(str(tmp_path)).pool()
    (tmp_path / "digits.npz").unlink()
    with pytest.raises(UserError, match=r"has neither MNIST's idx files, nor mnist_by_writer\.npz, nor digits\.npz"):
        Digits(str(tmp_path)).pool()
    with pytest.raises(ValueError, match="most is at least 1, or 0 for all, not -1"):
        Digits(most=-1)
