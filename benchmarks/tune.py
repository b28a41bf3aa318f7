"""How close do the strategies come to the fastest batch, and in what share of the time of an exhaustive sweep?

    python benchmarks/tune.py [--runs N] [--most N] [--rounds N] [--steps N] [--sweep-steps N] [--cases NAME ...]

Three trainings on this device, a small cifarnet on 32x32 images (the package's digits, enlarged): `network` as it is;
`cliff`: above CLIFF images forward is computed a second time, as where activations no longer fit and are recomputed, so
that the largest batch is slower than the best; `input`: an image takes SLEEP_S to read, on READERS threads.
The sweep: sizes 8 x 1.25^k up to --most, 30 steps each (2 of them not counted), in a plain loop of this script. Each
strategy searches from 8 to --most, beginning at START where it begins anywhere; [002]'s two end with the
sweep's time. Then the epochs at the size found by each, at the sweep's best and at its largest are measured again, in
turns, and each is compared with the sweep's best of the same round; medians over the rounds.
In each run, which has its own sweep and search, the worst of the three trainings counts; a figure is the median of the
runs. found_over_best_time: Throughput's epoch over that of the sweep's best (at most 1.02 is wanted; the sweep's best
is itself chosen by noisy medians, so below 1 is possible). tuning_over_sweep_time: seconds of its search, copies and
all, over those of the sweep (at most 0.15). largest_fit_over_best: the epoch at the largest size. For information, from
the first run only: usage_found_over_best, epochtime_found_over_best and target_epoch_over_best, the same of
GpuUsageMaximize, EpochTimeMinimize and TimeToTarget, which does not look for the fastest epoch.
`time_to_target.py` measures TimeToTarget by what it is for.
Result: records/. Why it matters: the largest batch that fits is not the fastest, and a search that takes as
long as a sweep is not worth having.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from common import finish, parse, spread
from kasoku.core import Batch, Job
from kasoku.data import Dataset, Items, Memory, digits, loader
from kasoku.device import Chosen, Device, choose
from kasoku.models import cifarnet
from kasoku.optim import sgd
from kasoku.tune import (
    BatchSizeResult,
    EpochTimeMinimize,
    GpuUsageMaximize,
    Strategy,
    Throughput,
    TimeToTarget,
    tune_batch_size,
)

LEAST, START, GROWTH = 8, 32, 1.25
WARM, COPIES, WIDTHS = 2, 8, (16, 32)
CLIFF, SLEEP_S, READERS = 192, 0.001, 2
CLAIMS = {
    "tune/batch_size/over_best": ("found_over_best_time", "epochtime_found_over_best", "usage_found_over_best",
                                  "target_epoch_over_best", "by_run"),
    "tune/batch_size/over_sweep_time": "tuning_over_sweep_time",
    "tune/batch_size/largest_over_best": "largest_fit_over_best",
}  # fmt: skip
THREADS = [0]  # of the CPU; 0: all cores
PATIENCE = 1.0  # of the sweep's time, for the strategies of [002]
STRATEGIES: dict[str, Strategy] = {
    "found": Throughput(),
    "target": TimeToTarget(),
    "epochtime": EpochTimeMinimize(),
    "usage": GpuUsageMaximize(),
}


class TwiceAbove(nn.Module):
    """A model that computes forward a second time for batches above a size."""

    def __init__(self, model: nn.Module, cliff: int) -> None:
        super().__init__()
        self.model, self.cliff = model, cliff

    def forward(self, images_NCHW: Tensor) -> Tensor:
        """Images to logits_NK."""
        if len(images_NCHW) > self.cliff:
            with torch.no_grad():
                self.model(images_NCHW)
        return self.model(images_NCHW)


class Slow:
    """Images of a set in memory, as a data set of one's own whose items take long to come."""

    def __init__(self, split: Memory) -> None:
        self.images_NHWC, self.targets = split.images_NHWC.numpy(), split.labels_N

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int):
        time.sleep(SLEEP_S)
        return self.images_NHWC[index], int(self.targets[index])


@dataclass(frozen=True)
class Case:
    """A training: its data, its model, and whether its images are slow to come."""

    name: str
    dataset: Dataset
    model: Callable[[], nn.Module]

    def job(self, batch: int) -> Job:
        """From new weights, always the same."""
        chosen = device()
        torch.manual_seed(0)
        batches = loader(self.dataset, "train", batch, device=chosen.device, threads=READERS)
        job = Job(self.model().to(chosen.device), lambda m: sgd(m, lr=0.01, momentum=0.9), loader=batches)
        return job.apply(*chosen.techniques)


def device() -> Chosen:
    return choose(Device(threads=THREADS[0]))


def network() -> nn.Module:
    return cifarnet(10, 3, widths=WIDTHS)


def cases() -> list[Case]:
    small = digits()
    large = small.train.images_NHWC.repeat_interleave(4, 1).repeat_interleave(4, 2).repeat(COPIES, 1, 1, 3)
    split = Memory(large.contiguous(), small.train.labels_N.repeat(COPIES))
    tests = Memory(split.images_NHWC[:64], split.labels_N[:64])
    enlarged = Dataset("digits", small.classes, split, tests, 3, (32, 32), small.mean * 3, small.std * 3)
    slow = Dataset("slow", small.classes, Items(Slow(split)), tests, 3, (32, 32), small.mean * 3, small.std * 3)
    return [
        Case("network", enlarged, network),
        Case("cliff", enlarged, lambda: TwiceAbove(network(), CLIFF)),
        Case("input", slow, network),
    ]


def forever(job: Job) -> Iterator[Batch]:
    while True:
        yield from job.loader


def step_seconds(case: Case, batch: int, steps: int) -> list[float]:
    """Seconds of steps of a plain loop, after WARM that do not count."""
    job = case.job(batch)
    seconds = []
    with closing(forever(job)) as batches:
        for i in range(WARM + steps):
            begin = time.perf_counter()
            x_NCHW, y_N = next(batches)
            job.loss(job.model(x_NCHW), y_N).backward()
            job.optimizer.step()
            job.optimizer.zero_grad()
            if x_NCHW.is_cuda:
                torch.cuda.synchronize()
            if i >= WARM:
                seconds.append(time.perf_counter() - begin)
    job.close()
    return seconds


def swept(case: Case, arguments: argparse.Namespace) -> tuple[dict[int, float], float]:
    """Seconds an image at each size of the sweep, and the seconds it took."""
    image_s, batch, begin = {}, float(LEAST), time.perf_counter()
    while round(batch) <= arguments.most:
        size = round(batch)
        image_s[size] = statistics.median(step_seconds(case, size, arguments.sweep_steps - WARM)) / size
        batch *= GROWTH
    return image_s, time.perf_counter() - begin


def searched(
    case: Case, arguments: argparse.Namespace, sweep_s: float, names: Iterable[str]
) -> dict[str, tuple[BatchSizeResult, float]]:
    """The result and the seconds of each strategy."""
    out = {}
    for name in names:
        strategy = STRATEGIES[name]
        budget_s = PATIENCE * sweep_s if name in ("epochtime", "usage") else max(60.0, sweep_s)
        job = case.job(START)
        begin = time.perf_counter()
        result = tune_batch_size(job, strategy, budget_s=budget_s, least=LEAST, most=arguments.most)
        out[name] = (result, time.perf_counter() - begin)
        job.close()
    return out


def judged(case: Case, arguments: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """A case: the sweep, the searches of these strategies, and the sizes again in turns."""
    image_s, sweep_s = swept(case, arguments)
    best, largest = min(image_s, key=lambda b: image_s[b]), max(image_s)
    print(f"{case.name}: sweep {sweep_s:.1f} s, best {best}", flush=True)
    results = searched(case, arguments, sweep_s, names)
    chosen = {name: result.batch for name, (result, _) in results.items()} | {"largest_fit": largest}
    again: dict[int, list[float]] = {batch: [] for batch in sorted({best, *chosen.values()})}
    for number in range(arguments.rounds):
        for batch in [*again][:: 1 if number % 2 else -1]:
            again[batch].append(statistics.median(step_seconds(case, batch, arguments.steps)) / batch)
    figures: dict[str, Any] = {
        "sweep_s": round(sweep_s, 2),
        "sweep_images_per_s": {size: round(1 / s) for size, s in image_s.items()},
        "best": best,
        "again_images_per_s": {size: spread([round(1 / s) for s in all_s]) for size, all_s in again.items()},
    }
    for name, batch in chosen.items():
        ratios = [round(mine / its, 4) for mine, its in zip(again[batch], again[best], strict=True)]
        over = {key: round(value, 4) for key, value in spread(ratios).items()}
        row: dict[str, object] = {"batch": batch, "over_best": over}
        if name in results:
            result, took_s = results[name]
            tried = [(s.batch, s.steps, round(s.images_per_s)) for s in result.samples]
            row |= {"over_sweep_time": round(took_s / sweep_s, 3), "in_time": result.in_time, "tried": tried}
        figures[name] = row
        print(f"{case.name}: {name} {row}, best {best}", flush=True)
    return figures


def worst_training(run: dict[str, dict[str, Any]], name: str, key: str) -> float:
    values = [figures[name][key] for figures in run.values()]
    return float(max(v["median"] if isinstance(v, dict) else v for v in values))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="sweeps and searches of every training")
    parser.add_argument("--most", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5, help="in which the sizes of a run are measured again")
    parser.add_argument("--steps", type=int, default=8, help="of a size in a round")
    parser.add_argument("--sweep-steps", type=int, default=30)
    parser.add_argument("--threads", type=int, default=0, help="of the CPU (default: all cores)")
    parser.add_argument("--cases", nargs="+", choices=("network", "cliff", "input"), help="(default: all)")
    arguments = parse(parser)
    THREADS[0] = arguments.threads
    if arguments.runs < 1:
        parser.error(f"--runs {arguments.runs}: at least 1 is wanted")
    chosen = [case for case in cases() if case.name in (arguments.cases or case.name)]
    runs = []
    for number in range(arguments.runs):
        names = [*STRATEGIES] if number == 0 else ["found"]
        runs.append({case.name: judged(case, arguments, names) for case in chosen})
    figures: dict[str, Any] = {
        "found_over_best_time": spread([worst_training(run, "found", "over_best") for run in runs]),
        "found_over_best_bound": 1.02,
        "tuning_over_sweep_time": spread([worst_training(run, "found", "over_sweep_time") for run in runs]),
        "tuning_over_sweep_bound": 0.15,
        "largest_fit_over_best": spread([worst_training(run, "largest_fit", "over_best") for run in runs]),
        "by_run": {case.name: [run[case.name]["found"]["over_best"]["median"] for run in runs] for case in chosen},
    }
    for name in ("usage", "epochtime", "target"):
        key = f"{name}_found_over_best" if name != "target" else "target_epoch_over_best"
        figures[key] = worst_training(runs[0], name, "over_best")
        figures[f"{name}_over_sweep_time"] = worst_training(runs[0], name, "over_sweep_time")
    parameters: dict[str, Any] = {
        **{key: value for key, value in vars(arguments).items() if key not in ("cases", "threads")},
        "cases": [*runs[0]], "least": LEAST, "start": START, "growth": GROWTH, "warm": WARM, "widths": WIDTHS,
        "cliff": CLIFF, "sleep_s": SLEEP_S, "readers": READERS, "patience": PATIENCE,
        "threads": torch.get_num_threads(),
    }  # fmt: skip
    finish("tune", parameters, figures | {"each": runs}, CLAIMS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
