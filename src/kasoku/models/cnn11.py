"""The network of 11 convolutions of [001] (asynchronous training on 48 GPUs, ImageNet).

The source gives only the number of convolutions and the data set (ILSVRC2012).
Widths, BatchNorm and the linear head over the mean of the image are our choice.
"""

from torch import Tensor, nn

from kasoku.models.check import check_counts, check_option, check_widths

CONVS = (1, 2, 3, 3, 2)  # convolutions of each stage; a max-pool follows each stage but the last


class CNN11(nn.Module):
    """Eleven convolutions in five stages, each with BatchNorm and ReLU, and one linear layer.

    Args:
        num_classes: outputs of the head, at least 1; `kasoku train` gives the number of the data's classes.
        in_channels: channels of the images, at least 1; `kasoku train` gives the data's.
        stem: the first convolution: "imagenet" (7x7 with stride 2) or "cifar" (3x3, full size).
        widths: channels of each of the five stages, each at least 1.
    """

    def __init__(self, num_classes: int, in_channels: int, stem: str, widths: tuple[int, ...]) -> None:
        super().__init__()
        check_counts(num_classes=num_classes, in_channels=in_channels)
        check_widths(widths, len(CONVS))
        check_option("stem", stem, ("imagenet", "cifar"))
        layers: list[nn.Module] = []
        size, stride, channels = (7, 2, in_channels) if stem == "imagenet" else (3, 1, in_channels)
        for width, convs in zip(widths, CONVS, strict=True):
            for _ in range(convs):
                conv = nn.Conv2d(channels, width, size, stride=stride, padding=size // 2, bias=False)
                nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
                layers += [conv, nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
                size, stride, channels = 3, 1, width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers[:-1])
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        logits_NK: Tensor = self.classifier(self.avgpool(self.features(images_NCHW)).flatten(1))
        return logits_NK


def cnn11(
    num_classes: int = 1000,
    in_channels: int = 3,
    *,
    stem: str = "imagenet",
    widths: tuple[int, ...] = (64, 128, 256, 384, 512),
) -> CNN11:
    """The network of 11 convolutions of [001]: 9.9 M parameters, made for 224x224 (stem="cifar": 32x32)."""
    return CNN11(num_classes, in_channels, stem, widths)
