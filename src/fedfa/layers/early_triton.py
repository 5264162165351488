"""Kernels that begin while the one before them ends (programmatic dependent launch), which GPUs from Hopper on can do.

A kernel that is launched with :func:`options` begins as soon as every program of the one before has ended or called
:func:`let_follow`. It calls :func:`wait` before it reads what that one wrote, and before it writes anything; all of its
programs do, and call :func:`let_follow` later, if at all, so that whoever comes next comes after both. What was there
before the kernel before began, it may read at once.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # Triton before 3.3
    gdc_launch_dependents = gdc_wait = None


@triton.jit
def let_follow(early: tl.constexpr):
    if early:
        gdc_launch_dependents()


@triton.jit
def wait(early: tl.constexpr):
    if early:
        gdc_wait()


@functools.cache
def options(device: torch.device) -> Mapping[str, bool]:
    """How such a kernel is launched."""
    nvidia = device.type == "cuda" and torch.version.cuda is not None  # AMD's GPUs are "cuda" too
    if nvidia and gdc_wait is not None and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"early": True, "launch_pdl": True}
    return {"early": False}
