"""Layers that work on hidden features."""

from fedfa.layers.ffa import FFA, augment, augment_reference, channel_statistics, modulate, spread_terms
from fedfa.layers.insert import add_ffa, update_gamma
from fedfa.layers.manifold_mixup import ManifoldMixup
from fedfa.layers.mixstyle import MixStyle, mix_style
from fedfa.layers.moex import MoEx, exchange_moments

__all__ = [
    "FFA",
    "ManifoldMixup",
    "MixStyle",
    "MoEx",
    "add_ffa",
    "augment",
    "augment_reference",
    "channel_statistics",
    "exchange_moments",
    "mix_style",
    "modulate",
    "spread_terms",
    "update_gamma",
]
