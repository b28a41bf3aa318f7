"""Encodes images for packs, as JPEG files or as raw pixels, and reads raw pixels."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass

import numpy as np
from PIL import Image

from kasoku.core.errors import InputError
from kasoku.data.decode.decode import decode, fitted

_PLANES = re.compile(
    rb"\x93NUMPY\x01\0(..)\{'descr': '\|u1', 'fortran_order': False, 'shape': \(3, (\d{1,6}), (\d{1,6})\), \} *\n", re.S
)


@dataclass(frozen=True)
class Form:
    """The format of packed images.

    Attributes:
        side: pixels of the shorter side to which larger images are reduced; 0: no change.
        format: jpeg or raw.
        quality: of JPEG files, 1 to 100.
    """

    side: int
    format: str
    quality: int

    def __post_init__(self) -> None:
        if self.side < 0:
            raise InputError(f"side={self.side}: 0 (as they are) or more pixels")
        if self.format not in ("jpeg", "raw"):
            raise InputError(f"format={self.format}: jpeg or raw")
        if not 1 <= self.quality <= 100:
            raise InputError(f"quality={self.quality}: 1 to 100")

    def encoded(self, source: bytes | np.ndarray, name: str) -> bytes:
        """Encodes an image file's bytes, or pixels_HWC (uint8). Raises InputError for a damaged image."""
        if isinstance(source, bytes):
            if self.side == 0 and self.format == "jpeg" and _baseline(source):
                decode(source, 1, name=name)  # checks that it is whole; an eighth of its size is enough
                return source
            pixels_HWC = decode(source, self.side, name=name)
        else:
            height, width = source.shape[:2]
            scale = self.side / min(height, width) if 0 < self.side < min(height, width) else 1.0
            pixels_HWC = fitted(source, (0, 0, width, height), (round(height * scale), round(width * scale)))
        out = io.BytesIO()
        if self.format == "raw":  # colour planes, so that a resize reads whole rows of one colour
            planes_CHW = np.ascontiguousarray(pixels_HWC.transpose(2, 0, 1))
            np.lib.format.write_array(out, planes_CHW, version=(1, 0), allow_pickle=False)
            return out.getvalue()
        # A restart marker every 64 pixels, so that a crop needs no decoding of earlier blocks. Standard Huffman tables
        # instead of optimised ones: a few bytes more, but decoders have the tables ready.
        image = Image.fromarray(np.ascontiguousarray(pixels_HWC))
        try:
            image.save(out, "JPEG", quality=self.quality, subsampling="4:2:0", restart_marker_blocks=4)
        except OSError as error:
            raise InputError(f"{name}: cannot be written as JPEG ({error}); remove the image") from error
        return out.getvalue()


def planes(data_B: np.ndarray, name: str) -> np.ndarray:
    """pixels_HWC (uint8) of raw pixels, a view of the planes in the bytes of an .npy file.

    Errors: InputError, which names `name`, for other bytes.
    """
    head = _PLANES.match(data_B[:256].tobytes())
    if head is not None and head.end() == 10 + int.from_bytes(head[1], "little"):
        height, width = int(head[2]), int(head[3])
        if height * width > 0 and len(data_B) == head.end() + 3 * height * width:
            return data_B[head.end() :].reshape(3, height, width).transpose(1, 2, 0)
    raise InputError(f"{name}: not an .npy file of uint8 pixels, 3 x height x width; mend or remove the image")


def _baseline(data: bytes) -> bool:
    """Whether these bytes are a baseline JPEG file, by the frame header before the first scan."""
    at = 2
    while data[:2] == b"\xff\xd8" and at + 4 <= len(data) and data[at] == 0xFF:
        kind = data[at + 1]
        if 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):  # DHT, JPG and DAC are no frame headers
            return kind == 0xC0
        at += 1 if kind == 0xFF else 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return False
