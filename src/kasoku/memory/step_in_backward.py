"""Updates in backward: each gradient is used as it arrives and freed, so that there is no buffer of gradients.

Note: code that reads a freed gradient notices it. A stand-in of one element, NaN, expanded to the parameter's shape,
takes its place: a norm of it is NaN, and writing to it (clipping by hand, a second backward) raises.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kasoku.core import InputError, Job


class StepInBackward:
    """Updates the parameters of a job in backward, if nothing needs all gradients at once and no rank shares them.

    Attributes:
        stand_ins: of the gradients of all parameters that were updated.
        settings: of the optimizer during these updates.
        by_parameter: whether the optimizer can update a part of the model; None: not checked yet.
    """

    def __init__(self, job: Job, *, show: bool = True) -> None:
        self.job, self.show = job, show
        self.stand_ins: dict[Tensor, Tensor] = {}
        self.settings: list[dict[str, Any]] = []
        self.by_parameter: bool | None = None
        job.gradient_ready(self.update)
        job.before_step(self.before_step)
        job.undo(self.clear)

    @property
    def active(self) -> bool:
        """Whether gradients are used as they arrive; known after all techniques are applied."""
        if self.job.needs_whole_gradients or self.job.comm.size > 1:
            return False
        if self.by_parameter is None:
            rule = type(self.job.optimizer)
            module: str = rule.step.__module__
            self.by_parameter = module.startswith(("torch.optim.", "kasoku.optim."))
            if not self.by_parameter and self.show:
                print(f"kasoku: SavedMemory: {rule.__name__} has its own step(), so gradients are kept until that step")
        return self.by_parameter

    def update(self, p: Tensor) -> None:
        """Updates a parameter whose gradient is complete, unless its layer's backward has done so."""
        if self.active and p.grad is not None and p not in self.stand_ins:
            self.job.update([p])
            self.free_gradient(p)

    def free_gradient(self, p: Tensor) -> None:
        """Puts a stand-in in place of the gradient of an updated parameter."""
        if not self.stand_ins:
            self.settings = _optimizer_settings(self.job)
        p.grad = self.stand_ins[p] = p.new_full((), float("nan")).expand(p.shape)

    def before_forward(self) -> None:
        """Raises InputError if the optimizer's step after the last backward is missing."""
        if self.stand_ins:
            raise InputError(
                "SavedMemory: a second forward before optimizer.step(), after gradients were used as they arrived: say "
                "accumulate=k to Job for k backwards a step, or set in_backward = false"
            )

    def before_step(self) -> None:
        """Lets the optimizer skip updated parameters. Raises InputError if they would be updated otherwise now."""
        changed = ""
        if any(p.grad is not None and p.grad is not stand_in for p, stand_in in self.stand_ins.items()):
            changed = "a gradient was replaced"
        elif self.stand_ins and self.settings != _optimizer_settings(self.job):
            changed = "a rate, or another setting of the optimizer, was changed"
        if changed:
            raise InputError(
                f"SavedMemory: {changed} between backward and optimizer.step(), after parameters were updated in "
                "backward: do it before the forward, or set in_backward = false"
            )
        self.clear()

    def clear(self) -> None:
        for p, stand_in in self.stand_ins.items():
            if p.grad is stand_in:
                p.grad = None
        self.stand_ins.clear()


def _optimizer_settings(job: Job) -> list[dict[str, Any]]:
    return [{k: v.tolist() if isinstance(v, Tensor) else v for k, v in group.items()} for group in job.hyper()]
