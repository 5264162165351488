"""Kernels in Triton: modules that are imported only where there is a GPU that can run them."""

from __future__ import annotations

import functools
from importlib import import_module
from types import ModuleType

import torch


@functools.cache
def kernels(module: str, device: torch.device) -> ModuleType | None:
    """The module, where the device is a GPU that runs Triton and Triton is there."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return None
    try:
        return import_module(module)
    except ImportError:
        return None
