"""Multi-site prostate MRI: the gland in T2-weighted volumes from several hospitals."""

from __future__ import annotations

import math
import re
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from fedfa.data.cache import Facts, Writer, cached_pool
from fedfa.data.pool import Pool, Problem
from fedfa.data.sources.reading import Broken, find_folder, folders, in_parallel, relative
from fedfa.data.splits import Shares
from fedfa.errors import UserError

if TYPE_CHECKING:
    from nibabel.nifti1 import Nifti1Image

VOLUME = re.compile(r"(?P<case>.+?)(?P<mask>[_-]seg(mentation)?)?\.nii(\.gz)?", re.IGNORECASE)
MOST_VOXELS = 1 << 28
"""Half a gigabyte of 16-bit voxels; a prostate has a few millions. A header of some bytes may claim more."""


@dataclass(frozen=True)
class Case:
    """A patient's volume and mask."""

    site: str
    image: Path
    mask: Path


@dataclass(frozen=True)
class Prostate:
    """Liu et al., 2020: SITE/CaseNN.nii.gz with SITE/CaseNN_segmentation.nii.gz (or _Segmentation, or without .gz),
    read with nibabel. The paper's sites are BIDMC, HK, I2CVB, BMC, RUNMC and UCL; any others do as well.

    A sample is an axial slice with its two neighbours as channels (an end of the volume stands in for a neighbour it
    has not) and the gland, label > 0. Slices without gland are left out. Intensities run from the volume's smallest
    to its 99th percentile, and are stored in 8 bits. Slices are laid out as radiologists see them, by the file's
    header: front on top, the patient's right on the left, from the feet up.

    All slices of a case stand on one side of a split. ``split.by = "slice"`` divides slices, as the authors' code does:
    then test slices lie between training slices of the same patient.

    Attributes:
        path: the folder. Empty for `$FEDFA_DATA/prostate`, or `data/prostate`.
        size: slices are made `size`×`size`; 0 leaves them as they are, if they are all alike.
    """

    path: str = ""
    size: int = 0

    shares: ClassVar[Shares] = Shares(0.2, 0.2, "down")

    def __post_init__(self) -> None:
        if not 0 <= self.size <= 4096:
            raise ValueError(f"size is between 1 and 4096, or 0 to leave slices as they are, not {self.size}")

    def pool(self) -> Pool:
        given = find_folder(self.path, "prostate")
        places = [given, *folders(given)]  # archives unpack into a folder of their own
        tries = [(place, *find_cases(place)) for place in places]
        root, cases, problems = next((found for found in tries if found[1]), tries[0])
        if not cases:
            more = f"; {problems[0].file}: {problems[0].what}" if problems else ""
            raise UserError(f"prostate: {given} has no SITE/CaseNN.nii.gz with SITE/CaseNN_segmentation.nii.gz{more}")
        need_nibabel()
        files = [file for case in cases for file in (case.image, case.mask)]

        def make(writer: Writer) -> Facts:
            return self._read(writer, cases, root)

        return cached_pool("prostate", "segmentation", root, files, {"reader": 1, "size": self.size}, make, problems)

    def _read(self, writer: Writer, cases: list[Case], root: Path) -> Facts:
        facts = Facts(["background", "gland"])
        first: dict[tuple[int, int], str] = {}
        results = in_parallel(lambda case: read_case(case, self.size), cases, "reading prostate")
        with closing(results):
            for case, found in zip(cases, results, strict=True):
                name = relative(case.image, root)
                if isinstance(found, Broken):
                    facts.problems.append(Problem(name, f"broken: {found}; left out"))
                    continue
                facts.problems += [Problem(name, note) for note in found.notes]
                shape = (found.images.shape[2], found.images.shape[3])
                first.setdefault(shape, name)
                if len(first) > 1:
                    (one, a), (other, b) = list(first.items())[:2]
                    sizes = f"{one[0]}×{one[1]} ({a}) and {other[0]}×{other[1]} ({b})"
                    raise UserError(f"prostate: slices come in {sizes}: say source.size=N to make them all N×N")
                writer.append("images", found.images)
                writer.append("labels", found.masks)
                group = len(facts.names)
                facts.names += [f"{name}#{number}" for number in found.numbers]
                facts.sites += [case.site] * len(found.numbers)
                facts.groups += [group] * len(found.numbers)
                facts.given += [""] * len(found.numbers)
        return facts


def find_cases(root: Path) -> tuple[list[Case], list[Problem]]:
    """Every case with an image and a mask, site by site. What lacks either is a problem."""
    cases: list[Case] = []
    problems: list[Problem] = []
    for site in folders(root):
        images: dict[str, Path] = {}
        masks: dict[str, Path] = {}
        for file in sorted(site.iterdir()):
            found = VOLUME.fullmatch(file.name)
            if found is None or file.name.startswith(".") or not file.is_file():
                continue
            kind = masks if found["mask"] else images
            other = kind.setdefault(found["case"].lower(), file)
            if other != file:
                problems.append(Problem(relative(file, root), f"stands for {other.name}, which is read; left out"))
        for case, image in images.items():
            if case in masks:
                cases.append(Case(site.name, image, masks[case]))
            else:
                problems.append(Problem(relative(image, root), "has no mask (CaseNN_segmentation.nii.gz); left out"))
        lonely = [mask for case, mask in masks.items() if case not in images]
        problems += [Problem(relative(mask, root), "is a mask without an image; left out") for mask in lonely]
        if not images and not masks:
            problems.append(Problem(relative(site, root), "has no .nii or .nii.gz files; left out"))
    return cases, problems


@dataclass(frozen=True)
class Slices:
    """Those slices of a case that show some gland."""

    images: NDArray[np.uint8]
    """(N, 3, H, W)."""
    masks: NDArray[np.uint8]
    """(N, H, W), 0 and 1."""
    numbers: list[int]
    """Of the slices in the volume, from the feet up, from 0."""
    notes: list[str]


def read_case(case: Case, size: int) -> Slices:
    """A case's samples. Raises :class:`Broken`, with the reason, where it has none."""
    image, mask = _load(case.image, "the volume"), _load(case.mask, "the mask")
    volume, labels = upright(image), upright(mask)
    if volume.shape != labels.shape:
        raise Broken(f"the volume is {_size(volume)}, the mask {_size(labels)}")
    notes = [] if _same_place(image, mask) else ["the mask's header puts it elsewhere than the volume; not moved"]
    intensities = scaled(volume)
    if not np.isfinite(labels).all():
        raise Broken("the mask has values that are not numbers")
    gland = labels > 0
    numbers = np.flatnonzero(gland.any((1, 2)))
    if not len(numbers):
        raise Broken("the mask is empty: no slice shows any gland")
    last = len(volume) - 1
    triples = np.stack([intensities[np.clip(numbers + step, 0, last)] for step in (-1, 0, 1)], axis=1)
    images, masks = _resized(triples, gland[numbers], size)
    return Slices(images, masks, numbers.tolist(), notes)


def upright(image: Nifti1Image) -> NDArray[Any]:
    """The voxels as (slices, rows, columns): from the feet up, from front to back, from the patient's right to left."""
    from nibabel.orientations import apply_orientation, axcodes2ornt, io_orientation, ornt_transform

    voxels = np.asanyarray(image.dataobj)
    voxels = voxels.reshape(voxels.shape[:3])  # some writers put an axis of length 1 behind
    turn = ornt_transform(io_orientation(image.affine), axcodes2ornt(("L", "P", "S")))
    turned: NDArray[Any] = apply_orientation(voxels, turn)
    return turned.transpose(2, 1, 0)


def scaled(volume: NDArray[Any]) -> NDArray[np.float32]:
    """Intensities as 0–255, from the smallest to the 99th percentile; what is brighter is cut off."""
    values = volume.astype(np.float32)
    wrong = int((~np.isfinite(values)).sum())
    if wrong:
        raise Broken(f"the volume has {wrong:,} voxels that are not numbers")
    low, high = float(values.min()), float(np.percentile(values, 99))
    if not high > low:
        raise Broken(f"99 % of the volume's voxels are alike ({low:g})")
    return np.asarray((np.minimum(values, high) - low) * (255 / (high - low)), dtype=np.float32)


def _resized(
    images: NDArray[np.float32], masks: NDArray[np.bool_], size: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Images bilinear with antialiasing, masks by the nearest voxel; 0 leaves them as they are."""
    x, y = torch.from_numpy(images), torch.tensor(masks, dtype=torch.uint8)
    if size and tuple(x.shape[-2:]) != (size, size):
        x = torch.nn.functional.interpolate(x, (size, size), mode="bilinear", antialias=True)
        y = torch.nn.functional.interpolate(y.unsqueeze(1), (size, size), mode="nearest-exact").squeeze(1)
    return x.round().clamp(0, 255).to(torch.uint8).numpy(), y.numpy()


def _load(file: Path, what: str) -> Nifti1Image:
    """The image in a file, all of it read: nibabel reads voxels when they are first asked for."""
    import nibabel

    try:
        image = nibabel.nifti1.Nifti1Image.from_filename(file)
        sizes = image.shape
        if len(sizes) < 3 or math.prod(sizes[3:]) != 1 or not math.prod(sizes):
            raise Broken(f"{what} is {'×'.join(map(str, sizes))}, and not a volume")
        if math.prod(sizes) > MOST_VOXELS:
            raise Broken(f"{what} claims {'×'.join(map(str, sizes))} voxels, more than the {MOST_VOXELS:,} allowed")
        if np.asanyarray(image.dataobj).dtype.kind not in "buif":
            raise Broken(f"{what} does not hold plain numbers")
    except Broken:
        raise
    except Exception as error:  # nibabel, gzip and zlib raise what they like on damaged files
        reason = " ".join(str(error).split()) or type(error).__name__
        raise Broken(f"{what} cannot be read ({reason})") from error
    return image


def _same_place(image: Nifti1Image, mask: Nifti1Image) -> bool:
    """Whether two volumes' corners lie within half a voxel of each other, by their headers."""
    return all(
        np.abs(one - other).max() <= 0.5 * max(image.header.get_zooms()[:3])
        for one, other in zip(_corners(image), _corners(mask), strict=True)
    )


def _corners(image: Nifti1Image) -> list[NDArray[Any]]:
    """Where the first and the last voxel lie, in millimetres, once the volume is upright."""
    from nibabel.orientations import axcodes2ornt, inv_ornt_aff, io_orientation, ornt_transform

    turn = ornt_transform(io_orientation(image.affine), axcodes2ornt(("L", "P", "S")))
    affine = image.affine @ inv_ornt_aff(turn, image.shape[:3])
    sizes = np.array(image.shape[:3])[np.argsort(turn[:, 0])]
    return [affine @ [0, 0, 0, 1], affine @ [*(sizes - 1), 1]]


def _size(volume: NDArray[Any]) -> str:
    return "×".join(map(str, volume.shape[::-1]))


def need_nibabel() -> None:
    try:
        import nibabel  # noqa: F401  # only to see whether it is there
    except ImportError:
        raise UserError("reading NIfTI files needs nibabel: pip install 'fedfa[data]'") from None
