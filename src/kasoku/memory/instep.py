"""Updates in backward: each gradient is used as it arrives and let go, so there is no buffer of gradients.

Note: who reads a gradient that is gone is told. What was taken leaves a stand-in of one element, not a number, seen
in the parameter's shape: a norm of it is NaN, and writing to it (clipping by hand, a second backward) raises.
"""

from __future__ import annotations

from torch import Tensor

from kasoku.core import InputError, Job


class InStep:
    """At work on one job; only where nothing needs all gradients at once and no rank shares them."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.taken: set[Tensor] = set()
        self.apart: bool | None = None  # the rule can update a part of the model
        job.gradient_ready(self.arrive)
        job.before_step(self.step)
        job.undo(self.step)

    @property
    def active(self) -> bool:
        """Whether gradients are used as they arrive: known once all techniques are applied."""
        if self.job.needs_all or self.job.comm.size > 1:
            return False
        if self.apart is None:
            rule = type(self.job.optimizer)
            whose: str = rule.step.__module__
            self.apart = whose.startswith(("torch.optim.", "kasoku.optim."))
            if not self.apart:
                print(f"kasoku: SavedMemory: {rule.__name__} has a step of its own, so gradients stay until it is made")
        return self.apart

    def arrive(self, p: Tensor) -> None:
        """A gradient is whole: the parameter moves, unless it has moved in its layer's backward."""
        if self.active and p.grad is not None and p not in self.taken:
            self.job.update([p])
            self.take(p)

    def take(self, p: Tensor) -> None:
        """The parameter has moved; its gradient is gone."""
        p.grad = p.new_full((), float("nan")).expand(p.shape)
        self.taken.add(p)

    def enter(self) -> None:
        """A forward begins. Raises InputError where the step for the backward before it has not come."""
        if self.taken:
            raise InputError(
                "SavedMemory: a second forward before optimizer.step(), after gradients were used as they arrived: say "
                "accumulate=k to Job for k backwards a step, or set in_backward = false"
            )

    def step(self) -> None:
        """The optimizer's own step passes over what has moved."""
        for p in self.taken:
            p.grad = None
        self.taken.clear()
