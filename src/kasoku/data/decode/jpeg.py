"""Crops of JPEG files by the house's own piece of C, where it was built: only what a crop needs is decoded.

Note: never the only way. What the C code does not read (progressive, CMYK, turned by EXIF, damaged) and every file
where it was not built goes through `decode`, which needs Pillow alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from kasoku.data.decode import native

_MOST = 2**26  # pixels of an image; whether a larger one is a decompression bomb Pillow says
Box = tuple[float, float, float, float]  # left, top, right, bottom, in pixels


_LIBRARY = native.LIBRARY
_LOCAL = threading.local()  # a decoder and its memory for each thread


class _Decoder:
    def __init__(self) -> None:
        self.handle = _LIBRARY.kasoku_jpeg_new()
        if not self.handle:
            raise MemoryError("no memory for a JPEG decoder")
        self.size = np.zeros(2, np.int32)
        self.box = np.zeros(4, np.float64)
        self.size_at, self.box_at = self.size.ctypes.data, self.box.ctypes.data

    def __del__(self) -> None:
        if getattr(self, "handle", None) and _LIBRARY is not None:  # at exit the module's names go first
            _LIBRARY.kasoku_jpeg_free(self.handle)


def available() -> bool:
    """Whether the piece of C is there."""
    return _LIBRARY is not None


def decoder() -> str:
    """What decodes JPEG files: crops of the one differ from the other's by a level or two."""
    return "kasoku's own" if available() else "Pillow"


def size(data: bytes) -> tuple[int, int] | None:
    """Width and height of a JPEG that `crop` reads, as its headers tell; None: a file for `decode`."""
    if _LIBRARY is None:
        return None
    decoder = _own()
    size_at = decoder.size_at
    if _LIBRARY.kasoku_jpeg_open(decoder.handle, data, len(data), size_at, size_at + 4):
        return None
    columns, rows = decoder.size.tolist()
    return (columns, rows) if columns * rows <= _MOST else None


def crop(data: bytes, box: Callable[[int, int], Box], out_HWC: np.ndarray) -> bool:
    """Writes the part box(width, height) of a JPEG into out_HWC (uint8, RGB, contiguous), resized to its shape.

    Bilinear, antialiased, as Pillow's resize; releases the GIL. False, with out_HWC undefined: a file for `decode`.
    """
    if not out_HWC.flags.c_contiguous or out_HWC.dtype != np.uint8 or (width_height := size(data)) is None:
        return False
    decoder = _own()
    decoder.box[:] = box(*width_height)
    height, width, _ = out_HWC.shape
    return not _LIBRARY.kasoku_jpeg_crop(decoder.handle, decoder.box_at, width, height, out_HWC.ctypes.data)


def resize(pixels_HWC: np.ndarray, box: Box, out_HWC: np.ndarray) -> bool:
    """The same of pixels that lie in memory as three planes; False, with out_HWC undefined: pixels for `fitted`."""
    rows, columns, channels = pixels_HWC.shape
    if (
        _LIBRARY is None
        or channels != 3
        or not out_HWC.flags.c_contiguous
        or not pixels_HWC.transpose(2, 0, 1).flags.c_contiguous
    ):
        return False
    decoder = _own()
    decoder.box[:] = box
    height, width, _ = out_HWC.shape
    return not _LIBRARY.kasoku_planes_crop(
        decoder.handle,
        pixels_HWC.ctypes.data,
        columns,
        rows,
        decoder.box_at,
        width,
        height,
        out_HWC.ctypes.data,
    )


def _own() -> _Decoder:
    decoder: _Decoder | None = getattr(_LOCAL, "decoder", None)
    if decoder is None:
        decoder = _LOCAL.decoder = _Decoder()
    return decoder
