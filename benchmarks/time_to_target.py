"""Does TimeToTarget find the batch that reaches an accuracy soonest?

    python benchmarks/time_to_target.py [--seeds N] [--rounds N] [--races NAME ...] [--show]

Six trainings on parts of the digits, Fashion-MNIST, CIFAR-10 and photos, by SGD, AdamW and LARS. Each is tuned once
by `tune_batch_size(job, TimeToTarget())`, which begins at batch START, and trained at SIZES and at the size found, up
to its target. Rates follow the batch: in proportion, with AdamW by the root. The time to the target is the images
that this takes, the median over the seeds, times the seconds of an image, the median of interleaved rounds: so a
disturbance in a training does not count. Evaluation, eight times an epoch, does not count either.
found_over_best: of each training, the time at the size found over that at the best of SIZES; the search itself is
counted in search_over_best, over the same.
within: how many of the trainings have found_over_best at most WITHIN (5 of 6 are wanted).
--show: no search, one seed; prints the accuracy over the epochs at START, by which the targets were set.
Why it matters: the fastest epoch is not the soonest target, and nobody wants to try six sizes to learn it.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from common import finish, parse
from kasoku.core import Batch, Constant, Job
from kasoku.data import Dataset, Memory, cifar10, digits, fashion_mnist, folder, loader
from kasoku.device import Device, choose
from kasoku.models import cifarnet, cnn4
from kasoku.optim import Rate, adamw, lars, sgd
from kasoku.training.evaluation import evaluate
from kasoku.tune import TimeToTarget, tune_batch_size

SIZES, START, WITHIN = (16, 32, 64, 128, 256, 512), 64, 1.05
TESTED = 1000  # test images, at most
CLAIMS = {"tune/target/within": ("within", "found_over_best", "search_over_best", "worst")}


@dataclass(frozen=True)
class Race:
    """A training up to an accuracy: how many training images, and the rule at batch START."""

    images: int
    read: Callable[[], Dataset]
    network: Callable[[int], nn.Module]  # by channels
    rule: Callable[[nn.Module], Optimizer]
    target: float
    power: float = 1.0  # to which rates follow the batch
    most_epochs: int = 40

    def dataset(self) -> Dataset:
        """The first images of the set; as many test images as TESTED at most."""
        whole = self.read()
        return replace(whole, train=first(whole.train, self.images), test=first(whole.test, TESTED))

    def job(self, dataset: Dataset, batch: int, seed: int) -> Job:
        """A training with rates for the batch, after an epoch of warm-up."""
        chosen = choose(Device())
        torch.manual_seed(seed)
        model = self.network(dataset.channels).to(chosen.device)
        batches = loader(dataset, "train", batch, seed=seed, device=chosen.device)
        job = Job(model, self.rule, loader=batches)
        return job.apply(*chosen.techniques, Rate(Constant(warmup=1.0), (batch / START) ** self.power))


def photos(root: Path) -> Dataset:
    """Ten classes of ImageNet at 32 x 32, read into memory."""
    dataset = folder(str(root), 32)
    parts = {}
    for part in ("train", "test"):
        batches = [*loader(dataset, part, 100)]
        images_NCHW, labels_N = (torch.cat(each) for each in zip(*batches, strict=True))
        mean, std = (torch.tensor(each)[:, None, None] for each in (dataset.mean, dataset.std))
        bytes_NCHW = ((images_NCHW * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)
        parts[part] = Memory(bytes_NCHW.permute(0, 2, 3, 1).contiguous(), labels_N)
    return replace(dataset, **parts)


def first(split: Any, images: int) -> Memory:
    """The first images of a part in memory."""
    return Memory(split.images_NHWC[:images].contiguous(), split.labels_N[:images].clone())


def races(data: Path) -> dict[str, Race]:
    """The six trainings, by name."""
    fashion = partial(fashion_mnist, str(data / "fashion_mnist"))
    cifar = partial(cifar10, str(data / "cifar-10-batches-bin"))
    ten = partial(photos, data / "imagenette224")

    def small(channels: int) -> nn.Module:
        return cifarnet(10, channels, widths=(16, 32))

    def plain(channels: int) -> nn.Module:
        return cnn4(10, channels)

    by_sgd = partial(sgd, lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
    by_lars = partial(lars, lr=0.3, momentum=0.9, weight_decay=5e-4)
    by_adamw = partial(adamw, lr=0.002, weight_decay=0.05)
    return {
        "digits": Race(1500, digits, small, by_sgd, 0.94),
        "fashion": Race(6000, fashion, small, by_sgd, 0.80),
        "fashion_lars": Race(6000, fashion, small, by_lars, 0.75),
        "fashion_adamw": Race(6000, fashion, plain, by_adamw, 0.83, power=0.5),
        "cifar10": Race(6000, cifar, small, by_sgd, 0.40),
        "photos_adamw": Race(1700, ten, small, by_adamw, 0.45, power=0.5),
    }


def forever(job: Job) -> Iterator[Batch]:
    """Batches of all epochs."""
    while True:
        yield from job.loader


def step(job: Job, batches: Iterator[Batch]) -> None:
    """One update."""
    x_NCHW, y_N = next(batches)
    job.loss(job.model(x_NCHW), y_N).backward()
    job.optimizer.step()
    job.optimizer.zero_grad()


def images_to_target(race: Race, dataset: Dataset, batch: int, seed: int, *, show: bool = False) -> float:
    """Images of training until the target is reached; inf if that takes more than the epochs allowed."""
    job = race.job(dataset, batch, seed)
    test = loader(dataset, "test", TESTED)
    steps, every = len(job.loader), max(1, len(job.loader) // 8)
    with closing(job), closing(forever(job)) as batches:
        for number in range(1, race.most_epochs * steps + 1):
            step(job, batches)
            if number % every == 0:
                with job.evaluation() as judged:
                    top1 = evaluate(judged, test).top1
                if show and number % (4 * every) == 0:
                    print(f"  epoch {number / steps:.1f}: {top1:.4f}", flush=True)
                if top1 >= race.target:
                    return number * batch
    return math.inf


def image_seconds(race: Race, dataset: Dataset, batch: int) -> float:
    """Seconds of an image in training, the median of steps after the first two."""
    seconds = []
    with closing(race.job(dataset, batch, 0)) as job, closing(forever(job)) as batches:
        for _ in range(2 + max(3, 1024 // batch)):
            began = time.perf_counter()
            step(job, batches)
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[2:]) / batch


def ran(race: Race, seeds: int, rounds: int) -> dict[str, Any]:
    """The figures of a training."""
    dataset = race.dataset()
    job = race.job(dataset, START, 0)
    strategy = TimeToTarget(scaling="linear" if race.power == 1 else "sqrt")
    began = time.perf_counter()
    result = tune_batch_size(job, strategy, least=SIZES[0], most=SIZES[-1])
    search_s = time.perf_counter() - began
    job.close()
    sizes = sorted({*SIZES, result.batch})
    speeds: dict[int, list[float]] = {batch: [] for batch in sizes}
    for number in range(rounds):
        for batch in sizes[:: 1 if number % 2 else -1]:
            speeds[batch].append(image_seconds(race, dataset, batch))
    images = {batch: [images_to_target(race, dataset, batch, seed) for seed in range(seeds)] for batch in sizes}
    seconds = {batch: statistics.median(images[batch]) * statistics.median(speeds[batch]) for batch in sizes}
    best = min(SIZES, key=lambda batch: seconds[batch])
    return {
        "found": result.batch,
        "best": best,
        "found_over_best": round(seconds[result.batch] / seconds[best], 3),
        "largest_over_best": round(seconds[SIZES[-1]] / seconds[best], 3),
        "search_over_best": round(search_s / seconds[best], 2),
        "why": result.why,
        "epochs_tried": dict(zip([s.batch for s in result.samples], result.epochs, strict=False)),
        "seconds": {batch: round(s, 3) if math.isfinite(s) else None for batch, s in seconds.items()},
        "images": {b: [n if math.isfinite(n) else None for n in each] for b, each in images.items()},
        "images_per_s": {batch: round(1 / statistics.median(each)) for batch, each in speeds.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("KASOKU_DATA", "."), help="default: $KASOKU_DATA")
    parser.add_argument("--races", nargs="+", help="(default: all)")
    parser.add_argument("--seeds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="in which the sizes are timed (default: %(default)s)")
    parser.add_argument("--show", action="store_true", help="one training each, with its accuracies")
    arguments = parse(parser)
    chosen = {name: race for name, race in races(arguments.data).items() if name in (arguments.races or name)}
    if arguments.show:
        for name, race in chosen.items():
            began = time.perf_counter()
            images = images_to_target(race, race.dataset(), START, 0, show=True)
            print(f"{name}: {images:,} images, {time.perf_counter() - began:.1f} s with evaluation", flush=True)
        return 0
    each = {}
    for name, race in chosen.items():
        each[name] = ran(race, arguments.seeds, arguments.rounds)
        print(f"{name}: {each[name]}", flush=True)
    found = {name: figures["found_over_best"] for name, figures in each.items()}
    figures: dict[str, Any] = {
        "within": sum(ratio <= WITHIN for ratio in found.values()),
        "n": arguments.seeds,
        "worst": max(found.values()),
        "found_over_best": found,
        "search_over_best": {name: figures["search_over_best"] for name, figures in each.items()},
    }
    targets = {name: race.target for name, race in chosen.items()}
    parameters: dict[str, object] = {"sizes": SIZES, "start": START, "rounds": arguments.rounds, "targets": targets}
    finish("time_to_target", parameters, figures | each, CLAIMS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
