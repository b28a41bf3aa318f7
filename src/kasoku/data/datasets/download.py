"""Downloads official data sets: resumes, verifies, and lays out the files as the readers expect them."""

import gzip
import http.client
import io
import os
import re
import shlex
import shutil
import sys
import tarfile
import time
import tomllib
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from kasoku.core.errors import InputError, nearest
from kasoku.core.files import digest, lock

TRIES = 3
BACKOFF_S = 1.0  # before the second try; twice as long before each further one
SILENCE_S = 30.0  # a try ends if the server sends nothing for so long
SUMS = "SHA256SUMS"  # in the unpacked folder; `sha256sum -c` reads it too
_CHUNK_BYTES = 1 << 18
_OTHER = "give --source, another address of the same files"


@dataclass(frozen=True)
class Release:
    """The published files of a data set, and the folder in which kasoku's readers look for them."""

    reader: str
    address: str  # of its files
    folder: str  # below DIR: holds its files, or its unpacked archive
    files: dict[str, tuple[int, str]]  # name -> bytes, SHA-256
    unpacked_bytes: int = 0  # of the archive, about; 0 if the readers take compressed files


_TABLES = tomllib.loads(Path(__file__).with_name("releases.toml").read_text(encoding="utf-8"))
RELEASES = {name: Release(**table) for name, table in _TABLES.items()}


def download(name: str, to: str, *, source: str = "", quiet: bool = False) -> str:
    """Downloads the official files of a data set; returns a line that says where they are and how to train on them.

    Correct files are not downloaded again, and interrupted downloads resume (FILE.part). `source`: another address of
    the same files; empty: the official one. Progress is shown on a terminal's standard error, unless `quiet`.
    Errors: InputError for an unknown name, an address that does not give the files, a wrong checksum, a damaged
    archive, a full disk, a folder that cannot be written, a file that another download writes.
    """
    if name not in RELEASES:
        raise InputError(f"data set {name!r}{nearest(name, RELEASES)}")
    if not to:
        raise InputError("--to is not given: the folder for the data, such as --to data")
    release, home = RELEASES[name], Path(os.path.abspath(os.path.expanduser(os.path.expandvars(to))))
    if source and not re.fullmatch(r"https?://[^\s/]+(/\S*)?", source):
        raise InputError(f"source={source}: an http:// or https:// address of the folder that holds the files")
    base = (source or release.address).rstrip("/") + "/"
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Progress(*columns, console=Console(stderr=True), disable=quiet or not sys.stderr.isatty())
    try:
        home.mkdir(parents=True, exist_ok=True)
        get, place = (_get_archive, home) if release.unpacked_bytes else (_get_files, home / release.folder)
        with bar:
            came_bytes = get(release, place, base, bar)
    except OSError as error:  # of the disk: `_faults` turns those of the connection into ConnectionError
        text = f"{error.filename or home}: {error.strerror or error}"
        raise InputError(f"{text}; mend that or free some space, or give another --to") from error
    done = f"{_mb(came_bytes)} downloaded to {home}" if came_bytes else f"all there in {home}, nothing to download"
    photos = release.reader == "kasoku.data.folder"  # takes the folder itself, and does not look in KASOKU_DATA
    setting = shlex.quote(f"data.root={home / release.folder if photos else home}")
    also = "" if photos else f" or KASOKU_DATA={shlex.quote(str(home))}"
    return f"{name}: {done}; train on it with data.use={release.reader} and --set {setting}{also}"


def _get_archive(release: Release, home: Path, base: str, bar: Progress) -> int:
    """Gets and unpacks the one archive of a release; returns its bytes if it had to be downloaded, else 0.

    An archive that was already there is used and kept; a downloaded one is removed.
    """
    folder, archive = home / release.folder, home / next(iter(release.files))
    if folder.exists():
        if not (folder / SUMS).is_file():
            raise InputError(f"{folder}: is there, but not from here (no {SUMS}); train on it, or move it away")
        lines = (folder / SUMS).read_text(encoding="utf-8", errors="surrogateescape").strip().split("\n")
        sums = (line.partition("  ")[::2] for line in lines)
        if all((folder / name).is_file() and digest(folder / name) == sha256 for sha256, name in sums):
            return 0
    came_bytes = _get_files(release, home, base, bar)
    _unpack(archive, folder)
    if came_bytes:
        archive.unlink()
    return came_bytes


def _get_files(release: Release, place: Path, base: str, bar: Progress) -> int:
    """Downloads the files that are missing or wrong; returns their size in bytes, 0 for none."""
    missing = {}
    for name, (size_bytes, sha256) in release.files.items():
        path = place / name
        if not (path.is_file() and path.stat().st_size == size_bytes and digest(path) == sha256):
            missing[name] = (size_bytes, sha256)
    place.mkdir(exist_ok=True)
    parts = [place / f"{name}.part" for name in missing]
    miss_bytes = sum(size_bytes for size_bytes, _ in missing.values())
    need_bytes = miss_bytes + release.unpacked_bytes - sum(part.stat().st_size for part in parts if part.exists())
    free_bytes = shutil.disk_usage(place).free
    if need_bytes > free_bytes:
        raise InputError(f"{place}: {_mb(free_bytes)} free, {_mb(need_bytes)} needed; free some, or give another --to")
    for name, known in missing.items():
        _fetch(base + name, place / name, *known, bar)
    return miss_bytes


def _fetch(address: str, path: Path, size_bytes: int, sha256: str, bar: Progress) -> None:
    """Downloads a file and verifies it. After a fault, the received part stays as .part.

    Errors: InputError after TRIES faults, for a file of another length, for a wrong checksum.
    """
    part = path.with_name(f"{path.name}.part")
    task = bar.add_task(path.name, total=size_bytes)
    with part.open("ab", buffering=0) as out:
        lock(out, lambda: f"{part}: another download writes it; wait for that, or give another --to")
        try:
            for tries in range(TRIES):
                try:
                    _receive(address, out, size_bytes, bar, task)
                    break
                except ConnectionError as fault:
                    if tries + 1 == TRIES:
                        text = f"{address}: {fault} ({TRIES} tries); run this again to go on, or {_OTHER}"
                        raise InputError(text) from fault
                    time.sleep(BACKOFF_S * 2**tries)
            if (got := digest(part)) != sha256:
                out.truncate(0)
                raise InputError(f"{address}: SHA-256 {got}, expected {sha256}; try again, or {_OTHER}")
            os.replace(part, path)
        finally:
            if part.exists() and not part.stat().st_size:
                part.unlink()


def _receive(address: str, out: io.FileIO, size_bytes: int, bar: Progress, task: TaskID) -> None:
    """Resumes at the end of the part, or starts again if the server cannot resume."""
    at = os.fstat(out.fileno()).st_size
    if at == size_bytes:
        return
    going_on = {"Range": f"bytes={at}-"} if 0 < at < size_bytes else {}
    with _faults(address):
        request = urllib.request.Request(address, headers={"User-Agent": "kasoku", **going_on})
        answer: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=SILENCE_S)
    with answer:
        if answer.status != 206 and at:
            at = out.truncate(0)
        if answer.length not in (None, size_bytes - at):
            raise InputError(f"{address}: {at + answer.length:,} bytes, expected {size_bytes:,}; {_OTHER}")
        bar.reset(task, completed=at)
        while at < size_bytes:
            with _faults(address):
                chunk = answer.read1(min(size_bytes - at, _CHUNK_BYTES))
            if not chunk:
                raise ConnectionError(f"the connection ended at {at:,} of {size_bytes:,} bytes")
            left = memoryview(chunk)
            while left:  # one call may write fewer bytes, and a buffer would report a full disk only when closed
                left = left[out.write(left) :]
            at += len(chunk)
            bar.update(task, completed=at)


@contextmanager
def _faults(address: str) -> Iterator[None]:
    """Raises faults of the connection as ConnectionError, to tell them from disk faults: both are OSError."""
    try:
        yield
    except urllib.error.HTTPError as error:
        error.close()  # it holds the connection
        text = f"HTTP {error.code} {error.reason}"
        if error.code < 500 and error.code not in (408, 429):
            raise InputError(f"{address}: {text}; {_OTHER}") from error
        raise ConnectionError(text) from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        cause = getattr(error, "reason", error)  # URLError wraps the cause
        raise ConnectionError(str(cause) or type(cause).__name__) from error


def _unpack(archive: Path, folder: Path) -> None:
    """Unpacks beside the folder, then renames it into place; repairs a damaged folder file by file."""
    temporary = folder.with_name(f".{folder.name}.unpacking")
    shutil.rmtree(temporary, ignore_errors=True)
    fresh = temporary / folder.name
    try:
        with gzip.open(archive) as plain, tarfile.open(fileobj=plain, mode="r:") as stored:
            stored.extractall(temporary, filter="data")
            plain.seek(0, io.SEEK_END)  # tarfile takes damage between two files for the end; reading on finds it
        if not fresh.is_dir():
            raise InputError(f"{archive}: has no folder {folder.name}: not the official archive; remove it")
        names = sorted(path.relative_to(fresh).as_posix() for path in fresh.rglob("*") if path.is_file())
        sums = "".join(f"{digest(fresh / name)}  {name}\n" for name in names)
        (fresh / SUMS).write_text(sums, encoding="utf-8", errors="surrogateescape")
        if folder.exists():
            shutil.copytree(fresh, folder, copy_function=os.replace, dirs_exist_ok=True)
        else:
            os.rename(fresh, folder)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:  # also for a path that leads out
        raise InputError(f"{archive}: damaged or not the official one ({error}); remove it, or {_OTHER}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.1f} MB"
