"""Networks, sources of data, augmentations and built-in experiments, by their names on the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from fedfa.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from fedfa.augmentation import Augmentation
    from fedfa.data.federation import Federation


class Source(Protocol):
    """Where a federation comes from: a dataclass whose fields are settings."""

    def build(self, seed: int) -> Federation:
        """The federation; `seed` decides its splits, unless a setting does."""
        ...


NETWORKS: Registry[Callable[..., nn.Module]] = Registry(
    "network",
    {
        "alexnet": (
            "fedfa.nets:AlexNet",
            "AlexNet with BatchNorm, for 256 px photographs (Office-Caltech 10, DomainNet)",
        ),
        "lenet": ("fedfa.nets:LeNet", "LeNet-5, for 28 px digits and letters (EMNIST)"),
        "resnet18": ("fedfa.nets:ResNet18", "ResNet-18 with a CIFAR or an ImageNet stem"),
        "unet": ("fedfa.nets:UNet", "U-Net, for segmentation (ProstateMRI)"),
    },
)

SOURCES: Registry[Callable[..., Source]] = Registry(
    "source",
    {
        "digit-sites": (
            "fedfa.data.sources.digit_sites:DigitSites",
            "real handwritten digits through four simulated devices (embedded)",
        ),
        "phantom-sites": (
            "fedfa.data.sources.phantom_sites:PhantomSites",
            "drawn organs in MRI-like slices from four simulated scanners (embedded)",
        ),
    },
)

AUGMENTATIONS: Registry[Callable[..., Augmentation]] = Registry(
    "augmentation",
    {
        "none": ("fedfa.augmentation:Augmentation", "no augmentation besides the algorithm's own"),
        "dsu": ("fedfa.augmentation:DSU", "channel statistics drawn around themselves, without the federation"),
        "mixup": ("fedfa.augmentation:Mixup", "images and labels mixed with another sample's"),
        "cutmix": ("fedfa.augmentation:CutMix", "a box of another sample's image, and of its mask or label"),
        "manifold-mixup": ("fedfa.augmentation:ManifoldMixup", "mixup of the images or of one stage's features"),
        "mixstyle": ("fedfa.augmentation:MixStyle", "channel statistics mixed with another sample's, labels kept"),
        "moex": ("fedfa.augmentation:MoEx", "moments over channels swapped with another sample's, labels mixed"),
    },
)
