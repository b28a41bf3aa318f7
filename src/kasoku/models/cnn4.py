"""A small network of four convolutions, for comparisons that take many trainings on a CPU."""

from torch import Tensor, nn
from torch.nn import functional

from kasoku.models.check import check_counts


class CNN4(nn.Module):
    """Four convolutions with BatchNorm and ReLU, the maxima over the image, and one linear layer.

    Args:
        num_classes: outputs of the head, at least 1; `kasoku train` gives the number of the data's classes.
        in_channels: channels of the images, at least 1; `kasoku train` gives the data's.
    """

    def __init__(self, num_classes: int, in_channels: int) -> None:
        super().__init__()
        check_counts(num_classes=num_classes, in_channels=in_channels)
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
