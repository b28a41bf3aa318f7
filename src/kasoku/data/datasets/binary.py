"""Small images in the official binary formats: CIFAR-10 and CIFAR-100, and the IDX files of MNIST, plain or gz.

CIFAR's python format is pickled, which can run code.
"""

import gzip
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from kasoku.core.errors import InputError
from kasoku.data.datasets.base import Dataset, Memory, check_labels, find_files, in_memory

_PIXELS = 3 * 32 * 32
_STEMS = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


@dataclass(frozen=True)
class Layout:
    """One official distribution of CIFAR: its folder, its files (.bin), and their contents."""

    name: str
    folder: str
    train: tuple[str, ...]
    test: str
    train_images: int  # in each training file
    label_bytes: int  # in a record; the last one is the label
    names: str  # file of the classes' names
    classes: int
    test_images: int = 10_000


CIFAR10 = Layout(
    name="cifar10",
    folder="cifar-10-batches-bin",
    train=tuple(f"data_batch_{number}" for number in range(1, 6)),
    test="test_batch",
    train_images=10_000,
    label_bytes=1,
    names="batches.meta.txt",
    classes=10,
)
CIFAR100 = Layout(
    name="cifar100",
    folder="cifar-100-binary",
    train=("train",),
    test="test",
    train_images=50_000,
    label_bytes=2,
    names="fine_label_names.txt",
    classes=100,
)


def cifar10(root: str = "") -> Dataset:
    """CIFAR-10: 50,000 + 10,000 colour images, 32x32, 10 classes, from the official binary files.

    Args:
        root: the folder of cifar-10-batches-bin/, or this; empty: $KASOKU_DATA/cifar10.

    Errors: InputError for a missing, truncated or damaged file and for a label out of range.
    """
    return load(CIFAR10, root)


def cifar100(root: str = "") -> Dataset:
    """CIFAR-100: 50,000 + 10,000 colour images, 32x32, 100 fine classes, from the official binary files.

    Args:
        root: the folder of cifar-100-binary/, or this; empty: $KASOKU_DATA/cifar100.

    Errors: as of cifar10.
    """
    return load(CIFAR100, root)


def load(layout: Layout, root: str) -> Dataset:
    """CIFAR, read from the first folder that holds files of the layout; without names the classes are numbers."""
    stems = (*layout.train, layout.test)
    wanted = f"{', '.join(stem + '.bin' for stem in stems)}, which `kasoku data {layout.name}` downloads"
    paths, splits = find_files(root, layout.name, (layout.folder,), stems, (".bin",), wanted), []
    for part, count in ((paths[:-1], layout.train_images), (paths[-1:], layout.test_images)):
        images, labels = [], []
        for path in part:
            record, have = layout.label_bytes + _PIXELS, path.stat().st_size
            if have != count * record:
                got = f"{have} bytes, expected {count * record} ({count} records of {record})"
                raise InputError(f"{path}: {got}; truncated or not a {layout.name} file, get it again")
            record_NB = np.fromfile(path, np.uint8).reshape(count, record)
            flat_NP, labels_N = record_NB[:, layout.label_bytes :], record_NB[:, layout.label_bytes - 1]
            check_labels(labels_N, layout.classes, path)
            images.append(torch.from_numpy(np.array(flat_NP)).view(count, 3, 32, 32).permute(0, 2, 3, 1))
            labels.append(torch.from_numpy(labels_N.astype(np.int64)))
        splits.append(Memory(torch.cat(images).contiguous(), torch.cat(labels)))
    table = paths[0].with_name(layout.names)
    names = table.read_text(encoding="utf-8", errors="replace").split() if table.is_file() else []
    if len(names) != layout.classes:
        names = [str(number) for number in range(layout.classes)]
    return in_memory(layout.name, names, *splits)


def mnist(root: str = "") -> Dataset:
    """MNIST: 60,000 + 10,000 handwritten digits, 28x28 grey.

    Args:
        root: the folder of the four IDX files; empty: $KASOKU_DATA/mnist.
    """
    return idx(root, tuple(map(str, range(10))), name="mnist")


def fashion_mnist(root: str = "", *, pad: int = 0) -> Dataset:
    """Fashion-MNIST: 60,000 + 10,000 pieces of clothing, 28x28 grey.

    Args:
        root: the folder of the four IDX files; empty: $KASOKU_DATA/fashion_mnist.
        pad: black pixels on each side, at least 0; 2 make the 32x32 that VGG-16 needs.
    """
    return idx(root, _FASHION, name="fashion_mnist", pad=pad)


def idx(root: str = "", classes: Sequence[str] = (), *, name: str = "idx", pad: int = 0) -> Dataset:
    """Grey images in four IDX files (train-images-idx3-ubyte, ... as MNIST has them), each plain or .gz.

    Args:
        root: the folder of the files, or one with a folder raw/ or `name` that has them; empty: $KASOKU_DATA.
        classes: their names; without them, the labels give their number.
        name: of the data set.
        pad: black pixels on each side, at least 0.

    Errors: InputError for a missing, truncated or damaged file, unequal counts, and a label out of range.
    """
    if pad < 0:
        raise InputError(f"pad={pad}: pixels on each side, 0 or more")
    paths, splits = find_files(root, name, ("raw", name), _STEMS, ("", ".gz"), f"{', '.join(_STEMS)}, plain or .gz"), []
    for images_path, labels_path in (paths[:2], paths[2:]):
        images_NHW, labels_N = read_idx(images_path, 3), read_idx(labels_path, 1).astype(np.int64)
        if len(images_NHW) != len(labels_N):
            got = f"{len(images_NHW)} images, but {labels_path.name} has {len(labels_N)} labels"
            raise InputError(f"{images_path}: {got}; the two must be of one set")
        if not len(labels_N) or not images_NHW.size:
            raise InputError(f"{images_path}: no images in it; get the data again")
        classes = classes or [str(number) for number in range(int(labels_N.max()) + 1)]
        check_labels(labels_N, len(classes), labels_path)
        padded_NHW = np.pad(images_NHW, ((0, 0), (pad, pad), (pad, pad)))
        splits.append(Memory(torch.from_numpy(padded_NHW)[..., None], torch.from_numpy(labels_N)))
    if splits[0].images_NHWC.shape[1:] != splits[1].images_NHWC.shape[1:]:
        train, test = (tuple(split.images_NHWC.shape[1:3]) for split in splits)
        raise InputError(f"{paths[0].parent}: training images are {train}, test images {test}; both must have one size")
    return in_memory(name, classes, *splits)


def read_idx(path: Path, dims: int) -> np.ndarray:
    """Array of unsigned bytes with `dims` dimensions from one IDX file; a name that ends with .gz is unpacked.

    Errors: InputError for another type of file, and for one that is truncated, damaged, or too long.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            head = file.read(4 + 4 * dims)
            if len(head) < 4 + 4 * dims or head[:4] != bytes((0, 0, 8, dims)):
                got = f"starts with {head[:4].hex() or 'nothing'}, expected {bytes((0, 0, 8, dims)).hex()}"
                wanted = f"(IDX, unsigned bytes, dimensions: {dims}) and the sizes"
                raise InputError(f"{path}: {got} {wanted}; truncated or another type of file")
            shape = tuple(int(size) for size in np.frombuffer(head, ">u4", offset=4))
            count = int(np.prod(shape, dtype=object))
            body = file.read(count + 1)  # one more than expected: also makes gzip check its sum
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path}: truncated or damaged gzip file ({error}); get it again") from error
    except (OSError, MemoryError, OverflowError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from error
    if len(body) != count:
        got, how = (f"only {len(body)}", "truncated") if len(body) < count else ("more", "damaged")
        raise InputError(f"{path}: {got} bytes after the head, expected {count} for {shape}; {how}, get it again")
    return np.frombuffer(bytearray(body), np.uint8).reshape(shape)
