"""JPEGs of a batch that the GPU decodes (torchvision's decode_jpeg: nvJPEG), crops and resizes as `crop` does.

A file that kasoku's own decoder leaves to Pillow (progressive, CMYK, turned by EXIF, cut off, no JPEG), a very large
one, pixels, and files that are decoded together with one on which nvJPEG fails go through `crop` on the CPU.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import numpy as np
import torch

from kasoku.core import InputError, Job, Stage, Technique, summary
from kasoku.data.decode import native
from kasoku.data.decode.native import Box

_LARGEST, _TOGETHER = 2**24, 16  # pixels of an image, and images decoded together: they lie in the device's memory


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
        raise InputError(f"decoder=nvjpeg: only for a loader on a CUDA device, not on {device}; set it to cpu")
    if not native.LIBRARY:
        raise InputError("decoder=nvjpeg: needs kasoku's piece of C to read headers; install with a C compiler")
    decoding(device)


@cache
def decoding(device: torch.device) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """Bytes of files -> pixels_CHW (uint8, RGB) of each; a CPU uses libjpeg. Raises InputError where it cannot work."""
    try:
        library: Any = importlib.import_module("torchvision.io")
        decode = partial(library.decode_jpeg, mode=library.ImageReadMode.RGB, device=device)
        decode([library.encode_jpeg(torch.zeros(3, 16, 16, dtype=torch.uint8))])
    except (ImportError, AttributeError, OSError, RuntimeError) as error:  # AttributeError: built for another torch
        got = f"torchvision cannot decode on {device} ({summary(error)})"
        raise InputError(f'decoder=nvjpeg: {got}; pip install "torchvision>=0.26", the build for your torch') from error
    return decode


class Jpegs:
    """The files of a batch for the GPU, by sample index: reader threads `take` them, then all are decoded."""

    def __init__(self, size: tuple[int, int], device: torch.device) -> None:
        self.size, self.device = size, device  # of a crop: height, width
        self._files: dict[int, tuple[bytes, Callable[[int, int], Box]]] = {}
        self._crops: dict[int, torch.Tensor] = {}

    def take(self, index: int, source: bytes | np.ndarray, box: Callable[[int, int], Box]) -> bool:
        """Whether this image will be decoded with its batch; if not, the caller crops it now."""
        if isinstance(source, bytes) and (size := native.jpeg_size(source)) and size[0] * size[1] <= _LARGEST:
            self._files[index] = source, box
            return True
        return False

    def decode(self) -> list[int]:
        """Decodes and crops on the device; returns the images that the caller crops, since nvJPEG failed on some.

        Note: torchvision decodes on its own stream, into memory that work on this one may still read
        (pytorch/vision#9606), so the host waits before; torchvision waits after, except when it raises.
        """
        failed: list[int] = []
        order, cuda = sorted(self._files), self.device.type == "cuda"
        for part in (order[at : at + _TOGETHER] for at in range(0, len(order), _TOGETHER)):
            sources, boxes = zip(*(self._files[index] for index in part), strict=True)
            files = [torch.frombuffer(bytearray(source), dtype=torch.uint8) for source in sources]
            if cuda:
                torch.cuda.current_stream(self.device).synchronize()
            try:
                pixels = decoding(self.device)(files)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:
                if cuda:
                    torch.cuda.synchronize(self.device)
                failed += part
            else:
                self._crops |= zip(part, map(partial(cropped, size=self.size), pixels, boxes), strict=True)
        return failed

    def fill(self, images_NHWC: torch.Tensor, index_N: torch.Tensor) -> None:
        """Writes the crops into their rows of a batch on the device."""
        for row, index in enumerate(index_N.tolist()):
            if index in self._crops:
                images_NHWC[row].copy_(self._crops[index])


def cropped(pixels_CHW: torch.Tensor, box: Callable[[int, int], Box], size: tuple[int, int]) -> torch.Tensor:
    """crop_HWC (uint8) of pixels_CHW (uint8), on its device: as Pillow's resize with a box (bilinear, antialiased)."""
    _, rows, columns = pixels_CHW.shape
    left, top, right, bottom = box(columns, rows)
    across_OK = _weights(left, right, columns, size[1], pixels_CHW.device)
    down_OK = _weights(top, bottom, rows, size[0], pixels_CHW.device)
    with torch.autocast("cuda", enabled=False):
        crop_CHW = down_OK @ (pixels_CHW.float() @ across_OK.T)
    return (crop_CHW + 0.5).to(torch.uint8).permute(1, 2, 0)  # cut off: rounded


def _weights(start: float, stop: float, size: int, out: int, device: torch.device) -> torch.Tensor:
    """weights_OK of each of `size` samples for each of `out` results from start to stop, of Pillow's filter."""
    scale = (stop - start) / out
    centre_O, sample_K = (torch.arange(n, device=device).double() + 0.5 for n in (out, size))
    away_OK = (sample_K - start - scale * centre_O[:, None]).abs()
    weights_OK = (1 - away_OK / max(scale, 1.0)).clamp(min=0)
    return (weights_OK / weights_OK.sum(1, keepdim=True)).float()
