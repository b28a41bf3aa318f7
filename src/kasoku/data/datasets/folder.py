"""Image folders with one folder for each class, and lists of images, local or remote."""

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kasoku.core.errors import InputError
from kasoku.data.datasets.base import Dataset, Files, held_out
from kasoku.data.datasets.folder_index import LISTS, Parts, arranged, once, read_list
from kasoku.data.decode.decode import SUFFIXES
from kasoku.data.decode.native import max_pixels
from kasoku.data.remote.store import Store, below

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_LOOKED_FOR = 8  # files of each part that a rank checks on its host, since rank 0 listed them


def imagenet(root: str, size: int = 224) -> Dataset:
    """ImageNet (ILSVRC 2012), 1,281,167 images: a folder with train/ and val/, each with one folder for each class.

    Args:
        root: the folder, or an address (s3://bucket/photos); it may name environment variables.
        size: side in pixels of the square that an image is decoded to, at least 1.

    Errors: InputError as `folder`, and for a folder with other than 1,000 classes.
    """
    dataset = folder(root, size)
    if len(dataset.classes) != 1000:
        advice = "give its folder, or use kasoku.data.folder for other photos"
        raise InputError(f"root={root}: {len(dataset.classes)} classes, ImageNet has 1,000: {advice}")
    return dataset


def folder(  # noqa: PLR0913
    root: str,
    size: int = 224,
    *,
    validation: float = 0.1,
    seed: int = 0,
    cache: str = "",
    cache_bytes: int = 64 * 2**30,
    max_bad_fraction: float = 0.001,
) -> Dataset:
    """Image folder: JPEG, PNG, WebP or BMP files in one folder for each class, with or without train/ and val/.

    root/<class>/<file>, or root/train/<class>/<file> and root/val/<class>/<file> (also validation/, test/). Hidden
    files and other types are left out. Bad images are skipped and named. Or a list: a .csv or .jsonl file of path,
    label and, if it has parts, split (train, val, test); paths are relative to its folder.

    Args:
        root: the folder or the list, or an address (s3://bucket/photos); it may name environment variables.
        size: side in pixels of the square that an image is decoded to, at least 1.
        validation: the share of each class to hold out where there is no validation part, above 0 and below 1.
        seed: any number; chooses the images to hold out, with their names alone.
        cache: the folder for files read from an address; empty: $XDG_CACHE_HOME/kasoku or ~/.cache/kasoku.
        cache_bytes: the most that the cache keeps of an address, 0 or more.
        max_bad_fraction: training stops at more than one bad image, if they exceed this share, from 0 to 1.

    Errors: InputError for no class folder, a class folder with no image, a class that is only in the validation part.
    """
    check_settings(root, size, validation)
    top, table = os.path.split(root) if root.endswith(LISTS) else (root, "")
    store = Store(top or ".", cache=cache, cache_bytes=cache_bytes)
    top = store.shown
    parts, states = once(root, lambda: (read_list(store, table) if table else arranged(store.look, top), store.states))
    store.learn(states)
    if store.local and not table:
        _check_here(top, parts)
    (home, first), *others = parts.items()
    classes = tuple(sorted(first))
    for part, tree in others:
        if unknown := sorted(set(tree) - set(classes)):
            lacking = f"a class that {below(top, home)} does not have"
            raise InputError(f"{below(top, part)}/{unknown[0]}: {lacking}; add it there or remove it")
    rows = [(p, k, file) for p, tree in parts.items() for k, kind in enumerate(classes) for file in tree.get(kind, ())]
    labels_N = torch.tensor([label for _, label, _ in rows])
    if others:
        test_N = np.array([part != home for part, _, _ in rows])
    else:
        test_N = held_out([file for _, _, file in rows], labels_N, classes, validation, seed)
    if not test_N.any():
        raise InputError(f"{below(top, home)}: no class has two images, one of them for validation; add a val/ folder")
    base = top if store.local else ""
    folders = {part: [below(below(base, part), kind) for kind in classes] for part in parts}
    paths = [os.path.join(base, f) if table else f"{folders[p][k]}/{f}" for p, k, f in rows]
    train, test, undivided = (
        Files(tuple(itertools.compress(paths, chosen_N)), labels_N[torch.from_numpy(chosen_N)], store)
        for chosen_N in (~test_N, test_N, np.full(len(paths), not others))
    )
    facts = (3, (size, size), IMAGENET_MEAN, IMAGENET_STD, max_bad_fraction, None if others else undivided)
    return Dataset(top.rpartition("/")[2], classes, train, test, *facts)


def check_settings(root: str, size: int, validation: float) -> None:
    """Raises InputError for settings with which neither a folder nor shards can be read."""
    max_pixels()
    if not root:
        raise InputError("data.root is not given: --set data.root=DIR, the folder or the address of the images")
    if size < 1:
        raise InputError(f"size={size}: at least 1 pixel")
    if not 0 < validation < 1:
        raise InputError(f"validation={validation}: more than 0 and less than 1, the share kept for validation")


def split_off(whole: Any, test_N: np.ndarray, validation: float, seed: int, where: str) -> tuple[Any, Any, Any]:
    """The training and the test part of a split that has `take`, and None.

    If test_N is all or none, the test part is a share of each class, and the third is the split itself.
    """
    if undivided := bool(test_N.all() or not test_N.any()):
        classes = [str(number) for number in range(int(whole.labels_N.max()) + 1)]
        test_N = held_out([whole.name(i) for i in range(len(whole))], whole.labels_N, classes, validation, seed)
    if not test_N.any():
        raise InputError(f"{where}: no class has two images, so none can be split off for validation; add a part val")
    return whole.take(np.flatnonzero(~test_N)), whole.take(np.flatnonzero(test_N)), whole if undivided else None


def find_images(path: str | Path) -> list[Path]:
    """The image files below a folder, sorted, without hidden ones; or the file itself. Raises InputError for none."""
    start = Path(path).expanduser()
    if start.suffix.lower() in (".parquet", ".tar", *LISTS):
        raise InputError(f"{path}: no image; give image files, or folders of them")
    if start.is_file():
        return [start]
    if not start.is_dir():
        raise InputError(f"{path}: no such file or folder; give an image or a folder of images")
    images = sorted(start / file for file in Store(str(start)).list_files() if file.lower().endswith(SUFFIXES))
    if not images:
        raise InputError(f"{path}: no image in it (looked for {', '.join(SUFFIXES)}); give another folder")
    return images


def _check_here(top: str, parts: Parts) -> None:
    """Looks for some of the files that rank 0 listed. Raises InputError if one is not on this host."""
    for part, tree in parts.items():
        names = sorted(tree)
        for name in names[:: -(-len(names) // _LOOKED_FOR)]:
            path = f"{below(top, part)}/{name}/{tree[name][-1]}"  # the last: an interrupted copy lacks it
            if not os.path.lexists(path):
                raise InputError(f"{path}: not on this host, though rank 0 has it; give all ranks the same data")
