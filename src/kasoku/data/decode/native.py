"""The house's own pieces of C, where they were built: _jpeg.c and _pixels.c.

Note: never the only way. What they do is done without them too, more slowly: `pip install` needs no compiler.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
from pathlib import Path
from typing import Any


def _library() -> Any:
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_native{suffix}")
        if path.exists():
            try:
                return _declared(ctypes.CDLL(str(path)))
            except (OSError, AttributeError):  # built for another machine, or from other sources
                return None
    return None


def _declared(library: Any) -> Any:
    pointer, int32, size = ctypes.c_void_p, ctypes.c_int32, ctypes.c_size_t
    library.kasoku_jpeg_new.restype, library.kasoku_jpeg_new.argtypes = pointer, []
    library.kasoku_jpeg_free.restype, library.kasoku_jpeg_free.argtypes = None, [pointer]
    library.kasoku_jpeg_open.argtypes = [pointer, ctypes.c_char_p, size, pointer, pointer]
    library.kasoku_jpeg_crop.argtypes = [pointer, pointer, int32, int32, pointer]
    library.kasoku_planes_crop.argtypes = [pointer, pointer, int32, int32, pointer, int32, int32, pointer]
    library.kasoku_jpeg_plain.restype, library.kasoku_jpeg_plain.argtypes = None, [ctypes.c_int]
    looked_up = library.kasoku_looked_up
    looked_up.restype, looked_up.argtypes = None, [pointer, pointer, *[size] * 4, pointer, ctypes.c_int, pointer]
    return library


LIBRARY = _library()
