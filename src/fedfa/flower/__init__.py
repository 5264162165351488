"""FedFA on Flower: any experiment of the project across real sites, and FedFA for Flower apps written without it.

Needs ``pip install 'fedfa[flower]'``; docs/flower.md is the guide. Attributes are imported when they are first used: a
site's ClientApp starts a process for every message, and must not import torch.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

SILENT = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
"""Nothing is sent to anyone but the federation's own server. Set before flwr is imported, which reads them then."""
for _name, _value in SILENT.items():
    os.environ.setdefault(_name, _value)

_HOMES = {"FedFA": "fedfa.flower.strategy", "pack": "fedfa.flower.strategy", "unpack": "fedfa.flower.strategy"}

__all__ = ["FedFA", "pack", "unpack"]

if TYPE_CHECKING:
    from fedfa.flower.strategy import FedFA, pack, unpack


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedfa.flower' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
