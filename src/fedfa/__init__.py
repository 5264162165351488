"""Federated learning under feature shift, with FedFA at its centre.

Attributes are imported when they are first used, so that ``import fedfa`` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "FFA": "fedfa.layers.ffa",
    "modulate": "fedfa.layers.ffa",
    "augment": "fedfa.layers.ffa",
    "add_ffa": "fedfa.layers.insert",
    "update_gamma": "fedfa.layers.insert",
    "ALGORITHMS": "fedfa.algorithms",
    "NETWORKS": "fedfa.registries",
    "SOURCES": "fedfa.registries",
    "AUGMENTATIONS": "fedfa.registries",
    "PARTITIONS": "fedfa.registries",
    "TRANSFORMS": "fedfa.registries",
    "Algorithm": "fedfa.algorithms.base",
    "Federation": "fedfa.data.federation",
    "ClientIndex": "fedfa.data.federation",
    "Experiment": "fedfa.experiment",
    "load": "fedfa.experiment",
    "Run": "fedfa.runs",
    "run": "fedfa.simulate",
    "resume": "fedfa.simulate",
    "compare": "fedfa.report.compare",
    "UserError": "fedfa.errors",
}
_MODULES = ("nets", "layers", "algorithms")

__all__ = ["__version__", *_HOMES, *_MODULES]  # noqa: PLE0604  # names, computed

if TYPE_CHECKING:
    from fedfa import algorithms, layers, nets
    from fedfa.algorithms import ALGORITHMS
    from fedfa.algorithms.base import Algorithm
    from fedfa.data.federation import ClientIndex, Federation
    from fedfa.errors import UserError
    from fedfa.experiment import Experiment, load
    from fedfa.layers.ffa import FFA, augment, modulate
    from fedfa.layers.insert import add_ffa, update_gamma
    from fedfa.registries import AUGMENTATIONS, NETWORKS, PARTITIONS, SOURCES, TRANSFORMS
    from fedfa.report.compare import compare
    from fedfa.runs import Run
    from fedfa.simulate import resume, run


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    elif name in _MODULES:
        value = import_module(f"fedfa.{name}")
    else:
        raise AttributeError(f"module 'fedfa' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_MODULES})
