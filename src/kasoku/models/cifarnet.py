"""A small fast network for small images, after the published CIFAR-10 speed records (Jordan 2024, airbench).

Note: why it learns fast
    The first layer decorrelates 2x2 patches. Its weights are computed from training images (`prepare`), not trained.
    Every other convolution starts as the identity on its first channels, so the signal passes from the first step.
    BatchNorm has no trained scale. Its momentum is large: running statistics must be right after a few hundred steps.
    The head starts with weights of unit variance, and its logits are scaled down: a large rate turns it gently.
"""

from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional

from kasoku.core import InputError, Range, checked
from kasoku.models.check import Count

PATCH = 2  # side of the patches that the first layer whitens


class Group(nn.Module):
    """Two convolutions, each with BatchNorm and GELU; a max-pool after the first halves the size."""

    def __init__(self, channels_in: int, channels: int, norm_momentum: float) -> None:
        super().__init__()
        self.conv1 = _identity_conv(channels_in, channels)
        self.pool = nn.MaxPool2d(2)
        self.norm1 = _unscaled_norm(channels, norm_momentum)
        self.conv2 = _identity_conv(channels, channels)
        self.norm2 = _unscaled_norm(channels, norm_momentum)
        self.activation = nn.GELU()

    def forward(self, x_NCHW: Tensor) -> Tensor:
        x_NCHW = self.activation(self.norm1(self.pool(self.conv1(x_NCHW))))
        out: Tensor = self.activation(self.norm2(self.conv2(x_NCHW)))
        return out


class CifarNet(nn.Module):
    """A fixed whitening layer, groups that each halve the size, a global max-pool, and a scaled linear layer.

    Args:
        num_classes: outputs of the head, at least 1; `kasoku train` gives the number of the data's classes.
        in_channels: channels of the images, at least 1; `kasoku train` gives the data's.
        widths: channels of the groups, one number for each group, each at least 1.
        norm_momentum: weight of the new batch in BatchNorm's running statistics, as torch has it; any number.
    """

    @checked
    def __init__(
        self,
        num_classes: Count,
        in_channels: Count,
        widths: Annotated[tuple[int, ...], Range("channels of each group", at_least=1)],
        norm_momentum: float,
    ) -> None:
        super().__init__()
        if not widths:
            raise InputError("widths=(): give at least one, a group for each")
        whitened = 2 * in_channels * PATCH**2
        self.whitening = nn.Conv2d(in_channels, whitened, PATCH)
        self.whitening.weight.requires_grad_(False)
        self.whitening.bias = nn.Parameter(torch.zeros(whitened))
        self.activation = nn.GELU()
        self._groups = [f"group{i + 1}" for i in range(len(widths))]
        for name, before, width in zip(self._groups, (whitened, *widths), widths, strict=False):
            self.add_module(name, Group(before, width, norm_momentum))
        self.head = nn.Linear(widths[-1], num_classes, bias=False)
        nn.init.normal_(self.head.weight)
        self.head_scale = 1 / widths[-1]  # suits weights of unit variance

    def forward(self, images_NCHW: Tensor) -> Tensor:
        x_NCHW = self.activation(self.whitening(images_NCHW))
        for name in self._groups:
            x_NCHW = getattr(self, name)(x_NCHW)
        # A pool over the whole image: 3x3 for CIFAR. (AdaptiveMaxPool2d has no deterministic backward on CUDA.)
        x_NC = functional.max_pool2d(x_NCHW, list(x_NCHW.shape[-2:])).flatten(1)
        logits_NK: Tensor = self.head(x_NC) * self.head_scale
        return logits_NK

    @torch.no_grad()
    def prepare(self, images_NCHW: Tensor, eps: float = 5e-4) -> None:
        """Set the whitening layer from a few thousand training images, before training.

        It then decorrelates the 2x2 patches of these images and gives them unit variance. The second half of the
        filters is the negative of the first half, so that the activation loses no information. The result uses no
        random numbers, and the signs of the eigenvectors are fixed.

        `images_NCHW`: normalised, float. `eps`: added to the eigenvalues, so that directions of less variance are not
        scaled up to unit variance. Raises InputError if the images have another number of channels, are smaller than a
        patch, or are not float.
        """
        channels = self.whitening.in_channels
        shape = tuple(images_NCHW.shape)
        if len(shape) != 4 or shape[1] != channels or shape[0] == 0 or min(shape[2:]) < PATCH:
            raise InputError(f"images of shape {shape}: whitening takes N x {channels} x H x W, N a few thousand")
        if not images_NCHW.is_floating_point():
            raise InputError(f"images of {images_NCHW.dtype}: whitening takes normalised float images")
        # Sums are float32 within 256 images and float64 across them.
        count, totals, squares = 0, [], []
        for start in range(0, len(images_NCHW), 256):
            patches_NPL = functional.unfold(images_NCHW[start : start + 256].float(), PATCH)
            patches_MP = patches_NPL.transpose(1, 2).flatten(0, 1)
            count += len(patches_MP)
            totals.append(patches_MP.sum(0).double())
            squares.append((patches_MP.T @ patches_MP).double())
        mean = torch.stack(totals).sum(0) / count
        covariance = torch.stack(squares).sum(0) / count - torch.outer(mean, mean)
        variance, vectors = torch.linalg.eigh(covariance.cpu())  # ascending; one column each
        variance, vectors = variance.flip(0).clamp(min=0), vectors.flip(1).T
        size = vectors.abs()
        # Symmetric data give elements of equal size. The first large one decides the sign, so that rounding does not.
        large = (size > 0.9 * size.amax(1, keepdim=True)).int().argmax(1, keepdim=True)
        filters = vectors * vectors.gather(1, large).sign() / (variance + eps).sqrt()[:, None]
        self.whitening.weight.copy_(torch.cat([filters, -filters]).view_as(self.whitening.weight))


def _identity_conv(channels_in: int, channels: int) -> nn.Conv2d:
    conv = nn.Conv2d(channels_in, channels, 3, padding=1, bias=False)
    with torch.no_grad():
        nn.init.dirac_(conv.weight[:channels_in])
    return conv


def _unscaled_norm(channels: int, momentum: float) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels, momentum=momentum)
    norm.weight.requires_grad_(False)  # stays 1; the bias learns
    return norm


def cifarnet(
    num_classes: int = 10, in_channels: int = 3, *, widths: tuple[int, ...] = (64, 256, 256), norm_momentum: float = 0.4
) -> CifarNet:
    """A small fast network for small images: 2.0 M parameters, made for 32x32 (28x28 fits too)."""
    return CifarNet(num_classes, in_channels, widths, norm_momentum)
