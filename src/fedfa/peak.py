"""How much memory a run took at most."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from pathlib import Path

import torch

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Peak:
    """The most memory in use since this was made: on CUDA what torch has allocated on the device, elsewhere what the
    process has in RAM. Both are the whole process's: runs side by side in one process cannot be told apart."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            with suppress(OSError):
                CLEAR.write_text("5")  # Linux: the peak starts anew from what is in use now

    def read(self) -> int | None:
        """Bytes; None where the system does not say."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        try:
            found = re.search(r"^VmHWM:\s+(\d+) kB", STATUS.read_text(), re.M)
        except OSError:
            found = None
        return 1024 * int(found[1]) if found else _rusage()


def _rusage() -> int | None:
    """The process's peak since it began."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
