"""What benchmarks of many trainings share: a recipe trained with several settings, on Fashion-MNIST or a part of it.

Each training is a `kasoku train --continue` in a folder of its own, so the same command goes on after a stop. As many
run at once as there are cores, a thread each.
"""

import argparse
import gzip
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from kasoku.core.hardware import cores
from kasoku.data import Memory, fashion_mnist
from kasoku.distributed.local_launch import STARTED
from kasoku.report.significance import interval

DOCUMENTS = Path(__file__).resolve().parent.parent / "recipes" / "documents"
HELD_OUT = 10_000  # training images on which settings are chosen
DIVERGED = 3  # exit code of `kasoku train`
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Trained:
    """The result of a training: top-1 of the test images (0 if it diverged), and the lines of its metrics.jsonl."""

    top1: float
    metrics: Sequence[Mapping[str, Any]] = ()

    def over_epochs(self, name: str) -> list[tuple[float, float]]:
        """(epoch, value) of each line that has the value."""
        return [(line["epoch"], line[name]) for line in self.metrics if name in line]


def options(description: str, name: str, *, images: int, seeds: int) -> argparse.ArgumentParser:
    """The options that these benchmarks share; `images` is how many the short form takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--short", action="store_true", help=f"minutes: {images:,} training images, one seed")
    parser.add_argument("--seeds", type=int, default=seeds, help="default: %(default)s")
    parser.add_argument("--data", default="", help="the folder of the four files; empty: $KASOKU_DATA/fashion_mnist")
    parser.add_argument(
        "--out", type=Path, default=Path("runs") / name, help="of all trainings; if it has some, they go on"
    )
    parser.add_argument("--jobs", type=int, default=cores(), help="trainings at once (default: %(default)s)")
    return parser


def write_idx(folder: Path, train: Memory, test: Memory) -> str:
    """Writes the two parts as the four files of Fashion-MNIST; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, split in (("train", train), ("t10k", test)):
        for kind, values in (("images-idx3", split.images_NHWC.squeeze(-1)), ("labels-idx1", split.labels_N)):
            head = bytes((0, 0, 8, values.ndim)) + b"".join(size.to_bytes(4, "big") for size in values.shape)
            body = values.to(torch.uint8).contiguous().numpy().tobytes()
            (folder / f"{name}-{kind}-ubyte.gz").write_bytes(gzip.compress(head + body, 1, mtime=0))
    return str(folder)


def data_folder(root: str, out: Path, images: int = 0) -> str:
    """A folder with the first `images` training images and all test images; 0: the root."""
    if not images:
        return root
    dataset = fashion_mnist(root)
    return write_idx(out / "data", first(dataset.train, images), dataset.test)


def held_out_folder(root: str, out: Path, images: int = 0) -> str:
    """The same with the last training images, which are left out of training, in the place of the test images."""
    x_NHWC, y_N = (whole := fashion_mnist(root).train).images_NHWC, whole.labels_N
    train = first(Memory(x_NHWC[:-HELD_OUT], y_N[:-HELD_OUT]), images)
    return write_idx(out / "data-held-out", train, Memory(x_NHWC[-HELD_OUT:], y_N[-HELD_OUT:]))


def first(split: Memory, images: int) -> Memory:
    """The first images of a split; 0: all."""
    return Memory(split.images_NHWC[:images], split.labels_N[:images]) if images else split


def train(recipe: Path, settings: Sequence[str], out: Path) -> Trained:
    """One training, on one thread; a finished one is only read."""
    words = [word for setting in (*settings, "device.threads=1") for word in ("--set", setting)]
    command = [sys.executable, "-m", "kasoku", "train", str(recipe), "--quiet", "--continue", "--out", str(out), *words]
    ends_with_us = {STARTED: repr(time.perf_counter())}
    done = subprocess.run(command, env=os.environ | ends_with_us, capture_output=True, text=True)
    if done.returncode == DIVERGED:
        return Trained(0.0)
    if done.returncode:
        raise SystemExit(f"{out}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    top1 = json.loads((out / "result.json").read_text())["top1"]
    return Trained(top1, [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()])


def train_all(recipe: Path, runs: Mapping[Key, Sequence[str]], out: Path, jobs: int) -> dict[Key, Trained]:
    """Trains with the settings of each key, a folder each."""

    def one(key: Key) -> Trained:
        name = "-".join(map(str, key)) if isinstance(key, tuple) else str(key)
        trained = train(recipe, runs[key], out / name)
        print(f"{name}: {trained.top1:.4f}", flush=True)
        return trained

    with ThreadPoolExecutor(jobs) as pool:
        return dict(zip(runs, pool.map(one, runs), strict=True))


def points(one: Sequence[float], other: Sequence[float]) -> tuple[float, list[float] | None]:
    """Mean difference of accuracies in points over equal seeds, with its 95 % interval where there are at least 3."""
    off = [100 * (a - b) for a, b in zip(one, other, strict=True)]
    if len(off) < 3:
        return round(statistics.fmean(off), 3), None
    mean, low, high = interval(off)
    return round(mean, 3), [round(low, 3), round(high, 3)]


def verdict(ends: Sequence[float] | None) -> str:
    """What an interval of a difference says of the first side."""
    low, high = ends or (-math.inf, math.inf)
    return "more accurate" if low > 0 else "less accurate" if high < 0 else "undecided"
