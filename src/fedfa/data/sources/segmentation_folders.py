"""A user's own federation for segmentation: a folder a client, in it images and masks."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedfa.data.cache import Facts, Writer, cached_pool
from fedfa.data.pool import Pool, Problem
from fedfa.data.sources.reading import (
    Broken,
    Decoded,
    Pixels,
    decode_file,
    decode_mask,
    find_folder,
    folders,
    image_files,
    in_parallel,
    nearest,
    need_pillow,
    relative,
)
from fedfa.data.sources.trees import Seen, check_size
from fedfa.errors import UserError

READER = 1
IMAGES = ("images", "image", "imgs", "img")
MASKS = ("masks", "mask", "labels", "label", "annotations", "segmentations")
SUFFIX = re.compile(r"[-_. ]?(mask|masks|seg|segmentation|label|labels|gt|annotation)$")
MOST_CLASSES = 32
"""More values in the masks are taken for blurred edges and not for classes. In a JPEG, more than two are."""
JPEG = (".jpg", ".jpeg", ".jpe", ".jfif")


@dataclass(frozen=True)
class Pair:
    """An image and its mask."""

    image: Path
    mask: Path
    name: str
    site: str


@dataclass(frozen=True)
class SegmentationFolders:
    """CLIENT/images and CLIENT/masks, with a mask for every image: a file of the same name, but for its extension and
    an ending such as _mask.

    A mask has a number a pixel: grey values, or the indices of a palette. 0 is the background.

    Attributes:
        path: the folder. Empty for `$FEDFA_DATA/segmentation_folders`, or `data/segmentation_folders`.
        size: images and masks are made `size`×`size`: images bilinear, masks by the nearest pixel.
        channels: 3 for RGB, 1 for grey.
        values: the values in the masks, that of the background first, in the order of their class numbers. Empty for
            those that are found, in order: 0 and 255 become 0 and 1.
        above: any number makes masks binary: 1 where the value is above it. For masks saved as JPEG, say 127; for a
            target that is several classes at once, 0.
        classes: what the classes are called, the background first. Empty for their values.
    """

    path: str = ""
    size: int = 256
    channels: Literal[1, 3] = 3
    values: tuple[int, ...] = ()
    above: int | None = None
    classes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_size(self.size)
        if self.values and self.above is not None:
            raise ValueError("values and above exclude each other: masks have classes, or are binary")
        if len(set(self.values)) != len(self.values) or len(self.values) == 1:
            raise ValueError(f"values are two or more different numbers, not {list(self.values)}")
        if any(not 0 <= value <= 65535 for value in self.values):
            raise ValueError(f"values are between 0 and 65535, not {list(self.values)}")
        number = 2 if self.above is not None else len(self.values)
        if self.classes and number and len(self.classes) != number:
            raise ValueError(f"masks have {number} classes, and classes has {len(self.classes)} names")

    def pool(self) -> Pool:
        problems: list[Problem] = []
        root = find_folder(self.path, "segmentation_folders")
        pairs = [pair for client in folders(root) for pair in _pairs(client, root, problems)]
        if not pairs:
            first = f"; {problems[0].file}: {problems[0].what}" if problems else ""
            raise UserError(
                f"segmentation_folders: {root} has no images with masks in CLIENT/images and CLIENT/masks{first}"
            )
        settings = {
            "reader": f"{READER} {need_pillow()}",
            "size": self.size,
            "channels": self.channels,
            "values": list(self.values),
            "above": self.above,
            "classes": list(self.classes),
        }
        files = [file for pair in pairs for file in (pair.image, pair.mask)]
        meaning = [[pair.name, pair.site] for pair in pairs]
        return cached_pool(
            "segmentation_folders", "segmentation", root, files, settings,
            lambda writer: self._read(writer, pairs), problems, meaning,
        )  # fmt: skip

    def _read(self, writer: Writer, pairs: Sequence[Pair]) -> Facts:
        values = self.values or self._values_of(pairs)
        facts, seen = Facts(self._class_names(values)), Seen()
        results = in_parallel(lambda pair: self._sample(pair, values), pairs, "reading segmentation_folders")
        with closing(results):
            for pair, found in zip(pairs, results, strict=True):
                if isinstance(found, Broken):
                    facts.problems.append(Problem(pair.name, f"broken: {found}; left out"))
                    continue
                image, mask = found
                if not mask.any():
                    facts.problems.append(Problem(pair.name, "empty: its mask is all background; kept"))
                seen.add(pair.name, image)
                writer.append("images", image.pixels[None])
                writer.append("labels", mask[None])
                facts.names.append(pair.name)
                facts.sites.append(pair.site)
        facts.given, facts.groups = [""] * len(facts.names), seen.groups
        facts.problems += [*seen.problems(), *_doubts(values)]
        return facts

    def _sample(self, pair: Pair, values: Sequence[int]) -> tuple[Decoded, Pixels]:
        image, mask = decode_file(pair.image, self.size, self.channels), self._mask(pair.mask)
        if image.shape != mask.shape:
            sizes = " and ".join(f"{width}×{height}" for height, width in (image.shape, mask.shape))
            raise Broken(f"image and mask are {sizes} pixels")
        strange = np.setdiff1d(mask, values)
        if len(strange):
            raise Broken(f"the mask has the value {strange[0]}, which is none of {', '.join(map(str, values))}")
        classes = np.zeros(max(values) + 1, np.uint8)
        classes[list(values)] = np.arange(len(values))
        return image, nearest(classes[mask], self.size)

    def _mask(self, file: Path) -> NDArray[np.int32]:
        """A mask's values; with `above`, 0 and 1."""
        try:
            mask = decode_mask(file)
        except Broken as broken:
            raise Broken(f"its mask: {broken}") from broken
        return mask if self.above is None else (mask > self.above).astype(np.int32)

    def _values_of(self, pairs: Sequence[Pair]) -> tuple[int, ...]:
        """All values in the masks, in order. A mask with very many is broken, and asks for none; most of them are a
        mistake in how masks were saved."""
        if self.above is not None:
            return 0, 1
        found: set[int] = set()
        blurred = read = 0
        results = in_parallel(lambda pair: np.unique(decode_mask(pair.mask)), pairs, "looking at masks")
        for pair, values in zip(pairs, results, strict=True):
            if not isinstance(values, Broken):
                read += 1
                if len(values) > (2 if pair.mask.suffix.lower() in JPEG else MOST_CLASSES):
                    blurred += 1
                else:
                    found.update(values.tolist())
        if blurred > read / 2 or len(found) > MOST_CLASSES:
            raise UserError(
                "segmentation_folders: masks have so many values that they must be blurred, as JPEG blurs them; "
                "say source.above=127 for binary masks, or source.values=[…] for others"
            )
        return tuple(sorted(found)) or (0,)

    def _class_names(self, values: Sequence[int]) -> tuple[str, ...]:
        if not self.classes:
            binary = len(values) == 2
            return "background", *("foreground" if binary else str(value) for value in values[1:])
        if len(self.classes) != len(values):
            found = ", ".join(map(str, values))
            raise UserError(
                f"segmentation_folders: source.classes has {len(self.classes)} names, but masks have the values {found}"
            )
        return self.classes


def _doubts(values: Sequence[int]) -> list[Problem]:
    if len(values) < 2:
        return [Problem("", f"all masks are {values[0]} everywhere: there is nothing to learn", fatal=True)]
    return [] if values[0] == 0 else [Problem("", f"no mask has a 0: {values[0]} is taken for the background")]


def _pairs(client: Path, root: Path, problems: list[Problem]) -> list[Pair]:
    """The images of a client that have a mask. The others, and masks without images, are problems."""
    inner = {folder.name.lower(): folder for folder in folders(client)}
    images, masks = (next((inner[name] for name in names if name in inner), None) for names in (IMAGES, MASKS))
    if images is None or masks is None:
        missing = "images" if images is None else "masks"
        problems.append(Problem(relative(client, root), f"has no folder {missing}; left out"))
        return []
    by_name = {_key(file, masks): file for file in image_files(masks, root, problems)}
    bare = {SUFFIX.sub("", key): file for key, file in by_name.items()}
    pairs, used = [], set[Path]()
    for file in image_files(images, root, problems):
        name, key = relative(file, root), _key(file, images)
        mask = by_name.get(key) or bare.get(key)
        if mask is None:
            problems.append(Problem(name, "has no mask; left out"))
        elif mask in used:
            problems.append(Problem(name, f"its mask {relative(mask, root)} is another image's as well; left out"))
        else:
            used.add(mask)
            pairs.append(Pair(file, mask, name, relative(client, root)))
    problems += [
        Problem(relative(mask, root), "a mask without an image") for mask in by_name.values() if mask not in used
    ]
    return pairs


def _key(file: Path, folder: Path) -> str:
    """What an image and its mask have in common: the path in their folders without the extension."""
    return unicodedata.normalize("NFC", file.relative_to(folder).with_suffix("").as_posix()).casefold()
