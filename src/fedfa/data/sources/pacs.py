"""PACS: seven kinds of things as photographs, art paintings, cartoons and sketches."""

from __future__ import annotations

from dataclasses import dataclass

from fedfa.data.pool import Pool, Problem
from fedfa.data.sources.reading import find_folder
from fedfa.data.sources.trees import check_size, find_sites, list_tree, read_items

SITES = {"art_painting": ("art", "painting"), "cartoon": ("cartoons",), "photo": ("photos",), "sketch": ("sketches",)}
CLASSES = dict.fromkeys(("dog", "elephant", "giraffe", "guitar", "horse", "house", "person"), ())


@dataclass(frozen=True)
class PACS:
    """Li et al., ICCV 2017: DOMAIN/CLASS/images. The paper of FedFA does not use it.

    Attributes:
        path: the folder. Empty for `$FEDFA_DATA/pacs`, or `data/pacs`.
        size: images are made `size`×`size`. The release has 227.
    """

    path: str = ""
    size: int = 227

    def __post_init__(self) -> None:
        check_size(self.size)

    def pool(self) -> Pool:
        problems: list[Problem] = []
        root, sites = find_sites("pacs", find_folder(self.path, "pacs"), SITES, problems)
        items = list_tree(root, sites, CLASSES, problems)
        return read_items("pacs", root, items, tuple(CLASSES), problems, self.size)
