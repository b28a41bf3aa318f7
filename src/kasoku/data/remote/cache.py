"""The cache on the local disk: file lists and indices, and the read parts of remote files.

Note: two files for each remote file
A sparse copy holds the bytes at their offsets. A log has a line (start, stop, crc32) for each piece, appended in one
write after the bytes are in the copy. So a sample of a shard is downloaded once, without the rest of the shard. A torn
line, or bytes lost in a crash, cost one more download and nothing else, and processes share the folder without locks.
Both names are a hash of the file's path, size, and etag or time of change, so versions do not mix.
Nothing is evicted: an epoch reads every sample once, in a new order, so eviction would only cause more misses.
"""

from __future__ import annotations

import os
import re
import tempfile
import threading
import zlib
from array import array
from bisect import bisect_left, bisect_right
from contextlib import suppress
from pathlib import Path

from kasoku.core.errors import say

_PIECE_BYTES = 256 * 2**10  # maximum for one crc: to check a few bytes, the whole piece is read
_BLOCK_BYTES = 4096
_LINE = re.compile(rb"(\d{1,18}) (\d{1,18}) ([0-9a-f]{8})")


def cache_folder(cache: str) -> Path:
    """The folder of the cache; if `cache` is empty, $XDG_CACHE_HOME/kasoku or ~/.cache/kasoku."""
    own = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "kasoku")
    return Path(cache or own).expanduser()


def keep(path: Path, data: bytes) -> None:
    """Writes a cache file atomically. Errors such as a full disk are ignored: the cache only saves time."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
            try:
                file.write(data)
                file.flush()
                os.replace(file.name, path)
            except OSError:
                os.unlink(file.name)


class Copy:
    """The pieces of one remote file in the cache (see the Note above) that this process knows."""

    def __init__(self, stem: Path, size: int, room: Room) -> None:
        self._bytes, self._log, self._room = f"{stem}.bytes", f"{stem}.log", room
        self._starts, self._rests = array("Q"), array("Q")  # of each piece: where it starts; length << 32 | crc
        self._lock = threading.Lock()
        try:
            lines = Path(self._log).read_bytes().split(b"\n")
        except OSError:
            return
        for match in filter(None, map(_LINE.fullmatch, lines)):
            start, stop, crc = int(match[1]), int(match[2]), int(match[3], 16)
            if start < stop <= min(size, start + _PIECE_BYTES):
                self._note(start, (stop - start) << 32 | crc)

    def read(self, start: int, stop: int) -> tuple[bytes, int]:
        """The bytes from start up to stop in one intact piece, and stop; or no bytes, and the end of the gap."""
        while True:
            with self._lock:
                after = bisect_right(self._starts, start)
                least = bisect_left(self._starts, max(0, start - _PIECE_BYTES))  # earlier pieces end before start
                for at in range(after - 1, least - 1, -1):
                    first, rest = self._starts[at], self._rests[at]
                    if first + (rest >> 32) > start:
                        break
                else:
                    return b"", min([stop, *self._starts[after : after + 1]])
            try:
                with open(self._bytes, "rb", buffering=0) as file:
                    file.seek(first)
                    data = file.read(rest >> 32)
            except OSError:
                data = b""
            if len(data) << 32 | zlib.crc32(data) == rest:
                return data[start - first : stop - first], stop
            with self._lock:
                self._note(first, 0)  # damaged: marks the piece as empty

    def keep(self, first: int, data: bytes) -> None:
        """Writes bytes into the copy, then their pieces into the log, while there is room."""
        view = memoryview(data)
        cuts = ((first + at, view[at : at + _PIECE_BYTES]) for at in range(0, len(view), _PIECE_BYTES))
        pieces = [(start, part, len(part) << 32 | zlib.crc32(part)) for start, part in cuts]
        with self._lock:
            new = [piece for piece in pieces if not self._has(piece[0], piece[2])]  # another thread may have kept it
            if not new or not self._room.take(sum(len(part) for _, part, _ in new)):
                return
            try:
                os.makedirs(os.path.dirname(self._bytes), exist_ok=True)
                with open(os.open(self._bytes, os.O_WRONLY | os.O_CREAT, 0o666), "wb") as file:
                    for start, part, _ in new:
                        file.seek(start)
                        file.write(part)
                lines = (b"%d %d %08x\n" % (start, start + (rest >> 32), rest & 0xFFFFFFFF) for start, _, rest in new)
                with open(self._log, "ab", buffering=0) as file:  # one write: other processes cannot split it
                    file.write(b"\n" + b"".join(lines))  # the first newline ends a line that another process tore
                for start, _, rest in new:
                    self._note(start, rest)
            except OSError as error:
                self._room.close(error)

    def _has(self, start: int, rest: int) -> bool:
        at = bisect_left(self._starts, start)
        return at < len(self._starts) and (self._starts[at], self._rests[at]) == (start, rest)

    def _note(self, start: int, rest: int) -> None:
        at = bisect_left(self._starts, start)
        if self._starts[at : at + 1] != array("Q", [start]):
            self._starts.insert(at, start)
            self._rests.insert(at, 0)
        self._rests[at] = rest  # the latest entry is valid


class Room:
    """Limits the size of a folder for all processes: the file `used` grows by one byte for each block kept."""

    def __init__(self, folder: Path, limit_bytes: int, shown: str) -> None:
        self.folder, self._limit_bytes, self._shown = folder, limit_bytes, shown
        self._closed, self._lock = limit_bytes == 0, threading.RLock()

    def take(self, amount_bytes: int) -> bool:
        """Reserves room; False if there is none, or the folder cannot be written."""
        used, blocks = self.folder / "used", -(-amount_bytes // _BLOCK_BYTES)
        with self._lock:
            if self._closed:
                return False
            try:
                if not used.exists():
                    self.folder.mkdir(parents=True, exist_ok=True)
                    (self.folder / "root.txt").write_text(f"{self._shown}\n", encoding="utf-8", errors="replace")
                    used.touch()
                if (used.stat().st_size + blocks) * _BLOCK_BYTES <= self._limit_bytes:
                    with used.open("ab", buffering=0) as file:
                        file.write(bytes(blocks))
                    return True
                self.close(f"cache_bytes={self._limit_bytes} are used")
            except OSError as error:
                self.close(error)
            return False

    def close(self, reason: object) -> None:
        """Stops the cache from growing, and prints that once."""
        with self._lock:
            if not self._closed:
                say(f"{self.folder} takes no more ({reason}); the rest is read from {self._shown} each time")
            self._closed = True
