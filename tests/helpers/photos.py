"""Folders of made photos that a network learns in a few steps."""

from pathlib import Path

import numpy as np
from PIL import Image


def coloured_photos(folder: Path, *, classes: int = 3, images: int = 16, side: int = 70) -> Path:
    """Class k is bright in channel k; enough for a network to learn in a few steps."""
    rng = np.random.default_rng(0)
    for k in range(classes):
        (folder / f"colour{k}").mkdir(parents=True)
        for i in range(images):
            pixels = rng.integers(0, 120, (side, side + 10, 3), np.uint8)
            pixels[..., k] += 130
            Image.fromarray(pixels).save(folder / f"colour{k}" / f"{i}.jpg")
    return folder


def photos_command(folder: Path, *more: str) -> list[str]:
    """`kasoku train` on coloured photos, three epochs at 32 pixels."""
    photos = folder / "photos"
    if not photos.exists():
        coloured_photos(photos)
    settings = ["--set", "epochs=3", "--set", "data.size=32", "--set", "device.threads=1"]
    return ["train", "--data", str(photos), *settings, *more]
