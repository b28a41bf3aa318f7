"""Fewer pixels while the network still learns what is coarse."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from torch.nn import functional

from kasoku.core import Batch, InputError, Job, Schedule, Stage, Technique
from kasoku.core.schedule import epoch_of


@dataclass(frozen=True)
class LowResolution(Technique, stage=Stage.DATA, changes_pixels=True, changes_resolution=True, in_sandbox=False):
    """Shrinks training images (antialiased) for the first epochs, to one side or to one that grows; never enlarges.

    LowResolution(96, until=10) shows 96 pixels for 10 epochs, until=0.5 for half of the training;
    LowResolution(Constant(warmup=10, start=0.5)) half of each side at first, then more, and whole images from epoch 10
    on.

    Args:
        side: in pixels, at least 1; or a schedule: epoch -> share of the image's own height and width.
        until: the time at which images become whole, 0 or more, where `side` is in pixels; a share of the training if
            it is smaller than 1, else an epoch. A schedule itself says when.
        multiple: a schedule's side is rounded to this many pixels, at least 1; whole images stay as they are.
        epochs: the length of the training, 0 or more; 0: the recipe's.

    Saves: the share of the arithmetic that the left-out pixels had, in those epochs.
    Costs: some accuracy, more the longer it lasts; a network that takes any size; Compile compiles anew for each size,
        of which a larger `multiple` makes fewer.
    Ref: progressive resizing: Howard 2018 (DAWNBench); Karras et al. 2017 (arXiv 1710.10196) for growing images.
    """

    side: Schedule | int
    until: float | None = None
    multiple: int = 32
    epochs: float = 0.0

    def __post_init__(self) -> None:
        if self.multiple < 1:
            raise InputError(f"multiple={self.multiple}: at least 1 pixel")
        if isinstance(self.side, Schedule):
            if self.until is not None:
                raise InputError(f"until={self.until}: only for a side in pixels, a schedule ends itself; leave it out")
        elif self.until is None:
            raise InputError(f"side={self.side}: until when? Give until, a share of the training or an epoch")
        elif self.side < 1 or not (self.until >= 0 <= self.epochs):
            raise InputError(f"side={self.side}, until={self.until}, epochs={self.epochs}: at least 1 pixel, 0 or more")

    def over(self, epochs: float) -> Technique:
        side = self.side.over(epochs) if isinstance(self.side, Schedule) else self.side
        return replace(self, side=side, epochs=self.epochs or epochs)

    def size(self, epoch: float, size: tuple[int, int]) -> tuple[int, int]:
        """What images of `size` (height, width) are shown as after so many epochs."""
        shown = []
        for extent in size:
            if isinstance(self.side, Schedule):
                share = self.side(epoch)
                wanted = max(1, round(share * extent / self.multiple)) * self.multiple if share < 1 else extent
            else:
                wanted = self.side if epoch < epoch_of(self.until or 0, self.epochs, type(self).__name__) else extent
            shown.append(min(wanted, extent))
        return shown[0], shown[1]

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
