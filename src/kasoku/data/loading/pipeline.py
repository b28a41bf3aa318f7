"""What the batches of a split are: a description without threads or position, which can be printed.

photos: 28 images of the train split
  shuffle      seed 3
  shard        batch 8: rank 0 of 2 takes 4 images, in 1 part; the last incomplete batch is dropped
  draw crops   random_resized, area from 0.35
  decode       cpu, autotuned threads; decoded images are kept
  stack        uint8 (N, 32, 32, 3)
  to device    cpu
  augment      flip=random, translate=2; float32
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch

from kasoku.core.errors import InputError
from kasoku.data.augment.basic import Augment, Transform, box_draws, centre_box, random_box, stored_side
from kasoku.data.datasets.base import Dataset, Items, Memory, Split
from kasoku.data.decode import nvjpeg
from kasoku.data.decode.jpeg import Box
from kasoku.data.loading.shuffle import order


@dataclass(frozen=True)
class Shuffle:
    """Which images, in which order.

    Attributes:
        shuffled: training images come in another order each epoch, varied; else in order, each once, as they are.
        images: how many of the split, from its first on.
    """

    seed: int = 0
    shuffled: bool = True
    images: int = 0


@dataclass(frozen=True)
class Shard:
    """Which images of a batch this rank takes.

    Attributes:
        batch: images of a batch over all ranks.
        shares: images of a batch that each rank takes, in rank order; empty: as many each.
        parts: in how many parts a training batch is handed out, one after the other (accumulation, virtual ranks);
            a loader's `position` and len() count parts.
        fill: complete the last training batch of an epoch with the images the epoch began with; else it is dropped.
        min_last: fewer images left over at the end of a split in order join the batch before them.
    """

    batch: int = 1
    rank: int = 0
    size: int = 1
    shares: tuple[int, ...] = ()
    parts: int = 1
    fill: bool = False
    min_last: int = 1


@dataclass(frozen=True)
class Decode:
    """How files are decoded.

    Attributes:
        decoder: "nvjpeg" has the GPU decode those JPEGs that are baseline, upright, grey or YCbCr; threads only read
            them. The rest is decoded as ever, and by `processes` everything. Nothing is kept; colours differ a little
            from the CPU's. Needs a CUDA device and torchvision.
        threads: how many decode. 0: tuned by measuring, from the usable cores on.
        cores_shared_by: how many loaders of this machine share its cores.
        cache_bytes: a set whose decoded images fit is decoded once, to a little more than the size that is wanted, and
            cropped from there; a larger one is decoded anew for every crop, only the part that it needs.
    """

    decoder: Literal["cpu", "nvjpeg"] = "cpu"
    threads: int = 0
    cores_shared_by: int = 1
    cache_bytes: int = 2**30


@dataclass(frozen=True)
class ToDevice:
    """Where batches are used."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


@dataclass(frozen=True)
class Augmentation:
    """What happens to training images on the device.

    Attributes:
        vary: (images_NHWC, index_N, epoch) -> images_NHWC, all uint8; comes before `augment`.
        augment: varies and normalises; its crop is drawn before images are decoded.
        dtype: of the images handed out.
    """

    vary: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor] | None = None
    augment: Augment = Augment()  # noqa: RUF009 - frozen
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Crop:
    """Which part of an image is shown, once its size is known."""

    size: tuple[int, int]
    u_4: list[float] | None = None
    scale_min: float = 1.0

    def __call__(self, width: int, height: int) -> Box:
        if self.u_4 is None:
            return centre_box(width, height, self.size)
        return random_box(width, height, self.u_4, self.scale_min)


@dataclass(frozen=True, eq=False)
class Pipeline:
    """The stages from a split to batches on the device, in their order; `with_` gives a changed one."""

    dataset: Dataset
    split: Literal["train", "test"]
    shuffle: Shuffle = field(default_factory=Shuffle)
    shard: Shard = field(default_factory=Shard)
    decode: Decode = field(default_factory=Decode)
    to_device: ToDevice = field(default_factory=ToDevice)
    augmentation: Augmentation = field(default_factory=Augmentation)

    # ---- settings

    @property
    def settings(self) -> dict[str, Any]:
        """Every setting of every stage by its name."""
        return {f.name: getattr(stage, f.name) for _, stage in self._stages() for f in fields(stage)}

    def with_(self, **changes: Any) -> Pipeline:
        """Another pipeline with some settings changed. Raises TypeError for a name that no stage has."""
        changed = {}
        for name, stage in self._stages():
            own = {f.name: changes.pop(f.name) for f in fields(stage) if f.name in changes}
            changed[name] = replace(stage, **own) if own else stage
        if changes:
            raise TypeError(f"{', '.join(changes)}: no setting of a pipeline; these are: {', '.join(self.settings)}")
        return replace(self, **changed)

    def _stages(self) -> Iterator[tuple[str, Any]]:
        names = ("shuffle", "shard", "decode", "to_device", "augmentation")
        return ((name, getattr(self, name)) for name in names)

    # ---- refusals

    def check_batch(self) -> None:
        """Raise InputError for a batch that the split or the ranks do not allow."""
        batch, images, size = self.shard.batch, self.shuffle.images, self.shard.size
        if batch < 1 or (self.train and batch > images):
            limit = f"at most {images} images, all there are to train on" if batch > 0 else "at least 1 image"
            raise InputError(f"batch={batch}: {limit}; choose another batch")
        if batch % size:
            raise InputError(f"batch={batch}: not a multiple of {size} ranks, which share it; choose one that is")

    def check_parts(self) -> None:
        """Raise InputError where a batch does not divide into the ranks' parts."""
        batch, size, parts = self.shard.batch, self.shard.size, self.shard.parts
        if not self.shard.shares and batch % (size * parts):
            raise InputError(
                f"batch={batch}: not a multiple of {size} ranks x {parts} parts, which share it; choose one that is"
            )

    def check_augment(self) -> None:
        """Raise InputError where the augmentation does not fit the images."""
        augment, side = self.augmentation.augment, min(self.dataset.image_size)
        if augment.translate >= side:
            raise InputError(f"translate={augment.translate}: at most {side - 1} for images of {side} pixels")
        if augment.crop != "center" and self.in_memory:
            raise InputError(
                f"crop={augment.crop}: only for image files, {self.dataset.name} is in memory; use translate"
            )

    # ---- which images

    @property
    def source(self) -> Split:
        source: Split = getattr(self.dataset, self.split)
        return source

    @property
    def in_memory(self) -> bool:
        return isinstance(self.source, Memory)

    @property
    def train(self) -> bool:
        """Whether images are shuffled, varied and replaced where they are bad."""
        return self.split == "train" and self.shuffle.shuffled

    @property
    def own_batch(self) -> int:
        """Images of a training batch that this rank takes."""
        shard = self.shard
        return (
            shard.batch * shard.shares[shard.rank] // sum(shard.shares) if shard.shares else shard.batch // shard.size
        )

    def __len__(self) -> int:
        """Batches in a whole epoch; parts of batches where they are handed out so."""
        whole, left = divmod(self.shuffle.images, self.shard.batch)
        if self.train:
            return (whole + (self.shard.fill and left > 0)) * self.shard.parts
        return whole + (left > 0 and (left >= self.shard.min_last or not whole))

    def numbers(self, first: int) -> Iterator[tuple[int, int]]:
        """The parts that this rank takes of an epoch from part `first` on: number, rank."""
        return ((number, self.shard.rank) for number in range(first, len(self)))

    def indices(
        self, epoch: int, numbers: Iterable[tuple[int, int]], device: torch.device | str = "cpu"
    ) -> Iterator[torch.Tensor]:
        """Sample indices of parts (number, rank); the ranks share an incomplete batch as evenly as can be."""
        images, batch, parts = self.shuffle.images, self.shard.batch, self.shard.parts
        order_N = (order(images, self.shuffle.seed, epoch) if self.train else torch.arange(images)).to(device)
        batches = len(self) // parts
        cuts = [0, *itertools.accumulate(self.shard.shares or (1,) * self.shard.size)]  # of as many as the last says
        if self.train:
            order_N = torch.cat([order_N, order_N[: -images % batch]])[: batches * batch]
        for number, rank in numbers:
            start = number // parts * batch
            last = number // parts == batches - 1
            count = len(order_N) - start if last else batch
            low, high = (count * cut // cuts[-1] for cut in cuts[rank : rank + 2])
            begin, end = (low + (high - low) * at // parts for at in (number % parts, number % parts + 1))
            yield order_N[start + begin : start + end]

    # ---- what is done to them

    def crops(self, index_N: torch.Tensor, epoch: int) -> list[Crop]:
        augment, size = self.augmentation.augment, self.dataset.image_size
        if self.train and augment.crop == "random_resized":
            u_N4: list[list[float]] = box_draws(self.shuffle.seed, epoch, index_N).tolist()
            return [Crop(size, u_4, augment.scale_min) for u_4 in u_N4]
        return [Crop(size)] * len(index_N)

    @property
    def keeps_decoded(self) -> bool:
        """Whether decoded images are kept: known from the set alone, so that batches are the same on all machines."""
        # items may be another image each time, and come from other processes
        if self.decode.decoder != "cpu" or isinstance(self.source, Items):
            return False
        side = stored_side(min(self.dataset.image_size))
        return len(self.source) * 4 * side * side <= self.decode.cache_bytes  # 3 bytes a pixel, 4 by 3

    def check_decoder(self) -> None:
        """Raise InputError where images cannot be decoded so on this device."""
        nvjpeg.check(self.decode.decoder, self.to_device.device)

    def transform(self) -> Transform:
        """What makes x_NCHW of a batch of uint8 images."""
        d, last = self.dataset, self.augmentation
        return Transform(last.augment if self.train else Augment(), self.shuffle.seed, d.mean, d.std, last.dtype)

    # ---- print

    def __str__(self) -> str:
        title = f"{self.dataset.name}: {self.shuffle.images:,} images of the {self.split} split"
        return "\n".join([title, *(f"  {name:12} {text}" for name, text in self._lines())])

    def _lines(self) -> Iterator[tuple[str, str]]:
        shard, last = self.shard, self.augmentation
        height, width = self.dataset.image_size
        yield "shuffle", f"seed {self.shuffle.seed}" if self.train else "none: in order"
        parts = f", in {shard.parts} part{'s' * (shard.parts > 1)}" if self.train else ""
        dropped = f"; the last incomplete batch is {'filled up' if shard.fill else 'dropped'}" if self.train else ""
        yield (
            "shard",
            f"batch {shard.batch}: rank {shard.rank} of {shard.size} takes {self.own_batch} images{parts}{dropped}",
        )
        if self.in_memory:
            yield "decode", "in memory"
        else:
            random = self.train and last.augment.crop == "random_resized"
            yield "draw crops", f"random_resized, area from {last.augment.scale_min:g}" if random else "center"
            processes = getattr(self.source, "processes", 0)
            workers = f"{processes} processes" if processes else f"{self.decode.threads or 'autotuned'} threads"
            kept = "; decoded images are kept" if self.keeps_decoded else ""
            yield "decode", f"{self.decode.decoder}, {workers}{kept}"
        yield "stack", f"uint8 (N, {height}, {width}, {self.dataset.channels})"
        yield "to device", str(self.to_device.device)
        if self.train and last.vary:
            yield "vary", str(last.vary)
        changes = [f"{f.name}={getattr(last.augment, f.name)}" for f in fields(Augment) if self.train]
        neutral = [f"{f.name}={f.default}" for f in fields(Augment)]
        shown = [text for text in changes if text not in neutral and not text.startswith(("crop", "scale_min"))]
        yield "augment", f"{', '.join(shown) or 'none'}; {str(last.dtype).removeprefix('torch.')}"
