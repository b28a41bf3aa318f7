"""Finds the batch size of a job by measuring steps; the job itself does not change.

Note: ranks. Each rank measures a size alone, in its own sandbox, with its own share of the batch, so that no step waits
for another rank. Before and after each size all ranks agree on the elapsed time, on whether the size will fit, on
whether it did, and on the slowest rank's time, which is the time of a common step. The exchange of gradients is
measured once, separately, and added. So a rank that runs out of memory delays no other, and all choose the same size.
"""

import gc
import math
import random
import statistics
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Annotated, TypeVar

import numpy as np
import torch

from kasoku.config.recipe import Tune
from kasoku.core import Comm, Job, Range, checked
from kasoku.core.torch_internals import recompile_limit
from kasoku.distributed.consensus import ReportedElsewhereError, SharedInputError
from kasoku.tune.measurement import BRIEF, STEPS, BatchSizeResult, Measurement, SizeSearch, interval, out_of_memory
from kasoku.tune.strategies import Strategy, TimeToTarget
from kasoku.tune.trial import StepTimes, Trial

_MIN_IMAGES, _MAX_IMAGES = 8, 8192  # of a rank, by default
_TIME_SHARE = 3  # a size may take a third of the remaining time
_BACKWARD = 2 / 3  # of computing: the part that can hide communication
_EXCHANGES, _CHUNK_BYTES = 3, 25 * 2**20  # timed exchanges, of a chunk of the gradients
_COMPILED_FORMS = 10_000  # of a block, one for each shape, during the search
_DEFAULT = TimeToTarget()
_Images = Annotated[int, Range("images, or 0 to choose by the job", at_least=0)]
T = TypeVar("T")


@checked
def tune_batch_size(
    job: Job,
    strategy: Strategy = _DEFAULT,
    *,
    budget_s: Annotated[float, Range("seconds", above=0)] = Tune.budget,
    least: _Images = 0,
    most: _Images = 0,
    multiple: _Images = 0,
) -> BatchSizeResult:
    """Finds the best batch (images of a step, over all ranks and parts) for this job. Collective; drains the job.

    Steps run on copies of the job's model and optimizer, with its techniques, loss and data. The first step of a size
    is not counted; its time is the median of the next 20, or of as many as the time left permits. TimeToTarget and
    Throughput time a size for four steps, and again, as often as a decision needs it, up to 20. The rate rises from
    near 0 to its value after the warm-up; branches have rates that follow the batch. Afterwards model, optimizer,
    random states, statistics and data order are as before, bit for bit. All ranks get the same result.

    The copies leave out: GrowBatch, LowResolution and SkipEasy (the size itself is tried, with full images); Shares;
    the schedule of the rate; on several ranks VirtualRanks, and the exchange of gradients, which is timed once and
    added: in full, or with Overlap the part that two thirds of computing cannot hide. Hooks that were on the model
    before the job was created stay, later ones do not. A technique of your own is applied to the copy unless it
    declares `in_sandbox = False`.

    Args:
        job: its loader is one of kasoku.data.
        strategy: TimeToTarget, Throughput, EpochTimeMinimize or GpuUsageMaximize.
        budget_s: seconds after which the search ends with the best size so far; the first size is tried in any case.
        least: the smallest size; 0: 8 images a rank, or the job's own batch if that is less.
        most: the largest; 0: an epoch, at most 8,192 images a rank.
        multiple: sizes are multiples of it; 0: of ranks x parts (and of VirtualRanks' norm_batch, on one rank).

    Raises:
        InputError: for an empty range, a loader whose batch cannot change, and where no size can be trained.

    Costs: a second model and optimizer in memory during the search; with branches a third.
    """
    job.drain()
    with ExitStack() as random_states:  # restored at its end
        if torch.backends.mps.is_available():
            random_states.callback(torch.mps.set_rng_state, torch.mps.get_rng_state())
        random_states.callback(np.random.set_state, np.random.get_state())
        random_states.callback(random.setstate, random.getstate())
        random_states.enter_context(torch.random.fork_rng(range(torch.cuda.device_count())))
        result = _search(job, strategy, budget_s, (least, most, multiple))
    free_memory()  # of the copies
    return replace(result, strategy=type(strategy).__name__, budget_s=budget_s)


def _search(job: Job, strategy: Strategy, budget_s: float, sizes: tuple[int, int, int]) -> BatchSizeResult:
    trial = _on_all_ranks(job.comm, lambda: Trial(job, strategy.needs), "copy its model or read its data")
    if trial is None:
        kind = SharedInputError if job.comm.rank == 0 else ReportedElsewhereError
        short = kind("batch size: no memory for a copy of model and optimizer: choose the batch yourself")
        short.memory_short = True
        raise short
    compiled = any(technique.compiles_model for technique in job.applied)
    # beyond torch.compile's limit of compiled forms a block would run, and be timed, uncompiled
    with recompile_limit(_COMPILED_FORMS) if compiled else nullcontext():
        measure, ranks, sandbox = _Measurer(job, trial, budget_s), job.comm.size, trial.sandbox
        images, (least, most, multiple) = sandbox.loader.images, sizes
        groups = [technique.images_per_group or 1 for technique in job.applied] if ranks == 1 else []
        multiple = multiple or ranks * job.accumulate * math.prod(groups)
        least = least or max(multiple, min(_MIN_IMAGES * ranks, sandbox.start))
        most = min(most or _MAX_IMAGES * ranks, images)
        bounds = (sandbox.start, least, most, multiple)
        result = strategy.search(SizeSearch(measure, *bounds, images, budget_s, measure, measure.branch, ranks))
        own = result.batch / ranks / statistics.median(measure.timed[result.batch].steps_s)
        return replace(result, speeds=tuple(job.comm.gather_objects(own)) if ranks > 1 else ())


def free_memory() -> None:
    """Frees what nothing refers to any more, on the device too."""
    gc.collect()
    torch.cuda.empty_cache()  # if CUDA was used


def _on_all_ranks(comm: Comm, f: Callable[[], T], action: str) -> T | None:
    """f(), or None if memory is short on a rank; if it fails otherwise on a rank, all ranks raise. Collective."""
    result: T | None = None
    failure: Exception | None = None
    try:
        result = f()
    except Exception as error:  # all ranks must learn of it
        if not out_of_memory(error):  # the traceback of one that is refers to tensors
            failure = error
    ends = comm.gather_objects("failed" if failure else "out of memory" if result is None else "")
    if failure:
        raise failure
    if "failed" in ends:
        raise ReportedElsewhereError(f"batch size: another rank could not {action}, and prints why")
    if any(ends):
        free_memory()
        return None
    return result


class _Measurer:
    """Measures sizes on all ranks together. Also a clock that is equal on all ranks: `reduce` advances it."""

    def __init__(self, job: Job, trial: Trial, budget_s: float) -> None:
        self.job, self.trial, self.budget_s = job, trial, budget_s
        self.began_s, self.elapsed_s = job.clock.now(), 0.0
        self.timed: dict[int, StepTimes] = {}  # the steps of this rank at each size
        self.overlaps = any(technique.overlaps_backward for technique in job.applied)
        self.exchange_s = self._exchange() if job.comm.size > 1 else 0.0

    def now(self) -> float:
        """Seconds since the search began, at the last `reduce`."""
        return self.elapsed_s

    def __call__(self, batch: int) -> Measurement:
        """Measures a size. Raises the error of a step, unless memory is short; the other ranks raise InputError."""
        if self.reduce([float(not self.trial.memory.fits(batch))])[0]:
            return Measurement(batch, failed="it would not fit in memory")
        steps = BRIEF if self.trial.needs.brief else STEPS
        allowed_s = (self.budget_s - self.elapsed_s) / _TIME_SHARE
        run = partial(self.trial.run, batch, steps, allowed_s=allowed_s)
        ran = _on_all_ranks(self.job.comm, run, f"make a step with batch={batch}")
        if ran is None:
            self.reduce([])  # time has passed
            return Measurement(batch, failed="out of memory")
        before = self.timed.get(batch)
        if before and self.trial.needs.brief:
            ran = replace(ran, steps_s=before.steps_s + ran.steps_s, waits_s=before.waits_s + ran.waits_s)
        self.timed[batch] = ran
        times = [*interval(ran.steps_s), statistics.median(ran.waits_s), -len(ran.steps_s)]
        step_s, low_s, high_s, input_s, fewest = self.reduce(times)  # of the slowest rank
        (usage,) = self.reduce([ran.utilisation], op="mean")
        hidden_s = _BACKWARD * max(0.0, step_s - input_s) if self.overlaps else 0.0
        add_s = max(0.0, self.exchange_s - hidden_s)
        return Measurement(batch, step_s + add_s, low_s + add_s, high_s + add_s, input_s, usage, steps=-round(fewest))

    def branch(self, batch: int, rate: float, images: int) -> list[float]:
        """The means over the ranks of what their branches return; empty where memory is short. Collective."""
        run = partial(self.trial.branch, batch, rate, images)
        return self.reduce(_on_all_ranks(self.job.comm, run, f"train with batch={batch}") or [], op="mean")

    def reduce(self, values: list[float], *, op: str = "max") -> list[float]:
        """The maximum, or the mean, over the ranks; advances the common clock. Collective."""
        comm, passed_s = self.job.comm, self.job.clock.now() - self.began_s
        if comm.size == 1:
            self.elapsed_s = passed_s
            return values
        message = torch.tensor([*values, passed_s], dtype=torch.float64, device=self.trial.device)
        comm.all_reduce(message, op=op).wait()
        *reduced, passed_s = message.tolist()
        self.elapsed_s = max(self.elapsed_s, passed_s)
        return reduced

    def _exchange(self) -> float:
        """Seconds of averaging all gradients over the ranks. Collective."""
        total = sum(p.nbytes for p in self.trial.sandbox.model.parameters() if p.requires_grad)
        if not total:
            return 0.0
        chunk = torch.zeros(-(-min(total, _CHUNK_BYTES) // 4), device=self.trial.device)
        times_s = []
        for _ in range(1 + _EXCHANGES):  # the first one opens connections
            self.reduce([0.0])  # all ranks start together
            began = self.trial.watch.synchronize()
            self.job.comm.all_reduce(chunk, op="mean").wait()
            times_s.append(self.trial.watch.synchronize() - began)
        return self.reduce([statistics.median(times_s[1:]) * total / chunk.nbytes])[0]
