"""Contact sheets: a client's images, with masks laid over them, pixel for pixel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedfa.data.federation import ClientIndex, Federation
from fedfa.data.look import shown
from fedfa.data.splits import SIDES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Picture = NDArray[np.uint8]
MASK_COLOURS = ("#66ccee", "#ffdd44", "#ee6677", "#228833", "#aa3377", "#4477aa")
"""Of classes 1, 2, … in masks: told apart with any colour vision, and seen on grey scans and on red fundus images."""
MOST_IMAGES = 300
"""Images of a client that its statistics are taken of."""
CELL = 96
"""Pixels of an image's longer side on a contact sheet, about."""
COLUMNS, ROWS = 10, 4
PAIRS = 4
"""Columns of images beside their masks."""


def all_of(index: ClientIndex) -> Tensor:
    return torch.cat([index.of(side) for side in SIDES])


@dataclass(frozen=True)
class Channels:
    """Which channels of the images are looked at, and what they are."""

    picks: tuple[int, ...]
    names: tuple[str, ...]
    colours: tuple[str, ...]

    @classmethod
    def of(cls, images: Tensor) -> Channels:
        """RGB, or of grey images and of neighbouring slices one channel. Slices are known by their neighbours: what
        is above one is in the middle of the next."""
        count, channels = images.shape[:2]
        if channels != 3:
            return cls((channels // 2,), (f"channel {channels // 2 + 1}" if channels > 1 else "grey",), ("#555555",))
        some = images[: min(count, MOST_IMAGES)]
        if len(some) > 1 and (some[1:, 0] == some[:-1, 1]).flatten(1).all(1).float().mean() > 0.5:
            return cls((1,), ("middle slice",), ("#555555",))
        some = images[spread(count, MOST_IMAGES)]
        if (some == some[:, :1]).all():
            return cls((0,), ("grey",), ("#555555",))
        return cls((0, 1, 2), ("red", "green", "blue"), ("#ee6677", "#228833", "#4477aa"))

    def picture(self, images: Tensor) -> Picture:
        """Images (B, C, H, W) as (B, H, W, 3)."""
        picked = images[:, list(self.picks)].expand(-1, 3, -1, -1)
        array: Picture = picked.movedim(1, -1).contiguous().numpy()
        return array


def spread(count: int, most: int) -> Tensor:
    """Places from 0 to `count`, evenly spaced, `most` at most."""
    return torch.arange(count) if count <= most else torch.linspace(0, count - 1, most).round().long()


def draw_sheet(federation: Federation, name: str) -> Figure:
    """A client's images: a column a class where there are few classes, and masks laid over images beside the images
    alone."""
    index = federation.clients[name]
    sizes = ", ".join(f"{len(index.of(side)):,} {side}" for side in SIDES)
    title = f"{federation.name}: {shown(name, 40)}, {len(all_of(index)):,} images ({sizes})"
    if federation.task == "segmentation":
        return _sheet(title, *_mask_cells(federation, index), legend=federation.classes[1:])
    if 5 <= len(federation.classes) <= COLUMNS:
        return _sheet(title, *_class_columns(federation, index))
    return _sheet(title, *_labelled_cells(federation, index))


Cells = list[list[Picture | None]]
Labels = list[list[str]]


def _class_columns(federation: Federation, index: ClientIndex) -> tuple[Cells, Labels]:
    """A column for every class, its name above."""
    everything = all_of(index)
    labels = federation.labels[everything]
    columns = [everything[labels == number][:ROWS] for number in range(len(federation.classes))]
    rows = max(1, *(len(column) for column in columns))
    pictures = [_cells(federation, column) for column in columns]
    cells: Cells = [[column[row] if row < len(column) else None for column in pictures] for row in range(rows)]
    heads = [shown(name, 15) for name in federation.classes]
    return cells, [heads if row == 0 else [""] * len(heads) for row in range(rows)]


def _labelled_cells(federation: Federation, index: ClientIndex) -> tuple[Cells, Labels]:
    """Images in the order of their classes, as many classes as there is room for, each with its class above."""
    everything = all_of(index)
    picked = _round_robin(federation.labels[everything], COLUMNS * ROWS)
    places = everything[picked]
    names = [shown(federation.classes[int(label)], 15) for label in federation.labels[places]]
    return _in_rows(_cells(federation, places), COLUMNS), _in_rows(names, COLUMNS)


def _mask_cells(federation: Federation, index: ClientIndex) -> tuple[Cells, Labels]:
    """Pairs of an image and the same with its mask."""
    everything = all_of(index)
    places = everything[spread(len(everything), PAIRS * ROWS)]
    plain = _cells(federation, places)
    masks = federation.labels[places]
    both = [
        cell
        for image, mask in zip(plain, masks, strict=True)
        for cell in (image, _with_mask(image, _resized_mask(mask, image.shape[0], image.shape[1])))
    ]
    cells = _in_rows(both, 2 * PAIRS)
    return cells, [[""] * len(row) for row in cells]


def _round_robin(labels: Tensor, most: int) -> Tensor:
    """Places of samples: the first of every class, then the second, up to `most`; in the order of their classes."""
    turn = torch.empty(len(labels), dtype=torch.int64)
    for number in labels.unique():
        mine = (labels == number).nonzero().flatten()
        turn[mine] = torch.arange(len(mine))
    first = torch.argsort(turn * (int(labels.max()) + 1 if len(labels) else 1) + labels)[:most]
    return first[torch.argsort(labels[first], stable=True)]


def _in_rows(items: Sequence[Any], width: int) -> list[list[Any]]:
    return [list(items[start : start + width]) for start in range(0, len(items), width)] or [[]]


def _cells(federation: Federation, places: Tensor) -> list[Picture]:
    """Images as they are drawn: small ones in whole multiples of their size, large ones averaged down."""
    if not len(places):
        return []
    images = federation.images[places]
    pictures = Channels.of(federation.images).picture(images)
    side = max(images.shape[-2:])
    if side <= CELL:
        factor = max(1, round(CELL / side))
        return list(pictures.repeat(factor, axis=1).repeat(factor, axis=2))
    size = [max(1, round(length * CELL / side)) for length in images.shape[-2:]]
    small = torch.nn.functional.interpolate(torch.from_numpy(pictures).movedim(-1, 1).float(), size, mode="area")
    return list(small.movedim(1, -1).round().to(torch.uint8).numpy())


def _resized_mask(mask: Tensor, height: int, width: int) -> NDArray[np.int64]:
    rows = ((torch.arange(height) + 0.5) * mask.shape[0] / height).long()
    columns = ((torch.arange(width) + 0.5) * mask.shape[1] / width).long()
    resized: NDArray[np.int64] = mask[rows][:, columns].long().numpy()
    return resized


def _with_mask(image: Picture, mask: NDArray[np.int64]) -> Picture:
    """Every class in a colour: a thin veil, and an outline where it ends."""
    from matplotlib.colors import to_rgb

    colours = np.array([(0.0, 0.0, 0.0), *map(to_rgb, MASK_COLOURS)]) * 255
    colour = colours[np.where(mask > 0, (mask - 1) % len(MASK_COLOURS) + 1, 0)]
    around = np.pad(mask, 1, mode="edge")
    neighbours = (around[1:-1, :-2], around[1:-1, 2:], around[:-2, 1:-1], around[2:, 1:-1])
    edge = np.logical_or.reduce([neighbour != mask for neighbour in neighbours]) & (mask > 0)
    weight = np.where(edge, 1.0, np.where(mask > 0, 0.2, 0.0))[..., None]
    blended: Picture = (image * (1 - weight) + colour * weight).round().astype(np.uint8)
    return blended


def _sheet(title: str, cells: Cells, labels: Labels, legend: Sequence[str] = ()) -> Figure:
    """Cells laid out pixel for pixel, with a line of text above those that have a label."""
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure

    gap, line, top, dpi = 4, 14, 26, 100
    first = next((cell for row in cells for cell in row if cell is not None), np.zeros((CELL, CELL, 3), np.uint8))
    height, width = first.shape[:2]
    columns = max(len(row) for row in cells) or 1
    tops, below = [], top
    for texts in labels:
        below += line if any(texts) else 0
        tops.append(below)
        below += height + gap
    across = max(columns * (width + gap) + gap, 480)
    keys = _legend([shown(name, 20) for name in legend], across)
    total = (below + (4 + line * (1 + keys[-1][1]) if keys else 0), across)
    page: Picture = np.full((*total, 3), 255, np.uint8)
    figure = Figure(figsize=(total[1] / dpi, total[0] / dpi), dpi=dpi)
    figure.text(gap / total[1], 1 - 5 / total[0], title, va="top", fontsize=9)
    for above, row, texts in zip(tops, cells, labels, strict=True):
        for column, (cell, text) in enumerate(zip(row, texts, strict=True)):
            left = gap + column * (width + gap)
            if cell is not None:
                page[above : above + height, left : left + width] = cell
            middle = (left + width / 2) / total[1]
            figure.text(middle, 1 - (above - 3) / total[0], text, ha="center", va="bottom", fontsize=7)
    for number, (at, down, name) in enumerate(keys):
        above = below + 3 + line * down
        page[above : above + 10, at : at + 10] = np.array(to_rgb(MASK_COLOURS[number % len(MASK_COLOURS)])) * 255
        figure.text((at + 14) / total[1], 1 - (above + 5) / total[0], name, va="center", fontsize=8)
    figure.figimage(page, 0, 0)
    return figure


def _legend(names: Sequence[str], across: int) -> list[tuple[int, int, str]]:
    """Where the key of every name goes: pixels from the left, and the line."""
    keys, at, line = [], 4, 0
    for name in names:
        wide = 24 + 8 * len(name)
        if at > 4 and at + wide > across:
            at, line = 4, line + 1
        keys.append((at, line, name))
        at += wide
    return keys
