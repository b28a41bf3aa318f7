"""A sandbox: a copy of a job whose steps cost as much as the job's own and change nothing in the job.

Note: what is copied. Techniques attach closures to the model, and these refer to the job. So the model and the
optimizer's state are copied without them (`Job.patches`), and the techniques are applied to the copy, except those that
declare `in_sandbox = False`. The model's layout, weights and frozen parameters are copied with it. The copy has no
other ranks, so a failing rank delays no other.

Note: micro-batches. Where VirtualRanks groups the images (`may_split`), a device can process its share in several parts
with the same result. It does so for every share at least as large as one that did not fit in memory.
"""

import copy
import math
import random
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from kasoku.core import Batch, InputError, Job, Solo
from kasoku.core.torch_internals import own_workers
from kasoku.data import Loader
from kasoku.data.loading.loader import endless

_RAMP = 100  # steps in which a copy's rate rises
_DEFAULT_IMAGES = 100_000  # of an epoch, if unknown


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
    """Copies of a job's model and optimizer, and a loader of any batch size. Use it within `undisturbed`.

    The job's own loader is iterated only if it is not one of kasoku.data. Raises InputError for a loader that can be
    iterated only once, or is empty.
    """

    def __init__(self, job: Job) -> None:
        plain = job.plain_loader
        if isinstance(plain, Iterator):
            raise InputError(f"loader: a {type(plain).__name__} can be iterated once only: give one that can be again")
        self.job = job
        self.model, self.optimizer = copy_of(job)
        scheduled = [technique.warmed_up_rates(job) for technique in job.applied]
        own = [group["lr"] for group in job.optimizer.param_groups]
        self.rates = next((rates for rates in scheduled if rates is not None), own)
        self.steps = 0
        self.group = 0  # images of a group that is not split; 0: none
        self.most_at_once = math.inf  # images of a part, at most
        self.images = 0  # of an epoch, over all ranks; 0: unknown
        if isinstance(plain, Loader):
            self._aside: Loader | None = plain.sandbox()
            self.start = plain.batch * job.accumulate // plain.parts  # images of the job's own step, over all ranks
            self.images = plain.images
        else:
            self._aside = None
            self.start = len(next(endless(plain))[1]) * job.comm.size * job.accumulate
            with suppress(TypeError):  # it has no length, or its data set has none
                self.images = len(plain) * self.start // job.accumulate

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
        if self._aside:
            self._aside.close()

    def at(self, batch: int) -> Job:
        """A job for steps of `batch` images over all ranks; the caller closes it."""
        share = min(1.0, (self.steps + 1) / _RAMP) * min(1.0, batch / self.start)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * share
        job, parts, aside = self.job, self.parts(batch), self._aside
        patched: list[Any] = [old for thing, name, old in job.patches.attributes if thing is job and name == "loss"]
        loss = [*patched, job.loss][0]  # without patches of techniques
        if aside is None:
            count = parts * max(1, (self.images or _DEFAULT_IMAGES) // batch)
            loader: Iterable[Batch] = Resized(job.plain_loader, batch // (job.comm.size * parts), batches=count)
        else:
            in_parts = job.plain_loader.parts * parts // job.accumulate
            aside.configure(batch=batch * in_parts // parts, parts=in_parts)
            aside.seek(aside.epoch + 1, 0)  # other images: those of the size before lie in memory now
            aside.executor.restart_autotuner()
            loader = aside
        alone = Job(self.model, self.optimizer, loader=loader, loss=loss, comm=Solo(job.clock), accumulate=parts)
        techniques = [t for t in job.applied if t.in_sandbox and not (t.groups_span_ranks and job.comm.size > 1)]
        try:
            return alone.apply(*techniques)
        except BaseException:  # such as out of memory: remove its hooks before a smaller size is tried
            alone.close()
            raise

    def may_split(self, multiple: int) -> None:
        """Allows splitting a share into parts of whole groups; all sizes are multiples of `multiple`."""
        for technique in self.job.applied:
            images = technique.images_per_group
            if images and self.job.accumulate == 1:
                self.group = 0 if multiple % (images * self.job.comm.size) else images

    def parts(self, batch: int) -> int:
        """The number of parts of a device's share of a batch."""
        if not self.group:
            return self.job.accumulate
        groups = max(1, batch // (self.job.comm.size * self.group))
        whole = [n for n in range(1, groups + 1) if groups % n == 0]
        return next((n for n in whole if groups // n * self.group <= self.most_at_once), groups)

    def at_once(self, batch: int) -> int:
        """The images of one part on a device."""
        return batch // (self.job.comm.size * self.parts(batch))

    def split(self, batch: int) -> bool:
        """Halves the parts of this batch, which did not fit in memory; False if they cannot be split further."""
        once = self.at_once(batch)
        if not self.group or once <= self.group:
            return False
        self.most_at_once = once // 2
        return True


class Resized:
    """Batches of another size from the batches of any loader, which is iterated repeatedly."""

    def __init__(self, loader: Iterable[Batch], batch: int, *, batches: int) -> None:
        self._loader, self._batch, self._batches = loader, batch, batches

    def __len__(self) -> int:
        """The batches of an epoch, by which schedules divide; iteration never ends."""
        return self._batches

    def __iter__(self) -> Iterator[Batch]:
        """Yields batches without end. Raises InputError if the loader is empty."""
        pieces: list[Batch] = []
        for piece in endless(self._loader):
            pieces.append(piece)
            while sum(len(y_N) for _, y_N in pieces) >= self._batch:
                alone = len(pieces) == 1  # labels may carry more than numbers
                x, y_N = pieces[0] if alone else (torch.cat([x for x, _ in pieces]), torch.cat([y for _, y in pieces]))
                rest = len(y_N) > self._batch
                pieces = [(x[self._batch :], y_N[self._batch :])] if rest else []
                yield (x[: self._batch], y_N[: self._batch]) if rest else (x, y_N)


@contextmanager
def undisturbed(job: Job) -> Iterator[None]:
    """Restores random states and the position of the job's loader after the body.

    Of a loader outside kasoku.data: its `state_dict`, torch's generators and a torch DataLoader's workers, but nothing
    else, such as a counter of its own.
    """
    plain = job.plain_loader
    with ExitStack() as stack:
        if isinstance(plain, Loader):
            if plain.skipped:
                stack.callback(vars(plain.skipped).update, copy.deepcopy(vars(plain.skipped)))
        elif hasattr(plain, "state_dict") and hasattr(plain, "load_state_dict"):
            stack.callback(plain.load_state_dict, copy.deepcopy(plain.state_dict()))
        # a torch DataLoader draws its order from the generators of these
        batch_sampler = getattr(plain, "batch_sampler", None)
        for drawing in (plain, getattr(plain, "sampler", None), getattr(batch_sampler, "sampler", None)):
            generator = getattr(drawing, "generator", None)
            if isinstance(generator, torch.Generator):
                stack.callback(generator.set_state, generator.get_state())
        if isinstance(plain, DataLoader):
            stack.enter_context(own_workers(plain))
        if torch.backends.mps.is_available():
            stack.callback(torch.mps.set_rng_state, torch.mps.get_rng_state())
        stack.callback(np.random.set_state, np.random.get_state())
        stack.callback(random.setstate, random.getstate())
        stack.enter_context(torch.random.fork_rng(range(torch.cuda.device_count())))
        yield
