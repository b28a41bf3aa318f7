"""Synchronous phases at the start and the end of an asynchronous training.

Note: optimizer states. Synchronous ranks need equal optimizer states, or their weights drift apart; asynchronous ranks
each have their own. So the states are averaged over all ranks when a synchronous phase begins.
"""

import torch
from torch import Tensor

from kasoku.core import Job
from kasoku.distributed.ddp.bucket_plan import Policy
from kasoku.distributed.ddp.overlap import Engine, Overlap


class SyncPhases:
    """The synchronous steps at the start and the end, by an Overlap without next-forward overlap.

    No phase is active until `switch()`. The first one has `warmup` epochs; the last begins in epoch `finish`; 0: none.
    Where ranks of a node step together, it averages their mean gradients over all ranks, after backward.
    """

    def __init__(self, job: Job, buckets: Policy, warmup: float, finish: float) -> None:
        self._job, self.bounds, self.active, self._own = job, (warmup, finish), False, job.step_comm
        self._whole = getattr(job.plain_loader, "size", job.comm.size) == job.comm.size
        if warmup or finish:
            skips = any(t.skips_unused for t in job.applied)
            settings = Overlap(buckets, next_forward=False, unused="skip" if skips else "refuse")
            # the means of a node are whole, and a loss scale has decided on them
            self._engine = Engine(job, settings, job.comm, vetoed=job.vetoes_steps and self._own.size == 1)
            if self._own.size == 1:
                job.gradient_ready(lambda p: self._engine.arrive(p) if self.active else None)
            job.before_step(lambda: self._average() if self.active else None)

    def _average(self) -> None:
        for p in self._job.model.parameters() if self._own.size > 1 else ():
            if p.grad is not None:
                self._engine.arrive(p)
        self._engine.step()

    @property
    def due(self) -> bool:
        """Whether the next step is synchronous; none is where there are not as many ranks as shares of a batch."""
        (warmup, finish), epochs = self.bounds, self._job.progress + 1e-9
        return self._whole and (epochs < warmup or 0 < finish <= epochs)

    def switch(self) -> None:
        """Makes the next step synchronous, or asynchronous again; collective."""
        job, self.active = self._job, not self.active
        job.step_comm = job.comm if self.active else self._own
        job.run_hooks("after_regrouping")
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
