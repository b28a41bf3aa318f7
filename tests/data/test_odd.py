"""Every file of $KASOKU_DATA/odd has its expected outcome: the pixels that Pillow gives, or refused by its name."""

import io

import numpy as np
import pytest
from PIL import Image, ImageOps

from kasoku.core import InputError
from kasoku.data.decode.decode import crop, decode

REFUSED = {
    "derived": {"not_an_image.JPEG", "truncated_200bytes.JPEG", "truncated_60pct.JPEG", "zero_bytes.JPEG"},
    "pillow": {"truncated_jpeg.jpg"},
    "libjpeg-turbo": {"monkey12.jpg"},
}
NO_IMAGES = {"SOURCES.txt", "LICENSE", "LICENSE.txt", "README.ijg"}


def wanted(path, size):
    """What a user of Pillow would write."""
    with Image.open(path) as opened:
        if opened.mode.startswith("I"):
            image = Image.fromarray((np.asarray(opened).astype(int) >> 8).astype(np.uint8))
        else:
            image = ImageOps.exif_transpose(opened)
        clear = image.convert("RGBA") if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info else None
    if clear is not None:
        image = Image.alpha_composite(Image.new("RGBA", clear.size, "white"), clear)
    image = image.convert("RGB")
    width, height = image.size
    box = (0.1 * width, 0.2 * height, 0.9 * width, 0.95 * height)
    return np.asarray(image), np.asarray(image.resize(size[::-1], Image.Resampling.BILINEAR, box=box))


def odd_files(real_data):
    return [p for p in sorted((real_data / "odd").glob("*/*")) if p.is_file() and p.name not in NO_IMAGES]


@pytest.mark.data
@pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # Pillow warns of some of them, and decodes them
def test_every_odd_file_is_decoded_to_the_right_pixels_or_refused_by_name(real_data):
    files = odd_files(real_data)
    assert len(files) > 30
    for path in files:
        out = np.zeros((48, 40, 3), np.uint8)
        name = f"{path.parent.name}/{path.name}"

        def box(w, h):
            return 0.1 * w, 0.2 * h, 0.9 * w, 0.95 * h

        if path.name in REFUSED[path.parent.name]:
            with pytest.raises(InputError, match=path.name):
                crop(path.read_bytes(), box, out, name=name)
            with pytest.raises(InputError, match=path.name):
                decode(str(path))
            continue
        crop(path.read_bytes(), box, out, name=name)
        whole, part = wanted(path, (48, 40))
        away = np.abs(out.astype(int) - part.astype(int))
        assert away.mean() <= 1.0, (path, away.mean())
        assert (away <= 8).mean() >= 0.999, path
        away = np.abs(decode(str(path)).astype(int) - whole.astype(int))
        assert away.mean() <= 1.0, path


def test_a_decompression_bomb_is_refused(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10_000)
    out = io.BytesIO()
    Image.new("L", (300, 300)).save(out, "PNG")
    with pytest.raises(InputError, match=r"bomb\.png: cannot be decoded.*decompression bomb"):
        decode(out.getvalue(), name="bomb.png")
    with pytest.raises(InputError, match=r"bomb\.png: cannot be decoded.*decompression bomb"):
        crop(out.getvalue(), lambda w, h: (0, 0, w, h), np.zeros((8, 8, 3), np.uint8), name="bomb.png")
