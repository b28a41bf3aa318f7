"""JPEGs of a batch that the GPU decodes (torchvision's decode_jpeg: nvJPEG), crops and resizes as `crop` does.

Note: files for the CPU. The thread that reads a file looks at its headers. A file that kasoku's own decoder leaves to
Pillow (progressive, CMYK, turned by EXIF, cut off, no JPEG), a very large one, pixels, and a file on which nvJPEG
fails go through `crop` on the CPU.
"""

import functools
import importlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image

from kasoku.core import InputError, Job, Stage, Technique
from kasoku.data.decode import native
from kasoku.data.decode.decode import crop
from kasoku.data.decode.native import Box

_LARGEST = 2**24  # pixels of an image; of a larger one the CPU decodes only what the crop needs
_AT_ONCE = 64, 2**26  # images, and pixels of them all, that are decoded together: they lie in the device's memory


@dataclass(frozen=True)
class Decoding(Technique, stage=Stage.DATA, changes_pixels=True):
    """Decodes the training images on the CPU, or those that nvJPEG takes on the GPU.

    Args:
        by: cpu, or nvjpeg (a CUDA device, and `pip install 'kasoku[nvjpeg]'`).

    Saves: CPU time where it is short: most files are only read there.
    Costs: time and memory of the GPU; nothing decoded is kept; pixels differ by a level or two from the CPU's.
    Ref: nvJPEG, through torchvision.io.decode_jpeg. Not seen on a GPU yet.
    """

    by: Literal["cpu", "nvjpeg"] = "cpu"

    def __post_init__(self) -> None:
        if self.by not in ("cpu", "nvjpeg"):
            raise InputError(f"by={self.by}: cpu or nvjpeg")

    def apply(self, job: Job) -> None:
        """Sets the decoder of the loader. Raises InputError where it decodes no files, or cannot so."""
        loader = job.plain_loader
        if getattr(loader, "skipped", None) is not None:
            check(self.by, loader.device)
            job.configure_loader(decoder=self.by)
        elif self.by != "cpu":
            raise InputError(f"Decoding: {type(loader).__name__} decodes no files; leave the technique out")


def check(decoder: str, device: torch.device) -> None:
    """Raises InputError where a loader on this device cannot have its images decoded so."""
    if decoder == "cpu":
        return
    if decoder != "nvjpeg":
        raise InputError(f"decoder={decoder}: cpu or nvjpeg")
    if device.type != "cuda":
        raise InputError(f"decoder=nvjpeg: only for a loader on a CUDA device, this one is on {device}; set it to cpu")
    if not native.LIBRARY:
        raise InputError("decoder=nvjpeg: needs kasoku's piece of C to tell the files apart: install with a C compiler")
    decoding(device)


@functools.cache
def decoding(device: torch.device) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """Bytes of files -> pixels_CHW (uint8, RGB) of each; a CPU uses libjpeg. Raises InputError where it cannot work."""
    small = io.BytesIO()
    Image.new("RGB", (16, 16)).save(small, "JPEG")
    try:
        library: Any = importlib.import_module("torchvision.io")
        decode = functools.partial(library.decode_jpeg, mode=library.ImageReadMode.RGB, device=device)
        decode([torch.frombuffer(small.getbuffer(), dtype=torch.uint8)])
    except ImportError as error:
        raise InputError('decoder=nvjpeg: needs torchvision: pip install "torchvision>=0.26"') from error
    except (AttributeError, OSError, RuntimeError) as error:  # built for another torch, or without nvJPEG
        why = str(error).partition("\n")[0]
        got = f"this torchvision cannot decode on {device} ({why})"
        raise InputError(f"decoder=nvjpeg: {got}; install the build of it that belongs to your torch") from error
    return decode


@dataclass(frozen=True)
class _File:
    data: torch.Tensor
    pixels: int
    box: Box
    crop: Callable[[np.ndarray], None]  # on the CPU


class Jpegs:
    """The files of a batch for the GPU, by sample index: reader threads `take` them, then all are decoded together."""

    def __init__(self, size: tuple[int, int], device: torch.device) -> None:
        self.size, self.device = size, device  # of a crop: height, width
        self._files: dict[int, _File] = {}
        self._crops: dict[int, torch.Tensor] = {}

    def take(self, index: int, source: bytes | np.ndarray, box: Callable[[int, int], Box], *, name: str = "") -> bool:
        """Whether this image will be decoded with its batch; if not, the caller crops it now."""
        size = native.jpeg_size(source) if isinstance(source, bytes) else None
        if size is None or size[0] * size[1] > _LARGEST:
            return False
        on_cpu = functools.partial(crop, source, box, name=name)
        data = torch.frombuffer(bytearray(source), dtype=torch.uint8)  # a copy: torch wants memory it may write to
        self._files[index] = _File(data, size[0] * size[1], box(*size), on_cpu)
        return True

    def decode(self, index_N: torch.Tensor, images_NHWC: torch.Tensor) -> dict[int, str]:
        """Decodes on the device or, where that fails, on the CPU into images_NHWC; returns the errors by row."""
        bad: dict[int, str] = {}
        row_of = {index: row for row, index in enumerate(index_N.tolist())}
        for index in self._failed(sorted(self._files)):
            try:
                self._files[index].crop(images_NHWC[row_of[index]].numpy())
            except InputError as error:
                bad[row_of[index]] = str(error)
        self._files.clear()
        return bad

    def fill(self, images_NHWC: torch.Tensor, index_N: torch.Tensor) -> None:
        """Writes the decoded crops into their rows of a batch on the device."""
        for row, index in enumerate(index_N.tolist()):
            if index in self._crops:
                images_NHWC[row].copy_(self._crops[index])

    def _failed(self, part: list[int]) -> list[int]:
        """Decodes and crops a part together, or by halves if it is too large or fails; returns the images that failed.

        Note: torchvision decodes on its own stream, into memory that work on this one may still read
        (pytorch/vision#9606), so the host waits before; torchvision waits after, except when it raises.
        """
        files, cuda = [self._files[index] for index in part], self.device.type == "cuda"
        if not files:
            return []
        if len(files) == 1 or (len(files) <= _AT_ONCE[0] and sum(file.pixels for file in files) <= _AT_ONCE[1]):
            if cuda:
                torch.cuda.current_stream(self.device).synchronize()
            try:
                pixels = decoding(self.device)([file.data for file in files])
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:
                if cuda:
                    torch.cuda.synchronize(self.device)
            else:
                self._crops |= zip(part, cropped(pixels, [file.box for file in files], self.size), strict=True)
                return []
        half = len(part) // 2
        return self._failed(part[:half]) + self._failed(part[half:]) if half else part


def cropped(pixels: Sequence[torch.Tensor], boxes: Sequence[Box], size: tuple[int, int]) -> torch.Tensor:
    """crops_NHWC (uint8): the box of each of pixels_CHW (uint8, on one device), resized to (height, width).

    As Pillow's resize with a box (bilinear, antialiased): two products with the weights of its filter.
    """
    crops_NHWC = torch.empty((len(pixels), *size, 3), dtype=torch.uint8, device=pixels[0].device)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # TF32 would round away a fifth of a level
    try:
        with torch.autocast(crops_NHWC.device.type, enabled=False):
            for x_CHW, crop_HWC, (left, top, right, bottom) in zip(pixels, crops_NHWC, boxes, strict=True):
                y, down_OK = _weights(top, bottom, x_CHW.shape[1], size[0], x_CHW.device)
                x, across_OK = _weights(left, right, x_CHW.shape[2], size[1], x_CHW.device)
                crop_CHW = down_OK @ (x_CHW[:, y, x].float() @ across_OK.T)
                crop_HWC.copy_(crop_CHW.add_(0.5).permute(1, 2, 0))  # the copy cuts off: rounded
    finally:
        torch.set_float32_matmul_precision(precision)
    return crops_NHWC


def _weights(start: float, stop: float, size: int, out: int, device: torch.device) -> tuple[slice, torch.Tensor]:
    """The samples within reach of start..stop, and weights_OK of each of them for each of `out` results."""
    scale = (stop - start) / out
    reach = max(scale, 1.0)
    first = max(0, int(start + 0.5 * scale - reach + 0.5))
    end = min(size, int(stop - 0.5 * scale + reach + 0.5))
    centre_O = (torch.arange(out, device=device) + 0.5) * scale + (start - first)
    sample_K = torch.arange(end - first, device=device) + 0.5
    weights_OK = (sample_K - centre_O[:, None]).abs_().div_(-reach).add_(1).clamp_(min=0)
    return slice(first, end), weights_OK.div_(weights_OK.sum(-1, keepdim=True, dtype=torch.float64).float())
