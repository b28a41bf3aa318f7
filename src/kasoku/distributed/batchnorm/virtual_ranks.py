"""Trains with the numerics of many ranks on fewer devices."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from torch import Tensor

from kasoku.core import InputError, Job, Range, Stage, Technique
from kasoku.core.job_state import batches_of
from kasoku.distributed.batchnorm.grouped import Steer, norms

_ONE = 2.0**32  # in exact sums
_REFUSED = {"captures_graph": "a graph runs no Python that could group the images; leave Graphs out, or norm_batch"}


@dataclass(frozen=True)
class VirtualRanks(Technique, stage=Stage.COMM, refuses=_REFUSED, groups_span_ranks=True):
    """BatchNorm takes its statistics over groups of exactly `norm_batch` images, whatever the number of devices.

    A batch of N * norm_batch images then trains as on N ranks, on any number of devices. Each group has its own
    statistics, as a rank has. Gradients are means over all groups, because a device accumulates the parts of its batch
    (give `loader.parts` and `Job(accumulate=...)` the same number). With one group a part, memory does not depend on N.
    Each update moves the running statistics once, and equally on every rank, by the mean of the groups' means and by
    their total variance.

    Args:
        norm_batch: images that share statistics, 0 or more. If a device takes fewer at once, a group spans neighbouring
            ranks (beside Asynchronous those of its node). 0: all images that a device takes at once. This is plain
            BatchNorm, but ranks with unequal shares of the batch keep equal running statistics.
        average: epochs, 0 or more, that the running statistics average over, even if an epoch has few updates:
            momentum = 1 - exp(-1 / (average * updates an epoch)). 0: each module's own momentum.

    Saves: a cluster: one device shows whether a large batch converges. All numbers of ranks give the same result.
    Costs: a copy of each normalised activation if a forward has several groups; two small collectives a layer if groups
        span ranks; two small collectives an update on several ranks.
    Maths: g = mean over groups of g_group, summed over the groups of each device in order, then over ranks.
    Ref: [000] 4.1.1 (each process has its own statistics; averages for few updates); Goyal et al. 2017, 3.
    """

    norm_batch: Annotated[int, Range("0 takes all images of a forward", at_least=0)] = 0
    average: Annotated[float, Range("0 takes each module's own momentum", at_least=0, below=math.inf)] = 0.0

    @property
    def images_per_group(self) -> int:  # type: ignore[override]
        return self.norm_batch

    def apply(self, job: Job) -> None:
        """Patches the BatchNorm modules of the model."""
        if not self.norm_batch and not self.average and not getattr(job.plain_loader, "shares", ()):
            return
        self._check(job)
        if not norms(job.model):
            return
        running = _RunningStatistics(job, self.average, self.norm_batch)
        for i, norm in enumerate(running.norms):
            Steer(norm, self.norm_batch, job.step_comm, partial(running.take, i), job.trace).install(job.patch)
        job.on_close(job.model.register_forward_hook(lambda *_: running.add()).remove)
        job.before_step(running.move)  # before other techniques average the model and its statistics

    def _check(self, job: Job) -> None:
        batch, parts = getattr(job.plain_loader, "batch", 0), getattr(job.plain_loader, "parts", 1)
        if not isinstance(batch, int) or not isinstance(parts, int) or not batch:
            return
        if parts != job.accumulate:
            raise InputError(f"loader.parts={parts} beside Job(accumulate={job.accumulate}): give both the same number")
        if not (group := self.norm_batch):
            return
        if batch % group:
            nearest = batch - batch % group or group
            raise InputError(f"batch={batch}: not a multiple of norm_batch={group}; {nearest} would be")
        shares, at_once = (getattr(job.plain_loader, name, ()) for name in ("shares", "at_once"))
        if any(n % (group if at_once else parts * group) for n in shares):
            given = f"norm_batch={group}: ranks take {shares} images in {parts} parts"
            raise InputError(f"{given}: each part must be a multiple of norm_batch")
        once = at_once or batch // (parts * job.comm.size)
        part = f"norm_batch={group}: with accumulate={parts} a part of the batch has {once} images on a device"
        if once > group and once % group:
            raise InputError(f"{part}, not a multiple of norm_batch: change accumulate")
        if once < group and (parts > 1 or job.comm.size == 1):
            most = max(1, batch // (group * job.comm.size))
            raise InputError(f"{part}, and a group cannot span parts: accumulate at most {most}")
        if group > once * job.step_comm.size:
            together = f"and {job.step_comm.size} of {job.comm.size} ranks step together"
            raise InputError(f"{part}, {together}: norm_batch at most {once * job.step_comm.size}")


class _RunningStatistics:
    """The sums of all groups' statistics since the last update, of all norms in one flat tensor.

    Note: sums around the running mean. A group adds d = mean - running mean, and variance + d^2. Ranks can add such
    sums, and d is small, so the total variance keeps its precision.

    Note: few kernel launches. Forward only collects the statistics of groups; they are added together when the model's
    forward has ended. All norms are also updated together, in about twenty launches whatever their number.

    Note: exact sums. Beside a technique that `sums_exactly` each addend is rounded to a multiple of 2^-32, as an
    integer, so the order of the groups and their spread over ranks change no bit.
    """

    def __init__(self, job: Job, average: float, norm_batch: int) -> None:
        self.job, self.average, self.norm_batch = job, average, norm_batch
        self.norms = norms(job.model)
        self.means: list[Tensor] = [norm.running_mean for norm in self.norms if norm.running_mean is not None]
        self.variances: list[Tensor] = [norm.running_var for norm in self.norms if norm.running_var is not None]
        self.sizes = [len(mean) for mean in self.means]
        channels, modules = sum(self.sizes), len(self.norms)
        self.noted: dict[int, list[tuple[Tensor, Tensor]]] = {}  # of each norm, the groups of this forward
        self.groups, self.values = [0] * modules, [0] * modules  # of each norm, since the last update
        exact = torch.promote_types(self.means[0].dtype, torch.float32)
        self.rounds = any(technique.sums_exactly for technique in job.applied)
        self.flat = self.means[0].new_zeros(2 * channels, dtype=torch.int64 if self.rounds else exact)
        self.first, self.second = torch.split(self.flat, channels)
        sizes = torch.tensor(self.sizes, device=self.flat.device)
        self.owner = torch.arange(modules, device=self.flat.device).repeat_interleave(sizes)  # the norm of each channel
        self.momenta: list[float | None] = []  # the weight of the newest statistics for each norm
        self.share = self.means[0].new_zeros(0, dtype=exact)  # the same on the device

    def take(self, i: int, mean_C: Tensor, variance_C: Tensor, n: int) -> None:
        """Notes a group's statistics in norm i, with n values a channel."""
        if self.job.rehearses:
            return
        self.noted.setdefault(i, []).append((mean_C, variance_C))
        self.groups[i] += 1
        self.values[i] += n

    @torch.no_grad()
    def add(self) -> None:
        """Adds the statistics of a forward, one group of every norm at a time, so that groups are added in order."""
        first, second = self._by_norm(self.first), self._by_norm(self.second)
        for group in range(max(map(len, self.noted.values()), default=0)):
            some = {i: statistics[group] for i, statistics in self.noted.items() if group < len(statistics)}
            off = torch._foreach_sub([mean for mean, _ in some.values()], [self.means[i] for i in some])
            squares = torch._foreach_addcmul([variance for _, variance in some.values()], off, off)
            if self.rounds:
                off, squares = (tuple((x.double() * _ONE).round().long() for x in sums) for sums in (off, squares))
            torch._foreach_add_([first[i] for i in some], off)
            torch._foreach_add_([second[i] for i in some], squares)
        self.noted.clear()

    @torch.no_grad()
    def move(self) -> None:
        """Updates the running statistics by the sums since the last update; the host reads no value."""
        self.add()  # of a forward that called parts of the model
        job, seen = self.job, max(self.groups)
        batch = getattr(job.plain_loader, "batch", 0)
        own = batch // job.comm.size if isinstance(batch, int) else 0
        own = getattr(job.plain_loader, "own_batch", own)  # of unequal shares
        if self.norm_batch and 0 < seen < own // self.norm_batch:  # would silently train on a smaller batch
            early = f"optimizer.step() after {seen} of {own // self.norm_batch} virtual ranks of this device"
            every = f"step once every {job.accumulate} batches (job.accumulate)"
            raise InputError(f"{early}: {every}, each loss divided by that")
        counted = [self.norms[i].num_batches_tracked for i, n in enumerate(self.groups) if n]
        torch._foreach_add_([c for c in counted if c is not None], 1)
        counts = self.share.new_tensor([self.groups, self.values])
        works = [job.step_comm.all_reduce(x) for x in (self.flat, counts)]
        with job.trace.span("wait", "statistics"):
            for work in works:
                work.wait()
        groups, values = counts[:, self.owner]
        first, second = ((x.double() / _ONE).to(self.share) if self.rounds else x for x in (self.first, self.second))
        off = first / groups.clamp(min=1)
        variance = second / groups.clamp(min=1) - off * off
        variance *= values / (values - 1).clamp(min=1)  # torch's running variance is the unbiased one
        fixed = momentum(self.average, batches_of(job.loader) / job.accumulate) if self.average else None
        momenta = [norm.momentum if fixed is None else fixed for norm in self.norms]
        for i, norm in enumerate(self.norms):
            if momenta[i] is None:  # torch: the plain mean of all updates so far
                counted_here = norm.num_batches_tracked
                momenta[i] = 1 / max(1.0, float(counted_here)) if counted_here is not None else 1.0
        if momenta != self.momenta:  # they are sent to the device only when they change
            self.momenta, self.share = momenta, self.share.new_tensor(momenta)
        share = self._by_norm(self.share[self.owner] * (groups > 0))
        torch._foreach_addcmul_(self.means, self._by_norm(off), share)
        torch._foreach_lerp_(self.variances, self._by_norm(variance), share)
        self.flat.zero_()
        self.groups, self.values = [0] * len(self.norms), [0] * len(self.norms)

    def _by_norm(self, flat: Tensor) -> list[Tensor]:
        return list(torch.split(flat, self.sizes))


def momentum(average: float, updates: float) -> float:
    """Weight of the newest statistics if averages cover `average` epochs of `updates` updates each."""
    return 1 - math.exp(-1 / (average * updates))
