"""Images in tables: Parquet files, and data sets of Hugging Face's `datasets`."""

import functools
import importlib
import io
import json
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from kasoku.core.errors import InputError, nearest, summary
from kasoku.data.datasets.base import Dataset, Labelled, check_labels
from kasoku.data.datasets.folder import LISTS, check_settings, folder, photos, split_off, used_parts
from kasoku.data.decode.decode import SUFFIXES
from kasoku.data.loading.shuffle import draws, order
from kasoku.data.packs.reader import shards
from kasoku.data.remote.store import AT_ONCE, HERE, Store

Source = Callable[..., Dataset]
PARQUET = ".parquet"
_PLACE = 2**20  # the stream of draws for an image's place in the window
_SPARE = 4  # row groups that are kept beside those of the window, since threads are not in step


@dataclass(frozen=True, eq=False)
class Rows(Labelled):
    """One split as rows of a table, read by any number of threads at once; labels_N int64.

    cell: the image file in a row of a group; also begins to read the group that is its third argument, unless None.
    """

    cell: Callable[[int, int, int | None], Any]
    names_G: Sequence[str]  # noqa: N815 - of the groups of rows that are read together
    starts_G: Sequence[int]  # noqa: N815 - their first rows
    row_N: np.ndarray  # noqa: N815 - the rows of this split
    labels_N: torch.Tensor  # noqa: N815
    window: int = 1  # how many groups the order of an epoch mixes
    next_group: dict[int, int] = field(default_factory=dict, init=False)  # to read ahead once a group is read

    def _place(self, index: int) -> tuple[int, int]:
        row = int(self.row_N[index])
        group = bisect_right(self.starts_G, row) - 1
        return group, row - self.starts_G[group]

    def name(self, index: int) -> str:
        group, row = self._place(index)
        return f"{self.names_G[group]} row {row}"

    def read(self, index: int) -> bytes:
        """The bytes of an image file. Raises InputError with the row if it holds none or cannot be read."""
        group, row = self._place(index)
        if not isinstance(data := self.cell(group, row, self.next_group.pop(group, None)), bytes):
            raise InputError(f"{self.name(index)}: a {type(data).__name__}: the bytes of an image file are wanted")
        return data

    def take(self, rows_N: np.ndarray) -> "Rows":
        return replace(self, row_N=self.row_N[rows_N], labels_N=self.labels_N[rows_N])

    def epoch_order(self, seed: int, epoch: int) -> torch.Tensor:
        """The order of an epoch: global, or groups in random order, whose images come up to `window` groups later."""
        if self.window >= len(self.starts_G):
            return order(len(self), seed, epoch)
        group_N = torch.from_numpy(np.searchsorted(self.starts_G, self.row_N, "right") - 1)
        later_N = self.window * draws(seed, epoch, torch.arange(len(self)), _PLACE).double()
        turn_G = order(len(self.starts_G), seed, epoch)
        self.next_group.clear()
        self.next_group.update(pairwise(turn_G.argsort().tolist()))
        return (turn_G[group_N] + later_N).argsort(stable=True)


def parquet(  # noqa: PLR0913
    root: str,
    size: int = 224,
    *,
    image: str = "",
    label: str = "",
    window_bytes: int = 2**30,
    validation: float = 0.1,
    seed: int = 0,
    cache: str = "",
    cache_bytes: int = 64 * 2**30,
    max_bad_fraction: float = 0.001,
) -> Dataset:
    """Parquet files with image files in a column, as on Hugging Face's Hub, local or remote.

    Args:
        root: a .parquet file, a folder, a pattern with *, or an address; names with train, validation, test are parts.
        size: side in pixels of the square that an image is decoded to, at least 1.
        image: the column of the images, bytes or structs with `bytes`; empty: the only one of type Image, or "image".
        label: the column of the classes, numbers or texts; empty: the only one of type ClassLabel, or "label".
        window_bytes: of images that a rank keeps, at least five row groups; a set that fits is shuffled globally.
        validation: the share of each class to hold out where there is no validation part, above 0 and below 1.
        seed: any number; chooses the images to hold out, with their files and rows alone.
        cache: the folder for data read from an address; empty: $XDG_CACHE_HOME/kasoku or ~/.cache/kasoku.
        cache_bytes: the most that the cache keeps of an address, 0 or more.
        max_bad_fraction: training stops at more than one bad image, if they exceed this share, from 0 to 1.

    Errors: InputError without pyarrow, for no Parquet file, a missing or wrong column, a bad label, large row groups.
    """
    check_settings(root, size, validation)
    _library("pyarrow.parquet", 17)
    store, paths, is_test = _located(root, cache, cache_bytes)
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="kasoku-index") as pool:
        files = list(pool.map(lambda path: _ParquetFile(store, path, image, label), paths))
    if len({str(file.classes) for file in files}) > 1:
        raise InputError(f"{store.shown}: the class names of its files differ; give files of one data set")
    labels_N, classes = _classes([label for file in files for label in file.labels], files[0].classes, store.shown)
    groups = [(file, i, file.facts.row_group(i)) for file in files for i in range(file.facts.num_row_groups)]
    sizes = [facts.total_byte_size for *_, facts in groups]
    if window_bytes < (least := min((1 + _SPARE) * max(sizes), sum(sizes))):
        raise InputError(f"window_bytes={window_bytes}: at least {least} for such row groups; or write smaller ones")
    room = len(groups) if sum(sizes) <= window_bytes else window_bytes // max(sizes)
    window = room if room == len(groups) else room - max(_SPARE, room // 5)
    locks = [threading.Lock() for _ in groups]  # so that no two threads read one group
    kept = functools.lru_cache(room)(lambda group: groups[group][0].images(groups[group][1]))

    def read(group: int) -> Any:
        with locks[group]:
            return kept(group)

    def early(group: int) -> None:
        with suppress(Exception):  # whoever needs the group gets the error
            read(group)

    def cell(group: int, row: int, next_group: int | None) -> Any:
        if next_group is not None:
            threading.Thread(target=early, args=(next_group,), daemon=True).start()
        return read(group)[row].as_py()

    names_G = [f"{file.path} group {number}" for file, number, _ in groups]
    starts_G = np.cumsum([0, *(facts.num_rows for *_, facts in groups)]).tolist()[:-1]
    whole = Rows(cell, names_G, starts_G, np.arange(len(labels_N)), labels_N, window)
    test_N = np.repeat(is_test, [len(file.labels) for file in files])
    parts = split_off(whole, test_N, validation, seed, store.shown)
    return photos(store.shown.rpartition("/")[2], classes, parts, size, max_bad_fraction)


class _ParquetFile:
    """A file's metadata (`facts`), labels, and names of classes (None without Hugging Face's metadata)."""

    def __init__(self, store: Store, path: str, image: str, label: str) -> None:
        self.store, self.path, where = store, path, f"{store.shown}/{path}"
        try:
            opened = self._opened()
            schema, self.facts, features = opened.schema_arrow, opened.metadata, dict[str, Any]()
            with suppress(KeyError, TypeError, ValueError):
                features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
            image, label, self.classes = _columns(schema.names, features, image, label, where)
            self.labels = opened.read(columns=[label], use_threads=False).column(0).to_pylist()
        except (OSError, importlib.import_module("pyarrow").ArrowException) as error:
            raise InputError(f"{where}: no Parquet file ({summary(error)}); mend or remove it") from error
        kind, self._column = schema.field(image).type, image
        with suppress(AttributeError, KeyError, TypeError):  # no struct
            kind, self._column = kind.field("bytes").type, f"{image}.bytes"
        if str(kind) not in ("binary", "large_binary"):
            raise InputError(f"{where}: column {image} is {kind}; bytes of image files are wanted, or a struct of them")

    def images(self, number: int) -> Any:
        """The image files of a row group. Raises InputError if it is damaged."""
        try:
            opened = self._opened(metadata=self.facts, page_checksum_verification=True)
            return opened.read_row_group(number, columns=[self._column], use_threads=False).flatten().column(0)
        except (OSError, importlib.import_module("pyarrow").ArrowException) as error:
            raise InputError(f"{self.path}: group {number} cannot be read ({summary(error)}); mend it") from error

    def _opened(self, **settings: Any) -> Any:
        return importlib.import_module("pyarrow.parquet").ParquetFile(_StoreFile(self.store, self.path), **settings)


class _StoreFile(io.RawIOBase):
    """A file of a store, as pyarrow reads it."""

    def __init__(self, store: Store, path: str) -> None:
        self._store, self._path, self._at, self._size = store, path, 0, store.size(path)

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        data = self._store.read(self._path, self._at, self._size if size < 0 else self._at + size)
        self._at += len(data)
        return data


def _located(root: str, *cache: Any) -> tuple[Store, list[str], list[bool]]:
    """The store, the Parquet files in it (one, those of a folder or of a pattern), and which are of the test part."""
    top, pattern, (fixed, star, _) = root, "*", root.partition("*")
    if star or (root.endswith(PARQUET) and not os.path.isdir(os.path.expanduser(os.path.expandvars(root)))):
        top = fixed.rpartition("/")[0]
        pattern = root[len(top) :].lstrip("/")
    store = Store(top or ("/" if root.startswith("/") else "."), *cache)
    if "*" not in pattern and store.local and not os.path.exists(f"{store.shown}/{pattern}"):
        others = [name for name in store.look("")[1] if name.endswith(PARQUET)]
        raise InputError(f'data.root = "{root}": no such file{nearest(pattern, others) if others else ""}')
    names = store.list_files() if "*" in pattern else [pattern]
    if not (files := [n for n in names if n.endswith(PARQUET) and (n == pattern or fnmatchcase(n, pattern))]):
        raise InputError(f"root={root}: no {PARQUET} file there; give a file, a folder, or a pattern with *")
    return store, *used_parts(files)


def hugging_face(
    root: Any, size: int = 224, *, image: str = "", label: str = "", max_bad_fraction: float = 0.001
) -> Dataset:
    """A data set of Hugging Face's `datasets`; without a part validation or test, a tenth of each class is held out.

    Args:
        root: a folder of save_to_disk, or a name that load_dataset takes; from Python also a Dataset or a DatasetDict.
        size: side in pixels of the square that an image is decoded to, at least 1.
        image: the column of the images; empty: the only one of type Image, or "image".
        label: the column of the classes, numbers or texts; empty: the only one of type ClassLabel, or "label".
        max_bad_fraction: training stops at more than one bad image, if they exceed this share, from 0 to 1.

    Errors: InputError without `datasets`, for what it cannot load or streams, for a missing column, a bad label.
    """
    check_settings("" if root == "" else "given", size, 0.1)
    library, shown = _library("datasets", 4), "root"
    try:
        if isinstance(root, str):
            shown = os.path.expanduser(os.path.expandvars(root))
            saved = any(os.path.isfile(f"{shown}/{file}") for file in ("dataset_dict.json", "state.json"))
            root = library.load_from_disk(shown) if saved else library.load_dataset(shown)
        parts = dict(root) if isinstance(root, Mapping) else {"train": root}
        used, is_test = used_parts(list(parts))
        whole = library.concatenate_datasets([parts[part] for part in used])
        rows_N, features = np.arange(len(whole)), whole.features.to_dict()
    except Exception as error:  # of its many readers, or of the network
        raise InputError(f"{shown}: cannot be loaded ({summary(error)}); streamed data sets are not read") from error
    image, label, names = _columns(whole.column_names, features, image, label, shown)
    images = whole.select_columns([image]).with_format("arrow")
    labels_N, classes = _classes(whole.select_columns([label]).with_format(None)[:][label], names, shown)

    def cell(_: int, row: int, _next: int | None) -> Any:
        value = images[row].column(0)[0].as_py()
        data, path = (value.get("bytes"), value.get("path")) if isinstance(value, dict) else (value, None)
        return HERE.read(os.path.abspath(path)) if data is None and path else data

    test_N = np.repeat(is_test, [len(parts[part]) for part in used])
    divided = split_off(Rows(cell, [shown], [0], rows_N, labels_N), test_N, 0.1, 0, shown)
    return photos(os.path.basename(shown), classes, divided, size, max_bad_fraction)


def _library(module: str, least: int) -> Any:
    """A module of an optional library from version `least` on. Raises InputError with the line that installs it."""
    name, extra = module.split(".")[0], module.split(".")[-1]
    try:
        version = importlib.import_module(name).__version__
        if int(version.partition(".")[0]) < least:
            raise ImportError(f"{name} {version}, needed is {least} or newer")
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(f"this source needs it ({error}): pip install 'kasoku[{extra}]'") from error


def _columns(columns: Sequence[str], features: Any, image: str, label: str, where: str) -> tuple[str, str, Any]:
    """The columns of images and of classes, and the names of these or None. Raises InputError for a missing column."""
    known = {name: of for name, of in features.items() if isinstance(of, dict)} if isinstance(features, dict) else {}
    found = []
    for given, usual, kind in ((image, "image", "Image"), (label, "label", "ClassLabel")):
        typed = [name for name, of in known.items() if of.get("_type") == kind]
        found.append(given or (typed[0] if len(typed) == 1 else usual))
        if found[-1] not in columns:
            there = ", ".join(columns)
            told = f"no column {usual}, but {there}: set data.{usual}"
            wrong = f'data.{usual} = "{given}": no such column; the file has {there}'
            raise InputError(f"{where}: {wrong if given else told}")
    names = known.get(found[1], {}).get("names")
    return found[0], found[1], names if isinstance(names, list) else None


def _classes(labels: Sequence[Any], names: Sequence[str] | None, where: str) -> tuple[torch.Tensor, tuple[str, ...]]:
    """labels_N, and the classes: `names`, else the sorted texts, else the numbers. Raises InputError for bad labels."""
    types = sorted({type(label).__name__ for label in labels})
    if types == ["str"]:
        names = names or sorted(set(labels))
        number_of = {name: number for number, name in enumerate(names)}
        labels = [number_of.get(label, -1) for label in labels]
    elif types != ["int"]:
        raise InputError(f"{where}: {', '.join(types) or 'no'} labels: a whole number or text an image is wanted")
    elif not names and max(labels) >= len(labels) + 100_000:  # their names would fill the memory
        raise InputError(f"{where}: label {max(labels)} of {len(labels)} images is no class number; set data.label")
    classes = tuple(names or map(str, range(max(labels) + 1)))
    check_labels(np.array(labels), len(classes), where)
    return torch.tensor(labels), classes


def read_photos(root: str, size: int = 224) -> tuple[Source, Dataset]:
    """The data set at a root, and its source: `folder` where it can read it, else by the kinds of the files there."""
    try:
        return folder, folder(root, size)  # of several ranks one lists it
    except InputError as error:
        if error.gone:
            raise
        source = source_of(root)
        return source, source(root, size)


def source_of(root: str) -> Source:
    """The source of kasoku.data that reads what is at a root, by the kinds of the files there."""
    files = [root] if root.endswith((PARQUET, *LISTS)) else [file.lower() for file in Store(root, "", 0).list_files()]
    files = [file for file in files if "/" in file or not file.endswith(SUFFIXES)]  # images lie in folders of classes
    sources: dict[Any, Source] = {SUFFIXES: folder, ".arrow": hugging_face, PARQUET: parquet, ".tar": shards}
    return next((source for kinds, source in sources.items() if any(file.endswith(kinds) for file in files)), folder)
