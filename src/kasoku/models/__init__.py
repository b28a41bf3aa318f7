"""Image classifiers as plain modules: torchvision's names and state_dict keys where it has the model."""

from kasoku.models.check import check_fits
from kasoku.models.cifarnet import cifarnet
from kasoku.models.huggingface import huggingface
from kasoku.models.plain_cnns import alexnet, cnn4, cnn11
from kasoku.models.pretrained import Pretrained, fill, freeze, load, read
from kasoku.models.resnet import cifar_resnet18, cifar_resnet50, resnet18, resnet34, resnet50, resnet101, resnet152
from kasoku.models.vgg import cifar_vgg16, cifar_vgg16_bn, vgg16, vgg16_bn

__all__ = [
    "Pretrained", "alexnet", "check_fits", "cifar_resnet18", "cifar_resnet50", "cifar_vgg16", "cifar_vgg16_bn",
    "cifarnet", "cnn4", "cnn11", "fill", "freeze", "huggingface", "load", "read", "resnet18", "resnet34", "resnet50",
    "resnet101", "resnet152", "vgg16", "vgg16_bn",
]  # fmt: skip
