"""Measures BatchNorm's statistics before evaluation, instead of averaging them over old weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from kasoku.core import Batch, InputError, Job, Stage, Technique
from kasoku.distributed.batchnorm.grouped import Steer, norms, patches
from kasoku.distributed.consensus import iterate_on_all_ranks


@dataclass(frozen=True)
class Recalibrate(Technique):
    """Measures BatchNorm's statistics for the current weights before evaluation, in a pass over training images.

    Running averages lag behind the weights, and more so if an epoch has few updates. The pass runs without dropout.
    Each norm normalises groups of images as in training, but no group is larger than the batch of a device. Training
    itself is not changed.

    Args:
        images: number of training images; 0: all. kasoku's loaders give them in order and without augmentation; other
            loaders give the first batches of a new pass.

    Saves: accuracy at large batches (`evaluate.stale = true` in a recipe prints how much).
    Costs: a forward pass over the images at each evaluation.
    Maths: over all groups of all ranks, in float64: the mean weighted by counts, and the total variance
        (within groups and between them). Combined in rank order, so every rank has the same bits.
    Ref: Akiba et al. 2017 (arXiv 1711.04325), 3.3; Wu and Johnson 2021 (arXiv 2105.07576), 3; no augmentation: Touvron
        et al. 2019 (arXiv 1906.06423).
    """

    stage: ClassVar[Stage] = Stage.COMM
    renews_statistics: ClassVar[bool] = True

    images: int = 8192

    def __post_init__(self) -> None:
        if self.images < 0:
            raise InputError(f"images={self.images}: how many to measure with, or 0 for all")

    def apply(self, job: Job) -> None:
        """Measures before each evaluation and restores the running statistics after it."""
        if norms(job.model):
            job.around_evaluation(partial(_measured_statistics, job, self.images), renews_statistics=True)


class _Statistics:
    """Count, mean and sum of squared deviations, combined as Chan et al. 1979 do."""

    def __init__(self, like: Tensor) -> None:
        exact = torch.float32 if like.device.type == "mps" else torch.float64  # MPS has no float64
        self.n = torch.zeros(1, dtype=exact, device=like.device)
        self.mean_C, self.squares_C = (torch.zeros(len(like), dtype=exact, device=like.device) for _ in range(2))

    def take(self, mean_C: Tensor, variance_C: Tensor, n: int) -> None:
        """Adds a group with n values in each channel."""
        self.add(self.n.new_full((1,), n), mean_C.to(self.n.dtype), variance_C.to(self.n.dtype) * n)

    def add(self, n: Tensor, mean_C: Tensor, squares_C: Tensor) -> None:
        """Adds the statistics of other values."""
        off_C, total = mean_C - self.mean_C, (self.n + n).clamp(min=1)
        self.mean_C += off_C * (n / total)
        self.squares_C += squares_C + off_C * off_C * (self.n * n / total)
        self.n += n


@contextmanager
def _measured_statistics(job: Job, images: int) -> Iterator[None]:
    """Replaces the running statistics by measured ones."""
    every = norms(job.model)
    live = [norm for norm in every if norm.training] or every  # a frozen norm keeps its statistics
    buffers = [(norm.running_mean, norm.running_var) for norm in live]
    own = [_Statistics(mean_C) for mean_C, _ in buffers if mean_C is not None]
    model, comm = job.model.eval(), job.comm
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.callback(model.eval)
        for norm, statistics in zip(live, own, strict=True):
            in_group = vars(norm)["steer"].images if "steer" in vars(norm) else 0
            new = patches(norm, Steer(norm, in_group, comm, statistics.take, alone=True))
            stack.callback(vars(norm).update, {name: vars(norm)[name] for name in new if name in vars(norm)})
            vars(norm).update(new)
            for name in new:
                stack.callback(delattr, norm, name)
            norm.train()
        for x_NCHW, _ in _batches(job, images):
            if len(x_NCHW):  # a rank may have no part of the last few images
                model(x_NCHW)
    mine = torch.cat([x for s in own for x in (s.n, s.mean_C, s.squares_C)])
    gathered = mine.new_empty(comm.size * len(mine))
    comm.all_gather(gathered, mine).wait()
    whole = [_Statistics(s.mean_C) for s in own]
    sizes = [n for s in own for n in (1, len(s.mean_C), len(s.mean_C))]
    for rank in gathered.view(comm.size, -1):
        parts = rank.split(sizes)
        for i, statistics in enumerate(whole):
            statistics.add(*parts[3 * i : 3 * i + 3])
    running = [x for pair in buffers for x in pair if x is not None]
    old = [x.clone() for x in running]
    torch._foreach_copy_(running, [x for s in whole for x in (s.mean_C, s.squares_C / s.n.clamp(min=1))])
    try:
        yield
    finally:
        torch._foreach_copy_(running, old)


def _batches(job: Job, images: int) -> Iterator[Batch]:
    loader = job.plain_loader
    if hasattr(loader, "survey"):
        yield from iterate_on_all_ranks(job.comm, loader.survey(images))
        return
    state = copy.deepcopy(loader.state_dict()) if hasattr(loader, "state_dict") else None
    if state is None and iter(loader) is loader:
        raise InputError(
            f"Recalibrate: a {type(loader).__name__} can be passed over only once: give a loader that starts anew "
            "with each iter()"
        )
    seen = 0
    try:
        for x_NCHW, y_N in loader:
            yield x_NCHW, y_N
            seen += len(y_N) * job.comm.size
            if images and seen >= images:
                break
    finally:
        if state is not None:
            loader.load_state_dict(state)
