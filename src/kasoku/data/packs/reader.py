"""Images in tar shards: packs that `kasoku pack` wrote, and WebDataset-style shards from elsewhere."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import re
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from kasoku.core.errors import InputError, one_line, say, summary
from kasoku.data.datasets.base import Dataset, Labelled
from kasoku.data.datasets.folder import check_settings, photos, split_off, used_parts
from kasoku.data.decode.decode import is_image
from kasoku.data.packs.tar_index import VERSION, Damaged, Index, walk
from kasoku.data.remote.cache import cache_folder, keep
from kasoku.data.remote.store import TRIES, GoneError, Store

_SHARD = re.compile(r"(train|val)-\d{5,}\.tar")
_PLANES = re.compile(
    rb"\x93NUMPY\x01\0(..)\{'descr': '\|u1', 'fortran_order': False, 'shape': \(3, (\d{1,6}), (\d{1,6})\), \} *\n", re.S
)
_AT_ONCE = 16  # indices that are read in parallel: a remote one takes several requests
_MAPS = 256  # shards that stay mapped: each takes a file descriptor


@dataclass(frozen=True, eq=False)
class Shards(Labelled):
    """One split as images in tar shards, read by any number of threads at once; labels_N int64.

    Raw images of a local shard are views of the memory-mapped file, whose pages are read on first use. Their checksums
    are compared when they are first read, since that takes about as long as a crop; those of all others at each read.
    """

    store: Store
    files: tuple[str, ...]
    place_N5: np.ndarray  # noqa: N815 - number of the shard, offset, bytes, crc32 (-1: not known), whether raw
    labels_N: torch.Tensor  # noqa: N815
    names: tuple[str, ...]
    mapped: Callable[[str], np.ndarray]

    def name(self, index: int) -> str:
        """The name of the image before it was packed; in foreign shards, the shard and the member."""
        return self.names[index]

    def read(self, index: int) -> bytes | np.ndarray:
        """The bytes of an image file, or pixels_HWC (uint8, a view of colour planes) of a raw image.

        Errors: InputError, which names the image, if it cannot be read or has another checksum than when it was packed.
        """
        shard, offset, size, crc32, raw = self.place_N5[index].tolist()
        file, name = self.files[shard], self.names[index]

        def matches(data: bytes | memoryview) -> bool:
            return len(data) == size and bool(crc32 < 0 or zlib.crc32(data) == crc32)

        if raw and self.store.local:
            data: bytes | memoryview = self.mapped(file).data[offset : offset + size]
            good = self._compared_N[index] = self._compared_N[index] or matches(data)
        else:
            known = bool(raw or crc32 >= 0)  # without a checksum it is at least an image
            try:
                data = self.store.read(file, offset, offset + size, lambda x: matches(x) and (known or is_image(x)))
            except GoneError:
                raise
            except InputError as error:
                raise InputError(f"{name}: {error}") from error
            good = matches(data)
        if not good:
            fault, advice = "are cut off or have changed", "bring that file back"
            if not self.store.local:
                tried = f"after {TRIES} tries; the cache {self.store.pieces.folder} keeps none of them"
                fault, advice = f"are not those that were packed, {tried}", "upload that file again"
            where = f"{name}: its bytes in {file}"
            raise InputError(f"{where} {fault}: {advice} (`kasoku pack --verify` finds all such images)")
        return planes(np.frombuffer(data, np.uint8), name) if raw else bytes(data)

    @functools.cached_property
    def _compared_N(self) -> np.ndarray:  # noqa: N802
        """Which raw images of this machine had the checksum that they were packed with."""
        return np.zeros(len(self), np.bool_)

    def take(self, rows_N: np.ndarray) -> Shards:
        names = tuple(self.names[row] for row in rows_N.tolist())
        return replace(self, place_N5=self.place_N5[rows_N], labels_N=self.labels_N[rows_N], names=names)


def planes(data_B: np.ndarray, name: str) -> np.ndarray:
    """pixels_HWC (uint8) of raw pixels, a view of the planes in the bytes of an .npy file.

    Errors: InputError, which names `name`, for other bytes.
    """
    head = _PLANES.match(data_B[:256].tobytes())
    if head is not None and head.end() == 10 + int.from_bytes(head[1], "little"):
        height, width = int(head[2]), int(head[3])
        if height * width > 0 and len(data_B) == head.end() + 3 * height * width:
            return data_B[head.end() :].reshape(3, height, width).transpose(1, 2, 0)
    raise InputError(f"{name}: not an .npy file of uint8 pixels, 3 x height x width; mend or remove the image")


def shards(  # noqa: PLR0913
    root: str,
    size: int = 224,
    *,
    validation: float = 0.1,
    seed: int = 0,
    cache: str = "",
    cache_bytes: int = 64 * 2**30,
    max_bad_fraction: float = 0.001,
) -> Dataset:
    """A pack of `kasoku pack`, or foreign tar shards in WebDataset's style, local or remote.

    Foreign shards are all .tar files below `root`. A sample is a run of members with one key: an image (.jpg .jpeg
    .png .webp .bmp, or .npy: uint8, 3 x height x width) and its class number (.cls, or "label" in .json). Files or
    folders named train and val (validation, test) are the parts. classes.txt beside the shards names the classes; else
    they are numbers.

    Args:
        root: the folder, or an address (s3://bucket/pack); it may name environment variables.
        size: side in pixels of the square that an image is decoded to, at least 1.
        validation: the share of each class to hold out where there is no validation part, above 0 and below 1.
        seed: any number; chooses the images to hold out, with their names alone.
        cache: the folder for indices of foreign shards and for data read from an address; empty: $XDG_CACHE_HOME/kasoku
            or ~/.cache/kasoku.
        cache_bytes: the most that the cache keeps of an address, 0 or more.
        max_bad_fraction: training stops at more than one bad image, if they exceed this share, from 0 to 1.

    Errors: InputError for no shards, a file that is no tar archive, a damaged pack, a class without a name.
    """
    check_settings(root, size, validation)
    store = Store(root, cache=cache, cache_bytes=cache_bytes)
    top = store.shown
    try:
        facts = pack_facts(store)
        name = top.rpartition("/")[2] if facts is None else facts["name"]
        whole, classes = _foreign(store, cache) if facts is None else _own(store, facts)
    except Damaged as damaged:
        raise InputError(f"{top}/{damaged}; run `kasoku pack --verify {top}`") from damaged
    test_N = np.array(used_parts(whole.files)[1])[whole.place_N5[:, 0]]
    return photos(name, classes, split_off(whole, test_N, validation, seed, top), size, max_bad_fraction)


def pack_facts(store: Store) -> dict[str, Any] | None:
    """The contents of pack.json; None if there is none. Raises Damaged if it cannot be used."""

    def intact(data: bytes) -> bool:
        with suppress(Damaged):
            return bool(_facts(data))
        return False

    try:
        data = store.read("pack.json", intact=intact)
    except GoneError:
        raise
    except InputError:
        return None
    return _facts(data)


def _facts(data: bytes) -> dict[str, Any]:
    try:
        facts: dict[str, Any] = json.loads(data)
        if facts["version"] != VERSION:
            raise ValueError(f"version {facts['version']}, this kasoku reads {VERSION}")
        texts, counts = [facts["name"], *facts["classes"]], [facts["images_per_shard"], *facts["counts"].values()]
        good = bool(facts["classes"]) and facts["format"] in ("jpeg", "raw") and isinstance(facts["whole"], bool)
        for shard in facts["shards"]:
            good = good and bool(_SHARD.fullmatch(shard["file"]))
            texts += shard["sha256"], shard["index_sha256"]
            counts += shard["images"], shard["bytes"]
        good = good and all(isinstance(text, str) for text in texts)
        if not (good and all(type(count) is int and count >= 0 for count in counts) and facts["images_per_shard"]):
            raise ValueError("a name, count or checksum in it is not valid")
    except Exception as error:  # a damaged file may raise any error
        raise Damaged(f"pack.json: cannot be read ({one_line(summary(error))})") from error
    return facts


def pack_index(store: Store, facts: dict[str, Any], shard: dict[str, Any]) -> Index:
    """The index of one of the shards in pack.json. Raises Damaged if it does not fit the shard."""
    file, table = shard["file"], shard["file"].removesuffix(".tar") + ".npz"
    whole = store.size(file)
    if whole != shard["bytes"]:
        raise Damaged(f"{file}: {whole:,} bytes, but it was packed with {shard['bytes']:,}")

    def intact(data: bytes) -> bool:
        return bool(hashlib.sha256(data).hexdigest() == shard["index_sha256"])

    data = store.read(table, intact=intact)
    if not intact(data):
        raise Damaged(f"{table}: has changed since it was packed")
    index = Index.load(data)
    fits = (index.shard_bytes, len(index.names), index.sha256) == (whole, shard["images"], shard["sha256"])
    if not fits or (index.rows_N4[:, 2] >= len(facts["classes"])).any():
        raise Damaged(f"{table}: does not fit {file} or the classes in pack.json")
    return index


def _own(store: Store, facts: dict[str, Any]) -> tuple[Shards, tuple[str, ...]]:
    """All images of a pack, and the classes' names."""
    if not facts["whole"]:
        raise InputError(f"{store.shown}: a pack that is not whole; run the same `kasoku pack` again to finish it")
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="kasoku-index") as pool:
        known = list(pool.map(lambda shard: pack_index(store, facts, shard), facts["shards"]))
    files = [shard["file"] for shard in facts["shards"]]
    return _joined(store, files, known, facts["format"] == "raw"), tuple(facts["classes"])


def _joined(store: Store, files: list[str], known: list[Index], raw: bool | None = None) -> Shards:
    """The images of all shards as one split. `raw`: whether they are raw pixels; None: by the members' suffixes."""
    names = tuple(itertools.chain.from_iterable(index.names for index in known))
    if not names:
        raise InputError(f"{store.shown}: no whole sample (an image and its class) in its shards; give other shards")
    counts = [len(index.names) for index in known]
    offset_N, size_N, label_N, crc32_N = np.concatenate([index.rows_N4 for index in known]).T
    shard_N = np.repeat(np.arange(len(known)), counts)
    hashed_N = np.repeat([bool(index.sha256) for index in known], counts)
    raw_N = np.array([name.lower().endswith(".npy") for name in names]) if raw is None else np.full(len(names), raw)
    place_N5 = np.stack((shard_N, offset_N, size_N, np.where(hashed_N, crc32_N, -1), raw_N), 1)
    store.close()  # the indices' files need not stay open

    @functools.lru_cache(_MAPS)
    def mapped(file: str) -> np.ndarray:
        """Maps a shard into memory, read-only; it is closed with the last view of it."""
        path = os.path.join(store.shown, file)
        try:
            return np.memmap(path, np.uint8, "r").view(np.ndarray)
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: cannot be read ({error}); mend or remove the file") from error

    return Shards(store, tuple(files), place_N5, torch.from_numpy(label_N.copy()), names, mapped)


def _foreign(store: Store, cache: str) -> tuple[Shards, tuple[str, ...]]:
    """All images of tar shards without pack.json, and the classes' names."""
    listed = store.list_files()
    files, _ = used_parts([file for file in listed if file.lower().endswith(".tar")])
    if not files:
        raise InputError(f"{store.shown}: no pack.json and no .tar file in it; give the folder of the shards")
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="kasoku-index") as pool:
        known = list(pool.map(lambda file: _indexed(store, file, cache), files))
    wrong = [f"{file}: {', '.join(index.left_out)}" for file, index in zip(files, known, strict=True) if index.left_out]
    more = [f"and {len(wrong) - 3} more shards"] if len(wrong) > 3 else []
    say("; ".join([one_line(text) for text in wrong[:3]] + more))
    advice = "these shards have no checksums, so damage may go unnoticed; `kasoku pack` writes shards with checksums"
    say(f"{store.shown}: {advice}")
    whole = _joined(store, files, known)
    count = int(whole.labels_N.max()) + 1
    if "classes.txt" not in listed:
        return whole, tuple(str(number) for number in range(count))
    lines = store.read("classes.txt").decode("utf-8-sig", "replace").splitlines()
    classes = tuple(line.strip() for line in lines if line.strip())
    if len(classes) < count:
        raise InputError(f"{store.shown}/classes.txt: {len(classes)} names, but a label is {count - 1}; add the others")
    return whole, classes


def _indexed(store: Store, file: str, cache: str) -> Index:
    """The index of one shard, from the cache or from its headers; a damaged index is built anew."""
    size, version = store.state(file)
    if not version:  # a new file of the same size would not be noticed
        return walk(store, file)
    known = f"{store.shown}\n{file}\n{size}\n{version}"
    key = hashlib.sha256(os.fsencode(known)).hexdigest()[:20]
    kept = cache_folder(cache) / "shards" / f"{key}.npz"
    with suppress(OSError, Damaged):
        return Index.load(kept.read_bytes())
    index = walk(store, file)
    if not index.damaged:
        with suppress(OSError):  # the cache only saves time
            keep(kept, index.dump())
    return index
