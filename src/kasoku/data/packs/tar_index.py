"""The index of one tar shard, read from its headers.

Note: nothing is extracted from a shard
An image is a range of its shard's bytes. A member's name is a key and never a path, so names such as ../../x or /etc/x
do no harm. Links, folders and devices are left out.
"""

import io
import itertools
import json
import re
import tarfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from kasoku.core.errors import InputError, one_line, summary
from kasoku.data.remote.store import Store

VERSION = 1  # of packs and their indices
_SUFFIXES = ("jpg", "jpeg", "png", "webp", "bmp", "npy")
_KEY = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)", re.DOTALL)  # up to the first dot, as WebDataset has it
_RECORD = re.compile(rb"(\d{1,7}) ([^=\n]*)=")
BLOCK_BYTES = 512  # the unit of a tar file
_AHEAD_BYTES = 8192  # read at each header: mostly enough for the label and the next header
_SMALL_BYTES = 2**20  # labels and long names are smaller
_MOST_CLASSES = 2**20
_PARSING = threading.Lock()  # numpy parses headers by ast, which is not thread-safe before Python 3.11.8 (gh-106905)
_COLUMNS = {"offset": np.int64, "size": np.int64, "label": np.int32, "crc32": np.uint32}  # of an index, as stored
_NO_DATA = (tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE)


class Damaged(Exception):  # noqa: N818 - internal: users get an InputError with advice
    """A file is damaged or has changed; the text names the file and the fault."""


@dataclass(frozen=True, eq=False)
class Index:
    """The images of a shard, and the reasons for samples left out."""

    rows_N4: np.ndarray  # noqa: N815 - offset, bytes, label and crc32 of each image (int64)
    names: tuple[str, ...]
    shard_bytes: int
    sha256: str = ""  # of the shard; if its bytes were not read it is empty, and crc32 is not known
    left_out: tuple[str, ...] = ()
    damaged: bool = False  # a header is, so that what follows it is left out

    def dump(self) -> bytes:
        out = io.BytesIO()
        columns = zip(_COLUMNS.items(), self.rows_N4.T, strict=True)
        numbers = {name: column_N.astype(dtype) for (name, dtype), column_N in columns}
        texts = {"names": self.names, "sha256": (self.sha256,), "left_out": self.left_out}
        letters: dict[str, Any] = {k: np.frombuffer("\n".join(v).encode(), np.uint8) for k, v in texts.items()}
        np.savez(out, version=np.int64(VERSION), bytes=np.int64(self.shard_bytes), **numbers, **letters)
        return out.getvalue()

    @staticmethod
    def load(data: bytes) -> "Index":
        """Reads the output of `dump`. Raises Damaged for anything else."""
        try:
            with _PARSING, np.load(io.BytesIO(data), allow_pickle=False) as stored:
                if int(stored["version"]) != VERSION:
                    raise ValueError(f"version {int(stored['version'])}, this kasoku reads {VERSION}")
                columns = [stored[name].astype(np.int64, casting="safe") for name in _COLUMNS]
                whole = int(stored["bytes"].astype(np.int64, casting="safe"))
                texts = [stored[name].tobytes().decode() for name in ("names", "sha256", "left_out")]
            names, sha256, left_out = (tuple(text.split("\n")) if text else () for text in texts)
            offset_N, size_N, label_N, _ = columns
            shapes = {column.shape for column in columns}
            inside_N = (offset_N >= 0) & (size_N >= 0) & (size_N <= whole) & (offset_N <= whole - size_N)
            if shapes != {(len(names),)} or not inside_N.all() or (label_N < 0).any():
                raise ValueError("its columns do not fit each other")
        except Exception as error:  # damaged bytes make the reader raise nearly anything
            raise Damaged(f"cannot be read ({one_line(summary(error))})") from error
        return Index(np.stack(columns, 1), names, whole, "".join(sha256), left_out)


def member(name: str, data: bytes) -> bytes:
    """The bytes of a file in a shard, without a time: header, data, and zeros to the end of a block."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), 0o644
    return info.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % BLOCK_BYTES)


def walk(store: Store, file: str) -> Index:
    """Indexes the samples of a shard by its headers. Incomplete ones are skipped and reported in `left_out`.

    Errors: InputError for a file that is no tar archive.
    """
    window, members, damage = _Window(store, file), [], ""
    try:
        _header(window, 0)
    except Damaged as damaged:
        raise InputError(f"{store.shown}/{file}: not a tar archive; mend or remove the file") from damaged
    try:
        for name, offset, size in _members(window):
            if match := _KEY.fullmatch(name):
                key, suffix = match[1], match[2].lower()
                has_label = suffix in ("cls", "json") and size < _SMALL_BYTES
                label = _label(suffix, window.read(offset, size)) if has_label else None
                members.append((key, suffix, offset, size, label))
    except Damaged as damaged:
        damage = str(damaged)
    rows_4, names, left = [], [], 0
    for key, group in itertools.groupby(members, key=lambda sample: sample[0]):
        parts = list(group)
        image = next((part for part in parts if part[1] in _SUFFIXES), None)
        label = next((part[4] for part in parts if part[4] is not None), None)
        if image is None or label is None:
            left += 1
        else:
            rows_4.append((image[2], image[3], label, 0))
            names.append(one_line(f"{file}/{key}.{image[1]}"))
    left_out = tuple(filter(None, (damage, f"{left:,} without an image or a class left out" if left else "")))
    rows_N4 = np.array(rows_4, np.int64).reshape(-1, 4)
    return Index(rows_N4, tuple(names), window.whole, left_out=left_out, damaged=bool(damage))


class _Window:
    """The last bytes read from a shard, so that one read covers headers and labels that lie close together."""

    def __init__(self, store: Store, file: str) -> None:
        self.store, self.file, self.whole = store, file, store.size(file)
        self.start, self.data = 0, b""

    def read(self, offset: int, size: int, *, header: bool = False) -> bytes:
        """A header, or a member's data. Remote bytes are taken if a valid header begins there, or follows the data."""
        stop = min(offset + size, self.whole)
        if not self.start <= offset <= stop <= self.start + len(self.data):
            last = max(offset, min(offset + max(size, _AHEAD_BYTES), self.whole))
            self.start = offset
            self.data = self.store.read(self.file, offset, last, lambda data: _has_header(data, 0 if header else size))
        return self.data[offset - self.start : max(stop - self.start, 0)]

    def lacking(self, stop: int) -> Damaged:
        return Damaged(f"cut off, {stop - self.whole:,} or more bytes are missing")

    def broken(self, at: int) -> Damaged:
        return Damaged(f"damaged at byte {at:,}, the {self.whole - at:,} bytes from there on left out")


def _members(window: _Window) -> Iterator[tuple[str, int, int]]:
    """Name, offset and size of each regular file, from the headers (ustar, pax, GNU). Raises Damaged at a fault."""
    at, extension = 0, dict[str, bytes]()  # of an extended header, for the next member
    while at < window.whole and (header := _header(window, at)) is not None:
        start, kind = at + BLOCK_BYTES, header.type
        extended = kind in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME)
        announced = header.size if extended else int(extension.get("size", header.size))
        size = 0 if kind in _NO_DATA else announced  # of some kinds no data follows, whatever the header says
        if start + size > window.whole:
            raise window.lacking(start + size)
        if extended:
            if size > _SMALL_BYTES:
                raise window.broken(at)
            text = window.read(start, size)
            extension |= {"path": text.rstrip(b"\0")} if kind == tarfile.GNUTYPE_LONGNAME else _pax(text)
        elif kind not in (tarfile.XGLTYPE, tarfile.GNUTYPE_LONGLINK):
            if kind in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE):
                path = extension.get("path")
                yield header.name if path is None else path.decode("utf-8", "surrogateescape"), start, size
            extension = {}
        at = start + -(-size // BLOCK_BYTES) * BLOCK_BYTES


def _header(window: _Window, at: int) -> tarfile.TarInfo | None:
    """The header at a byte of the shard; None at the end of the archive. Raises Damaged."""
    block = window.read(at, BLOCK_BYTES, header=True)
    if len(block) < BLOCK_BYTES:
        raise window.lacking(at + BLOCK_BYTES)
    try:
        return _parsed(block)
    except tarfile.HeaderError as error:
        raise window.broken(at) from error


def _parsed(block: bytes) -> tarfile.TarInfo | None:
    """The header that bytes begin with; None for zeros and for too few bytes. Raises tarfile.HeaderError."""
    if len(block) < BLOCK_BYTES or not any(block):
        return None
    header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    if header.size < 0:
        raise tarfile.HeaderError("a size below 0")
    return header


def _has_header(data: bytes, at: int) -> bool:
    """Whether a valid header, or the end, follows `at` bytes of data; True if it lies outside of `data`."""
    with suppress(tarfile.HeaderError):
        _parsed(data[-(-at // BLOCK_BYTES) * BLOCK_BYTES :][:BLOCK_BYTES])
        return True
    return False


def _pax(text: bytes) -> dict[str, bytes]:
    """Path and size of the next member, from lines "length key=value"."""
    extension, at = dict[str, bytes](), 0
    while record := _RECORD.match(text, at):
        stop = at + int(record[1])
        if not record.end() < stop <= len(text):
            break
        value = text[record.end() : stop - 1]
        if record[2] == b"path" or (record[2] == b"size" and value.isdigit() and len(value) < 16):
            extension[record[2].decode()] = value
        at = stop
    return extension


def _label(suffix: str, text: bytes) -> int | None:
    """The class in a .cls or a .json member; None if it has none."""
    if suffix == "cls":
        label = int(text) if len(text) < 32 and text.strip().isdigit() else None
    else:
        try:
            label = json.loads(text)["label"]
        except (ValueError, KeyError, IndexError, TypeError, RecursionError):
            return None
    return label if type(label) is int and 0 <= label < _MOST_CLASSES else None
