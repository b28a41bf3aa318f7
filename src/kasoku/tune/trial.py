"""Times a few steps of one batch size in the sandbox, and estimates the gradient noise scale from some of them.

The scale is the number of images in a gradient beyond which more images add little.

Note: the sandbox is a copy of a job whose steps cost as much as the job's own and change nothing in the job. Techniques
attach closures to the model, and these refer to the job. So the model and the optimizer's state are copied without them
(`Job.patches`), and the techniques are applied to the copy, except those that declare `in_sandbox = False`. Its layout,
weights and frozen parameters are the model's. The copy has no other ranks, so a failing rank delays no other.
"""

import copy
import itertools
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kasoku.core import Batch, InputError, Job, Solo
from kasoku.core.clock import Stopwatch
from kasoku.core.hardware import Utilization
from kasoku.data import Loader
from kasoku.data.loading.loader import endless
from kasoku.tune.measurement import MemoryForecast, Needs

_RAMP = 100  # steps in which a copy's rate rises
_WARM_UP = 2  # steps at most that are not timed: they allocate memory, choose and compile kernels
_MIN_STEPS = 3  # when time is short
_NOISE_PASSES = 4  # gradients whose lengths are compared
_TIMED_S = 0.02  # shorter steps are timed several at once: other processes interrupt some and not the next
_EVERY_S = 0.2  # NVML renews its figure of utilization every sixth of a second to every second
_NOISE_S = 0.2  # of measuring noise, with at least one measurement


def copy_of(job: Job) -> tuple[nn.Module, Optimizer]:
    """Copies of the job's model and optimizer without the hooks and patches of techniques. Drains the job."""
    job.drain()
    memo: dict[int, Any] = {}
    with ExitStack() as stack:  # which puts hooks and patches back: they refer to the job
        for thing, name, old in reversed(job.patches.attributes):
            if isinstance(thing, nn.Module):
                stack.callback(setattr, thing, name, getattr(thing, name))
                delattr(thing, name)
                if old is not ...:
                    setattr(thing, name, old)
        for module in job.model.modules():
            for name, hooks in vars(module).items():
                if name.endswith("_hooks") and isinstance(hooks, dict):
                    stack.callback(hooks.update, dict(hooks))
                    stack.callback(hooks.clear)  # called before: the order stays
                    for number in [number for number in hooks if number >= job.patches.first_hook]:
                        del hooks[number]  # torch gave it to a hook of a technique
        model: nn.Module = copy.deepcopy(job.model, memo)
    return model, _copied_optimizer(job.optimizer, memo, job.patches.first_hook)


def _copied_optimizer(own: Optimizer, memo: dict[int, Any], first_hook: int) -> Optimizer:
    """An optimizer of the same rule and state for the parameters that `memo` has copied."""
    twin: Optimizer = object.__new__(type(own))
    for name, value in vars(own).items():
        if name.endswith("_hooks"):
            kept = OrderedDict((key, hook) for key, hook in value.items() if key < first_hook)
            vars(twin)[name] = kept
        elif name != "step":  # patched by schedulers, which count steps
            vars(twin)[name] = copy.deepcopy(value, memo)
    return twin


class Sandbox:
    """Copies of a job's model, optimizer and loader, for any batch size. Use it within `undisturbed`.

    Raises InputError for a loader that is not one of kasoku.data, whose batch cannot change.
    """

    def __init__(self, job: Job) -> None:
        plain = job.plain_loader
        if not isinstance(plain, Loader):
            advice = "take kasoku.data.loader, or time its sizes one by one"
            raise InputError(f"loader: a {type(plain).__name__} cannot change its batch: {advice}")
        self.job = job
        self.model, self.optimizer = copy_of(job)
        scheduled = [technique.warmed_up_rates(job) for technique in job.applied]
        own = [group["lr"] for group in job.optimizer.param_groups]
        self.rates = next((rates for rates in scheduled if rates is not None), own)
        self.steps = 0
        self.loader = plain.sandbox()
        self.start = plain.batch * job.accumulate // plain.parts  # images of the job's own step, over all ranks

    def renew(self) -> None:
        """Restores the job's weights and state, in the same memory. All jobs from `at` must be closed."""
        job = self.job
        self.optimizer.state.clear()  # frees its memory first
        memo: dict[int, Any] = {}
        whole, twins = ([*model.parameters(), *model.buffers()] for model in (job.model, self.model))
        with torch.no_grad():
            for own, twin in zip(whole, twins, strict=True):
                twin.copy_(own)
                memo[id(own)] = twin
        self.optimizer = _copied_optimizer(job.optimizer, memo, job.patches.first_hook)
        self.steps = 0

    def at(self, batch: int) -> Job:
        """A job for steps of `batch` images over all ranks; the caller closes it."""
        share = min(1.0, (self.steps + 1) / _RAMP) * min(1.0, batch / self.start)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * share
        job, loader, parts = self.job, self.loader, self.job.accumulate
        patched: list[Any] = [old for thing, name, old in job.patches.attributes if thing is job and name == "loss"]
        loss = [*patched, job.loss][0]  # without patches of techniques
        loader.configure(batch=batch * loader.parts // parts)
        loader.seek(loader.epoch + 1, 0)  # other images: those of the size before lie in memory now
        loader.executor = loader.executor.fork()  # which tunes its number of threads anew
        alone = Job(self.model, self.optimizer, loader=loader, loss=loss, comm=Solo(job.clock), accumulate=parts)
        techniques = [t for t in job.applied if t.in_sandbox and not (t.groups_span_ranks and job.comm.size > 1)]
        try:
            return alone.apply(*techniques)
        except BaseException:  # such as out of memory: remove its hooks before a smaller size is tried
            alone.close()
            raise


@contextmanager
def undisturbed() -> Iterator[None]:
    """Restores random states after the body."""
    with ExitStack() as stack:
        if torch.backends.mps.is_available():
            stack.callback(torch.mps.set_rng_state, torch.mps.get_rng_state())
        stack.callback(np.random.set_state, np.random.get_state())
        stack.callback(random.setstate, random.getstate())
        stack.enter_context(torch.random.fork_rng(range(torch.cuda.device_count())))
        yield


@dataclass(frozen=True)
class NoiseEstimate:
    """An estimate of the gradient of all images, from gradients of parts of a batch.

    Args:
        signal: estimate of |G|^2, the squared length of the whole gradient; may fall below 0 by chance.
        trace: estimate of tr(Sigma), the variance of one image's gradient, summed over all parameters.

    Maths: a mean over B images has E|G_B|^2 = |G|^2 + tr(Sigma) / B. Two sizes, small s and big b, give
        |G|^2 = (b |G_b|^2 - s |G_s|^2) / (b - s) and tr(Sigma) = (|G_s|^2 - |G_b|^2) / (1/s - 1/b), both
        unbiased. Their ratio is not, so each is averaged on its own first.
    Ref: McCandlish et al. 2018 (arXiv 1812.06162), appendix A.1.
    """

    signal: float
    trace: float

    @property
    def scale(self) -> float:
        """tr(Sigma) / |G|^2, in images; infinite if noise hides the signal."""
        return max(0.0, self.trace) / self.signal if self.signal > 0 else math.inf


def mean(noises: Sequence[NoiseEstimate | None]) -> NoiseEstimate | None:
    """The mean of the finite estimates; None if there is none."""
    finite = [n for n in noises if n and math.isfinite(n.signal + n.trace)]
    return NoiseEstimate(fmean(n.signal for n in finite), fmean(n.trace for n in finite)) if finite else None


def noise_of_parts(params: Sequence[Tensor], backwards: Iterable[int]) -> NoiseEstimate | None:
    """The estimate from the gradients of equal parts of a batch; None with fewer than two parts.

    Args:
        params: the parameters; their gradients are cleared after each part.
        backwards: makes the gradients of a part, each of the mean loss of its images, and yields how many they are.

    Costs: a copy of the gradients.
    """
    sums: dict[Tensor, Tensor] = {}
    squared: list[Tensor] = []  # length of each part's gradient
    small = 0  # images of a part
    for images in backwards:
        small = images
        grads = {p: p.grad.detach() for p in params if p.grad is not None}
        for p, grad in grads.items():
            sums[p] = sums[p].add_(grad) if p in sums else grad.clone()
            p.grad = None
        if grads:
            squared.append(_squared_length(grads.values()))
    count = len(squared)
    if count < 2:
        return None
    big = small * count
    small_squared = torch.stack(squared).mean().item()
    big_squared = _squared_length(sums.values()).item() / count**2
    signal = (big * big_squared - small * small_squared) / (big - small)
    return NoiseEstimate(signal, (small_squared - big_squared) / (1 / small - 1 / big))


def _squared_length(grads: Iterable[Tensor]) -> Tensor:
    return torch.stack([grad.float().square().sum() for grad in grads]).sum()


@dataclass(frozen=True)
class StepTimes:
    """The timed steps of one size."""

    steps_s: tuple[float, ...]  # of each step, including its wait for input; short steps are timed several at once
    waits_s: tuple[float, ...]  # the part of each step that it waits for input
    utilisation: float  # of the device, 0 to 1; nan: unknown
    noise: NoiseEstimate | None  # from its gradients; None: not needed, or not finite


class Trial:
    """Times sizes on a copy of a job. The gradient noise scale, if needed, takes four more passes."""

    def __init__(self, job: Job, needs: Needs) -> None:
        self.sandbox = Sandbox(job)
        self.needs = needs
        self.device = next((p.device for p in self.sandbox.model.parameters()), torch.device("cpu"))
        self.memory, self.watch = MemoryForecast(self.device), Stopwatch(job.clock, self.device)
        self.diverged = False  # at the last size

    def run(self, batch: int, steps: int, *, allowed_s: float, until_s: float = math.inf) -> StepTimes:
        """Times `steps` steps of `batch` images over all ranks, or fewer in `allowed_s` seconds, but at least 3.

        The noise scale is not measured if that would take until after `until_s` on the job's clock.
        """
        self.diverged = False
        self.memory.begin()
        job = self.sandbox.at(batch)
        if not job.model.training:
            job.model.train()
        try:
            with closing(endless(job.loader)) as batches:
                times = self._timed(job, batches, steps, allowed_s=allowed_s, until_s=until_s)
            self.memory.note(batch)
            return times
        finally:
            self.sandbox.steps += job.steps
            job.close()
            self.sandbox.optimizer.zero_grad()
            if self.diverged:
                self.sandbox.renew()

    def _timed(self, job: Job, batches: Iterator[Batch], steps: int, *, allowed_s: float, until_s: float) -> StepTimes:
        step_s = 0.0
        for _ in range(_WARM_UP):
            began = self.watch.synchronize()
            make_step(job, batches, between=self.memory.look)
            step_s = max(1e-6, self.watch.synchronize() - began)
            if not self.needs.watch_s and steps * step_s < allowed_s:
                break  # a second one only serves to estimate how many steps there is time for
        several = self.needs.noise  # otherwise the search would take too long beside an exhaustive one
        together = max(1, min(math.ceil(_TIMED_S / step_s), int(allowed_s / step_s / steps))) if several else 1
        wanted = max(steps, math.ceil(self.needs.watch_s / step_s / together))
        count = max(_MIN_STEPS, int(min(wanted, allowed_s / step_s / together)))
        waits_s = []
        usage, marks = UtilizationMonitor(self.device, needed=self.needs.watch_s > 0), [self.watch.moment()]
        for _ in range(count):
            waited_s = 0.0
            for _ in range(together):
                wait_s, losses = make_step(job, batches)
                waited_s += wait_s
                usage.step()
            waits_s.append(waited_s / together)
            marks.append(self.watch.moment())
        self.watch.synchronize()  # waits for the device while it is monitored
        utilisation = usage.value()
        steps_s = tuple(self.watch.seconds(start, stop) / together for start, stop in itertools.pairwise(marks))
        self.diverged = not bool(torch.stack(losses).isfinite().all())
        noise = self._noise(job, batches, step_s, until_s=until_s) if self.needs.noise and not self.diverged else None
        return StepTimes(steps_s, tuple(waits_s), utilisation, noise)

    def _noise(self, job: Job, batches: Iterator[Batch], step_s: float, *, until_s: float) -> NoiseEstimate | None:
        """The mean of several noise measurements where steps are short, since a single one is far off.

        Each compares the gradients of a few batches with their mean, at the same weights; an optimizer step separates
        two measurements.
        """
        params = [p for p in job.model.parameters() if p.requires_grad]
        estimates: list[NoiseEstimate | None] = []

        def backwards() -> Iterator[int]:
            for _ in range(_NOISE_PASSES):
                x_NCHW, y_N = next(batches)
                job.loss(job.model(x_NCHW), y_N).backward()  # type: ignore[no-untyped-call]
                yield len(y_N)

        began_s = now_s = self.watch.synchronize()
        while now_s + _NOISE_PASSES * step_s / job.accumulate < until_s:
            needs_whole, job.needs_whole_gradients = job.needs_whole_gradients, True  # none used as it arrives
            try:
                estimates.append(noise_of_parts(params, backwards()))
            finally:
                job.needs_whole_gradients = needs_whole
            now_s = self.watch.synchronize()
            if now_s - began_s > _NOISE_S:
                break
            make_step(job, batches)
        return mean(estimates)


def make_step(
    job: Job, batches: Iterator[Batch], *, between: Callable[[], object] = lambda: None
) -> tuple[float, list[Tensor]]:
    """One update; returns the seconds it waited for input, and the loss of each part.

    `between`: called between the forward and the backward of each part.
    """
    wait_s, losses = 0.0, []
    for _ in range(job.accumulate):
        requested = job.clock.now()
        x_NCHW, y_N = next(batches)
        wait_s += job.clock.now() - requested
        loss = job.loss(job.model(x_NCHW), y_N)
        between()
        job.backward(loss)
        losses.append(loss.detach())
    job.optimizer.step()
    job.optimizer.zero_grad()
    return wait_s, losses


class UtilizationMonitor(Utilization):
    """The utilization over the steps of one size; `needed`: InputError where it cannot be read, otherwise nan."""

    def __init__(self, device: torch.device, *, needed: bool) -> None:
        super().__init__(device, torch.get_num_threads())
        self.needed, self.seen = needed, list[float]()

    def step(self, least_s: float = _EVERY_S) -> None:
        """Reads it after a step, on CUDA not more often than NVML renews it."""
        if self.device.type == "cpu" or (self.device.type == "cuda" and self.since_s > least_s):
            with nullcontext() if self.needed else suppress(InputError):
                self.seen.append(self.read())

    def value(self) -> float:
        """The mean of the higher half of the readings; nan of none. Ref: [002] 5: low values are gaps between steps."""
        if self.device.type == "cuda":
            self.step(0.0)
        kept = sorted(self.seen)[len(self.seen) // 2 :]
        return sum(kept) / len(kept) if kept else math.nan
