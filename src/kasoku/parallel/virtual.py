"""The numerics of many ranks on fewer devices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kasoku.core import InputError, Job, Stage, Technique
from kasoku.parallel.batchnorm import Steer, Take, norms, patches


@dataclass(frozen=True)
class VirtualRanks(Technique):
    """BatchNorm takes its statistics over groups of exactly `norm_batch` images, whatever the number of devices.

    A batch of N * norm_batch images then trains as on N ranks, on however many devices: each group has the statistics
    of a rank; gradients are means over all groups, since a batch that a device takes in parts is accumulated
    (`loader.parts` and `Job(accumulate=...)` of the same number; with one group a part the memory does not depend on
    N). The running statistics move once an update, by the mean of the groups' means and their total variance, the
    same on every rank.

    Args:
        norm_batch: images that share statistics; 0: those that a device takes at once. More than that: a group
            spans neighbouring ranks.
        average: epochs that the running statistics remember; 0: each module's own momentum. So few updates an epoch
            still forget old weights: momentum = 1 - exp(-1 / (average * updates an epoch)).

    Saves: a cluster, to learn whether a batch converges; ranks of any number train to the same result.
    Costs: several groups a forward: a copy of each normalised activation; groups that span ranks: two small
        collectives a layer; on many ranks a small one an update.
    Maths: g = mean over groups of g_group; the order of summation is that of the groups on each device, then of ranks.
    Ref: [000] 4.1.1 (statistics are a process's own; averages fit for few updates); Goyal et al. 2017, 3.
    """

    stage: ClassVar[Stage] = Stage.COMM

    norm_batch: int = 0
    average: float = 0.0

    def __post_init__(self) -> None:
        if self.norm_batch < 0:
            raise InputError(f"norm_batch={self.norm_batch}: at least 1 image, or 0 for what a device takes at once")
        if not 0 <= self.average < math.inf:
            raise InputError(f"average={self.average}: epochs above 0, or 0 for each module's own momentum")

    def apply(self, job: Job) -> None:
        """Steers the BatchNorm modules of the model."""
        if not self.norm_batch and not self.average:
            return
        self._check(job)
        running = _Running(job, self.average)
        for i, norm in enumerate(running.norms):
            for name, value in patches(norm, Steer(norm, self.norm_batch, job.comm, running.taker(i))).items():
                job.patch(norm, name, value)
        if running.norms:
            job.after_step(running.move)

    def _check(self, job: Job) -> None:
        batch, parts = getattr(job.plain_loader, "batch", 0), getattr(job.plain_loader, "parts", 1)
        if not self.norm_batch or not isinstance(batch, int) or not isinstance(parts, int):
            return
        if batch % self.norm_batch:
            raise InputError(
                f"batch={batch}: not a multiple of norm_batch={self.norm_batch}, the images of one virtual rank; "
                f"{batch - batch % self.norm_batch or self.norm_batch} would be"
            )
        once = batch // (parts * job.comm.size)
        if once > self.norm_batch and once % self.norm_batch:
            raise InputError(
                f"norm_batch={self.norm_batch}: a device takes {once} images at once, which must be a multiple of it: "
                "change accumulate"
            )


class _Running:
    """The sums of all groups' statistics since the last update, of all norms in one flat tensor.

    Note: sums around the running mean. A group adds (mean - running mean) and variance + that squared. The sums are
    linear, so ranks just add theirs; and what is squared is small, so the total variance keeps its digits.
    """

    def __init__(self, job: Job, average: float) -> None:
        self.job, self.average = job, average
        self.norms = norms(job.model)
        self.means: list[Tensor] = [norm.running_mean for norm in self.norms if norm.running_mean is not None]
        self.variances: list[Tensor] = [norm.running_var for norm in self.norms if norm.running_var is not None]
        self.sizes = [len(mean) for mean in self.means]
        channels, modules = sum(self.sizes), len(self.norms)
        if self.norms:
            self.flat = self.means[0].new_zeros(2 * channels + 2 * modules, dtype=torch.float32)
            self.first, self.second, self.groups, self.values = torch.split(
                self.flat, [channels, channels, modules, modules]
            )
            sizes = torch.tensor(self.sizes, device=self.flat.device)
            self._own: list[float | None] = []
            self._share = self.groups
            self.owner = torch.arange(modules, device=self.flat.device).repeat_interleave(sizes)

    def taker(self, i: int) -> Take:
        first_C, second_C = self._by_norm(self.first)[i], self._by_norm(self.second)[i]
        groups, values, running_C = self.groups[i], self.values[i], self.means[i]

        def take(mean_C: Tensor, variance_C: Tensor, n: int) -> None:
            with torch.no_grad():
                off_C = mean_C - running_C
                first_C.add_(off_C)
                second_C.add_(torch.addcmul(variance_C, off_C, off_C))  # one sum a group: the order of ranks
                groups.add_(1)
                values.add_(n)

        return take

    @torch.no_grad()
    def move(self) -> None:
        """Moves the running statistics by what was summed since the last update."""
        self.job.comm.all_reduce(self.flat).wait()
        groups = self.groups.clamp(min=1)[self.owner]
        values = self.values.clamp(min=2)[self.owner]
        off = self.first / groups
        variance = (self.second / groups - off * off) * (values / (values - 1))
        seen = self.groups > 0
        share = self._by_norm((self._momentum() * seen)[self.owner])
        torch._foreach_addcmul_(self.means, self._by_norm(off), share)
        torch._foreach_lerp_(self.variances, self._by_norm(variance), share)
        for i, norm in enumerate(self.norms):
            if norm.num_batches_tracked is not None:
                norm.num_batches_tracked.add_(seen[i])
        self.flat.zero_()

    def _by_norm(self, flat: Tensor) -> list[Tensor]:
        return list(torch.split(flat, self.sizes))

    def _momentum(self) -> Tensor:
        """The share of the newest statistics, one a norm; made anew only when it changes."""
        updates = len(self.job.loader) / self.job.accumulate  # type: ignore[arg-type]
        fixed = momentum(self.average, updates) if self.average else None
        own = [norm.momentum if fixed is None else fixed for norm in self.norms]
        if None in own:  # torch: the plain mean of all updates so far
            counts = [n.num_batches_tracked for n in self.norms if n.num_batches_tracked is not None]
            return torch.stack([1 / (c + 1) if m is None else c.new_full((), m, dtype=torch.float32)
                                for m, c in zip(own, counts, strict=True)])  # fmt: skip
        if own != self._own:
            self._own, self._share = own, self.groups.new_tensor(own)
        return self._share


def momentum(average: float, updates: float) -> float:
    """Share of the newest statistics, for averages that remember `average` epochs of `updates` updates each."""
    return 1 - math.exp(-1 / (average * updates))
