"""RandAugment in batches on the device: a few of 14 changes for each image, one after the other.

Note: four kinds of change. Five of the 14 move pixels: one gather, a matrix an image. Six give each value another one,
whatever its neighbours: a table of 256 values an image and channel, from its histogram where that is needed, and one
look-up. Colour and sharpness are blends of their own, identity is none.

Note: who waits. On a CPU each kind runs on its own images alone. Another device would have to say how many those are
and the host to wait for it, so there each kind runs on all images and those of another kind are left as they were.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from kasoku.core import InputError, Job, Range, Stage, Technique
from kasoku.data.augment.basic import own_loader
from kasoku.data.loading.shuffle import draws, whole

_KINDS = (
    ("identity",),
    ("rotate", "shear_x", "shear_y", "translate_x", "translate_y"),
    ("autocontrast", "equalize", "solarize", "posterize", "contrast", "brightness"),
    ("color",),
    ("sharpness",),
)
OPS = tuple(op for ops in _KINDS for op in ops)
_AUTOCONTRAST, _EQUALIZE, _CONTRAST = (OPS.index(op) for op in ("autocontrast", "equalize", "contrast"))
_TOP = 30  # magnitude
_STREAM = 64  # of the draws for the first change; Augment's lie below
_VALUES, _VALUES_CPU = 2**24, 2**20  # worked on at once; intermediate results take up to 8 bytes for each
_BIT = 16  # fractional bits of a place in an image


@dataclass(frozen=True)
class RandAugment(Technique, stage=Stage.DATA, changes_pixels=True, in_sandbox=False):
    """Changes each training image `count` times, each time by one of 14 changes, all of one strength.

    The paper's changes, each as likely: identity, autocontrast, equalize, rotate, solarize, color, posterize, contrast,
    brightness, sharpness, shear_x, shear_y, translate_x, translate_y. They act on pixels of 0 to 255, before Augment,
    and compute what Pillow does; moved images take the nearest pixel, and the mean where there is none. What an image
    gets is a pure function of (seed, epoch, sample index), whatever the batch, the rank and the thread.

    Args:
        count: changes an image, one after the other, 0 or more.
        magnitude: strength, from 0 to 30. At 30: 30 degrees, a shear of 0.3, a shift by 0.45 of the side, colour,
            contrast, brightness and sharpness changed by 0.9 (each of these either way), 4 bits left, all values
            solarized.

    Saves: epochs to an accuracy that the network without it only reaches with more images.
    Costs: tens of microseconds a 32x32 image and milliseconds a 224x224 one on one CPU core, in the thread that trains;
        accuracy where epochs are few.
    Ref: Cubuk et al. 2019 (arXiv 1909.13719); strengths: Cubuk et al. 2018 (arXiv 1805.09501), as torchvision has them.
    """

    count: Annotated[int, Range(at_least=0)] = 2
    magnitude: Annotated[float, Range(at_least=0, at_most=_TOP)] = 9.0

    def apply(self, job: Job) -> None:
        """Has the job's loader vary images. Raises InputError for a loader or images it does not fit."""
        loader = own_loader(job, self)
        channels = loader.dataset.channels
        if channels not in (1, 3):
            raise InputError(f"RandAugment: images of {channels} channels; grey (1) or RGB (3) are wanted")
        if self.count:
            job.configure_loader(vary=Vary(self, loader.seed, loader.dataset.mean))


@dataclass(frozen=True)
class Vary:
    """Changes a batch of uint8 images; pure in (images, sample index, epoch). Never waits for the device."""

    settings: RandAugment
    seed: int
    mean: tuple[float, ...]

    def __call__(self, images_NHWC: Tensor, index_N: Tensor, epoch: int) -> Tensor:
        """images_NHWC (uint8) changed, as new memory, from images with sample indices index_N (int64)."""
        size = (images_NHWC.shape[1], images_NHWC.shape[2])
        changes = _changes(self.settings.magnitude, size, self.mean, images_NHWC.device)
        at_once = max(1, (_VALUES_CPU if changes.alone else _VALUES) // math.prod(images_NHWC.shape[1:]))
        parts = []
        for part_NHWC, part_N in zip(*(torch.split(x, at_once) for x in (images_NHWC, index_N)), strict=True):
            planes_NCHW = part_NHWC.permute(0, 3, 1, 2).contiguous()  # three channels side by side are short loops
            for i in range(self.settings.count):
                change_N = whole(draws(self.seed, epoch, part_N, _STREAM + i), 2 * len(OPS))
                planes_NCHW = changes.apply(planes_NCHW, change_N)
            parts.append(planes_NCHW.permute(0, 2, 3, 1))
        return torch.cat(parts).contiguous()


class Changes:
    """K = 28 changes of images of `size` (height, width), all of one strength: 2 i is OPS[i], 2 i + 1 its opposite.

    They fill with `mean` what an image moved away from.
    """

    def __init__(self, magnitude: float, size: tuple[int, int], mean: tuple[float, ...], device: torch.device) -> None:
        signed = [(op, sign * magnitude / _TOP) for op in OPS for sign in (1, -1)]
        self.alone = device.type == "cpu"  # each kind runs on its own images alone, which are counted for it
        with torch.inference_mode(False):
            self.kind_K = torch.tensor([kind for kind, ops in enumerate(_KINDS) for _ in 2 * ops]).to(device)
            self.affine_K6 = torch.tensor([_affine(op, s, size) for op, s in signed], dtype=torch.int32).to(device)
            self.table_KV = torch.tensor([_table(op, s) for op, s in signed], dtype=torch.uint8).to(device)
            self.factor_K = torch.tensor([1 + 0.9 * s for _, s in signed]).to(device)  # of blends
            self.fill_C = torch.tensor([round(255 * m) for m in mean]).clamp(0, 255).to(torch.uint8).to(device)

    def apply(self, images_NCHW: Tensor, change_N: Tensor) -> Tensor:
        """images_NCHW (uint8), each changed by its own of change_N."""
        kind_N = self.kind_K.index_select(0, change_N)
        for kind, f in enumerate((self._moved, self._looked_up, self._coloured, self._sharpened), start=1):
            images_NCHW = self._where(kind_N == kind, f, images_NCHW, images_NCHW, change_N)
        return images_NCHW

    def _where(self, chosen_N: Tensor, f: Callable[..., Tensor], otherwise_N: Tensor, *inputs: Tensor) -> Tensor:
        """f(*inputs) in the rows chosen."""
        if not self.alone:
            return torch.where(chosen_N.view(-1, *[1] * (otherwise_N.ndim - 1)), f(*inputs), otherwise_N)
        row_M = chosen_N.nonzero()[:, 0]
        if not len(row_M):
            return otherwise_N
        return otherwise_N.index_copy(0, row_M, f(*(x_N.index_select(0, row_M) for x_N in inputs)))

    def _moved(self, images_NCHW: Tensor, change_N: Tensor) -> Tensor:
        """Rotated, sheared, translated: the nearest pixel. Places are integers, alike on every device."""
        height, width = images_NCHW.shape[2:]
        y_H1 = torch.arange(height, dtype=torch.int32, device=images_NCHW.device)[:, None]
        x_W = torch.arange(width, dtype=torch.int32, device=images_NCHW.device)
        a, b, c, d, e, f = self.affine_K6.index_select(0, change_N).T[:, :, None, None]
        from_x_NHW, from_y_NHW = (a * x_W + b * y_H1 + c) >> _BIT, (d * x_W + e * y_H1 + f) >> _BIT
        inside_NHW = (from_x_NHW >= 0) & (from_x_NHW < width) & (from_y_NHW >= 0) & (from_y_NHW < height)
        place_NHW = torch.where(inside_NHW, from_y_NHW * width + from_x_NHW, 0).long()
        pixels_NCP = images_NCHW.flatten(2)
        pixels_NCP = pixels_NCP.gather(2, place_NHW.flatten(1)[:, None].expand(pixels_NCP.shape))
        return torch.where(inside_NHW[:, None], pixels_NCP.view(images_NCHW.shape), self.fill_C[:, None, None])

    def _looked_up(self, images_NCHW: Tensor, change_N: Tensor) -> Tensor:
        value_NCP = images_NCHW.flatten(2).long()
        table_NV, op_N = self.table_KV.index_select(0, change_N), change_N // 2
        factor_N = self.factor_K.index_select(0, change_N)
        table_NV = self._where(op_N == _CONTRAST, _contrasted, table_NV, images_NCHW, factor_N)
        table_NCV = table_NV[:, None].expand(-1, value_NCP.shape[1], -1)
        counted_N = (op_N == _AUTOCONTRAST) | (op_N == _EQUALIZE)
        table_NCV = self._where(counted_N, _counted, table_NCV, value_NCP, op_N)
        return table_NCV.gather(2, value_NCP).view(images_NCHW.shape)

    def _coloured(self, images_NCHW: Tensor, change_N: Tensor) -> Tensor:
        """Nearer to grey, or further away."""
        factor_N = self.factor_K.index_select(0, change_N)
        return _blended(grey(images_NCHW)[:, None], images_NCHW, factor_N[:, None, None, None])

    def _sharpened(self, images_NCHW: Tensor, change_N: Tensor) -> Tensor:
        """Nearer to the smoothed image (3x3, the middle weighs 5 of 13), or further away; pixels at the border stay."""
        value_NCHW = images_NCHW.to(torch.int16)
        rows_NCHW = value_NCHW[:, :, :-2] + value_NCHW[:, :, 1:-1] + value_NCHW[:, :, 2:]
        inner_NCHW = value_NCHW[:, :, 1:-1, 1:-1]
        sum_NCHW = rows_NCHW[..., :-2] + rows_NCHW[..., 1:-1] + rows_NCHW[..., 2:] + 4 * inner_NCHW
        factor_N = self.factor_K.index_select(0, change_N)
        out_NCHW = images_NCHW.clone()
        out_NCHW[:, :, 1:-1, 1:-1] = _blended((sum_NCHW + 6) // 13, inner_NCHW, factor_N[:, None, None, None])
        return out_NCHW


# Kept, because making a tensor from numbers would have the host wait for the device at each batch.
_changes = functools.lru_cache(maxsize=32)(Changes)


def _affine(op: str, share: float, size: tuple[int, int]) -> list[int]:
    """Where a pixel comes from, centre to centre: x = a x + b y + c, y = d x + e y + f; all six times 2**16."""
    height, width = size
    angle = math.radians(30 * share)  # counter-clockwise, about the middle
    cos, sin = math.cos(angle), math.sin(angle)
    x, y = (width - cos * width + sin * height) / 2, (height - sin * width - cos * height) / 2
    a, b, c, d, e, f = {
        "rotate": (cos, -sin, x, sin, cos, y),
        "shear_x": (1.0, 0.3 * share, 0.0, 0.0, 1.0, 0.0),
        "shear_y": (1.0, 0.0, 0.0, 0.3 * share, 1.0, 0.0),
        "translate_x": (1.0, 0.0, 150 / 331 * width * share, 0.0, 1.0, 0.0),
        "translate_y": (1.0, 0.0, 0.0, 0.0, 1.0, 150 / 331 * height * share),
    }.get(op, (1.0, 0.0, 0.0, 0.0, 1.0, 0.0))
    at_centres = (a, b, c + (a + b) / 2, d, e, f + (d + e) / 2)
    return [math.floor(number * 2**_BIT + 0.5) for number in at_centres]


def _table(op: str, share: float) -> list[int]:
    """The new value of each of V = 256 values, where it is the same for all images."""
    if op == "solarize":
        return [v if v < 256 * (1 - abs(share)) else 255 - v for v in range(256)]
    if op == "posterize":
        return [v & (256 - 2 ** round(4 * abs(share))) for v in range(256)]
    if op == "brightness":
        return [min(255, int(v * (1 + 0.9 * share))) for v in range(256)]
    return list(range(256))


def _counted(value_NCP: Tensor, op_N: Tensor) -> Tensor:
    """Tables of autocontrast (least and greatest value become 0 and 255) and equalize (each value equally frequent)."""
    count_NCV = torch.zeros(*value_NCP.shape[:2], 256, dtype=torch.int32, device=value_NCP.device)
    count_NCV.scatter_add_(2, value_NCP, torch.ones_like(count_NCV[:, :, :1]).expand(value_NCP.shape))
    value_V = torch.arange(256, device=value_NCP.device)
    there_NCV = (count_NCV > 0).int()
    least_NC1 = there_NCV.argmax(2, keepdim=True)
    greatest_NC1 = 255 - there_NCV.flip(2).argmax(2, keepdim=True)
    range_NC1 = greatest_NC1 - least_NC1
    stretched_NCV = ((value_V - least_NC1) * 255 // range_NC1.clamp(min=1)).clamp(0, 255)
    stretched_NCV = torch.where(range_NC1 > 0, stretched_NCV, value_V)
    below_NCV = count_NCV.cumsum(2) - count_NCV
    step_NC1 = below_NCV.gather(2, greatest_NC1) // 255
    equalised_NCV = ((below_NCV + step_NC1 // 2) // step_NC1.clamp(min=1)).clamp(max=255)
    equalised_NCV = torch.where(step_NC1 > 0, equalised_NCV, value_V)
    return torch.where((op_N == _EQUALIZE)[:, None, None], equalised_NCV, stretched_NCV).to(torch.uint8)


def _contrasted(images_NCHW: Tensor, factor_N: Tensor) -> Tensor:
    """Tables of contrast, one for all channels: away from the mean grey, or towards it."""
    pixels = images_NCHW.shape[2] * images_NCHW.shape[3]
    mean_N = (2 * grey(images_NCHW).sum((1, 2)) + pixels) // (2 * pixels)
    value_V = torch.arange(256, device=images_NCHW.device)
    return _blended(mean_N[:, None], value_V, factor_N[:, None])


def grey(images_NCHW: Tensor) -> Tensor:
    """Luma (ITU-R 601-2) of RGB, rounded as Pillow rounds it: (N, H, W), int32."""
    if images_NCHW.shape[1] == 1:
        return images_NCHW[:, 0].int()
    red_NHW, green_NHW, blue_NHW = images_NCHW.int().unbind(1)
    return (19595 * red_NHW + 38470 * green_NHW + 7471 * blue_NHW + 2**15) >> 16


def _blended(base: Tensor, value: Tensor, factor: Tensor) -> Tensor:
    """Base + factor * (value - base), cut off to 0 to 255, fractions cut off as well (uint8)."""
    base = base.float()
    return (value.float() - base).mul_(factor).add_(base).clamp_(0, 255).to(torch.uint8)
