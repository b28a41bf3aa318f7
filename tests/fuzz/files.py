"""Bytes of tar shards, packs, checkpoints and run folders."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import random
import re
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from documents import varied
from PIL import Image

from common import FindingError, command, limited, mutated, tried
from kasoku.core import InputError
from kasoku.data import decode, shards
from kasoku.data.packs.reader import Shards

DIGITS = Path(__file__).parents[2] / "recipes" / "digits_cnn_98.toml"
_SHORT = (
    "epochs=2",
    "schedule.epochs=2",
    "evaluate.every=1",
    "evaluate.stop=false",
    "device.threads=1",
    "save.every_steps=20",
)


def _pictures(folder: Path) -> list[bytes]:
    """Twelve small images, with files of two classes in `folder`."""
    noise, images = np.random.default_rng(0), []
    for i in range(12):
        image = Image.fromarray(noise.integers(0, 256, (8, 8, 3), dtype=np.uint8)).resize((20 + i, 30))
        image.save(out := io.BytesIO(), "JPEG" if i % 3 else "PNG")
        images.append(out.getvalue())
        path = folder / "ab"[i % 2] / f"{i}.{'jpg' if i % 3 else 'png'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(out.getvalue())
    return images


def _read(root: Path, cache: Path) -> str:
    """A digest of all names, classes and bytes of images in shards; raises InputError as they do."""
    digest = hashlib.sha256()
    shutil.rmtree(cache, ignore_errors=True)
    dataset = shards(str(root), 16, validation=0.3, cache=str(cache))
    for split in (dataset.train, dataset.test):
        assert isinstance(split, Shards)
        digest.update(repr((split.names, split.labels_N.tolist())).encode())
        for index in range(len(split)):
            data = split.read(index)
            digest.update(data if isinstance(data, bytes) else data.tobytes())
            if isinstance(data, bytes):
                decode(data, 3, name="image")
    return digest.hexdigest()


def _damaging(
    name: str,
    whole: Path,
    read: Callable[[Path], object],
    *,
    silent: bool = False,
    files: Callable[[Path], bool] = lambda _: True,
    **settings: Any,
) -> dict[str, Any]:
    """Changes the bytes of one file of a copy of `whole`; read(copy) is as of the whole, or refuses.

    `silent`: other results are no finding, as nothing in these files could tell.
    """
    copy, right = whole.with_name("copy"), read(whole)
    names = sorted(str(f.relative_to(whole)) for f in whole.rglob("*") if f.is_file() and files(f))
    last = [names[0]]

    def one(draw: random.Random) -> str:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(whole, copy)
        last[0] = draw.choice(names)
        (copy / last[0]).write_bytes(mutated((whole / last[0]).read_bytes(), draw))
        try:
            with limited(), contextlib.redirect_stderr(io.StringIO()):
                result = read(copy)
        except InputError:
            return "refused"
        if result == "refused":
            return "refused"
        if result != right and not silent:
            raise FindingError(f"{last[0]}: another result than of the whole files, without a word")
        return "same" if result == right else "other"

    return tried(name, one, lambda: (copy / last[0]).read_bytes(), **settings)


def tars(folder: Path, **settings: Any) -> dict[str, Any]:
    """Shards of other programs: no checksums, so that other images may come out, but nothing else."""
    whole = folder / "whole"
    whole.mkdir()
    for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        with tarfile.open(whole / f"train-{form}.tar", "w", format=form) as tar:
            for i, image in enumerate(_pictures(folder / "pictures")):
                for suffix, data in (("png" if i % 3 == 0 else "jpg", image), ("cls", str(i % 2).encode())):
                    long = "long/" * 30 if i % 4 == 0 else "é" * (i % 2)
                    info = tarfile.TarInfo(f"{long}{i:03d}.{suffix}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    return _damaging("tar", whole, lambda root: _read(root, folder / "cache"), silent=True, **settings)


def packs(folder: Path, form: str = "jpeg", name: str = "pack", **settings: Any) -> dict[str, Any]:
    """Packs of `kasoku pack`."""
    _pictures(folder / "pictures")
    command("pack", str(folder / "pictures"), str(folder / "whole"), "--format", form)
    return _damaging(name, folder / "whole", lambda root: _read(root, folder / "cache"), **settings)


def _run(folder: Path) -> Path:
    words = [word for setting in _SHORT for word in ("--set", setting)]
    command("train", str(DIGITS), *words, "--quiet", "--out", str(folder / "whole"))
    return folder / "whole"


def _weights(run: Path) -> str:
    return hashlib.sha256((run / "best.safetensors").read_bytes()).hexdigest()


def checkpoints(folder: Path, **settings: Any) -> dict[str, Any]:
    """A run with a damaged checkpoint is resumed: the same weights, from an older checkpoint or from the beginning."""
    whole = _run(folder)

    def resumed(run: Path) -> object:
        code, *_ = command("train", "--resume", str(run), "--quiet")
        return "refused" if code else _weights(run)

    return _damaging("checkpoint", whole, resumed, files=lambda f: f.parent.name.startswith("step-"), **settings)


def runs(folder: Path, **settings: Any) -> dict[str, Any]:
    """A run with a damaged file beside its checkpoints is evaluated, resumed and reported."""
    whole = _run(folder)

    def used(run: Path) -> object:
        evaluated = command("eval", str(run))
        resumed = command("train", "--resume", str(run), "--quiet")
        command("report", str(run), "--out", str(folder / "report.html"))
        if evaluated[0] or resumed[0]:
            return "refused"
        return re.findall(r"\d+\.\d+", evaluated[1].replace(str(run), "")), _weights(run)

    return _damaging("run", whole, used, files=lambda f: "checkpoints" not in f.parts, **settings)


def forged(folder: Path, **settings: Any) -> dict[str, Any]:
    """A run of a stranger's making, without a manifest and with another recipe: no code runs but what it may name."""
    whole, marker = _run(folder), folder / "ran"
    (whole / "manifest.json").unlink()
    (whole / "beside.py").write_text(f"open({str(marker)!r}, 'w')\n")
    text, file = (whole / "recipe.toml").read_text(), whole / "recipe.toml"

    def one(draw: random.Random) -> str:
        file.write_text(varied(text, draw) if draw.random() < 0.9 else text.replace("kasoku.models", "beside"))
        ends = [command("eval", str(whole))[0], command("train", "--resume", str(whole), "--dry-run")[0]]
        if marker.exists():
            raise FindingError("a module of the run folder was imported")
        return "refused" if any(ends) else "taken"

    return tried("forged", one, file.read_bytes, **settings)


KINDS: dict[str, Callable[..., dict[str, Any]]] = {"tar": tars, "pack": packs}
KINDS |= {"pack-raw": functools.partial(packs, form="raw", name="pack-raw"), "checkpoint": checkpoints, "run": runs}
KINDS["forged"] = forged
