"""Executors make the batches of a pipeline, from memory or from files."""

import copy
import time
from collections import deque
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, nullcontext
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any

import numpy as np
import torch

from kasoku.core import InputError, Trace
from kasoku.core.hardware import cores
from kasoku.data.datasets.base import Encoded, Items, Memory
from kasoku.data.decode import nvjpeg
from kasoku.data.decode.decode import crop, decode
from kasoku.data.loading.pipeline import Crop, Pipeline
from kasoku.data.loading.workers import Autotuner, ThreadPool

_AHEAD = 2  # batches that are decoded while one is used
_CHUNK = 16  # images a thread takes at a time
_MOST = 64  # threads
RawBatch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # images_NHWC (uint8), y_N, index_N, on the device
RawBatches = Generator[RawBatch, None, None]
PartNumbers = Iterable[tuple[int, int]]  # of parts: number in the epoch, rank whose share it is
Bad = dict[int, str]  # row of a part of a batch -> what is wrong with its image
Moving = tuple[RawBatch, Any]  # tensors on their way to the device, and the event that they are there


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

    def __init__(self, split: Memory, device: torch.device) -> None:
        self._images_NHWC, self._labels_N = split.images_NHWC.to(device), split.labels_N.to(device)

    def run(self, pipeline: Pipeline, epoch: int, part_numbers: PartNumbers, trace: Trace) -> RawBatches:
        for index_N in pipeline.indices(epoch, part_numbers, pipeline.device):
            yield self._images_NHWC.index_select(0, index_N), self._labels_N.index_select(0, index_N), index_N

    def warm(self, pipeline: Pipeline, epoch: int, first: int) -> None:
        """Does nothing: the images are there."""

    def fork(self) -> "MemoryExecutor":
        return self


class FileExecutor:
    """Makes the batches of pipelines of a split of files: decodes by threads that live while an epoch is iterated."""

    def __init__(self, split: Encoded, skipped: Skipped, *, side: int) -> None:
        self.split, self.skipped = split, skipped
        self.safe_batches = 0  # on several ranks, how many of the next batches cannot fail any more
        self.side = side  # the shorter one of the decoded images that are kept
        self.cache: dict[int, np.ndarray] = {}  # decoded images; the same for all forks
        self.autotuner: Autotuner | None = None  # of the number of threads, unless that is set

    def run(self, pipeline: Pipeline, epoch: int, part_numbers: PartNumbers, trace: Trace) -> RawBatches:
        """Gives the batch of each part; takes a part's number when it begins to make it."""
        nvjpeg.check(pipeline.decoder, pipeline.device)
        if pipeline.threads:
            self.autotuner = None
        elif self.autotuner is None:
            own = max(1, cores() // pipeline.cores_shared_by)
            self.autotuner = Autotuner(min(own, _MOST), min(4 * own, _MOST), shared=pipeline.device.type == "cpu")
        with closing(ThreadPool(self.autotuner.size if self.autotuner else pipeline.threads)) as pool:
            yield from _Iteration(self, pipeline, epoch, pool, trace).batches(pipeline.indices(epoch, part_numbers))

    def warm(self, pipeline: Pipeline, epoch: int, first: int) -> None:
        """Reads this rank's images of the next batch, and decodes those whose pixels are kept."""
        if isinstance(self.split, Items):
            return
        batch = pipeline.indices(epoch, islice(pipeline.part_numbers(first), pipeline.parts))
        read = self.cached if pipeline.keeps_decoded else self.split.read

        def touch(index: int) -> None:  # keeps no image
            read(index)

        with closing(ThreadPool(max(1, min(cores(), 32) // pipeline.cores_shared_by))) as pool:
            tasks = [pool.submit(touch, index) for index in torch.cat(list(batch)).tolist()]
            for task in tasks:
                error = task.exception()
                if error and getattr(error, "gone", True):  # a bad image is counted and named with its batch
                    raise error

    def fork(self) -> "FileExecutor":
        """Another one for the same batches, which shares the decoded images; it skips and tunes for itself."""
        twin = FileExecutor(self.split, copy.deepcopy(self.skipped), side=self.side)
        twin.cache = self.cache
        return twin

    def cached(self, index: int) -> np.ndarray:
        """One decoded image, kept; what was pixels already is not kept a second time."""
        if index in self.cache:
            return self.cache[index]
        source = self.split.read(index)
        if isinstance(source, bytes):
            source = self.cache[index] = decode(source, self.side, name=self.split.name(index))
        return source


class _Iteration:
    """The batches of one iteration: submitted to the pool, waited for, finished, sent to the device."""

    def __init__(self, executor: FileExecutor, pipeline: Pipeline, epoch: int, pool: ThreadPool, trace: Trace) -> None:
        self.executor, self.pipeline, self.epoch, self.pool, self.trace = executor, pipeline, epoch, pool, trace
        self.split, self.skipped = executor.split, executor.skipped
        self.size, self.device = pipeline.dataset.image_size, pipeline.device
        self.read = executor.cached if pipeline.keeps_decoded else executor.split.read
        self.vary = pipeline.vary if pipeline.varies_in_threads else None
        self.varied_s: deque[float] = deque()  # seconds of threads, not yet in the trace
        self.copies_ahead = self.device.type == "cuda"  # on a stream of their own, so that computing goes on meanwhile
        self.stream: Any = torch.cuda.Stream(self.device) if self.copies_ahead else None  # type: ignore[no-untyped-call]

    def batches(self, indices: Iterator[torch.Tensor]) -> RawBatches:
        """The batches of these indices. Nothing but `moving` refers to a batch that was sent to the device, so its
        memory is free once the batch is no longer used.

        Note: copies ahead. Where copying goes on beside computing, a batch that is ready is sent to the device before
        its turn; a failure is raised at the batch's turn.
        """
        waiting: deque[PendingBatch] = deque()
        moving: deque[Moving] = deque()
        failure: InputError | None = None  # of the batch after those that are moving
        request_s = time.perf_counter()
        while True:
            while len(waiting) <= _AHEAD and (index_N := next(indices, None)) is not None:
                waiting.append(self._submit(index_N))
            if not (waiting or moving or failure):
                return
            waited_s = self._wait(() if moving or failure else waiting)
            if not moving:
                if failure:
                    raise failure
                moving.append(self._send(waiting.popleft()))
            if self.copies_ahead and not failure and waiting and waiting[0].ready:
                try:
                    moving.append(self._send(waiting.popleft()))
                except InputError as error:
                    failure = error
            if self.pipeline.size > 1:
                good = () if failure else takewhile(lambda batch: batch.good, waiting)
                self.executor.safe_batches = len(moving) - 1 + sum(1 for _ in good)
            yield self._arrive(moving.popleft())
            now_s = time.perf_counter()
            if autotuner := self.executor.autotuner:
                self.pool.resize(autotuner.batch(now_s - request_s, waited_s))
            request_s = now_s

    def _submit(self, index_N: torch.Tensor) -> "PendingBatch":
        pin = self.device.type == "cuda"
        images_NHWC = torch.empty((len(index_N), *self.size, 3), dtype=torch.uint8, pin_memory=pin)
        out_NHWC = images_NHWC.numpy()
        index = index_N.tolist()
        crops = self.pipeline.crops(index_N, self.epoch)
        step = max(1, min(_CHUNK, -(-len(index) // max(1, self.pool.size))))
        cuts = [slice(start, start + step) for start in range(0, len(index), step)]
        tasks = [self.pool.submit(self._make, out_NHWC[cut], index[cut], crops[cut]) for cut in cuts]
        return PendingBatch(images_NHWC, index_N, cuts, tasks)

    def _make(self, out_NHWC: np.ndarray, index: list[int], crops: list[Crop]) -> Bad:
        """Decodes and transforms images into out_NHWC; returns what is wrong with those that cannot be decoded."""
        on_gpu = self.pipeline.decoder == "nvjpeg"
        read = nvjpeg.reader(self._source, index, self.device) if on_gpu else self._source
        bad: Bad = {}
        for row, (image, box) in enumerate(zip(index, crops, strict=True)):
            try:
                crop(read(image), box, out_NHWC[row], name=self.split.name(image))
            except InputError as error:
                if error.gone:
                    raise
                bad[row] = str(error)
        if self.vary:
            begin_s = time.perf_counter()
            for row in [row for row in range(len(index)) if row not in bad]:
                out_NHWC[row] = self.vary.run(torch.from_numpy(out_NHWC[row]), self.epoch, index[row]).numpy()
            self.varied_s.append(time.perf_counter() - begin_s)
        return bad

    def _source(self, index: int) -> bytes | np.ndarray:
        """What an image is cropped from. Raises InputError at once for one that was bad before."""
        if index in self.skipped.met:
            raise InputError(self.skipped.reasons[index])
        return self.read(index)

    def _wait(self, waiting: "Sequence[PendingBatch]") -> float:
        """Waits for the first of them; returns the seconds."""
        begin_s = time.perf_counter()
        if waiting:
            with self.trace.span("input", f"{sum(batch.ready for batch in waiting)} batches ready"):
                for chunk in waiting[0].chunks:
                    chunk.result()
        return time.perf_counter() - begin_s

    def _send(self, batch: "PendingBatch") -> Moving:
        """Begins to copy a batch to the device, to be read after `_arrive`."""
        aside = self.stream is not None
        with torch.cuda.stream(self.stream) if self.stream else nullcontext():
            host = self._finish(batch)
            with self.trace.span("copy", bytes=host[0].nbytes):
                pinned = [t if t.is_pinned() else t.pin_memory() for t in host] if aside else host
                images_NHWC, y_N, index_N = (t.to(self.device, non_blocking=aside) for t in pinned)
                if len(self.pipeline.dataset.mean) == 1:  # luma (ITU-R 601-2), rounded as Pillow rounds it
                    red_NHW, green_NHW, blue_NHW = images_NHWC.int().unbind(3)
                    luma_NHW = (19595 * red_NHW + 38470 * green_NHW + 7471 * blue_NHW + 2**15) >> 16
                    images_NHWC = luma_NHW.to(torch.uint8)[..., None]
                return (images_NHWC, y_N, index_N), self.stream and self.stream.record_event()

    def _arrive(self, moving: Moving) -> RawBatch:
        """Has what is computed from here on wait for the copies; the host does not."""
        batch, event = moving
        if event is not None:
            with self.trace.span("copy"):
                now = torch.cuda.current_stream(self.device)
                now.wait_event(event)
                for tensor in batch:
                    tensor.record_stream(now)  # its memory is not reused before
        return batch

    def _finish(self, batch: "PendingBatch") -> RawBatch:
        """A decoded batch. In place of a bad image training shows the next good one; a test leaves it out."""
        bad: Bad = {}
        for cut, chunk in zip(batch.cuts, batch.chunks, strict=True):
            bad |= {cut.start + row: error for row, error in chunk.result().items()}
        while self.varied_s:
            self.trace.beside["transforms"] += self.varied_s.popleft()
        shown_N, train = batch.index_N.clone(), self.pipeline.train
        for row, reason in bad.items():
            self.skipped.add(int(shown_N[row]), reason)
            if train:
                shown_N[row] = self._replacement(int(shown_N[row]), batch.images_NHWC[row])
        y_N = self.split.labels_N[shown_N]
        if bad and not train:
            good_N = torch.ones(len(y_N), dtype=torch.bool)
            good_N[list(bad)] = False
            return batch.images_NHWC[good_N], y_N[good_N], batch.index_N[good_N]
        return batch.images_NHWC, y_N, batch.index_N

    def _replacement(self, index: int, image_HWC: torch.Tensor) -> int:
        """The next image that can be decoded, written in place of this one."""
        for step in range(1, len(self.split)):
            other = (index + step) % len(self.split)
            crops = self.pipeline.crops(torch.tensor([other]), self.epoch)
            bad = self._make(image_HWC.numpy()[None], [other], crops)
            if not bad:
                return other
            self.skipped.add(other, bad[0])
        raise InputError(f"{self.pipeline.dataset.name}: no image can be decoded: {self.skipped.summary()}")


@dataclass(eq=False)
class PendingBatch:
    """A batch that is being decoded; `chunks` fill its `cuts`."""

    images_NHWC: torch.Tensor  # noqa: N815
    index_N: torch.Tensor  # noqa: N815
    cuts: list[slice]
    chunks: list[Future[Bad]]

    @property
    def ready(self) -> bool:
        return all(chunk.done() for chunk in self.chunks)

    @property
    def good(self) -> bool:
        """Decoded, every image of it."""
        return self.ready and not any(chunk.exception() or chunk.result() for chunk in self.chunks)
