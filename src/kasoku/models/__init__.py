"""Image classifiers as plain modules: torchvision's names and state_dict keys where it has the model."""

from kasoku.models.alexnet import alexnet
from kasoku.models.check import check_fits
from kasoku.models.cifarnet import cifarnet
from kasoku.models.cnn11 import cnn11
from kasoku.models.pretrained import Pretrained, fill, freeze, load, read
from kasoku.models.resnet import cifar_resnet18, resnet18, resnet50
from kasoku.models.vgg import cifar_vgg16_bn, vgg16

__all__ = [
    "Pretrained",
    "alexnet",
    "check_fits",
    "cifar_resnet18",
    "cifar_vgg16_bn",
    "cifarnet",
    "cnn11",
    "fill",
    "freeze",
    "load",
    "read",
    "resnet18",
    "resnet50",
    "vgg16",
]
