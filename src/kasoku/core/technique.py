"""A technique changes how a job trains: a frozen dataclass that is its own configuration."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from kasoku.core.job import Job


class Stage(IntEnum):
    """The order in which techniques are applied; what acts at the step runs in the opposite order.

    GRADIENT is for what gives reduced gradients their true values before STEP techniques read them.
    """

    MODEL = 0
    MEMORY = 1
    COMPILE = 2
    DATA = 3
    STEP = 4
    GRADIENT = 5
    COMM = 6


@dataclass(frozen=True)
class Technique:
    """Subclass it with the settings as fields, a `stage` and `apply`; undo goes through `job.patch` and `job.undo`."""

    stage: ClassVar[Stage] = Stage.STEP
    refuses: ClassVar[tuple[str, ...]] = ()  # class names of techniques it cannot be combined with; twice itself never

    def apply(self, job: Job) -> None:
        """Installs itself on the job, in the job's hooks and by `job.patch`; called once."""
        raise NotImplementedError(f"{type(self).__name__}.apply")
