"""FedFA on Flower: any experiment of the project across real sites, and FedFA for Flower apps written without it.

Needs ``pip install 'fedfa[flower]'``; docs/flower.md is the guide. Attributes are imported when they are first used: a
site's ClientApp starts a process for every message, and must not import torch.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

# Set before flwr is imported, which reads them then: nothing is sent to anyone but the federation's own server.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")

_HOMES = {"FedFA": "fedfa.flower.strategy", "pack": "fedfa.flower.strategy", "unpack": "fedfa.flower.strategy"}

__all__ = ["FedFA", "pack", "unpack"]

if TYPE_CHECKING:
    from fedfa.flower.strategy import FedFA, pack, unpack


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedfa.flower' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
