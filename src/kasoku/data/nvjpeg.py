"""JPEGs of a batch that the GPU decodes (nvJPEG, through torchvision), cropped and resized there as `crop` does.

Note: never the only way. The thread that reads a file looks at its headers. What kasoku's own decoder would leave to
Pillow (progressive, CMYK, turned by EXIF, cut off, no JPEG), pixels, and what nvJPEG fails on goes through `crop` on
the CPU, image by image.
"""

from __future__ import annotations

import functools
import importlib
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from PIL import Image

from kasoku.core.errors import InputError
from kasoku.core.technique import Stage, Technique
from kasoku.data import jpeg
from kasoku.data.decode import crop
from kasoku.data.jpeg import Box

if TYPE_CHECKING:
    from kasoku.core.job import Job

_LARGEST = 2**24  # pixels of an image; of a larger one the CPU decodes only what the crop needs
_AT_ONCE = 64, 2**26  # images, and pixels of them all, that are decoded together: they lie in the device's memory

Decode = Callable[[list[torch.Tensor]], list[torch.Tensor]]  # the bytes of files -> pixels_CHW (uint8, RGB) of each


@dataclass(frozen=True)
class Decoding(Technique):
    """Who decodes the training images: the CPU, or the GPU those that nvJPEG takes.

    Args:
        by: cpu, or nvjpeg (a CUDA device, and `pip install 'kasoku[nvjpeg]'`).

    Saves: the CPU's time where it is short: reading is all that is left to it, for most files.
    Costs: time and memory of the GPU; nothing decoded is kept; pixels differ by a level or two from the CPU's.
    Ref: nvJPEG, through torchvision.io.decode_jpeg. Not seen on a GPU yet.
    """

    stage: ClassVar[Stage] = Stage.DATA

    by: Literal["cpu", "nvjpeg"] = "cpu"

    def __post_init__(self) -> None:
        """Checks the name."""
        if self.by not in ("cpu", "nvjpeg"):
            raise InputError(f"by={self.by}: cpu or nvjpeg")

    def apply(self, job: Job) -> None:
        """Sets the loader's `decoder`. Raises InputError where it decodes no files, or cannot so."""
        loader = job.plain_loader
        if not hasattr(loader, "decoder"):
            if self.by == "cpu":
                return
            raise InputError(f"Decoding: {type(loader).__name__} decodes no files; leave the technique out")
        check(self.by, loader.device)
        job.patch(loader, "decoder", self.by)


def check(decoder: str, device: torch.device) -> None:
    """Raises InputError where a loader on this device cannot have its images decoded so."""
    if decoder == "cpu":
        return
    if decoder != "nvjpeg":
        raise InputError(f"decoder={decoder}: cpu or nvjpeg")
    if device.type != "cuda":
        raise InputError(f"decoder=nvjpeg: only for a loader on a CUDA device, this one is on {device}; set it to cpu")
    if not jpeg.available():
        raise InputError("decoder=nvjpeg: needs kasoku's piece of C to tell the files apart: install with a C compiler")
    decoding(device)


@functools.cache
def decoding(device: torch.device) -> Decode:
    """How files are decoded on a device; a CPU does it too, by libjpeg. Raises InputError where torchvision cannot."""

    def decode(files: list[torch.Tensor]) -> list[torch.Tensor]:
        found: list[torch.Tensor] = library.decode_jpeg(files, mode=library.ImageReadMode.RGB, device=device)
        return found

    small = io.BytesIO()
    Image.new("RGB", (16, 16)).save(small, "JPEG")
    try:
        library: Any = importlib.import_module("torchvision.io")
        decode([_tensor(small.getvalue())])
    except ImportError as error:
        raise InputError('decoder=nvjpeg: needs torchvision: pip install "torchvision>=0.26"') from error
    except (AttributeError, OSError, RuntimeError) as error:  # built for another torch, or without nvJPEG
        raise InputError(
            f"decoder=nvjpeg: this torchvision cannot decode on {device} ({str(error).partition(chr(10))[0]}); "
            "install the build of it that belongs to your torch"
        ) from error
    return decode


@dataclass(frozen=True)
class _File:
    data: bytes
    size: tuple[int, int]  # width, height
    box: Box
    again: Callable[[np.ndarray], None]  # crops it on the CPU


class Jpegs:
    """The files of a batch that the GPU decodes, all at once when threads have offered what they read.

    By sample index, which a batch has once. `size` is that of a crop: height, width.
    """

    def __init__(self, size: tuple[int, int], device: torch.device) -> None:
        self.size, self.device = size, device
        self._files: dict[int, _File] = {}
        self._crops: list[tuple[list[int], torch.Tensor]] = []  # sample indices, crops_NHWC

    def take(self, index: int, source: bytes | np.ndarray, box: Callable[[int, int], Box], *, name: str = "") -> bool:
        """Whether this image will be decoded with its batch; else it is for `crop`, now."""
        if not isinstance(source, bytes):
            return False
        size = jpeg.size(source)
        if size is None or size[0] * size[1] > _LARGEST:
            return False
        self._files[index] = _File(source, size, box(*size), functools.partial(crop, source, box, name=name))
        return True

    def decode(self, index_N: torch.Tensor, images_NHWC: torch.Tensor) -> dict[int, str]:
        """Decodes and crops them on the device, on the current stream.

        What nvJPEG fails on is cropped on the CPU, into its row of images_NHWC. Returns what is wrong with which row.
        """
        bad: dict[int, str] = {}
        row_of = {index: row for row, index in enumerate(index_N.tolist())}
        for part in _parts(self._files):
            good: list[int] = []
            pixels: list[torch.Tensor] = []
            for index, x_CHW in zip(part, _decoded([self._files[i].data for i in part], self.device), strict=True):
                if x_CHW is not None:
                    good.append(index)
                    pixels.append(x_CHW)
                    continue
                try:
                    self._files[index].again(images_NHWC[row_of[index]].numpy())
                except InputError as error:
                    bad[row_of[index]] = str(error)
            if good:
                self._crops.append((good, cropped(pixels, [self._files[i].box for i in good], self.size)))
        self._files.clear()
        return bad

    def fill(self, images_NHWC: torch.Tensor, index_N: torch.Tensor) -> None:
        """Writes what was decoded into its rows of a batch on the device."""
        row_of = {index: row for row, index in enumerate(index_N.tolist())}
        for part, crops_NHWC in self._crops:
            rows = torch.tensor([row_of[index] for index in part])
            images_NHWC.index_copy_(0, _moved(rows, self.device), crops_NHWC)


def _parts(files: dict[int, _File]) -> list[list[int]]:
    """Sample indices, in order, of what is decoded together."""
    parts: list[list[int]] = []
    most, limit = _AT_ONCE
    pixels = 0
    for index, file in sorted(files.items()):
        pixels += file.size[0] * file.size[1]
        if not parts or len(parts[-1]) == most or pixels > limit:
            parts.append([])
            pixels = file.size[0] * file.size[1]
        parts[-1].append(index)
    return parts


def _decoded(files: list[bytes], device: torch.device) -> list[torch.Tensor | None]:
    """Pixels_CHW of each file; None for one that cannot be decoded, which fails those that are decoded with it.

    Note: torchvision decodes on a stream of its own, and does not wait for this one before it writes. What it writes
    to may be memory that work still waiting here reads (pytorch/vision, pull request 9606), so the host waits first.
    It also waits for what it decodes; only after an error does it not.
    """
    decode = decoding(device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    try:
        return list(decode([_tensor(data) for data in files]))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    if len(files) == 1:
        return [None]
    half = len(files) // 2
    return _decoded(files[:half], device) + _decoded(files[half:], device)


def cropped(pixels: Sequence[torch.Tensor], boxes: Sequence[Box], size: tuple[int, int]) -> torch.Tensor:
    """crops_NHWC (uint8): a part of each of pixels_CHW (uint8, on one device), resized to (height, width).

    Bilinear, antialiased, as Pillow's resize with a box: two products with the weights of its filter an image.
    """
    height, width = size
    device = pixels[0].device
    crops_NHWC = torch.empty((len(pixels), height, width, 3), dtype=torch.uint8, device=device)
    spans = [
        (_span(left, right, x_CHW.shape[2], width), _span(top, bottom, x_CHW.shape[1], height))
        for x_CHW, (left, top, right, bottom) in zip(pixels, boxes, strict=True)
    ]
    with torch.autocast(device.type, enabled=False), _exact():
        weights_N2OK = _weights(spans, max(size), device)
        for row, (x_CHW, (across, down)) in enumerate(zip(pixels, spans, strict=True)):
            part_CHW = x_CHW[
                :, down.first : down.first + down.count, across.first : across.first + across.count
            ].float()
            wide_KO = weights_N2OK[row, 0, :width, : across.count].T
            high_OK = weights_N2OK[row, 1, :height, : down.count]
            x_CHW = (high_OK @ (part_CHW @ wide_KO)).add_(0.5)  # cut off when written: rounded
            crops_NHWC[row].copy_(x_CHW.permute(1, 2, 0))
    return crops_NHWC


@contextmanager
def _exact() -> Iterator[None]:
    """Products of float32 as they are: TF32 would round away a fifth of a level."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@dataclass(frozen=True)
class _Span:
    """One side of a crop: the samples that its filter reaches, and where, counted from the first of them, it begins."""

    first: int
    count: int
    start: float
    scale: float


def _span(start: float, stop: float, size: int, out: int) -> _Span:
    """Of the stretch start..stop of `size` samples, resized to `out`."""
    scale = (stop - start) / out
    reach = max(scale, 1.0)
    first = max(0, int(start + 0.5 * scale - reach + 0.5))
    end = min(size, int(stop - 0.5 * scale + reach + 0.5))
    return _Span(first, end - first, start - first, scale)


def _weights(spans: Sequence[tuple[_Span, _Span]], out: int, device: torch.device) -> torch.Tensor:
    """weights_N2OK: of each image, across and down, of each of `out` results (O) on each sample within reach (K)."""
    numbers = torch.tensor([[(side.start, side.scale, side.count) for side in both] for both in spans])
    start_N2, scale_N2, count_N2 = _moved(numbers, device).unbind(-1)
    most = max(side.count for both in spans for side in both)
    result_O = torch.arange(out, device=device) + 0.5
    sample_K = torch.arange(most, device=device) + 0.5
    centre_N2O = start_N2[..., None] + result_O * scale_N2[..., None]
    away_N2OK = (sample_K - centre_N2O[..., None]).abs_()
    weights_N2OK = away_N2OK.div_(-scale_N2.clamp(min=1)[..., None, None]).add_(1).clamp_(min=0)
    weights_N2OK.mul_((sample_K < count_N2[..., None])[:, :, None])
    # summed so finely that an image's weights do not depend on how many samples others reach
    return weights_N2OK.div_(weights_N2OK.sum(-1, keepdim=True, dtype=torch.float64).float())


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)  # a copy: torch wants memory it may write to


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On the device; the host does not wait."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
