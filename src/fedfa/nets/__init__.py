"""The networks of the paper's experiments, plain modules that take a layer to put after each convolutional stage.

AlexNet(10, augment=FFA)                                     # after all five stages
AlexNet(10, augment=partial(FFA, p=0.3), stages=[1, 2, 5])   # after these
"""

from __future__ import annotations

from fedfa.nets.alexnet import AlexNet
from fedfa.nets.lenet import LeNet
from fedfa.nets.resnet import ResNet18
from fedfa.nets.stages import Augment, augment_layers
from fedfa.nets.unet import UNet

__all__ = ["AlexNet", "Augment", "LeNet", "ResNet18", "UNet", "augment_layers"]
