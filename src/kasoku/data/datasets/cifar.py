"""CIFAR-10 and CIFAR-100 in the official binary and python formats."""

import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kasoku.core.errors import InputError, summary
from kasoku.data.datasets.base import Dataset, Memory, check_labels, find_files, in_memory

_PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class Layout:
    """One official distribution: its folders, its files, and their contents."""

    name: str
    folders: tuple[str, ...]
    train: tuple[str, ...]  # names in the python format; the binary ones end with .bin
    test: str
    train_images: int  # in each training file
    label_bytes: int  # in a binary record; the last one is the label
    labels_key: bytes
    names: tuple[str, str, bytes]  # the classes' names: binary file, python file, key in it
    classes: int
    test_images: int = 10_000


CIFAR10 = Layout(
    name="cifar10",
    folders=("cifar-10-batches-bin", "cifar-10-batches-py"),
    train=tuple(f"data_batch_{number}" for number in range(1, 6)),
    test="test_batch",
    train_images=10_000,
    label_bytes=1,
    labels_key=b"labels",
    names=("batches.meta.txt", "batches.meta", b"label_names"),
    classes=10,
)
CIFAR100 = Layout(
    name="cifar100",
    folders=("cifar-100-binary", "cifar-100-python"),
    train=("train",),
    test="test",
    train_images=50_000,
    label_bytes=2,
    labels_key=b"fine_labels",
    names=("fine_label_names.txt", "meta", b"fine_label_names"),
    classes=100,
)


def cifar10(root: str = "") -> Dataset:
    """CIFAR-10: 50,000 + 10,000 colour images, 32x32, 10 classes, from the official binary or python files.

    Args:
        root: the folder of cifar-10-batches-bin/ or -py/, or one of these; empty: $KASOKU_DATA/cifar10.

    Errors: InputError for a missing, truncated or damaged file and for a label out of range.
    """
    return load(CIFAR10, root)


def cifar100(root: str = "") -> Dataset:
    """CIFAR-100: 50,000 + 10,000 colour images, 32x32, 100 fine classes, from the official binary or python files.

    Args:
        root: the folder of cifar-100-binary/ or cifar-100-python/, or one of these; empty: $KASOKU_DATA/cifar100.

    Errors: as of cifar10.
    """
    return load(CIFAR100, root)


def load(layout: Layout, root: str) -> Dataset:
    """Data set read from the first folder that holds files of the layout; without names the classes are numbers."""
    stems = (*layout.train, layout.test)
    wanted = f"{', '.join(stem + '.bin' for stem in stems)} (binary) or {', '.join(stems)} (python)"
    paths, splits = find_files(root, layout.name, layout.folders, stems, (".bin", ""), wanted), []
    for part, count in ((paths[:-1], layout.train_images), (paths[-1:], layout.test_images)):
        images, labels = [], []
        for path in part:
            read = _read_binary if path.suffix == ".bin" else _read_python
            flat_NP, labels_N = read(path, layout, count)
            check_labels(labels_N, layout.classes, path)
            images.append(torch.from_numpy(np.array(flat_NP)).view(count, 3, 32, 32).permute(0, 2, 3, 1))
            labels.append(torch.from_numpy(labels_N.astype(np.int64)))
        splits.append(Memory(torch.cat(images).contiguous(), torch.cat(labels)))
    binary, python = (paths[0].with_name(name) for name in layout.names[:2])
    names: list[str] = []
    if binary.is_file():
        names = binary.read_text(encoding="utf-8", errors="replace").split()
    elif python.is_file():
        stored = unpickled(python).get(layout.names[2], [])
        names = [name.decode(errors="replace") if isinstance(name, bytes) else str(name) for name in stored]
    if len(names) != layout.classes:
        names = [str(number) for number in range(layout.classes)]
    return in_memory(layout.name, names, *splits)


def _read_binary(path: Path, layout: Layout, count: int) -> tuple[np.ndarray, np.ndarray]:
    record, have = layout.label_bytes + _PIXELS, path.stat().st_size
    if have != count * record:
        got = f"{have} bytes, expected {count * record} ({count} records of {record})"
        raise InputError(f"{path}: {got}; truncated or not a {layout.name} file, get it again")
    record_NB = np.fromfile(path, np.uint8).reshape(count, record)
    return record_NB[:, layout.label_bytes :], record_NB[:, layout.label_bytes - 1]


def _read_python(path: Path, layout: Layout, count: int) -> tuple[np.ndarray, np.ndarray]:
    stored = unpickled(path)
    pixels_NP, labels = stored.get(b"data"), stored.get(layout.labels_key)
    if not isinstance(pixels_NP, np.ndarray) or pixels_NP.dtype != np.uint8 or pixels_NP.shape != (count, _PIXELS):
        got = f"{pixels_NP.dtype} {pixels_NP.shape}" if isinstance(pixels_NP, np.ndarray) else type(pixels_NP).__name__
        got += f", expected uint8 ({count}, {_PIXELS}), {count * _PIXELS} bytes"
        raise InputError(f"{path}: 'data' is {got}; truncated or not a {layout.name} file, get it again")
    if not isinstance(labels, list) or len(labels) != count or not all(type(label) is int for label in labels):
        raise InputError(f"{path}: '{layout.labels_key.decode()}' is no list of {count} whole numbers; get it again")
    return pixels_NP, np.asarray(labels)


def unpickled(path: Path) -> dict[bytes, Any]:
    """Unpickles the dictionary in a CIFAR python file; it may only call functions that create numpy arrays.

    Errors: InputError if the file asks for anything else, is damaged, or holds no dictionary.
    """
    try:
        stored = _ArraysOnly(io.BytesIO(path.read_bytes()), encoding="bytes").load()
    except Exception as error:  # damaged bytes make the unpickler raise nearly anything
        raise InputError(f"{path}: cannot be read as a CIFAR python file ({summary(error)}); get it again") from error
    if not isinstance(stored, dict):
        raise InputError(f"{path}: holds a {type(stored).__name__}, expected a dictionary; not a CIFAR python file")
    return stored


_new_array = np.empty(0).__reduce__()[0]  # numpy's own _reconstruct: its module has moved between versions
_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _new_array,
    ("numpy._core.multiarray", "_reconstruct"): _new_array,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): lambda text, _: text.encode("latin1"),  # how Python 3 writes bytes into old pickle formats
}


class _ArraysOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise InputError(f"it asks for {module}.{name}, which no CIFAR file needs: refused")
        return _ALLOWED[module, name]
