"""CIFAR-10 and CIFAR-100 in the official binary format."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from kasoku.core.errors import InputError
from kasoku.data.datasets.base import Dataset, Memory, check_labels, in_memory, places

_PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class Layout:
    """One official distribution: its folder, its files, and their contents."""

    name: str
    folder: str
    train: tuple[str, ...]
    test: str
    train_images: int  # in each training file
    label_bytes: int  # in a record; the last one is the label
    names: str  # the file of the classes' names
    classes: int
    test_images: int = 10_000


CIFAR10 = Layout(
    name="cifar10",
    folder="cifar-10-batches-bin",
    train=tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
    test="test_batch.bin",
    train_images=10_000,
    label_bytes=1,
    names="batches.meta.txt",
    classes=10,
)
CIFAR100 = Layout(
    name="cifar100",
    folder="cifar-100-binary",
    train=("train.bin",),
    test="test.bin",
    train_images=50_000,
    label_bytes=2,
    names="fine_label_names.txt",
    classes=100,
)


def cifar10(root: str = "") -> Dataset:
    """CIFAR-10: 50,000 + 10,000 colour images, 32x32, 10 classes, from the official binary files.

    Args:
        root: the folder of cifar-10-batches-bin/, or this one; empty: $KASOKU_DATA/cifar10.

    Errors: InputError for a missing, truncated or damaged file and for a label out of range.
    """
    return load(CIFAR10, root)


def cifar100(root: str = "") -> Dataset:
    """CIFAR-100: 50,000 + 10,000 colour images, 32x32, 100 fine classes, from the official binary files.

    Args:
        root: the folder of cifar-100-binary/, or this one; empty: $KASOKU_DATA/cifar100.

    Errors: as of cifar10.
    """
    return load(CIFAR100, root)


def load(layout: Layout, root: str) -> Dataset:
    """Data set read from the first folder that holds files of the layout; without names the classes are numbers."""
    tried, files = places(root, layout.name, (layout.folder,)), (*layout.train, layout.test)
    folder = next((place for place in tried if any((place / file).is_file() for file in files)), None)
    if folder is None:
        advice = f"`kasoku data {layout.name} --to DIR` downloads them; python's pickled files are not read"
        looked = f"looked for {', '.join(files)} (binary)"
        raise InputError(f"{layout.name}: no data in {', '.join(map(str, tried))}; {looked}: {advice}")
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise InputError(f"{folder / missing[0]}: missing; {layout.name} needs {', '.join(files)}")
    train = [_read(folder / file, layout, layout.train_images) for file in layout.train]
    test = _read(folder / layout.test, layout, layout.test_images)
    names = folder / layout.names
    classes = names.read_text(encoding="utf-8", errors="replace").split() if names.is_file() else []
    if len(classes) != layout.classes:
        classes = [str(number) for number in range(layout.classes)]
    images_NHWC = torch.cat([part.images_NHWC for part in train])
    return in_memory(layout.name, classes, Memory(images_NHWC, torch.cat([part.labels_N for part in train])), test)


def _read(path: Path, layout: Layout, count: int) -> Memory:
    record, have = layout.label_bytes + _PIXELS, path.stat().st_size
    if have != count * record:
        got = f"{have} bytes, expected {count * record} ({count} records of {record})"
        raise InputError(f"{path}: {got}; truncated or not a {layout.name} file, get it again")
    record_NB = torch.from_numpy(np.fromfile(path, np.uint8)).view(count, record)
    labels_N = record_NB[:, layout.label_bytes - 1].long()
    check_labels(labels_N.numpy(), layout.classes, path)
    images_N3HW = record_NB[:, layout.label_bytes :].reshape(count, 3, 32, 32)
    return Memory(images_N3HW.permute(0, 2, 3, 1).contiguous(), labels_N)
