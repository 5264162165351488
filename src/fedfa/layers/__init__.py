"""Layers that work on hidden features."""

from fedfa.layers.ffa import FFA, augment, augment_reference, channel_statistics, modulate, spread_terms
from fedfa.layers.insert import add_ffa, update_gamma

__all__ = [
    "FFA",
    "add_ffa",
    "augment",
    "augment_reference",
    "channel_statistics",
    "modulate",
    "spread_terms",
    "update_gamma",
]
