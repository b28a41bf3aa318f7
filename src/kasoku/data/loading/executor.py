"""Executors make the batches of a pipeline: from memory; from files: file_executor.py.

`Skipped` has the images that cannot be decoded: which, and why.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable

import torch

from kasoku.core import InputError, Trace
from kasoku.data.datasets.base import Memory
from kasoku.data.loading.pipeline import Pipeline

RawBatch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # images_NHWC (uint8), y_N, index_N, on the device
RawBatches = Generator[RawBatch, None, None]
PartNumbers = Iterable[tuple[int, int]]  # of parts: number in the epoch, rank whose share it is


class Skipped:
    """Images that cannot be decoded: left out, counted, named; too many of them end the training.

    On several ranks each counts what it met itself, so the limit is each rank's own; a checkpoint holds what all met.
    Only the thread that takes the batches adds to it; decoding threads read it.
    """

    def __init__(self, images: int, max_bad_fraction: float) -> None:
        self.images, self.fraction = images, max_bad_fraction
        self.reasons: dict[int, str] = {}  # by image, also of the earlier parts of a resumed training
        self.met: set[int] = set()  # in this part: these count; earlier ones may have been mended, and are tried again

    def add(self, index: int, reason: str) -> None:
        """Notes an image. Raises InputError with the list where there are too many."""
        self.reasons[index] = reason  # first: a thread that finds the image in `met` reads its reason
        self.met.add(index)
        most = max(1, int(self.fraction * self.images))
        if len(self.met) > most:
            got = f"more than {most} of {self.images:,} images cannot be decoded (max_bad_fraction={self.fraction:g})"
            advice = "mend them, or go on without more of them: data.max_bad_fraction=0.1"
            raise InputError(f"{got}: {self.summary(self.met)}; {advice}")

    def summary(self, images: Collection[int] | None = None) -> str:
        """The reasons of the first ten of them, in a line; all that are noted by default."""
        shown = sorted(self.reasons if images is None else images)
        return "; ".join([*(self.reasons[i] for i in shown[:10]), *(["..."] if len(shown) > 10 else [])])

    def state_dict(self) -> dict[int, str]:
        """Which images, and of the first thousand why."""
        return {index: reason if i < 1000 else "" for i, (index, reason) in enumerate(sorted(self.reasons.items()))}

    def load_state_dict(self, state: dict[int, str]) -> None:
        self.reasons.update(state)


class MemoryExecutor:
    """Makes the batches of pipelines of a split in memory, which is moved to the device once."""

    skipped: Skipped | None = None  # the images that cannot be decoded; None: what is in memory does not fail
    safe_batches = 0  # on several ranks, how many of the next batches cannot fail any more

    def __init__(self, split: Memory, device: torch.device) -> None:
        self._images_NHWC, self._labels_N = split.images_NHWC.to(device), split.labels_N.to(device)

    def run(self, pipeline: Pipeline, epoch: int, part_numbers: PartNumbers, trace: Trace | None) -> RawBatches:
        for index_N in pipeline.indices(epoch, part_numbers, pipeline.device):
            yield self._images_NHWC.index_select(0, index_N), self._labels_N.index_select(0, index_N), index_N

    def warm(self, pipeline: Pipeline, epoch: int, first: int) -> None:
        """Does nothing: the images are there."""

    def fork(self) -> MemoryExecutor:
        return self
