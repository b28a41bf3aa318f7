"""Fewer pixels while the network still learns what is coarse."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch.nn import functional

from kasoku.core.errors import InputError
from kasoku.core.job import Batch, Job
from kasoku.core.technique import Stage, Technique


@dataclass(frozen=True)
class LowResolution(Technique):
    """Shrinks training images to `side` pixels for the first `until` epochs (antialiased), then shows them whole.

    Saves: the share of the arithmetic that the left-out pixels had, in those epochs.
    Costs: some accuracy, more the longer it lasts; a network that takes any size.
    Ref: progressive resizing: Howard 2018 (DAWNBench); Karras et al. 2017 (arXiv 1710.10196) for growing images.
    """

    stage: ClassVar[Stage] = Stage.DATA

    side: int
    until: float

    def __post_init__(self) -> None:
        if self.side < 1 or self.until < 0:
            raise InputError(f"side={self.side}, until={self.until}: at least 1 pixel, and 0 or more epochs")

    def apply(self, job: Job) -> None:
        """Puts the shrinking between the loader and the loop."""
        size = (self.side, self.side)

        def shrunk(batches: Iterable[Batch]) -> Iterator[Batch]:
            for x_NCHW, y_N in batches:
                if job.progress < self.until and max(x_NCHW.shape[2:]) > self.side:
                    yield functional.interpolate(x_NCHW, size, mode="bilinear", antialias=True), y_N
                else:
                    yield x_NCHW, y_N

        job.around_loader(shrunk)
