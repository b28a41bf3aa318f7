"""Image folders: a folder a class; the list of files is kept so that a second start does not scan the tree."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from kasoku.core.errors import InputError
from kasoku.data.decode import SUFFIXES
from kasoku.data.sources import Dataset, Files

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_VALIDATION = ("val", "validation", "test")
_VERSION = 1
_SCANNING = 8  # folders looked at at once: a folder on a network disk takes milliseconds to answer

Tree = dict[str, list[str]]  # class -> file names, both sorted


def imagenet(root: str, size: int = 224) -> Dataset:
    """ImageNet (ILSVRC 2012): a folder with train/ and val/, in each a folder a class; 1,281,167 images, 1,000 classes.

    `root` may name environment variables. `size`: side in pixels of the square that a file is decoded to.
    Errors: InputError as `folder`, and for a folder with other than 1,000 classes.
    """
    dataset = folder(root, size)
    if len(dataset.classes) != 1000:
        raise InputError(
            f"root={root}: {len(dataset.classes)} classes, ImageNet has 1,000: give its folder, or use "
            "kasoku.data.folder for other photos"
        )
    return dataset


def folder(root: str, size: int = 224, *, validation: float = 0.1, seed: int = 0, cache: str = "") -> Dataset:
    """Image folder: JPEG, PNG, WebP or BMP files, a folder a class, with or without train/ and val/.

    root/<class>/<file>, or root/train/<class>/<file> and root/val/<class>/<file> (also validation/, test/). Without a
    validation part the share `validation` of each class is split off, chosen by `seed` and the file names alone.
    `root` may name environment variables. `size`: side in pixels of the square that a file is decoded to.
    Hidden files and other types are left out.
    The list of files is kept in `cache` (empty: $XDG_CACHE_HOME/kasoku or ~/.cache/kasoku) while no folder changes.
    Errors: InputError for no class folder, a class folder with no image, a class that is only in the validation part.
    """
    if not root:
        raise InputError("data.root is not given: --set data.root=DIR, the folder of train/ and val/ or of the classes")
    top = Path(os.path.expandvars(root)).expanduser()
    if not top.is_dir():
        raise InputError(
            f"root={root}: no such folder; give the folder that holds a folder for each class, or train/ and val/"
        )
    if size < 1:
        raise InputError(f"size={size}: at least 1 pixel")
    if not 0 < validation < 1:
        raise InputError(
            f"validation={validation}: more than 0 and less than 1, the share of images kept for validation"
        )
    top = top.resolve()
    parts = _indexed(top, cache)
    if len(parts) == 1:
        (home, whole), classes = next(iter(parts.items())), sorted(next(iter(parts.values())))
        held = {name: _held_out(name, whole[name], validation, seed) for name in classes}
        if not any(held.values()):
            raise InputError(
                f"{top / home}: no class has two images, so none can be split off for validation; add a val/ folder"
            )
        train = _files(
            top / home, {name: [file for file in whole[name] if file not in held[name]] for name in classes}, classes
        )
        test = _files(top / home, {name: sorted(held[name]) for name in classes}, classes)
    else:
        (home, first), (away, second) = parts.items()
        classes = sorted(first)
        unknown = sorted(set(second) - set(first))
        if unknown:
            raise InputError(
                f"{top / away / unknown[0]}: a class that {top / home} does not have; add it there or remove it"
            )
        train, test = _files(top / home, first, classes), _files(top / away, second, classes)
    return Dataset(top.name, tuple(classes), train, test, 3, (size, size), IMAGENET_MEAN, IMAGENET_STD)


def find_images(path: str | Path) -> list[Path]:
    """The image files below a folder, sorted, without hidden ones; of a file, itself. Raises InputError for none."""
    start = Path(path).expanduser()
    if start.is_file():
        return [start]
    if not start.is_dir():
        raise InputError(f"{path}: no such file or folder; give an image or a folder of images")
    below = (file for file in start.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
    found = sorted(file for file in below if not any(part.startswith(".") for part in file.relative_to(start).parts))
    if not found:
        raise InputError(f"{path}: no image in it (looked for {', '.join(SUFFIXES)}); give another folder")
    return found


def _files(home: Path, tree: Tree, classes: list[str]) -> Files:
    paths = tuple(f"{home}{os.sep}{name}{os.sep}{file}" for name in classes for file in tree.get(name, ()))
    labels = [label for label, name in enumerate(classes) for _ in tree.get(name, ())]
    return Files(paths, torch.tensor(labels, dtype=torch.int64))


def _held_out(name: str, files: list[str], validation: float, seed: int) -> set[str]:
    """The share of one class that is kept for validation: at least one image, and at least one is left to train."""
    count = min(max(1, round(len(files) * validation)), len(files) - 1)
    return set(
        sorted(
            files,
            key=lambda file: hashlib.blake2b(
                f"{seed}/{name}/{file}".encode("utf-8", "surrogateescape"), digest_size=8
            ).digest(),
        )[:count]
    )


def _indexed(top: Path, cache: str) -> dict[str, Tree]:
    """The parts of the tree (train first; "" is top itself), from the kept index where it still holds."""
    home = (
        Path(cache).expanduser()
        if cache
        else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kasoku"
    )
    kept = home / f"folder-{hashlib.sha256(os.fsencode(top)).hexdigest()[:20]}.json"
    try:
        index: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
        if (
            index["version"] == _VERSION
            and index["root"] == str(top)
            and _stamps(top, index["changed"]) == list(index["changed"].values())
        ):
            parts: dict[str, Tree] = index["parts"]
            return parts
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # no index, a damaged one, or a folder that is gone: scan
    changed: dict[str, int] = {}
    parts = _scanned(top, changed)
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=home, suffix=".tmp", delete=False, encoding="utf-8") as file:
            file.write(json.dumps({"version": _VERSION, "root": str(top), "changed": changed, "parts": parts}))
        os.replace(file.name, kept)
    except (OSError, ValueError):
        pass  # an index only saves time: a cache that cannot be written is no error
    return parts


def _scanned(top: Path, changed: dict[str, int]) -> dict[str, Tree]:
    """Lists the tree and notes in `changed` when each folder changed last (taken before it is listed)."""
    subfolders = _listed(top, "", changed)[0]
    if "train" not in subfolders:
        return {"": _classes(top, "", subfolders, changed)}
    parts = {"train": _classes(top, "train", _listed(top, "train", changed)[0], changed)}
    for away in _VALIDATION:
        if away in subfolders and (names := _listed(top, away, changed)[0]):
            parts[away] = _classes(top, away, names, changed)
            break
    return parts


def _classes(top: Path, part: str, names: list[str], changed: dict[str, int]) -> Tree:
    if not names:
        raise InputError(
            f"{top / part}: no class folders in it; expected {top / part}/<class>/<image>, a folder for each class"
        )
    tree: Tree = {}
    with ThreadPoolExecutor(_SCANNING, thread_name_prefix="kasoku-list") as pool:  # in time where folders are far away
        listed = list(pool.map(lambda name: _listed(top, os.path.join(part, name), changed)[1], names))
    for name, files in zip(names, listed, strict=True):
        tree[name] = [file for file in files if file.lower().endswith(SUFFIXES)]
        if not tree[name]:
            raise InputError(
                f"{top / part / name}: a class folder with no image ({' '.join(SUFFIXES)}); add some or remove it"
            )
    return tree


def _stamps(top: Path, subs: Iterable[str]) -> list[int]:
    """When each of the folders changed last."""
    with ThreadPoolExecutor(_SCANNING, thread_name_prefix="kasoku-list") as pool:
        return list(pool.map(lambda sub: os.stat(top / sub).st_mtime_ns, subs))


def _listed(top: Path, sub: str, changed: dict[str, int]) -> tuple[list[str], list[str]]:
    """Names of folders and of files in top/sub, sorted, without the hidden ones."""
    try:
        changed[sub] = os.stat(top / sub).st_mtime_ns
        with os.scandir(top / sub) as entries:
            seen = [(entry.is_dir(), entry.name) for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise InputError(f"{top / sub}: cannot be listed ({error.strerror})") from error
    return sorted(name for is_folder, name in seen if is_folder), sorted(
        name for is_folder, name in seen if not is_folder
    )
