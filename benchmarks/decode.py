"""How many images a second does one core turn from JPEG into a random resized crop?

    python benchmarks/decode.py [--rounds N] [--side 224]

The photos of $KASOKU_DATA/imagenet_fullsize (148 originals, 500x375 in the median), their bytes in memory, on one core.
A round takes each photo once; all sides get the same crops (area 0.08 to 1, aspect 3/4 to 4/3), in turns that rotate.
ours: `crop`, antialiased; from the originals, and from packs of shorter side 256 (JPEG of quality 90, raw planes).
pillow: decode, resize with box, bilinear, antialiased. opencv: imdecode, crop, resize bilinear, NOT antialiased.
simplejpeg: libjpeg-turbo with fast transform and upsampling, crop, OpenCV's resize, NOT antialiased.
dali: where it is installed (pip install -e '.[dali]'), DALI's CPU pipeline, one thread, batches of 32: image_slice and
resize, antialiased as is its default; dali_aliased: the same with antialias=False.
ours_over_best_library: medians of images/s; best of the libraries on the originals, antialiased or not.
pack_..._over_best_library: ours on the pack over the same; ..._on_pack: over the best library on the same pack.
bound: reading the stream down to the end of the crop alone, by our decoder: no transform, no colour, no resize.
Result: records/. Why it matters: decoding is most of what an input pipeline does.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from common import finish, parse, spread
from kasoku.core import InputError
from kasoku.data.augment.basic import box_draws, random_box
from kasoku.data.decode import native
from kasoku.data.decode.decode import Box, crop
from kasoku.data.packs.reader import shards
from kasoku.data.packs.writer import pack

Where = Callable[[int, int], Box]
Side = Callable[[Any, Where, np.ndarray], None]  # one crop
Round = Callable[[Sequence[Any], Sequence[Where], np.ndarray], None]  # the crops of a round, one after the other
BUDGET_S = 420
CLAIMS = {
    "decode/photos/over_best_library": ("ours_over_best_library", "images_per_s"),
    "decode/pack/over_best_library": "pack_jpeg_over_best_library",
    "decode/pack/over_best_library_on_pack": "pack_jpeg_over_best_library_on_pack",
    "decode/pack/raw_over_best_library": "pack_raw_over_best_library",
}
DALI_CLAIMS = {"decode/photos/over_dali": ("ours_over_dali", "over_dali_aliased", "images_per_s")}
DALI_BATCH = 32


def pillow(data: bytes, box: Where, out_HWC: np.ndarray) -> None:
    with Image.open(io.BytesIO(data)) as opened:
        image = opened.convert("RGB")
    out_HWC[:] = image.resize(out_HWC.shape[1::-1], Image.Resampling.BILINEAR, box=box(*image.size))


def _resized(cv2: Any, pixels_HWC: np.ndarray, box: Where, out_HWC: np.ndarray) -> None:
    left, top, right, bottom = (round(x) for x in box(pixels_HWC.shape[1], pixels_HWC.shape[0]))
    part = pixels_HWC[top : max(bottom, top + 1), left : max(right, left + 1)]
    cv2.resize(part, out_HWC.shape[1::-1], dst=out_HWC, interpolation=cv2.INTER_LINEAR)


def library(name: str) -> Side:
    """How a user of it makes a crop; only its own package is imported."""
    if name == "pillow":
        return pillow
    cv2 = importlib.import_module("cv2")
    cv2.setNumThreads(1)

    def opencv(data: bytes, box: Where, out_HWC: np.ndarray) -> None:
        pixels_HWC = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB)
        _resized(cv2, pixels_HWC, box, out_HWC)

    if name == "opencv":
        return opencv
    simple = importlib.import_module("simplejpeg")

    def simplejpeg(data: bytes, box: Where, out_HWC: np.ndarray) -> None:
        pixels_HWC = simple.decode_jpeg(data, "RGB", fastdct=True, fastupsample=True)
        _resized(cv2, pixels_HWC, box, out_HWC)

    return simplejpeg


def bound(data: bytes, box: Where, out_HWC: np.ndarray) -> None:
    """Of the crop only its last pixel."""

    def last(width: int, height: int) -> Box:
        _, _, right, bottom = box(width, height)
        return right - 1, bottom - 1, right, bottom

    native.crop_jpeg(data, last, out_HWC[:1, :1].copy())


def ours(data: bytes | np.ndarray, box: Where, out_HWC: np.ndarray) -> None:
    crop(data, box, out_HWC)


def one_by_one(make: Side) -> Round:
    def crops(images: Sequence[Any], boxes: Sequence[Where], out_HWC: np.ndarray) -> None:
        for data, box in zip(images, boxes, strict=False):
            make(data, box, out_HWC)

    return crops


def dali(images: Sequence[bytes], side: int, *, antialias: bool) -> Round:
    """DALI's pipeline on one core for these images; their sizes it is told, and nothing runs ahead of a round."""
    fn = importlib.import_module("nvidia.dali.fn")
    pipeline = importlib.import_module("nvidia.dali.pipeline").Pipeline(
        DALI_BATCH, num_threads=1, device_id=None, exec_pipelined=False, exec_async=False
    )
    with pipeline:
        data, start, shape = (fn.external_source(name=name) for name in ("data", "start", "shape"))
        part = fn.decoders.image_slice(
            data, start, shape, device="cpu", normalized_anchor=False, normalized_shape=False
        )
        pipeline.set_outputs(fn.resize(part, size=[side, side], antialias=antialias))
    pipeline.build()
    bytes_of = [np.frombuffer(image, np.uint8) for image in images]
    sizes = [Image.open(io.BytesIO(image)).size for image in images]

    def crops(_: Sequence[bytes], boxes: Sequence[Where], out_HWC: np.ndarray) -> None:
        for first in range(0, len(boxes), DALI_BATCH):
            some = slice(first, min(first + DALI_BATCH, len(boxes)))
            box_N4 = np.array([box(*size) for box, size in zip(boxes[some], sizes[some], strict=True)], np.float32)
            box_N4 = box_N4.round()
            pipeline.feed_input("data", bytes_of[some])
            pipeline.feed_input("start", box_N4[:, :2].copy())
            pipeline.feed_input("shape", box_N4[:, 2:] - box_N4[:, :2])
            (found,) = pipeline.run()
            out_HWC[:] = found.at(len(found) - 1)

    return crops


def libraries(images: Sequence[bytes], side: int) -> dict[str, tuple[Round, Sequence[Any]]]:
    """All that are here; DALI only where it is installed."""
    found = {name: one_by_one(library(name)) for name in ("pillow", "opencv", "simplejpeg")}
    if dali_version():
        found |= {"dali": dali(images, side, antialias=True), "dali_aliased": dali(images, side, antialias=False)}
    return {name: (crops, images) for name, crops in found.items()}


def dali_version() -> str:
    """Empty where it is not installed."""
    try:
        return str(importlib.import_module("nvidia.dali").__version__)
    except ImportError:
        return ""


def packed(photos: Sequence[Path], form: str, home: Path) -> list[Any]:
    """What a pack of the photos holds, in memory, in their order."""
    source = home / f"photos-{form}" / "all"
    source.mkdir(parents=True)
    for i, photo in enumerate(photos):
        (source / f"{i:04}.jpg").symlink_to(photo.resolve())
    pack(str(source.parent), str(home / form), side=256, format=form, quiet=True)
    dataset = shards(str(home / form))
    by_name = {part.name(i): part.read(i) for part in (dataset.train, dataset.test) for i in range(len(part))}
    return [bytes(image) if form == "jpeg" else image for _, image in sorted(by_name.items())]


def timed(sides: dict[str, tuple[Round, Sequence[Any]]], rounds: int, side: int) -> dict[str, list[float]]:
    """Images/s of each round."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    out_HWC = np.empty((side, side, 3), np.uint8)
    n = min(len(images) for _, images in sides.values())
    begin = time.monotonic()
    for number in range(rounds + 1):  # the first one warms up
        u_N4 = box_draws(0, number, torch.arange(n)).tolist()
        boxes = [lambda w, h, u_4=u_4: random_box(w, h, u_4, 0.08) for u_4 in u_N4]
        names = list(sides)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            crops, images = sides[name]
            start = time.perf_counter()
            crops(images, boxes, out_HWC)
            if number:
                rates[name].append(n / (time.perf_counter() - start))
        if number >= 5 and time.monotonic() - begin > BUDGET_S:
            break
    return rates


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--side", type=int, default=224)
    arguments = parse(parser)
    data = os.environ.get("KASOKU_DATA")
    if not data or not native.LIBRARY:
        raise InputError(
            "decode.py: set KASOKU_DATA to the folder of imagenet_fullsize/, and install with a C compiler"
        )
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[-1]})
    folder = Path(data) / "imagenet_fullsize"
    photos = sorted(folder.rglob("*.JPEG"))
    originals = [path.read_bytes() for path in photos]
    with tempfile.TemporaryDirectory() as home:
        small, raw = (packed(photos, form, Path(home)) for form in ("jpeg", "raw"))
        there, on_pack = (libraries(images, arguments.side) for images in (originals, small))
        own, least = one_by_one(ours), one_by_one(bound)
        sides = {"ours": (own, originals), "bound": (least, originals), **there}
        sides |= {"ours_pack_jpeg": (own, small), "ours_pack_raw": (own, raw), "bound_pack_jpeg": (least, small)}
        sides |= {f"{name}_pack_jpeg": side for name, side in on_pack.items()}
        rates = timed(sides, arguments.rounds, arguments.side)
    medians = {name: statistics.median(found) for name, found in rates.items()}
    best = max(medians[name] for name in there)
    best_on_pack = max(medians[f"{name}_pack_jpeg"] for name in on_pack)
    figures: dict[str, object] = {
        "ours_over_best_library": round(medians["ours"] / best, 3),
        "pack_jpeg_over_best_library": round(medians["ours_pack_jpeg"] / best, 3),
        "pack_jpeg_over_best_library_on_pack": round(medians["ours_pack_jpeg"] / best_on_pack, 3),
        "pack_raw_over_best_library": round(medians["ours_pack_raw"] / best, 3),
        "ours_over_bound": round(medians["ours"] / medians["bound"], 3),
        "pack_jpeg_over_bound": round(medians["ours_pack_jpeg"] / medians["bound_pack_jpeg"], 3),
        "n": len(rates["ours"]),
        "antialiased": ["ours", "pillow", *(["dali"] if "dali" in there else [])],
        "dali": dali_version() or "not installed",
        "images_per_s": {name: {k: round(v, 1) for k, v in spread(found).items()} for name, found in rates.items()},
    }
    claims = dict(CLAIMS)
    if "dali" in there:
        figures["ours_over_dali"] = round(medians["ours"] / medians["dali"], 3)
        figures["over_dali_aliased"] = round(medians["ours"] / medians["dali_aliased"], 3)
        claims |= DALI_CLAIMS
    finish("decode", {"photos": len(originals), "side": arguments.side, "rounds": arguments.rounds}, figures, claims)
    return 0


if __name__ == "__main__":
    sys.exit(main())
