"""EMNIST and FEMNIST: handwritten digits and letters, 62 classes, by writer."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from fedfa.data.cache import Facts, Writer, cached_pool
from fedfa.data.pool import Given, Pool, Problem
from fedfa.data.sources.arrays import CHUNK, Gathering
from fedfa.data.sources.idx import read_idx
from fedfa.data.sources.leaf import users
from fedfa.data.sources.reading import Broken, find_folder, folders, relative
from fedfa.data.splits import Shares
from fedfa.errors import UserError

CLASSES = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
SIDES: tuple[Given, ...] = ("train", "test")


@dataclass(frozen=True)
class Emnist:
    """Cohen et al., 2017, and LEAF's version by writer (Caldas et al., 2018), 28×28, one channel. Read are:

    - LEAF's JSON, as its preprocessing leaves it: `train` and `test` where both are there (their split is kept), else
      `all_data`, else the JSON files in the folder. A writer is a site. LEAF's images are black (0) on white (1).
    - the idx files of the by-class split, emnist-byclass-train-images-idx3-ubyte and so on, packed or not. Whose hand
      it is they do not say. Images are white on black, and stored on their side: they are turned upright.
    - emnist-byclass.mat, the same with writers, which are sites.

    Attributes:
        path: the folder. Empty for `$FEDFA_DATA/emnist`, or `data/emnist`.
        ink: how letters stand out in what is read, from whichever files: `bright` on black, as in MNIST, or `dark`.
    """

    path: str = ""
    ink: Literal["bright", "dark"] = "bright"

    shares: ClassVar[Shares] = Shares(0.2, 0.2)

    def pool(self) -> Pool:
        root = find_folder(self.path, "emnist")
        for find in (_leaf, _idx, _mat):
            found = find(root)
            if found is not None:
                break
        else:
            raise UserError(
                f"emnist: {root} has neither LEAF's JSON files (all_data/*.json), nor "
                "emnist-byclass-train-images-idx3-ubyte, nor emnist-byclass.mat"
            )
        files, read, problems = found

        def make(writer: Writer) -> Facts:
            gathering = Gathering(writer, CLASSES)
            read(gathering, self.ink == "bright")
            return gathering.finish()

        return cached_pool("emnist", "classification", root, files, {"reader": 1, "ink": self.ink}, make, problems)


Found = tuple[list[Path], Callable[[Gathering, bool], None], list[Problem]]
"""Files, what reads them (with bright ink, or dark), and what is wrong already."""


def _inside(root: Path, depth: int = 3) -> list[Path]:
    """A folder and those in it, as deep as archives and preprocessing put things."""
    return [root] + [place for inner in folders(root) for place in (_inside(inner, depth - 1) if depth else [])]


# LEAF


def _leaf(root: Path) -> Found | None:
    """The JSON files, each with its side: from train and test, from all_data, or from the folder itself."""
    places = {place.name: place for place in reversed(_inside(root)) if place.name in ("train", "test", "all_data")}
    named = {name: _json_files(place) for name, place in places.items()}
    sides: dict[Given, list[Path]]
    if named.get("train") and named.get("test"):
        sides = {side: named[side] for side in SIDES}
    else:
        sides = {"": named.get("all_data") or _json_files(root)}

    def read(gathering: Gathering, bright: bool) -> None:
        for side, files in sides.items():
            for file in files:
                _read_leaf(gathering, file, relative(file, root), side, bright)

    files = [file for part in sides.values() for file in part]
    return (files, read, []) if files else None


def _json_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*.json") if file.is_file())


def _read_leaf(gathering: Gathering, file: Path, name: str, side: Given, bright: bool) -> None:
    try:
        for user, data in users(file):
            try:
                images, labels = _samples(data, bright)
            except Broken as broken:
                gathering.problem(name, f"broken: writer {user}: {broken}; left out")
                continue
            good = np.flatnonzero(gathering.good_labels(labels, f"{name}#{user}"))
            names = (f"{name}#{user}/{number}" for number in good.tolist())
            gathering.add(images[good], labels[good], names, [user] * len(good), side)
    except Broken as broken:
        gathering.problem(name, f"broken: {broken}; the writers after that are left out")
    except OSError as error:
        gathering.problem(name, f"broken: cannot be read ({error.strerror}); left out")


def _samples(data: Any, bright: bool) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """A writer's images (N, 1, 28, 28) and labels."""
    try:
        x, y = np.array(data["x"], dtype=np.float32), np.array(data["y"], dtype=np.float64)
    except (KeyError, TypeError, ValueError):
        raise Broken("has no lists x and y of numbers") from None
    if y.ndim != 1 or x.shape != (len(y), 784):
        raise Broken(f"x is {'×'.join(map(str, x.shape))} for {y.size} labels, not {y.size}×784")
    if not len(y):
        return np.empty((0, 1, 28, 28), np.uint8), np.empty(0, np.int64)
    if not (x.min() >= 0 and x.max() <= 1):  # NaN is neither
        raise Broken("x has numbers outside of 0–1")
    if not (np.isfinite(y).all() and (y == np.rint(y)).all()):
        raise Broken("y has numbers that are not whole")
    pixels = np.rint(255 * (1 - x if bright else x)).astype(np.uint8)
    return pixels.reshape(-1, 1, 28, 28), y.astype(np.int64)


# EMNIST's own files


def _idx(root: Path) -> Found | None:
    pairs: dict[Given, tuple[Path, Path]] = {}
    problems = []
    for side in SIDES:
        images, labels = (_named(root, rf"(emnist-)?byclass-{side}-{part}(\.gz)?") for part in PARTS)
        if images and labels:
            pairs[side] = images, labels
        elif images or labels:
            problems.append(Problem("", f"the by-class {'labels' if images else 'images'} for {side} are missing"))
    if not pairs:
        return None

    def read(gathering: Gathering, bright: bool) -> None:
        for side, (image_file, label_file) in pairs.items():
            name = re.sub(r"\.gz$", "", relative(image_file, root))
            try:
                images, labels = read_idx(image_file, 3), read_idx(label_file, 1)
            except Broken as broken:
                gathering.problem(name, f"broken, or its labels: {broken}; left out")
                continue
            if images.shape[1:] != (28, 28) or len(images) != len(labels):
                gathering.problem(name, f"broken: has images {images.shape} for {len(labels)} labels; left out")
                continue
            _add_on_side(gathering, images, labels.astype(np.int64), name, [""] * len(labels), side, bright)

    return [file for pair in pairs.values() for file in pair], read, problems


PARTS = (r"images[-.]idx3-ubyte", r"labels[-.]idx1-ubyte")


def _named(root: Path, pattern: str) -> Path | None:
    found = (file for place in _inside(root) for file in sorted(place.iterdir()) if file.is_file())
    return next((file for file in found if re.fullmatch(pattern, file.name, re.IGNORECASE)), None)


def _mat(root: Path) -> Found | None:
    file = _named(root, r"(emnist-)?byclass\.mat")
    if file is None:
        return None

    def read(gathering: Gathering, bright: bool) -> None:
        name = relative(file, root)
        try:
            for side, (images, labels, writers) in _mat_parts(file).items():
                sites = [f"writer-{writer:04d}" for writer in writers.tolist()]
                _add_on_side(gathering, images, labels, f"{name}#{side}", sites, side, bright)
        except Broken as broken:
            gathering.problem(name, f"broken: {broken}; left out")

    return [file], read, []


def _mat_parts(file: Path) -> dict[Given, tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]]:
    """Images (N, 28, 28) on their side, labels and writers of both parts of the file's `dataset`."""
    try:
        from scipy.io import loadmat
    except ImportError:
        raise UserError("reading .mat files needs SciPy: pip install 'fedfa[data]'") from None
    try:
        dataset = loadmat(file, simplify_cells=True)["dataset"]
        parts = {side: [np.asarray(dataset[side][key]) for key in ("images", "labels", "writers")] for side in SIDES}
    except Exception as error:  # SciPy raises what it likes on damaged files
        reason = " ".join(str(error).split()) or type(error).__name__
        raise Broken(f"not MATLAB's dataset with images, labels and writers ({reason})") from error
    found = {}
    for side, (images, labels, writers) in parts.items():
        if images.dtype != np.uint8 or images.shape != (labels.size, 784) or writers.size != labels.size:
            raise Broken(f"dataset.{side} has images {images.dtype} {images.shape} for {labels.size} labels")
        # MATLAB's order, columns first, is that of the idx files as well: both have the image on its side.
        pixels = images.reshape(-1, 28, 28)
        found[side] = pixels, labels.ravel().astype(np.int64), writers.ravel().astype(np.int64)
    return found


def _add_on_side(
    gathering: Gathering,
    images: NDArray[np.uint8],
    labels: NDArray[np.int64],
    name: str,
    sites: list[str],
    side: Given,
    bright: bool,
) -> None:
    """White-on-black images that are stored transposed, a few thousand at a time."""
    good = np.flatnonzero(gathering.good_labels(labels, name))
    mark = "/" if "#" in name else "#"
    for start in range(0, len(good), CHUNK):
        part = good[start : start + CHUNK]
        upright = images[part].transpose(0, 2, 1)[:, None]
        names = (f"{name}{mark}{number}" for number in part.tolist())
        gathering.add(upright if bright else 255 - upright, labels[part], names, [sites[n] for n in part], side)
