"""Does a batch that grows, by a schedule that was derived and not tuned, save updates at the same accuracy?

    python benchmarks/grow.py [--seeds N] [--images N] [--epochs N] [--budget SECONDS] [--base N]

A small cifarnet on the first images of Fashion-MNIST, SGD, a linear decay of the rate to 0. Constant batches: SIZES,
rates in proportion. The growing batch: a pilot trains at the batch --base; at the start of each later epoch
`tune_batch_size(job, TimeToTarget())` tries branches from that state, and the schedule takes the largest of SIZES whose
branch needs at most CRITICAL times the images of the base's. It never shrinks. GrowBatch follows the schedule, and the
rate grows with the batch. Trainings of all sides alternate, seed by seed; evaluations are not timed.
The best constant batch has the highest mean accuracy on all 10,000 test images.
updates_over_best: updates of the growing batch over those of the best constant one (at most 0.8 is wanted).
seconds_over_best: the same of seconds of training, the median over the seeds (at most 1).
top1_minus_best: its accuracy minus the best's, in points, with a 95 % interval over the seeds (within 0.2 is wanted).
pilot_s, searches_s: seconds of the pilot, and of its searches.
Why it matters: late in training a large batch learns as much from an image as a small one, with fewer updates and, on
many ranks, less communication.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from common import finish, parse, spread
from kasoku.core import Job, Linear, Schedule
from kasoku.data import Dataset, GrowBatch, Memory, fashion_mnist, loader
from kasoku.device import Device, choose
from kasoku.models import cifarnet
from kasoku.optim import Rate, sgd
from kasoku.report.significance import interval
from kasoku.training.evaluation import evaluate
from kasoku.tune import TimeToTarget, tune_batch_size

SIZES, CRITICAL, WARMUP = (16, 32, 64, 128, 256, 512), 1.1, 0.5
CLAIMS = {
    "tune/grow/updates_over_best": ("updates_over_best", "best", "batches"),
    "tune/grow/seconds_over_best": ("seconds_over_best",),
    "tune/grow/top1_minus_best": ("top1_minus_best", "low", "high"),
}


@dataclass(frozen=True)
class Steps(Schedule):
    """A factor for each epoch; the last one stays."""

    factors: tuple[int, ...] = (1,)

    def after(self, epoch: float) -> float:
        return float(self.factors[min(len(self.factors) - 1, math.floor(epoch + 1e-9))])


@dataclass(frozen=True)
class Grown(Steps):
    """A linear decay, times a factor for each epoch."""

    def after(self, epoch: float) -> float:
        return super().after(epoch) * Linear(warmup=WARMUP, epochs=self.epochs)(max(epoch, WARMUP))


def dataset_of(data: Path, images: int) -> Dataset:
    whole = fashion_mnist(str(data / "fashion_mnist"))
    assert isinstance(whole.train, Memory)
    return replace(whole, train=Memory(whole.train.images_NHWC[:images], whole.train.labels_N[:images]))


def job_of(dataset: Dataset, batch: int, epochs: int, seed: int, factors: tuple[int, ...] = (1,)) -> Job:
    """A training whose rate is in proportion to the batch."""
    chosen = choose(Device())
    torch.manual_seed(seed)
    model = cifarnet(10, dataset.channels, widths=(16, 32)).to(chosen.device)
    batches = loader(dataset, "train", batch, seed=seed, device=chosen.device)
    job = Job(model, lambda m: sgd(m, lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4), loader=batches)
    grows = [GrowBatch(Steps(factors=factors), at_once=SIZES[-1])] if max(factors) > 1 else []
    rate = Rate(Grown(warmup=WARMUP, epochs=epochs, factors=factors), batch / 64)
    return job.apply(*chosen.techniques, *grows, rate)


def train_epoch(job: Job) -> float:
    """An epoch; its seconds."""
    began = time.perf_counter()
    for passes, (x_NCHW, y_N) in enumerate(job.loader, 1):
        job.backward(job.loss(job.model(x_NCHW), y_N))
        if passes % job.accumulate == 0:
            job.optimizer.step()
            job.optimizer.zero_grad()
    return time.perf_counter() - began


def trained(job: Job, epochs: int, test: Any) -> tuple[float, float, int]:
    """Top-1 in points, seconds, and updates of a training."""
    with closing(job):
        seconds = sum(train_epoch(job) for _ in range(epochs))
        with job.evaluation() as judged:
            return 100 * evaluate(judged, test).top1, seconds, job.steps


def derived(dataset: Dataset, arguments: argparse.Namespace) -> tuple[tuple[int, ...], list[dict[int, float]], float]:
    """The factor on the base of each epoch; the images that each size needs, by epoch; seconds of the searches."""
    factors, curves, searches_s = [1], list[dict[int, float]](), 0.0
    with closing(job_of(dataset, arguments.base, arguments.epochs, 1000)) as job:
        for epoch in range(1, arguments.epochs):
            train_epoch(job)
            began = time.perf_counter()
            result = tune_batch_size(job, TimeToTarget(), budget_s=arguments.budget, least=SIZES[0], most=SIZES[-1])
            searches_s += time.perf_counter() - began
            curve = dict(sorted(zip((s.batch for s in result.samples), result.epochs, strict=False)))
            good = [b for b, n in curve.items() if n <= CRITICAL * curve.get(arguments.base, 1.0)]
            largest = max([b for b in good if b in SIZES], default=arguments.base)
            factors.append(max(factors[-1], largest // arguments.base))
            curves.append({b: round(n, 3) for b, n in curve.items()})
            print(f"epoch {epoch}: {curves[-1]}: {arguments.base * factors[-1]} images; {result.why}", flush=True)
    return tuple(factors), curves, searches_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("KASOKU_DATA", "."), help="default: $KASOKU_DATA")
    parser.add_argument("--seeds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--images", type=int, default=20_000, help="of training (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=6, help="default: %(default)s")
    parser.add_argument("--budget", type=float, default=40, help="seconds of a search (default: %(default)s)")
    parser.add_argument("--base", type=int, default=64, choices=SIZES, help="the first batch of the growing side")
    arguments = parse(parser)
    dataset = dataset_of(arguments.data, arguments.images)
    test = loader(dataset, "test", 1000)
    began = time.perf_counter()
    factors, curves, searches_s = derived(dataset, arguments)
    pilot_s = time.perf_counter() - began
    sides: dict[str, tuple[int, tuple[int, ...]]] = {str(batch): (batch, (1,)) for batch in SIZES}
    sides["grown"] = (arguments.base, factors)
    top1: dict[str, list[float]] = {side: [] for side in sides}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    updates: dict[str, int] = {}
    for seed in range(arguments.seeds):
        for side in [*sides][:: 1 if seed % 2 == 0 else -1]:
            batch, own = sides[side]
            job = job_of(dataset, batch, arguments.epochs, seed, own)
            score, took_s, updates[side] = trained(job, arguments.epochs, test)
            top1[side].append(score)
            seconds[side].append(took_s)
            print(f"seed {seed}, {side}: {score:.2f} %, {took_s:.1f} s, {updates[side]} updates", flush=True)
    best = max((side for side in sides if side != "grown"), key=lambda side: statistics.fmean(top1[side]))
    differences = [ours - its for ours, its in zip(top1["grown"], top1[best], strict=True)]
    mean, low, high = interval(differences) if len(differences) > 1 else (differences[0], -math.inf, math.inf)
    ratios = [ours / its for ours, its in zip(seconds["grown"], seconds[best], strict=True)]
    figures: dict[str, object] = {
        "updates_over_best": round(updates["grown"] / updates[best], 3),
        "seconds_over_best": round(statistics.median(ratios), 3),
        "seconds_over_best_spread": [round(min(ratios), 3), round(max(ratios), 3)],
        "top1_minus_best": round(mean, 3),
        "low": round(low, 3),
        "high": round(high, 3),
        "n": arguments.seeds,
        "best": int(best),
        "batches": [arguments.base * factor for factor in factors],
        "curves": curves,
        "pilot_s": round(pilot_s, 1),
        "searches_s": round(searches_s, 1),
        "top1": {side: round(statistics.fmean(values), 3) for side, values in top1.items()},
        "seconds": {side: spread([round(s, 2) for s in values]) for side, values in seconds.items()},
        "updates": updates,
    }
    names = ("images", "epochs", "budget", "base")
    parameters: dict[str, object] = {"sizes": SIZES, **{name: getattr(arguments, name) for name in names}}
    finish("grow", {**parameters, "threads": torch.get_num_threads()}, figures, CLAIMS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
