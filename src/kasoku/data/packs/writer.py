"""Writes a data set as a pack, tar shards that are read sequentially, and verifies packs.

Note: a stopped run can be resumed
The contents of all shards are fixed before the first one is written: the order of the images, and the images a shard,
estimated once and kept in pack.json. A shard gets its name when it is complete on the disk, and its index after that,
so a shard with an index is not written again. The bytes depend neither on the number of workers nor on interruptions.
"""

import hashlib
import io
import itertools
import os
import textwrap
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import numpy as np
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kasoku.core.errors import InputError, first_of, one_line
from kasoku.core.files import expanded, json_text, lock, write_atomically, write_text
from kasoku.core.hardware import cores
from kasoku.core.limits import Checked, Range, checked
from kasoku.data.datasets.base import Dataset, Encoded
from kasoku.data.datasets.tables import hugging_face, source_of
from kasoku.data.decode.decode import decode, upright
from kasoku.data.loading.shuffle import order_of
from kasoku.data.packs.reader import pack_facts, pack_index
from kasoku.data.packs.tar_index import BLOCK_BYTES, VERSION, Damaged, Index, member
from kasoku.data.remote.store import GoneError, Store, is_remote

_ESTIMATED = 64  # images
_END = bytes(2 * BLOCK_BYTES)  # of a tar file


@dataclass(frozen=True)
class Form(Checked):
    """The format of packed images."""

    side: Annotated[int, Range("0 keeps images as they are", at_least=0)]  # pixels of the shorter side, at most
    format: Literal["jpeg", "raw"]
    quality: Annotated[int, Range(at_least=1, at_most=100)]  # of JPEG files

    def encoded(self, source: bytes | np.ndarray, name: str) -> bytes:
        """Encodes an image file's bytes, or pixels_HWC (uint8). Raises InputError for a damaged image."""
        if isinstance(source, bytes):
            if self.side == 0 and self.format == "jpeg" and _baseline(source):
                decode(source, 1, name=name)  # checks that it is whole; an eighth of its size is enough
                return source
            pixels_HWC = decode(source, self.side, name=name)
        else:
            pixels_HWC = upright(Image.fromarray(np.ascontiguousarray(source)), self.side)
        out = io.BytesIO()
        if self.format == "raw":  # colour planes, so that a resize reads whole rows of one colour
            planes_CHW = np.ascontiguousarray(pixels_HWC.transpose(2, 0, 1))
            np.lib.format.write_array(out, planes_CHW, version=(1, 0), allow_pickle=False)
            return out.getvalue()
        # A restart marker every 64 pixels, so that a crop needs no decoding of earlier blocks. Standard Huffman tables
        # instead of optimised ones: a few bytes more, but decoders have the tables ready.
        image = Image.fromarray(np.ascontiguousarray(pixels_HWC))
        try:
            image.save(out, "JPEG", quality=self.quality, subsampling="4:2:0", restart_marker_blocks=4)
        except OSError as error:
            raise InputError(f"{name}: cannot be written as JPEG ({error}); remove the image") from error
        return out.getvalue()


@checked
def pack(  # noqa: PLR0913
    source: str,
    target: str,
    *,
    side: int = 256,
    format: Literal["jpeg", "raw"] = "jpeg",
    quality: int = 90,
    shard_bytes: Annotated[int, Range(at_least=1)] = 2**28,
    workers: Annotated[int, Range("0 for one a core", at_least=0)] = 0,
    quiet: bool = False,
) -> str:
    """Packs the images of any source of files, local or remote; returns a line of summary.

    A pack is a folder with pack.json and tar shards of about `shard_bytes`, each with an index, in fixed random order.
    Images are upright RGB, reduced until their shorter side is `side` pixels (never enlarged; 0: no change).
    `format`: JPEG of that `quality` (1 to 100; with side=0 a baseline JPEG file stays as it is), or raw pixels.
    `workers`: threads, 0 for one a core; the pack is the same. To resume a stopped run, give the same folder.
    Up to one bad image in a thousand is left out, named, and listed in pack.json.
    Errors: InputError for more bad images, and for a target with other files or a pack with other settings.
    """
    form = Form(side, format, quality)
    if is_remote(target):
        raise InputError(f"{target}: a pack is written to a folder of this machine; copy it from there")
    home = expanded(os.path.expandvars(target))
    reader = source_of(source)
    dataset = reader(source) if reader is hugging_face else reader(source, cache_bytes=0)  # each file is read only once
    threads, images = workers or cores(), len(dataset.train) + len(dataset.test)
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, disable=quiet or not console.is_terminal)
    task = bar.add_task("packing", total=images)
    try:
        with ThreadPoolExecutor(threads, thread_name_prefix="kasoku-pack") as pool, _locked(home), bar:
            run = _Run(form, home, pool, min(4 * threads, 256), images, partial(bar.advance, task))
            return _finished(run, dataset, _begun(run, dataset, shard_bytes))
    except OSError as error:
        raise InputError(f"{home}: cannot be written ({error.strerror or error}); run again to go on") from error


def verify(target: str) -> str:
    """Reads a whole pack, local or remote, and checks its checksums; returns a line of summary.

    Errors: InputError, which names the first damaged shard and the image in it.
    """
    store = Store(target, cache_bytes=0)
    top = store.shown
    try:
        facts = pack_facts(store)
        if facts is None or not facts["whole"]:
            raise InputError(f"{top}: no whole pack; `kasoku pack` makes one, or goes on with one that was stopped")
        with ThreadPoolExecutor(cores(), thread_name_prefix="kasoku-verify") as pool:
            images = sum(pool.map(lambda shard: _verified(store, facts, shard), facts["shards"]))
        if images != sum(facts["counts"].values()):
            raise Damaged(f"pack.json: {images:,} images in its shards, packed were {facts['counts']}")
    except Damaged as damaged:
        advice = "fetch the pack anew, or remove this .tar and its .npz and run the same `kasoku pack`"
        raise InputError(f"{top}/{damaged}; {advice}") from damaged
    return f"{images:,} images in {len(facts['shards'])} shards are whole"


def _verified(store: Store, facts: dict[str, Any], shard: dict[str, Any]) -> int:
    """Reads a whole shard and checks it; returns its number of images. Raises Damaged."""
    index, file = pack_index(store, facts, shard), shard["file"]
    digest, at = hashlib.sha256(), 0
    for name, (offset, size, _, crc32) in zip(index.names, index.rows_N4.tolist(), strict=True):
        digest.update(store.read(file, at, offset))

        def intact(data: bytes, crc32: int = crc32) -> bool:
            return zlib.crc32(data) == crc32

        data = store.read(file, offset, offset + size, intact)
        if not intact(data):
            raise Damaged(f"{file}: {name} is damaged")
        digest.update(data)
        at = offset + size
    digest.update(store.read(file, at))
    if digest.hexdigest() != shard["sha256"]:
        raise Damaged(f"{file}: all images are whole, but a header or a label is damaged")
    return len(index.names)


@dataclass
class _Run:
    """One run of `pack`. window: images in flight at most; images: of the source; bad: those left out, and why."""

    form: Form
    home: Path
    pool: ThreadPoolExecutor
    window: int
    images: int
    advance: Callable[[float], None]
    bad: list[str] = field(default_factory=list)

    def encoded(self, split: Encoded, rows: list[int]) -> Iterator[tuple[int, bytes | str]]:
        """Images in the order of `rows`, encoded ahead by the pool: the row, and the bytes or the error."""

        def encode(row: int) -> bytes | str:
            try:
                return self.form.encoded(split.read(row), split.name(row))
            except GoneError:
                raise
            except InputError as error:
                return one_line(str(error).partition(";")[0])

        tasks = ((row, self.pool.submit(encode, row)) for row in rows)
        waiting = deque(itertools.islice(tasks, self.window))
        try:
            while waiting:
                row, future = waiting.popleft()
                yield row, future.result()
                waiting.extend(itertools.islice(tasks, 1))
        finally:
            for _, future in waiting:
                future.cancel()

    def leave_out(self, reasons: tuple[str, ...]) -> None:
        """Records bad images. Raises InputError if they are too many."""
        self.bad += reasons
        most = max(1, self.images // 1000)
        if len(self.bad) > most:
            got = f"more than {most} of {self.images:,} images cannot be packed: {first_of(self.bad)}"
            raise InputError(f"{got}; mend them and run again, or remove them and pack into an empty folder")

    def shard(self, split: Encoded, file: str, first: int, rows: list[int]) -> Index:
        """Writes a shard and its index if they are not complete. first: number of its first image, for the keys."""
        path, table = self.home / file, self.home / file.replace(".tar", ".npz")
        with suppress(OSError, Damaged):
            index = Index.load(table.read_bytes())
            if path.stat().st_size == index.shard_bytes:
                self.advance(len(rows))
                self.leave_out(index.left_out)
                return index
        suffix = "jpg" if self.form.format == "jpeg" else "npy"
        rows_4, names, bad, digest = [], [], [], hashlib.sha256()

        def write(part: Path) -> None:
            with open(part, "wb") as out:
                for key, (row, data) in enumerate(self.encoded(split, rows), first):
                    self.advance(1)
                    if isinstance(data, str):
                        bad.append(data)
                        self.leave_out((data,))
                        continue
                    label = int(split.labels_N[row])
                    rows_4.append((out.tell() + BLOCK_BYTES, len(data), label, zlib.crc32(data)))
                    names.append(one_line(split.name(row)))
                    sample = member(f"{key:08d}.{suffix}", data) + member(f"{key:08d}.cls", str(label).encode())
                    out.write(sample)
                    digest.update(sample)
                out.write(_END)
                digest.update(_END)

        write_atomically(path, write)
        rows_N4 = np.array(rows_4, np.int64).reshape(-1, 4)
        index = Index(rows_N4, tuple(names), path.stat().st_size, digest.hexdigest(), tuple(bad))
        write_atomically(table, lambda part: part.write_bytes(index.dump()))
        return index


def _begun(run: _Run, dataset: Dataset, shard_bytes: int) -> dict[str, Any]:
    """The contents of pack.json before the first shard is written, or those of the run to resume."""
    form, digests = run.form, dataset.index()
    facts: dict[str, Any] = {"version": VERSION, "whole": False, "name": dataset.name, "classes": [*dataset.classes]}
    facts |= {"channels": 3, "side": form.side, "format": form.format}
    facts |= {"quality": form.quality if form.format == "jpeg" else None, "shard_bytes": shard_bytes}
    facts |= {"source": {"train": digests["train"], "val": digests["test"]}, "counts": {}, "shards": [], "bad": []}
    try:
        before = pack_facts(Store(str(run.home)))
    except Damaged as damaged:
        raise InputError(f"{run.home}/{damaged}; give an empty folder, or remove what is in it") from damaged
    if before is None:
        train = cast(Encoded, dataset.train)
        images = [data for _, data in run.encoded(train, order_of(train, len(train), 0, 0)[:_ESTIMATED].tolist())]
        bytes_each = [len(member("", data)) + len(member("", b"0")) for data in images if isinstance(data, bytes)]
        if not bytes_each:
            raise InputError(f"{dataset.name}: no image can be packed: {first_of([str(data) for data in images])}")
        facts["images_per_shard"] = max(1, shard_bytes * len(bytes_each) // sum(bytes_each))
        write_text(run.home / "pack.json", json_text(facts))
        return facts
    for name in ("side", "format", "quality", "shard_bytes", "classes", "source"):  # must not change in a resumed run
        if before.get(name) != facts[name]:
            old, new = (textwrap.shorten(one_line(str(value)), 150) for value in (before.get(name), facts[name]))
            differ = f"has a pack with {name}={old}, asked for is {name}={new}"
            raise InputError(f"{run.home}: {differ}; give the same settings or another folder")
    return facts | {name: before[name] for name in ("name", "images_per_shard")}


def _finished(run: _Run, dataset: Dataset, facts: dict[str, Any]) -> str:
    """Writes all shards and pack.json; returns a line for the user."""
    each = facts["images_per_shard"]
    for part, split in (("train", dataset.train), ("val", dataset.test)):
        rows, count = order_of(split, len(split), 0, 0).tolist(), 0
        for first in range(0, len(rows), each):
            file = f"{part}-{first // each:05d}.tar"
            index = run.shard(cast(Encoded, split), file, first, rows[first : first + each])
            count += len(index.names)
            table = hashlib.sha256((run.home / file.replace(".tar", ".npz")).read_bytes()).hexdigest()
            shard = {"file": file, "images": len(index.names), "bytes": index.shard_bytes, "sha256": index.sha256}
            facts["shards"].append(shard | {"index_sha256": table})
        facts["counts"][part] = count
    write_text(run.home / "pack.json", json_text(facts | {"bad": run.bad, "whole": True}))
    images, megabytes = sum(facts["counts"].values()), sum(shard["bytes"] for shard in facts["shards"]) / 1e6
    line = f"{images:,} images of {len(facts['classes'])} classes, {megabytes:,.1f} MB in {len(facts['shards'])} shards"
    return f"{run.home}: {line}" + (f"; {len(run.bad)} left out: {first_of(run.bad)}" if run.bad else "")


def _baseline(data: bytes) -> bool:
    with suppress(Exception), Image.open(io.BytesIO(data), formats=("JPEG",)) as opened:  # other bytes raise anything
        return "progressive" not in opened.info
    return False


@contextmanager
def _locked(home: Path) -> Iterator[None]:
    """Creates the folder if needed, and locks it against other processes that pack."""
    if home.is_dir() and not (home / "pack.json").exists() and any(not p.name.startswith(".") for p in home.iterdir()):
        raise InputError(f"{home}: not empty, and no pack; give another folder")
    home.mkdir(parents=True, exist_ok=True)
    with open(home / ".lock", "w") as file:
        lock(file, lambda: f"{home}: another process is packing into it; wait for it")
        yield
