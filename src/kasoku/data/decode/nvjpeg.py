"""JPEGs that the GPU decodes (torchvision's decode_jpeg: nvJPEG); their pixels come back to the CPU, which crops them.

A file that kasoku's own decoder leaves to Pillow (progressive, CMYK, turned by EXIF, cut off, no JPEG), a very large
one, and files that are decoded together with one on which nvJPEG fails are decoded on the CPU.
"""

import importlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import numpy as np
import torch

from kasoku.core import InputError, Job, Stage, Technique, summary
from kasoku.data.decode import native

Source = bytes | np.ndarray  # of an image: a file, or pixels_HWC
_LARGEST = 2**24  # pixels of an image, which lie in the device's memory


@dataclass(frozen=True)
class Decoding(Technique, stage=Stage.DATA, changes_pixels=True):
    """Decodes the training images on the CPU, or those that nvJPEG takes on the GPU.

    Args:
        by: cpu, or nvjpeg (a CUDA device, and `pip install '.[nvjpeg]'`).

    Saves: CPU time where it is short: most files are only read and resized there.
    Costs: time and memory of the GPU, and the bus to it; nothing decoded is kept; pixels differ by a level or two.
    Ref: nvJPEG, through torchvision.io.decode_jpeg. No GPU has run it yet.
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


def reader(read: Callable[[int], Source], images: Sequence[int], device: torch.device) -> Callable[[int], Source]:
    """`read` for these images: reads all now, and has nvJPEG decode its files together, to a view of colour planes.

    Raises an error of `read` when that image is read, or now if the source is gone.

    Note: torchvision decodes on a stream of its own, into memory that work on the current one may still read
    (pytorch/vision#9606), so the host waits before; torchvision waits after, except when it raises.
    """
    sources, files = dict[int, Source](), dict[int, torch.Tensor]()
    for image in images:
        try:
            source = sources[image] = read(image)
        except InputError as error:
            if error.gone:
                raise
            continue
        size = native.jpeg_size(source) if isinstance(source, bytes) else None
        if size and size[0] * size[1] <= _LARGEST:
            files[image] = torch.frombuffer(bytearray(source), dtype=torch.uint8)
    cuda = device.type == "cuda"
    with torch.cuda.stream(torch.cuda.Stream(device)) if cuda else nullcontext():  # type: ignore[no-untyped-call]
        if cuda:
            torch.cuda.current_stream(device).synchronize()
        try:
            pixels = decoding(device)([*files.values()]) if files else []
            sources |= {i: x_CHW.cpu().numpy().transpose(1, 2, 0) for i, x_CHW in zip(files, pixels, strict=True)}
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # of one of the files
            if cuda:
                torch.cuda.synchronize(device)
    return lambda image: sources[image] if image in sources else read(image)
