"""Times a few steps of one batch size in the sandbox, and trains short branches there from one state.

Note: the sandbox is a copy of a job whose steps cost as much as the job's own and change nothing in the job. Techniques
attach closures to the model, and these refer to the job. So the model and the optimizer's state are copied without them
(`Job.patches`), and the techniques are applied to the copy, except those that declare `in_sandbox = False`. Its layout,
weights and frozen parameters are the model's. The copy has no other ranks, so a failing rank delays no other.
"""

import copy
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

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
_EVERY_S = 0.2  # NVML renews its figure of utilization every sixth of a second to every second
_HELD = 512  # images at most on which branches are compared; a quarter of a branch's if that is less


def copy_of(job: Job) -> tuple[nn.Module, Optimizer]:
    """Copies of the job's model and optimizer without the hooks and patches of techniques. Drains the job."""
    job.drain()
    job.optimizer.state_dict()  # a hook makes state that is in slices whole
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
        model: nn.Module = copy.deepcopy(job.model, memo := dict[int, Any]())
    return model, _copied_optimizer(job.optimizer, memo, job.patches.first_hook)


def _copied_optimizer(own: Optimizer, memo: dict[int, Any], first_hook: int) -> Optimizer:
    """An optimizer of the same rule and state for the parameters that `memo` has copied."""
    twin: Optimizer = object.__new__(type(own))
    for name, value in vars(own).items():
        if name.endswith("_hooks"):
            vars(twin)[name] = OrderedDict((key, hook) for key, hook in value.items() if key < first_hook)
        elif name != "step":  # patched by schedulers, which count steps
            vars(twin)[name] = copy.deepcopy(value, memo)
    return twin


class Sandbox:
    """Copies of a job's model, optimizer and loader, for any batch size. Random states move with its steps.

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
        self.saved: tuple[nn.Module, Optimizer] | None = None  # what `renew` restores; None: the job's own
        self.loader = plain.sandbox()
        self.start = plain.batch * job.accumulate // plain.parts  # images of the job's own step, over all ranks

    def save(self) -> None:
        """From now on `renew` restores the present weights and state. All jobs from `at` must be closed."""
        model: nn.Module = copy.deepcopy(self.model, memo := dict[int, Any]())
        self.saved = model, _copied_optimizer(self.optimizer, memo, self.job.patches.first_hook)

    def renew(self) -> None:
        """Restores the job's weights and state, or those saved, in the same memory; requires what `save` does."""
        model, optimizer = self.saved or (self.job.model, self.job.optimizer)
        self.optimizer.state.clear()  # frees its memory first
        memo: dict[int, Any] = {}
        whole, twins = ([*each.parameters(), *each.buffers()] for each in (model, self.model))
        with torch.no_grad():
            for own, twin in zip(whole, twins, strict=True):
                twin.copy_(own)
                memo[id(own)] = twin
        self.optimizer = _copied_optimizer(optimizer, memo, self.job.patches.first_hook)
        self.steps = 0

    def set_rates(self, share: float) -> None:
        """Sets all rates to this multiple of the job's own after its warm-up."""
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * share

    def at(self, batch: int, *, alone: bool = False) -> Job:
        """A job for steps of `batch` images over all ranks, or of this rank `alone`; the caller closes it."""
        self.set_rates(min(1.0, (self.steps + 1) / _RAMP) * min(1.0, batch / self.start))
        self.optimizer.zero_grad()
        if not self.model.training:
            self.model.train()
        job, loader, parts = self.job, self.loader, self.job.accumulate
        patched: list[Any] = [old for thing, name, old in job.patches.attributes if thing is job and name == "loss"]
        loss = [*patched, job.loss][0]  # without patches of techniques
        loader.configure(batch=batch * loader.parts // parts)
        loader.seek(loader.epoch + 1, 0)  # other images: those of the size before lie in memory now
        loader.executor = loader.executor.fork()  # which tunes its number of threads anew
        passes = parts * job.comm.size if alone else parts
        own = Job(self.model, self.optimizer, loader=loader, loss=loss, comm=Solo(job.clock), accumulate=passes)
        techniques = [t for t in job.applied if t.in_sandbox and not (t.groups_span_ranks and job.comm.size > 1)]
        try:
            return own.apply(*techniques)
        except BaseException:  # such as out of memory: remove its hooks before a smaller size is tried
            own.close()
            raise


@dataclass(frozen=True)
class StepTimes:
    """The timed steps of one size."""

    steps_s: tuple[float, ...]  # of each step, including its wait for input
    waits_s: tuple[float, ...]  # the part of each step that it waits for input
    utilisation: float  # of the device, 0 to 1; nan: unknown


class Trial:
    """Times sizes, and trains branches, on a copy of a job."""

    def __init__(self, job: Job, needs: Needs) -> None:
        self.sandbox, self.needs = Sandbox(job), needs
        self.device = next((p.device for p in self.sandbox.model.parameters()), torch.device("cpu"))
        self.memory, self.watch = MemoryForecast(self.device), Stopwatch(job.clock, self.device)
        self.held: list[Batch] = []  # images on which branches are compared

    def run(self, batch: int, steps: int, *, allowed_s: float) -> StepTimes:
        """Times `steps` steps of `batch` images over all ranks, or as many as `allowed_s` permits, but at least 3.

        More are timed while the device's utilization is read (`Needs.watch_s`).
        """
        self.memory.begin()
        with closing(self.sandbox.at(batch)) as job, closing(endless(job.loader)) as batches:
            for _ in range(_WARM_UP):
                began = self.watch.synchronize()
                make_step(job, batches, between=self.memory.look)
                step_s = max(1e-6, self.watch.synchronize() - began)
                if not self.needs.watch_s and steps * step_s < allowed_s:
                    break  # a second one only serves to estimate how many steps there is time for
            wanted = max(steps, math.ceil(self.needs.watch_s / step_s))
            count = max(_MIN_STEPS, int(min(wanted, allowed_s / step_s)))
            waits_s = []
            usage, marks = UtilizationMonitor(self.device, needed=self.needs.watch_s > 0), [self.watch.moment()]
            for _ in range(count):
                wait_s, losses = make_step(job, batches)
                waits_s.append(wait_s)
                usage.step()
                marks.append(self.watch.moment())
            self.watch.synchronize()  # waits for the device while it is monitored
            steps_s = tuple(self.watch.seconds(start, stop) for start, stop in itertools.pairwise(marks))
            times = StepTimes(steps_s, tuple(waits_s), usage.value())
        self.memory.note(batch)
        self.sandbox.steps += job.steps
        if not torch.stack(losses).isfinite().all():  # it diverged
            self.sandbox.renew()
        return times

    def branch(self, batch: int, rate: float, images: int) -> list[float]:
        """Trains on `images` images from the end of the trunk; the loss on some others after each quarter of them.

        The first call trains the trunk: from the job's state, and the rates rise. All branches have the same order of
        images; each rank makes its own steps of `batch` images. `rate`: a multiple of the job's rates after warm-up.
        """
        trunk, steps, losses = self.sandbox.saved is None, images // batch, list[float]()
        self.sandbox.renew()
        torch.manual_seed(0)
        with closing(self.sandbox.at(batch, alone=True)) as job, closing(endless(job.loader)) as batches:
            job.plain_loader.seek(0 if trunk else 2, 0)
            held = job.accumulate * max(1, min(images // 4, _HELD) // batch)
            self.held = self.held or [*itertools.islice(batches, held)]
            for step in range(1, steps + 1):
                self.sandbox.set_rates(rate * min(1.0, 2 * step / steps) if trunk else rate)
                make_step(job, batches)
                if step % max(1, steps // 4) == 0 or step == steps:
                    torch.manual_seed(0)
                    job.rehearses = True
                    with torch.no_grad():  # in training mode: running statistics need more steps than a branch has
                        losses.append(torch.stack([job.loss(job.model(x), y) for x, y in self.held]).mean().item())
                    job.rehearses = False
        if trunk:
            self.sandbox.save()
        return losses


def make_step(
    job: Job, batches: Iterator[Batch], *, between: Callable[[], object] = lambda: None
) -> tuple[float, list[Tensor]]:
    """One update, with `between` called after each forward: the seconds it waited for input, and each part's loss."""
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
