"""Ranks that take unequal shares of a batch: the faster, the more images; the mean over all images stays exact."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import fmean
from typing import Annotated, Any

import torch
from torch import Tensor

from kasoku.core import Adaptive, Batch, InputError, Job, Range, Stage, Technique
from kasoku.data.augment.basic import own_loader
from kasoku.data.augment.growth import GrowBatch
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
class Shares(Technique, stage=Stage.DATA, shares_batch=True, in_sandbox=False):
    """Each rank takes its own number of images of every batch, so that none waits for a slower one.

    The batches stay what they are, image by image, and so does the data order.

    Args:
        images: each rank's images of a batch, in rank order, at least 1; `by_speed` gives them. Empty: equal
            shares, with `follow`.
        at_once: the images of a part, 0 or more. Loader and job then have as many parts as this rank's share, and it
            takes them one after the other; `kasoku train` sets it where ranks were lost. 0: all ranks take equally
            many parts.
        follow: every 15 steps the ranks compare their computing times. Where the slowest takes 7 % more than the mean,
            twice in a row (later more often, as in Overlap.retune), shares follow the speeds, and are taken back unless
            a step takes 2 % less time. Not with at_once, Asynchronous, AllReduce(exact=true), GrowBatch. Each 15th
            `optimizer.step()` is then collective.

    Saves: the time that fast ranks wait for slow ones.
    Costs: BatchNorm's groups are as large as each rank's share, unless shares are multiples of norm_batch. A change of
        shares drops the images that were decoded ahead. On a GPU, times are those of the host: untried.
    Maths: g = sum over ranks of images / batch * g_rank: the loss of a rank is multiplied by images * ranks / batch
        before the mean over ranks, so that every image counts the same.
    Ref: Moreno-Alvarez et al. 2020 (heterogeneous data parallelism); Hetseq, Qian et al. 2021.
    """

    images: Annotated[tuple[int, ...], Range("the images of each rank", at_least=1)] = ()
    at_once: Annotated[int, Range("0 for equally many parts", at_least=0)] = 0
    follow: bool = False

    def parts(self, rank: int, equal: int) -> int:
        """The parts that a rank takes of a batch, if they would be `equal` on all ranks."""
        return self.images[rank] // self.at_once if self.at_once else equal

    def apply(self, job: Job) -> None:
        """Has the loader share its batches so, and weighs the loss. Raises InputError where they do not fit the job."""
        ranks = job.comm.size
        if not (self.follow or (self.images and ranks > 1)):
            return
        plain: Loader = own_loader(job, self)
        unit, parts = self.at_once or plain.parts, plain.parts
        images = self.images if self.images and ranks > 1 else by_speed(plain.batch, [1.0] * ranks, unit=parts)
        if len(images) != ranks or sum(images) != plain.batch or any(n % unit for n in images):
            got = f"images={images} for {ranks} ranks, batch={plain.batch} in {parts} parts"
            of = "at_once" if self.at_once else "the parts"
            raise InputError(f"Shares: {got}: give each rank a multiple of {of}; the shares must add up to the batch")
        if (own := self.parts(job.comm.rank, parts)) != parts:
            got = f"at_once={self.at_once} makes {own} parts of {images[job.comm.rank]} images"
            raise InputError(f"Shares: {got}, and the loader has {parts}: leave at_once out, or set parts={own} there")
        unfit = (t for t in job.applied if t.is_asynchronous or t.sums_exactly or isinstance(t, GrowBatch))
        if self.follow and (self.at_once or any(unfit)):
            refused = "not with at_once, Asynchronous, AllReduce(exact=true) or GrowBatch"
            raise InputError(f"Shares(follow=true): {refused}: leave it out, or set follow = false")
        plain_loss = job.loss
        exact = any(technique.sums_exactly for technique in job.applied)  # it counts the parts itself

        def loss(outputs: Any, y_N: Tensor) -> Tensor:
            value = plain_loss(outputs, y_N)
            weighted = value * (len(y_N) * ranks * plain.parts / plain.batch)
            return weighted.detach() + (value - value.detach()) if exact else weighted

        job.configure_loader(shares=images, at_once=self.at_once)
        job.patch(job, "loss", loss)
        if self.follow:
            following = _Following(job, plain, images)
            job.around_loader(following.batches)
            job.after_step(following.end_step)
            job.keep("shares", following)


class _Following(Adaptive):
    """Shares that follow the speeds of the ranks."""

    name = "shares"
    drift, expected = 1.07, (1.0,)  # of the slowest rank's computing time over the mean

    def __init__(self, job: Job, loader: Loader, images: tuple[int, ...]) -> None:
        super().__init__(job, torch.device("cpu"))
        self.loader, self.images = loader, images
        self.unit = loader.parts * math.prod(technique.images_per_group or 1 for technique in job.applied)
        if 1 < job.comm.size == loader.batch // self.unit:
            got = f"each rank takes {self.unit} of {loader.batch} images, a BatchNorm group (norm_batch) in each part"
            raise InputError(f"Shares(follow=true): {got}: take a smaller norm_batch or accumulate, or a larger batch")
        self.leaves = False  # the loader's present iteration, since it has the old shares
        self.begun_s = math.inf  # when a batch was handed out
        self.busy_s, self.seen = 0.0, 0  # of this window: computing, images

    def batches(self, inner: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of an epoch; after a change of shares the rest of them in the new ones."""
        while True:
            self.leaves = False
            for batch in inner:
                self.count_time()
                self.seen += len(batch[1])
                self.begun_s = self.job.clock.now()
                yield batch
                if self.leaves and self.loader.position and self.loader.position % self.loader.parts == 0:
                    break
            else:
                return

    def count_time(self) -> None:
        """Adds the time since the last batch was handed out, but for waits, evaluation and checkpoints."""
        now_s = earliest_s = self.job.clock.now()
        idle_s = 0.0
        for span in takewhile(lambda span: span.stop > self.begun_s, reversed(self.job.trace.spans)):
            if span.kind in ("wait", "evaluate", "save") and span.start < earliest_s:  # else within a longer one
                idle_s += min(span.stop, earliest_s) - max(span.start, self.begun_s)
                earliest_s = span.start
        self.busy_s += max(0.0, now_s - self.begun_s - idle_s)
        self.begun_s = math.inf

    def own(self) -> float:
        """Seconds an image."""
        self.count_time()
        image_s = max(1e-9, self.busy_s / max(1, self.seen))
        self.busy_s, self.seen = 0.0, 0
        return image_s

    def values(self, step_s: float, owns: Sequence[float]) -> Sequence[float]:
        times_s = [image_s * images for image_s, images in zip(owns, self.images, strict=True)]
        return [max(times_s) / fmean(times_s)]

    def choose(self, owns: Sequence[float]) -> None:
        old, new = self.images, by_speed(self.loader.batch, [1 / s for s in owns], unit=self.unit)
        self.lasting = []
        if new != old:  # else nothing was tried
            self.take(new)
            self.chosen(f"{' + '.join(map(str, new))} images", old)

    def take(self, setting: Any) -> None:
        """Has the loader share the next batches so."""
        self.images, self.leaves = tuple(setting), True
        self.loader.configure(shares=self.images)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "images": self.images}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on with the shares of the checkpoint, if it has as many ranks."""
        if len(state["images"]) == len(self.images) and sum(state["images"]) == self.loader.batch:
            super().load_state_dict(state)
            self.take(state["images"])
