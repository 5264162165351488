"""Kernels without a GPU: a file of tests played in Triton's interpreter, which is chosen before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def play_interpreted(file: str) -> None:
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", file]
    own = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(words, env=own, capture_output=True, text=True, check=False)
    if "only 0-dimensional arrays can be converted" in done.stdout:
        pytest.skip("this Triton's interpreter cannot work with this NumPy")  # Triton 3.6 with NumPy 2.4
    assert done.returncode == 0, done.stdout[-5000:]
