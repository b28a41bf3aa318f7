"""What an asynchronous training does to its optimizers: steps together at first and in the end, a lower momentum.

Note: why the two go together. Synchronous ranks need equal optimizer states, or they drift apart; asynchronous ones
have their own. So where ranks begin to step together their states become the means of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kasoku.core import InputError, Job
from kasoku.parallel.buckets import Policy
from kasoku.parallel.overlap import Engine, Overlap


class Together:
    """Steps of all ranks together, by the groups of an Overlap that waits at the step; asleep until `begin()`.

    Args:
        warmup: epochs at first.
        finish: from this epoch on again; 0: never.
    """

    def __init__(self, job: Job, buckets: Policy, *, warmup: float, finish: float) -> None:
        self._job, self._warmup, self._finish = job, warmup, finish
        self._engine = Engine(job, Overlap(buckets, next_forward=False)) if warmup or finish else None
        self.active = False
        self.bounds = (warmup, finish)

    def install(self) -> None:
        """Puts itself into the job's moments."""
        engine = self._engine
        if engine is not None:
            self._job.gradient_ready(lambda p: engine.arrive(p) if self.active else None)
            self._job.before_step(lambda: engine.step() if self.active else None)

    @property
    def due(self) -> bool:
        """Whether the next step is one of all ranks."""
        epochs = self._job.progress + 1e-9
        return epochs < self._warmup or 0 < self._finish <= epochs

    def begin(self) -> None:
        """From the next step on; called by all ranks."""
        self.active = True
        if self._job.steps:
            _average(self._job)

    def end(self) -> None:
        self.active = False


def _average(job: Job) -> None:
    """The optimizers' states become their means over all ranks; they are forgotten where ranks have different ones."""
    states = [(i, job.state_of(p)) for i, p in enumerate(p for g in job.optimizer.param_groups for p in g["params"])]
    found = [(i, k, x) for i, state in states for k, x in sorted(state.items()) if _real(x)]
    if len({tuple(names) for names in job.comm.gather_objects([(i, k, tuple(x.shape)) for i, k, x in found])}) > 1:
        job.optimizer.state.clear()
        return
    with torch.no_grad():
        for _, _, x in found:
            job.comm.all_reduce(x, op="mean").wait()


def _real(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


class Momentum:
    """Another momentum during each step of the optimizer; what reads it in between finds the user's own."""

    def __init__(self, job: Job, momentum: float) -> None:
        self._job, self._momentum = job, momentum
        self._own: list[float] = []

    def lower(self) -> None:
        """Before a step."""
        groups = self._job.optimizer.param_groups
        if any("momentum" not in group for group in groups):
            kind = type(self._job.optimizer).__name__
            raise InputError(f"momentum={self._momentum}: optimizer {kind} has none: leave it out")
        self._own = [group["momentum"] for group in groups]
        for group in groups:
            group["momentum"] = self._momentum

    def restore(self) -> None:
        """After it."""
        for group, own in zip(self._job.optimizer.param_groups, self._own, strict=False):
            group["momentum"] = own

    def factors(self, params: Sequence[Tensor]) -> list[float]:
        """By which what a step moved is multiplied, so that in all a gradient moves the weights as far as before."""
        groups = zip(self._job.optimizer.param_groups, self._own, strict=False)
        of = {p: (1 - self._momentum) / (1 - own) for group, own in groups for p in group["params"]}
        return [of.get(p, 1.0) for p in params]
