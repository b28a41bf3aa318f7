"""Batches of images that are read and decoded a few batches ahead, by threads or processes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any

import numpy as np
import torch

from kasoku.core.errors import InputError
from kasoku.core.hardware import cores
from kasoku.core.trace import Trace
from kasoku.data.datasets.base import Encoded, GoneError, Items
from kasoku.data.decode import nvjpeg
from kasoku.data.decode.decode import decode
from kasoku.data.loading.bad_samples import Skipped
from kasoku.data.loading.decode_tasks import Bad, bad_images, decode_chunk, result, start_process, submit_to_process
from kasoku.data.loading.device_prefetch import DevicePrefetch, Moving
from kasoku.data.loading.executor import Executor, Numbers, RawBatch, RawBatches
from kasoku.data.loading.pipeline import Pipeline
from kasoku.data.loading.workers import Autotuner, Pool, ProcessPool, ThreadPool

_AHEAD = 2  # batches that are decoded while one is used
_CHUNK = 16  # images a thread takes at a time
_MOST = 64  # threads


class FileExecutor(Executor):
    """Decodes images when they are needed. Threads live while an epoch is iterated, processes as long as this does.

    Args:
        side: shorter side of the decoded images that are kept.
    """

    skipped: Skipped

    def __init__(self, split: Encoded, skipped: Skipped, *, side: int) -> None:
        super().__init__()
        self.split, self.skipped, self.side = split, skipped, side
        self.cache: dict[int, np.ndarray] = {}  # decoded images; the same for all forks
        self._autotuner: Autotuner | None = None
        self._processes: ProcessPool | None = None  # each reads the data set anew
        self._owns_processes = True

    def run(self, pipeline: Pipeline, epoch: int, numbers: Numbers, trace: Trace | None) -> RawBatches:
        pipeline.check_decoder()
        pool = self._pool(pipeline)
        try:
            yield from _Iteration(self, pipeline, epoch, pool, trace).batches(pipeline.indices(epoch, numbers))
        finally:
            if pool is not self._processes:
                pool.close()

    def warm(self, pipeline: Pipeline, epoch: int, first: int) -> None:
        """Reads this rank's images of the next batch; those that are kept it decodes."""
        if isinstance(self.split, Items):
            return
        batch = pipeline.indices(epoch, islice(pipeline.numbers(first), pipeline.shard.parts))
        read = self.cached if pipeline.keeps_decoded else self.split.read
        pool = ThreadPool(max(1, min(cores(), 32) // pipeline.decode.cores_shared_by))
        try:
            tasks = [pool.submit(_try, read, index) for index in torch.cat(list(batch)).tolist()]
            for task in tasks:
                task.result()
        finally:
            pool.close()

    def fork(self) -> FileExecutor:
        """Shares the decoded images and the processes there are; counts and skips for itself."""
        twin = FileExecutor(self.split, self.skipped.copy(), side=self.side)
        twin.cache, twin._processes = self.cache, self._processes
        twin._owns_processes = self._processes is None
        return twin

    def restart_autotuner(self) -> None:
        self._autotuner = None

    def close(self) -> None:
        if self._processes and self._owns_processes:
            self._processes.close()

    def cached(self, index: int) -> np.ndarray:
        """One decoded image, kept; what was pixels already is not kept a second time."""
        image = self.cache.get(index)
        if image is not None:
            return image
        source = self.split.read(index)
        if isinstance(source, bytes):
            source = self.cache[index] = decode(source, self.side, name=self.split.name(index))
        return source

    def tune(self, pool: Pool, batch_s: float, waited_s: float) -> None:
        """After a batch: has another number of threads tried now and then."""
        if self._autotuner:
            pool.resize(self._autotuner.batch(batch_s, waited_s))
            self.stats.workers = self._autotuner.size

    def _pool(self, pipeline: Pipeline) -> Pool:
        threads, device = pipeline.decode.threads, pipeline.to_device.device
        own = threads or max(1, cores() // pipeline.decode.cores_shared_by)
        if isinstance(self.split, Items) and self.split.processes:
            self.stats.workers = self.split.processes
            self._processes = self._processes or ProcessPool(self.split.processes, start_process, self.split)
            return self._processes
        if self._autotuner is None:
            most = min(_MOST, 4 * own)
            self._autotuner = Autotuner(min(own, most), most, shared=device.type == "cpu")
        self.stats.workers = threads or self._autotuner.size
        return ThreadPool(self.stats.workers)


def _try(read: Callable[[int], object], index: int) -> None:
    try:
        read(index)
    except GoneError:
        raise
    except InputError:
        pass  # counted and named with its batch


class _Iteration:
    """The batches of one iteration: submitted to the pool, waited for, finished, sent to the device."""

    def __init__(self, executor: FileExecutor, pipeline: Pipeline, epoch: int, pool: Pool, trace: Trace | None) -> None:
        self.executor, self.pipeline, self.epoch, self.pool, self.trace = executor, pipeline, epoch, pool, trace
        self.split, self.stats, self.skipped = executor.split, executor.stats, executor.skipped
        self.size, self.device = pipeline.dataset.image_size, pipeline.to_device.device
        self.read = executor.cached if pipeline.keeps_decoded else executor.split.read
        self.prefetch = DevicePrefetch(self.device, trace)

    def batches(self, indices: Iterator[torch.Tensor]) -> RawBatches:
        waiting: deque[PendingBatch] = deque()
        in_flight = InFlight(self._send, ahead=self.prefetch.stream is not None)
        request_s = time.perf_counter()
        try:
            more = True
            while more or waiting or in_flight.left:
                while more and len(waiting) <= _AHEAD:
                    index_N = next(indices, None)
                    more = index_N is not None
                    if index_N is not None:
                        waiting.append(self._submit(index_N))
                waited_s = self._wait(() if in_flight.left else waiting)
                in_flight.start(waiting)
                if self.pipeline.shard.size > 1:
                    self.executor.safe_batches = in_flight.safe(waiting)
                yield self.prefetch.arrive(in_flight.moving.popleft())
                now_s = time.perf_counter()
                if not self.pipeline.decode.threads:
                    self.executor.tune(self.pool, now_s - request_s, waited_s)
                request_s = now_s
        finally:
            for chunk in (chunk for batch in waiting for chunk in batch.chunks):
                chunk.cancel()

    def _submit(self, index_N: torch.Tensor) -> PendingBatch:
        pin = self.device.type == "cuda"
        images_NHWC = torch.empty((len(index_N), *self.size, 3), dtype=torch.uint8, pin_memory=pin)
        out_NHWC = images_NHWC.numpy()
        index = index_N.tolist()
        crops = self.pipeline.crops(index_N, self.epoch)
        step = max(1, min(_CHUNK, -(-len(index) // max(1, self.stats.workers))))
        cuts = [slice(start, start + step) for start in range(0, len(index), step)]
        if isinstance(self.pool, ProcessPool):
            chunks = [submit_to_process(self.pool, index[cut], crops[cut], self.size) for cut in cuts]
            return PendingBatch(images_NHWC, index_N, cuts, chunks)
        jpegs = nvjpeg.Jpegs(self.size, self.device) if self.pipeline.decode.decoder == "nvjpeg" else None
        name, submit = self.split.name, self.pool.submit
        tasks = [submit(decode_chunk, out_NHWC[cut], index[cut], crops[cut], self._source, name, jpegs) for cut in cuts]
        return PendingBatch(images_NHWC, index_N, cuts, tasks, jpegs)

    def _source(self, index: int) -> bytes | np.ndarray:
        """What an image is cropped from. Raises InputError at once for one that was bad before."""
        if index in self.skipped.met:
            raise InputError(self.skipped.reasons[index])
        return self.read(index)

    def _wait(self, waiting: Sequence[PendingBatch]) -> float:
        """Waits for the first of them; returns the seconds."""
        begin_s = time.perf_counter()
        ready, stats = sum(batch.ready for batch in waiting), self.stats
        if waiting:
            stats.waits += 1
            stats.full += (ready / len(waiting) - stats.full) / stats.waits
            with self.trace.span("input", f"{ready} batches ready") if self.trace else nullcontext():
                for chunk in waiting[0].chunks:
                    result(chunk)
        waited_s = time.perf_counter() - begin_s
        stats.waited_s += waited_s
        return waited_s

    def _send(self, batch: PendingBatch) -> Moving:
        stream = self.prefetch.stream
        with torch.cuda.stream(stream) if stream else nullcontext():
            return self.prefetch.start(*self._finish(batch), batch.jpegs)

    def _finish(self, batch: PendingBatch) -> RawBatch:
        """A decoded batch. In place of a bad image training shows the next good one; a test leaves it out."""
        self.stats.batches += 1
        self.stats.images += len(batch.index_N)
        bad: Bad = {}
        for cut, chunk in zip(batch.cuts, batch.chunks, strict=True):
            output = result(chunk)
            if isinstance(output, tuple):  # of a process
                batch.images_NHWC[cut] = torch.from_numpy(output[0])
            bad |= {cut.start + row: reason for row, reason in bad_images(output).items()}
        if batch.jpegs:
            bad |= batch.jpegs.decode(batch.index_N, batch.images_NHWC)
        shown_N, train = batch.index_N, self.pipeline.train
        if bad:
            shown_N = shown_N.clone()
            for row, reason in bad.items():
                self.skipped.add(int(shown_N[row]), reason)
                if train:
                    shown_N[row] = self._replacement(int(shown_N[row]), batch.images_NHWC[row].numpy())
        y_N = self.split.labels_N[shown_N]
        if bad and not train:
            good_N = torch.ones(len(y_N), dtype=torch.bool)
            good_N[list(bad)] = False
            return batch.images_NHWC[good_N], y_N[good_N], batch.index_N[good_N]
        return batch.images_NHWC, y_N, batch.index_N

    def _replacement(self, index: int, out_HWC: np.ndarray) -> int:
        """The next image that can be decoded, written in place of this one."""
        for step in range(1, len(self.split)):
            other = (index + step) % len(self.split)
            crops = self.pipeline.crops(torch.tensor([other]), self.epoch)
            bad = decode_chunk(out_HWC[None], [other], crops, self._source, self.split.name)
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
    chunks: list[Future[Any]]
    jpegs: nvjpeg.Jpegs | None = None

    @property
    def ready(self) -> bool:
        return all(chunk.done() for chunk in self.chunks)

    @property
    def good(self) -> bool:
        """Decoded, every image of it; what the GPU decodes may still fail."""
        return self.ready and not self.jpegs and not any(c.exception() or bad_images(c.result()) for c in self.chunks)


class InFlight:
    """Batches on their way to the device; nothing else refers to them. A failure is raised at the batch's turn."""

    def __init__(self, send: Callable[[PendingBatch], Moving], *, ahead: bool) -> None:
        self.moving: deque[Moving] = deque()
        self._send, self._ahead = send, ahead
        self._failed: InputError | None = None  # why there is none after those

    @property
    def left(self) -> bool:
        return bool(self.moving or self._failed)

    def start(self, waiting: deque[PendingBatch]) -> None:
        """Sends one at least; where it can go on beside computing, one more if it is ready."""
        if not self.moving:
            if self._failed:
                raise self._failed
            self.moving.append(self._send(waiting.popleft()))
        if self._ahead and not self._failed and waiting and waiting[0].ready:
            try:
                self.moving.append(self._send(waiting.popleft()))
            except InputError as error:
                self._failed = error

    def safe(self, waiting: deque[PendingBatch]) -> int:
        """How many cannot fail any more, after the next one."""
        behind = () if self._failed else takewhile(lambda batch: batch.good, waiting)
        return len(self.moving) - 1 + sum(1 for _ in behind)
