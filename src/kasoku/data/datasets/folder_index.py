"""Lists the image files of a folder: lists only folders that changed, and one rank lists for all.

Note: valid lists. A folder's list is reused while the folder's mtime, ctime and inode are those from before it was
listed, since adding, removing or renaming an entry changes the times. Two kinds of folders are listed at every start:
those that had changed less than two seconds before, since file systems may count time in such steps and would not show
a second change within one; and those with links (except to images), whose targets can change elsewhere. So the result
always equals that of listing everything.
"""

import hashlib
import json
import os
import time
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

from kasoku.core import Comm, InputError
from kasoku.core.files import scan
from kasoku.data.datasets.base import warn_left_out
from kasoku.data.decode.decode import SUFFIXES
from kasoku.data.remote.cache import cache_folder, keep

T = TypeVar("T")
Tree = dict[str, list[str]]  # class -> names of its image files, both sorted
Parts = dict[str, Tree]  # by folder: "" is the root itself; or train, and val, validation or test where there is one
Listing = tuple[Parts, list[Any]]  # and the facts that their store has of remote files, in the order of the tree
Names = tuple[list[str], list[str]]  # a folder's own folders and image files, sorted, without hidden ones
Look = Callable[[str], Names]  # gets a folder as its path below the root, "" for the root
Entry = list[Any]  # cached for a folder: its stamp (empty: list it again), its folders, its image files

_VALIDATION = ("val", "validation", "test")
_KINDS = " ".join(SUFFIXES)
_VERSION = f"2 {_KINDS}"
_AT_ONCE = 8  # folders listed in parallel: on a network disk each takes milliseconds
_TICK_NS = 2_000_000_000  # the coarsest step in which a file system counts time


def arranged(look: Look, root: str) -> Parts:
    """The training and the validation part, or the only part, of a tree that `look` reads.

    `root` is its name in messages. Errors: InputError for no class folder, and for a class folder with no image.
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
        raise InputError(f"{home}: no class folders in it; expected {home}/<class>/<image>, one for each class{packed}")
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="kasoku-list") as pool:  # in parallel: folders may be remote
        listed = list(pool.map(lambda name: look(f"{part}/{name}" if part else name)[1], names))
    tree = dict(zip(names, listed, strict=True))
    for name, images in tree.items():
        if not images:
            raise InputError(f"{home}/{name}: a class folder with no image ({_KINDS}); add some or remove it")
    return tree


def look_in(paths: Iterable[str]) -> Look:
    """A `Look` at a tree that is given by the paths of its files below the root ("/" between names)."""
    folders: dict[str, set[str]] = {}
    images: Tree = {}
    for path in paths:
        *parents, file = path.split("/")
        for depth, name in enumerate(parents):
            if not name.startswith("."):
                folders.setdefault("/".join(parents[:depth]), set()).add(name)
        if _is_image(file):
            images.setdefault("/".join(parents), []).append(file)
    return lambda sub: (sorted(folders.get(sub, ())), sorted(images.get(sub, ())))


def _is_image(name: str) -> bool:
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")


def indexed(top: Path, cache: str = "") -> Parts:
    """The parts of the tree at `top`, an absolute path; lists only folders that changed since the last time.

    The list is kept in the folder `cache` (empty: $XDG_CACHE_HOME/kasoku or ~/.cache/kasoku).
    Errors: InputError as `arranged`, and for a folder that cannot be listed.
    """
    root, began_ns = str(top), time.time_ns()
    kept = cache_folder(cache) / f"folder-{hashlib.sha256(os.fsencode(top)).hexdigest()[:20]}.index"
    known, entries = dict[str, Entry](), dict[str, Entry]()
    # a missing or damaged file, or one of another version or root, counts as empty
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError, zlib.error):
        index = _unpacked(kept.read_bytes())
        fits = index["version"] == _VERSION and index["root"] == root
        if fits and all([type(part) for part in entry] == [list] * 3 for entry in index["folders"].values()):
            known = index["folders"]

    def look(sub: str) -> Names:
        path = below(root, sub)
        try:
            state = os.stat(path)  # before listing, so that a change meanwhile shows next time
            # ctime shows a restored mtime, and the inode shows another folder in this place
            stamp = [state.st_mtime_ns, state.st_ctime_ns, state.st_ino]
            entry = known.get(sub)
            if entry is None or entry[0] != stamp:
                folders, files, others, links = scan(path)
                images = [name for name in files if _is_image(name)]
                others = [name for name in others if _is_image(name)]
                warn_left_out(path, others)
                # a time of 0 is that of a file system that keeps none
                stands = not (links - {*images} or others) and stamp[0] > 0 and max(stamp[:2]) < began_ns - _TICK_NS
                entry = [stamp if stands else [], folders, images]
        except OSError as error:
            raise InputError(f"{path}: cannot be listed ({error.strerror})") from error
        entries[sub] = entry
        return entry[1], entry[2]

    parts = arranged(look, root)
    if entries != known:
        keep(kept, _packed({"version": _VERSION, "root": root, "folders": dict(sorted(entries.items()))}))
    return parts


def _packed(thing: Any) -> bytes:
    return zlib.compress(json.dumps(thing).encode(), 1)  # shrinks file names to a sixth, and detects damage


def _unpacked(stored: bytes) -> Any:
    return json.loads(zlib.decompress(stored))


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
                self._message.set_result(_packed({"listings": self._listings, "failed": failed}))
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

    def listing(self, root: str, scan: Callable[[], Listing], take: Callable[[Listing], None]) -> Listing:
        """Rank 0's list of a root. Raises InputError if its data set failed before."""
        if self._comm.rank == 0:
            self._listings[root] = scan()
            return self._listings[root]
        message = _unpacked(self._message.result())
        if root in message["listings"]:
            listing: Listing = message["listings"][root]
            take(listing)
            return listing
        if message["failed"]:
            raise InputError(message["failed"])
        return scan()


_ONE_SCAN: ContextVar[OneScan | None] = ContextVar("kasoku_one_scan", default=None)


def once(root: str, scan: Callable[[], Listing], take: Callable[[Listing], None]) -> Listing:
    """Returns scan(); inside a `OneScan`, rank 0's list of this root instead, after `take` accepted it."""
    one_scan = _ONE_SCAN.get()
    return one_scan.listing(root, scan, take) if one_scan else scan()


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
