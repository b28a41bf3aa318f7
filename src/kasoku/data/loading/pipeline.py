"""What the batches of a split are: a description without threads or position."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any, Literal

import torch

from kasoku.core import Checked, InputError
from kasoku.data.augment.basic import Augment, Transform, box_draws, centre_box, random_box, stored_side
from kasoku.data.augment.transforms import Vary
from kasoku.data.datasets.base import Dataset, Items, Memory, Split
from kasoku.data.decode.native import Box
from kasoku.data.loading.shuffle import order_of

Crop = Callable[[int, int], Box]  # of the width and the height of an image


@dataclass(frozen=True, eq=False)
class Pipeline(Checked):
    """The stages from a split to batches on the device; `with_` gives one with other settings.

    Attributes:
        shuffled: training images in a new order each epoch, augmented. False: each image once, in order, unchanged.
        images: how many of the split, from its first on.
        left_out: which of them training leaves out (bool, on the CPU); None: none.
        batch: images of a batch over all ranks.
        shares: images of a batch that each rank takes, in rank order; empty: all the same number.
        parts: in how many parts a training batch is handed out, one after the other (accumulation, virtual ranks);
            a loader's `position` and len() count parts.
        at_once: images of a part, where ranks have unequally many parts; 0: all have equally many.
        fill: complete the last training batch of an epoch with the images the epoch began with; else it is dropped.
        min_last: where images come in order, fewer than this that are left at the end join the batch before.
        decoder: cpu, or nvjpeg: see `Decoding`.
        threads: how many decode. 0: tuned by measuring, from the usable cores on.
        cores_shared_by: how many loaders of this machine share its cores.
        cache_bytes: a set whose decoded images fit is decoded once, to a little more than the size that is wanted, and
            cropped from there; a larger one is decoded anew for every crop, only the part that it needs.
        device: where batches are used.
        vary: runs `Transforms`, before `augment`.
        augment: varies and normalises; its crop is drawn before images are decoded.
        dtype: of the images handed out.
    """

    dataset: Dataset
    split: Literal["train", "test"]

    seed: int = 0
    shuffled: bool = True
    images: int = 0
    left_out: torch.Tensor | None = None

    batch: int = 1
    rank: int = 0
    size: int = 1
    shares: tuple[int, ...] = ()
    parts: int = 1
    at_once: int = 0
    fill: bool = False
    min_last: int = 1

    decoder: Literal["cpu", "nvjpeg"] = "cpu"
    threads: int = 0
    cores_shared_by: int = 1
    cache_bytes: int = 2**30

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    vary: Vary | None = None
    augment: Augment = Augment()  # noqa: RUF009 - frozen
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        """Raises InputError where training images do not fit their augmentation."""
        super().__post_init__()
        if not self.train:
            return
        augment, dataset, side = self.augment, self.dataset, min(self.dataset.image_size)
        if augment.translate >= side:
            raise InputError(f"translate={augment.translate}: at most {side - 1} for images of {side} pixels")
        if augment.crop != "center" and isinstance(self.source, Memory):
            raise InputError(f"crop={augment.crop}: only for image files, {dataset.name} is in memory; use translate")

    @property
    def settings(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)[2:]}

    def with_(self, **changes: Any) -> "Pipeline":
        """Another pipeline with some settings changed. Raises TypeError for a name that is none of them."""
        known = self.settings
        unknown = [name for name in changes if name not in known]
        if unknown:
            raise TypeError(f"{', '.join(unknown)}: no setting of a pipeline; these are: {', '.join(known)}")
        return replace(self, **changes)

    # ---- which images

    @property
    def source(self) -> Split:
        return self.dataset.train if self.split == "train" else self.dataset.test

    @property
    def train(self) -> bool:
        """Whether images are shuffled, varied and replaced where they are bad."""
        return self.split == "train" and self.shuffled

    @property
    def varies_in_threads(self) -> bool:
        """Whether the threads that decode run `vary` too."""
        return self.train and self.vary is not None and self.vary.per_image and not isinstance(self.source, Memory)

    @property
    def own_batch(self) -> int:
        """Images of a training batch that this rank takes."""
        return self.batch * self.shares[self.rank] // sum(self.shares) if self.shares else self.batch // self.size

    @property
    def first_part(self) -> int:
        """The number of this rank's first part among the parts that all ranks take of a batch."""
        if not self.at_once:
            return self.rank * self.parts
        return self.batch * sum(self.shares[: self.rank]) // (sum(self.shares) * self.at_once)

    @cached_property
    def images_taken(self) -> int:
        """Images of an epoch."""
        return self.images - (int(self.left_out.sum()) if self.train and self.left_out is not None else 0)

    def __len__(self) -> int:
        """Batches in a whole epoch; parts of batches where they are handed out so."""
        whole, left = divmod(self.images_taken, self.batch)
        if self.train:
            return (whole + (self.fill and left > 0)) * self.parts
        return whole + (left > 0 and (left >= self.min_last or not whole))

    def part_numbers(self, first: int) -> Iterator[tuple[int, int]]:
        """The parts that this rank takes of an epoch from part `first` on: number, rank."""
        return ((number, self.rank) for number in range(first, len(self)))

    def indices(
        self, epoch: int, part_numbers: Iterable[tuple[int, int]], device: torch.device | str = "cpu"
    ) -> Iterator[torch.Tensor]:
        """Sample indices of parts (number, rank); the ranks share an incomplete batch as evenly as can be."""
        images, batch, parts = self.images, self.batch, self.parts
        order_N = order_of(self.source, images, self.seed, epoch) if self.train else torch.arange(images)
        if self.train and self.left_out is not None:
            order_N = order_N[~self.left_out[order_N]]
        order_N = order_N.to(device)
        batches = len(self) // parts
        # of cuts[-1] images, rank r takes cuts[r] to cuts[r + 1]
        cuts = [0, *itertools.accumulate(self.shares or (1,) * self.size)]
        if self.train:
            order_N = torch.cat([order_N, order_N[: -len(order_N) % batch]])[: batches * batch]
        for number, rank in part_numbers:
            start = number // parts * batch
            last = number // parts == batches - 1
            count = len(order_N) - start if last else batch
            low, high = (count * cut // cuts[-1] for cut in cuts[rank : rank + 2])
            begin, end = (low + (high - low) * at // parts for at in (number % parts, number % parts + 1))
            yield order_N[start + begin : start + end]

    # ---- what is done to them

    def crops(self, index_N: torch.Tensor, epoch: int) -> list[Crop]:
        """Which part of each image is shown, once its size is known."""
        augment, size = self.augment, self.dataset.image_size
        if self.train and augment.crop == "random_resized":
            u_N4: list[list[float]] = box_draws(self.seed, epoch, index_N).tolist()
            return [partial(random_box, u_4=u_4, scale_min=augment.scale_min) for u_4 in u_N4]
        return [partial(centre_box, size=size)] * len(index_N)

    @property
    def keeps_decoded(self) -> bool:
        """Whether decoded images are kept: known from the set alone, so that batches are the same on all machines."""
        if self.decoder != "cpu" or isinstance(self.source, Items):  # items may be another image each time
            return False
        side = stored_side(max(self.dataset.image_size))
        return len(self.source) * 4 * side * side <= self.cache_bytes  # 3 bytes a pixel, 4 by 3

    def transform(self) -> Transform:
        """What makes x_NCHW of a batch of uint8 images."""
        dataset, augment = self.dataset, self.augment if self.train else Augment()
        return Transform(augment, self.seed, dataset.mean, dataset.std, self.dtype)
