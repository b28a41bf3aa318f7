"""Measures BatchNorm's statistics before evaluation, instead of averaging them over old weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

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
            job.around_evaluation(_Measured(job, self.images).stepped_in, renews_statistics=True)


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


class _Measured:
    def __init__(self, job: Job, images: int) -> None:
        self.job, self.images = job, images

    @contextmanager
    def stepped_in(self) -> Iterator[None]:
        """Replaces the running statistics by measured ones."""
        every = norms(self.job.model)
        live = [norm for norm in every if norm.training] or every  # a frozen norm keeps its statistics
        measured = [x for pair in self._measure(live) for x in pair]
        buffers = [x for norm in live for x in (norm.running_mean, norm.running_var) if x is not None]
        old = [x.clone() for x in buffers]
        torch._foreach_copy_(buffers, measured)
        try:
            yield
        finally:
            torch._foreach_copy_(buffers, old)

    def _measure(self, live: list[_BatchNorm]) -> list[tuple[Tensor, Tensor]]:
        """Mean and variance of each norm's input, over all ranks."""
        sums = [_Statistics(norm.running_mean) for norm in live if norm.running_mean is not None]
        model = self.job.model.eval()
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.callback(model.eval)
            for norm, statistics in zip(live, sums, strict=True):
                images = vars(norm)["steer"].images if "steer" in vars(norm) else 0
                stack.enter_context(_steering(norm, Steer(norm, images, self.job.comm, statistics.take, alone=True)))
                norm.train()
            for x_NCHW, _ in self._batches():
                if len(x_NCHW):  # a rank may have no part of the last few images
                    model(x_NCHW)
        return self._over_ranks(sums)

    def _over_ranks(self, sums: list[_Statistics]) -> list[tuple[Tensor, Tensor]]:
        comm = self.job.comm
        mine = torch.cat([x for s in sums for x in (s.n, s.mean_C, s.squares_C)])
        every = mine.new_empty(comm.size * len(mine))
        comm.all_gather(every, mine).wait()
        whole = [_Statistics(s.mean_C) for s in sums]
        sizes = [n for s in sums for n in (1, len(s.mean_C), len(s.mean_C))]
        for rank in every.view(comm.size, -1):
            parts = rank.split(sizes)
            for i, statistics in enumerate(whole):
                statistics.add(*parts[3 * i : 3 * i + 3])
        return [(s.mean_C, s.squares_C / s.n.clamp(min=1)) for s in whole]

    def _batches(self) -> Iterator[Batch]:
        loader = self.job.plain_loader
        if hasattr(loader, "survey"):
            yield from iterate_on_all_ranks(self.job.comm, loader.survey(self.images))
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
                seen += len(y_N) * self.job.comm.size
                if self.images and seen >= self.images:
                    break
        finally:
            if state is not None:
                loader.load_state_dict(state)


@contextmanager
def _steering(norm: Any, steer: Steer) -> Iterator[None]:
    own = {name: vars(norm)[name] for name in ("steer", "forward") if name in vars(norm)}
    for name, value in patches(norm, steer).items():
        setattr(norm, name, value)
    try:
        yield
    finally:
        for name in ("steer", "forward"):
            delattr(norm, name)
            if name in own:
                setattr(norm, name, own[name])
