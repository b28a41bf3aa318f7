"""Measures BatchNorm's statistics before evaluation, instead of averaging them over old weights."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from torch import Tensor

from kasoku.core import Batch, InputError, Job, Range, Stage, Technique
from kasoku.core.job_state import Patches
from kasoku.distributed.batchnorm.grouped import Steer, norms
from kasoku.distributed.consensus import iterate_on_all_ranks


@dataclass(frozen=True)
class Recalibrate(Technique, stage=Stage.COMM, renews_statistics=True):
    """Measures BatchNorm's statistics for the current weights before evaluation, in a pass over training images.

    Running averages lag behind the weights, and more so if an epoch has few updates. The pass runs without dropout.
    Each norm normalises groups of images as in training, none larger than a device's batch. Training is not changed.

    Args:
        images: number of training images, 0 or more; 0: all. kasoku's loaders give them in order and without
            augmentation; other loaders give the first batches of a new pass.

    Saves: accuracy at large batches (`evaluate.stale = true` in a recipe prints how much).
    Costs: a forward pass over the images at each evaluation.
    Maths: over all groups of all ranks, in float64: the mean weighted by counts, and the total variance
        (within groups and between them). Combined in rank order, so every rank has the same bits.
    Ref: Akiba et al. 2017 (arXiv 1711.04325), 3.3; Wu and Johnson 2021 (arXiv 2105.07576), 3; no augmentation: Touvron
        et al. 2019 (arXiv 1906.06423).
    """

    images: Annotated[int, Range("0 takes all", at_least=0)] = 8192

    def apply(self, job: Job) -> None:
        """Measures before each evaluation and restores the running statistics after it."""
        if norms(job.model):
            job.around_evaluation(partial(_measured_statistics, job, self.images), renews_statistics=True)


def _add_group(statistics_3C: Tensor, mean_C: Tensor, variance_C: Tensor, n: int) -> None:
    """Adds a group with n values in each channel."""
    mean, variance = mean_C.to(statistics_3C.dtype), variance_C.to(statistics_3C.dtype)
    _add(statistics_3C, torch.stack([torch.full_like(mean, n), mean, variance * n]))


def _add(statistics_3C: Tensor, other_3C: Tensor) -> None:
    """Adds other values' count, mean and sum of squared deviations, combined as Chan et al. 1979 do."""
    (n, mean, squares), (other_n, other_mean, other_squares) = statistics_3C, other_3C
    off, total = other_mean - mean, (n + other_n).clamp(min=1)
    mean += off * (other_n / total)
    squares += other_squares + off * off * (n * other_n / total)
    n += other_n


@contextmanager
def _measured_statistics(job: Job, images: int) -> Iterator[None]:
    """Replaces the running statistics by measured ones."""
    every = norms(job.model)
    live = [norm for norm in every if norm.training] or every  # a frozen norm keeps its statistics
    running = [getattr(norm, name) for name in ("running_mean", "running_var") for norm in live]
    sizes, device = [norm.num_features for norm in live], running[0].device
    exact = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
    own_3C = torch.zeros(3, sum(sizes), dtype=exact, device=device)
    model, comm = job.model.eval(), job.comm
    with Patches() as patched:
        patched.enter_context(torch.random.fork_rng(devices=[]))
        patched.callback(model.eval)
        for norm, norm_3C in zip(live, torch.split(own_3C, sizes, dim=1), strict=True):
            in_group = vars(norm)["steer"].images if "steer" in vars(norm) else 0
            Steer(norm, in_group, comm, partial(_add_group, norm_3C), job.trace, alone=True).install(patched.set)
            norm.train()
        for x_NCHW, _ in _batches(job, images):
            if len(x_NCHW):  # a rank may have no part of the last few images
                model(x_NCHW.to(device))
    ranks_R3C = own_3C.new_empty(comm.size, *own_3C.shape)
    comm.all_gather(ranks_R3C, own_3C).wait()
    whole_3C = torch.zeros_like(own_3C)
    for rank_3C in ranks_R3C:
        _add(whole_3C, rank_3C)
    n_C, mean_C, squares_C = whole_3C
    if not n_C.any():
        raise InputError("Recalibrate: no image came from the job's loader: give Job(loader=...) the training images")
    old = [x.clone() for x in running]
    torch._foreach_copy_(running, [*mean_C.split(sizes), *(squares_C / n_C.clamp(min=1)).split(sizes)])
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
    if state is None and isinstance(loader, Iterator):
        once = f"a {type(loader).__name__} can be passed over only once"
        raise InputError(f"Recalibrate: {once}: give a loader that starts anew with each iter()")
    seen = 0
    try:
        for _ in range(2 if state is not None else 1):  # what is left of an epoch may be nothing
            for x_NCHW, y_N in loader:
                yield x_NCHW, y_N
                seen += len(y_N) * job.comm.size
                if images and seen >= images:
                    return
            if seen:
                return
    finally:
        if state is not None:
            loader.load_state_dict(state)
