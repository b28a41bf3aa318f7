"""AlexNet in its one-tower form (Krizhevsky 2014), with torchvision's names and keys."""

from torch import Tensor, nn

from kasoku.models.check import check_counts


class AlexNet(nn.Module):
    """Five convolutions and three linear layers.

    Args:
        num_classes: outputs of the head, at least 1; `kasoku train` gives the number of the data's classes.
        in_channels: channels of the images, at least 1; `kasoku train` gives the data's.
        dropout: probability before each of the first two linear layers, from 0 to 1.
    """

    def __init__(self, num_classes: int, in_channels: int, dropout: float) -> None:
        super().__init__()
        check_counts(num_classes=num_classes, in_channels=in_channels)
        stage1 = (nn.Conv2d(in_channels, 64, 11, stride=4, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2))
        stage2 = (nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2))
        stage3: list[nn.Module] = []
        for channels, width in ((192, 384), (384, 256), (256, 256)):
            stage3 += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
        self.features = nn.Sequential(*stage1, *stage2, *stage3, nn.MaxPool2d(3, 2))
        self.avgpool = nn.AdaptiveAvgPool2d(6)
        first = (nn.Dropout(dropout), nn.Linear(256 * 6 * 6, 4096), nn.ReLU(inplace=True))
        second = (nn.Dropout(dropout), nn.Linear(4096, 4096), nn.ReLU(inplace=True))
        self.classifier = nn.Sequential(*first, *second, nn.Linear(4096, num_classes))

    def forward(self, images_NCHW: Tensor) -> Tensor:
        x_NCHW = self.features(images_NCHW)
        if x_NCHW.shape[-2:] != (6, 6):  # at 6x6 the pool does nothing, and its backward on CUDA is not deterministic
            x_NCHW = self.avgpool(x_NCHW)
        logits_NK: Tensor = self.classifier(x_NCHW.flatten(1))
        return logits_NK


def alexnet(num_classes: int = 1000, in_channels: int = 3, *, dropout: float = 0.5) -> AlexNet:
    """AlexNet: 61.1 M parameters, made for 224x224."""
    return AlexNet(num_classes, in_channels, dropout)
