"""Batches and images that grow as training goes on."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any

from torch.nn import functional

from kasoku.core import Batch, InputError, Job, Range, Schedule, Stage, StepDecay, Technique
from kasoku.core.schedule import epoch_of
from kasoku.data.augment.basic import own_loader
from kasoku.data.loading.loader import Loader


@dataclass(frozen=True)
class GrowBatch(Technique, stage=Stage.DATA, in_sandbox=False):
    """Multiplies the batch by a schedule's value at the start of each epoch.

    More parts are accumulated for an update; with `at_once` the parts grow first. The rate has its own schedule and is
    left alone.

    Args:
        schedule: epoch -> factor on the batch; the nearest whole number is taken, at least 1.
        at_once: images up to which a device's part may grow, 0 or more; 0: parts stay as large as they are.

    Saves: updates, and with them communication; a larger batch late replaces a decay of the rate.
    Costs: nothing that can be measured; with `at_once` the memory of larger parts.
    Ref: Smith et al. 2018 (arXiv 1711.00489); [000]'s references 4 (Ying et al. 2018) and 9 (Mikami et al. 2018).
    """

    schedule: Schedule = StepDecay(milestones=(1 / 3, 2 / 3), gamma=2.0)  # noqa: RUF009 - frozen
    at_once: Annotated[int, Range("images, or 0 for parts of one size", at_least=0)] = 0

    def over(self, epochs: float) -> Technique:
        return replace(self, schedule=self.schedule.over(epochs))

    def batch_factor(self, epoch: int) -> int:
        return max(1, round(self.schedule(epoch)))

    def apply(self, job: Job) -> None:
        growing = _Growing(job, own_loader(job, self), self.at_once)

        def grown(batches: Iterable[Batch]) -> Iterator[Batch]:
            growing.resize(self.batch_factor(math.floor(job.progress + 1e-9)))
            yield from batches

        job.around_loader(grown)
        job.keep("batch", growing)
        job.on_close(lambda: growing.resize(1))


class _Growing:
    def __init__(self, job: Job, loader: Loader, at_once: int) -> None:
        self.job, self.loader, self.at_once = job, loader, at_once
        self.first, self.factor = (loader.batch, loader.parts, job.accumulate), 1

    def resize(self, factor: int) -> None:
        if factor == self.factor:
            return
        batch = self.first[0] * factor
        if batch > self.loader.images:
            got = f"batch {batch} at epoch {self.job.progress:g}, but only {self.loader.images} images to train on"
            raise InputError(f"GrowBatch: {got}: let the schedule grow less")
        progress = self.job.progress
        self.load_state_dict({"factor": factor})
        self.job.set_progress(progress)

    def state_dict(self) -> dict[str, Any]:
        return {"factor": self.factor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.factor = int(state["factor"])
        batch, parts, accumulate = self.first
        most = max(1, self.at_once // (batch // parts // self.loader.size))  # times as large as a part is at first
        larger = max(n for n in range(1, most + 1) if self.factor % n == 0)
        self.job.accumulate = accumulate * self.factor // larger
        self.loader.configure(batch=batch * self.factor, parts=parts * self.factor // larger)


@dataclass(frozen=True)
class LowResolution(Technique, stage=Stage.DATA, changes_pixels=True, changes_resolution=True, in_sandbox=False):
    """Shrinks training images (antialiased) for the first epochs; never enlarges.

    LowResolution(96, until=10) shows 96 pixels for 10 epochs, until=0.5 for half of the training.

    Args:
        side: the most pixels of the height and of the width, at least 1.
        until: the time at which images become whole, 0 or more; smaller than 1: a share of the training, else an epoch.
        epochs: the length of the training, 0 or more; 0: the recipe's.

    Saves: the share of the arithmetic that the left-out pixels had, in those epochs.
    Costs: some accuracy, more the longer it lasts; a network that takes any size; Compile compiles for both sizes.
    Ref: progressive resizing: Howard 2018 (DAWNBench).
    """

    side: Annotated[int, Range("pixels", at_least=1)]
    until: Annotated[float, Range("a share of the training, or an epoch", at_least=0)]
    epochs: Annotated[float, Range(at_least=0)] = 0.0

    def over(self, epochs: float) -> Technique:
        return replace(self, epochs=self.epochs or epochs)

    def size(self, epoch: float, size: tuple[int, int]) -> tuple[int, int]:
        """What images of `size` (height, width) are shown as after so many epochs."""
        whole = epoch >= epoch_of(self.until, self.epochs, type(self).__name__)
        return size if whole else (min(self.side, size[0]), min(self.side, size[1]))

    def pixel_share(self, epoch: float, side: int) -> float:
        return math.prod(self.size(epoch, (side, side))) / side**2

    def apply(self, job: Job) -> None:
        """Puts the shrinking between the loader and the loop."""

        def shrunk(batches: Iterable[Batch]) -> Iterator[Batch]:
            for x_NCHW, y_N in batches:
                size = self.size(job.progress, (x_NCHW.shape[2], x_NCHW.shape[3]))
                if size != tuple(x_NCHW.shape[2:]):
                    x_NCHW = functional.interpolate(x_NCHW, size, mode="bilinear", antialias=True)
                yield x_NCHW, y_N

        job.around_loader(shrunk)
