"""Caches that no test shares with the user, and the real data, where they lie beside the checkout."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder for this test alone."""
    folder = tmp_path / "the cache"
    monkeypatch.setenv("FEDFA_CACHE", str(folder))
    monkeypatch.delenv("FEDFA_DATA", raising=False)
    return folder


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data sets: `$FEDFA_SHARED_DATA`, or shared/data beside the checkout."""
    beside = Path(__file__).parents[2].parent / "shared" / "data"
    folder = Path(os.environ.get("FEDFA_SHARED_DATA") or beside)
    if not folder.is_dir():
        pytest.skip(f"the real data sets are not at {folder} (FEDFA_SHARED_DATA names another folder)")
    return folder


@pytest.fixture
def shared_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache for the real data sets, so that each is decoded once in a session."""
    folder = tmp_path_factory.getbasetemp() / "cache of shared data"
    monkeypatch.setenv("FEDFA_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def draw() -> Callable[..., Path]:
    """Write a picture of noise: a different one for every `seed`."""
    image = pytest.importorskip("PIL.Image")

    def draw(file: Path, seed: int = 0, size: tuple[int, int] = (20, 16), mode: str = "RGB", **options: Any) -> Path:
        pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        file.parent.mkdir(parents=True, exist_ok=True)
        image.fromarray(pixels).convert(mode).save(file, **options)
        return file

    return draw
