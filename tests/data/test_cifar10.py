"""CIFAR-10 in its three layouts, and pickles that do nothing."""

from __future__ import annotations

import os
import pickle
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedfa.data.federate import divide
from fedfa.data.partition import Dirichlet, Natural
from fedfa.data.sources.cifar10 import BATCHES, CLASSES, Cifar10
from fedfa.data.sources.plain_pickle import load_plain
from fedfa.data.sources.reading import Broken
from fedfa.data.splits import Splits
from fedfa.errors import UserError

COUNT = 20
"""Images in a batch here; 10,000 in the real one."""


def records(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return np.arange(COUNT, dtype=np.uint8) % 10, rng.integers(0, 256, (COUNT, 3072), dtype=np.uint8)


@pytest.fixture
def binary(tmp_path: Path) -> Path:
    """The binary version, unpacked: a byte of label and three planes a record."""
    folder = tmp_path / "sets" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for seed, name in enumerate(BATCHES):
        labels, images = records(seed)
        (folder / f"{name}.bin").write_bytes(
            b"".join(bytes([k]) + x.tobytes() for k, x in zip(labels, images, strict=True))
        )
    (folder / "batches.meta.txt").write_text("\n".join(CLASSES) + "\n\n")
    return folder


def pickled_by_python_2(labels: np.ndarray, images: np.ndarray) -> bytes:
    """A batch as the original is written: protocol 2, str for bytes, the array by numpy.core.multiarray."""

    def text(value: bytes) -> bytes:
        return (b"U" + bytes([len(value)]) if len(value) < 256 else b"T" + len(value).to_bytes(4, "little")) + value

    shape = b"".join(b"J" + int(n).to_bytes(4, "little") for n in images.shape)
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00t" + text(b"b") + b"tR"
        b"(K\x01(" + shape + b"tcnumpy\ndtype\n(" + text(b"u1") + b"K\x00K\x01tR(K\x03" + text(b"|") + b"NNN"
        b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89" + text(images.tobytes()) + b"tb"
    )
    numbers = b"](" + b"".join(b"K" + bytes([k]) for k in labels) + b"e"
    return (
        b"\x80\x02}(" + text(b"batch_label") + text(b"training batch 1 of 5") + text(b"labels") + numbers
        + text(b"data") + array + b"u."
    )  # fmt: skip


@pytest.mark.parametrize("writer", ["python 2", "protocol 2", "protocol 4"])
def test_both_versions_are_the_same_data(tmp_path: Path, binary: Path, writer: str) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for seed, name in enumerate(BATCHES):
        labels, images = records(seed)
        content = {b"labels": labels.tolist(), b"data": images, b"filenames": ["a.png"] * COUNT}
        (folder / name).write_bytes(
            pickled_by_python_2(labels, images)
            if writer == "python 2"
            else pickle.dumps(content, protocol=int(writer[-1]))
        )
    one, other = Cifar10(str(binary)).pool(), Cifar10(str(folder)).pool()
    assert torch.equal(one.images, other.images) and torch.equal(one.labels, other.labels)
    assert one.names == other.names and one.given == other.given
    labels, images = records(2)
    place = 2 * COUNT + 7
    assert one.names[place] == "data_batch_3#7" and one.labels[place] == labels[7]
    assert np.array_equal(one.images[place].numpy(), images[7].reshape(3, 32, 32))
    assert one.given == ["train"] * 5 * COUNT + ["test"] * COUNT and set(one.sites) == {""}
    assert one.classes == tuple(CLASSES) and not one.problems


def test_the_folder_above_will_do(binary: Path) -> None:
    assert len(Cifar10(str(binary.parent)).pool()) == 6 * COUNT


def test_it_has_no_sites(binary: Path) -> None:
    pool = Cifar10(str(binary)).pool()
    with pytest.raises(UserError, match="cifar10 does not say where its samples come from: say partition=dirichlet"):
        divide(pool, Natural(), Splits(), 0, Cifar10())
    clients = divide(pool, Dirichlet(4, 1.0, 5), Splits(), 0, Cifar10())
    assert [len(index.test) for index in clients.values()] == [5] * 4
    held = [len(index.val) / (len(index.train) + len(index.val)) for index in clients.values()]
    assert all(abs(share - 0.1) < 0.1 for share in held)


def test_class_folders(tmp_path: Path, draw: Callable[..., Path]) -> None:
    for side in ("train", "test"):
        for label, name in enumerate(("airplane", "car", *list(CLASSES)[2:])):
            for number in range(2):
                seed = 100 * label + 10 * number + len(side)
                draw(tmp_path / side / name / f"{number}.png", seed=seed, size=(32, 32))
    pool = Cifar10(str(tmp_path)).pool()
    assert pool.images.shape == (40, 3, 32, 32) and torch.bincount(pool.labels).tolist() == [4] * 10
    assert pool.given == ["train"] * 20 + ["test"] * 20 and set(pool.sites) == {""}
    (tmp_path / "train").rename(tmp_path / "images")
    flat = Cifar10(str(tmp_path / "images")).pool()
    assert len(flat) == 20 and set(flat.given) == {""}


def test_duplicates_form_a_group(binary: Path) -> None:
    file = binary / "data_batch_1.bin"
    data = file.read_bytes()
    file.write_bytes(data + data[:3073])
    pool = Cifar10(str(binary)).pool()
    assert pool.groups[COUNT] == 0 and len(set(pool.groups)) == len(pool) - 1
    assert [problem.what.split(":")[0] for problem in pool.problems] == ["duplicate"]


def test_damage_is_named(binary: Path) -> None:
    (binary / "data_batch_2.bin").write_bytes((binary / "data_batch_2.bin").read_bytes()[:-100])
    data = bytearray((binary / "data_batch_3.bin").read_bytes())
    data[0] = 77
    (binary / "data_batch_3.bin").write_bytes(data)
    (binary / "data_batch_4.bin").unlink()
    (binary / "data_batch_5.bin").write_bytes(b"")
    pool = Cifar10(str(binary)).pool()
    assert len(pool) == COUNT + (COUNT - 1) + (COUNT - 1) + 0 + 0 + COUNT
    assert [(problem.file, problem.what) for problem in pool.problems] == [
        ("data_batch_4.bin", "is missing; left out"),
        ("data_batch_2.bin", "ends in the middle of image 20 (record of 3,073 bytes); the last is left out"),
        ("data_batch_3.bin", "1 labels are none of 0–9 (77); left out"),
    ]


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cifar10: .* has neither data_batch_1.bin … .binary version., nor"):
        Cifar10(str(tmp_path)).pool()


# Pickles


class Evil:
    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


def touch(path: Path) -> str:
    return f"touch '{path}'"


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_that_would_do_something(tmp_path: Path, protocol: int) -> None:
    victim = tmp_path / "owned"
    for bad in (Evil(os.system, touch(victim)), Evil(eval, f"open({str(victim)!r}, 'w')"), Evil(getattr, "x", "upper")):
        data = pickle.dumps({b"data": bad, b"labels": []}, protocol=protocol)
        with pytest.raises(Broken, match=r"^not a pickle of plain data: asks for .*\.(system|eval|getattr), wh"):
            load_plain(data)
    assert not victim.exists()
    os.system(touch(victim))
    assert victim.exists(), "it would have"


@pytest.mark.parametrize(
    "data",
    [
        b"cnumpy.core.multiarray\n_reconstruct\n(cos\nsystem\n(K\x00tU\x01btR.",  # through an argument
        b"cnumpy\nload\n(S'x'\ntR.",  # a function of NumPy's that is not needed
        b"cnumpy.testing._private.utils\nrunstring\n.",
        b"\x80\x04\x8c\x05numpy\x8c\x0bndarray.tofile\x93.",  # dotted, through an allowed name
        b"\x80\x02P1\n.",  # persistent ids
        b"c_codecs\nencode\n(S'x'\nS'rot13'\ntR.",
        b"\x80\x02}q\x00.."[:-2],  # cut off
        b"",
        b"garbage",
        b"\x80\xff.",
        b"K\x01.",  # a number, no dict
        b"c__builtin__\ndict\n(tR.",
    ],
)
def test_whatever_else_a_pickle_may_ask_for(data: bytes) -> None:
    with pytest.raises(Broken, match=r"^not a pickle of plain data: ") as caught:
        load_plain(data)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        {b"data": np.zeros((2, 3072)), b"labels": [1, 2]},
        {b"data": np.zeros((2, 3072), np.uint8), b"labels": [1, "2"]},
        {b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]},
        {b"data": np.zeros((2, 3072), np.uint8)},
        {b"data": [1, 2], b"labels": [1, 2]},
        {b"labels": [1]},
        {b"data": np.array([{}, {}], dtype=object), b"labels": [1, 2]},
    ],
)
def test_a_python_batch_with_something_else_in_it(tmp_path: Path, content: Any) -> None:
    good = pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1, 2]}, protocol=2)
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps(content, protocol=2))
    (tmp_path / "test_batch").write_bytes(good)
    pool = Cifar10(str(tmp_path)).pool()
    assert len(pool) == 2
    broken = [problem for problem in pool.problems if problem.file == "data_batch_1"]
    assert len(broken) == 1 and broken[0].what.startswith("broken: ") and broken[0].what.endswith("; left out")


def test_an_array_says_how_large_it_is_and_is_not_believed() -> None:
    """A shape of a million million bytes costs no memory."""
    data = pickle.dumps({b"data": np.zeros(4, np.uint8)}, protocol=2)
    huge = data.replace(b"K\x04\x85", b"\x8a\x06" + (10**12).to_bytes(6, "little") + b"\x85")
    assert huge != data
    with pytest.raises(Broken, match="'data' does not hold as many bytes as it says"):
        load_plain(huge).array("data")
    assert load_plain(data).array("data").tolist() == [0] * 4
    by_column = np.asfortranarray(np.arange(6, dtype=np.uint8).reshape(2, 3))
    assert load_plain(pickle.dumps({"a": by_column}, protocol=2)).array("a").tolist() == [[0, 1, 2], [3, 4, 5]]


def test_stand_ins_cannot_be_turned_into_anything() -> None:
    """BUILD, which may set attributes, is for the two things that were made here."""
    for target in (b"cnumpy\nndarray\n", b"cnumpy.core.multiarray\n_reconstruct\n", b"}"):
        with pytest.raises(Broken, match="gives a state to something that has none"):
            load_plain(b"\x80\x02" + target + b"N}U\x08__call__K\x01s\x86b.")


def test_a_few_bytes_do_not_fill_the_memory() -> None:
    """A memo entry with the number 2³¹ makes C's unpickler ask for tens of gigabytes."""
    tracemalloc.start()
    with pytest.raises(Broken, match="it holds no dict"):
        load_plain(b"\x80\x02K\x01r\xff\xff\xff\x7f.")
    assert tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()
