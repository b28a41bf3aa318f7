"""The learning rate's course."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from kasoku.core import Constant, InputError, Job, Schedule, Stage, Technique


@dataclass(frozen=True)
class Rate(Technique):
    """Multiplies every parameter group's learning rate by a schedule of the progress in epochs.

    A group that carries `until` (epochs) follows a straight line from its own rate to 0 there instead; from then on its
    parameters are frozen, and backward leaves out what only they needed.
    The rate of a step is set when the step before it has ended (the first one's at once), as torch's schedulers do, so
    that techniques that update parts of the model early or late all see it; it depends on the progress alone.

    Args:
        schedule: progress in epochs -> factor.
        scale: factor on all rates throughout, such as batch / reference batch (the linear scaling rule).

    Saves: steps: a warm-up permits large rates and batches, a decay ends at a good minimum.
    Costs: nothing that can be measured.
    Ref: Goyal et al. 2017 (arXiv 1706.02677), 2.2; [000] 4.1.2.
    """

    stage: ClassVar[Stage] = Stage.STEP

    schedule: Schedule = Constant()  # noqa: RUF009 - frozen
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise InputError(f"scale={self.scale}: above 0")

    def apply(self, job: Job) -> None:
        """Sets the rates now and after each step."""
        course = _Course(job, self.schedule, self.scale)
        course.set()
        job.after_step(course.set)
        job.keep("rate", course)
        job.undo(course.undo)


class _Course:
    def __init__(self, job: Job, schedule: Schedule, scale: float) -> None:
        self.job, self.schedule, self.scale = job, schedule, scale
        self.rates = [group["lr"] for group in job.optimizer.param_groups]

    def set(self) -> None:
        groups = self.job.optimizer.param_groups
        if len(groups) != len(self.rates):
            raise InputError(
                f"the optimizer has {len(groups)} parameter groups, it had {len(self.rates)} when Rate was applied: "
                "add groups before job.apply"
            )
        epoch = self.job.progress
        factor = self.schedule(epoch)
        for group, rate in zip(groups, self.rates, strict=True):
            until = group.get("until", 0)
            group["lr"] = rate * self.scale * (max(0.0, 1 - epoch / until) if until else factor)
            if until:
                self._freeze(group["params"], epoch >= until)

    def _freeze(self, params: list[Tensor], over: bool) -> None:
        for p in params:
            p.requires_grad_(not over)
            if over:
                p.grad = None

    def undo(self) -> None:
        for group, rate in zip(self.job.optimizer.param_groups, self.rates, strict=False):
            group["lr"] = rate
            if group.get("until", 0):
                self._freeze(group["params"], False)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.set()
