"""A sandbox: a copy of a job whose steps cost as much as the job's own and change nothing in the job.

Note: what is copied. Techniques attach closures to the model, and these refer to the job. So the model and the
optimizer's state are copied without them (`Job.patches`), and the techniques are applied to the copy.
The model's layout, weights and frozen parameters are copied with it. A technique of the user's own is always applied
again. LowResolution and GrowBatch are left out, because the search is for images and batches of full size. The copy has
no other ranks: no step waits for one, so a failing rank delays nobody.

Note: micro-batches. Where VirtualRanks groups the images (`may_split`), a device can process its share in several parts
with the same result. It does so for every share at least as large as one that did not fit in memory.
"""

from __future__ import annotations

import copy
import math
import random
from collections import OrderedDict
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from kasoku.core import Batch, InputError, Job, Solo, Technique
from kasoku.data import Loader

_NOTHING = "loader: no batch in it that can be iterated again"
_EMPTY = 2  # passes in a row that give nothing: a loader that goes on where it was left may be at its end
_RAMP = 100  # steps in which a copy's rate rises
_UNKNOWN = 100_000  # images of an epoch, where the loader does not say


def copied(job: Job) -> tuple[nn.Module, Optimizer]:
    """The job's model and optimizer as they are now, without what techniques hung on them; the job is drained."""
    job.drain()
    memo: dict[int, Any] = {}
    plain = _without_patches(job, memo)
    for module in job.model.modules():
        for _, hook in _of_techniques(module, job.patches.first_hook):
            _do_not_follow(hook, memo)
    model: nn.Module = copy.deepcopy(job.model, memo)
    for (key, name), old in plain.items():
        if key not in memo:
            continue  # of another model
        if old is ...:
            delattr(memo[key], name)
        else:
            setattr(memo[key], name, copy.deepcopy(old, memo))
    for module in model.modules():
        numbers = {number for number, _ in _of_techniques(module, job.patches.first_hook)}
        for hooks in _hooks(module):
            for number in numbers & hooks.keys():
                del hooks[number]
    return model, _copied_optimizer(job.optimizer, memo, job.patches.first_hook)


def _without_patches(job: Job, memo: dict[int, Any]) -> dict[tuple[int, str], object]:
    """(id of a module, attribute) -> what was there before any technique; what is there now is not followed."""
    first: dict[tuple[int, str], object] = {}
    for thing, name, old in job.patches.attributes:
        if isinstance(thing, nn.Module):
            first.setdefault((id(thing), name), old)
            _do_not_follow(vars(thing).get(name), memo)
    return first


def _copied_optimizer(own: Optimizer, memo: dict[int, Any], first_hook: int) -> Optimizer:
    """The same rule and state, for the parameters that `memo` has in place of its own."""
    twin: Optimizer = object.__new__(type(own))
    for name, value in vars(own).items():
        if name.endswith("_hooks"):
            kept = OrderedDict((key, hook) for key, hook in value.items() if key < first_hook)
            vars(twin)[name] = kept
        elif name != "step":  # a scheduler's count hangs there
            vars(twin)[name] = copy.deepcopy(value, memo)
    return twin


def _do_not_follow(thing: object, memo: dict[int, Any]) -> None:
    if not isinstance(thing, nn.Module | Tensor) and thing is not None:
        memo[id(thing)] = thing


def _hooks(module: nn.Module) -> list[dict[int, Any]]:
    """The dicts of a module that hold hooks by torch's number."""
    return [v for k, v in vars(module).items() if k.endswith("_hooks") and isinstance(v, dict)]


def _of_techniques(module: nn.Module, first: int) -> list[tuple[int, Any]]:
    """The hooks of a module from the number `first` on."""
    return [(number, hook) for hooks in _hooks(module) for number, hook in hooks.items() if number >= first]


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


class Sandbox:
    """Copies of a job's model and optimizer, and a loader of any batch size.

    Use it within `undisturbed`.

    Args:
        job: what they are copied from. Its loader is iterated only where it is none of kasoku.data's; of what such a
            loader keeps to itself, `undisturbed` knows its `state_dict`, torch's generators, and the workers of a
            torch DataLoader. Anything else, such as a counter of its own, has moved on afterwards.

    Raises:
        InputError: for a loader that can be iterated but once, or gives nothing.
    """

    def __init__(self, job: Job) -> None:
        plain = job.plain_loader
        if isinstance(plain, Iterator):
            raise InputError(f"loader: a {type(plain).__name__} can be iterated once only: give one that can be again")
        self.job = job
        self.model, self.optimizer = copied(job)
        self.rates = _full_rates(job)
        self.steps = 0
        self.group, self.most_at_once = 0, math.inf  # images: of a part that is left whole (0: none); of a part
        self._aside = plain.sandbox() if isinstance(plain, Loader) else None
        self.start = self._start()  # images of a step now, over all ranks

    def renew(self) -> None:
        """Starts from the job's weights and state again, in the same memory; no job that `at` gave is open."""
        job = self.job
        job.drain()
        self.optimizer.state.clear()  # its memory first
        memo: dict[int, Any] = {}
        with torch.no_grad():
            for own, twin in zip(_tensors(job.model), _tensors(self.model), strict=True):
                twin.copy_(own)
                memo[id(own)] = twin
        self.optimizer = _copied_optimizer(job.optimizer, memo, job.patches.first_hook)
        self.steps = 0

    def close(self) -> None:
        """Ends the processes that read for the copies."""
        if self._aside:
            self._aside.close()

    def at(self, batch: int) -> Job:
        """A job for steps of `batch` images over all ranks; it is to be closed."""
        share = min(1.0, (self.steps + 1) / _RAMP) * min(1.0, batch / self.start)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * share
        job = self.job
        before: Iterator[Any] = (old for thing, name, old in job.patches.attributes if thing is job and name == "loss")
        loss = next(before, job.loss)  # without what techniques made of it
        alone, parts = Solo(job.clock), self.parts(batch)
        loader = self._loader(batch, parts)
        made = Job(self.model, self.optimizer, loader=loader, loss=loss, comm=alone, accumulate=parts)
        try:
            return made.apply(*(t for t in job.applied if not self._left_out(t)))
        except BaseException:  # of memory, perhaps: its hooks go before a smaller size is tried
            made.close()
            raise

    def _left_out(self, technique: Technique) -> bool:
        return not technique.in_sandbox or (technique.groups_span_ranks and self.job.comm.size > 1)

    # ---- in parts

    def may_split(self, multiple: int) -> None:
        """Lets shares be taken in parts of whole groups of VirtualRanks; `multiple`: sizes are multiples of it."""
        for technique in self.job.applied:
            images = technique.images_per_group
            if images and self.job.accumulate == 1:
                self.group = 0 if multiple % (images * self.job.comm.size) else images

    def parts(self, batch: int) -> int:
        """In how many parts a device takes its share of a batch."""
        if not self.group:
            return self.job.accumulate
        groups = max(1, batch // (self.job.comm.size * self.group))
        whole = [n for n in range(1, groups + 1) if groups % n == 0]
        return next((n for n in whole if groups // n * self.group <= self.most_at_once), groups)

    def at_once(self, batch: int) -> int:
        """Images of a batch that a device takes at once."""
        return batch // (self.job.comm.size * self.parts(batch))

    def split(self, batch: int) -> bool:
        """Has fewer images taken at once from here on than of this batch, which did not fit; False: there are none."""
        once = self.at_once(batch)
        if not self.group or once <= self.group:
            return False
        self.most_at_once = once // 2
        return True

    # ---- data

    @property
    def images(self) -> int:
        """Of an epoch, over all ranks; 0: the loader does not say."""
        plain = self.job.plain_loader
        if isinstance(plain, Loader):
            return plain.images
        try:
            return len(plain) * self.start // self.job.accumulate
        except TypeError:  # it has no length, or its data set has none
            return 0

    def _start(self) -> int:
        plain, job = self.job.plain_loader, self.job
        if isinstance(plain, Loader):
            return plain.batch * job.accumulate // plain.parts
        _, y_N = next(_again(plain))
        return len(y_N) * job.comm.size * job.accumulate

    def _loader(self, batch: int, parts: int) -> Iterable[Batch]:
        job, aside = self.job, self._aside
        if aside is None:
            count = parts * max(1, (self.images or _UNKNOWN) // batch)
            return Resized(job.plain_loader, batch // (job.comm.size * parts), batches=count)
        in_parts = job.plain_loader.parts * parts // job.accumulate
        aside.configure(batch=batch * in_parts // parts, parts=in_parts)
        aside.seek(aside.epoch + 1, 0)  # other images: those of the size before lie in memory now
        aside.executor.restart_autotuner()
        return aside


class Resized:
    """Batches of another size from those of any loader, which is iterated again and again."""

    def __init__(self, loader: Iterable[Batch], batch: int, *, batches: int) -> None:
        self._loader, self._batch, self._batches = loader, batch, batches

    def __len__(self) -> int:
        """Batches of an epoch, though they never end: schedules divide by it."""
        return self._batches

    def __iter__(self) -> Iterator[Batch]:
        """Never ends. Raises InputError where the loader gives nothing."""
        pieces: list[Batch] = []
        have = 0
        for x, y_N in _again(self._loader):
            start = 0
            while start < len(y_N):
                stop = min(len(y_N), start + self._batch - have)
                whole = start == 0 and stop == len(y_N)  # labels may carry more than numbers
                pieces.append((x, y_N) if whole else (x[start:stop], y_N[start:stop]))
                have, start = have + stop - start, stop
                if have == self._batch:
                    yield _joined(pieces)
                    pieces, have = [], 0


def _joined(pieces: list[Batch]) -> Batch:
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat([x for x, _ in pieces]), torch.cat([y_N for _, y_N in pieces])


def endless(job: Job) -> Generator[Batch, None, None]:
    """The job's batches, epoch after epoch. Raises InputError where there is none."""
    return _again(job.loader)


def _again(loader: Iterable[Batch]) -> Generator[Batch, None, None]:
    empty = 0
    while empty < _EMPTY:
        empty += 1
        for batch in loader:
            empty = 0
            yield batch
    raise InputError(_NOTHING)


@contextmanager
def undisturbed(job: Job) -> Iterator[None]:
    """Whatever draws random numbers or reads the job's loader in the body: both go on afterwards as if it had not.

    Of a loader that is none of kasoku.data's: its `state_dict`, torch's generators, a torch DataLoader's workers.
    """
    plain = job.plain_loader
    kept = copy.deepcopy(plain.state_dict()) if hasattr(plain, "state_dict") else None
    generators = [(g, g.get_state()) for g in _generators(plain)]
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    mps = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        with _as_it_is(plain):
            yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
        if mps is not None:
            torch.mps.set_rng_state(mps)
        for generator, state in generators:
            generator.set_state(state)
        if kept is not None and hasattr(plain, "load_state_dict") and not isinstance(plain, Loader):
            plain.load_state_dict(kept)


@contextmanager
def _as_it_is(plain: Any) -> Iterator[None]:
    """Keeps the workers that a torch DataLoader has, and what a loader of image files knows of bad images."""
    if isinstance(plain, DataLoader):
        workers, plain._iterator = plain._iterator, None
        try:
            yield
        finally:
            plain._iterator = workers  # those of the body end, as nothing holds them
    elif isinstance(plain, Loader) and plain.skipped:
        with plain.skipped.unchanged():
            yield
    else:
        yield


def _generators(plain: Any) -> list[torch.Generator]:
    """Those a torch DataLoader draws its order from."""
    samplers = (getattr(plain, "sampler", None), getattr(getattr(plain, "batch_sampler", None), "sampler", None))
    found = {id(g): g for g in (getattr(thing, "generator", None) for thing in (plain, *samplers))}
    return [g for g in found.values() if isinstance(g, torch.Generator)]


def _full_rates(job: Job) -> list[Any]:
    """The rate of each parameter group; under a schedule, that after its warm-up."""
    groups = job.optimizer.param_groups
    for technique in job.applied:
        rates = technique.warmed_up_rates(job)
        if rates is not None:
            return rates
    return [group["lr"] for group in groups]
