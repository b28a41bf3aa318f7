"""CIFAR-10 and CIFAR-100 in the official binary format; the python format is pickled, which can run code."""

from dataclasses import dataclass

import numpy as np
import torch

from kasoku.core.errors import InputError
from kasoku.data.datasets.base import Dataset, Memory, check_labels, find_files, in_memory

_PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class Layout:
    """One official distribution: its folder, its files (.bin), and their contents."""

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
    """Data set read from the first folder that holds files of the layout; without names the classes are numbers."""
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
