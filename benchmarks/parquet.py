"""How fast do the images of a first epoch come from Parquet files, beside our shards of the same images?

    python benchmarks/parquet.py [--rounds N] [--copies N] [--batch N]

The photos of $KASOKU_DATA/imagenet_fullsize (148 originals), each under `copies` names, packed as they are (side 0).
The Parquet files hold the same bytes as Hugging Face writes them: structs, row groups of 100, snappy, ten files. A
second pair holds those of a pack of side 256, which decode several times as fast. An epoch is random resized crops of
224 with a flip, normalised, in batches of 64, by a thread a core. Each measurement is a process of its own, in turns
that rotate, from opening the data set to the last batch; before it the kernel drops its pages of the files, if they lie
on a disk. Nothing is converted on either side, and nothing lies in a local cache.
parquet_over_shards: the median over rounds of images/s from Parquet over those from shards, both in the order that
Parquet has if it may keep a quarter of its bytes in memory: shuffled within a window of about an eighth.
global_over_shards: the same, both shuffled globally: Parquet reads all row groups before the first batch.
packed_over_shards, packed_global_over_shards: of the second pair.
Bound: the shards, which are read by offset. Result: records/. Why it matters: people have Parquet files.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from common import finish, parse, spread
from kasoku.core import InputError
from kasoku.core.hardware import cores
from kasoku.data import Augment, loader, parquet, shards
from kasoku.data.packs.writer import pack

SIDE, FILES, GROUP_ROWS, BUDGET_S = 224, 10, 100, 480
KINDS = ("window_shards", "window_parquet", "global_shards", "global_parquet")
SIDES = {"photos": 0, "packed": 256}  # shorter side of the stored images
CLAIMS = {
    "loader/parquet/over_shards": ("parquet_over_shards", "images_per_s"),
    "loader/parquet/global_over_shards": "global_over_shards",
    "loader/parquet/packed_over_shards": "packed_over_shards",
    "loader/parquet/packed_global_over_shards": "packed_global_over_shards",
}


def write_parquet(packed: Path, target: Path) -> None:
    """The images of a pack in Parquet files, as Hugging Face writes them."""
    arrow, writer = import_module("pyarrow"), import_module("pyarrow.parquet")
    dataset = shards(str(packed))
    features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": list(dataset.classes)}}
    image = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    schema = arrow.schema([("image", image), ("label", arrow.int64())], metadata)
    for name, split, files in (("train", dataset.train, FILES), ("validation", dataset.test, 1)):
        for number in range(files):
            rows = range(number * len(split) // files, (number + 1) * len(split) // files)
            images = [{"bytes": split.read(row), "path": f"{row}.jpg"} for row in rows]
            columns = {"image": images, "label": [int(split.labels_N[row]) for row in rows]}
            path = target / f"{name}-{number:05d}-of-{files:05d}.parquet"
            writer.write_table(arrow.table(columns, schema=schema), path, row_group_size=GROUP_ROWS)


def drop_pages(root: Path) -> None:
    """Has the kernel drop its pages of the files."""
    for path in root.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class InOrderOf:
    """A split of shards in the order that Parquet files of the same images have."""

    def __init__(self, split: Any, order_like: Any) -> None:
        self._split, self.epoch_order = split, order_like.epoch_order

    def __getattr__(self, name: str) -> Any:
        return getattr(self._split, name)

    def __len__(self) -> int:
        return len(self._split)


def run(kind: str, root: str, parquet_root: str, batch: int) -> dict[str, float]:
    """One epoch in this process."""
    size = sum(path.stat().st_size for path in Path(parquet_root).iterdir())
    window_bytes = size // 4 if kind.startswith("window") else 2**40  # half of it is mixed
    same = parquet(parquet_root, SIDE, window_bytes=window_bytes)
    drop_pages(Path(root))
    begin = time.perf_counter()
    if kind.endswith("shards"):
        dataset = shards(root, SIDE)
        dataset = replace(dataset, train=InOrderOf(dataset.train, same.train))
    else:
        dataset = parquet(root, SIDE, window_bytes=window_bytes)
    open_s = time.perf_counter() - begin
    augment = Augment(flip="random", crop="random_resized", scale_min=0.08)
    batches = loader(dataset, "train", batch, augment=augment, threads=cores(), cache_bytes=0)
    images = sum(len(y_N) for _, y_N in batches)
    return {"images_per_s": images / (time.perf_counter() - begin), "open_s": open_s, "images": images}


def measured(kind: str, root: Path, parquet_root: Path, batch: int) -> dict[str, float]:
    """The same in a process of its own."""
    command = [sys.executable, __file__, "--one", kind, str(root), str(parquet_root), "--batch", str(batch)]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=180)
    found: dict[str, float] = json.loads(out.stdout.splitlines()[-1])
    return found


def prepare(home: Path, data: Path, copies: int) -> dict[str, tuple[str, Path, Path]]:
    """Writes the photos as shards and as Parquet files; returns kind, folder and Parquet's folder of each side."""
    photos, ways = home / "photos", dict[str, tuple[str, Path, Path]]()
    for path in sorted(data.rglob("*.JPEG")):
        for part, names in (("train", range(copies)), ("val", range(1))):
            (photos / part / path.parent.name).mkdir(parents=True, exist_ok=True)
            for copy in names:
                (photos / part / path.parent.name / f"{copy}-{path.name}").symlink_to(path.resolve())
    for name, side in SIDES.items():
        packed, files = home / f"{name}-shards", home / f"{name}-parquet"
        files.mkdir()
        pack(str(photos), str(packed), side=side, shard_bytes=2**26, quiet=True)
        write_parquet(packed, files)
        for kind in KINDS:
            ways[f"{name}_{kind}"] = (kind, packed if kind.endswith("shards") else files, files)
    return ways


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--copies", type=int, default=32)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = parse(parser)
    if arguments.one:
        print(json.dumps(run(*arguments.one, arguments.batch)))
        return 0
    data = os.environ.get("KASOKU_DATA")
    if not data:
        raise InputError("parquet.py: set KASOKU_DATA to the folder of imagenet_fullsize/")
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as home:
        ways = prepare(Path(home), Path(data) / "imagenet_fullsize", arguments.copies)
        begin = time.monotonic()
        for number in range(arguments.rounds):
            names = list(ways)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                found[name].append(measured(*ways[name], arguments.batch))
            if number >= 2 and (time.monotonic() - begin) * (number + 2) / (number + 1) > BUDGET_S:
                break
    rate = {name: [one["images_per_s"] for one in each] for name, each in found.items()}

    def over_shards(name: str, kind: str) -> list[float]:
        return [a / b for a, b in zip(rate[f"{name}_{kind}_parquet"], rate[f"{name}_{kind}_shards"], strict=True)]

    ratios = {
        "parquet_over_shards": over_shards("photos", "window"),
        "global_over_shards": over_shards("photos", "global"),
        "packed_over_shards": over_shards("packed", "window"),
        "packed_global_over_shards": over_shards("packed", "global"),
    }
    figures: dict[str, object] = {key: round(statistics.median(values), 3) for key, values in ratios.items()}
    figures |= {f"{key}_spread": spread([round(value, 3) for value in values]) for key, values in ratios.items()}
    figures |= {"n": len(rate["photos_window_shards"]), "images": found["photos_window_shards"][0]["images"]}
    figures |= {"images_per_s": {name: round(statistics.median(values), 1) for name, values in rate.items()}}
    figures |= {
        "open_s": {name: round(statistics.median(o["open_s"] for o in each), 3) for name, each in found.items()}
    }
    parameters: dict[str, object] = {"batch": arguments.batch, "copies": arguments.copies, "threads": cores()}
    finish("parquet", parameters, figures, CLAIMS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
