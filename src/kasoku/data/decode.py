"""From an image file to RGB pixels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import BmpImagePlugin, ExifTags, Image, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

from kasoku.core.errors import InputError
from kasoku.data.augment import centre_box, stored_side

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
_READERS = (JpegImagePlugin, PngImagePlugin, WebPImagePlugin, BmpImagePlugin)  # imported before threads need them
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP")  # told by content, not by name; keeps Pillow's exotic readers out
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode(path: str, shorter: int = 0) -> np.ndarray:
    """RGB pixels_HWC (uint8) of one image file, upright as its EXIF orientation says.

    A larger image is shrunk until its shorter side is `shorter` (0: never). Grey, CMYK, palette and 16-bit images
    become 8-bit RGB; where a pixel is transparent, white shows.
    Errors: InputError naming the file when it is missing, damaged, or no image.
    """
    try:
        with Image.open(path, formats=_FORMATS) as opened:
            if shorter:
                scale = shorter / min(opened.size)
                least = (int(opened.width * scale) + 1, int(opened.height * scale) + 1)
                opened.draft(None, least)  # a JPEG is decoded at 1/2, 1/4 or 1/8 where that is enough
            opened.load()
            turn = _TURNS.get(_orientation(opened))
            image = _rgb(opened)
        if shorter and min(image.size) > shorter:
            scale = shorter / min(image.size)
            size = (max(shorter, round(image.width * scale)), max(shorter, round(image.height * scale)))
            image = image.resize(size, Image.Resampling.BILINEAR)
        if turn is not None:
            image = image.transpose(turn)
        return np.asarray(image)
    except Exception as error:  # damaged bytes make the decoders raise nearly anything
        reason = "no such file" if isinstance(error, FileNotFoundError) else str(error) or type(error).__name__
        raise InputError(f"{path}: cannot be decoded as an image ({reason}); mend or remove the file") from error


def fitted(pixels_HWC: np.ndarray, box: tuple[float, float, float, float], size: tuple[int, int]) -> np.ndarray:
    """The part (left, top, right, bottom) of an image, resized to (height, width): bilinear, antialiased."""
    height, width = pixels_HWC.shape[:2]
    if (height, width) == size and box == (0, 0, width, height):
        return pixels_HWC
    return np.asarray(Image.fromarray(pixels_HWC).resize(size[::-1], Image.Resampling.BILINEAR, box=box))


def read_image(path: str | Path, image_size: tuple[int, int], channels: int = 3) -> torch.Tensor:
    """One image file as a test image: pixels_HWC (uint8), the middle of it at image_size (height, width).

    Errors: InputError naming the file when it is missing, damaged, or no image.
    """
    pixels_HWC = decode(str(path), stored_side(min(image_size)) if image_size[0] == image_size[1] else 0)
    pixels_HWC = fitted(pixels_HWC, centre_box(pixels_HWC.shape[1], pixels_HWC.shape[0], image_size), image_size)
    if channels == 1:
        pixels_HWC = np.asarray(Image.fromarray(pixels_HWC).convert("L"))[..., None]
    return torch.from_numpy(pixels_HWC.copy())


def _orientation(image: Any) -> int:
    try:
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # a damaged EXIF block does not spoil the pixels
        return 1


def _rgb(image: Any) -> Any:
    if image.mode.startswith("I"):  # 16 bits of grey; Pillow's own conversion would cut them off at 255
        return Image.fromarray(np.clip(np.asarray(image).astype(np.int64) >> 8, 0, 255).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        clear = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", clear.size, "white"), clear).convert("RGB")
    return image.convert("RGB")
