"""Which image files a folder holds: only folders that changed are listed, and by one rank for all.

Note: what may be kept. A folder's list stands while its times of change and its inode are what they were before it was
listed: adding, removing or renaming in it moves its own times. Not where they were younger than two seconds then, for
a file system may count in such steps and a second change within one would not show; nor where it holds links, which
lead elsewhere one day without a change here. Such a folder is listed again at the next start. So the result is always
that of listing everything.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

from kasoku.core.comm import Comm
from kasoku.core.errors import InputError
from kasoku.data.decode.decode import SUFFIXES
from kasoku.data.remote.cache import cache_folder, keep

T = TypeVar("T")
Tree = dict[str, list[str]]  # class -> names of its image files, both sorted
Parts = dict[str, Tree]  # by folder: "" is the root itself; or train, and val, validation or test where there is one
Listing = tuple[Parts, list[Any]]  # and the facts that their store has of remote files, in the order of the tree
Names = tuple[list[str], list[str]]  # a folder's own folders and image files, sorted, without hidden ones
Look = Callable[[str], Names]  # gets a folder as its path below the root, "" for the root
Entry = list[Any]  # what is kept of a folder: its stamp (empty: list it again), its folders, its image files

_VALIDATION = ("val", "validation", "test")
_VERSION = f"2 {' '.join(SUFFIXES)}"
_AT_ONCE = 8  # folders looked at at once: a folder on a network disk takes milliseconds to answer
_TICK_NS = 2_000_000_000  # the coarsest step in which a file system counts time


def arranged(look: Look, root: str) -> Parts:
    """The part to train on and the one to validate on, or the only one, in a tree that `look` reads.

    `root` is what messages call it. Errors: InputError for no class folder, and for a class folder with no image.
    """
    subfolders = look("")[0]
    if "train" not in subfolders:
        return {"": _classes(look, root, "", subfolders)}
    parts = {"train": _classes(look, root, "train", look("train")[0])}
    for away in _VALIDATION:
        if away in subfolders and (names := look(away)[0]):
            parts[away] = _classes(look, root, away, names)
            break
    return parts


def below(root: str, sub: str) -> str:
    """A folder below a root, or the root itself where `sub` is empty."""
    return f"{root}/{sub}" if sub else root


def _classes(look: Look, root: str, part: str, names: list[str]) -> Tree:
    home = below(root, part)
    if not names:
        packed = ', or, for this pack, data.use = "kasoku.data.shards"' if (Path(home) / "pack.json").is_file() else ""
        raise InputError(
            f"{home}: no class folders in it; expected {home}/<class>/<image>, a folder for each class{packed}"
        )
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="kasoku-list") as pool:  # in time where folders are far away
        listed = list(pool.map(lambda name: look(f"{part}/{name}" if part else name)[1], names))
    for name, images in zip(names, listed, strict=True):
        if not images:
            raise InputError(
                f"{home}/{name}: a class folder with no image ({' '.join(SUFFIXES)}); add some or remove it"
            )
    return dict(zip(names, listed, strict=True))


def look_in(paths: Iterable[str]) -> Look:
    """How to look at a tree of which only the files' paths below its root are known ("/" between names)."""
    images: Tree = {}
    for path in paths:
        parent, _, file = path.rpartition("/")
        here = images.setdefault(parent, [])  # a folder also where it holds no image
        if _is_image(file):
            here.append(file)
    folders: dict[str, set[str]] = {}
    for parent in images:
        while parent:
            above, _, name = parent.rpartition("/")
            if not name.startswith("."):
                folders.setdefault(above, set()).add(name)
            parent = above
    return lambda sub: (sorted(folders.get(sub, ())), sorted(images.get(sub, ())))


def _is_image(name: str) -> bool:
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")


def indexed(top: Path, cache: str = "") -> Parts:
    """The parts of the tree at `top`, an absolute path; lists the folders that changed since they were listed last.

    The list is kept in the folder `cache` (empty: $XDG_CACHE_HOME/kasoku or ~/.cache/kasoku).
    Errors: InputError as `arranged`, and for a folder that cannot be listed.
    """
    kept = cache_folder(cache) / f"folder-{hashlib.sha256(os.fsencode(top)).hexdigest()[:20]}.index"
    disk = _Disk(str(top), _read(kept, str(top)))
    parts = arranged(disk.look, str(top))
    if disk.entries != disk.known:
        index = {"version": _VERSION, "root": str(top), "folders": dict(sorted(disk.entries.items()))}
        keep(kept, _packed(index))
    return parts


class _Disk:
    """A tree on a disk; a folder that is as it was when it was listed is not listed again."""

    def __init__(self, top: str, known: dict[str, Entry]) -> None:
        self.top, self.known = top, known
        self.entries: dict[str, Entry] = {}
        self.began_ns = time.time_ns()

    def look(self, sub: str) -> Names:
        """The folders and images in top/sub. Raises InputError where it cannot be listed."""
        path = below(self.top, sub)
        try:
            state = os.stat(path)  # before it is listed: what changes meanwhile shows the next time
            # besides the time of the last change those of what restores it, and of another folder put in its place
            stamp = [state.st_mtime_ns, state.st_ctime_ns, state.st_ino]
            entry = self.known.get(sub)
            if entry is None or entry[0] != stamp:
                entry = self._listed(path, stamp)
        except OSError as error:
            raise InputError(f"{path}: cannot be listed ({error.strerror})") from error
        self.entries[sub] = entry
        return entry[1], entry[2]

    def _listed(self, path: str, stamp: list[int]) -> Entry:
        folders, images = [], []
        # a file system that keeps no times has 0
        stands = stamp[0] > 0 and max(stamp[:2]) < self.began_ns - _TICK_NS
        with os.scandir(path) as entries:
            for entry in entries:
                name = entry.name
                if name.startswith("."):
                    continue
                if entry.is_dir():
                    folders.append(name)
                elif _is_image(name):
                    images.append(name)
                    continue  # a link to an image is one wherever it leads
                stands = stands and not entry.is_symlink()
        return [stamp if stands else [], sorted(folders), sorted(images)]


def _read(kept: Path, root: str) -> dict[str, Entry]:
    """The kept entries by folder; none from a file that is missing, damaged, or of another version or root."""
    try:
        index = _unpacked(kept.read_bytes())
        entries: dict[str, Entry] = index["folders"]
        fits = index["version"] == _VERSION and index["root"] == root
        if fits and all(isinstance(e, list) and [type(x) for x in e] == [list] * 3 for e in entries.values()):
            return entries
    except (OSError, ValueError, LookupError, TypeError, AttributeError, zlib.error):
        pass
    return {}


def _packed(thing: Any) -> bytes:
    return zlib.compress(json.dumps(thing).encode(), 1)  # names of files shrink to a sixth, and damage is noticed


def _unpacked(stored: bytes) -> Any:
    return json.loads(zlib.decompress(stored))


class OneScan:
    """Has rank 0 list image folders, and the other ranks take its lists.

    Note: one message. Rank 0 builds its data set and notes each list; when that has ended, well or not, it broadcasts
    all of them at once. The other ranks build theirs meanwhile, and wait only where they need a folder. So there is one
    collective, however many folders a data set has and whichever rank fails; a data set without one waits for nothing.
    Folders go by their root as the recipe has it, which may lie elsewhere on each host ($VARIABLES); a folder that rank
    0 did not list, a rank lists for itself. The lists are dropped when the data set is built.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._listings: dict[str, Listing] = {}
        self._failed = ""
        self._built = threading.Event()
        self._shared: Future[None] = Future()

    def during(self, make: Callable[[], T]) -> T:
        """make(), which builds this rank's data set; all call `broadcast` beside it, ranks above 0 perhaps before."""
        if self._comm.size == 1:
            return make()
        before = _ONE_SCAN.set(self)
        try:
            return make()
        except Exception as error:
            self._failed = str(error) or type(error).__name__
            raise
        finally:
            _ONE_SCAN.reset(before)
            self._built.set()
            if self._shared.done():
                self._listings.clear()

    def broadcast(self) -> None:
        """Sends rank 0's lists to the other ranks once its data set is built; a collective."""
        message = b""
        if self._comm.rank == 0:
            self._built.wait()
            message = _packed({"listings": self._listings, "failed": self._failed})
        message = self.needed(lambda: self._comm.broadcast_object(message))
        if self._comm.rank > 0:
            received = _unpacked(message)
            self._listings, self._failed = received["listings"], received["failed"]
        self._shared.set_result(None)
        if self._built.is_set():  # whichever comes last of this and the data set
            self._listings.clear()

    def needed(self, f: Callable[[], T]) -> T:
        """f(), which comes before `broadcast` or is part of it: if it fails, so does what waits for rank 0's lists."""
        try:
            return f()
        except BaseException as error:
            self._shared.set_exception(error)
            raise

    def listing(self, root: str, scan: Callable[[], Listing], take: Callable[[Listing], None]) -> Listing:
        """Rank 0's list of a root. Raises InputError where its data set failed before."""
        if self._comm.rank == 0:
            self._listings[root] = scan()
            return self._listings[root]
        self._shared.result()
        listing = self._listings.get(root)
        if listing is not None:
            take(listing)
            return listing
        if self._failed:
            raise InputError(self._failed)
        return scan()


_ONE_SCAN: ContextVar[OneScan | None] = ContextVar("kasoku_one_scan", default=None)


def once(root: str, scan: Callable[[], Listing], take: Callable[[Listing], None]) -> Listing:
    """scan(); or rank 0's list of this root where ranks look together, once `take` raised nothing at it."""
    one_scan = _ONE_SCAN.get()
    return one_scan.listing(root, scan, take) if one_scan else scan()


def scanned_once(comm: Comm, make: Callable[[], T]) -> T:
    """make() on every rank, where only rank 0 lists image folders; a collective, and nothing runs beside it."""
    if comm.size == 1:
        return make()
    scan = OneScan(comm)
    if comm.rank > 0:
        scan.broadcast()
    try:
        return scan.during(make)
    finally:
        if comm.rank == 0:
            scan.broadcast()
