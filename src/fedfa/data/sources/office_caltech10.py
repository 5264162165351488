"""Office-Caltech 10: ten kinds of objects, as three cameras and a search engine saw them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedfa.data.pool import Pool, Problem
from fedfa.data.sources.reading import find_folder
from fedfa.data.sources.trees import check_size, find_sites, list_tree, read_items
from fedfa.data.splits import Shares

SITES = {"amazon": (), "caltech": ("caltech10", "caltech_10", "caltech256"), "dslr": (), "webcam": ()}
CLASSES = {
    "backpack": ("back_pack",),
    "bike": ("touring_bike",),
    "calculator": (),
    "headphones": ("head_phones", "headphone"),
    "keyboard": ("computer_keyboard",),
    "laptop": ("laptop_computer", "laptop_101"),
    "monitor": ("computer_monitor",),
    "mouse": ("computer_mouse",),
    "mug": ("coffee_mug",),
    "projector": ("video_projector",),
}


@dataclass(frozen=True)
class OfficeCaltech10:
    """Gong et al., CVPR 2012: DOMAIN/CLASS/images, or DOMAIN/images/CLASS/images as in Office-31, of whose 31 classes
    these ten are read. Spellings of Office-31 and of Caltech-256 are known.

    Attributes:
        path: the folder. Empty for `$FEDFA_DATA/office_caltech10`, or `data/office_caltech10`.
        size: images are made `size`×`size`, by the paper's 256.
    """

    path: str = ""
    size: int = 256

    shares: ClassVar[Shares] = Shares(test=0.2, val=0.32)
    """The paper's sizes: 459/307/192 at amazon, 538/360/225 at caltech, 75/50/32 at dslr, 141/95/59 at webcam."""

    def __post_init__(self) -> None:
        check_size(self.size)

    def pool(self) -> Pool:
        problems: list[Problem] = []
        root, sites = find_sites("office_caltech10", find_folder(self.path, "office_caltech10"), SITES, problems)
        items = list_tree(root, sites, CLASSES, problems)
        return read_items("office_caltech10", root, items, tuple(CLASSES), problems, self.size)
