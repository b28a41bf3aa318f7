"""Networks without shortcuts: AlexNet, the 11 convolutions of [001], and four for many trainings on a CPU.

AlexNet is the one-tower form (Krizhevsky 2014), with torchvision's names and keys. Of its network [001] (asynchronous
training on 48 GPUs) gives only the number of convolutions and the data set, ILSVRC2012. Widths, BatchNorm and the
linear head over the mean of the image are our choice.
"""

from collections.abc import Iterable

from torch import Tensor, nn
from torch.nn import functional

from kasoku.core import checked
from kasoku.models.check import Count, Stem, check_widths

CONVS = (1, 2, 3, 3, 2)  # of cnn11: convolutions of each stage; a max-pool follows each stage but the last


class PlainCNN(nn.Module):
    """Convolutions (`features`), a mean pool to a square of one size (`avgpool`), and a head (`classifier`)."""

    def __init__(self, features: Iterable[nn.Module], side: int, classifier: nn.Module) -> None:
        super().__init__()
        self.features = nn.Sequential(*features)
        self.avgpool = nn.AdaptiveAvgPool2d(side)
        self.classifier = classifier

    def forward(self, images_NCHW: Tensor) -> Tensor:
        x_NCHW, side = self.features(images_NCHW), self.avgpool.output_size
        if x_NCHW.shape[-2:] != (side, side):  # else no effect, and a nondeterministic backward on CUDA
            x_NCHW = self.avgpool(x_NCHW)
        logits_NK: Tensor = self.classifier(x_NCHW.flatten(1))
        return logits_NK


@checked
def alexnet(num_classes: Count = 1000, in_channels: Count = 3, *, dropout: float = 0.5) -> PlainCNN:
    """AlexNet, five convolutions and three linear layers: 61.1 M parameters, made for 224x224.

    Args:
        num_classes: outputs of the head, at least 1; `kasoku train` gives the number of the data's classes.
        in_channels: channels of the images, at least 1; `kasoku train` gives the data's.
        dropout: probability before each of the first two linear layers, from 0 to 1.
    """
    stage1 = (nn.Conv2d(in_channels, 64, 11, stride=4, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2))
    stage2 = (nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2))
    stage3: list[nn.Module] = []
    for channels, width in ((192, 384), (384, 256), (256, 256)):
        stage3 += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
    first = (nn.Dropout(dropout), nn.Linear(256 * 6 * 6, 4096), nn.ReLU(inplace=True))
    second = (nn.Dropout(dropout), nn.Linear(4096, 4096), nn.ReLU(inplace=True))
    head = nn.Sequential(*first, *second, nn.Linear(4096, num_classes))
    return PlainCNN((*stage1, *stage2, *stage3, nn.MaxPool2d(3, 2)), 6, head)


@checked
def cnn11(
    num_classes: Count = 1000,
    in_channels: Count = 3,
    *,
    stem: Stem = "imagenet",
    widths: tuple[int, ...] = (64, 128, 256, 384, 512),
) -> PlainCNN:
    """The network of 11 convolutions of [001]: 9.9 M parameters, made for 224x224 (stem="cifar": 32x32).

    Five stages, each convolution with BatchNorm and ReLU, and one linear layer.

    Args:
        num_classes: outputs of the head, at least 1; `kasoku train` gives the number of the data's classes.
        in_channels: channels of the images, at least 1; `kasoku train` gives the data's.
        stem: the first convolution: "imagenet" (7x7 with stride 2) or "cifar" (3x3, full size).
        widths: channels of each of the five stages, each at least 1.
    """
    check_widths(widths, len(CONVS))
    layers: list[nn.Module] = []
    size, stride, channels = (7, 2, in_channels) if stem == "imagenet" else (3, 1, in_channels)
    for width, convs in zip(widths, CONVS, strict=True):
        for _ in range(convs):
            conv = nn.Conv2d(channels, width, size, stride=stride, padding=size // 2, bias=False)
            nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
            layers += [conv, nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            size, stride, channels = 3, 1, width
        layers.append(nn.MaxPool2d(2))
    return PlainCNN(layers[:-1], 1, nn.Linear(channels, num_classes))


class CNN4(nn.Module):
    """Four convolutions with BatchNorm and ReLU, the maxima over the image, and one linear layer.

    Args:
        num_classes: outputs of the head, at least 1; `kasoku train` gives the number of the data's classes.
        in_channels: channels of the images, at least 1; `kasoku train` gives the data's.
    """

    @checked
    def __init__(self, num_classes: Count, in_channels: Count) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for channels, pool in ((16, True), (32, True), (64, False), (96, False)):
            layers += [nn.Conv2d(in_channels, channels, 3, padding=1, bias=False), *[nn.MaxPool2d(2)] * pool]
            layers += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
            in_channels = channels
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(in_channels, num_classes)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        x_NCHW = self.features(images_NCHW)
        x_NC = functional.max_pool2d(x_NCHW, list(x_NCHW.shape[-2:])).flatten(1)
        logits_NK: Tensor = self.head(x_NC / 4)  # undivided, the head's loss is too curved for large steps
        return logits_NK


def cnn4(num_classes: int = 10, in_channels: int = 3) -> CNN4:
    """A network of four convolutions: 0.1 M parameters, made for 28x28."""
    return CNN4(num_classes, in_channels)
