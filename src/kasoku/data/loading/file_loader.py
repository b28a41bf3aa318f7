"""Batches of images that are read and decoded a few batches ahead, by threads or processes."""

from __future__ import annotations

import pickle
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any, Literal

import numpy as np
import torch

from kasoku.core.errors import InputError
from kasoku.core.hardware import cores
from kasoku.data.augment.basic import box_draws, centre_box, random_box, stored_side
from kasoku.data.datasets.base import Dataset, Encoded, GoneError, Items
from kasoku.data.decode import nvjpeg
from kasoku.data.decode.decode import crop, decode
from kasoku.data.decode.jpeg import Box
from kasoku.data.loading.bad_samples import Skipped
from kasoku.data.loading.device_prefetch import Copies, Moving
from kasoku.data.loading.loader import Batches, Fetched, Loader
from kasoku.data.loading.workers import Crew, Pace, ProcessCrew, ThreadCrew

_AHEAD = 2  # batches that are decoded while one is used
_CHUNK = 16  # images a thread takes at a time
_MOST = 64  # threads

Bad = dict[int, str]  # row of a chunk -> what is wrong with its image


@dataclass
class Stats:
    """What a loader saw so far. `full`: of the batches decoded ahead, the mean share that was ready at a wait."""

    batches: int = 0
    waits: int = 0
    images: int = 0
    waited_s: float = 0.0
    full: float = 0.0
    workers: int = 0


class FilesLoader(Loader):
    """Batches of images that are decoded when needed.

    Attributes, beside those of Loader:
        threads: how many decode. 0: found by measuring, from the usable cores on. Threads live while an epoch
            is iterated.
        sharing: how many loaders of this machine share its cores.
        cache_bytes: a set whose decoded images fit is decoded once, to a little more than the size that is wanted, and
            cropped from there; a larger one is decoded anew for every crop, only the part that it needs. 1 GiB.
        decoder: "nvjpeg" has the GPU decode those JPEGs that are baseline, upright, grey or YCbCr; threads only read
            them. The rest is decoded as ever, and by `processes` everything. Nothing is kept; colours differ a little
            from the CPU's. Needs a CUDA device and torchvision. "cpu".
        stats, skipped: see Stats, Skipped.
        sure: on several ranks, how many of the next batches cannot fail any more.
    """

    def __init__(self, dataset: Dataset, split: str, batch: int, **where: Any):
        super().__init__(dataset, split, batch, **where)
        self._split: Encoded = getattr(dataset, split)
        self.threads, self.sharing, self.cache_bytes = 0, 1, 2**30
        self.decoder: Literal["cpu", "nvjpeg"] = "cpu"
        self.stats, self.sure = Stats(), 0
        self.skipped = Skipped(len(self._split), dataset.max_bad_fraction)
        self._pace: Pace | None = None
        self._processes: ProcessCrew | None = None  # as long as the loader: each reads the data set anew
        self._kept: dict[int, np.ndarray] = {}  # the same for all copies of a loader

    @property
    def keeps(self) -> bool:
        """Whether decoded images are kept: known from the set alone, so that batches are the same on all machines."""
        # what items give may be made anew each time, and by other processes
        if self.decoder != "cpu" or isinstance(self._split, Items):
            return False
        side = stored_side(min(self.dataset.image_size))
        return len(self._split) * 4 * side * side <= self.cache_bytes  # 3 bytes a pixel, 4 by 3

    def fetch(self, epoch: int, first: int) -> Batches:
        """Images decoded ahead."""
        nvjpeg.check(self.decoder, self.device)
        shares = self._shares(epoch, first, torch.device("cpu"))
        waiting: deque[_Batch] = deque()
        crew = self._crew()
        copies = Copies(self.device, self.trace)
        onward = _Onward(lambda batch: self._moving(batch, epoch, copies), ahead=copies.stream is not None)
        asked_s = time.perf_counter()
        try:
            more = True
            while more or waiting or onward.left:
                while more and len(waiting) <= _AHEAD:
                    index_N = next(shares, None)
                    more = index_N is not None
                    if index_N is not None:
                        waiting.append(self._started(crew, index_N, epoch))
                waited_s = self._wait(() if onward.left else waiting)
                onward.begin(waiting)
                if self.size > 1:
                    self.sure = onward.sure(waiting)
                yield copies.arrive(onward.moving.popleft())
                now_s = time.perf_counter()
                if not self.threads and self._pace:
                    crew.resize(self._pace.batch(now_s - asked_s, waited_s))
                    self.stats.workers = self._pace.size
                asked_s = now_s
        finally:
            for part in (part for batch in waiting for part in batch.parts):
                part.cancel()
            if crew is not self._processes:
                crew.close()

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is, and what it skipped."""
        skipped = self.skipped.state_dict()
        return super().state_dict() | ({"skipped": skipped} if skipped else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there."""
        super().load_state_dict(state)
        self.skipped.load_state_dict(state.get("skipped", {}))

    def warm(self) -> None:
        """Reads this rank's images of the next batch; those that are kept it decodes."""
        if isinstance(self._split, Items):
            return
        shares = islice(self._shares(self.epoch, self.position, torch.device("cpu")), self.parts)
        crew = ThreadCrew(max(1, min(cores(), 32) // self.sharing))
        try:
            begun = [crew.submit(self._touch, index) for index in torch.cat(list(shares)).tolist()]
            for one in begun:
                one.result()
        finally:
            crew.close()

    def _touch(self, index: int) -> None:
        try:
            if self.keeps:
                self._stored(index)
            else:
                self._split.read(index)
        except GoneError:
            raise
        except InputError:
            pass  # told when its batch is made

    def _crew(self) -> Crew:
        own = self.threads or max(1, cores() // self.sharing)
        if isinstance(self._split, Items) and self._split.processes:
            self.stats.workers = self._split.processes
            self._processes = self._processes or ProcessCrew(self._split.processes, _enter, self._split)
            return self._processes
        if self._pace is None:
            most = min(_MOST, 4 * own)
            self._pace = Pace(min(own, most), most, shared=self.device.type == "cpu")
        self.stats.workers = self.threads or self._pace.size
        return ThreadCrew(self.stats.workers)

    # ---- a batch

    def _started(self, crew: Crew, index_N: torch.Tensor, epoch: int) -> _Batch:
        pin = self.device.type == "cuda"
        images_NHWC = torch.empty((len(index_N), *self.dataset.image_size, 3), dtype=torch.uint8, pin_memory=pin)
        out_NHWC = images_NHWC.numpy()
        index = index_N.tolist()
        boxes = self._boxes(index_N, epoch)
        step = max(1, min(_CHUNK, -(-len(index) // max(1, self.stats.workers))))
        cuts = [slice(start, start + step) for start in range(0, len(index), step)]
        if isinstance(crew, ProcessCrew):
            size = self.dataset.image_size
            parts = [_submitted(crew, index[cut], boxes[cut], size) for cut in cuts]
            return _Batch(images_NHWC, index_N, cuts, parts)
        jpegs = nvjpeg.Jpegs(self.dataset.image_size, self.device) if self.decoder == "nvjpeg" else None
        filled = [crew.submit(self._fill, out_NHWC[cut], index[cut], boxes[cut], jpegs) for cut in cuts]
        return _Batch(images_NHWC, index_N, cuts, filled, jpegs)

    def _boxes(self, index_N: torch.Tensor, epoch: int) -> list[_Place]:
        if self.train and self.augment.crop == "random_resized":
            u_N4: list[list[float]] = box_draws(self.seed, epoch, index_N).tolist()
            return [_Place(self.dataset.image_size, u_4, self.augment.scale_min) for u_4 in u_N4]
        return [_Place(self.dataset.image_size)] * len(index_N)

    def _fill(
        self, out_NHWC: np.ndarray, index: list[int], boxes: list[_Place], jpegs: nvjpeg.Jpegs | None = None
    ) -> Bad:
        """Writes so many images; returns what is wrong with those that it could not."""
        return _filled(out_NHWC, index, boxes, self._source, self._split.name, jpegs)

    def _source(self, index: int) -> bytes | np.ndarray:
        """What an image is cropped from. Raises InputError at once for one that was bad before."""
        if index in self.skipped.met:
            raise InputError(self.skipped.reasons[index])
        return self._stored(index) if self.keeps else self._split.read(index)

    def _stored(self, index: int) -> np.ndarray:
        """One decoded image, kept; what was pixels already is not kept a second time."""
        kept = self._kept.get(index)
        if kept is not None:
            return kept
        source = self._split.read(index)
        if isinstance(source, bytes):
            name = self._split.name(index)
            source = self._kept[index] = decode(source, stored_side(min(self.dataset.image_size)), name=name)
        return source

    def _wait(self, waiting: Sequence[_Batch]) -> float:
        """Waits for the first of them; returns the seconds."""
        begin_s = time.perf_counter()
        ready, stats = sum(batch.ready for batch in waiting), self.stats
        if waiting:
            stats.waits += 1
            stats.full += (ready / len(waiting) - stats.full) / stats.waits
            with self.trace.span("input", f"{ready} batches ready") if self.trace else nullcontext():
                for part in waiting[0].parts:
                    _result(part)
        waited_s = time.perf_counter() - begin_s
        stats.waited_s += waited_s
        return waited_s

    def _moving(self, batch: _Batch, epoch: int, copies: Copies) -> Moving:
        with torch.cuda.stream(copies.stream) if copies.stream else nullcontext():
            return copies.start(*self._whole(batch, epoch), batch.jpegs)

    def _whole(self, batch: _Batch, epoch: int) -> Fetched:
        """A decoded batch. In place of a bad image training shows the next good one; a test leaves it out."""
        self.stats.batches += 1
        self.stats.images += len(batch.index_N)
        bad: Bad = {}
        for cut, part in zip(batch.cuts, batch.parts, strict=True):
            found = _result(part)
            if isinstance(found, tuple):  # of a process
                batch.images_NHWC[cut] = torch.from_numpy(found[0])
            bad |= {cut.start + row: reason for row, reason in _bad(found).items()}
        if batch.jpegs:
            bad |= batch.jpegs.decode(batch.index_N, batch.images_NHWC)
        shown_N = batch.index_N
        if bad:
            shown_N = shown_N.clone()
            for row, reason in bad.items():
                self.skipped.add(int(shown_N[row]), reason)
                if self.train:
                    shown_N[row] = self._instead(int(shown_N[row]), batch.images_NHWC[row].numpy(), epoch)
        y_N = self._split.labels_N[shown_N]
        if bad and not self.train:
            good_N = torch.ones(len(y_N), dtype=torch.bool)
            good_N[list(bad)] = False
            return batch.images_NHWC[good_N], y_N[good_N], batch.index_N[good_N]
        return batch.images_NHWC, y_N, batch.index_N

    def _instead(self, index: int, out_HWC: np.ndarray, epoch: int) -> int:
        """The next image that can be decoded, written in place of this one."""
        for step in range(1, len(self._split)):
            other = (index + step) % len(self._split)
            bad = self._fill(out_HWC[None], [other], self._boxes(torch.tensor([other]), epoch))
            if not bad:
                return other
            self.skipped.add(other, bad[0])
        raise InputError(f"{self.dataset.name}: no image can be decoded: {self.skipped.told()}")


@dataclass(frozen=True)
class _Place:
    """Which part of an image is shown, once its size is known."""

    size: tuple[int, int]
    u_4: list[float] | None = None
    scale_min: float = 1.0

    def __call__(self, width: int, height: int) -> Box:
        if self.u_4 is None:
            return centre_box(width, height, self.size)
        return random_box(width, height, self.u_4, self.scale_min)


@dataclass(eq=False)
class _Batch:
    """A batch in the making; `parts` fill its `cuts`."""

    images_NHWC: torch.Tensor  # noqa: N815
    index_N: torch.Tensor  # noqa: N815
    cuts: list[slice]
    parts: list[Future[Any]]
    jpegs: nvjpeg.Jpegs | None = None

    @property
    def ready(self) -> bool:
        return all(part.done() for part in self.parts)

    @property
    def good(self) -> bool:
        """Decoded, every image of it; what the GPU decodes may still fail."""
        return self.ready and not self.jpegs and not any(p.exception() or _bad(p.result()) for p in self.parts)


class _Onward:
    """Batches on their way to the device; nothing else refers to them. One that cannot be made is told at its turn."""

    def __init__(self, begin: Callable[[_Batch], Moving], *, ahead: bool) -> None:
        self.moving: deque[Moving] = deque()
        self._begin, self._ahead = begin, ahead
        self._failed: InputError | None = None  # why there is none after those

    @property
    def left(self) -> bool:
        return bool(self.moving or self._failed)

    def begin(self, waiting: deque[_Batch]) -> None:
        """One at least; where it can go on beside computing, one more if it is ready."""
        if not self.moving:
            if self._failed:
                raise self._failed
            self.moving.append(self._begin(waiting.popleft()))
        if self._ahead and not self._failed and waiting and waiting[0].ready:
            try:
                self.moving.append(self._begin(waiting.popleft()))
            except InputError as error:
                self._failed = error

    def sure(self, waiting: deque[_Batch]) -> int:
        """How many cannot fail any more, after the next one."""
        behind = () if self._failed else takewhile(lambda batch: batch.good, waiting)
        return len(self.moving) - 1 + sum(1 for _ in behind)


_SPLIT: list[Items] = []  # of a process that decodes


def _submitted(crew: ProcessCrew, index: list[int], boxes: list[_Place], size: tuple[int, int]) -> Future[Any]:
    """What a process makes; where they are gone, that is told when it is waited for."""
    try:
        return crew.submit(_made, index, boxes, size)
    except BrokenProcessPool as error:
        gone: Future[Any] = Future()
        gone.set_exception(error)
        return gone


def _result(part: Future[Any]) -> Any:
    """What a thread or a process made. Raises InputError where the process itself could not."""
    try:
        return part.result()
    except (BrokenProcessPool, pickle.PicklingError) as error:
        raise InputError(
            f"processes: one that reads the data set ended ({error}); it must be picklable, fit in memory, and be made "
            'in a script below `if __name__ == "__main__":`'
        ) from error


def _bad(found: Bad | tuple[np.ndarray, Bad]) -> Bad:
    return found[1] if isinstance(found, tuple) else found


def _enter(split: Items) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group: the training ends its step and saves
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    _SPLIT[:] = [split]


def _made(index: list[int], boxes: list[_Place], size: tuple[int, int]) -> tuple[np.ndarray, Bad]:
    """In a process: so many images, and what is wrong with those that it could not read."""
    out_NHWC = np.zeros((len(index), *size, 3), np.uint8)
    return out_NHWC, _filled(out_NHWC, index, boxes, _SPLIT[0].read, _SPLIT[0].name)


def _filled(
    out_NHWC: np.ndarray,
    index: list[int],
    boxes: list[_Place],
    read: Callable[[int], bytes | np.ndarray],
    name: Callable[[int], str],
    jpegs: nvjpeg.Jpegs | None = None,
) -> Bad:
    """Crops so many images; what is wrong with those that cannot be read or decoded. A source that is gone is none."""
    bad: Bad = {}
    for row, (one, box) in enumerate(zip(index, boxes, strict=True)):
        try:
            source = read(one)
            if jpegs is None or not jpegs.take(one, source, box, name=name(one)):
                crop(source, box, out_NHWC[row], name=name(one))
        except GoneError:
            raise
        except InputError as error:
            bad[row] = str(error)
    return bad
