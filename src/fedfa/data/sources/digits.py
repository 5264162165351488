"""Digits from three worlds: MNIST's pen on paper, MNIST-M's digits cut out of photographs, USPS's envelopes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from fedfa.data.cache import Facts, Writer, cached_pool
from fedfa.data.pool import Given, Pool, Problem
from fedfa.data.sources.arrays import CHUNK, Gathering, resize
from fedfa.data.sources.idx import read_idx
from fedfa.data.sources.reading import Broken, find_folder, folders
from fedfa.data.sources.trees import check_size
from fedfa.data.splits import Shares
from fedfa.errors import UserError

CLASSES = tuple("0123456789")
SIDES: tuple[Given, ...] = ("train", "test")
DOMAINS = ("mnist", "mnistm", "usps")
WRITERS, OTHERS = "mnist_by_writer.npz", "digits.npz"


@dataclass(frozen=True)
class Digits:
    """MNIST, MNIST-M and USPS, made one size and number of channels; each is a site.

    MNIST is read from its idx files (train-images-idx3-ubyte and so on, packed or not), or from mnist_by_writer.npz
    (x_train, y_train, x_test, y_test); MNIST-M and USPS from digits.npz (mnistm_x_train, usps_x_train and so on). They
    may lie in the folder, in one in it, or in one beside it. Each brings a test part of its own.

    Attributes:
        path: the folder. Empty for `$FEDFA_DATA/digits`, or `data/digits`.
        size: images are made `size`×`size`: they come in 28, 32 and 16.
        channels: 3, grey ones three times the same; or 1, the mean of the coloured ones.
        most: the first so many of every site and part are read; 0 for all. MNIST is 17 times as large as the others.
    """

    path: str = ""
    size: int = 28
    channels: Literal[1, 3] = 3
    most: int = 0

    shares: ClassVar[Shares] = Shares(0.2, 0.2)

    def __post_init__(self) -> None:
        check_size(self.size)
        if self.most < 0:
            raise ValueError(f"most is at least 1, or 0 for all, not {self.most}")

    def pool(self) -> Pool:
        root = find_folder(self.path, "digits")
        files = _find(root)
        if not files:
            raise UserError(f"digits: {root} has neither MNIST's idx files, nor {WRITERS}, nor {OTHERS}")
        settings = {"reader": 1, "size": self.size, "channels": self.channels, "most": self.most}
        listed = [file for found in files.values() for file in found]

        def make(writer: Writer) -> Facts:
            gathering = Gathering(writer, CLASSES)
            for name, found in files.items():
                self._read(gathering, name, found)
            return gathering.finish()

        pool = cached_pool("digits", "classification", root, listed, settings, make)
        missing = [Problem("", f"domain {site} is missing") for site in DOMAINS if site not in set(pool.sites)]
        return replace(pool, problems=(*pool.problems, *missing))

    def _read(self, gathering: Gathering, name: str, files: list[Path]) -> None:
        """The samples in one of the archives, or in MNIST's two files for a side."""
        try:
            parts = _archive(files[0]) if name in (WRITERS, OTHERS) else _idx_pair(name, files)
            for (site, side), (images, labels) in parts.items():
                self._add(gathering, files[0], site, side, images, labels)
        except Broken as broken:
            gathering.problem(files[0].name, f"broken: {broken}; left out")

    def _add(
        self,
        gathering: Gathering,
        file: Path,
        site: str,
        side: Given,
        images: NDArray[np.uint8],
        labels: NDArray[Any],
    ) -> None:
        planes = images[..., None] if images.ndim == 3 else images
        if images.dtype != np.uint8 or planes.ndim != 4 or planes.shape[3] not in (1, 3) or not planes[:1].size:
            raise Broken(f"{site} {side} has images {images.dtype} {images.shape}")
        if labels.shape != (len(images),) or labels.dtype.kind not in "ui":
            raise Broken(f"{site} {side} has labels {labels.dtype} {labels.shape} for {len(images)} images")
        good = np.flatnonzero(gathering.good_labels(labels, file.name))[: self.most or None]
        for start in range(0, len(good), CHUNK):
            part = good[start : start + CHUNK]
            pixels = planes[part].transpose(0, 3, 1, 2)
            if self.channels == 1 and pixels.shape[1] == 3:
                pixels = np.rint(pixels.mean(1, keepdims=True)).astype(np.uint8)
            names = (f"{site}/{side}#{number}" for number in part.tolist())
            gathering.add(resize(pixels, self.size, self.channels), labels[part], names, [site] * len(part), side)


def _find(root: Path) -> dict[str, list[Path]]:
    """The archives, and MNIST's pairs of idx files where there is no archive with it."""
    beside = root.resolve().parent / "mnist_by_writer"
    inside = [root, *folders(root), *(inner for folder in folders(root) for inner in folders(folder))]
    places = [*inside, *([beside] if beside.is_dir() else [])]
    found = {name: [file] for name in (WRITERS, OTHERS) if (file := _first(places, [name])) is not None}
    for side, stem in (("train", "train"), ("test", "t10k")):
        stems = [(f"{stem}-images-idx3-ubyte", f"{stem}-labels-idx1-ubyte")]
        stems += [(images.replace("-idx", ".idx"), labels.replace("-idx", ".idx")) for images, labels in stems]
        pair = [_first(places, [f"{names[part]}{end}" for names in stems for end in ("", ".gz")]) for part in (0, 1)]
        there = [file for file in pair if file is not None]
        if len(there) == 2 and WRITERS not in found:
            found[side] = there
    return found


def _first(places: Iterable[Path], names: Iterable[str]) -> Path | None:
    wanted = list(names)
    return next((place / name for place in places for name in wanted if (place / name).is_file()), None)


Parts = dict[tuple[str, Given], tuple[NDArray[np.uint8], NDArray[Any]]]
"""Images and labels by site and side."""


def _idx_pair(name: str, files: list[Path]) -> Parts:
    side: Given = "train" if name == "train" else "test"
    return {("mnist", side): (read_idx(files[0], 3), read_idx(files[1], 1))}


def _archive(file: Path) -> Parts:
    """What an .npz file has of our sites; nothing in it is unpickled."""
    sites = {"mnist": ""} if file.name == WRITERS else {site: f"{site}_" for site in DOMAINS}
    parts: Parts = {}
    try:
        with open(file, "rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            for site, prefix in sites.items():
                for side in SIDES:
                    keys = f"{prefix}x_{side}", f"{prefix}y_{side}"
                    if keys[0] in arrays and keys[1] in arrays:
                        parts[site, side] = arrays[keys[0]], arrays[keys[1]]
    except Exception as error:  # damaged archives raise whatever zipfile, zlib or NumPy come upon
        raise Broken(" ".join(str(error).split()) or type(error).__name__) from error
    if not parts:
        raise Broken(f"has none of {', '.join(f'{prefix}x_train' for prefix in sites.values())}")
    return parts
