"""Small files in the official formats, for the tests of the sources."""

import gzip
from dataclasses import replace

import numpy as np

from kasoku.data.datasets.binary import CIFAR10, CIFAR100

SMALL10 = replace(CIFAR10, train_images=20, test_images=10)
SMALL100 = replace(CIFAR100, train_images=200, test_images=100)


def pixels(layout):
    """(file stem, pixels_N3HW, labels_N) of each file of a layout, always the same."""
    rng = np.random.default_rng(0)
    for stem in (*layout.train, layout.test):
        n = layout.test_images if stem == layout.test else layout.train_images
        yield stem, rng.integers(0, 256, (n, 3, 32, 32), np.uint8), np.arange(n) % layout.classes


def write_binary(layout, folder):
    folder.mkdir(parents=True)
    for stem, pixels_N3HW, labels_N in pixels(layout):
        label_NB = np.repeat(labels_N[:, None], layout.label_bytes, 1).astype(np.uint8)
        if layout.label_bytes == 2:
            label_NB[:, 0] //= 5  # the coarse label comes first
        record_NB = np.concatenate([label_NB, pixels_N3HW.reshape(len(labels_N), -1)], 1)
        record_NB.tofile(folder / f"{stem}.bin")
    (folder / layout.names).write_text("\n".join(names(layout)) + "\n\n")


def names(layout):
    return [f"kind_{number}" for number in range(layout.classes)]


def idx_bytes(array):
    head = bytes((0, 0, 8, array.ndim)) + np.asarray(array.shape, ">u4").tobytes()
    return head + array.astype(np.uint8).tobytes()


def write_idx(folder, *, packed):
    """Four IDX files: 30 + 10 images of 6x5, three classes."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(1)
    for stem, n in (("train", 30), ("t10k", 10)):
        files = {
            f"{stem}-images-idx3-ubyte": rng.integers(0, 256, (n, 6, 5), np.uint8),
            f"{stem}-labels-idx1-ubyte": np.arange(n) % 3,
        }
        for name, array in files.items():
            body = idx_bytes(array)
            (folder / (name + ".gz" * packed)).write_bytes(gzip.compress(body) if packed else body)


def fill(where, count):
    """Image files without content."""
    where.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        (where / f"{number}.png").write_bytes(b"")
