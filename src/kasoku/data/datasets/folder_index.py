"""The image files of a folder by part and class; one rank lists them for all."""

import csv
import io
import json
import re
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar, cast

from kasoku.core import Comm, InputError
from kasoku.core.errors import summary
from kasoku.data.decode.decode import SUFFIXES
from kasoku.data.remote.store import AT_ONCE, Names, Store, below

T = TypeVar("T")
Tree = dict[str, list[str]]  # class -> names of its image files, both sorted; of a list, their paths
Parts = dict[str, Tree]  # by folder: "" is the root itself; or train, and val, validation or test where there is one
Listing = tuple[Parts, dict[str, Any]]  # and what their store knows of remote files
Look = Callable[[str], Names]  # what is in a folder, which is its path below the root, "" for the root

LISTS = (".csv", ".jsonl")
_PART = re.compile(r"(?:^|[^a-z])(training|train|validation|valid|val|testing|test)(?![a-z])")
_VALIDATION = ("val", "validation", "test")
_KINDS = " ".join(SUFFIXES)


def arranged(look: Look, root: str) -> Parts:
    """The training and the validation part, or the only part, of a tree that `look` reads.

    `root` is its name in messages. Errors: InputError for no class folder, and for a class folder with no image.
    """
    subfolders = look("")[0]
    if "train" not in subfolders:
        return {"": _classes(look, root, "", subfolders)}
    parts = {"train": _classes(look, root, "train", look("train")[0])}
    for part in _VALIDATION:
        if part in subfolders and (names := look(part)[0]):
            parts[part] = _classes(look, root, part, names)
            break
    return parts


def _classes(look: Look, root: str, part: str, names: list[str]) -> Tree:
    home = below(root, part)
    if not names:
        packed = ', or, for this pack, data.use = "kasoku.data.shards"' if (Path(home) / "pack.json").is_file() else ""
        raise InputError(f"{home}: no class folders in it; expected {home}/<class>/<image>, one for each class{packed}")
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="kasoku-list") as pool:
        listed = [files for _, files in pool.map(lambda name: look(below(part, name)), names)]
    images = ([file for file in files if file.lower().endswith(SUFFIXES)] for files in listed)
    tree = dict(zip(names, images, strict=True))
    for name, files in tree.items():
        if not files:
            tables = any(file.endswith(".parquet") for file in look(part)[1])
            instead = f"; or did you mean {home}/*.parquet?" if tables else ""
            raise InputError(f"{home}/{name}: a class folder with no image ({_KINDS}); add some or remove it{instead}")
    return tree


def read_list(store: Store, file: str) -> Parts:
    """The parts of a list in a store: .csv with a line of names, or .jsonl; of path, label and perhaps split."""
    data, parts = store.read(file), {"train": Tree()}
    try:
        text = data.decode("utf-8-sig")
        table = csv.DictReader(io.StringIO(text, newline=""), restval="", strict=True)
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
