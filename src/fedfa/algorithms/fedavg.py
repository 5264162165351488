"""FedAvg: McMahan et al., *Communication-Efficient Learning of Deep Networks from Decentralized Data*, AISTATS 2017."""

from __future__ import annotations

from dataclasses import dataclass

from fedfa.algorithms.base import Algorithm


@dataclass(frozen=True)
class FedAvg(Algorithm):
    """Clients train on their own data; the server averages their models, BatchNorm's running statistics included
    (FedFA paper, Eq. fl). Integer counters are averaged in integers. Weights are equal as in that paper, or the
    numbers of samples as in McMahan's (the experiment's `weighting`)."""
