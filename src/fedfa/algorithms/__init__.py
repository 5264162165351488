"""Federated algorithms, by their names on the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedfa.registry import Registry

if TYPE_CHECKING:
    from fedfa.algorithms.base import Algorithm

ALGORITHMS: Registry[type[Algorithm]] = Registry(
    "algorithm",
    {
        "fedavg": ("fedfa.algorithms.fedavg:FedAvg", "average of the clients' models"),
        "fedfa": ("fedfa.algorithms.fedfa:FedFA", "federated feature augmentation, as the paper writes it"),
        "fedfa-r": ("fedfa.algorithms.fedfa:FedFARandom", "FedFA-R: the same random width in every channel"),
        "fedfa-c": ("fedfa.algorithms.fedfa:FedFAClient", "FedFA-C: width from the client's own batch alone"),
        "fedfa-direct": ("fedfa.algorithms.fedfa:FedFADirect", "Direct Fusion: raw variance over clients for γ"),
        "fedfa-total": ("fedfa.algorithms.fedfa:FedFATotal", "width by the law of total variance (an extension)"),
    },
)
