"""Kernels of our own: Triton modules that are imported only where there is a GPU that can run them, and when not."""

from __future__ import annotations

import functools
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor


@functools.cache
def kernels(module: str, device: torch.device) -> ModuleType | None:
    """The module, where the device is a GPU that runs Triton and Triton is there."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return None
    try:
        return import_module(module)
    except ImportError:
        return None


def transformed() -> bool:
    """Whether torch is compiling, or transforming functions, and has to see plain operations."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def in_channels_last(x: Tensor) -> bool:
    """Whether features lie in channels_last, and not in both formats at once."""
    return not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
