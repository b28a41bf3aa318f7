"""The learning-rate range test: which rates lower the loss, and from which one on it diverges."""

import copy
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from kasoku.config.recipe import Recipe, flat_settings
from kasoku.config.toml import parameters_of, resolve, table
from kasoku.core import InputError, Job
from kasoku.data.loading.loader import endless
from kasoku.tune.sandbox import Sandbox, undisturbed
from kasoku.tune.trial import make_step

_SMOOTHING = 0.9  # weight of the earlier steps in the smoothed loss
_DIVERGED = 4.0  # times the least smoothed loss so far, and above the first loss: diverged
_MIN_STEPS = 10


@dataclass(frozen=True)
class RateStep:
    """One step of the test."""

    factor: float  # on all rates
    loss: float
    smoothed: float  # over the steps so far


@dataclass(frozen=True)
class RangeTest:
    """The result of a range test; factors multiply the rate of every parameter group."""

    samples: tuple[RateStep, ...]
    diverged: float | None  # the factor at which the loss diverged; None: it did not
    spent_s: float
    in_time: bool  # False if the budget ended the test

    @property
    def steepest(self) -> float | None:
        """The factor at which the loss falls fastest along the logarithm of the rate; None if it never falls.

        Compares the mean losses of equally many steps before and after it, so that it is not behind the fall.
        """
        losses = [s.loss for s in self.samples if math.isfinite(s.loss)]
        near = max(2, len(losses) // 20)
        least = min(range(len(losses)), key=lambda i: self.samples[i].smoothed, default=0)
        falls = [  # not beyond the least loss, where losses fluctuate
            (sum(losses[i + 1 : i + 1 + near]) - sum(losses[i - near : i]), i)
            for i in range(near, min(len(losses) - near, least + 1))
        ]
        fall, at = min(falls, default=(0.0, 0))
        return self.samples[at].factor if fall < 0 else None

    @property
    def suggested(self) -> float | None:
        """The smaller of the steepest factor and a tenth of the factor of divergence; None if there is neither."""
        tenth = self.diverged / 10 if self.diverged else None
        if tenth is not None and tenth < self.samples[0].factor:
            return None  # it diverges from the start
        return min((factor for factor in (self.steepest, tenth) if factor), default=None)

    def as_json(self, lr: float, budget_s: float) -> dict[str, Any]:
        """The contents of tuning.json: rates as multiples of `lr`; None where there is none."""
        factors = {"chosen": self.suggested, "steepest": self.steepest, "diverged": self.diverged}
        return {
            "what": "lr",
            "strategy": "range test",
            **{name: None if factor is None else lr * factor for name, factor in factors.items()},
            "samples": [{"lr": lr * s.factor, "loss": s.loss, "smoothed": s.smoothed} for s in self.samples],
            "spent_s": round(self.spent_s, 3),
            "budget_s": budget_s,
        }


def rates_of(recipe: Recipe) -> dict[str, float]:
    """The rates among the settings of the recipe's optimizer, by path: `lr`, and names that end in `_lr`."""
    optimizer = recipe.optimizer
    defaults = {name: p.default for name, p in parameters_of(resolve(optimizer.use, "optimizer.use")).items()}
    settings = {name: table(value) for name, value in {**defaults, **optimizer.keys}.items()}
    flat = flat_settings(settings, "optimizer.").items()
    return {path: float(x) for path, x in flat if re.search(r"[._]lr$", path) and type(x) in (int, float)}


def range_test(
    job: Job,
    *,
    low: float = 1e-3,
    high: float = 1e2,
    steps: int = 100,
    budget_s: float = math.inf,
    rates: Sequence[float] | None = None,
) -> RangeTest:
    """Trains at rates that rise geometrically until the loss diverges, then restores the job. Collective.

    Afterwards weights, statistics, optimizer, data order, random states and the state of techniques are as before, bit
    for bit, as in a resumed run. Only counters are not restored: the trace, the ledger of Timed, the loader's
    statistics; and Overlap keeps buckets that it planned during the test. All ranks get the same result. A rank that
    fails leaves its peers within a step, so call `try_alone` first.

    `low` and `high`: the factors on all rates in the first and in the last step. `rates`: those of the parameter groups
    at factor 1, the current ones by default. Raises InputError for an empty range, too few steps, rates that are 0 or
    not one for each group, and a loader without a batch.

    Costs: a copy of the state during the test.
    Ref: Smith 2015 (arXiv 1506.01186), 3.3. The loss has diverged when its smoothed value is above four times its least
    and above the first loss.
    """
    if not 0 < low < high < math.inf:
        raise InputError(f"rates x {low:g} to {high:g}: an empty range; low must be above 0 and below high")
    if steps < _MIN_STEPS:
        raise InputError(f"steps={steps}: at least {_MIN_STEPS} are wanted")
    groups = job.optimizer.param_groups
    own = [float(group["lr"]) for group in groups] if rates is None else list(rates)
    if len(own) != len(groups):
        raise InputError(f"rates: {len(own)} for {len(groups)} parameter groups of the optimizer: one for each")
    if not any(own):
        raise InputError("all rates are 0 now: give the rates that the schedule multiplies")
    samples: list[RateStep] = []
    started, over = job.clock.now(), False
    diverged: float | None = None
    with undisturbed(job), untouched(job), closing(endless(job.loader)) as batches:
        job.model.train()
        for step in range(steps):
            factor = low * (high / low) ** (step / (steps - 1))
            for group, rate in zip(job.optimizer.param_groups, own, strict=True):
                group["lr"] = rate * factor
            _, losses = make_step(job, batches)
            own_loss, own_over = torch.stack(losses).float().mean(), job.clock.now() - started > budget_s
            message = torch.stack([own_loss, own_loss.new_tensor(float(own_over))])
            job.comm.all_reduce(message, op="mean").wait()
            loss, share_over = message.tolist()
            over = share_over > 0
            # the exponentially weighted mean of the losses so far
            before = samples[-1].smoothed * (1 - _SMOOTHING**step) if samples else 0.0
            smoothed = (_SMOOTHING * before + (1 - _SMOOTHING) * loss) / (1 - _SMOOTHING ** (step + 1))
            samples.append(RateStep(factor, loss, smoothed))
            least = min(s.smoothed for s in samples)
            if not math.isfinite(loss) or smoothed > max(_DIVERGED * least, samples[0].loss):
                diverged = diverged or factor
            if step and (over or diverged):  # at least two, or `Seeded` takes the next batch for a part of this step
                break
    return RangeTest(tuple(samples), diverged, job.clock.now() - started, in_time=not over or diverged is not None)


def try_alone(job: Job) -> None:
    """Runs one step of a copy without other ranks. Raises the errors of a step; changes nothing in the job."""
    with undisturbed(job), closing(Sandbox(job)) as sandbox:
        alone = sandbox.at(sandbox.start)
        try:
            alone.model.train()
            with closing(endless(alone.loader)) as batches:
                make_step(alone, batches)
        finally:
            alone.close()


@contextmanager
def untouched(job: Job) -> Iterator[None]:
    """Restores a copy of the job's state after the body, bit for bit; `undisturbed` restores random states."""
    job.drain()
    with ExitStack() as stack:
        stack.callback(job.load_state_dict, copy.deepcopy(job.state_dict()))
        for module in job.model.modules():
            stack.callback(setattr, module, "training", module.training)
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
                stack.callback(setattr, module, name, buffer)
                stack.callback(buffer.data.copy_, buffer.detach().clone())
        for p in job.model.parameters():
            stack.callback(setattr, p, "grad", p.grad)
            stack.callback(p.requires_grad_, p.requires_grad)
            stack.callback(p.data.copy_, p.detach().clone())
            p.grad = None
        stack.callback(job.drain)  # called first
        yield
