"""Folders of images and masks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedfa.data.pool import Pool
from fedfa.data.sources.segmentation_folders import SegmentationFolders
from fedfa.errors import UserError

Image = pytest.importorskip("PIL.Image")
Draw = Callable[..., Path]


def told(pool: Pool) -> set[tuple[str, str]]:
    return {(problem.file, problem.what) for problem in pool.problems}


def mask(file: Path, values: tuple[int, ...] = (0, 1), size: tuple[int, int] = (20, 16), **options: Any) -> Path:
    """Upright stripes of the given values, all of one width."""
    pixels = np.repeat(np.array(values, np.uint8), -(-size[0] // len(values)))[: size[0]]
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.tile(pixels, (size[1], 1))).save(file, **options)
    return file


@pytest.fixture
def grow(tmp_path: Path, draw: Draw) -> Callable[..., Path]:
    """Two clients with three pairs each, masks of the given values."""

    def grow(values: tuple[int, ...] = (0, 1), ending: str = ".png", **options: Any) -> Path:
        for client in ("A b", "C"):
            for number in range(3):
                draw(tmp_path / client / "images" / f"{number}.jpg", seed=len(client) * 10 + number)
                mask(tmp_path / client / "masks" / f"{number}{ending}", values, **options)
        return tmp_path

    return grow


def test_pairs(grow: Callable[..., Path]) -> None:
    root = grow((0, 1, 2, 2))
    pool = SegmentationFolders(str(root), size=8).pool()
    assert pool.task == "segmentation" and pool.classes == ("background", "1", "2") and not pool.problems
    assert pool.images.shape == (6, 3, 8, 8) and pool.labels.shape == (6, 8, 8) and pool.labels.dtype == torch.uint8
    assert list(pool.sites) == ["A b"] * 3 + ["C"] * 3 and pool.names[0] == "A b/images/0.jpg"
    assert pool.labels[4, 3].tolist() == [0, 0, 1, 1, 2, 2, 2, 2]
    picture = Image.open(root / "C/images/2.jpg").resize((8, 8), Image.Resampling.BILINEAR)
    assert np.array_equal(pool.images[5].numpy(), np.asarray(picture).transpose(2, 0, 1))


@pytest.mark.parametrize(
    ("values", "settings", "row", "classes"),
    [
        ((0, 255), {}, [0, 0, 1, 1], ("background", "foreground")),
        ((0, 128, 255, 255), {}, [0, 1, 2, 2], ("background", "128", "255")),
        ((0, 128, 255, 255), {"values": (255, 0, 128)}, [1, 2, 0, 0], ("background", "0", "128")),
        ((0, 1, 2, 2), {"above": 0}, [0, 1, 1, 1], ("background", "foreground")),
        ((0, 1, 2, 2), {"above": 1}, [0, 0, 1, 1], ("background", "foreground")),
        ((0, 1, 2, 2), {"classes": ("ground", "rim", "cup")}, [0, 1, 2, 2], ("ground", "rim", "cup")),
    ],
)
def test_values_become_classes(
    grow: Callable[..., Path], values: tuple[int, ...], settings: Any, row: list[int], classes: tuple[str, ...]
) -> None:
    pool = SegmentationFolders(str(grow(values)), size=4, **settings).pool()
    assert pool.labels[0, 0].tolist() == row and pool.classes == classes


def test_masks_saved_as_jpeg(grow: Callable[..., Path]) -> None:
    root = grow((0, 255, 40, 230, 90, 170), ".JPG", size=(60, 48), quality=60)
    for file in root.glob("*/images/*"):
        Image.open(file).resize((60, 48)).save(file)
    with pytest.raises(UserError, match=r"so many values that they must be blurred, .* source\.above=127 for binary"):
        SegmentationFolders(str(root)).pool()
    pool = SegmentationFolders(str(root), size=6, above=127).pool()
    assert pool.labels[0, 2].tolist() == [0, 1, 0, 1, 0, 1]


def test_masks_with_blurred_edges(grow: Callable[..., Path], draw: Draw) -> None:
    root = grow()
    for file in root.glob("*/masks/*"):
        draw(file, mode="L")
    with pytest.raises(UserError, match="so many values that they must be blurred"):
        SegmentationFolders(str(root)).pool()


def test_one_blurred_mask_among_good_ones(grow: Callable[..., Path], draw: Draw) -> None:
    root = grow((0, 255))
    draw(root / "C" / "masks" / "1.png", mode="L")
    pool = SegmentationFolders(str(root), size=8).pool()
    assert len(pool) == 5 and pool.classes == ("background", "foreground")
    ((file, what),) = told(pool)
    assert file == "C/images/1.jpg" and "which is none of 0, 255; left out" in what


def test_what_is_wrong_is_told(grow: Callable[..., Path], draw: Draw) -> None:
    root = grow((0, 1))
    for place in (
        "A b/images/lonely.jpg",
        "A b/images/wide.jpg",
        "A b/images/2.png",
        "A b/images/torn.jpg",
        "D/images/x.jpg",
    ):
        draw(root / place, seed=len(place))
    (root / "A b/images/torn.jpg").write_bytes(b"torn")
    mask(root / "A b/masks/torn.png")
    mask(root / "A b/masks/orphan.png")
    mask(root / "A b/masks/wide.png", size=(40, 16))
    (root / "C/masks/0.png").write_bytes(b"")
    draw(root / "C/masks/1.png", mode="RGB")
    mask(root / "C/masks/2.png", (0,))
    pool = SegmentationFolders(str(root), size=8).pool()
    assert told(pool) == {
        ("A b/images/lonely.jpg", "has no mask; left out"),
        ("A b/images/2.png", "its mask A b/masks/2.png is another image's as well; left out"),
        ("A b/images/torn.jpg", "broken: not an image that can be read; left out"),
        ("A b/images/wide.jpg", "broken: image and mask are 20×16 and 40×16 pixels; left out"),
        ("A b/masks/orphan.png", "a mask without an image"),
        ("D", "has no folder masks; left out"),
        ("C/images/0.jpg", "broken: its mask: an empty file; left out"),
        (
            "C/images/1.jpg",
            "broken: its mask: in colours, where a mask has one number a pixel: grey, or a palette; left out",
        ),
        ("C/images/2.jpg", "empty: its mask is all background; kept"),
    }
    assert list(pool.names) == ["A b/images/0.jpg", "A b/images/1.jpg", "A b/images/2.jpg", "C/images/2.jpg"]


def test_names_of_masks(tmp_path: Path, draw: Draw) -> None:
    for number, name in enumerate(("a_mask.png", "B-seg.PNG", "sub/c.GIF", "d_segmentation.bmp")):
        mask(tmp_path / "X" / "Masks" / name)
        draw(tmp_path / "X" / "IMG" / ("A.jpg", "b.jpg", "sub/c.jpg", "d.jpg")[number], number)
    pool = SegmentationFolders(str(tmp_path), size=8).pool()
    assert list(pool.names) == ["X/IMG/A.jpg", "X/IMG/b.jpg", "X/IMG/d.jpg", "X/IMG/sub/c.jpg"] and not pool.problems


def test_a_photograph_on_its_side_and_its_upright_mask(tmp_path: Path, draw: Draw) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    draw(tmp_path / "X" / "images" / "a.jpg", exif=exif)  # 20 × 16, shown as 16 × 20
    mask(tmp_path / "X" / "masks" / "a.png", size=(16, 20))
    assert len(SegmentationFolders(str(tmp_path), size=8).pool()) == 1


def test_masks_of_one_value_cannot_be_learnt(grow: Callable[..., Path]) -> None:
    (problem,) = (p for p in SegmentationFolders(str(grow((0,))), size=8).pool().problems if p.fatal)
    assert problem.what == "all masks are 0 everywhere: there is nothing to learn"


def test_no_background(grow: Callable[..., Path]) -> None:
    pool = SegmentationFolders(str(grow((3, 5))), size=8).pool()
    assert told(pool) == {("", "no mask has a 0: 3 is taken for the background")}


def test_duplicates_stay_together(grow: Callable[..., Path]) -> None:
    root = grow()
    (root / "C/images/2.jpg").write_bytes((root / "A b/images/1.jpg").read_bytes())
    pool = SegmentationFolders(str(root), size=8).pool()
    assert list(pool.groups) == [0, 1, 2, 3, 4, 1]


def test_settings_that_make_no_sense(grow: Callable[..., Path], tmp_path: Path) -> None:
    for settings, words in (
        ({"values": (0, 1), "above": 3}, "values and above exclude each other"),
        ({"values": (0, 0)}, "two or more different numbers"),
        ({"values": (4,)}, "two or more different numbers"),
        ({"values": (0, 70_000)}, "between 0 and 65535"),
        ({"values": (0, 1, 2), "classes": ("a", "b")}, "masks have 3 classes, and classes has 2 names"),
        ({"size": 0}, "size is between"),
    ):
        with pytest.raises(ValueError, match=words):
            SegmentationFolders(**settings)  # type: ignore[arg-type]  # wrong or mixed settings are the point
    with pytest.raises(UserError, match=r"has 3 names, but masks have the values 0, 1"):
        SegmentationFolders(str(grow()), classes=("a", "b", "c")).pool()
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match="has no images with masks in CLIENT/images and CLIENT/masks"):
        SegmentationFolders(str(tmp_path / "none")).pool()


def test_the_real_fundus_photographs(shared_data: Path, shared_cache: Path) -> None:
    pool = SegmentationFolders(str(shared_data / "fundus"), size=256, classes=("background", "rim", "cup")).pool()
    sites = list(pool.sites)
    assert {site: sites.count(site) for site in set(sites)} == {"drishti-gs": 101, "refuge": 321, "rim-one-v3": 159}
    assert pool.labels.unique().tolist() == [0, 1, 2] and not pool.problems
    for number in (0, 200, 580):
        image = shared_data / "fundus" / pool.names[number]
        (file,) = (image.parents[1] / "masks").glob(f"{image.stem}.*")
        assert np.array_equal(pool.labels[number].numpy(), np.asarray(Image.open(file))), "256 px as they are"
