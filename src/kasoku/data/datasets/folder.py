"""Image folders with one folder for each class, and lists of images, local or remote; one rank lists them for all."""

import csv
import io
import json
import os
import re
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch

from kasoku.core import Comm, InputError, say, summary
from kasoku.core.files import expanded
from kasoku.data.datasets.base import Dataset, Files, held_out
from kasoku.data.decode.decode import SUFFIXES
from kasoku.data.decode.native import max_pixels
from kasoku.data.remote.store import AT_ONCE, Names, Store, below

T = TypeVar("T")
Tree = dict[str, list[str]]  # class -> names of its image files, both sorted; of a list, their paths
Parts = dict[str, Tree]  # by folder: "" is the root itself; or train, and val, validation or test where there is one
Listing = tuple[Parts, dict[str, Any]]  # and what their store knows of remote files
Look = Callable[[str], Names]  # what is in a folder, which is its path below the root, "" for the root

LISTS = (".csv", ".jsonl")
_PART = re.compile(r"(?:^|[^a-z])(training|train|validation|valid|val|testing|test)(?![a-z])")
_TEST_PARTS = "val", "valid", "validation", "test"  # folders; the first one is taken
_KINDS = " ".join(SUFFIXES)
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # mean and standard deviation of its channels
_LOOKED_FOR = 8  # files of each part that a rank checks on its host, since rank 0 listed them


def imagenet(root: str, size: int = 224) -> Dataset:
    """ImageNet (ILSVRC 2012), 1,281,167 images: a folder with train/ and val/, each with one folder for each class.

    Args:
        root: the folder, or an address (s3://bucket/photos); it may name environment variables.
        size: side in pixels of the square that an image is decoded to, at least 1.

    Errors: InputError as `folder`, and for a folder with other than 1,000 classes.
    """
    dataset = folder(root, size)
    if len(dataset.classes) != 1000:
        advice = "give its folder, or use kasoku.data.folder for other photos"
        raise InputError(f"root={root}: {len(dataset.classes)} classes, ImageNet has 1,000: {advice}")
    return dataset


def folder(  # noqa: PLR0913
    root: str,
    size: int = 224,
    *,
    validation: float = 0.1,
    seed: int = 0,
    cache: str = "",
    cache_bytes: int = 64 * 2**30,
    max_bad_fraction: float = 0.001,
) -> Dataset:
    """Image folder: JPEG, PNG, WebP or BMP files in one folder for each class, with or without train/ and val/.

    root/<class>/<file>, or root/train/<class>/<file> and the same in root/val/ (or valid/, validation/, test/). Hidden
    files and other types are left out. Bad images are skipped and named. Or a list: a .csv or .jsonl file of path,
    label and, if it has parts, split (train, val, test); paths are relative to its folder.

    Args:
        root: the folder or the list, or an address (s3://bucket/photos); it may name environment variables.
        size: side in pixels of the square that an image is decoded to, at least 1.
        validation: the share of each class to hold out where there is no validation part, above 0 and below 1.
        seed: any number; chooses the images to hold out, with their names alone.
        cache: the folder for files read from an address; empty: $XDG_CACHE_HOME/kasoku or ~/.cache/kasoku.
        cache_bytes: the most that the cache keeps of an address, 0 or more.
        max_bad_fraction: training stops at more than one bad image, if they exceed this share, from 0 to 1.

    Errors: InputError for no class folder, a class folder with no image, a class that is only in the validation part.
    """
    check_settings(root, size, validation)
    top, table = os.path.split(root) if root.endswith(LISTS) else (root, "")
    store = Store(top or ".", cache=cache, cache_bytes=cache_bytes)
    top = store.shown
    parts, states = once(root, lambda: (read_list(store, table) if table else arranged(store.look, top), store.states))
    store.states |= {path: (size, version) for path, (size, version) in states.items()}  # of rank 0: saves requests
    if store.local and not table:
        _check_here(top, parts)
    (home, first), *others = parts.items()
    classes = tuple(sorted(first))
    for part, tree in others:
        if unknown := sorted(set(tree) - set(classes)):
            lacking = f"a class that {below(top, home)} does not have"
            raise InputError(f"{below(top, part)}/{unknown[0]}: {lacking}; add it there or remove it")
    rows = [(p, k, file) for p, tree in parts.items() for k, kind in enumerate(classes) for file in tree.get(kind, ())]
    base = top if store.local else ""
    folders = {part: [below(below(base, part), kind) for kind in classes] for part in parts}
    paths = tuple(os.path.join(base, f) if table else f"{folders[p][k]}/{f}" for p, k, f in rows)
    whole = Files(paths, torch.tensor([label for _, label, _ in rows], dtype=torch.int64), store)
    keys = [] if others else [f"{classes[label]}/{file}" for _, label, file in rows]
    test_N = np.array([part != home for part, _, _ in rows])
    divided = split_off(whole, test_N, validation, seed, below(top, home), keys)
    return photos(top.rpartition("/")[2], classes, divided, size, max_bad_fraction)


def photos(name: str, classes: tuple[str, ...], parts: tuple[Any, ...], size: int, max_bad_fraction: float) -> Dataset:
    """A data set of RGB images of any size, decoded to squares, normalised as ImageNet; `parts` as of `split_off`."""
    train, test, undivided = parts
    return Dataset(name, classes, train, test, 3, (size, size), *_IMAGENET, max_bad_fraction, undivided)


def check_settings(root: str, size: int, validation: float) -> None:
    """Raises InputError for settings with which neither a folder nor shards can be read."""
    max_pixels()
    if not root:
        raise InputError("data.root is not given: --set data.root=DIR, the folder or the address of the images")
    if size < 1:
        raise InputError(f"size={size}: at least 1 pixel")
    if not 0 < validation < 1:
        raise InputError(f"validation={validation}: more than 0 and less than 1, the share kept for validation")


def split_off(
    whole: Any, test_N: np.ndarray, validation: float, seed: int, where: str, keys: Sequence[str] = ()
) -> tuple[Any, Any, Any]:
    """The training and the test part of a split that has `take`, and None.

    If test_N is all or none, the test part is a share of each class, and the third is the split itself. `keys`: by
    which images are chosen, their class and name; empty: the number of the class and the name in the split.
    """
    if undivided := bool(test_N.all() or not test_N.any()):
        labels = whole.labels_N.tolist()
        keys = keys or [f"{label}/{whole.name(i)}" for i, label in enumerate(labels)]
        test_N = held_out(keys, labels, validation, seed)
    if not test_N.any():
        mend = "add a part val (in a folder of photos: val/)"
        raise InputError(f"{where}: no class has two images, so none can be split off for validation; {mend}")
    return whole.take(np.flatnonzero(~test_N)), whole.take(np.flatnonzero(test_N)), whole if undivided else None


def find_images(path: str | Path) -> list[Path]:
    """The image files below a folder, sorted, without hidden ones; or the file itself. Raises InputError for none."""
    start = expanded(path)
    if start.suffix.lower() in (".parquet", ".tar", *LISTS):
        raise InputError(f"{path}: no image; give image files, or folders of them")
    if start.is_file():
        return [start]
    if not start.is_dir():
        raise InputError(f"{path}: no such file or folder; give an image or a folder of images")
    images = sorted(start / file for file in Store(str(start)).list_files() if file.lower().endswith(SUFFIXES))
    if not images:
        raise InputError(f"{path}: no image in it (looked for {', '.join(SUFFIXES)}); give another folder")
    return images


def _check_here(top: str, parts: Parts) -> None:
    """Looks for some of the files that rank 0 listed. Raises InputError if one is not on this host."""
    for part, tree in parts.items():
        names = sorted(tree)
        for name in names[:: -(-len(names) // _LOOKED_FOR)]:
            path = f"{below(top, part)}/{name}/{tree[name][-1]}"  # the last: an interrupted copy lacks it
            if not os.path.lexists(path):
                raise InputError(f"{path}: not on this host, though rank 0 has it; give all ranks the same data")


# ---- what is in a folder, or in a list


def arranged(look: Look, root: str) -> Parts:
    """The training and the validation part, or the only part, of a tree that `look` reads.

    `root` is its name in messages. Errors: InputError for no class folder, and for a class folder with no image.
    """
    subfolders = look("")[0]
    folders, files = look("train") if "train" in subfolders else ([], [])
    is_class = not folders and _images(files) and set(subfolders) - {"train", *_TEST_PARTS}
    if is_class or "train" not in subfolders:
        if subfolders and all(part_of(name) and look(name)[0] for name in subfolders):
            raise InputError(f"{root}: parts are called train and val (or valid, test), not {', '.join(subfolders)}")
        return {"": _classes(look, root, "", subfolders)}
    parts = {"train": _classes(look, root, "train", folders)}
    for part in _TEST_PARTS:
        names, files = look(part) if part in subfolders else ([], [])
        if names:
            parts[part] = _classes(look, root, part, names)
            break
        if part != "test" and _images(files):
            say(f"{below(root, part)}: its images are in no class folders, so they are not used")
    return parts


def _classes(look: Look, root: str, part: str, names: list[str]) -> Tree:
    home = below(root, part)
    if not names:
        packed = ', or, for this pack, data.use = "kasoku.data.shards"' if (Path(home) / "pack.json").is_file() else ""
        raise InputError(f"{home}: no class folders in it; expected {home}/<class>/<image>, one for each class{packed}")
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="kasoku-list") as pool:
        listed = [files for _, files in pool.map(lambda name: look(below(part, name)), names)]
    tree = {name: _images(files) for name, files in zip(names, listed, strict=True)}
    for name, files in tree.items():
        if not files:
            tables = any(file.endswith(".parquet") for file in look(part)[1])
            instead = f"; or did you mean {home}/*.parquet?" if tables else ""
            raise InputError(f"{home}/{name}: a class folder with no image ({_KINDS}); add some or remove it{instead}")
    if len(tree) == 1:
        say(f"{home}: only one class ({names[0]}); classification needs two or more")
    return tree


def _images(files: list[str]) -> list[str]:
    return [file for file in files if file.lower().endswith(SUFFIXES)]


def read_list(store: Store, file: str) -> Parts:
    """The parts of a list in a store: .csv with a line of names, or .jsonl; of path, label and perhaps split."""
    data, parts = store.read(file), {"train": Tree()}
    try:
        text = data.decode("utf-8-sig")
        table = csv.DictReader(io.StringIO(text, newline=""), restval="", strict=True, skipinitialspace=True)
        for row in table if file.endswith(".csv") else map(json.loads, filter(str.strip, text.split("\n"))):
            if row["label"] in (None, "") or not row["path"]:
                raise ValueError(f"a row without a path or a label: {row}")
            if not (part := part_of(split := "train" if row.get("split") in (None, "") else str(row["split"]))):
                raise ValueError(f"split {split}: train, val or test is wanted")
            parts.setdefault(part, {}).setdefault(str(row["label"]), []).append(str(row["path"]))
    except (csv.Error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{store.shown}/{file}: not a list of path, label ({summary(error)}); mend it") from error
    return {part: parts[part] for part in ("train", "val" if "val" in parts else "test") if part in parts}


def part_of(file: str) -> str:
    """The part of a file (train, val, test or ""), by its name or by that of the nearest folder."""
    for piece in reversed(file.lower().split("/")):
        if match := _PART.search(piece):
            return {"tr": "train", "va": "val", "te": "test"}[match[1][:2]]
    return ""


def used_parts(files: Sequence[str]) -> tuple[list[str], list[bool]]:
    """The files to read, and whether each is of the test part; all, undivided, where none is of train."""
    train, val, test = ([file for file in files if part_of(file) == part] for part in ("train", "val", "test"))
    used = train + (val or test) if train else list(files)
    return used, [part_of(file) != "train" for file in used]


# ---- one rank lists for all


class OneScan:
    """Rank 0 lists image folders and sends the lists to the other ranks.

    Note: one message. Rank 0 builds its data set and records each list. When it has finished or failed, it broadcasts
    all lists at once. Meanwhile the other ranks build theirs, and wait only when they need a list. So there is one
    collective, whatever the number of folders and whichever rank fails. A data set without folders waits for nothing.
    A list is found by the root in the recipe, which may be another path on each host ($VARIABLES). If rank 0 has not
    listed a folder, a rank lists it itself.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._listings: dict[str, Listing] = {}  # of rank 0, while it builds
        self._message: Future[bytes] = Future()  # rank 0's lists, and why its data set failed; compressed

    def build(self, make: Callable[[], T]) -> T:
        """Runs make(), which builds the data set. All ranks call `broadcast` in parallel; those above 0 also before."""
        if self._comm.size == 1:
            return make()
        failed, before = "", _ONE_SCAN.set(self)
        try:
            return make()
        except Exception as error:
            failed = str(error) or type(error).__name__
            raise
        finally:
            _ONE_SCAN.reset(before)
            if self._comm.rank == 0:
                text = json.dumps({"listings": self._listings, "failed": failed})
                self._message.set_result(zlib.compress(text.encode(), 1))  # shrinks file names to a sixth
                self._listings = {}

    def broadcast(self) -> None:
        """Sends rank 0's lists to the other ranks once its data set is built; a collective."""
        if self._comm.rank == 0:
            self._comm.broadcast_object(self._message.result())
        else:
            self._message.set_result(self.before_broadcast(lambda: self._comm.broadcast_object(b"")))

    def before_broadcast(self, f: Callable[[], T]) -> T:
        """Runs f(), without which no broadcast can follow: if it fails, threads that wait for the lists fail too."""
        try:
            return f()
        except BaseException as error:
            if self._comm.rank > 0:
                self._message.set_exception(error)
            raise

    def listing(self, root: str, scan: Callable[[], Listing]) -> Listing:
        """Rank 0's list of a root. Raises InputError if its data set failed before."""
        if self._comm.rank == 0:
            self._listings[root] = scan()
            return self._listings[root]
        message = json.loads(zlib.decompress(self._message.result()))
        if root in message["listings"]:
            return cast(Listing, message["listings"][root])
        if message["failed"]:
            raise InputError(message["failed"])
        return scan()


_ONE_SCAN: ContextVar[OneScan | None] = ContextVar("kasoku_one_scan", default=None)


def once(root: str, scan: Callable[[], Listing]) -> Listing:
    """Returns scan(); inside a `OneScan`, rank 0's list of this root instead."""
    one_scan = _ONE_SCAN.get()
    return one_scan.listing(root, scan) if one_scan else scan()


def scanned_once(comm: Comm, make: Callable[[], T]) -> T:
    """Runs make() on every rank while only rank 0 lists image folders; a collective, without extra threads."""
    if comm.size == 1:
        return make()
    scan = OneScan(comm)
    if comm.rank > 0:
        scan.broadcast()
    try:
        return scan.build(make)
    finally:
        if comm.rank == 0:
            scan.broadcast()
