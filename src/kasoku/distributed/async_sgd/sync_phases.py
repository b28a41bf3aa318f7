"""Changes to the optimizers of an asynchronous training: synchronous phases at its start and end, and lower momentum.

Note: optimizer states. Synchronous ranks need equal optimizer states, or their weights drift apart; asynchronous ranks
each have their own. So the states are averaged over all ranks when a synchronous phase begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kasoku.core import InputError, Job
from kasoku.distributed.ddp.bucket_plan import Policy
from kasoku.distributed.ddp.engine import Engine


class SyncPhases:
    """The synchronous steps at the start and the end, by an Overlap without next-forward overlap.

    No phase is active until `begin()`.

    Args:
        warmup: epochs of the first synchronous phase.
        finish: the epoch in which the last one begins; 0: none.
    """

    def __init__(self, job: Job, buckets: Policy, *, warmup: float, finish: float) -> None:
        self._job, self._warmup, self._finish = job, warmup, finish
        self._engine = Engine(job, buckets, next_forward=False) if warmup or finish else None
        self.active = False
        self.bounds = (warmup, finish)

    def install(self) -> None:
        engine = self._engine
        if engine is not None:
            self._job.gradient_ready(lambda p: engine.arrive(p) if self.active else None)
            self._job.before_step(lambda: engine.step() if self.active else None)

    @property
    def due(self) -> bool:
        """Whether the next step is synchronous."""
        epochs = self._job.progress + 1e-9
        return epochs < self._warmup or 0 < self._finish <= epochs

    def begin(self) -> None:
        """Makes the next step synchronous; collective."""
        self.active = True
        if self._job.steps:
            _average(self._job)

    def end(self) -> None:
        self.active = False


def _average(job: Job) -> None:
    """Averages the optimizers' states over all ranks, or clears them if ranks have different ones."""
    states = [(i, job.state_of(p)) for i, p in enumerate(p for g in job.optimizer.param_groups for p in g["params"])]
    tensors = [(i, k, x) for i, state in states for k, x in sorted(state.items()) if _is_float(x)]
    if len({tuple(names) for names in job.comm.gather_objects([(i, k, tuple(x.shape)) for i, k, x in tensors])}) > 1:
        job.optimizer.state.clear()
        return
    with torch.no_grad():
        for _, _, x in tensors:
            job.comm.all_reduce(x, op="mean").wait()


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


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
