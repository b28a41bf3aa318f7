"""What batch does each strategy find for a recipe, where does it stop, and how far is it from a sweep's best?

    python benchmarks/batch_patterns.py RECIPE [--set PATH=VALUE ...] [--sizes N ...] [--sweep-only] [--rounds N]
        [--budget SECONDS] [--most N] [--turns N] [--starts NAME=N ...] [--brief]

The experiments of [002] on one training, given by a recipe: those of documents/002_*.toml are the four patterns
{small images in memory, photos from files} x {VGG-16, ResNet-50}. Decoded photos are not kept, as those of ImageNet
would not fit in memory. Each round has a seed of its own:
1. the sweep: --sizes (such as 8 16, or 10:500:10) one after the other, 20 steps each (--brief: 5), with the time of an
   image and the utilisation;
2. each strategy from the recipe's batch (or --starts) up to --most, in at most --budget seconds;
3. the sizes that were found and the sweep's best again, in turns, from which `over_best` is taken.
Medians over the rounds; with two or more rounds also bars of a standard deviation (`*_low`, `*_high`).
Keys: `sweep` with lines over the batch: ms_by_batch (of an image), use_by_batch and wait_by_batch (percent of the
device used, and of the step spent waiting for images), correlation (of the first two), time_settles (the smallest size
within 5 % of the least time), use_settles (within 1 point of the most use); and for each strategy (usage, epoch_time,
throughput, target): batch, seconds, in_time (share of rounds that its budget did not end), over_best, over_sweep_time,
use_start (percent), gain (percent by which an epoch is shorter than at the first size), cliff (the least ratio of the
times of an image in two loops that follow each other, the second with at most 15 % more images), use_sd (points);
converged (share of rounds that its own test of convergence ended: usage and epoch_time have one), and of these rounds
alone loops, converged_batch, converged_over_best, use_end (percent) and settled (share of the size found at which the
gain was within 5 points of the last); and lines {use,gain}_by_{loop,batch}.
`unchanged`: whether the model has the bits that it had before.
On a CPU its threads sleep where they wait for each other (OMP_WAIT_POLICY): the time in which they would spin counts as
use, and every size would use all of the device.
Result: records/documents/002.json. Why it matters: [002] asked which of its two strategies finds the fastest batch.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from common import finish
from kasoku.config.recipe import Recipe, load
from kasoku.core import InputError, Job
from kasoku.training.trainer import build
from kasoku.tune import (
    BatchSizeResult,
    EpochTimeMinimize,
    GpuUsageMaximize,
    Measurement,
    Needs,
    SizeSearch,
    Strategy,
    Throughput,
    TimeToTarget,
    tune_batch_size,
)

STRATEGIES: dict[str, type[Strategy]] = {
    "usage": GpuUsageMaximize,
    "epoch_time": EpochTimeMinimize,
    "throughput": Throughput,
    "target": TimeToTarget,
}
NEAR, FULL = 5.0, 1.0  # percent of the least time, and points of the most use, at which a curve has settled
SMALL = 1.15  # growth of the batch across a cliff, at most: that of [002] is 96 to 106
ENDLESS_S = 1e9
Points = list[list[float]]


@dataclass
class Sweep:
    """A strategy that measures all of its sizes."""

    sizes: Sequence[int]
    needs: Needs

    def search(self, tries: SizeSearch) -> BatchSizeResult:
        for size in self.sizes:
            tries.take(size)
        return tries.result(min(tries.good, key=lambda s: s.step_s / s.batch).batch, "of a sweep")


@dataclass
class Observed:
    """A strategy that keeps each of its loops, also those that measure a size again."""

    strategy: Strategy
    loops: list[Measurement] = field(default_factory=list)

    @property
    def needs(self) -> Needs:
        return self.strategy.needs

    def search(self, tries: SizeSearch) -> BatchSizeResult:
        def measure(batch: int) -> Measurement:
            sample = tries.measure(batch)
            if not sample.failed:
                self.loops.append(sample)
            return sample

        return self.strategy.search(replace(tries, measure=measure))


@dataclass(frozen=True)
class Search:
    """One search: its result and its loops."""

    result: BatchSizeResult
    loops: list[Measurement]

    @property
    def end(self) -> Measurement:
        """The last measurement of the size that was found."""
        return next(s for s in reversed(self.loops) if s.batch == self.result.batch)

    def gain(self, sample: Measurement) -> float:
        """Percent by which an epoch is shorter than at the first size."""
        return 100 * (1 - self.loops[0].images_per_s / sample.images_per_s)

    @property
    def converged(self) -> bool:
        """Whether its own test ended it, and neither its time nor a limit of the batch."""
        return "converged in" in self.result.why

    @property
    def cliffs(self) -> list[float]:
        """The time of an image over that of the loop before, where the batch grew a little."""
        return [
            before.images_per_s / after.images_per_s
            for before, after in itertools.pairwise(self.loops)
            if before.batch < after.batch <= SMALL * before.batch
        ]

    @property
    def settled(self) -> float:
        last = self.gain(self.end)
        return next(s for s in self.loops if self.gain(s) >= last - NEAR).batch / self.result.batch


@dataclass
class Round:
    """What one round found."""

    sweep: list[Measurement] = field(default_factory=list)
    sweep_s: float = 0.0
    searches: dict[str, Search] = field(default_factory=dict)
    over_best: dict[str, float] = field(default_factory=dict)
    unchanged: bool = True


def job_of(recipe: Recipe, batch: int) -> Job:
    """The recipe's training at a batch; photos are decoded anew in each epoch."""
    job = build(replace(recipe, batch=batch)).job
    job.plain_loader.configure(cache_bytes=0)
    return job


def bits(job: Job) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in job.model.state_dict().items()}


def one_round(recipe: Recipe, arguments: argparse.Namespace) -> Round:
    """The sweep, the searches, and the sizes again in turns."""
    job, found = job_of(recipe, recipe.batch), Round()
    before = bits(job)

    def measured(sizes: Sequence[int]) -> BatchSizeResult:
        needs = Needs(brief=arguments.brief, watch_s=float(torch.cuda.is_available()))
        strategy = Sweep(sizes, needs)
        return tune_batch_size(job, strategy, budget_s=ENDLESS_S, least=1, most=max(sizes))

    swept = measured(arguments.sizes)
    found.sweep, found.sweep_s = sorted(swept.samples, key=lambda s: s.batch), swept.spent_s
    print(f"sweep: {swept.spent_s:.1f} s, best {swept.batch}", flush=True)
    if not arguments.sweep_only:
        for name, strategy in STRATEGIES.items():
            found.searches[name] = searched(recipe, job, name, strategy(), arguments)
        again: dict[int, list[float]] = defaultdict(list)
        sizes = sorted({swept.batch, *(search.result.batch for search in found.searches.values())})
        for turn in range(arguments.turns):
            for sample in measured(sizes[:: -1 if turn % 2 else 1]).samples:
                again[sample.batch].append(1 / sample.images_per_s)
        for name, search in found.searches.items():
            pairs = zip(again[search.result.batch], again[swept.batch], strict=True)
            found.over_best[name] = statistics.median(mine / best for mine, best in pairs)
    after = bits(job)
    found.unchanged = all(torch.equal(x, after[name]) for name, x in before.items())
    job.close()
    return found


def searched(recipe: Recipe, job: Job, name: str, strategy: Strategy, arguments: argparse.Namespace) -> Search:
    """One strategy, from its own first size where --starts gives it one."""
    start = dict(arguments.starts).get(name)
    own = job_of(recipe, start) if start else job
    observed = Observed(strategy)
    least = min(arguments.least, start or arguments.least)
    result = tune_batch_size(own, observed, budget_s=arguments.budget, least=least, most=arguments.most)
    if start:
        own.close()
    print(f"{name}: {result.batch}, {len(observed.loops) - 1} loops, {result.spent_s:.1f} s: {result.why}", flush=True)
    return Search(result, observed.loops)


# ---- figures


def lines(name: str, points: Iterable[tuple[float, float]], rounds: int) -> dict[str, object]:
    """The mean at each x as a line; with several rounds also lines of a standard deviation below and above."""
    values: dict[float, list[float]] = defaultdict(list)
    for x, y in points:
        values[x].append(y)
    middle = {x: statistics.fmean(ys) for x, ys in sorted(values.items())}
    sd = {x: statistics.pstdev(ys) for x, ys in values.items()}

    def line(sign: int) -> Points:
        return [[x, round(y + sign * sd[x], 4)] for x, y in middle.items()]

    several = rounds > 1
    return {name: line(0), f"{name}_low": line(-1) if several else None, f"{name}_high": line(1) if several else None}


def of_sweep(rounds: Sequence[Round]) -> dict[str, object]:
    """The curves of the sweeps, and where they settle."""
    n = len(rounds)
    ms = [(s.batch, 1e3 * s.step_s / s.batch) for r in rounds for s in r.sweep]
    use = [(s.batch, 100 * s.utilisation) for r in rounds for s in r.sweep]
    wait = [(s.batch, 100 * s.input_s / s.step_s) for r in rounds for s in r.sweep]
    figures = lines("ms_by_batch", ms, n) | lines("use_by_batch", use, n) | lines("wait_by_batch", wait, n)
    times, uses = dict(map(tuple, figures["ms_by_batch"])), dict(map(tuple, figures["use_by_batch"]))
    least, most = min(times.values()), max(uses.values())
    several = len(times) > 1 and len({*times.values()}) > 1 and len({*uses.values()}) > 1
    return figures | {
        "best": min(times, key=lambda b: times[b]),
        "seconds": round(statistics.median(r.sweep_s for r in rounds), 2),
        "correlation": statistics.correlation([*uses.values()], [*times.values()]) if several else None,
        "time_settles": next(b for b, t in times.items() if t <= least * (1 + NEAR / 100)),
        "use_settles": next(b for b, u in uses.items() if u >= most - FULL),
        "largest_over_best": times[max(times)] / least,
    }


def of_strategy(name: str, rounds: Sequence[Round]) -> dict[str, object]:
    """What a strategy found, in the median round."""
    searches = [r.searches[name] for r in rounds]

    converged = [each for each in searches if each.converged]

    def middle(values: Iterable[float]) -> float | None:
        found = [*values]
        return round(statistics.median(found), 4) if found else None

    use_by_loop = [(i, 100 * s.utilisation) for each in searches for i, s in enumerate(each.loops)]
    use_by_batch = [(s.batch, 100 * s.utilisation) for each in searches for s in each.loops]
    gain_by_loop = [(i, each.gain(s)) for each in searches for i, s in enumerate(each.loops)]
    gain_by_batch = [(s.batch, each.gain(s)) for each in searches for s in each.loops]
    at_size: Mapping[float, list[float]] = defaultdict(list)
    for batch, used in use_by_batch:
        at_size[batch].append(used)
    several = [statistics.stdev(used) for used in at_size.values() if len(used) > 1]
    n, figures = len(rounds), dict[str, object]()
    for key, points in {"use_by_loop": use_by_loop, "use_by_batch": use_by_batch, "gain_by_loop": gain_by_loop,
                        "gain_by_batch": gain_by_batch}.items():  # fmt: skip
        figures |= lines(key, points, n)
    return figures | {
        "batch": statistics.median_low(each.result.batch for each in searches),
        "batches": [each.result.batch for each in searches],
        "seconds": middle(each.result.spent_s for each in searches),
        "in_time": statistics.fmean(each.result.in_time for each in searches),
        "converged": len(converged) / len(searches),
        "converged_batch": statistics.median_low(each.result.batch for each in converged) if converged else None,
        "loops": middle(len(each.loops) - 1 for each in converged),
        "why": searches[0].result.why,
        "over_best": middle(r.over_best[name] for r in rounds),
        "converged_over_best": middle(r.over_best[name] for r in rounds if r.searches[name].converged),
        "over_sweep_time": middle(r.searches[name].result.spent_s / r.sweep_s for r in rounds),
        "use_start": middle(100 * each.loops[0].utilisation for each in searches),
        "use_end": middle(100 * each.end.utilisation for each in converged),
        "use_sd": middle(several if n > 1 else []),
        "gain": middle(each.gain(each.end) for each in searches),
        "cliff": middle(min(each.cliffs) for each in searches if each.cliffs),
        "settled": middle(each.settled for each in converged),
    }


def pair(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    if name not in STRATEGIES or not value.isdigit():
        raise argparse.ArgumentTypeError(f"{text}: NAME=N with one of {', '.join(STRATEGIES)}")
    return name, int(value)


def sizes_of(text: str) -> list[int]:
    """One size, or LOW:HIGH:STEP with both ends."""
    low, high, step = map(int, (text if ":" in text else f"{text}:{text}:1").split(":"))
    return [*range(low, high + 1, step)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("recipe", help="such as documents/002_vgg16_small")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="a setting of the recipe")
    parser.add_argument("--sizes", type=sizes_of, nargs="+", default=[[2**k] for k in range(1, 9)], metavar="N",
                        help="of the sweep; LOW:HIGH:STEP for many")  # fmt: skip
    parser.add_argument("--sweep-only", action="store_true", help="no strategies")
    parser.add_argument("--rounds", type=int, default=1, help="repeats of everything")
    parser.add_argument("--turns", type=int, default=2, help="in which the sizes that were found are measured again")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of a strategy")
    parser.add_argument("--least", type=int, default=4, help="the smallest size of a strategy")
    parser.add_argument("--most", type=int, default=512, help="the largest")
    parser.add_argument("--starts", type=pair, nargs="+", default=[], metavar="NAME=N", help="a strategy's first size")
    parser.add_argument("--brief", action="store_true", help="sweep with 5 steps of a size, not 20")
    arguments = parser.parse_args()
    arguments.sizes = [size for some in arguments.sizes for size in some]
    if "OMP_WAIT_POLICY" not in os.environ:  # is read where torch is loaded
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"})
    try:
        recipe = load(arguments.recipe, arguments.set)
        rounds = [one_round(replace(recipe, seed=recipe.seed + i), arguments) for i in range(arguments.rounds)]
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    figures: dict[str, object] = {"sweep": of_sweep(rounds), "unchanged": all(r.unchanged for r in rounds)}
    if not arguments.sweep_only:
        figures |= {name: of_strategy(name, rounds) for name in STRATEGIES}
    finish("batch_patterns", {**vars(arguments), "threads": torch.get_num_threads()}, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
