"""Loaders: an epoch of batches, ready for the model, from memory or from image files."""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from typing import Any, Literal, Protocol

import numpy as np
import torch

from kasoku.core.errors import InputError
from kasoku.core.hardware import cores
from kasoku.data.augment import Augment, Transform, box_draws, centre_box, normalise, random_box, stored_side
from kasoku.data.decode import decode, fitted, read_image
from kasoku.data.order import order
from kasoku.data.sources import Dataset, Files, Memory

_AHEAD = 2  # batches that are decoded while one is used
_CHUNK = 16  # images a thread takes at a time

Fetched = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # images_NHWC, y_N, index_N
Batches = Generator[Fetched, None, None]


class Ranked(Protocol):
    """What a loader asks of a Comm: which of how many processes this is."""

    rank: int
    size: int


def loader(
    dataset: Dataset,
    split: Literal["train", "test"],
    batch: int,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    comm: Ranked | None = None,
) -> Loader:
    """Loader of dataset's split "train" (shuffled, full batches only) or "test" (in order, whole, never augmented).

    `batch` is global: each rank of comm gets its contiguous share of it. Iterating gives (x_NCHW normalised, y_N int64)
    on the device for one epoch, or for what is left of it. Attributes: see Loader.
    Errors: InputError for a batch that is too large or not a multiple of the ranks.
    """
    if split not in ("train", "test"):
        raise InputError(f"split={split}: train or test")
    kind = MemoryLoader if isinstance(getattr(dataset, split), Memory) else FilesLoader
    return kind(dataset, split, batch, seed=seed, device=device, comm=comm)


class Loader:
    """One split, batch by batch; made by `loader`.

    Attributes:
        epoch: what the next iter() runs.
        position: how many of its batches were handed out. Both move on when a batch is handed out, before it is used:
            with the last one `epoch` becomes the next. A loop that is left early goes on there.
        augment: how training images are varied (set it, or apply `Augment` to the job); from the next iter() on.
        dtype: of the images handed out.
        parts: in how many parts a training batch is handed out, one after the other (accumulation, virtual ranks);
            `position` and len() count parts.
        least: fewer images left over at the end of a split in order join the batch before them.
        through: gives the raw batches instead of `fetch`, where several loaders share them.
        fill: complete the last training batch of an epoch with the images the epoch began with; else it is dropped.
    """

    def __init__(
        self,
        dataset: Dataset,
        split: str,
        batch: int,
        *,
        seed: int,
        device: torch.device | str,
        comm: Ranked | None,
    ):
        self.dataset, self.batch, self.seed, self.device = dataset, batch, seed, torch.device(device)
        self.train = split == "train"
        self.rank, self.size = (comm.rank, comm.size) if comm else (0, 1)
        self.images = len(getattr(dataset, split))
        if batch < 1 or (self.train and batch > self.images):
            limit = f"at most {self.images} images, all there are to train on" if batch > 0 else "at least 1 image"
            raise InputError(f"batch={batch}: {limit}; choose another batch")
        if batch % self.size:
            raise InputError(f"batch={batch}: not a multiple of {self.size} ranks, which share it; choose one that is")
        self.augment, self.dtype = Augment(), torch.float32
        self.parts, self.fill = 1, False
        self.least = 1
        self.through: Callable[[Loader, int, int], Batches] | None = None
        self.epoch = self.position = 0

    def check(self, augment: Augment) -> None:
        """Raise InputError where an augmentation does not fit these images."""
        side = min(self.dataset.image_size)
        if augment.translate >= side:
            raise InputError(f"translate={augment.translate}: at most {side - 1} for images of {side} pixels")
        if augment.crop != "center" and isinstance(self, MemoryLoader):
            raise InputError(
                f"crop={augment.crop}: only for image files, {self.dataset.name} is in memory; use translate"
            )

    def __len__(self) -> int:
        """Batches in a whole epoch; parts of batches where they are handed out so."""
        whole, left = divmod(self.images, self.batch)
        if self.train:
            return (whole + (self.fill and left > 0)) * self.parts
        return whole + (left > 0 and (left >= self.least or not whole))

    def state_dict(self) -> dict[str, int]:
        """Where the loader is; any number of ranks and parts can go on from there."""
        return {"epoch": self.epoch, "position": self.position, "parts": self.parts}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from there: the same batches follow, bit for bit; in this loader's parts, where it has others."""
        epoch = int(state["epoch"])
        position, within = divmod(int(state["position"]) * self.parts, int(state.get("parts", self.parts)))
        if within:
            raise InputError(
                f"position={state['position']} in {state['parts']} parts a batch: it lies within a batch, which cannot "
                f"be gone on with in {self.parts} parts; resume with as many ranks as it was saved with"
            )
        if epoch < 0 or not 0 <= position < len(self):
            raise InputError(
                f"epoch={epoch}, position={position}: this loader has {len(self)} batches an epoch; "
                "resume with the batch and data it was saved with"
            )
        self.epoch, self.position = epoch, position

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """What is left of this epoch."""
        epoch, first, d = self.epoch, self.position, self.dataset
        if self.batch % (self.size * self.parts):
            raise InputError(
                f"batch={self.batch}: not a multiple of {self.size} ranks x {self.parts} parts, which share it; "
                "choose one that is"
            )
        augment = self.augment if self.train else Augment()
        self.check(augment)
        transform = Transform(augment, self.seed, d.mean, d.std, self.dtype)
        fetched = self.through(self, epoch, first) if self.through else self.fetch(epoch, first)
        with closing(fetched) as batches:
            for number, (images_NHWC, y_N, index_N) in enumerate(batches, start=first + 1):
                x_NCHW = transform(images_NHWC, index_N, epoch)
                done = number == len(self)
                self.epoch, self.position = (epoch + 1, 0) if done else (epoch, number)
                yield x_NCHW, y_N

    def survey(self, images: int = 0) -> Loader:
        """A loader of the first so many training images (0: all) in order, each once, unvaried, for statistics.

        Batches are as large as this one's parts; its own state does not move.
        """
        other = copy.copy(self)
        other.train, other.fill = False, False
        other.batch, other.parts, other.through = self.batch // self.parts, 1, None
        other.images = min(images or self.images, self.images)
        other.least = 2 * self.size  # no rank is left with one image, which has no variance
        other.epoch = other.position = 0
        return other

    def fetch(self, epoch: int, first: int) -> Batches:
        """Gives (images_NHWC, y_N, index_N) on the device for each part of this rank, from part `first` on."""
        raise NotImplementedError

    def warm(self) -> None:
        """Gets ready what the next batch is made of, before anyone iterates; changes no batch."""

    def _shares(self, epoch: int, first: int, device: torch.device) -> Iterator[torch.Tensor]:
        """Sample indices of each part of this rank's share; the ranks share an incomplete batch as evenly as can be."""
        order_N = (order(self.images, self.seed, epoch) if self.train else torch.arange(self.images)).to(device)
        batches, pieces = len(self) // self.parts, self.size * self.parts
        if self.train:
            order_N = torch.cat([order_N, order_N[: -self.images % self.batch]])[: batches * self.batch]
        for number in range(first, len(self)):
            start = number // self.parts * self.batch
            last = number // self.parts == batches - 1
            count = len(order_N) - start if last else self.batch
            piece = self.rank * self.parts + number % self.parts
            yield order_N[start + count * piece // pieces : start + count * (piece + 1) // pieces]


class MemoryLoader(Loader):
    """Batches of a split in memory, which is moved to the device once."""

    def __init__(self, dataset: Dataset, split: str, batch: int, **where: Any):
        super().__init__(dataset, split, batch, **where)
        part: Memory = getattr(dataset, split)
        self._images_NHWC, self._labels_N = part.images_NHWC.to(self.device), part.labels_N.to(self.device)

    def fetch(self, epoch: int, first: int) -> Batches:
        """Rows of what is in memory."""
        for index_N in self._shares(epoch, first, self.device):
            yield self._images_NHWC.index_select(0, index_N), self._labels_N.index_select(0, index_N), index_N


class FilesLoader(Loader):
    """Batches of image files, decoded by threads a few batches ahead.

    Attributes, beside those of Loader:
        threads: how many decode; one a usable core. They live while an epoch is iterated.
        cache_bytes: decoded images that are kept, so that a small set is decoded once; 1 GiB.
    """

    def __init__(self, dataset: Dataset, split: str, batch: int, **where: Any):
        super().__init__(dataset, split, batch, **where)
        self._files: Files = getattr(dataset, split)
        self.threads, self.cache_bytes = min(cores(), 32), 2**30
        self._cache = _Cache()

    def fetch(self, epoch: int, first: int) -> Batches:
        """Files decoded ahead by threads."""
        shares = self._shares(epoch, first, torch.device("cpu"))
        waiting: deque[tuple[torch.Tensor, list[Future[None]], torch.Tensor]] = deque()
        pool = ThreadPoolExecutor(self.threads, thread_name_prefix="kasoku-decode")
        try:
            more = True
            while more or waiting:
                while more and len(waiting) <= _AHEAD:
                    index_N = next(shares, None)
                    more = index_N is not None
                    if index_N is not None:
                        waiting.append(self._started(pool, index_N, epoch))
                if waiting:
                    images_NHWC, parts, index_N = waiting.popleft()
                    for part in parts:
                        part.result()
                    y_N = self._files.labels_N[index_N]
                    there = (tensor.to(self.device, non_blocking=True) for tensor in (images_NHWC, y_N, index_N))
                    yield next(there), next(there), next(there)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def warm(self) -> None:
        """Decodes this rank's images of the next batch into the cache. Raises InputError for a damaged one."""
        if self.cache_bytes:
            shares = islice(self._shares(self.epoch, self.position, torch.device("cpu")), self.parts)
            with ThreadPoolExecutor(self.threads, thread_name_prefix="kasoku-decode") as pool:
                for _ in pool.map(self._pixels, torch.cat(list(shares)).tolist()):
                    pass

    def _started(
        self, pool: ThreadPoolExecutor, index_N: torch.Tensor, epoch: int
    ) -> tuple[torch.Tensor, list[Future[None]], torch.Tensor]:
        """Has the threads fill a new batch."""
        images_NHWC = torch.empty(
            (len(index_N), *self.dataset.image_size, 3), dtype=torch.uint8, pin_memory=self.device.type == "cuda"
        )
        out_NHWC = images_NHWC.numpy()
        random = self.train and self.augment.crop == "random_resized"
        u_N4 = box_draws(self.seed, epoch, index_N).tolist() if random else []
        index = index_N.tolist()
        step = max(1, min(_CHUNK, -(-len(index) // self.threads)))
        cuts = [slice(start, start + step) for start in range(0, len(index), step)]
        return images_NHWC, [pool.submit(self._fill, out_NHWC[cut], index[cut], u_N4[cut]) for cut in cuts], index_N

    def _fill(self, out_NHWC: np.ndarray, index: list[int], u_N4: list[list[float]]) -> None:
        size = self.dataset.image_size
        for row, sample_index in enumerate(index):
            pixels_HWC = self._pixels(sample_index)
            height, width = pixels_HWC.shape[:2]
            if u_N4:
                box = random_box(width, height, u_N4[row], self.augment.scale_min)
            else:
                box = centre_box(width, height, size)
            out_NHWC[row] = fitted(pixels_HWC, box, size)

    def _pixels(self, index: int) -> np.ndarray:
        """One decoded image. None is ever evicted from the cache: in random order that would only miss more."""
        pixels_HWC = self._cache.kept.get(index)
        if pixels_HWC is None:
            pixels_HWC = decode(self._files.paths[index], stored_side(min(self.dataset.image_size)))
            self._cache.offer(index, pixels_HWC, self.cache_bytes)
        return pixels_HWC


class _Cache:
    """Decoded images, the same for all copies of a loader."""

    def __init__(self) -> None:
        self.kept: dict[int, np.ndarray] = {}
        self.bytes, self._lock = 0, threading.Lock()

    def offer(self, index: int, pixels_HWC: np.ndarray, limit: int) -> None:
        """Keeps an image while there is room."""
        with self._lock:
            if index not in self.kept and self.bytes + pixels_HWC.nbytes <= limit:
                self.kept[index] = pixels_HWC
                self.bytes += pixels_HWC.nbytes


def sample(dataset: Dataset, n: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """x_NCHW: n training images, normalised and not varied, to prepare a model with.

    The first n of a set in memory; of files, which lie class by class, n at equal distances. Fewer if there are fewer.
    """
    part, n = dataset.train, min(n, len(dataset.train))
    if isinstance(part, Memory):
        images_NHWC = part.images_NHWC[:n]
    else:
        chosen = [part.paths[row * len(part) // n] for row in range(n)]
        images_NHWC = torch.stack([read_image(path, dataset.image_size) for path in chosen])
    return normalise(images_NHWC.to(device), dataset.mean, dataset.std)
