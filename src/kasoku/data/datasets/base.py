"""Types of data sets, in memory or as files, and the digits that come with the package."""

import hashlib
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from kasoku.core import InputError, described, summary
from kasoku.core.files import expanded
from kasoku.data.decode import native
from kasoku.data.decode.decode import is_image, upright
from kasoku.data.loading.shuffle import order
from kasoku.data.remote.store import HERE, Store


class Labelled:
    """A split: it has as many images as labels (int64)."""

    labels_N: torch.Tensor  # noqa: N815

    def __len__(self) -> int:
        return len(self.labels_N)


@dataclass(frozen=True, eq=False)
class Memory(Labelled):
    """One split held in memory: images_NHWC uint8, contiguous; labels_N int64."""

    images_NHWC: torch.Tensor  # noqa: N815
    labels_N: torch.Tensor  # noqa: N815


class Encoded(Protocol):
    """A split whose images are read one by one, by any number of threads at once. labels_N: int64."""

    @property
    def labels_N(self) -> torch.Tensor:  # noqa: N802
        ...

    def __len__(self) -> int: ...

    def read(self, index: int) -> bytes | np.ndarray:
        """The bytes of an image file, or pixels_HWC (uint8, RGB). Raises InputError with its name if it cannot."""

    def name(self, index: int) -> str:
        """The name of an image in messages: class and file name."""


@dataclass(frozen=True, eq=False)
class Files(Labelled):
    """One split as image files, decoded when needed: paths below a store's root, or of this machine; labels_N int64."""

    paths: tuple[str, ...]
    labels_N: torch.Tensor  # noqa: N815
    store: Store = HERE

    def __post_init__(self) -> None:
        if self.store is HERE:  # relative paths are of the folder that is current now
            object.__setattr__(self, "paths", tuple(p if p[:1] == os.sep else f"{os.getcwd()}/{p}" for p in self.paths))

    def read(self, index: int) -> bytes:
        """The bytes of a file. Raises InputError if it cannot be read, GoneError if its disk or server is at fault."""
        return self.store.read(self.paths[index], intact=is_image)

    def name(self, index: int) -> str:
        """Class and file name, since the folder may have another path on another host."""
        return "/".join(self.paths[index].rsplit(os.sep, 2)[-2:])

    def take(self, rows_N: np.ndarray) -> "Files":
        return replace(self, paths=tuple(self.paths[row] for row in rows_N.tolist()), labels_N=self.labels_N[rows_N])


class Items(Labelled):
    """A split from your own data set, in which `dataset[i]` is an image and its label.

    An image is the bytes or the path of a file, pixels (uint8, HWC or HW), a uint8 tensor (CHW), or a Pillow image.

    Args:
        dataset: anything with len() and items.
        labels_N: the labels; else `dataset.targets` or `dataset.labels`; else every item is read once.
    """

    def __init__(self, dataset: Any, labels_N: Sequence[int] | torch.Tensor | None = None) -> None:
        for name in ("targets", "labels"):
            labels_N = getattr(dataset, name, None) if labels_N is None else labels_N
        try:
            if labels_N is None:
                labels_N = [int(dataset[i][1]) for i in range(len(dataset))]
            self.labels_N = torch.as_tensor(labels_N, dtype=torch.int64)
        except (TypeError, ValueError) as error:
            raise InputError(f"labels: class numbers are wanted ({summary(error)}): give them as labels_N") from error
        if self.labels_N.shape != (len(dataset),):
            raise InputError(f"labels of shape {tuple(self.labels_N.shape)} for {len(dataset)} items: one for each")
        self.dataset = dataset

    def name(self, index: int) -> str:
        return f"item {index}"

    def read(self, index: int) -> bytes | np.ndarray:
        """The image of an item. Raises InputError with its number for anything but an image."""
        try:
            image = self.dataset[index][0]
            if isinstance(image, str | os.PathLike):
                return Path(image).read_bytes()
            if isinstance(image, torch.Tensor):
                image = image.permute(1, 2, 0).numpy() if image.ndim == 3 else image.numpy()
            elif hasattr(image, "convert"):
                image = upright(image)
        except Exception as error:  # the user's own code
            raise InputError(f"item {index}: {described(error)}; mend or leave it out") from error
        if isinstance(image, bytes):
            return image
        if isinstance(image, np.ndarray):
            grey = image.ndim == 2 or image.shape[2:] == (1,)
            if image.dtype == np.uint8 and image.size and (grey or image.shape[2:] == (3,)):
                return np.repeat(image.reshape(*image.shape[:2], 1), 3, 2) if grey else image
            got = f"an array of {image.dtype}, shape {image.shape}"
        else:
            got = f"a {type(image).__name__}"
        wanted = "the bytes or the path of an image file, uint8 pixels of 1 or 3 channels, or a Pillow image"
        raise InputError(f"item {index}: {got}: {wanted}")


Split = Memory | Encoded


@dataclass(frozen=True, eq=False)
class Dataset:
    """A training and a test split, with the facts that a model and its input pipeline need.

    `image_size` is (height, width), to which files are decoded. `mean` and `std` have one number a channel, for pixel
    values / 255: measured for training images in memory, those of ImageNet for files. Training stops if more than the
    share `max_bad_fraction` of the images, and more than one, cannot be decoded. `undivided`: all images, where
    the test split was held out of them; None where the data has a test part.
    """

    name: str
    classes: tuple[str, ...]
    train: Split
    test: Split
    channels: int
    image_size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    max_bad_fraction: float = 0.001
    undivided: Encoded | None = None

    def index(self) -> dict[str, str]:
        """A summary that ranks can compare: classes, a digest of labels and names, the decoder."""
        facts = {"classes": ", ".join(self.classes), "train": _digest(self.train), "test": _digest(self.test)}
        return facts if isinstance(self.train, Memory) else facts | {"decoder": native.decoder()}  # pixels depend on it


def _digest(split: Split) -> str:
    digest = hashlib.sha256(split.labels_N.numpy().tobytes())
    if not isinstance(split, Memory):
        digest.update("\n".join(split.name(index) for index in range(len(split))).encode("utf-8", "surrogateescape"))
    return f"{len(split)} images, labels and names {digest.hexdigest()[:12]}"


@dataclass(frozen=True)
class Facts:
    """The size of a data set: training images, classes, channels, pixels a side, test images."""

    images: int
    classes: int
    channels: int
    side: int
    tested: int


PUBLISHED = {  # for predictions on machines without the files
    "kasoku.data.imagenet": Facts(1_281_167, 1000, 3, 224, 50_000),
    "kasoku.data.cifar10": Facts(50_000, 10, 3, 32, 10_000),
    "kasoku.data.cifar100": Facts(50_000, 100, 3, 32, 10_000),
    "kasoku.data.mnist": Facts(60_000, 10, 1, 28, 10_000),
    "kasoku.data.fashion_mnist": Facts(60_000, 10, 1, 28, 10_000),
}


def digits(seed: int = 0) -> Dataset:
    """Handwritten digits, 8x8 grey, 1,437 to train and 360 to test: comes with the package.

    Args:
        seed: any number; chooses the split, which is stratified by digit.

    Source: E. Alpaydin, C. Kaynak (1998), Optical Recognition of Handwritten Digits, UCI Machine Learning Repository,
    doi:10.24432/C50P49, licence CC BY 4.0; the 1,797 images of its test part, the ones scikit-learn has.
    Changed by us: pixel values 0..16 are scaled to 0..255.
    """
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as stored:
        images_NHWC = torch.from_numpy((stored["images"].astype(np.int64) * 255 + 8) // 16).to(torch.uint8)[..., None]
        labels_N = torch.from_numpy(stored["labels"].astype(np.int64))
    n, tests = len(labels_N), 360
    shuffled_N = order(n, seed, 0)
    by_class_N = shuffled_N[labels_N[shuffled_N].argsort(stable=True)]
    test_N = torch.zeros(n, dtype=torch.bool)
    test_N[by_class_N[torch.arange(tests) * n // tests]] = True
    train, test = (Memory(images_NHWC[keep_N].contiguous(), labels_N[keep_N]) for keep_N in (~test_N, test_N))
    return in_memory("digits", [str(digit) for digit in range(10)], train, test)


def in_memory(name: str, classes: Sequence[str], train: Memory, test: Memory) -> Dataset:
    """Data set of two splits in memory; measures mean and standard deviation of the training images exactly."""
    height, width, channels = train.images_NHWC.shape[1:]
    counts_CV = torch.stack([torch.bincount(plane.flatten(), minlength=256) for plane in train.images_NHWC.unbind(-1)])
    count, value_V = len(train) * height * width, np.arange(256)
    mean_C, squares_C = (counts_CV.numpy() @ values_V / count for values_V in (value_V, value_V**2))
    std_C = np.sqrt(np.maximum(squares_C - mean_C**2, 0))
    std_C[std_C == 0] = 255.0  # a constant channel is not scaled up
    mean, std = tuple((mean_C / 255).tolist()), tuple((std_C / 255).tolist())
    return Dataset(name, tuple(classes), train, test, channels, (height, width), mean, std)


def find_files(
    root: str, name: str, below: Sequence[str], stems: Sequence[str], endings: Sequence[str], wanted: str
) -> list[Path]:
    """The files of data set `name`, a stem and one of the endings each, in the first folder that has any of them.

    The folders are the root and its subfolders `below`; if `root` is empty, $KASOKU_DATA/<name>, $KASOKU_DATA and
    theirs. `wanted`: the names of the files in messages.
    """
    home = os.environ.get("KASOKU_DATA", "")
    if not root and not home:
        advice = f"give root=<folder> or set $KASOKU_DATA to the folder that holds {name}/"
        raise InputError(f"{name}: no root given and $KASOKU_DATA is not set; {advice}")
    tops = [expanded(root)] if root else [expanded(home) / name, expanded(home)]
    folders = [place for top in tops for place in (top, *(top / sub for sub in below)) if place.is_dir()]
    if not folders:
        origin = "" if root else " (from $KASOKU_DATA)"
        raise InputError(f"{name}: no folder {tops[0]}{origin}; give root=<folder that holds the data>")
    for folder in folders:
        there = {s: path for s in stems for end in reversed(endings) if (path := folder / (s + end)).is_file()}
        missing = [stem for stem in stems if stem not in there]
        if not missing:
            return [there[stem] for stem in stems]
        if there:
            raise InputError(f"{folder / (missing[0] + endings[0])}: missing; {name} needs {wanted}")
    advice = f"looked for {wanted}; give root=<the folder of these files, or that of {' or '.join(below)}>"
    raise InputError(f"{name}: no data in {', '.join(map(str, folders))}; {advice}")


def held_out(keys: Sequence[str], labels: Sequence[int], share: float, seed: int) -> np.ndarray:
    """Which images are held out for the test: of each class a share, at least one image if one is left for training.

    They are chosen by their keys alone.
    """
    rows_of = defaultdict[int, list[int]](list)
    for row, label in enumerate(labels):
        rows_of[label].append(row)
    held_N = np.zeros(len(labels), np.bool_)
    for rows in rows_of.values():
        texts = (f"{seed}/{keys[row]}".encode("utf-8", "surrogateescape") for row in rows)
        shuffled = sorted(zip((hashlib.blake2b(text, digest_size=8).digest() for text in texts), rows, strict=True))
        count = min(max(1, round(len(rows) * share)), len(rows) - 1)
        held_N[[row for _, row in shuffled[:count]]] = True
    return held_N


def check_labels(labels_N: np.ndarray, classes: int, where: Path | str) -> None:
    """Raise InputError naming the first label that is not in range(classes)."""
    wrong_N = np.flatnonzero((labels_N < 0) | (labels_N >= classes))
    if len(wrong_N):
        got = f"image {wrong_N[0]} has label {labels_N[wrong_N[0]]}, allowed are 0 to {classes - 1}"
        raise InputError(f"{where}: {got}; the file is damaged or of another data set")
