"""DomainNet, of which the paper uses ten classes: six ways of picturing things."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from fedfa.data.pool import Given, Pool, Problem
from fedfa.data.sources.reading import find_folder, folders
from fedfa.data.sources.trees import Item, check_size, find_sites, list_tree, plain, read_items, spelled
from fedfa.data.splits import Shares, draws, in_random_order, pick
from fedfa.errors import UserError

SITES = {"clipart": (), "infograph": (), "painting": (), "quickdraw": (), "real": (), "sketch": ()}
CLASSES = {
    "bird": (),
    "feather": (),
    "headphones": (),
    "ice_cream": (),
    "teapot": (),
    "tiger": (),
    "whale": (),
    "windmill": (),
    "wine_glass": (),
    "zebra": (),
}
NAMES = spelled(CLASSES)
SIDES: tuple[Given, ...] = ("train", "test")

Place = tuple[str, str]
"""Class and file name, which name an image in a domain."""


SIZES = {
    "clipart": (672, 420, 526),
    "infograph": (840, 525, 657),
    "painting": (791, 494, 619),
    "quickdraw": (1280, 800, 1000),
    "real": (1556, 972, 1217),
    "sketch": (708, 442, 554),
}
"""Training, validation and test samples of each client in the paper's appendix."""


@dataclass(frozen=True)
class DomainNet:
    """Peng et al., ICCV 2019: DOMAIN/CLASS/images, with or without the official lists DOMAIN_train.txt and
    DOMAIN_test.txt beside the domains or in a folder beside them.

    With its two lists a domain has the images on them and no others, and their official side is the given split;
    without, all images that are there.

    The paper's sizes are fewer than there are, and which images they are is not said: those that `samples` keeps are
    drawn, the same for everyone, class by class; the tested ones from the official test list where there is one.

    Attributes:
        path: the folder. Empty for `$FEDFA_DATA/domainnet`, or `data/domainnet`.
        size: images are made `size`×`size`, by the paper's 256.
        samples: `paper` keeps as many as the paper has, and its number to test on; `all` keeps all.
        lists: whether official lists are read where there are any.
    """

    path: str = ""
    size: int = 256
    samples: Literal["paper", "all"] = "paper"
    lists: bool = True

    shares: ClassVar[Shares] = Shares(test="13/40", val="27/104", rounding="down")
    """The paper's: validation is 5/13 of what is not tested on (420 of 1,092), and about 32.5 % are tested on."""

    def __post_init__(self) -> None:
        check_size(self.size)

    def pool(self) -> Pool:
        problems: list[Problem] = []
        given = find_folder(self.path, "domainnet")
        root, sites = find_sites("domainnet", given, SITES, problems)
        items = list_tree(root, sites, CLASSES, problems)
        if self.lists:
            for site in sites:
                if (official := _lists(site, (given, root), problems)) is not None:
                    items = _as_listed(items, site, official, problems)
        choose = paper_samples if self.samples == "paper" else None
        return read_items("domainnet", root, items, tuple(CLASSES), problems, self.size, choose=choose)


def paper_samples(items: Sequence[Item], groups: Sequence[int]) -> tuple[list[Item], list[Problem]]:
    """As many items of every domain as the paper has, those to be tested on given as such; the others are left out.
    A domain that has too few keeps all it has, and its sides as they are."""
    chosen: dict[int, Given] = {}
    problems = []
    for site, (train, val, test) in SIZES.items():
        mine = np.array([place for place, item in enumerate(items) if item.site == site], np.int64)
        if not len(mine):
            continue
        listed = np.array([items[place].given == "test" for place in mine])
        tested = _draw(items, groups, mine[listed] if listed.any() else mine, test, (site, "test"))
        rest = mine[~listed & ~np.isin(mine, tested)]
        trained = _draw(items, groups, rest, train + val, (site, "train"))
        if (len(tested), len(trained)) == (test, train + val):
            chosen.update((place, "train") for place in trained)
            chosen.update((place, "test") for place in tested)
        else:
            chosen.update((place, items[place].given) for place in mine.tolist())
            problems.append(Problem(site, f"too few images for the paper's {train}/{val}/{test}: all {len(mine)} kept"))
    return [replace(items[place], given=chosen[place]) for place in sorted(chosen)], problems


def _draw(
    items: Sequence[Item], groups: Sequence[int], places: NDArray[np.int64], wanted: int, stream: tuple[str, str]
) -> list[int]:
    """`wanted` of the items at `places`, classes in their shares, byte-identical ones together."""
    units, first, unit = np.unique(np.asarray(groups)[places], return_index=True, return_inverse=True)
    weight = np.bincount(unit, minlength=len(units))
    labels = np.array([items[place].label for place in places.tolist()])
    order = in_random_order(len(units), labels[first], draws(0, "domainnet", *stream))
    if weight.sum() <= wanted:
        return list(places.tolist())
    return list(places[np.isin(unit, pick(order, weight, wanted, leave=1))].tolist())


def _lists(site: str, roots: Sequence[Path], problems: list[Problem]) -> dict[Place, Given] | None:
    """The side of every image of our classes on a domain's official lists, if it has both."""
    folders_there = dict.fromkeys([*roots, *(folder for root in roots for folder in folders(root))])
    files = {side: _first(folder / f"{site}_{side}.txt" for folder in folders_there) for side in SIDES}
    there = {side: file for side, file in files.items() if file is not None}
    if there and len(there) < len(SIDES):
        lost = next(f"{site}_{side}.txt" for side in SIDES if side not in there)
        problems.append(Problem(lost, f"is missing: without it the other list of {site} is not used"))
    if len(there) < len(SIDES):
        return None
    return {place: side for side, file in there.items() for place in _read_list(file)}


def _first(files: Iterable[Path]) -> Path | None:
    return next((file for file in files if os.path.isfile(file)), None)


def _read_list(file: Path) -> list[Place]:
    """The images of our classes on an official list, 'DOMAIN/CLASS/FILE LABEL' a line."""
    try:
        lines = file.read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"domainnet: {file} cannot be read: {error}") from None
    places = []
    for number, line in enumerate(lines, 1):
        path, _, label = line.strip().rpartition(" ")
        parts = unicodedata.normalize("NFC", path.strip().replace("\\", "/")).split("/")
        if line.strip() and (len(parts) < 2 or not label.isdigit()):
            raise UserError(f"domainnet: {file}, line {number} is not 'DOMAIN/CLASS/FILE LABEL': {line!r}")
        if line.strip() and (name := NAMES.get(plain(parts[-2]))) is not None:
            places.append((name, parts[-1]))
    return places


def _as_listed(items: Sequence[Item], site: str, sides: Mapping[Place, Given], problems: list[Problem]) -> list[Item]:
    """The items, those of `site` with the sides that its lists give. What is only here, or only there, is a problem."""
    result, found = [], set[Place]()
    for item in items:
        place = tuple(CLASSES)[item.label], item.file.name
        if item.site != site:
            result.append(item)
        elif place in sides:
            found.add(place)
            result.append(replace(item, given=sides[place]))
        else:
            problems.append(Problem(item.name, "on neither official list; left out"))
    lost = (place for place in sides if place not in found)
    problems += [Problem("/".join((site, *place)), "on an official list, but not here") for place in lost]
    return result
