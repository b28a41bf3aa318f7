"""Augmentation and normalisation of whole batches on the training device."""

import functools
import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch

from kasoku.core import InputError, Job, Range, Stage, Technique
from kasoku.data.decode import native
from kasoku.data.loading.shuffle import draws, whole

_FLIP, _SHIFT_Y, _SHIFT_X, _CUT_Y, _CUT_X, _AREA, _RATIO, _BOX_Y, _BOX_X, _BRIGHTNESS, _CONTRAST = range(11)


@dataclass(frozen=True)
class Augment(Technique, stage=Stage.DATA, changes_pixels=True, in_sandbox=False):
    """Varies training images in batches on the device: flip, translate, cutout, random crops; neutral by default.

    Each variation is a pure function of (seed, epoch, sample index), whatever the batch, the rank and the thread.

    Args:
        flip: none, random, or alternating (random in epoch 0, then each image is mirrored every other epoch).
        translate: largest random shift in pixels, each way, with reflected borders, 0 or more.
        cutout: side in pixels of a square, centred anywhere, that is filled with the mean, 0 or more.
        jitter: largest change of brightness (added) and of contrast (a factor), from 0 to below 1 normalised pixel.
        crop: center, or random_resized (image files only): a random part, an area share from scale_min to 1.
        scale_min: smallest share of the area, above 0 and at most 1; 0.08 is usual for ImageNet.

    Saves: epochs to a given accuracy, most where they are many.
    Costs: microseconds a 32x32 image on one CPU core for flip and translate, as much again for cutout.
    Ref: alternating flip: Jordan 2024, arXiv:2404.00498; cutout: DeVries & Taylor 2017, arXiv:1708.04552;
        random_resized: Szegedy et al. 2014, arXiv:1409.4842; jitter of CIFAR images: Hiverge 2025 (cifar10-speedrun).
    """

    flip: Literal["none", "random", "alternating"] = "none"
    translate: Annotated[int, Range(at_least=0)] = 0
    cutout: Annotated[int, Range(at_least=0)] = 0
    jitter: Annotated[float, Range(at_least=0, below=1)] = 0.0
    crop: Literal["center", "random_resized"] = "center"
    scale_min: Annotated[float, Range("a share of the area of the image", above=0, at_most=1)] = 0.25

    def apply(self, job: Job) -> None:
        """Has the job's loader augment. Raises InputError for a loader or images it does not fit."""
        own_loader(job, self)
        job.configure_loader(augment=self)


def own_loader(job: Job, technique: Technique) -> Any:
    """The job's loader. Raises InputError where it is not one of kasoku.data, which the technique needs."""
    loader = job.plain_loader
    if not hasattr(loader, "configure"):
        name = type(technique).__name__
        raise InputError(f"{name}: give the job a kasoku.data.loader(...), this is a {type(loader).__name__}")
    return loader


@dataclass(frozen=True)
class Transform:
    """Turns a batch of uint8 images into what the model takes; pure in (images, sample index, epoch).

    Works on the device of the images and never waits for it.
    """

    augment: Augment
    seed: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    dtype: torch.dtype = torch.float32

    def __call__(self, images_NHWC: torch.Tensor, index_N: torch.Tensor, epoch: int) -> torch.Tensor:
        """x_NCHW, normalised, in channels_last order, from images_NHWC (uint8) with sample indices index_N (int64)."""
        flip_N: torch.Tensor | None = None
        if self.augment.flip == "random":
            flip_N = draws(self.seed, epoch, index_N, _FLIP) < 0.5
        elif self.augment.flip == "alternating":
            flip_N = (draws(self.seed, 0, index_N, _FLIP) < 0.5) ^ (epoch % 2 == 1)
        if self.augment.translate:
            images_NHWC, flip_N = self._moved(images_NHWC, index_N, epoch, flip_N), None
        x_NCHW = normalise(images_NHWC, self.mean, self.std, self.dtype, flip_N=flip_N)
        if self.augment.jitter:
            streams_2 = torch.arange(_BRIGHTNESS, _CONTRAST + 1, device=index_N.device)[:, None]
            change_2N = (2 * draws(self.seed, epoch, index_N, streams_2) - 1) * self.augment.jitter
            brightness_N, contrast_N = change_2N.to(self.dtype)[:, :, None, None, None]
            x_NCHW.add_(brightness_N).mul_(1 + contrast_N)
        if self.augment.cutout:  # a square is filled with 0, the mean; the part of it outside the image is lost
            u_2N = draws(self.seed, epoch, index_N, torch.arange(_CUT_Y, _CUT_X + 1, device=x_NCHW.device)[:, None])
            inside = []
            for u_N, extent in zip(u_2N, x_NCHW.shape[2:], strict=True):
                first_N1 = (whole(u_N, extent) - self.augment.cutout // 2)[:, None]
                away_NE = torch.arange(extent, device=x_NCHW.device) - first_N1
                inside.append((away_NE >= 0) & (away_NE < self.augment.cutout))
            x_NCHW.masked_fill_((inside[0][:, :, None] & inside[1][:, None, :])[:, None], 0)
        return x_NCHW

    def _moved(
        self, images_NHWC: torch.Tensor, index_N: torch.Tensor, epoch: int, flip_N: torch.Tensor | None
    ) -> torch.Tensor:
        """Images mirrored and shifted.

        Note: a shift is a place in memory
        Each row is written out as its reflection at both borders goes on: dcb|abcd|cba|bcd... Any shift of the row,
        mirrored or not, is then W*C consecutive bytes at some offset, and one gather of rows does it all: the vertical
        shift is in the choice of the row.
        """
        count, height, width, channels = images_NHWC.shape
        most, device = self.augment.translate, images_NHWC.device
        mirror_NHWC = images_NHWC.flip(2)  # shares a pixel with the row at either end
        left_NHLC, right_NHLC = mirror_NHWC[:, :, -1 - most : -1], images_NHWC[:, :, 1 : most + 1]
        rows_NHLC = torch.cat((left_NHLC, images_NHWC, mirror_NHWC[:, :, 1:], right_NHLC), 2)
        u_2N = draws(self.seed, epoch, index_N, torch.arange(_SHIFT_Y, _SHIFT_X + 1, device=device)[:, None])
        shift_y_N, x_N = whole(u_2N, 2 * most + 1)
        y_NH = torch.arange(height, device=device) + (shift_y_N - most)[:, None]
        y_NH = (height - 1) - ((height - 1) - y_NH.abs()).abs()  # reflected at both borders
        if flip_N is not None:
            x_N = x_N + flip_N * (width - 1)  # where the mirrored row begins, after the left border
        first_N = torch.arange(count, device=device) * height
        start_NH = ((first_N[:, None] + y_NH) * rows_NHLC.shape[2] + x_N[:, None]) * channels
        row = width * channels
        windows = rows_NHLC.view(-1).as_strided((max(rows_NHLC.numel() - row + 1, 0), row), (1, 1))
        return windows.index_select(0, start_NH.view(-1)).view(images_NHWC.shape)


def normalise(
    images_NHWC: torch.Tensor,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    dtype: torch.dtype = torch.float32,
    *,
    flip_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """x_NCHW = (images / 255 - mean) / std a channel, in channels_last order, from uint8 images_NHWC.

    Images are mirrored left to right where flip_N (bool) says so.
    """
    count, height, width, channels = images_NHWC.shape
    bytes_here = images_NHWC.dtype == torch.uint8 and images_NHWC.device.type == "cpu" and images_NHWC.is_contiguous()
    if native.LIBRARY and bytes_here and dtype.itemsize in (2, 4) and len(mean) == len(std) == channels:
        return native.look_up(images_NHWC, _table(tuple(mean), tuple(std), dtype), flip_N)
    if flip_N is not None:
        images_NHWC = torch.where(flip_N[:, None, None, None], images_NHWC.flip(2), images_NHWC)
    scale_R, shift_R = _row_constants(tuple(mean), tuple(std), width, images_NHWC.device)
    x_PR = images_NHWC.reshape(count * height, width * channels).to(torch.float32).mul_(scale_R).add_(shift_R)
    return x_PR.to(dtype).view(images_NHWC.shape).permute(0, 3, 1, 2)


@functools.lru_cache(maxsize=32)
def _table(mean: tuple[float, ...], std: tuple[float, ...], dtype: torch.dtype) -> torch.Tensor:
    """What each byte becomes in each channel, (C, 256)."""
    scale_C, shift_C = _row_constants(mean, std, 1, torch.device("cpu"))
    value_V = torch.arange(256, dtype=torch.float32, device="cpu")
    return value_V.mul(scale_C[:, None]).add(shift_C[:, None]).to(dtype).contiguous()


@functools.lru_cache(maxsize=32)
def _row_constants(
    mean: tuple[float, ...], std: tuple[float, ...], width: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and shift for a row of pixels: along whole rows the arithmetic runs on contiguous memory.

    Kept, because making a tensor from numbers would have the host wait for the device at each batch.
    """
    with torch.inference_mode(False):
        mean_C, std_C = (torch.tensor(values, dtype=torch.float64, device="cpu") for values in (mean, std))
        scale_C, shift_C = 1 / (255 * std_C), -mean_C / std_C
        return scale_C.repeat(width).float().to(device), shift_C.repeat(width).float().to(device)


def box_draws(seed: int, epoch: int, index_N: torch.Tensor) -> torch.Tensor:
    """The four draws (N, 4) that place the random_resized crop of each sample: area, ratio, y, x."""
    return draws(seed, epoch, index_N, torch.arange(_AREA, _BOX_X + 1)[:, None]).T


def random_box(width: int, height: int, u_4: list[float], scale_min: float) -> tuple[float, float, float, float]:
    """Part of an image: area share uniform in [scale_min, 1], aspect ratio log-uniform in [3/4, 4/3].

    One that sticks out is shrunk, its ratio kept: a draw is never repeated.
    """
    area = (scale_min + (1 - scale_min) * u_4[0]) * width * height
    ratio = math.exp((2 * u_4[1] - 1) * math.log(4 / 3))
    wide, high = math.sqrt(area * ratio), math.sqrt(area / ratio)
    shrink = min(1.0, width / wide, height / high)
    wide, high = min(wide * shrink, width), min(high * shrink, height)
    left, top = u_4[3] * (width - wide), u_4[2] * (height - high)
    return left, top, min(left + wide, width), min(top + high, height)


def centre_box(width: int, height: int, size: tuple[int, int]) -> tuple[float, float, float, float]:
    """The middle of an image, 7/8 of what has the shape of `size` (height, width); all of one that has that size."""
    if (height, width) == size:
        return 0, 0, width, height
    scale = min(width / size[1], height / size[0]) * min(size) / stored_side(min(size))
    wide, high = size[1] * scale, size[0] * scale
    left, top = (width - wide) // 2, (height - high) // 2
    return left, top, min(left + wide, width), min(top + high, height)


def stored_side(size: int) -> int:
    """Shorter side that files are decoded to for crops of size x size: size * 8/7 (256 for 224)."""
    return round(size * 8 / 7)
