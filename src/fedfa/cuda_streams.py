"""CUDA streams that nobody else uses.

torch hands out 32 streams in turn, so two who asked can hold the same one: while the first captures a graph on it, the
other's work is an error. These are made by the driver, and used again when their holder is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import weakref
from collections.abc import Iterator

import torch

_NON_BLOCKING = 1
"""CU_STREAM_NON_BLOCKING: does not wait for the default stream, nor that for it."""

_idle: dict[torch.device, list[torch.cuda.Stream]] = {}


def own_stream(holder: object, device: torch.device) -> torch.cuda.Stream:
    """A stream for as long as `holder` lives."""
    stream = _take(device)
    weakref.finalize(holder, _idle.setdefault(device, []).append, stream).atexit = False
    return stream


@contextlib.contextmanager
def borrowed_streams(count: int, device: torch.device) -> Iterator[list[torch.cuda.Stream]]:
    """Streams for as long as it lasts."""
    streams = [_take(device) for _ in range(count)]
    try:
        yield streams
    finally:
        _idle.setdefault(device, []).extend(streams)


def _take(device: torch.device) -> torch.cuda.Stream:
    try:
        return _idle.setdefault(device, []).pop()
    except IndexError:
        return _create(device)


def _create(device: torch.device) -> torch.cuda.Stream:
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # the driver needs torch's context, which the first use makes
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        handle = ctypes.c_void_p()
        failed = driver.cuStreamCreate(ctypes.byref(handle), ctypes.c_uint(_NON_BLOCKING))
        if failed or handle.value is None:
            raise RuntimeError(f"the CUDA driver makes no stream (error {failed})")
        return torch.cuda.ExternalStream(handle.value, device)
