"""Changes to the optimizers of an asynchronous training: synchronous phases at its start and end, and lower momentum.

Note: optimizer states. Synchronous ranks need equal optimizer states, or their weights drift apart; asynchronous ranks
each have their own. So the states are averaged over all ranks when a synchronous phase begins.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kasoku.core import InputError, Job
from kasoku.distributed.ddp.bucket_plan import Policy
from kasoku.distributed.ddp.overlap import Engine, Overlap


@dataclass(frozen=True)
class Remedies:
    """Corrections for stale updates.

    Args:
        predict: computes gradients at the weights' predicted position: any multiple of the other ranks' last movement
            ahead; 0: no prediction. Below 0: 2 with hidden=True, where the weights read are that many exchanges old,
            else 0 (chosen by measurement: RECORDS.md).
        momentum: the optimizers' momentum between sync points, below 1, as several workers act like momentum
            themselves; rates are scaled so that a gradient moves the weights as far as before. Below 0: unchanged.

    Ref: predict: Sato 2017 (the [001] team). momentum: Mitliagkas et al. 2016 (arXiv 1605.09774).
    """

    predict: float = -1.0
    momentum: float = -1.0

    def __post_init__(self) -> None:
        if self.momentum >= 1:
            raise InputError(f"momentum={self.momentum}: from 0 to below 1, or below 0 to leave it as it is")


class SyncPhases:
    """The synchronous steps at the start and the end, by an Overlap without next-forward overlap.

    No phase is active until `switch()`. The first one has `warmup` epochs; the last begins in epoch `finish`; 0: none.
    Where ranks of a node step together, it averages their mean gradients over all ranks, after backward.
    """

    def __init__(self, job: Job, buckets: Policy, warmup: float, finish: float) -> None:
        self._job, self.bounds, self.active, self._own = job, (warmup, finish), False, job.step_comm
        if warmup or finish:
            self._engine = Engine(job, Overlap(buckets, next_forward=False), job.comm)
            if self._own.size > 1:  # the means of a node are whole, and a loss scale has decided on them
                self._engine.decides = self._engine.layout.notes_ranges = False
            else:
                job.gradient_ready(lambda p: self._engine.arrive(p) if self.active else None)
            job.before_step(lambda: self._average() if self.active else None)

    def _average(self) -> None:
        for p in self._job.model.parameters() if self._own.size > 1 else ():
            if p.grad is not None:
                self._engine.arrive(p)
        self._engine.step()

    @property
    def due(self) -> bool:
        """Whether the next step is synchronous."""
        (warmup, finish), epochs = self.bounds, self._job.progress + 1e-9
        return epochs < warmup or 0 < finish <= epochs

    def switch(self) -> None:
        """Makes the next step synchronous, or asynchronous again; collective."""
        job, self.active = self._job, not self.active
        job.step_comm = job.comm if self.active else self._own
        if not (self.active and job.steps):
            return
        tensors = [
            (i, name, x)
            for i, p in enumerate(p for group in job.optimizer.param_groups for p in group["params"])
            for name, x in sorted(job.state_of(p).items())
            if isinstance(x, Tensor) and x.is_floating_point()
        ]
        names = job.comm.gather_objects([(i, name, tuple(x.shape)) for i, name, x in tensors])
        if any(other != names[0] for other in names):  # averages of different states have no meaning
            job.optimizer.state.clear()
            return
        with torch.no_grad():
            for _, _, x in tensors:
                job.comm.all_reduce(x, op="mean").wait()


class Momentum:
    """Sets another momentum during each optimizer step; between steps the optimizer has the user's own."""

    def __init__(self, job: Job, momentum: float) -> None:
        self._job, self._momentum = job, momentum
        self._own: list[float] = []

    def lower(self) -> None:
        groups = self._job.optimizer.param_groups
        if any("momentum" not in group for group in groups):
            kind = type(self._job.optimizer).__name__
            raise InputError(f"momentum={self._momentum}: optimizer {kind} has none: leave it out")
        self._own = [group["momentum"] for group in groups]
        for group in groups:
            group["momentum"] = self._momentum

    def restore(self) -> None:
        for group, own in zip(self._job.optimizer.param_groups, self._own, strict=False):
            group["momentum"] = own

    def factors(self, params: Sequence[Tensor]) -> list[float]:
        """Factors of the updates, so that a gradient moves the weights as far as with the user's momentum."""
        groups = zip(self._job.optimizer.param_groups, self._own, strict=False)
        factors = {p: (1 - self._momentum) / (1 - own) for group, own in groups for p in group["params"]}
        return [factors.get(p, 1.0) for p in params]
