"""Draws the contact sheets of the embedded federations: python docs/make_pictures.py docs/images"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes

from fedfa.data.federation import Federation
from fedfa.data.sources.digit_sites import DigitSites
from fedfa.data.sources.phantom_sites import PhantomSites

SEED = 0
COLUMNS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the pictures go")
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    draw_digits(folder / "digit-sites.png")
    draw_phantoms(folder / "phantom-sites.png")


def draw_digits(path: Path) -> None:
    """A row a site; in every column the first training image of another digit."""
    federation = DigitSites().build(SEED)
    axes = sheet(federation)
    for row, client in zip(axes, federation.clients.values(), strict=True):
        labels = federation.labels[client.train]
        for digit, cell in enumerate(row):
            index = client.train[torch.nonzero(labels == digit)[0, 0]]
            cell.imshow(federation.images[index].movedim(0, -1).numpy(), interpolation="nearest")
    save(path)


def draw_phantoms(path: Path) -> None:
    """A row a site: slices of its training patients at several heights, each plain and with the organ outlined."""
    source = PhantomSites()
    federation, case = source.build(SEED), source.case_of_slice(SEED)
    axes = sheet(federation)
    for row, client in zip(axes, federation.clients.values(), strict=True):
        patients = case[client.train].unique()
        for pair in range(COLUMNS // 2):
            slices = client.train[case[client.train] == patients[pair % len(patients)]]
            index = slices[[2, -2, len(slices) // 2, -3][pair]]
            for cell in row[2 * pair : 2 * pair + 2]:
                picture = federation.images[index, 1].numpy()
                cell.imshow(picture, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
            row[2 * pair + 1].contour(federation.labels[index].numpy(), [0.5], colors="#ffb000", linewidths=1)
    save(path)


def sheet(federation: Federation) -> list[list[Axes]]:
    """Empty cells, a row for every client, named at its left."""
    rows = len(federation.clients)
    figure, axes = plt.subplots(rows, COLUMNS, figsize=(1.1 * COLUMNS + 0.9, 1.1 * rows), squeeze=False)
    figure.subplots_adjust(left=0.09, right=0.998, bottom=0.005, top=0.995, wspace=0.04, hspace=0.04)
    for row, name in zip(axes, federation.clients, strict=True):
        for cell in row:
            cell.set(xticks=[], yticks=[])
        row[0].set_ylabel(name.replace("_", " "), rotation=0, ha="right", va="center")
    cells: list[list[Axes]] = axes.tolist()
    return cells


def save(path: Path) -> None:
    plt.savefig(path, dpi=80, pil_kwargs={"optimize": True})
    plt.close()


if __name__ == "__main__":
    main()
