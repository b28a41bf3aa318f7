"""The learning-rate schedule as a technique."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from torch import Tensor

from kasoku.core import Constant, InputError, Job, Range, Schedule, Technique
from kasoku.core.torch_internals import has_scheduler


@dataclass(frozen=True)
class Rate(Technique, in_sandbox=False):
    """Multiplies every parameter group's learning rate by a schedule of the progress in epochs.

    If a group has `decoupled=True` (LARS), the schedule also multiplies its weight decay. `scale` does not, since such
    a decay is not multiplied by the learning rate. If a group has `until` (in epochs), its rate falls linearly to 0 at
    that epoch, without the schedule. From then on its parameters are frozen: backward skips gradients for them alone.
    The rates of a step are set at the end of the step before (the first ones at once), as torch's schedulers do. So all
    techniques see the same rates, even if they update parts of the model early or late. Rates depend only on progress.

    Args:
        schedule: function from the progress in epochs to a factor.
        scale: constant factor on all rates, above 0, such as batch / reference batch (the linear scaling rule).

    Momentum needs no correction if the buffer does not contain the rate, as in torch's SGD; LARS supports both.

    Saves: steps: warm-up permits large rates and batches, and decay leads to a good minimum.
    Costs: nothing that can be measured.
    Ref: Goyal et al. 2017 (arXiv 1706.02677), 2.2; [000] 4.1.2.
    """

    schedule: Schedule = Constant()  # noqa: RUF009 - frozen
    scale: Annotated[float, Range(above=0)] = 1.0

    def at(self, group: Mapping[str, Any], epoch: float) -> dict[str, float]:
        """The settings of a group at `epoch`: its rate, and its weight decay if that follows the schedule."""
        until = group.get("until", 0)
        factor = max(0.0, 1 - epoch / until) if until else self.schedule(epoch)
        decay = {"weight_decay": group["weight_decay"] * factor} if group.get("decoupled") else {}
        return {"lr": group["lr"] * self.scale * factor, **decay}

    def warmed_up_rates(self, job: Job) -> list[float]:
        epoch = max(job.progress, self.schedule.warmup_epochs)
        return [self.at(own, epoch)["lr"] for own in job.kept("rate").own]

    def apply(self, job: Job) -> None:
        course = _Course(job, self)
        course.set()
        job.after_step(course.set)
        job.keep("rate", course)
        job.on_close(course.undo)


class _Course:
    def __init__(self, job: Job, rate: Rate) -> None:
        self.job, self.rate, self.own = job, rate, job.hyper()

    def set(self) -> None:
        groups = self.job.optimizer.param_groups
        if has_scheduler(self.job.optimizer):
            raise InputError("Rate: a torch lr_scheduler sets this optimizer's rates too: leave out one of the two")
        if len(groups) != len(self.own):
            got = f"{len(groups)} parameter groups, it had {len(self.own)} when Rate was applied"
            raise InputError(f"the optimizer has {got}: add groups before job.apply")
        epoch = self.job.progress
        for group, own in zip(groups, self.own, strict=True):
            group.update(self.rate.at(own, epoch))
            if until := own.get("until", 0):
                self._freeze(group["params"], epoch >= until)

    def _freeze(self, params: list[Tensor], over: bool) -> None:
        for p in params:
            p.requires_grad_(not over)
            if over:
                p.grad = None

    def undo(self) -> None:
        for group, own in zip(self.job.optimizer.param_groups, self.own, strict=False):
            group.update({name: own[name] for name in self.rate.at(own, 0.0)})
            if group.get("until", 0):
                self._freeze(group["params"], False)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.set()
