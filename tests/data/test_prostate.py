"""Prostate MRI from NIfTI files: slices, orientation, intensities, and files that are damaged."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedfa.data.federate import divide
from fedfa.data.partition import IID, Natural
from fedfa.data.sources import prostate
from fedfa.data.sources.prostate import Prostate
from fedfa.data.splits import Splits
from fedfa.errors import UserError

nibabel = pytest.importorskip("nibabel")

LPS = np.diag([-0.5, -0.6, 3.0, 1.0])
"""Voxel axes to the patient's left, to the back and up: NIfTI's own are right, front and up."""


def save(file: Path, voxels: np.ndarray, affine: np.ndarray = LPS, **header: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    image = nibabel.Nifti1Image(voxels, affine)
    for key, value in header.items():
        image.header[key] = value
    nibabel.save(image, file)
    return file


def volume(slices: int = 6, size: tuple[int, int] = (16, 20), seed: int = 0) -> np.ndarray:
    """(columns, rows, slices), as NIfTI has it, 0…1000."""
    return np.random.default_rng(seed).integers(0, 1001, (*size, slices)).astype(np.int16)


def mask(slices: int = 6, size: tuple[int, int] = (16, 20), first: int = 1, last: int = 4) -> np.ndarray:
    """Gland in slices first…last, with two kinds of tissue."""
    labels = np.zeros((*size, slices), np.uint8)
    labels[4:9, 5:12, first : last + 1] = 1
    labels[5:7, 6:9, first : last + 1] = 3
    return labels


def save_case(root: Path, site: str, case: str = "Case00", seed: int = 0, **sizes: Any) -> tuple[Path, Path]:
    slices = {"slices": sizes.get("slices", 6), "size": sizes.get("size", (16, 20))}
    return (
        save(root / site / f"{case}.nii.gz", volume(seed=seed, **slices)),
        save(root / site / f"{case}_segmentation.nii.gz", mask(**sizes)),
    )


def expected(voxels: np.ndarray) -> np.ndarray:
    """The volume in LPS as (slices, rows, columns), from the smallest to the 99th percentile in 8 bits."""
    top, low = np.percentile(voxels, 99), voxels.min()
    return np.rint(255 * (np.minimum(voxels, top) - low) / (top - low)).transpose(2, 1, 0)


def test_slices_with_their_neighbours(tmp_path: Path) -> None:
    save_case(tmp_path, "BIDMC")
    pool = Prostate(str(tmp_path)).pool()
    assert pool.images.shape == (4, 3, 20, 16) and pool.labels.shape == (4, 20, 16)
    assert pool.task == "segmentation" and pool.classes == ("background", "gland")
    assert pool.names == [f"BIDMC/Case00.nii.gz#{number}" for number in (1, 2, 3, 4)]
    whole = expected(volume())
    for place, number in enumerate((1, 2, 3, 4)):
        wanted = whole[number - 1 : number + 2]
        assert np.abs(pool.images[place].numpy() - wanted).max() <= 1
        assert np.array_equal(pool.labels[place].numpy(), mask()[:, :, number].T > 0)
    assert pool.images.max() == 255 and pool.images.min() == 0
    assert (pool.images == 255).float().mean() >= 0.009, "what is above the 99th percentile is cut off"
    assert not pool.problems


def test_an_end_of_the_volume_stands_in_for_a_neighbour(tmp_path: Path) -> None:
    save_case(tmp_path, "a", slices=3, first=0, last=2)
    images = Prostate(str(tmp_path)).pool().images
    assert torch.equal(images[0, 0], images[0, 1]) and torch.equal(images[2, 2], images[2, 1])
    assert torch.equal(images[0, 1:], images[1, :2])


@pytest.mark.parametrize("axes", ["RAS", "LAS", "RPI", "SLP", "PSR"])
def test_however_the_file_is_turned(tmp_path: Path, axes: str) -> None:
    """The same patient, stored along other axes, gives the same samples."""
    save_case(tmp_path / "one", "x")
    for file, voxels in (("Case00.nii.gz", volume()), ("Case00_segmentation.nii.gz", mask())):
        image = nibabel.Nifti1Image(voxels, LPS)
        turn = nibabel.orientations.ornt_transform(
            nibabel.io_orientation(LPS), nibabel.orientations.axcodes2ornt(tuple(axes))
        )
        turned = image.as_reoriented(turn)
        assert "".join(nibabel.aff2axcodes(turned.affine)) == axes
        save(tmp_path / "other" / "x" / file, np.asarray(turned.dataobj), turned.affine)
    one, other = Prostate(str(tmp_path / "one")).pool(), Prostate(str(tmp_path / "other")).pool()
    assert torch.equal(one.images, other.images) and torch.equal(one.labels, other.labels)
    assert not other.problems


def test_spellings(tmp_path: Path) -> None:
    for number, (image, label) in enumerate(
        [
            ("Case00.nii.gz", "Case00_segmentation.nii.gz"),
            ("Case01.nii.gz", "Case01_Segmentation.nii.gz"),
            ("case02.nii", "Case02_seg.nii"),
            ("Case03.NII.GZ", "Case03-SEGMENTATION.nii.gz"),
        ]
    ):
        save(tmp_path / "my site" / image.replace("NII.GZ", "nii.gz"), volume(seed=number))
        save(tmp_path / "my site" / label, mask())
    (tmp_path / "my site" / "Case03.nii.gz").rename(tmp_path / "my site" / "Case03.NII.GZ")
    (tmp_path / "my site" / "notes.txt").touch()
    pool = Prostate(str(tmp_path)).pool()
    assert len(pool) == 16 and len(set(pool.groups)) == 4 and set(pool.sites) == {"my site"}
    (tmp_path / "archive").mkdir()
    (tmp_path / "my site").rename(tmp_path / "archive" / "my site")
    assert Prostate(str(tmp_path)).pool().names == pool.names, "one level deeper"


def test_a_case_stands_on_one_side_unless_slices_are_asked_for(tmp_path: Path) -> None:
    for site in ("a", "b"):
        for case in range(6):
            save_case(tmp_path, site, f"Case{case:02d}", seed=10 * case + len(site) + ord(site))
    pool = Prostate(str(tmp_path)).pool()
    sides = divide(pool, Natural(), Splits(), 0, Prostate())
    for index in sides.values():
        cases = [{pool.groups[n] for n in part.tolist()} for part in (index.train, index.val, index.test)]
        assert [len(part) for part in cases] == [4, 1, 1] and sum(map(len, cases)) == len(set().union(*cases))
    released = divide(pool, Natural(), Splits(by="slice"), 0, Prostate())
    for index in released.values():
        assert (len(index.train), len(index.val), len(index.test)) == (15, 5, 4)  # ⌊24/5⌋, ⌊20/4⌋
        assert {pool.groups[n] for n in index.test.tolist()} & {pool.groups[n] for n in index.train.tolist()}
    dealt = divide(pool, IID(3), Splits(), 0, Prostate())
    seen = [{pool.groups[n] for n in torch.cat([i.train, i.val, i.test]).tolist()} for i in dealt.values()]
    assert sum(map(len, seen)) == len(set().union(*seen)) == 12


def test_sizes(tmp_path: Path) -> None:
    save_case(tmp_path, "a")
    save_case(tmp_path, "b", size=(24, 24))
    line = r"slices come in 20×16 \(a/Case00.nii.gz\) and 24×24 \(b/Case00.nii.gz\): say source.size=N to make them all"
    with pytest.raises(UserError, match=line):
        Prostate(str(tmp_path)).pool()
    pool = Prostate(str(tmp_path), size=32).pool()
    assert pool.images.shape == (8, 3, 32, 32) and pool.labels.unique().tolist() == [0, 1]
    # Nearest voxel, by hand: row r of 32 shows row ⌊(r + ½)·20/32⌋ of 20.
    rows, columns = ((np.arange(32) + 0.5) * n // 32 for n in (20, 16))
    wanted = (mask()[:, :, 1].T > 0)[rows.astype(int)][:, columns.astype(int)]
    assert np.array_equal(pool.labels[0].numpy(), wanted)
    image = pytest.importorskip("PIL.Image")
    plane = expected(volume())[1].astype(np.float32)
    theirs = np.asarray(image.fromarray(plane).resize((32, 32), image.Resampling.BILINEAR))
    assert np.abs(pool.images[0, 1].numpy() - theirs).max() <= 1
    with pytest.raises(ValueError, match="size is between 1 and 4096, or 0 to leave slices as they are, not -3"):
        Prostate(size=-3)


def test_slopes_and_a_fourth_axis(tmp_path: Path) -> None:
    """Stored numbers are scaled by the header's slope and intercept; an axis of length one behind is no matter."""
    save_case(tmp_path / "plain", "a")
    image = nibabel.Nifti1Image(volume()[..., None], LPS)
    image.header.set_slope_inter(0.25, -20)
    (tmp_path / "scaled" / "a").mkdir(parents=True)
    nibabel.save(image, tmp_path / "scaled" / "a" / "Case00.nii.gz")
    save(tmp_path / "scaled" / "a" / "Case00_segmentation.nii.gz", mask())
    one, other = (Prostate(str(tmp_path / name)).pool() for name in ("plain", "scaled"))
    assert (one.images.int() - other.images.int()).abs().max() <= 1


def damage(root: Path, kind: str) -> None:
    """Case01 of site a, beside a good Case00, with something wrong."""
    image, label = root / "a" / "Case01.nii.gz", root / "a" / "Case01_segmentation.nii.gz"
    voxels = volume(seed=1).astype(np.float32)
    if kind == "nan":
        voxels[3, 4, 2], voxels[0, 0, 0] = np.nan, np.inf
    if kind == "constant":
        voxels[:] = 7
    save(image, voxels if kind != "flat" else voxels[:, :, 0])
    labels = mask().astype(np.float32)
    if kind == "mask nan":
        labels[0, 0, 0] = np.nan
    save(label, {"shape": labels[:-1], "empty": 0 * labels, "many": np.stack([labels] * 2, 3)}.get(kind, labels))
    if kind == "truncated":
        image.write_bytes(image.read_bytes()[:2000])
    if kind == "short":
        image.write_bytes(gzip.compress(gzip.decompress(image.read_bytes())[:-500]))
    if kind == "garbage":
        image.write_bytes(b"nothing of the kind")
    if kind == "zero":
        label.write_bytes(b"")
    if kind == "bomb":
        header = bytearray(gzip.decompress(image.read_bytes())[:352])
        header[42:48] = np.array([30_000] * 3, "<i2").tobytes()
        image.write_bytes(gzip.compress(bytes(header)))
    if kind == "rgb":
        save(image, np.zeros((16, 20, 6), dtype=[("R", "u1"), ("G", "u1"), ("B", "u1")]))


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("nan", "the volume has 2 voxels that are not numbers"),
        ("mask nan", "the mask has values that are not numbers"),
        ("constant", "99 % of the volume's voxels are alike (7)"),
        ("shape", "the volume is 16×20×6, the mask 15×20×6"),
        ("empty", "the mask is empty: no slice shows any gland"),
        ("flat", "the volume is 16×20, and not a volume"),
        ("many", "the mask is 16×20×6×2, and not a volume"),
        ("truncated", "the volume cannot be read ("),
        ("short", "the volume cannot be read ("),
        ("garbage", "the volume cannot be read ("),
        ("zero", "the mask cannot be read ("),
        ("bomb", "the volume claims 30000×30000×30000 voxels, more than the 268,435,456 allowed"),
        ("rgb", "the volume does not hold plain numbers"),
    ],
)
def test_damaged_cases_are_left_out_and_named(tmp_path: Path, kind: str, says: str) -> None:
    save_case(tmp_path, "a")
    damage(tmp_path, kind)
    pool = Prostate(str(tmp_path)).pool()
    assert len(pool) == 4 and len(set(pool.groups)) == 1
    [problem] = pool.problems
    assert problem.file == "a/Case01.nii.gz" and problem.what.startswith(f"broken: {says}")
    assert problem.what.endswith("; left out") and "\n" not in problem.what


def test_missing_masks_and_images(tmp_path: Path) -> None:
    save_case(tmp_path, "a")
    save(tmp_path / "a" / "Case01.nii.gz", volume())
    save(tmp_path / "a" / "Case02_segmentation.nii.gz", mask())
    save(tmp_path / "a" / "case00.nii", volume())
    (tmp_path / "empty").mkdir()
    pool = Prostate(str(tmp_path)).pool()
    assert len(pool) == 4
    assert {(problem.file, problem.what) for problem in pool.problems} >= {
        ("a/Case01.nii.gz", "has no mask (CaseNN_segmentation.nii.gz); left out"),
        ("a/Case02_segmentation.nii.gz", "is a mask without an image; left out"),
        ("a/case00.nii", "stands for Case00.nii.gz, which is read; left out"),
        ("empty", "has no .nii or .nii.gz files; left out"),
    }


def test_a_mask_that_lies_elsewhere_is_told_of(tmp_path: Path) -> None:
    moved = LPS.copy()
    moved[0, 3] = 40
    save(tmp_path / "a" / "Case00.nii.gz", volume())
    save(tmp_path / "a" / "Case00_segmentation.nii.gz", mask(), moved)
    pool = Prostate(str(tmp_path)).pool()
    assert len(pool) == 4 and "elsewhere than the volume" in pool.problems[0].what


def test_nothing_there_and_nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"has no SITE/CaseNN\.nii\.gz with SITE/CaseNN_segmentation\.nii\.gz$"):
        Prostate(str(tmp_path)).pool()
    save_case(tmp_path, "a")
    monkeypatch.setitem(__import__("sys").modules, "nibabel", None)
    with pytest.raises(UserError, match=r"reading NIfTI files needs nibabel: pip install 'fedfa\[data\]'"):
        prostate.need_nibabel()
