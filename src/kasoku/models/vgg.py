"""VGG (Simonyan and Zisserman 2014), with torchvision's names and keys.

Other depths than 16: `use = "kasoku.models.vgg.VGG"` with `depth = 19`, and `batch_norm = true`.
"""

from typing import Literal

from torch import nn

from kasoku.core import checked
from kasoku.models.check import Count, Stem, check_widths
from kasoku.models.plain_cnns import PlainCNN

WIDTHS = (64, 128, 256, 512, 512)
# The number of 3x3 convolutions in each of the five stages; a max-pool ends each stage.
DEPTHS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}


class VGG(PlainCNN):
    """Five stages of 3x3 convolutions, then linear layers.

    Args:
        depth: 11, 13, 16 or 19 layers with weights.
        num_classes: outputs of the head, at least 1; `kasoku train` gives the number of the data's classes.
        in_channels: channels of the images, at least 1; `kasoku train` gives the data's.
        batch_norm: a BatchNorm after every convolution.
        head: "imagenet" (three linear layers over 7x7) or "cifar" (the mean over the image, one linear layer).
        dropout: probability after each of the first two linear layers of the "imagenet" head, from 0 to 1.
        widths: channels of each of the five stages, each at least 1.
    """

    @checked
    def __init__(  # noqa: PLR0913
        self,
        depth: Literal[11, 13, 16, 19],
        num_classes: Count,
        in_channels: Count,
        *,
        batch_norm: bool = False,
        head: Stem = "imagenet",
        dropout: float = 0.5,
        widths: tuple[int, ...] = WIDTHS,
    ) -> None:
        check_widths(widths, len(WIDTHS))
        layers: list[nn.Module] = []
        channels = in_channels
        for width, convolutions in zip(widths, DEPTHS[depth], strict=True):
            for _ in range(convolutions):
                layers += [nn.Conv2d(channels, width, 3, padding=1), *[nn.BatchNorm2d(width)] * batch_norm]
                layers.append(nn.ReLU(inplace=True))
                channels = width
            layers.append(nn.MaxPool2d(2))
        if head == "imagenet":
            first = (nn.Linear(channels * 7 * 7, 4096), nn.ReLU(inplace=True), nn.Dropout(dropout))
            second = (nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(dropout))
            super().__init__(layers, 7, nn.Sequential(*first, *second, nn.Linear(4096, num_classes)))
        else:
            super().__init__(layers, 1, nn.Sequential(nn.Linear(channels, num_classes)))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, 0.0, 0.01)
            if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)


def vgg16(num_classes: int = 1000, in_channels: int = 3, *, dropout: float = 0.5) -> VGG:
    """VGG-16: 138.4 M parameters, made for 224x224."""
    return VGG(16, num_classes, in_channels, dropout=dropout)


def vgg16_bn(num_classes: int = 1000, in_channels: int = 3, *, dropout: float = 0.5) -> VGG:
    """VGG-16 with BatchNorm: 138.4 M parameters, made for 224x224."""
    return VGG(16, num_classes, in_channels, batch_norm=True, dropout=dropout)


def cifar_vgg16(num_classes: int = 10, in_channels: int = 3) -> VGG:
    """VGG-16 for small images (one linear layer): 14.7 M parameters, made for 32x32."""
    return VGG(16, num_classes, in_channels, head="cifar")


def cifar_vgg16_bn(num_classes: int = 10, in_channels: int = 3, *, widths: tuple[int, ...] = WIDTHS) -> VGG:
    """VGG-16 with BatchNorm for small images (one linear layer): 14.7 M parameters, made for 32x32."""
    return VGG(16, num_classes, in_channels, batch_norm=True, head="cifar", widths=widths)
