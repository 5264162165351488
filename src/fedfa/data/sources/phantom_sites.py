"""phantom-sites: drawn pelvic volumes as four simulated MRI scanners would record them. No download."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedfa.data.federation import Federation
from fedfa.data.sources.drawing import (
    SIDES,
    blur,
    client_index,
    deal,
    normal,
    smooth_field,
    stream,
    to_uint8,
    uniform,
)

Point = tuple[Tensor | float, Tensor | float, Tensor | float]
"""x, y and z, for all patients or for each."""

TALL = 1e3
"""A half-height beyond any volume: what is so tall is a tube."""
RECTUM = 0.42
"""The rectum's place from front to back."""
VIEW = 0.76
"""How much of the drawing the images show, across and from front to back: wide hips are cut off, as in prostate MRI."""
SLICES = 16
"""Slices in a volume, from below the organ to above it."""
SMALLEST = 0.0025
"""The share of a slice that the organ fills at least, for the slice to be kept."""


@dataclass(frozen=True)
class Scanner:
    """How a site's scanner turns tissue brightness (0–1) into image intensity (0–1)."""

    share: float
    """Patients at this site, as a multiple of `PhantomSites.cases`."""
    gamma: float
    """Contrast curve: brightness to this power."""
    bias: float
    """Strength of the smooth, multiplicative bias field, different for every patient."""
    coil: float
    """How fast the signal falls off with the distance from a coil in the rectum; 0 for a body coil."""
    blur: float
    """Gaussian blur in the plane, in pixels at 64×64."""
    coarse: int
    """How many times as large the recorded pixels are; the image is interpolated between them."""
    noise: float
    """Rician noise: the standard deviation of the two normal parts of the signal."""
    black: float
    """The intensity that no signal is stored at."""
    white: float
    """The intensity that a signal of 1 is stored at."""

    def record(self, tissue: Tensor, generator: torch.Generator) -> Tensor:
        """Images of the volumes `tissue` (N, D, H, W)."""
        signal = blur(tissue.pow(self.gamma), self.blur * tissue.shape[-1] / 64)
        signal = signal * self._sensitivity(tissue.shape, generator)
        size = tissue.shape[-1] // self.coarse
        signal = F.interpolate(signal, (size, size), mode="area")
        # The scanner's image is a magnitude: noise in the real and in the imaginary part, and never below 0.
        real, imaginary = (self.noise * normal(signal, generator) for _ in range(2))
        signal = torch.hypot(signal + real, imaginary)
        signal = F.interpolate(signal, tuple(tissue.shape[-2:]), mode="bilinear", align_corners=False)
        return self.black + (self.white - self.black) * signal

    def _sensitivity(self, shape: torch.Size, generator: torch.Generator) -> Tensor:
        field = smooth_field((2, 3, 3), shape, generator)
        axis = torch.linspace(-VIEW, VIEW, shape[-1])
        distance = axis.view(1, 1, 1, -1).square() + (axis.view(1, 1, -1, 1) - RECTUM).square()
        # A coil in the rectum is tuned to show the organ in front of it well, hence the factor.
        fall = (1 + 0.15 * self.coil) / (1 + self.coil * distance)
        return torch.exp(self.bias * field) * fall


SCANNERS = {
    "high_field": Scanner(1.5, gamma=1.0, bias=0.20, coil=0, blur=0.3, coarse=1, noise=0.02, black=0.0, white=0.95),
    "standard": Scanner(1.0, gamma=0.6, bias=0.10, coil=0, blur=0.7, coarse=1, noise=0.03, black=0.10, white=0.85),
    "endocoil": Scanner(1.0, gamma=1.2, bias=0.15, coil=5, blur=0.3, coarse=1, noise=0.03, black=0.0, white=1.0),
    "low_field": Scanner(0.5, gamma=1.4, bias=0.25, coil=0, blur=0.5, coarse=2, noise=0.05, black=0.04, white=0.65),
}


@dataclass(frozen=True)
class PhantomSites:
    """An organ to segment in MRI-like slices of a male pelvis, at four sites with a scanner each.

    *Real*: nothing. Patients are drawn from ellipsoids: a body with a fat rim, muscles, dark bones, a bright
    bladder, a rectum, and a prostate-like organ of two zones; shapes, positions, sizes and textures vary from
    patient to patient. The scanners differ in contrast curve, bias field, resolution, Rician noise and intensity
    scale. It is made to try segmentation out in minutes on a CPU; it says nothing about real patients.

    A sample is a slice with its two neighbours as the three channels, and the organ's mask. Slices without organ
    are left out. The split is by patient: all slices of one stand on one side.

    Attributes:
        split: seed of the whole federation: patients, recording and split. None follows `build`'s seed.
        size: height and width of the slices, a multiple of 16 (a U-Net halves them four times).
        cases: patients per site on average; the sites have 1.5, 1, 1 and 0.5 times as many.
    """

    split: int | None = None
    size: int = 64
    cases: int = 10

    def __post_init__(self) -> None:
        if self.size < 16 or self.size % 16:
            raise ValueError(f"phantom-sites: size is a multiple of 16, not {self.size}")
        if self.cases < 6:
            raise ValueError(f"phantom-sites: cases is at least 6, so that every site has all splits, not {self.cases}")

    def build(self, seed: int) -> Federation:
        """The federation: `size`×`size` slices, patients 60/20/20 per client."""
        return self._draw(seed)[0]

    def case_of_slice(self, seed: int) -> Tensor:
        """The patient's number, over all sites, of every sample of `build(seed)`."""
        return self._draw(seed)[1]

    def _draw(self, seed: int) -> tuple[Federation, Tensor]:
        seed = seed if self.split is None else self.split
        images, masks, cases, clients = [], [], [], {}
        patients = samples = 0
        for name, scanner in SCANNERS.items():
            count = round(scanner.share * self.cases)
            tissue, organ = draw_patients(count, self.size, stream(seed, f"{name} patients"))
            volumes = to_uint8(scanner.record(tissue, stream(seed, f"{name} scanner")))
            site_images, site_masks, site_cases = _slices(volumes, organ)
            side_of_case = deal(torch.zeros(count), SIDES, stream(seed, f"{name} split"))
            members = samples + torch.arange(len(site_images))
            clients[name] = client_index(members, side_of_case[site_cases])
            images.append(site_images)
            masks.append(site_masks)
            cases.append(patients + site_cases)
            patients, samples = patients + count, samples + len(members)
        classes = ("background", "organ")
        federation = Federation("phantom-sites", "segmentation", torch.cat(images), torch.cat(masks), classes, clients)
        return federation, torch.cat(cases)


def _slices(volumes: Tensor, organ: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Slices with organ, with both neighbours as channels (N, 3, H, W), their masks and their case."""
    triples = volumes.unfold(1, 3, 1).movedim(-1, 2)
    middle = organ[:, 1:-1]
    keep = middle.float().mean((2, 3)) >= SMALLEST
    return triples[keep].contiguous(), middle[keep].to(torch.uint8), torch.nonzero(keep)[:, 0]


class _Scene:
    """Patients being drawn, back to front: x runs left to right, y front to back and z upwards, all in −1…1."""

    def __init__(self, count: int, size: int, generator: torch.Generator) -> None:
        self.count, self.size, self.generator = count, size, generator
        axes = (torch.linspace(-reach, reach, length) for reach, length in ((1, SLICES), (VIEW, size), (VIEW, size)))
        z, y, x = torch.meshgrid(*axes, indexing="ij")
        # Nobody is an ellipsoid: the space that shapes are drawn in is bent, for each patient in another way.
        self.space = [axis + 0.03 * self.field(3, 5) for axis in (x, y, z)]
        self.tissue = torch.zeros(count, SLICES, size, size)

    def field(self, depth: int, width: int) -> Tensor:
        """Smooth noise over the volumes, (count, D, H, W), with `width` knots across."""
        return smooth_field((depth, width, width), (self.count, SLICES, self.size, self.size), self.generator)

    def vary(self, low: float, high: float) -> Tensor:
        """One number a patient, that broadcasts over volumes."""
        return uniform(low, high, (self.count, 1, 1, 1), self.generator)

    def ellipsoid(self, centre: Point, radii: Point, mirrored: bool = False, power: float = 2) -> Tensor:
        """How deep every voxel lies in an ellipsoid (negative outside), about; `mirrored` makes it a pair."""
        x, y, z = self.space
        terms = zip((x.abs() if mirrored else x, y, z), centre, radii, strict=True)
        reach = sum(((axis - middle) / radius).abs() ** power for axis, middle, radius in terms)
        return (1 - reach ** (1 / power)) * torch.as_tensor(radii[1])

    def paint(self, depth: Tensor, value: Tensor | float, texture: Tensor | float = 0.0) -> None:
        """Lay tissue of brightness `value` over what lies in the shape; voxels on its edge are mixed."""
        cover = torch.sigmoid(2 * self.size * depth)
        self.tissue = torch.lerp(self.tissue, torch.as_tensor(value + texture).expand_as(cover), cover)


def draw_patients(count: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tissue brightness of `count` volumes (N, SLICES, size, size) in 0–1, and where the organ is."""
    scene = _Scene(count, size, generator)
    _draw_pelvis(scene)
    _draw_neighbours(scene)
    organ = _draw_organ(scene)
    return scene.tissue.clamp(0, 1), organ


def _draw_pelvis(scene: _Scene) -> None:
    """Body with its fat rim, muscles, the cavity's fat, and bones."""
    width, height = scene.vary(0.86, 0.95), scene.vary(0.66, 0.76)
    fine = scene.field(8, 24)
    rim = scene.vary(0.07, 0.14)
    scene.paint(scene.ellipsoid((0.0, 0.0, 0.0), (width, height, TALL), power=2.4), 0.72, 0.06 * fine)
    scene.paint(scene.ellipsoid((0.0, 0.0, 0.0), (width - rim, height - rim, TALL), power=2.4), 0.26, 0.07 * fine)
    # Fat between the muscles of the buttocks and around the hips.
    scene.paint(scene.ellipsoid((0.34, 0.44, 0.0), (0.20, 0.05, TALL), mirrored=True), 0.62)
    cavity = (scene.vary(0.38, 0.44), scene.vary(0.42, 0.48), TALL)
    # Fat is crossed by thin dark sheets: where a smooth field passes through 0.
    sheets = torch.exp(-(scene.field(5, 9) / 0.12).square())
    scene.paint(scene.ellipsoid((0.0, 0.06, 0.0), cavity), scene.vary(0.56, 0.68), 0.06 * fine - 0.22 * sheets)
    hip = scene.vary(0.16, 0.20)
    for shell, value in ((0.0, 0.04), (0.04, 0.20)):  # a black cortex around dark marrow
        scene.paint(scene.ellipsoid((0.62, 0.0, 0.2), (hip - shell, 1.1 * hip - shell, 0.9), mirrored=True), value)
        scene.paint(scene.ellipsoid((0.20, -0.44, -0.5), (0.20 - shell, 0.08 - shell / 2, 0.7), mirrored=True), value)
        scene.paint(scene.ellipsoid((0.0, 0.62, 0.6), (0.16 - shell, 0.07 - shell / 2, 0.7)), value)


def _draw_neighbours(scene: _Scene) -> None:
    """What lies beside the organ: some of it as bright as the organ itself, so that brightness alone misleads."""
    sling = scene.ellipsoid((0.28, 0.18, -0.7), (0.05, 0.20, 0.7), mirrored=True)
    scene.paint(sling, 0.28)
    loops = (scene.vary(0.20, 0.28), scene.vary(-0.26, -0.16), 0.9)
    bowel = scene.ellipsoid(loops, (0.13, 0.10, 0.5), mirrored=True)
    scene.paint(bowel, scene.vary(0.36, 0.50), 0.08 * scene.field(5, 16))
    bladder = (scene.vary(-0.06, 0.06), scene.vary(-0.18, -0.10), scene.vary(0.6, 0.85))
    wide, high = scene.vary(0.20, 0.30), scene.vary(0.16, 0.24)
    scene.paint(scene.ellipsoid(bladder, (wide + 0.03, high + 0.03, 0.73)), 0.28)
    scene.paint(scene.ellipsoid(bladder, (wide, high, 0.70)), 0.94)
    vesicles = scene.ellipsoid((0.12, 0.20, 0.65), (0.15, 0.06, 0.28), mirrored=True)
    scene.paint(vesicles, 0.58, 0.12 * scene.field(5, 20))
    rectum, width = (scene.vary(-0.05, 0.05), RECTUM, 0.0), scene.vary(0.11, 0.16)
    scene.paint(scene.ellipsoid(rectum, (width, 0.9 * width, TALL)), 0.40)
    scene.paint(scene.ellipsoid(rectum, (width - 0.05, 0.9 * width - 0.05, TALL)), scene.vary(0.02, 0.5))


def _draw_organ(scene: _Scene) -> Tensor:
    """The organ: an outer zone about as bright as the fat around it, an inner gland as dark as bowel; its mask."""
    middle = (scene.vary(-0.05, 0.05), scene.vary(0.05, 0.12), scene.vary(-0.25, 0.0))
    width, height, length = scene.vary(0.20, 0.31), scene.vary(0.16, 0.22), scene.vary(0.45, 0.65)
    bumps = 0.015 * scene.field(4, 9)
    outer = scene.ellipsoid(middle, (width, height, length)) + bumps
    forward = (middle[0], middle[1] - 0.25 * height, middle[2] + 0.1)
    inner = scene.ellipsoid(forward, (0.78 * width, 0.70 * height, 0.85 * length))
    nodules = 0.12 * scene.field(6, 18)
    scene.paint(outer + 0.025, 0.24)  # capsule
    scene.paint(outer, scene.vary(0.54, 0.66), 0.5 * nodules)
    scene.paint(torch.minimum(inner, outer), scene.vary(0.34, 0.44), nodules)
    return outer > 0
