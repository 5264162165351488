"""CIFAR-10: 60,000 photographs of 32 pixels in ten classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedfa.data.cache import Facts, Writer, cached_pool
from fedfa.data.pool import Given, Pool, Problem
from fedfa.data.sources.arrays import Gathering
from fedfa.data.sources.plain_pickle import load_plain
from fedfa.data.sources.reading import Broken, find_folder, folders, read_bytes, relative
from fedfa.data.sources.trees import list_tree, plain, read_items, spelled
from fedfa.data.splits import Shares
from fedfa.errors import UserError

CLASSES = {
    "airplane": ("plane", "aeroplane"),
    "automobile": ("car",),
    "bird": (),
    "cat": (),
    "deer": (),
    "dog": (),
    "frog": (),
    "horse": (),
    "ship": (),
    "truck": (),
}
BATCHES: dict[str, Given] = {**{f"data_batch_{number}": "train" for number in range(1, 6)}, "test_batch": "test"}
PIXELS = 3 * 32 * 32
MOST_BYTES = 256 << 20
"""A batch has 31 MB."""

Records = tuple[NDArray[Any], NDArray[np.uint8]]
"""Labels (N,) and images (N, 3072)."""


@dataclass(frozen=True)
class Cifar10:
    """Krizhevsky, 2009: the 'binary version' (data_batch_1.bin …), the 'python version' (data_batch_1 …, pickles, of
    which nothing is executed), or folders of images: train/CLASS and test/CLASS, or CLASS.

    The images come from nowhere in particular: a partition makes clients of them, such as dirichlet. The data set's
    own 10,000 test images are the test part; a tenth of the others validates.

    Attributes:
        path: the folder, or the one it is in. Empty for `$FEDFA_DATA/cifar10`, or `data/cifar10`.
    """

    path: str = ""

    shares: ClassVar[Shares] = Shares("1/6", "1/12", "down")

    def pool(self) -> Pool:
        root = find_folder(self.path, "cifar10")
        for place in (root, *folders(root)):
            for suffix, read in ((".bin", _binary), ("", _pickled)):
                files = [place / f"{name}{suffix}" for name in BATCHES]
                if any(file.is_file() for file in files):
                    return _from_batches(place, files, read)
        return _from_folders(root)


def _from_batches(root: Path, files: list[Path], read: Callable[[bytes, Gathering, str], Records]) -> Pool:
    missing = [Problem(file.name, "is missing; left out") for file in files if not file.is_file()]
    there = [file for file in files if file.is_file()]

    def make(writer: Writer) -> Facts:
        gathering = Gathering(writer, tuple(CLASSES))
        for file in there:
            name = relative(file, root)
            try:
                if file.stat().st_size > MOST_BYTES:
                    raise Broken(f"larger than the {MOST_BYTES:,} bytes allowed")
                labels, images = read(read_bytes(file), gathering, name)
            except Broken as broken:
                gathering.problem(name, f"broken: {broken}; left out")
                continue
            good = np.flatnonzero(gathering.good_labels(labels, name))
            names = (f"{file.stem}#{number}" for number in good.tolist())  # the same in both versions
            pixels = images[good].reshape(-1, 3, 32, 32)
            gathering.add(pixels, labels[good], names, [""] * len(good), BATCHES[file.stem])
        return gathering.finish()

    return cached_pool("cifar10", "classification", root, there, {"reader": 1}, make, missing)


def _binary(data: bytes, gathering: Gathering, name: str) -> Records:
    """Records of a label byte and the red, green and blue planes."""
    whole, rest = divmod(len(data), 1 + PIXELS)
    if rest:
        gathering.problem(
            name, f"ends in the middle of image {whole + 1:,} (record of 3,073 bytes); the last is left out"
        )
    rows = np.frombuffer(data, np.uint8, whole * (1 + PIXELS)).reshape(whole, 1 + PIXELS)
    return rows[:, 0].astype(np.int64), rows[:, 1:]


def _pickled(data: bytes, gathering: Gathering, name: str) -> Records:
    content = load_plain(data)
    images, labels = content.array("data"), content.whole_numbers("labels")
    if images.shape != (len(labels), PIXELS):
        raise Broken(f"has images {images.shape} for {len(labels)} labels, not ({len(labels)}, {PIXELS})")
    return labels, images


def _from_folders(root: Path) -> Pool:
    """train/CLASS/images and test/CLASS/images, or CLASS/images."""
    problems: list[Problem] = []
    names = spelled(CLASSES)
    for place in (root, *folders(root)):
        inner = {plain(folder.name): folder for folder in folders(place)}
        sides: dict[str, Given] = {"train": "train", "test": "test"}
        parts = {side: [inner[side]] for side in sides if side in inner}
        if parts or names.keys() & inner.keys():
            items = list_tree(place, parts or {"": [place]}, CLASSES, problems)
            items = [replace(item, site="", given=sides.get(item.site, "")) for item in items]
            return read_items("cifar10", place, items, tuple(CLASSES), problems, 32)
    raise UserError(
        f"cifar10: {root} has neither data_batch_1.bin … (binary version), nor data_batch_1 … (python version), "
        "nor folders train/airplane … with images"
    )
