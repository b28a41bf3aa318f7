"""Loaders: an epoch of batches, ready for the model, from memory or from encoded images."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from itertools import islice
from operator import attrgetter
from typing import Any, Literal

import torch

from kasoku.core import Batch, Comm, InputError, Trace, Wall
from kasoku.data.augment.basic import normalise, stored_side
from kasoku.data.datasets.base import Dataset, Memory
from kasoku.data.decode.decode import read_image
from kasoku.data.loading.executor import FileExecutor, MemoryExecutor, PartNumbers, Skipped
from kasoku.data.loading.pipeline import Pipeline

_EMPTY_PASSES = 2  # in a row, before a loader counts as empty: one that continues where it stopped may be at its end


def loader(
    dataset: Dataset,
    split: Literal["train", "test"],
    batch: int,
    *,
    device: torch.device | str = "cpu",
    comm: Comm | None = None,
    **settings: Any,
) -> "Loader":
    """Loader of dataset's split "train" (shuffled, full batches only) or "test" (in order, whole, never augmented).

    `batch` is global: each rank of comm gets its contiguous share of it. Iterating gives (x_NCHW normalised, y_N int64)
    on the device for one epoch, or for what is left of it.

    `settings` are those of kasoku.data.Pipeline: seed, parts, fill, augment, threads, cache_bytes
    and more. Raises InputError for a batch that is too large or not a multiple of the ranks.
    """
    rank, size = (comm.rank, comm.size) if comm else (0, 1)
    pipeline = Pipeline(dataset, split)
    source = pipeline.source
    given = {"images": len(source), "batch": batch, "rank": rank, "size": size, "device": torch.device(device)}
    pipeline = pipeline.with_(**given | settings)
    if batch < 1 or (pipeline.train and batch > pipeline.images):
        limit = f"at most {pipeline.images} images, all there are to train on" if batch > 0 else "at least 1 image"
        raise InputError(f"batch={batch}: {limit}; choose another batch")
    if batch % pipeline.size and not pipeline.shares:
        raise InputError(f"batch={batch}: not a multiple of {pipeline.size} ranks, which share it; choose one that is")
    if isinstance(source, Memory):
        return Loader(pipeline, MemoryExecutor(source, pipeline.device))
    skipped = Skipped(len(source), dataset.max_bad_fraction)
    return Loader(pipeline, FileExecutor(source, skipped, side=stored_side(max(dataset.image_size))))


def endless(loader: Iterable[Batch]) -> Generator[Batch, None, None]:
    """A loader's batches, epoch after epoch. Raises InputError if there is none."""
    empty = 0
    while empty < _EMPTY_PASSES:
        empty += 1
        for batch in loader:
            empty = 0
            yield batch
    raise InputError("loader: no batch in it that can be iterated again: take more images or a smaller batch")


def _of(path: str) -> Any:
    """A read-only property: an attribute of the pipeline or of the executor."""
    return property(attrgetter(path))


class Loader:
    """One split, batch by batch; `loader` returns one.

    Attributes:
        pipeline: what the batches are; `configure` changes it.
        executor: what makes them.
        epoch: what the next iter() runs.
        position: how many of its batches were handed out. Both move on when a batch is handed out, before it is used:
            with the last one `epoch` becomes the next. A loop that is left early goes on there.
        trace: where waiting for input is noted; a Job sets its own.
        index_N: which images of the split the last batch handed out holds.
        last_share: within `deal_from`, the share that was handed out last.
        whole_shares: with `at_once`, a share is handed out when all its parts are there: no rank stops within a step.
    """

    dataset: Dataset = _of("pipeline.dataset")
    size: int = _of("pipeline.size")
    own_batch: int = _of("pipeline.own_batch")
    seed: int = _of("pipeline.seed")
    images: int = _of("pipeline.images")
    batch: int = _of("pipeline.batch")
    parts: int = _of("pipeline.parts")
    at_once: int = _of("pipeline.at_once")
    first_part: int = _of("pipeline.first_part")
    shares: tuple[int, ...] = _of("pipeline.shares")
    device: torch.device = _of("pipeline.device")
    skipped: Skipped | None = _of("executor.skipped")
    safe_batches: int = _of("executor.safe_batches")

    def __init__(self, pipeline: Pipeline, executor: MemoryExecutor | FileExecutor) -> None:
        self.pipeline, self.executor = pipeline, executor
        self.epoch, self.position = 0, 0
        self.trace = Trace(Wall(), keep=0)
        self.index_N = torch.zeros(0, dtype=torch.int64)
        self.last_share, self.whole_shares = 0, False
        self._next_share: Callable[[], int | None] | None = None

    def __len__(self) -> int:
        """Batches in a whole epoch; parts of batches where they are handed out so."""
        return len(self.pipeline)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """What is left of this epoch."""
        pipeline, epoch, number, next_share = self.pipeline, self.epoch, self.position, self._next_share
        batch, ranks, parts, length = pipeline.batch, pipeline.size, pipeline.parts, len(pipeline)
        if not pipeline.shares and batch % (ranks * parts):
            raise InputError(f"batch={batch}: not a multiple of {ranks} ranks x {parts} parts; choose one that is")
        if pipeline.train and batch > pipeline.images_taken:
            raise InputError(f"batch={batch}: more than the {pipeline.images_taken} images of epoch {epoch}; take less")

        def dealt(next_share: Callable[[], int | None]) -> Iterator[tuple[int, int]]:
            while (share := next_share()) is not None:
                batch_number, rank = divmod(share, ranks)
                yield from ((batch_number * parts + part, rank) for part in range(parts))

        part_numbers = dealt(next_share) if next_share else pipeline.part_numbers(number)
        together = parts if self.whole_shares and pipeline.at_once else 1
        with closing(self._made(pipeline, epoch, part_numbers)) as batches:
            while share_parts := deque(islice(batches, together)):
                while share_parts:
                    x_NCHW, y_N, self.index_N, share = share_parts.popleft()
                    number += 1
                    if next_share:
                        self.last_share = share
                    else:
                        self.epoch, self.position = (epoch + 1, 0) if number == length else (epoch, number)
                    yield x_NCHW, y_N

    def _made(self, pipeline: Pipeline, epoch: int, part_numbers: PartNumbers) -> Generator[tuple[Any, ...]]:
        """The batches of these parts: x_NCHW, y_N, their indices, the number of their share."""
        parts, transform = pipeline.parts, pipeline.transform()
        vary = pipeline.vary if pipeline.train and not pipeline.varies_in_threads else None
        ahead: deque[tuple[int, int]] = deque()  # parts that are being decoded

        def noted() -> Iterator[tuple[int, int]]:
            for part_number in part_numbers:
                ahead.append(part_number)
                yield part_number

        with closing(self.executor.run(pipeline, epoch, noted(), self.trace)) as raw:
            for images_NHWC, y_N, index_N in raw:  # enumerate() would keep the last one
                number, rank = ahead.popleft()
                share, part = number // parts * pipeline.size + rank, number % parts
                if vary:
                    first = share * parts
                    if pipeline.at_once:
                        first = number // parts * (pipeline.batch // pipeline.at_once) + pipeline.first_part
                    with self.trace.span("transforms"):
                        images_NHWC = vary(images_NHWC, index_N, epoch, first + part)
                x_NCHW = transform(images_NHWC, index_N, epoch)
                del images_NHWC  # its memory goes to a batch that is decoded meanwhile
                yield x_NCHW, y_N, index_N, share

    # ---- position

    def seek(self, epoch: int, position: int) -> None:
        """Go on from a batch of an epoch."""
        self.epoch, self.position = epoch, position

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is, and what it skipped; any number of ranks and parts can go on from there."""
        skipped = self.skipped.state_dict() if self.skipped is not None else {}
        state = {"epoch": self.epoch, "position": self.position, "parts": self.parts}
        return state | ({"skipped": skipped} if skipped else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there: the same batches follow, bit for bit; in this loader's parts."""
        epoch = int(state["epoch"])
        position, within = divmod(int(state["position"]) * self.parts, int(state.get("parts", self.parts)))
        if within:
            got = f"position={state['position']} in {state['parts']} parts a batch: it lies within a batch"
            advice = "resume with as many ranks as it was saved with"
            raise InputError(f"{got}, which cannot be gone on with in {self.parts} parts; {advice}")
        if epoch < 0 or not 0 <= position < len(self):
            got = f"epoch={epoch}, position={position}: this loader has {len(self)} batches an epoch"
            raise InputError(f"{got}; resume with the batch and data it was saved with")
        self.seek(epoch, position)
        if self.skipped is not None:
            self.skipped.load_state_dict(state.get("skipped", {}))

    @contextmanager
    def deal_from(self, next_share: Callable[[], int | None]) -> Iterator[None]:
        """In the body, iterating gives the shares of batches that next_share returns, until it returns None.

        A share is a number, batch * size + rank, so that ranks take another one when they have used theirs. Its parts
        come one after the other. `position` does not move.
        """
        self._next_share, self.last_share = next_share, 0
        try:
            yield
        finally:
            self._next_share = None

    # ---- other settings

    def configure(self, **settings: Any) -> Callable[[], object]:
        """Changes settings of the pipeline, from the next iter() on; returns what sets these to their old values.

        Raises InputError for an augmentation that does not fit the images.
        """
        old, self.pipeline = self.pipeline.settings, self.pipeline.with_(**settings)
        return lambda: self.configure(**{name: old[name] for name in settings})

    def survey(self, images: int = 0) -> "Loader":
        """A loader of the first `images` training images (0: all) in order, each once, unvaried, for statistics.

        Batches are as large as this one's parts; its position does not move. Images
        that it cannot decode are added to this loader's `skipped`.
        """
        pipeline = self.pipeline.with_(
            shuffled=False,
            images=min(images or self.images, self.images),
            batch=self.at_once * self.size or self.batch // self.parts,
            shares=(),
            parts=1,
            at_once=0,
            fill=False,
            min_last=2 * self.pipeline.size,  # no rank is left with one image, which has no variance
        )
        survey = Loader(pipeline, self.executor)
        survey.trace = self.trace
        return survey

    def sandbox(self) -> "Loader":
        """The same images in the same order, read without a trace in this loader."""
        twin = Loader(self.pipeline.with_(shares=(), at_once=0), self.executor.fork())
        twin.epoch, twin.position, twin.trace = self.epoch, self.position, self.trace
        return twin

    def warm(self) -> None:
        """Reads the images of the next batch before anyone iterates; changes no batch."""
        self.executor.warm(self.pipeline, self.epoch, self.position)


def sample(dataset: Dataset, n: int) -> torch.Tensor:
    """x_NCHW: n training images, normalised and not varied, to prepare a model with.

    The first n of a set in memory; of files, which may lie class by class, n at equal distances. Fewer if it has fewer.
    """
    part, n = dataset.train, min(n, len(dataset.train))
    if isinstance(part, Memory):
        return normalise(part.images_NHWC[:n], dataset.mean, dataset.std)
    images = []
    for row in range(n):
        first = row * len(part) // n
        for at in (*range(first, len(part)), *range(first)):  # an image, or the next one that can be decoded
            try:
                images.append(read_image(part.read(at), dataset.image_size, dataset.channels, name=part.name(at)))
                break
            except InputError as error:  # counted and named by the loader
                if error.gone:
                    raise
        else:
            raise InputError(f"{dataset.name}: no image in it can be decoded; give another data set")
    return normalise(torch.stack(images), dataset.mean, dataset.std)
