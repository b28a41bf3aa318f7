"""What does it cost to compare checksums: of a pack's images in training, of a run's files in a resume?

    python benchmarks/checks.py [--rounds N]

Input: epochs of the library's loader (random crops of 224, batches of 64, all cores) over packs of the photos of
$KASOKU_DATA/imagenet_fullsize: the originals, JPEGs of shorter side 256, and raw pixels of side 256. An epoch shows
each photo 24, 48 or 192 times. Each with its checksums and with none noted, in turns; a pair is an epoch of each.
Run folder: ResNet-50 (102 MB of weights). What a resume compares (recipe, shares of ranks), what `kasoku eval` compares
besides (shape of the data, weights), and the time that noting
a digest adds to writing the weights.
Bound: 1 and 0 ms. Result: records/. Why it matters: a check that costs much would be turned off.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from common import finish, parse, seconds_per_call, spread
from kasoku.core import InputError, Solo
from kasoku.core.files import check_regular, checked_file, digests_in
from kasoku.data import Augment, loader
from kasoku.data.datasets.base import Dataset
from kasoku.data.packs.reader import Shards, shards
from kasoku.data.packs.writer import pack
from kasoku.models import resnet50
from kasoku.training.run_folder import RunFolder, shares_in

BATCH, SIDE = 64, 224
CLAIMS = {f"checks/input/{name}": f"input.{name}.ratio" for name in ("jpeg_originals", "jpeg_256", "raw_256")} | {
    "checks/run_folder/resume": "run_folder.resume_ms",
    "checks/run_folder/evaluation": "run_folder.evaluation_ms",
    "checks/run_folder/write_adds": ("run_folder.write_adds_ms", "run_folder.write_ms"),
}
PACKS = {  # how often an epoch shows each photo, and the settings of the pack
    "jpeg_originals": (24, {"side": 0}),
    "jpeg_256": (48, {"side": 256}),
    "raw_256": (192, {"side": 256, "format": "raw"}),
}


def repeated(dataset: Dataset, times: int, *, checked: bool) -> Dataset:
    """The pack's training images under several numbers each, with their checksums or without."""
    split = dataset.train
    assert isinstance(split, Shards)
    split = split.take(np.tile(np.arange(len(split)), times))
    if not checked:
        place_N5 = split.place_N5.copy()
        place_N5[:, 3] = -1
        split = replace(split, place_N5=place_N5)
    return replace(dataset, train=split)


def epoch(dataset: Dataset) -> float:
    """Seconds of an epoch of input, from the first batch to the last."""
    batches = iter(loader(dataset, "train", BATCH, augment=Augment(crop="random_resized", flip="random")))
    next(batches)
    begin = time.perf_counter()
    for _ in batches:
        pass
    return time.perf_counter() - begin


def input_costs(photos: Path, rounds: int) -> dict[str, object]:
    """Of each pack: an epoch with checksums over one without, by pairs, and the seconds of both."""
    figures: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as temporary:
        links = Path(temporary) / "photos" / "all"
        links.mkdir(parents=True)
        for i, photo in enumerate(sorted(photos.rglob("*.JPEG"))):
            (links / f"{i:03}.jpg").symlink_to(photo.resolve())
        for name, (times, form) in PACKS.items():
            pack(str(links.parent), f"{temporary}/{name}", quiet=True, **form)  # type: ignore[arg-type]
            dataset = shards(f"{temporary}/{name}", SIDE, validation=0.01)
            sides = {checked: repeated(dataset, times, checked=checked) for checked in (True, False)}
            seconds: dict[bool, list[float]] = {True: [], False: []}
            for i in range(rounds + 1):
                for checked in (True, False) if i % 2 else (False, True):
                    seconds[checked].append(epoch(sides[checked]))
            ratios = [a / b for a, b in zip(seconds[True][1:], seconds[False][1:], strict=True)]
            figures[name] = {"ratio": spread(ratios)} | {
                side: spread(seconds[checked][1:]) for side, checked in (("checked_s", True), ("unchecked_s", False))
            }
    return figures


def run_folder_costs(rounds: int) -> dict[str, object]:
    """Milliseconds that digests add to a resume, to an evaluation, and to writing the weights."""
    model = resnet50(num_classes=1000)
    with tempfile.TemporaryDirectory() as temporary:
        run = RunFolder(Path(temporary) / "run", resume=False)
        run.write("recipe.toml", "batch = 64\n" * 60)
        run.write("shares.json", "[32, 32]\n")
        run.write("data.json", "{}\n" * 400)

        for name in ("step-1/model.safetensors", "step-1/state.pt", "step-1/sums.json"):
            (run.path / "checkpoints" / name).parent.mkdir(exist_ok=True)
            (run.path / "checkpoints" / name).touch()

        def resume() -> None:
            check_regular(run.path)
            checked_file(run.path, "recipe.toml")
            digests_in(run.path)
            shares_in(run.path, Solo(), 64)

        def evaluate() -> None:
            for name in ("recipe.toml", "data.json", "best.safetensors"):
                checked_file(run.path, name)

        writes: dict[str, list[float]] = {"best.safetensors": [], "unchecked.safetensors": []}
        for _ in range(rounds + 1):
            for name, seconds in writes.items():
                begin = time.perf_counter()
                run.write_weights(name, model)
                seconds.append(time.perf_counter() - begin)
        adds = [a - b for a, b in zip(*(seconds[1:] for seconds in writes.values()), strict=True)]
        calls = {"resume_ms": resume, "evaluation_ms": evaluate}
        figures: dict[str, object] = {
            name: spread([1e3 * s for s in seconds_per_call(call, calls=rounds)]) for name, call in calls.items()
        }
        run.close()
        written_s = statistics.median(writes["unchecked.safetensors"][1:])
        return figures | {"write_adds_ms": spread([1e3 * s for s in adds]), "write_ms": 1e3 * written_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parse(parser)
    photos = Path(os.environ.get("KASOKU_DATA", "")) / "imagenet_fullsize"
    if not photos.is_dir():
        raise InputError("$KASOKU_DATA/imagenet_fullsize is wanted")
    figures = {"input": input_costs(photos, arguments.rounds), "run_folder": run_folder_costs(arguments.rounds)}
    finish("what checksums cost", {"rounds": arguments.rounds, "batch": BATCH, "side": SIDE}, figures, CLAIMS)


if __name__ == "__main__":
    main()
