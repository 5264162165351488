"""Networks, sources of data, partitions, transforms and augmentations, by their names on the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from fedfa.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from fedfa.augmentation import Augmentation
    from fedfa.data.federation import Federation
    from fedfa.data.partition import Partition
    from fedfa.data.pool import Pool
    from fedfa.data.transforms import Transform


class Source(Protocol):
    """A federation that comes divided: a dataclass whose fields are settings."""

    def build(self, seed: int) -> Federation:
        """The federation; `seed` decides its splits, unless a setting does."""
        ...


@runtime_checkable
class Reader(Protocol):
    """A source that reads files: a dataclass whose fields are settings. A partition divides what it reads among
    clients. With an attribute `shares` (:class:`fedfa.data.splits.Shares`) it says what it holds out by default."""

    def pool(self) -> Pool:
        """All samples, with what is known of them."""
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

SOURCES: Registry[Callable[..., Source | Reader]] = Registry(
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
        "office_caltech10": (
            "fedfa.data.sources.office_caltech10:OfficeCaltech10",
            "Office-Caltech 10: objects at 4 sites, DOMAIN/CLASS/images",
        ),
        "domainnet": (
            "fedfa.data.sources.domainnet:DomainNet",
            "DomainNet, the paper's ten classes: 6 domains, with or without the official lists",
        ),
        "pacs": (
            "fedfa.data.sources.pacs:PACS",
            "PACS: photographs, paintings, cartoons, sketches; DOMAIN/CLASS/images",
        ),
        "image_folders": (
            "fedfa.data.sources.image_folders:ImageFolders",
            "your own images: CLIENT/CLASS/images",
        ),
        "segmentation_folders": (
            "fedfa.data.sources.segmentation_folders:SegmentationFolders",
            "your own images and masks: CLIENT/images and CLIENT/masks",
        ),
        "prostate": (
            "fedfa.data.sources.prostate:Prostate",
            "prostate MRI at several hospitals: SITE/CaseNN.nii.gz and CaseNN_segmentation.nii.gz",
        ),
        "cifar10": ("fedfa.data.sources.cifar10:Cifar10", "CIFAR-10: binary version, python version or class folders"),
        "emnist": (
            "fedfa.data.sources.emnist:Emnist",
            "EMNIST, 62 classes: LEAF's FEMNIST JSON, or by-class idx or mat",
        ),
        "digits": ("fedfa.data.sources.digits:Digits", "digits from MNIST, MNIST-M and USPS: 3 domains"),
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

PARTITIONS: Registry[Callable[..., Partition]] = Registry(
    "partition",
    {
        "natural": ("fedfa.data.partition:Natural", "as the data come: a client a domain, a hospital, a writer"),
        "dirichlet": ("fedfa.data.partition:Dirichlet", "classes in shares drawn from Dir(alpha) for each client"),
        "sizes": ("fedfa.data.partition:Sizes", "clients that differ in how much they have: log-normal or power law"),
        "iid": ("fedfa.data.partition:IID", "equal parts by chance"),
    },
)

TRANSFORMS: Registry[Callable[..., Transform]] = Registry(
    "transform",
    {
        "flip": ("fedfa.data.transforms:Flip", "images mirrored left to right, or top to bottom"),
        "rotate": ("fedfa.data.transforms:Rotate", "images turned by up to 30°"),
        "crop": ("fedfa.data.transforms:Crop", "images padded by 4 pixels and cut back to their size somewhere"),
        "normalise": ("fedfa.data.transforms:Normalise", "channels less their mean, over their deviation; always"),
    },
)
