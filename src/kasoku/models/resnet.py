"""ResNet v1.5 (He et al. 2015; the stride sits in the 3x3 convolution), with torchvision's names and keys."""

from torch import Tensor, nn

from kasoku.core import checked
from kasoku.models.check import Count, Stem, check_widths

WIDTHS = (64, 128, 256, 512)  # of the 3x3 convolutions of each of the four stages


def conv(channels_in: int, channels_out: int, size: int, stride: int = 1) -> nn.Conv2d:
    """A convolution without bias, padded so that only the stride changes the size."""
    return nn.Conv2d(channels_in, channels_out, size, stride=stride, padding=size // 2, bias=False)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut: the block of ResNet-18 and 34."""

    expansion = 1

    def __init__(self, channels_in: int, channels: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        self.conv1 = conv(channels_in, channels, 3, stride)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = conv(channels, channels, 3)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x_NCHW: Tensor) -> Tensor:
        shortcut = x_NCHW if self.downsample is None else self.downsample(x_NCHW)
        x_NCHW = self.relu(self.bn1(self.conv1(x_NCHW)))
        x_NCHW = self.bn2(self.conv2(x_NCHW))
        x_NCHW += shortcut
        out: Tensor = self.relu(x_NCHW)
        return out


class Bottleneck(nn.Module):
    """A 3x3 convolution between two 1x1 convolutions, with a shortcut: the block of ResNet-50, 101 and 152."""

    expansion = 4

    def __init__(self, channels_in: int, channels: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        self.conv1 = conv(channels_in, channels, 1)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = conv(channels, channels, 3, stride)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = conv(channels, channels * self.expansion, 1)
        self.bn3 = nn.BatchNorm2d(channels * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x_NCHW: Tensor) -> Tensor:
        shortcut = x_NCHW if self.downsample is None else self.downsample(x_NCHW)
        x_NCHW = self.relu(self.bn1(self.conv1(x_NCHW)))
        x_NCHW = self.relu(self.bn2(self.conv2(x_NCHW)))
        x_NCHW = self.bn3(self.conv3(x_NCHW))
        x_NCHW += shortcut
        out: Tensor = self.relu(x_NCHW)
        return out


Block = type[BasicBlock] | type[Bottleneck]


class ResNet(nn.Module):
    """A stem, four stages of residual blocks, the mean over the image, one linear layer.

    Args:
        block: BasicBlock or Bottleneck.
        depths: blocks of each stage.
        num_classes: outputs of the head, at least 1; `kasoku train` gives the number of the data's classes.
        in_channels: channels of the images, at least 1; `kasoku train` gives the data's.
        stem: "imagenet" (7x7 with stride 2, then max-pool: a quarter of the size) or "cifar" (3x3, full size).
        widths: channels of the 3x3 convolutions of each of the four stages, each at least 1; the stem has the first's.
    """

    @checked
    def __init__(
        self,
        block: Block,
        depths: tuple[int, int, int, int],
        num_classes: Count,
        in_channels: Count,
        stem: Stem,
        widths: tuple[int, ...] = WIDTHS,
    ) -> None:
        super().__init__()
        check_widths(widths, len(depths))
        large, e, first = stem == "imagenet", block.expansion, widths[0]
        self.conv1 = conv(in_channels, first, 7, 2) if large else conv(in_channels, first, 3)
        self.bn1 = nn.BatchNorm2d(first)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1) if large else nn.Identity()
        self.layer1 = _stage(block, first, first, depths[0], stride=1)
        self.layer2 = _stage(block, first * e, widths[1], depths[1], stride=2)
        self.layer3 = _stage(block, widths[1] * e, widths[2], depths[2], stride=2)
        self.layer4 = _stage(block, widths[2] * e, widths[3], depths[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(widths[3] * e, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images_NCHW: Tensor) -> Tensor:
        x_NCHW = self.maxpool(self.relu(self.bn1(self.conv1(images_NCHW))))
        x_NCHW = self.layer4(self.layer3(self.layer2(self.layer1(x_NCHW))))
        logits_NK: Tensor = self.fc(self.avgpool(x_NCHW).flatten(1))
        return logits_NK


def _stage(block: Block, channels_in: int, channels: int, depth: int, *, stride: int) -> nn.Sequential:
    out = channels * block.expansion
    changes = stride != 1 or channels_in != out
    downsample = nn.Sequential(conv(channels_in, out, 1, stride), nn.BatchNorm2d(out)) if changes else None
    first = block(channels_in, channels, stride, downsample)
    return nn.Sequential(first, *(block(out, channels, 1, None) for _ in range(depth - 1)))


def resnet18(num_classes: int = 1000, in_channels: int = 3, *, stem: Stem = "imagenet") -> ResNet:
    """ResNet-18: 11.7 M parameters, made for 224x224."""
    return ResNet(BasicBlock, (2, 2, 2, 2), num_classes, in_channels, stem)


def resnet34(num_classes: int = 1000, in_channels: int = 3, *, stem: Stem = "imagenet") -> ResNet:
    """ResNet-34: 21.8 M parameters, made for 224x224."""
    return ResNet(BasicBlock, (3, 4, 6, 3), num_classes, in_channels, stem)


def resnet50(
    num_classes: int = 1000, in_channels: int = 3, *, stem: Stem = "imagenet", widths: tuple[int, ...] = WIDTHS
) -> ResNet:
    """ResNet-50 v1.5: 25.6 M parameters, made for 224x224."""
    return ResNet(Bottleneck, (3, 4, 6, 3), num_classes, in_channels, stem, widths)


def resnet101(num_classes: int = 1000, in_channels: int = 3, *, stem: Stem = "imagenet") -> ResNet:
    """ResNet-101 v1.5: 44.5 M parameters, made for 224x224."""
    return ResNet(Bottleneck, (3, 4, 23, 3), num_classes, in_channels, stem)


def resnet152(num_classes: int = 1000, in_channels: int = 3, *, stem: Stem = "imagenet") -> ResNet:
    """ResNet-152 v1.5: 60.2 M parameters, made for 224x224."""
    return ResNet(Bottleneck, (3, 8, 36, 3), num_classes, in_channels, stem)


def cifar_resnet18(num_classes: int = 10, in_channels: int = 3) -> ResNet:
    """ResNet-18 for small images (3x3 stem, no max-pool): 11.2 M parameters, made for 32x32."""
    return resnet18(num_classes, in_channels, stem="cifar")


def cifar_resnet50(num_classes: int = 10, in_channels: int = 3, *, widths: tuple[int, ...] = WIDTHS) -> ResNet:
    """ResNet-50 v1.5 for small images (3x3 stem, no max-pool): 23.5 M parameters, made for 32x32."""
    return resnet50(num_classes, in_channels, stem="cifar", widths=widths)
