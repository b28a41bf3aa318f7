"""Ranks that take unequal shares of a batch: the faster, the more images; the mean over all images stays exact."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from torch import Tensor

from kasoku.core import InputError, Job, Range, Stage, Technique
from kasoku.data.augment.basic import own_loader
from kasoku.data.loading.loader import Loader

_ALIKE = 0.1  # ranks whose speeds differ by no more take equal shares


def by_speed(batch: int, images_per_s: Sequence[float], *, unit: int = 1) -> tuple[int, ...]:
    """How many images of a batch each rank takes, in proportion to its speed.

    Whole units, by largest remainders, at least one each; equal speeds to a tenth of the fastest give equal shares.

    Args:
        batch: images of a step over all ranks.
        images_per_s: of each rank.
        unit: every share is a multiple of it.

    Raises:
        InputError: for a batch of no whole units, or of fewer than there are ranks; for a speed that is none.
    """
    ranks, units = len(images_per_s), batch // unit
    if batch % unit or units < ranks:
        raise InputError(f"batch={batch}: {ranks} ranks share it in units of {unit} images, at least one each")
    if not all(0 < speed < math.inf for speed in images_per_s):
        raise InputError(f"images_per_s={list(images_per_s)}: speeds above 0 are wanted")
    if min(images_per_s) >= (1 - _ALIKE) * max(images_per_s) and units % ranks == 0:
        return (batch // ranks,) * ranks
    spare, whole = units - ranks, sum(images_per_s)  # beyond the one unit that each has
    exact = [max(0.0, units * speed / whole - 1) for speed in images_per_s]
    exact = [spare * share / (sum(exact) or 1.0) for share in exact]
    more = [math.floor(share) for share in exact]
    most_left = sorted(range(ranks), key=lambda rank: (more[rank] - exact[rank], rank))
    for rank in most_left[: spare - sum(more)]:
        more[rank] += 1
    return tuple(unit * (1 + share) for share in more)


@dataclass(frozen=True)
class Shares(Technique, stage=Stage.DATA, in_sandbox=False):
    """Each rank takes its own number of images of every batch, so that none waits for a slower one.

    The batches stay what they are, image by image, and so does the data order.

    Args:
        images: of a batch, for each rank in rank order, each at least 1; `by_speed` gives them.
        at_once: the images of a part, 0 or more; a rank takes as many parts as its share has, one after the other. 0:
            all ranks take equally many parts.

    Saves: the time that fast ranks wait for slow ones.
    Costs: BatchNorm's groups are as large as each rank's share, unless shares are multiples of norm_batch.
    Maths: g = sum over ranks of images / batch * g_rank: the loss of a rank is multiplied by images * ranks / batch
        before the mean over ranks, so that every image counts the same.
    Ref: Moreno-Alvarez et al. 2020 (heterogeneous data parallelism); Hetseq, Qian et al. 2021.
    """

    images: Annotated[tuple[int, ...], Range("the images of each rank", at_least=1)] = ()
    at_once: Annotated[int, Range("0 for equally many parts", at_least=0)] = 0

    def parts(self, rank: int, equal: int) -> int:
        """The parts that a rank takes of a batch, if they would be `equal` on all ranks."""
        return self.images[rank] // self.at_once if self.at_once else equal

    def apply(self, job: Job) -> None:
        """Has the loader share its batches so, and weighs the loss. Raises InputError where they do not fit the job."""
        if not self.images or job.comm.size == 1:
            return
        plain: Loader = own_loader(job, self)
        ranks, parts = job.comm.size, plain.parts
        unit = self.at_once or parts
        if len(self.images) != ranks or sum(self.images) != plain.batch or any(n % unit for n in self.images):
            got = f"images={self.images} for {ranks} ranks, batch={plain.batch} in {parts} parts"
            raise InputError(f"Shares: {got}: a multiple of the parts for each rank, that add up to the batch")
        plain_loss = job.loss
        exact = any(technique.sums_exactly for technique in job.applied)  # it counts the parts itself

        def loss(outputs: Any, y_N: Tensor) -> Tensor:
            value = plain_loss(outputs, y_N)
            weighted = value * (len(y_N) * ranks * plain.parts / plain.batch)
            return weighted.detach() + (value - value.detach()) if exact else weighted

        job.configure_loader(shares=self.images, at_once=self.at_once)
        job.patch(job, "loss", loss)
