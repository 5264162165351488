"""A user's own federation: a folder a client, in it a folder a class."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedfa.data.pool import Given, Pool, Problem
from fedfa.data.sources.reading import find_folder, folders, image_files, is_image, relative
from fedfa.data.sources.trees import Item, check_size, class_folders, read_items
from fedfa.errors import UserError

SIDES: dict[str, Given] = {"train": "train", "training": "train", "test": "test", "testing": "test"}
SIDES |= dict.fromkeys(("val", "valid", "validation"), "val")


@dataclass(frozen=True)
class ImageFolders:
    """CLIENT/CLASS/images, or CLIENT/train|val|test/CLASS/images, which then is the given split.

    Classes are the folders' names over all clients; capitals make no difference. A client need not have them all.

    Attributes:
        path: the folder. Empty for `$FEDFA_DATA/image_folders`, or `data/image_folders`.
        size: images are made `size`×`size`.
        channels: 3 for RGB, 1 for grey.
    """

    path: str = ""
    size: int = 256
    channels: Literal[1, 3] = 3

    def __post_init__(self) -> None:
        check_size(self.size)

    def pool(self) -> Pool:
        problems: list[Problem] = []
        root = find_folder(self.path, "image_folders")
        found = [(client, *inner) for client in folders(root) for inner in _classes(client, problems, root)]
        if not found:
            raise UserError(f"image_folders: {root} has no folders CLIENT/CLASS with images in them{_hint(root)}")
        spelled: dict[str, str] = {}
        for _, _, folder in found:
            spelled.setdefault(_class(folder), unicodedata.normalize("NFC", folder.name))
        order = {name: label for label, name in enumerate(sorted(spelled, key=_natural))}
        items: list[Item] = []
        for client, side, folder in found:
            files = image_files(folder, root, problems)
            if not files:
                problems.append(Problem(relative(folder, root), "has no images"))
            name, label = relative(client, root), order[_class(folder)]
            items += [Item(file, relative(file, root), name, label, side) for file in files]
        classes = [spelled[name] for name in order]
        return read_items("image_folders", root, items, classes, problems, self.size, self.channels)


def _classes(client: Path, problems: list[Problem], root: Path) -> Iterator[tuple[Given, Path]]:
    """Every class folder of a client, with the side that it stands on."""
    inner = class_folders(client)
    sides = [SIDES.get(folder.name.lower(), "") for folder in inner]
    if inner and all(sides):
        yield from ((side, folder) for side, place in zip(sides, inner, strict=True) for folder in folders(place))
        return
    if not inner:
        problems.append(Problem(relative(client, root), "has no folders of classes; left out"))
    yield from (("", folder) for folder in inner)


def _class(folder: Path) -> str:
    return unicodedata.normalize("NFC", folder.name).strip().casefold()


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Sorts numbers in names by their value, 2 before 10, and before letters."""
    parts = [part for part in re.split(r"(\d+)", name) if part]
    return [(False, int(part), "") if part.isdecimal() else (True, 0, part) for part in parts]


def _hint(root: Path) -> str:
    """What is probably wrong with a tree that has no classes."""
    flat = next((folder.name for folder in folders(root) if any(is_image(file) for file in os.listdir(folder))), None)
    if flat is None:
        return ""
    return f"; the images in {flat} lie one level too high: put the folders of classes into a folder of a client"
