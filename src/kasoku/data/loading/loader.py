"""Loaders: an epoch of batches, ready for the model, from memory or (see images.py) from encoded images."""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import Any, Literal, Protocol

import torch

from kasoku.core.errors import InputError
from kasoku.core.trace import Trace
from kasoku.data.augment.basic import Augment, Transform, normalise
from kasoku.data.datasets.base import Dataset, Encoded, GoneError, Memory
from kasoku.data.decode.decode import read_image
from kasoku.data.loading.shuffle import order

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
    from kasoku.data.loading.file_loader import FilesLoader

    kind = MemoryLoader if isinstance(getattr(dataset, split), Memory) else FilesLoader
    return kind(dataset, split, batch, seed=seed, device=device, comm=comm)


class Loader:
    """One split, batch by batch; made by `loader`.

    Attributes:
        epoch: what the next iter() runs.
        position: how many of its batches were handed out. Both move on when a batch is handed out, before it is used:
            with the last one `epoch` becomes the next. A loop that is left early goes on there.
        augment: how training images are varied (set it, or apply `Augment` to the job); from the next iter() on.
        vary: what is done to training images before that: (images_NHWC, index_N, epoch) -> images_NHWC, all uint8.
        dtype: of the images handed out.
        parts: in how many parts a training batch is handed out, one after the other (accumulation, virtual ranks);
            `position` and len() count parts.
        least: fewer images left over at the end of a split in order join the batch before them.
        through: gives the raw batches instead of `fetch`, where several loaders share them.
        trace: where waiting for input is noted; a Job gives its own.
        index_N: which images of the split the last batch handed out holds.
        shares: images of a batch that each rank takes, in rank order; empty: as many each.
        deal: gives the number of the next share this rank makes, of those of all ranks in this epoch (batch * size +
            rank), or None when there is none for now; None: its own of each batch. `position` does not move then.
        dealt: the number of the share that was handed out last.
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
        self.shares: tuple[int, ...] = ()
        self.least = 1
        self.trace: Trace | None = None
        self.through: Callable[[Loader, int, int], Batches] | None = None
        self.vary: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor] | None = None
        self.epoch = self.position = 0
        self.index_N = torch.zeros(0, dtype=torch.int64)
        self.deal: Callable[[], int | None] | None = None
        self.dealt = 0
        self._ahead: deque[int] = deque()  # numbers of shares that are being made

    def check(self, augment: Augment) -> None:
        """Raise InputError where an augmentation does not fit these images."""
        side = min(self.dataset.image_size)
        if augment.translate >= side:
            raise InputError(f"translate={augment.translate}: at most {side - 1} for images of {side} pixels")
        if augment.crop != "center" and isinstance(self, MemoryLoader):
            raise InputError(
                f"crop={augment.crop}: only for image files, {self.dataset.name} is in memory; use translate"
            )

    @property
    def own_batch(self) -> int:
        """Images of a training batch that this rank takes."""
        return self.batch * self.shares[self.rank] // sum(self.shares) if self.shares else self.batch // self.size

    def __len__(self) -> int:
        """Batches in a whole epoch; parts of batches where they are handed out so."""
        whole, left = divmod(self.images, self.batch)
        if self.train:
            return (whole + (self.fill and left > 0)) * self.parts
        return whole + (left > 0 and (left >= self.least or not whole))

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is; any number of ranks and parts can go on from there."""
        return {"epoch": self.epoch, "position": self.position, "parts": self.parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
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
        if not self.shares and self.batch % (self.size * self.parts):
            raise InputError(
                f"batch={self.batch}: not a multiple of {self.size} ranks x {self.parts} parts, which share it; "
                "choose one that is"
            )
        augment = self.augment if self.train else Augment()
        self.check(augment)
        transform = Transform(augment, self.seed, d.mean, d.std, self.dtype)
        fetched = self.through(self, epoch, first) if self.through else self.fetch(epoch, first)
        with closing(fetched) as batches:
            number = first
            for images_NHWC, y_N, index_N in batches:  # enumerate() would keep the last one
                number += 1
                if self.train and self.vary:
                    images_NHWC = self.vary(images_NHWC, index_N, epoch)
                x_NCHW = transform(images_NHWC, index_N, epoch)
                del images_NHWC  # its memory goes to a batch that is decoded meanwhile
                done = number == len(self)
                if self.deal is None:
                    self.epoch, self.position = (epoch + 1, 0) if done else (epoch, number)
                else:
                    self.dealt = self._ahead.popleft()
                self.index_N = index_N
                yield x_NCHW, y_N

    def survey(self, images: int = 0) -> Loader:
        """A loader of the first so many training images (0: all) in order, each once, unvaried, for statistics.

        Batches are as large as this one's parts; its own state does not move.
        """
        other = copy.copy(self)
        other.train, other.fill = False, False
        other.batch, other.parts, other.through = self.batch // self.parts, 1, None
        other.shares, other.deal = (), None
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
        batches, parts = len(self) // self.parts, self.parts
        cuts = [0, *itertools.accumulate(self.shares or (1,) * self.size)]  # of a batch of as many as the last one says
        if self.train:
            order_N = torch.cat([order_N, order_N[: -self.images % self.batch]])[: batches * self.batch]
        for number, rank in self._numbers(first):
            start = number // self.parts * self.batch
            last = number // self.parts == batches - 1
            count = len(order_N) - start if last else self.batch
            low, high = (count * cut // cuts[-1] for cut in cuts[rank : rank + 2])
            begin, end = (low + (high - low) * at // parts for at in (number % parts, number % parts + 1))
            yield order_N[start + begin : start + end]

    def _numbers(self, first: int) -> Iterator[tuple[int, int]]:
        """Of the parts that this rank makes: the number, and whose share it is."""
        if self.deal is None:
            yield from ((number, self.rank) for number in range(first, len(self)))
            return
        self._ahead.clear()
        while (share := self.deal()) is not None:
            self._ahead.append(share)
            yield divmod(share, self.size)


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


def sample(dataset: Dataset, n: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """x_NCHW: n training images, normalised and not varied, to prepare a model with.

    The first n of a set in memory; of others, which may lie class by class, n at equal distances. Fewer if there are
    fewer.
    """
    part, n = dataset.train, min(n, len(dataset.train))
    if isinstance(part, Memory):
        images_NHWC = part.images_NHWC[:n]
    else:
        images_NHWC = torch.stack([_readable(dataset, part, row * len(part) // n) for row in range(n)])
    return normalise(images_NHWC.to(device), dataset.mean, dataset.std)


def _readable(dataset: Dataset, part: Encoded, index: int) -> torch.Tensor:
    """An image, or the next one that can be decoded."""
    for other in range(index, index + len(part)):
        at = other % len(part)
        try:
            return read_image(part.read(at), dataset.image_size, name=part.name(at))
        except GoneError:
            raise
        except InputError:
            pass  # counted and named by the loader
    raise InputError(f"{dataset.name}: no image in it can be decoded; give another data set")
