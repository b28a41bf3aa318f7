"""The cache on the local disk: indices of shards, and what was read of remote files.

Note: one file for each piece
Its name is a hash of the piece's offset and of the remote file's path, size, and etag or time of change; it begins with
the crc32 of the bytes. So versions do not mix, a sample of a shard is downloaded once, without the rest of the shard, a
damaged piece costs one more download and nothing else, and processes share the folder without locks.
A read looks for a piece that begins where the read does, or at the last multiple of 256 KiB before it. So a read that
begins elsewhere in a piece is downloaded and kept again, such as read(2000, 3000) after read(1000, 5000).
Nothing is evicted: an epoch reads every sample once, in a new order, so eviction would only cause more misses.
"""

import hashlib
import os
import tempfile
import threading
import zlib
from contextlib import suppress
from pathlib import Path

from kasoku.core.errors import say
from kasoku.core.files import expanded

_PIECE_BYTES = 256 * 2**10  # maximum of a piece: to check a few bytes, the whole piece is read
_BLOCK_BYTES = 4096


def cache_folder(cache: str) -> Path:
    """The folder of the cache; if `cache` is empty, $XDG_CACHE_HOME/kasoku or ~/.cache/kasoku."""
    own = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "kasoku")
    return expanded(cache or own)


def keep(path: Path, data: bytes) -> None:
    """Writes a file of the cache atomically. Raises OSError if it cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
        try:
            file.write(data)
            file.flush()
            os.replace(file.name, path)
        except OSError:
            os.unlink(file.name)
            raise


class Pieces:
    """A cache of pieces of the remote files below one root.

    `shown`: that root in messages. `limit_bytes`: for all processes together; 0 keeps nothing.

    The file `used` grows by one byte for each block kept.
    """

    def __init__(self, folder: Path, limit_bytes: int, shown: str) -> None:
        self.folder, self._limit_bytes, self._shown = folder, limit_bytes, shown
        self._full, self._lock = limit_bytes == 0, threading.Lock()

    def read(self, file: str, start: int, stop: int) -> bytes:
        """The bytes from start up to stop, as far as they are in one intact piece. `file`: the path and the version."""
        for first in (start, start - start % _PIECE_BYTES) if self._limit_bytes else ():
            with suppress(OSError):
                stored = self._path(file, first).read_bytes()
                if len(stored) - 4 > start - first and zlib.crc32(stored[4:]) == int.from_bytes(stored[:4], "big"):
                    return stored[4 + start - first : 4 + stop - first]
        return b""

    def keep(self, file: str, first: int, data: bytes) -> None:
        """Keeps bytes, which begin at `first`, in pieces while there is room. Prints once that it keeps no more."""
        for start in range(first, first + len(data), _PIECE_BYTES):
            part = data[start - first : start - first + _PIECE_BYTES]
            path, stored = self._path(file, start), zlib.crc32(part).to_bytes(4, "big") + part
            with self._lock:
                try:
                    if self._full or (path.exists() and path.read_bytes() == stored):  # another thread was faster
                        continue
                    self._take(-(-len(part) // _BLOCK_BYTES))
                    keep(path, stored)
                except OSError as error:
                    self._full = True
                    say(f"{self.folder} takes no more ({error}); the rest is read from {self._shown} each time")

    def _path(self, file: str, first: int) -> Path:
        digest = hashlib.sha256(f"{first} {file}".encode("utf-8", "surrogateescape")).hexdigest()
        return self.folder / digest[:2] / f"{digest[2:24]}.piece"

    def _take(self, blocks: int) -> None:
        """Takes room. Raises OSError if there is none, or if the folder cannot be written."""
        used = self.folder / "used"
        if not used.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "root.txt").write_text(f"{self._shown}\n", encoding="utf-8", errors="replace")
        with used.open("ab", buffering=0) as file:
            if (file.tell() + blocks) * _BLOCK_BYTES > self._limit_bytes:
                raise OSError(f"cache_bytes={self._limit_bytes} are used")
            file.write(bytes(blocks))
