"""Updates in backward: each gradient is used as it arrives and let go, so there is no buffer of gradients.

Note: who reads a gradient that is gone is told. What was taken leaves a stand-in of one element, not a number, seen
in the parameter's shape: a norm of it is NaN, and writing to it (clipping by hand, a second backward) raises.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kasoku.core import InputError, Job


class StepInBackward:
    """At work on one job; only where nothing needs all gradients at once and no rank shares them.

    Attributes:
        taken: what has moved, and the stand-in of each gradient.
        rates: the settings it moved by.
        apart: the rule can update a part of the model; None: not asked yet.
    """

    def __init__(self, job: Job, *, show: bool = True) -> None:
        self.job, self.show = job, show
        self.taken: dict[Tensor, Tensor] = {}
        self.rates: list[dict[str, Any]] = []
        self.apart: bool | None = None
        job.gradient_ready(self.arrive)
        job.before_step(self.step)
        job.undo(self.let_go)

    @property
    def active(self) -> bool:
        """Whether gradients are used as they arrive: known once all techniques are applied."""
        if self.job.needs_all or self.job.comm.size > 1:
            return False
        if self.apart is None:
            rule = type(self.job.optimizer)
            whose: str = rule.step.__module__
            self.apart = whose.startswith(("torch.optim.", "kasoku.optim."))
            if not self.apart and self.show:
                print(f"kasoku: SavedMemory: {rule.__name__} has a step of its own, so gradients stay until it is made")
        return self.apart

    def arrive(self, p: Tensor) -> None:
        """A gradient is whole: the parameter moves, unless it has moved in its layer's backward."""
        if self.active and p.grad is not None and p not in self.taken:
            self.job.update([p])
            self.take(p)

    def take(self, p: Tensor) -> None:
        """The parameter has moved; its gradient is gone."""
        if not self.taken:
            self.rates = _rates(self.job)
        p.grad = self.taken[p] = p.new_full((), float("nan")).expand(p.shape)

    def enter(self) -> None:
        """A forward begins. Raises InputError where the step for the backward before it has not come."""
        if self.taken:
            raise InputError(
                "SavedMemory: a second forward before optimizer.step(), after gradients were used as they arrived: say "
                "accumulate=k to Job for k backwards a step, or set in_backward = false"
            )

    def step(self) -> None:
        """The optimizer's own step passes over what has moved. Raises InputError where it would move it otherwise."""
        changed = ""
        if any(p.grad is not None and p.grad is not stand_in for p, stand_in in self.taken.items()):
            changed = "a gradient was replaced"
        elif self.taken and self.rates != _rates(self.job):
            changed = "a rate, or another setting of the optimizer, was changed"
        if changed:
            raise InputError(
                f"SavedMemory: {changed} between backward and optimizer.step(), after parameters had moved in "
                "backward: do it before the forward, or set in_backward = false"
            )
        self.let_go()

    def let_go(self) -> None:
        """Nothing stands for a gradient any more."""
        for p, stand_in in self.taken.items():
            if p.grad is stand_in:
                p.grad = None
        self.taken.clear()


def _rates(job: Job) -> list[dict[str, Any]]:
    """The optimizer's settings, as plain values."""
    return [{k: v.tolist() if isinstance(v, Tensor) else v for k, v in group.items()} for group in job.hyper()]
