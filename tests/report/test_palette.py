"""The page's colours: told apart with any colour vision, and from the page."""

from __future__ import annotations

import re
from importlib.resources import files
from itertools import combinations

import numpy as np
import pytest

CSS = (files("fedfa.report") / "assets" / "page.css").read_text("utf-8")
BLOCKS = [block for block in re.findall(r"\{([^{}]*)\}", CSS) if "--c6" in block and "--page" in block]
# Machado, Oliveira and Fernandes (2009), severity 1
VISION = {
    "normal": np.eye(3),
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def linear(colour: str) -> np.ndarray:
    """A colour's red, green and blue as amounts of light."""
    values = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(light: np.ndarray) -> np.ndarray:
    """CIE L*a*b*, in which distances are as they are seen; 2.3 is just noticed."""
    matrix = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(np.clip(matrix @ np.clip(light, 0, 1) / (0.9505, 1, 1.089), 0.008856, None))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def variables(block: str) -> dict[str, str]:
    return dict(re.findall(r"--(\w+): (#\w{6})", block))


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("block", BLOCKS, ids=["light", "dark, chosen", "dark, by the system"])
def test_colours_are_told_apart(block: str, vision: str) -> None:
    seen = [lab(VISION[vision] @ linear(variables(block)[f"c{number}"])) for number in range(7)]
    assert min(np.linalg.norm(one - other) for one, other in combinations(seen, 2)) > 20


@pytest.mark.parametrize("block", BLOCKS, ids=["light", "dark, chosen", "dark, by the system"])
def test_colours_stand_out_from_the_page(block: str) -> None:
    """A contrast of 3 at least, as WCAG asks of graphics."""
    colours = variables(block)
    light = {name: float(np.array([0.2126, 0.7152, 0.0722]) @ linear(colour)) for name, colour in colours.items()}
    for number in range(7):
        low, high = sorted((light[f"c{number}"], light["card"]))
        assert (high + 0.05) / (low + 0.05) >= 3


def test_dark_is_the_same_whether_chosen_or_not() -> None:
    _, chosen, system = BLOCKS
    assert variables(chosen) == variables(system)
