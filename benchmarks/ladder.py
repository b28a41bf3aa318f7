"""What does each step make faster on one device, alone and on top of the others, from PyTorch's defaults up?

    python benchmarks/ladder.py [--network resnet50] [--side N] [--batch N] [--rounds N] [--seconds S]

Training on the photos of $KASOKU_DATA/imagenet_fullsize, from their files to the update of the weights. The
first rung is what PyTorch does by default: fp32, channels first, glibc's allocator, a DataLoader whose two workers
decode with Pillow. Each further rung adds one step of [004]: layout (channels last), precision (bf16 autocast),
allocator (tune_malloc), decode (kasoku's loader from the same files), pack (the loader from a pack of shorter side
256), and batch (the size that tune_batch_size finds, by images/s).
speed: images/s of each rung over those of the first; alone: with that step only. Each measurement is a process of its
own, in turns; the first six steps, whose batches may have been ready before, do not count. Medians over --rounds.
Result: records/documents/004.json. Why it matters: [004] lists these steps and no figure for any.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

import kasoku.models
from common import finish, spread
from kasoku.core import InputError, Job
from kasoku.core.hardware import cores
from kasoku.data import Augment, folder, loader, normalise
from kasoku.data.packs.reader import shards
from kasoku.data.packs.writer import pack
from kasoku.device import Autocast, ChannelsLast, tune_malloc
from kasoku.tune import Throughput, tune_batch_size
from loader import MEAN, STD, theirs

STEPS = ("layout", "precision", "allocator", "decode", "pack", "batch")
TUNING = 4  # measurements, as long as tuning the batch may take
WORKERS, WARM = 2, 6  # the loaders have some batches ready before the first step: those do not count


def job(steps: Sequence[str], network: str, batch: int, side: int, root: Path) -> tuple[Job, Iterator]:
    """The training with these steps, and its batches without end."""
    model = getattr(kasoku.models, network)(num_classes=1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if "decode" in steps or "pack" in steps:
        data = shards(str(root / "pack"), side) if "pack" in steps else folder(str(root / "photos"), side)
        augment = Augment(flip="random", crop="random_resized", scale_min=0.08)
        batches = loader(data, "train", batch, augment=augment, cache_bytes=0)
        images = itertools.chain.from_iterable(itertools.repeat(batches))
    else:
        batches = theirs(str(root / "photos"), "pillow", WORKERS, batch, side)
        images = ((normalise(x, MEAN, STD), y) for x, y in itertools.chain.from_iterable(itertools.repeat(batches)))
    techniques = [ChannelsLast()] * ("layout" in steps) + [Autocast("bf16")] * ("precision" in steps)
    done = Job(model, optimizer, loss=nn.CrossEntropyLoss(), loader=batches).apply(*techniques)
    return done, images


def run(steps: Sequence[str], arguments: argparse.Namespace, root: Path) -> dict[str, float]:
    """Images/s of these steps in this process, and the batch."""
    torch.set_num_threads(cores())
    if "allocator" in steps:
        tune_malloc()
    training, images = job(steps, arguments.network, arguments.batch, arguments.side, root)
    if arguments.tune:
        found = tune_batch_size(training, Throughput(), budget_s=TUNING * arguments.seconds, least=4, most=256)
        return {"batch": found.batch}
    times = [time.perf_counter()]
    while len(times) < WARM + 3 or times[-1] - times[WARM] < arguments.seconds:
        x, y = next(images)
        training.loss(training.model(x), y).backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        times.append(time.perf_counter())
    measured = len(times) - 1 - WARM
    return {"images_per_s": measured * arguments.batch / (times[-1] - times[WARM])}


def child(steps: Sequence[str], arguments: argparse.Namespace, root: Path, batch: int, *more: str) -> dict[str, float]:
    """The same in a process of its own."""
    command = [sys.executable, __file__, "--one", ",".join(steps), "--root", str(root), "--batch", str(batch), *more]
    for name in ("network", "side", "seconds"):
        command += [f"--{name}", str(getattr(arguments, name))]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=600)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--network", default="resnet50", help="of kasoku.models")
    parser.add_argument("--side", type=int, default=224, help="pixels")
    parser.add_argument("--batch", type=int, default=32, help="of all rungs but the last")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="of a measurement")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--tune", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        print(json.dumps(run(arguments.one.split(","), arguments, arguments.root)))
        return 0
    data = os.environ.get("KASOKU_DATA")
    if not data:
        raise InputError("ladder.py: set KASOKU_DATA to the folder of imagenet_fullsize/")
    rungs = [STEPS[:i] for i in range(len(STEPS) + 1)]
    alone = [(step,) for step in STEPS if step not in ("layout", "batch")]  # layout alone is the second rung
    with tempfile.TemporaryDirectory() as home:
        root = Path(home)
        (root / "photos" / "all").mkdir(parents=True)
        for path in sorted((Path(data) / "imagenet_fullsize").rglob("*.JPEG")):
            (root / "photos" / "all" / path.name).symlink_to(path.resolve())
        pack(str(root / "photos"), str(root / "pack"), side=256, quiet=True)
        batch = int(child(STEPS, arguments, root, arguments.batch, "--tune")["batch"])
        rates: dict[tuple[str, ...], list[float]] = {steps: [] for steps in (*rungs, *alone)}
        for number in range(arguments.rounds):
            order = list(rates)
            for steps in order[number % len(order) :] + order[: number % len(order)]:
                size = batch if "batch" in steps else arguments.batch
                rates[steps].append(child(steps, arguments, root, size)["images_per_s"])
                print(f"{'+'.join(steps) or 'default'}: {rates[steps][-1]:.2f} images/s", flush=True)
    median = {steps: statistics.median(values) for steps, values in rates.items()}
    first = median[()]
    names = ["default", *STEPS]
    figures: dict[str, object] = {
        "all_over_default": round(median[STEPS] / first, 3),
        "speed": {name: round(median[rung] / first, 3) for name, rung in zip(names, rungs, strict=True)},
        "speed_by_rung": [[i, round(median[rung] / first, 3)] for i, rung in enumerate(rungs)],
        "alone": {"layout": round(median[rungs[1]] / first, 3)}
        | {steps[0]: round(median[steps] / first, 3) for steps in alone},
        "batch": batch,
        "n": arguments.rounds,
        "images_per_s": {"+".join(steps) or "default": spread(values) for steps, values in rates.items()},
    }
    parameters = {name: getattr(arguments, name) for name in ("network", "side", "batch", "seconds")}
    finish("ladder", parameters, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
