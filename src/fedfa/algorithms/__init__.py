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
        "fedavgm": ("fedfa.algorithms.fedavgm:FedAvgM", "FedAvg with momentum on the server"),
        "fedprox": ("fedfa.algorithms.fedprox:FedProx", "a quadratic term ties clients to the server's model"),
        "fedsam": ("fedfa.algorithms.fedsam:FedSAM", "sharpness-aware steps on the clients"),
        "fedbn": ("fedfa.algorithms.fedbn:FedBN", "every client keeps its own BatchNorm"),
        "fedrobust": ("fedfa.algorithms.fedrobust:FedRobust", "against the worst affine shift of each client's inputs"),
        "fedmix": ("fedfa.algorithms.fedmix:FedMix", "Mixup with averages of the clients' images, which are shared"),
        "fedharmo": ("fedfa.algorithms.fedharmo:FedHarmo", "HarmoFL: one amplitude spectrum for all, and flat minima"),
        "scaffold": ("fedfa.algorithms.scaffold:Scaffold", "control variates take out what is a client's own"),
        "feddyn": ("fedfa.algorithms.feddyn:FedDyn", "a moving linear term lets the clients' optima agree"),
        "fedadam": ("fedfa.algorithms.fedopt:FedAdam", "FedOpt: Adam on the server"),
        "fedyogi": ("fedfa.algorithms.fedopt:FedYogi", "FedOpt: Yogi on the server"),
        "fedadagrad": ("fedfa.algorithms.fedopt:FedAdagrad", "FedOpt: Adagrad on the server"),
        "fedfa": ("fedfa.algorithms.fedfa:FedFA", "federated feature augmentation, as the paper writes it"),
        "fedfa-r": ("fedfa.algorithms.fedfa:FedFARandom", "FedFA-R: the same random width in every channel"),
        "fedfa-c": ("fedfa.algorithms.fedfa:FedFAClient", "FedFA-C: width from the client's own batch alone"),
        "fedfa-direct": ("fedfa.algorithms.fedfa:FedFADirect", "Direct Fusion: raw variance over clients for γ"),
        "fedfa-total": ("fedfa.algorithms.fedfa:FedFATotal", "width by the law of total variance (an extension)"),
    },
)
