"""Augmentations that go with any algorithm: of a batch, of hidden features, or none."""

from fedfa.augmentation.base import Augmentation
from fedfa.augmentation.cutmix import CutMix
from fedfa.augmentation.dsu import DSU
from fedfa.augmentation.manifold_mixup import ManifoldMixup
from fedfa.augmentation.mixstyle import MixStyle
from fedfa.augmentation.mixup import Mixup
from fedfa.augmentation.moex import MoEx

__all__ = ["DSU", "Augmentation", "CutMix", "ManifoldMixup", "MixStyle", "Mixup", "MoEx"]
