"""kasoku's own C code (_jpeg.c, _pixels.c), where it was built: crops of JPEG files, and bytes to normalised numbers.

Note: it is optional. `pip install` needs no compiler: without the library, and for JPEG files that it does not read
(progressive, CMYK, turned by EXIF, damaged), Pillow and torch do the same more slowly.
"""

import ctypes
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kasoku.core.errors import InputError

_MOST = 2**26  # pixels of an image that the C code reads
_POINTER, _INT32, _SIZE = ctypes.c_void_p, ctypes.c_int32, ctypes.c_size_t
_LOCAL = threading.local()  # a decoder and its memory for each thread
Box = tuple[float, float, float, float]  # left, top, right, bottom, in pixels

try:
    LIBRARY: Any = ctypes.CDLL(str(Path(__file__).with_name("_native.so")))  # see setup.py
    LIBRARY.kasoku_jpeg_new.restype, LIBRARY.kasoku_jpeg_new.argtypes = _POINTER, []
    LIBRARY.kasoku_jpeg_free.restype, LIBRARY.kasoku_jpeg_free.argtypes = None, [_POINTER]
    LIBRARY.kasoku_jpeg_open.argtypes = [_POINTER, ctypes.c_char_p, _SIZE, _POINTER, _POINTER]
    LIBRARY.kasoku_jpeg_crop.argtypes = [_POINTER, _POINTER, _INT32, _INT32, _POINTER]
    LIBRARY.kasoku_planes_crop.argtypes = [_POINTER, _POINTER, _INT32, _INT32, _POINTER, _INT32, _INT32, _POINTER]
    LIBRARY.kasoku_jpeg_plain.restype, LIBRARY.kasoku_jpeg_plain.argtypes = None, [ctypes.c_int]
    LIBRARY.kasoku_looked_up.restype = None
    LIBRARY.kasoku_looked_up.argtypes = [_POINTER, _POINTER, *[_SIZE] * 4, _POINTER, ctypes.c_int, _POINTER]
except (OSError, AttributeError):  # not built, or for another machine, or from other sources
    LIBRARY = None


class _Decoder:
    def __init__(self) -> None:
        self.handle = LIBRARY.kasoku_jpeg_new()
        if not self.handle:
            raise MemoryError("no memory for a JPEG decoder")
        self.size = np.zeros(2, np.int32)
        self.box = np.zeros(4, np.float64)
        self.size_at, self.box_at = self.size.ctypes.data, self.box.ctypes.data

    def __del__(self) -> None:
        if getattr(self, "handle", None) and LIBRARY:  # at exit the module's names go first
            LIBRARY.kasoku_jpeg_free(self.handle)


def max_pixels() -> int:
    """The pixels of the largest image that is decoded ($KASOKU_MAX_PIXELS): a small file can unpack to gigabytes."""
    text = os.environ.get("KASOKU_MAX_PIXELS") or str(_MOST)
    if not re.fullmatch("0*[1-9][0-9]{0,17}", text):
        raise InputError(f"KASOKU_MAX_PIXELS={text}: a whole number above 0 is wanted")
    return int(text)


def decoder() -> str:
    """What decodes JPEG files: crops of the one differ from the other's by a level or two."""
    return "kasoku's own" if LIBRARY else "Pillow"


def jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Width and height of a JPEG that `crop_jpeg` reads, as its headers tell; None: a file for `decode`."""
    if not LIBRARY:
        return None
    decoder = _own()
    if LIBRARY.kasoku_jpeg_open(decoder.handle, data, len(data), decoder.size_at, decoder.size_at + 4):
        return None
    columns, rows = decoder.size.tolist()
    return (columns, rows) if columns * rows <= min(_MOST, max_pixels()) else None


def crop_jpeg(data: bytes, box: Callable[[int, int], Box], out_HWC: np.ndarray) -> bool:
    """Writes the part box(width, height) of a JPEG into out_HWC (uint8, RGB, contiguous), resized to its shape.

    Bilinear, antialiased, as Pillow's resize; releases the GIL. False, with out_HWC undefined: a file for `decode`.
    """
    if not out_HWC.flags.c_contiguous or out_HWC.dtype != np.uint8 or (width_height := jpeg_size(data)) is None:
        return False
    decoder = _own()
    decoder.box[:] = box(*width_height)
    height, width, _ = out_HWC.shape
    return not LIBRARY.kasoku_jpeg_crop(decoder.handle, decoder.box_at, width, height, out_HWC.ctypes.data)


def resize_planes(pixels_HWC: np.ndarray, box: Box, out_HWC: np.ndarray) -> bool:
    """As `crop_jpeg`, of pixels in memory as three planes; False, with out_HWC undefined: pixels for `fitted`."""
    rows, columns, channels = pixels_HWC.shape
    planar = pixels_HWC.transpose(2, 0, 1).flags.c_contiguous
    if not LIBRARY or channels != 3 or not planar or not out_HWC.flags.c_contiguous:
        return False
    decoder = _own()
    decoder.box[:] = box
    height, width, _ = out_HWC.shape
    sizes = columns, rows, decoder.box_at, width, height
    return not LIBRARY.kasoku_planes_crop(decoder.handle, pixels_HWC.ctypes.data, *sizes, out_HWC.ctypes.data)


def look_up(images_NHWC: torch.Tensor, table_C256: torch.Tensor, flip_N: torch.Tensor | None) -> torch.Tensor:
    """x_NCHW, in channels_last order: what the table has for each byte; images are mirrored where flip_N says so."""
    x_NHWC = torch.empty(images_NHWC.shape, dtype=table_C256.dtype, device="cpu")
    flips = None if flip_N is None else flip_N.to(torch.bool).contiguous()
    flips_at = None if flips is None else flips.data_ptr()
    where = images_NHWC.data_ptr(), flips_at, *images_NHWC.shape, table_C256.data_ptr(), table_C256.element_size()
    LIBRARY.kasoku_looked_up(*where, x_NHWC.data_ptr())
    return x_NHWC.permute(0, 3, 1, 2)


def _own() -> _Decoder:
    decoder: _Decoder | None = getattr(_LOCAL, "decoder", None)
    if decoder is None:
        decoder = _LOCAL.decoder = _Decoder()
    return decoder
