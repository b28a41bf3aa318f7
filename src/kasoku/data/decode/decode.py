"""From the bytes of an image to RGB pixels: of the whole image, or of one part of it at the size that is wanted."""

import importlib
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image, UnidentifiedImageError

from kasoku.core.errors import InputError
from kasoku.core.files import open_regular
from kasoku.data.augment.basic import centre_box, stored_side
from kasoku.data.decode import native
from kasoku.data.decode.native import Box

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP")  # by content, not by name; keeps Pillow's exotic readers out
for _format in ("Jpeg", "Png", "WebP", "Bmp"):  # before threads need them
    importlib.import_module(f"PIL.{_format}ImagePlugin")
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_REDUCED = 8  # a JPEG is decoded smaller where so many pixels still make one that is wanted, each way


def decode(source: str | bytes, shorter: int = 0, *, name: str = "") -> np.ndarray:
    """RGB pixels_HWC (uint8) of one image file, upright as its EXIF orientation says.

    `source`: its path or its bytes; `name`: what messages call it. A larger image is shrunk until its shorter side is
    `shorter` (0: never). Grey, CMYK, palette and 16-bit images become 8-bit RGB, transparent pixels white.
    Errors: InputError naming the file when it is missing, damaged, or no image.
    """
    with _opened(source, name) as opened:
        if shorter:
            scale = shorter / min(opened.size)
            least = (int(opened.width * scale) + 1, int(opened.height * scale) + 1)
            opened.draft(None, least)  # a JPEG is decoded at 1/2, 1/4 or 1/8 where that is enough
        opened.load()
        return upright(opened, shorter)


def is_image(data: bytes) -> bool:
    """Whether the header of a file is that of an image."""
    if native.jpeg_size(data):
        return True
    with suppress(InputError), _opened(data, ""):
        return True
    return False


def crop(source: bytes | np.ndarray, box: Callable[[int, int], Box], out_HWC: np.ndarray, *, name: str = "") -> None:
    """Writes the part box(width, height) of an image into out_HWC (uint8, RGB, contiguous), resized to its shape.

    Bilinear, antialiased, in one step, and of a JPEG only what the part needs is decoded. `source`: the bytes of a
    file, or its pixels_HWC. The box is of the upright image; see `decode` for what becomes of other modes.
    Errors: InputError with `name` when it is damaged, or no image.
    """
    if isinstance(source, np.ndarray):
        height, width = source.shape[:2]
        wanted = box(width, height)
        if not native.resize_planes(source, wanted, out_HWC):
            out_HWC[:] = fitted(source, wanted, out_HWC.shape[:2])
    elif not native.crop_jpeg(source, box, out_HWC):
        with _opened(source, name) as opened:  # by Pillow alone
            turn, (rows, columns, _) = _orientation(opened), out_HWC.shape
            width, height = opened.size[::-1] if turn > 4 else opened.size
            left, top, right, bottom = box(width, height)
            spare = min((right - left) / columns, (bottom - top) / rows) / _REDUCED
            if spare > 1:
                opened.draft(None, (int(opened.width / spare) + 1, int(opened.height / spare) + 1))
            opened.load()
            pixels_HWC = upright(opened)
            x, y = pixels_HWC.shape[1] / width, pixels_HWC.shape[0] / height
            part = (left * x, top * y, min(right * x, pixels_HWC.shape[1]), min(bottom * y, pixels_HWC.shape[0]))
            out_HWC[:] = fitted(pixels_HWC, part, (rows, columns))


def fitted(pixels_HWC: np.ndarray, box: Box, size: tuple[int, int]) -> np.ndarray:
    """The part (left, top, right, bottom) of an image, resized to (height, width): bilinear, antialiased."""
    height, width = pixels_HWC.shape[:2]
    if (height, width) == size and box == (0, 0, width, height):
        return pixels_HWC
    image = Image.fromarray(np.ascontiguousarray(pixels_HWC))
    return np.asarray(image.resize(size[::-1], Image.Resampling.BILINEAR, box=box))


def read_image(
    source: str | Path | bytes | np.ndarray, image_size: tuple[int, int], channels: int = 3, *, name: str = ""
) -> torch.Tensor:
    """One image as a test image: pixels_HWC (uint8), the middle of it at image_size (height, width).

    `source`: a path, the bytes of a file (called `name` in messages), or pixels_HWC.
    Errors: InputError naming the file when it is missing, damaged, or no image.
    """
    if not isinstance(source, np.ndarray):
        side = stored_side(min(image_size)) if image_size[0] == image_size[1] else 0
        source = decode(source if isinstance(source, bytes) else str(source), side, name=name)
    pixels_HWC = fitted(source, centre_box(source.shape[1], source.shape[0], image_size), image_size)
    if channels == 1:
        pixels_HWC = np.asarray(Image.fromarray(pixels_HWC).convert("L"))[..., None]
    return torch.from_numpy(pixels_HWC.copy())


@contextmanager
def _opened(source: str | bytes, name: str) -> Iterator[Any]:
    """The image, its header read; errors in the body are raised with its name."""
    name, most = name or (source if isinstance(source, str) else "an image"), native.max_pixels()
    if Image.MAX_IMAGE_PIXELS and os.environ.get("KASOKU_MAX_PIXELS"):  # Pillow's limit is never lowered by ours
        Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS, most)
    try:
        file = open(open_regular(source), "rb") if isinstance(source, str) else io.BytesIO(source)  # noqa: SIM115
        with file, Image.open(file, formats=_FORMATS) as opened:
            if opened.width * opened.height > most:
                raise Image.DecompressionBombError(f"{opened.width:,} x {opened.height:,} pixels, more than {most:,}")
            yield opened
    except MemoryError:
        raise
    except Exception as error:  # damaged bytes make the decoders raise nearly anything
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if isinstance(error, UnidentifiedImageError):
            reason = f"not one of {', '.join(_FORMATS)}"
        if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
            reason = f"{reason.rstrip('.')}: if you trust it, set KASOKU_MAX_PIXELS"
        raise InputError(f"{name}: cannot be decoded as an image ({reason}); mend or remove the file") from error


def upright(image: Any, shorter: int = 0) -> np.ndarray:
    """RGB pixels_HWC (uint8) of a Pillow image; see `decode` for other modes and for `shorter`."""
    turn, image = _TURNS.get(_orientation(image)), _rgb(image)
    if shorter and min(image.size) > shorter:
        scale = shorter / min(image.size)
        size = (max(shorter, round(image.width * scale)), max(shorter, round(image.height * scale)))
        image = image.resize(size, Image.Resampling.BILINEAR)
    return np.asarray(image if turn is None else image.transpose(turn))


def _orientation(image: Any) -> int:
    with suppress(Exception):  # a damaged EXIF block does not spoil the pixels
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    return 1


def _rgb(image: Any) -> Any:
    if image.mode.startswith("I"):  # 16 bits of grey; Pillow's own conversion would cut them off at 255
        return Image.fromarray(np.clip(np.asarray(image).astype(np.int64) >> 8, 0, 255).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        clear = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", clear.size, "white"), clear).convert("RGB")
    return image.convert("RGB")
