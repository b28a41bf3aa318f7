"""A sandbox: a copy of a job whose steps cost as much as the job's own and change nothing in the job.

Note: what is copied. Techniques attach closures to the model, and these refer to the job. So the model and the
optimizer's state are copied without them (`Job.patches`), and the techniques are applied to the copy, except those that
declare `in_sandbox = False`. The model's layout, weights and frozen parameters are copied with it. The copy has no
other ranks, so a failing rank delays no other.
"""

import copy
import random
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from kasoku.core import InputError, Job, Solo
from kasoku.data import Loader

_RAMP = 100  # steps in which a copy's rate rises


def copy_of(job: Job) -> tuple[nn.Module, Optimizer]:
    """Copies of the job's model and optimizer without the hooks and patches of techniques. Drains the job."""
    job.drain()
    memo: dict[int, Any] = {}
    with _without_techniques(job):
        model: nn.Module = copy.deepcopy(job.model, memo)
    return model, _copied_optimizer(job.optimizer, memo, job.patches.first_hook)


@contextmanager
def _without_techniques(job: Job) -> Iterator[None]:
    """Within it the modules have no hooks and patches of techniques, which refer to the job."""
    with ExitStack() as stack:
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
        yield


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
        job.drain()
        self.optimizer.state.clear()  # frees its memory first
        memo: dict[int, Any] = {}
        whole, twins = ([*model.parameters(), *model.buffers()] for model in (job.model, self.model))
        with torch.no_grad():
            for own, twin in zip(whole, twins, strict=True):
                twin.copy_(own)
                memo[id(own)] = twin
        self.optimizer = _copied_optimizer(job.optimizer, memo, job.patches.first_hook)
        self.steps = 0

    def close(self) -> None:
        """Ends the worker processes of the copy."""
        self.loader.close()

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
def undisturbed(job: Job) -> Iterator[None]:
    """Restores random states, and what the job's loader has skipped, after the body."""
    skipped = getattr(job.plain_loader, "skipped", None)
    with ExitStack() as stack:
        if skipped:
            stack.callback(vars(skipped).update, copy.deepcopy(vars(skipped)))
        if torch.backends.mps.is_available():
            stack.callback(torch.mps.set_rng_state, torch.mps.get_rng_state())
        stack.callback(np.random.set_state, np.random.get_state())
        stack.callback(random.setstate, random.getstate())
        stack.enter_context(torch.random.fork_rng(range(torch.cuda.device_count())))
        yield
