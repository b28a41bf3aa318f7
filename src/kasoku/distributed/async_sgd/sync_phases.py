"""Changes to the optimizers of an asynchronous training: synchronous phases at its start and end, and lower momentum.

Note: optimizer states. Synchronous ranks need equal optimizer states, or their weights drift apart; asynchronous ranks
each have their own. So the states are averaged over all ranks when a synchronous phase begins.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kasoku.core import InputError, Job
from kasoku.distributed.ddp.bucket_plan import Policy
from kasoku.distributed.ddp.overlap import Engine, Overlap


class SyncPhases:
    """The synchronous steps at the start and the end, by an Overlap without next-forward overlap.

    No phase is active until `switch()`. The first one has `warmup` epochs; the last begins in epoch `finish`; 0: none.
    """

    def __init__(self, job: Job, buckets: Policy, warmup: float, finish: float) -> None:
        self._job, self.bounds, self.active = job, (warmup, finish), False
        if warmup or finish:
            engine = Engine(job, Overlap(buckets, next_forward=False))
            job.gradient_ready(lambda p: engine.arrive(p) if self.active else None)
            job.before_step(lambda: engine.step() if self.active else None)

    @property
    def due(self) -> bool:
        """Whether the next step is synchronous."""
        (warmup, finish), epochs = self.bounds, self._job.progress + 1e-9
        return epochs < warmup or 0 < finish <= epochs

    def switch(self) -> None:
        """Makes the next step synchronous, or asynchronous again; collective."""
        job, self.active = self._job, not self.active
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
