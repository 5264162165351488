"""Folders of sites with folders of classes with images: what Office-Caltech 10, DomainNet, PACS and a user's own
federation have in common."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedfa.data.cache import Facts, Writer, cached_pool
from fedfa.data.pool import Given, Pool, Problem
from fedfa.data.sources.reading import (
    Broken,
    Decoded,
    decode_file,
    digest,
    folders,
    image_files,
    in_parallel,
    need_pillow,
    read_bytes,
    relative,
)
from fedfa.errors import UserError, some

READER = 1
"""Changes when the same files give other pixels or labels."""
MANY = 0.5
"""From this share of the images on, grey ones are told of in one line and not by name."""

Spellings = Mapping[str, Sequence[str]]
"""Names, each with other ways of writing it that are in use."""


@dataclass(frozen=True)
class Item:
    """An image file that belongs to the pool."""

    file: Path
    name: str
    site: str
    label: int
    given: Given = ""


Choose = Callable[[Sequence[Item], Sequence[int]], tuple[Sequence[Item], list[Problem]]]
"""From all items, and for each the number of the first that is the same byte for byte, to those that are kept."""


def plain(name: str) -> str:
    """A name without capitals, a number in front, and signs: 'Back_Pack' and '003.backpack' are both 'backpack'."""
    return re.sub(r"[\W_]+", "", re.sub(r"^\d+[._-]", "", name.lower()))


def spelled(spellings: Spellings) -> dict[str, str]:
    """From any plain spelling of a name, the name itself among them, to the name."""
    return {plain(spelling): name for name, others in spellings.items() for spelling in (name, *others)}


def find_sites(
    source: str, root: Path, spellings: Spellings, problems: list[Problem]
) -> tuple[Path, dict[str, list[Path]]]:
    """Where the sites' folders are, which is `root` or a folder in it, as archives unpack; and each site's folders."""
    names = spelled(spellings)

    def sites_in(place: Path) -> dict[str, list[Path]]:
        return _sort_in(folders(place), names, spellings)[0]

    places = [root, *folders(root)]
    place = max(places, key=lambda place: sum(map(bool, sites_in(place).values())))  # the first of equals
    found = sites_in(place)
    if not any(found.values()):
        there = ", ".join(folder.name for folder in places[1:9]) or "no folders at all"
        raise UserError(f"{source}: {root} has no folder for any of {', '.join(spellings)}; it has {there}")
    problems += [Problem("", f"site {site} is missing") for site, inner in found.items() if not inner]
    return place, {site: inner for site, inner in found.items() if inner}


def list_tree(
    root: Path, sites: Mapping[str, Sequence[Path]], spellings: Spellings, problems: list[Problem]
) -> list[Item]:
    """Every image of the given sites and classes, site by site and class by class. Classes that a site does not have,
    and folders that are none, are problems."""
    names, items = spelled(spellings), []
    for site, places in sites.items():
        inner, others = _sort_in([folder for place in places for folder in class_folders(place)], names, spellings)
        if others:
            problems.append(Problem(relative(places[0], root), f"not among the classes: {some(others, 5)}; left out"))
        for label, name in enumerate(spellings):
            files = [file for folder in inner[name] for file in image_files(folder, root, problems)]
            if not files:
                problems.append(Problem(relative(places[0], root), f"class {name} has no images"))
            items += [Item(file, relative(file, root), site, label) for file in files]
    return items


def class_folders(site: Path) -> list[Path]:
    """The folders of a site's classes: in it, or in a folder `images` in it, as Office-31 has them."""
    inner = folders(site)
    return folders(inner[0]) if [folder.name.lower() for folder in inner] == ["images"] else inner


def _sort_in(
    found: Iterable[Path], names: Mapping[str, str], wanted: Iterable[str]
) -> tuple[dict[str, list[Path]], list[str]]:
    """The folders of every wanted name, and what the others are called."""
    sorted_in: dict[str, list[Path]] = {name: [] for name in wanted}
    others = []
    for folder in found:
        name = names.get(plain(folder.name))
        if name is None:
            others.append(folder.name)
        else:
            sorted_in[name].append(folder)
    return sorted_in, others


def read_items(
    source: str,
    root: Path,
    items: Sequence[Item],
    classes: Sequence[str],
    problems: Sequence[Problem],
    size: int,
    channels: int = 3,
    choose: Choose | None = None,
) -> Pool:
    """The pool of these images, or of those that `choose` takes, through the cache. `problems` are those found so
    far."""
    if not items:
        first = f"; {': '.join(filter(None, (problems[0].file, problems[0].what)))}" if problems else ""
        raise UserError(f"{source}: there are no images in {root}{first}")

    def read(writer: Writer) -> Facts:
        chosen, doubts = (items, []) if choose is None else choose(items, _groups(items, source))
        facts = _read(writer, source, chosen, classes, size, channels)
        facts.problems[:0] = doubts
        return facts

    settings = {
        "reader": f"{READER} {need_pillow()}",
        "size": size,
        "channels": channels,
        "chosen": getattr(choose, "__name__", ""),
    }
    meaning = [list(classes), [[item.name, item.site, item.label, item.given] for item in items]]
    files = [item.file for item in items]
    return cached_pool(source, "classification", root, files, settings, read, problems, meaning)


def _groups(items: Sequence[Item], source: str) -> list[int]:
    """For every file the number of the first that is the same, byte for byte."""
    first: dict[str, int] = {}
    found = in_parallel(lambda item: digest(read_bytes(item.file)), items, f"comparing {source}")
    digests = (f"broken {place}" if isinstance(text, Broken) else text for place, text in enumerate(found))
    return [first.setdefault(text, place) for place, text in enumerate(digests)]


def _read(
    writer: Writer, source: str, items: Sequence[Item], classes: Sequence[str], size: int, channels: int
) -> Facts:
    facts, seen, kept = Facts(classes), Seen(), list[Item]()
    results = in_parallel(lambda item: decode_file(item.file, size, channels), items, f"reading {source}")
    with closing(results):
        for item, found in zip(items, results, strict=True):
            if isinstance(found, Broken):
                facts.problems.append(Problem(item.name, f"broken: {found}; left out"))
                continue
            group = seen.add(item.name, found)
            kept.append(item)
            if kept[group].label != item.label:
                first = f"{kept[group].name} of class {classes[kept[group].label]}"
                facts.problems.append(Problem(item.name, f"two classes: byte for byte {first}; both kept"))
            writer.append("images", found.pixels[None])
            writer.append("labels", np.array([item.label], np.int64))
    facts.names, facts.sites = [item.name for item in kept], [item.site for item in kept]
    facts.given, facts.groups = [item.given for item in kept], seen.groups
    facts.problems += seen.problems()
    return facts


class Seen:
    """What the images read so far have in common: byte-identical ones form a group, grey ones are told of."""

    def __init__(self) -> None:
        self.groups: list[int] = []
        self._first: dict[str, int] = {}
        self._names: list[str] = []
        self._grey: list[str] = []

    def add(self, name: str, image: Decoded) -> int:
        """The group of the next image: the number of the first that is the same."""
        group = self._first.setdefault(image.digest, len(self._names))
        self._names.append(name)
        self.groups.append(group)
        if image.grey:
            self._grey.append(name)
        return group

    def problems(self) -> list[Problem]:
        """Duplicates, and grey images: among coloured ones they are worth a line each, where most are grey, one."""
        total, grey = len(self._names), len(self._grey)
        found = [
            Problem(name, f"duplicate: byte for byte {self._names[group]}; kept on its side of a split")
            for place, (name, group) in enumerate(zip(self._names, self.groups, strict=True))
            if group != place
        ]
        if grey >= MANY * total:
            return [*found, Problem("", f"grey: {grey:,} of {total:,} images; made RGB")] if grey else found
        return found + [Problem(name, "grey: made RGB") for name in self._grey]


def check_size(size: int) -> None:
    if not 1 <= size <= 4096:
        raise ValueError(f"size is between 1 and 4096, not {size}")
