"""Reads files below a root, local or remote; remote data is cached on the local disk."""

import errno
import hashlib
import importlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from urllib.parse import quote, unquote

from kasoku.core.errors import InputError, one_line, say, without_password
from kasoku.core.files import open_regular
from kasoku.data.decode.decode import SUFFIXES
from kasoku.data.remote.cache import Pieces, cache_folder

_REQUEST_BYTES = 8 * 2**20  # maximum of a request: a large file on a slow line must not look like a stall
_PATIENCE_S = 60.0  # a read is repeated for so long if the source does not answer
TRIES = 4  # to read bytes that are intact
_REQUEST_S = 20.0  # a longer request is cancelled and sent again
_SLOWEST = 2.0**20  # bytes a second of an upload, for which it may take longer
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 8.0  # between tries; each wait is twice the one before
_OPEN = 128  # local files that stay open
AT_ONCE, _DEPTH = 8, 32  # folders listed in parallel; most nested folders (some sites answer any address)
_VERSIONS = "ETag etag md5Hash LastModified Last-Modified last_modified mtime modificationTime modified updated created"

_OF_THE_FILE = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG}
_OF_THE_FILE |= {errno.EINVAL, errno.ENXIO}  # pipes, devices, sockets
T = TypeVar("T")
Names = tuple[list[str], list[str]]  # of the folders and of the files in a folder, both sorted


class GoneError(InputError):
    """A source no longer answers. No single image is at fault, so none is skipped."""

    gone = True


def is_remote(root: str) -> bool:
    """Whether a root is an address ("s3://bucket/folder") and not a folder of this machine."""
    return "://" in root and not root.startswith("file://")


def below(folder: str, name: str) -> str:
    """The path of what has this name in a folder; the other one where one of the two is empty."""
    return f"{folder}/{name}" if folder and name else folder or name


class Store:
    """Reads files below a local or remote root, and caches remote data on the local disk.

    `root`: a folder (it may name environment variables), or an address that fsspec knows (http:// s3:// gs:// hdfs://
    and more); credentials and endpoints come from fsspec's own settings. `cache`: the folder of the cache; empty:
    $XDG_CACHE_HOME/kasoku or ~/.cache/kasoku. `cache_bytes`: maximum cached for this root by all processes together,
    including earlier contents; bytes of reads that overlap may count twice (cache.py); 0: no cache.

    `local`: whether the files are on this machine. `shown`: the absolute path, or the address without its password.
    Errors: InputError for a missing file, folder or package; GoneError for a source that refuses or does not answer.
    """

    def __init__(self, root: str, cache: str = "", cache_bytes: int = 64 * 2**30) -> None:
        if cache_bytes < 0:
            raise InputError(f"cache_bytes={cache_bytes}: 0 bytes or more")
        where = os.path.expandvars(root)
        self.local = not is_remote(where)
        self._opened = lru_cache(_OPEN)(_Opened)  # opening a file on a network disk takes as long as a read
        self.states: dict[str, tuple[int, str]] = {}  # size and version of remote files, as far as they are known
        self._far = None if self.local else _Far(where)
        if self._far is None:
            self.shown = os.path.realpath(os.path.expanduser(where.removeprefix("file://")))
            if not root or not os.path.isdir(self.shown):
                raise InputError(f"root={root}: no such folder; give a folder, or an address such as s3://bucket/set")
            return
        self.shown = self._far.shown
        digest = hashlib.sha256(os.fsencode(where.rstrip("/"))).hexdigest()[:20]
        self.pieces = Pieces(cache_folder(cache) / f"pieces-{digest}", cache_bytes, self.shown)

    def look(self, folder: str) -> Names:
        """The folders and the files in a folder below the root ("" for the root), sorted, without hidden ones.

        Links count as what they lead to.
        """
        if self._far:
            folders, infos = self._far.look(folder)
            self.states |= {path: _state(info) for path, info in infos.items() if info.get("size") is not None}
            return folders, sorted(path.rpartition("/")[2] for path in infos)
        path, folders, files, others = below(self.shown, folder), list[str](), list[str](), list[str]()
        try:
            with os.scandir(path) as entries:
                for entry in sorted((e for e in entries if not e.name.startswith(".")), key=attrgetter("name")):
                    kind = others
                    with suppress(OSError):  # a link to itself
                        kind = folders if entry.is_dir() else files if entry.is_file() else others
                    kind.append(entry.name)
        except OSError as error:
            _refuse(error)
        others = [name for name in others if name.lower().endswith((".tar", *SUFFIXES))]
        for name in others[:3]:
            say(one_line(f"{path}/{name}: not a regular file; left out"))
        if len(others) > 3:
            say(one_line(f"{path}: {len(others) - 3} more are left out"))
        return folders, files

    def list_files(self) -> list[str]:
        """Paths of all files below the root, relative to it, "/" between parts, sorted; without hidden ones."""
        files, folders, seen = list[str](), [""], {self.shown}
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="kasoku-list") as pool:
            while folders:
                listed = list(zip(folders, pool.map(self.look, folders), strict=True))
                files += [below(folder, name) for folder, (_, names) in listed for name in names]
                folders = [below(folder, name) for folder, (names, _) in listed for name in names]
                if self.local:  # links may lead to a folder that was listed
                    places = {os.path.realpath(f"{self.shown}/{folder}"): folder for folder in reversed(folders)}
                    folders = [folder for place, folder in places.items() if place not in seen]
                    seen |= places.keys()
        return sorted(files)

    def size(self, path: str) -> int:
        return self.state(path)[0]

    def read(
        self, path: str, start: int = 0, stop: int | None = None, intact: Callable[[bytes], bool] = lambda _: True
    ) -> bytes:
        """Bytes start (0 or more) to stop (None: its end) of a file, fewer if the file is shorter; thread-safe.

        Remote bytes that fail `intact` are fetched again, up to TRIES times, and are not cached. If they still fail
        they are returned: the caller reports the error.
        """
        if self._far:
            return self._read_far(self._far, path, start, stop, intact)
        where, until = os.path.join(self.shown, path), time.monotonic() + _PATIENCE_S
        while True:
            try:
                file = _Opened(where) if stop is None else self._opened(where)
                end, at, parts = os.fstat(file.number).st_size if stop is None else stop, start, []
                while at < end and (part := os.pread(file.number, min(end - at, 2**30), at)):
                    parts.append(part)
                    at += len(part)
                return b"".join(parts)
            except OSError as error:
                error.filename = where
                if error.errno in _OF_THE_FILE:
                    _refuse(error)
                if time.monotonic() > until:
                    raise GoneError(f"{where}: no answer for {_PATIENCE_S:g} s ({error.strerror})") from error
            self.close()
            time.sleep(_FIRST_WAIT_S)

    def _read_far(self, far: "_Far", path: str, start: int, stop: int | None, intact: Callable[[bytes], bool]) -> bytes:
        size, version = self.state(path)
        file, stop = f"{size} {version} {path}", size if stop is None else min(stop, size)
        for attempt in range(TRIES):
            if attempt:  # the cache may hold the bad bytes, and a proxy may soon answer again
                time.sleep(_FIRST_WAIT_S * 2 ** (attempt - 1))
            at, parts, fetched = start, [], []
            while at < stop:
                part = b"" if attempt else self.pieces.read(file, at, stop)
                if not part:
                    first, data = far.read(path, at, min(stop, at + _REQUEST_BYTES), size)
                    fetched.append((first, data))
                    part = data[at - first : stop - first]
                parts.append(part)
                at += len(part)
            whole = b"".join(parts)
            if intact(whole):
                for first, data in fetched:
                    self.pieces.keep(file, first, data)
                break
        return whole

    def state(self, path: str) -> tuple[int, str]:
        """Size of a file, and a text that changes with it: its time of change, or a remote source's version, if any."""
        if self._far is None:
            try:
                state = os.stat(f"{self.shown}/{path}")
            except OSError as error:
                _refuse(error)
            return state.st_size, str(state.st_mtime_ns)
        if path not in self.states:  # a remote source is asked once
            self.states[path] = _state(self._far.info(path))
        return self.states[path]

    def close(self) -> None:
        """Closes local files that stayed open, as soon as no thread reads them."""
        self._opened.cache_clear()


def send(root: str, files: dict[str, Path]) -> str:
    """Writes local files to their paths below an address, over what is there; returns the address without its password.

    It is opened even if there are no files, which sends nothing. Errors: as of Store, and for a folder of this machine
    and a file that arrives with another size.
    """
    far = _Far(root, "save.upload")
    if far.here:
        raise InputError(f"save.upload={far.shown}: an address is wanted, such as s3://bucket/runs")
    for path, file in files.items():
        far.write(path, file)
    return far.shown


class _Opened:
    """A regular file that is open until nobody refers to it any more."""

    def __init__(self, path: str) -> None:
        self.number = open_regular(path)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


class _Far:
    """A remote root, through fsspec; requests are repeated for a minute. shown: the root without a password."""

    def __init__(self, root: str, setting: str = "root") -> None:
        self.shown = _plain(root.rstrip("/"))
        if "::" in root or root.startswith("reference:"):
            raise InputError(f"{setting}={self.shown}: an address in an address can run code; give a plain one")
        self._web = root.startswith(("http://", "https://"))
        try:
            self._system, top = importlib.import_module("fsspec.core").url_to_fs(root)
            self._system.invalidate_cache()  # listings of an earlier store of this process
        except ImportError as error:
            missing = str(getattr(error.__cause__ or error, "name", None) or "fsspec").partition(".")[0]
            extra = "remote" if self._web or missing == "fsspec" else "s3" if missing == "s3fs" else ""
            package = f"'kasoku[{extra}]'" if extra else missing
            raise InputError(f"{setting}={self.shown}: {error}; run: pip install {package}") from error
        except Exception as error:  # an unknown protocol, or any error of the source's own package
            why = f"cannot be opened ({_plain(error)})"
            raise InputError(f"{setting}={self.shown}: {why}; check the address") from error
        self._top = str(top).rstrip("/")
        self.here = getattr(self._system, "local_file", False)  # of fsspec: the files are on this machine
        self._exact = {"block_size": 1} if root.startswith("webhdfs:") else {}  # else it reads 4 MiB more each time
        self._gave_up_s = 0.0  # when a request last gave up; older requests then give up at their next failure

    def look(self, folder: str) -> tuple[list[str], dict[str, dict[str, Any]]]:
        """The names of the folders in a folder, sorted, and the info of each file in it by its path."""
        address, limit_s = self._address(folder).rstrip("/") or "/", _PATIENCE_S  # a large folder takes many requests
        folders, files = set[str](), dict[str, dict[str, Any]]()
        for info in self._ask(folder, lambda _: self._request(limit_s, "ls", address, detail=True)):
            name, path = str(info["name"]), self._path(str(info["name"]))
            parent, _, last = path.rpartition("/")
            if not path or parent != folder:
                continue
            if info.get("type") == "directory" or name.endswith("/"):
                folders.add(last)
            else:
                files[path] = info
        return sorted(folders), files

    def info(self, path: str) -> dict[str, Any]:
        """The info of a file. Raises InputError if it has no size."""
        info: dict[str, Any] = self._ask(path, lambda limit_s: self._request(limit_s, "info", self._address(path)))
        if info.get("size") is None or info.get("type") == "directory":
            raise InputError(f"{self.shown}/{path}: not a file, or the source does not tell its size; leave it out")
        return info

    def read(self, path: str, start: int, stop: int, size: int) -> tuple[int, bytes]:
        """The offset of the bytes, and the bytes: the range, or the whole file if the server supports no ranges."""

        def attempt(limit_s: float) -> tuple[int, bytes]:
            data = bytes(self._request(limit_s, "cat_file", self._address(path), start=start, end=stop, **self._exact))
            if len(data) not in (stop - start, size):
                raise OSError(f"{len(data)} bytes came, not {stop - start}")
            return (start if len(data) == stop - start else 0), data

        return self._ask(path, attempt)

    def write(self, path: str, file: Path) -> None:
        """Writes a local file. Raises InputError unless the source then has as many bytes."""
        size = file.stat().st_size

        def attempt(limit_s: float) -> None:
            limit_s += size / _SLOWEST
            self._request(limit_s, "put_file", str(file), rpath=self._address(path))
            if (arrived := self._request(limit_s, "info", self._address(path))["size"]) != size:
                raise OSError(f"{arrived} bytes arrived, not {size}")

        self._ask(path, attempt)

    def _path(self, name: str) -> str:
        """The path of a listed name relative to the root; empty for hidden files, other sites and a page's links."""
        path = name[len(self._top) + 1 :].rstrip("/")
        parts = (unquote(path, errors="surrogateescape") if self._web else path).split("/")
        hidden = any(not part or part.startswith(".") for part in parts) or len(parts) > _DEPTH
        other = not name.startswith(f"{self._top}/") or (self._web and ("?" in path or "#" in path))
        return "" if hidden or other else "/".join(parts)

    def _address(self, path: str) -> str:
        return f"{self._top}/{quote(path, errors='surrogateescape') if self._web else path}"

    def _ask(self, path: str, attempt: Callable[[float], T]) -> T:
        """The answer to a request; `attempt` gets its time limit, and is repeated after 0.5, 1, 2, 4, 8, 8 ... s."""
        began_s, wait_s, where = time.monotonic(), _FIRST_WAIT_S, f"{self.shown}/{path}"
        until = began_s + _PATIENCE_S
        while True:
            try:
                return attempt(max(1.0, min(_REQUEST_S, until - time.monotonic())))
            except Exception as error:  # each source's package has its own
                status = getattr(error, "status", None) or getattr(error.__cause__, "status", None)
                # fsspec reports all failures of a web page's info() as a missing file, but names the cause
                missing = isinstance(error, FileNotFoundError) and not (self._web and error.__cause__)
                if missing or status in (404, 410):
                    raise InputError(f"{where}: no such file or folder; check the address") from error
                refused, left_s = isinstance(error, PermissionError) or status in (401, 403), until - time.monotonic()
                if left_s <= 0:
                    self._gave_up_s = time.monotonic()
                if refused or self._gave_up_s > began_s:
                    what = "access refused" if refused else f"no answer for {_PATIENCE_S:g} s"
                    raise GoneError(f"{where}: {what} ({type(error).__name__} {_plain(error)})") from error
            time.sleep(min(wait_s, left_s))
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _request(self, limit_s: float, name: str, address: str, **options: Any) -> Any:
        """Calls a method of fsspec. Raises TimeoutError after limit_s; a hanging call delays nothing, not even exit."""
        if self._system.async_impl:
            options["timeout"] = limit_s + 1  # fsspec then closes the connection
        answer: Future[Any] = Future()

        def settle() -> None:
            try:
                answer.set_result(getattr(self._system, name)(address, **options))
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=settle, name="kasoku-store", daemon=True).start()
        until_s = limit_s + (began_s := time.monotonic())
        while self._gave_up_s < began_s and not answer.done() and (left_s := until_s - time.monotonic()) > 0:
            wait((answer,), min(left_s, 1.0))
        return answer.result(0)


def _refuse(error: OSError) -> NoReturn:
    raise InputError(f"{error.filename}: cannot be read ({error.strerror}); mend or remove it") from error


def _state(info: dict[str, Any]) -> tuple[int, str]:
    """Size and version of a remote file; the version is the etag or time in fsspec's info(), or empty."""
    version = next((info[key] for key in _VERSIONS.split() if info.get(key)), "")
    return int(info["size"]), str(version.timestamp() if hasattr(version, "timestamp") else version)


def _plain(text: object) -> str:  # its first line, without a password
    return without_password(str(text).strip().partition("\n")[0])


HERE = Store(os.sep)  # files of this machine, by absolute paths
