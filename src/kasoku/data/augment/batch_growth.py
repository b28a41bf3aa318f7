"""A batch that grows as training goes on."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from kasoku.core import Batch, InputError, Job, Schedule, Stage, StepDecay, Technique
from kasoku.data.augment.basic import own_loader
from kasoku.data.loading.loader import Loader


@dataclass(frozen=True)
class GrowBatch(Technique, stage=Stage.DATA, changes_batch=True, in_sandbox=False):
    """Multiplies the batch by a schedule's value at the start of each epoch.

    What a device takes at once stays as it is: more parts are accumulated for an update. The rate has its own
    schedule and is left alone.

    Args:
        schedule: epoch -> factor on the batch; the nearest whole number is taken, at least 1.

    Saves: updates, and with them communication; a larger batch late replaces a decay of the rate.
    Costs: nothing that can be measured.
    Ref: Smith et al. 2018 (arXiv 1711.00489); [000]'s references 4 (Ying et al. 2018) and 9 (Mikami et al. 2018).
    """

    schedule: Schedule = StepDecay(milestones=(1 / 3, 2 / 3), gamma=2.0)  # noqa: RUF009 - frozen

    def over(self, epochs: float) -> Technique:
        return replace(self, schedule=self.schedule.over(epochs))

    def batch_factor(self, epoch: int) -> int:
        return max(1, round(self.schedule(epoch)))

    def apply(self, job: Job) -> None:
        growing = _Growing(job, own_loader(job, self))

        def grown(batches: Iterable[Batch]) -> Iterator[Batch]:
            growing.resize(self.batch_factor(math.floor(job.progress + 1e-9)))
            yield from batches

        job.around_loader(grown)
        job.keep("batch", growing)
        job.on_close(lambda: growing.resize(1))


class _Growing:
    def __init__(self, job: Job, loader: Loader) -> None:
        self.job, self.loader = job, loader
        self.first, self.factor = (loader.batch, loader.parts, job.accumulate), 1

    def resize(self, factor: int) -> None:
        if factor == self.factor:
            return
        batch = self.first[0] * factor
        if batch > self.loader.images:
            got = f"batch {batch} at epoch {self.job.progress:g}, but only {self.loader.images} images to train on"
            raise InputError(f"GrowBatch: {got}: let the schedule grow less")
        progress = self.job.progress
        self._apply(factor)
        self.job.set_progress(progress)

    def _apply(self, factor: int) -> None:
        batch, parts, self.job.accumulate = (n * factor for n in self.first)
        self.loader.configure(batch=batch, parts=parts)
        self.factor = factor

    def state_dict(self) -> dict[str, Any]:
        return {"factor": self.factor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._apply(int(state["factor"]))
