"""The run folder: who may write in it, what a new one says of itself, and where runs lie."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from torch import nn

from kasoku.config.recipe import Recipe, dumps
from kasoku.core import Comm, InputError, Job
from kasoku.core.files import write_text
from kasoku.data import Dataset
from kasoku.device import Chosen
from kasoku.distributed.consensus import run_on_all_ranks
from kasoku.report import environment
from kasoku.training import checkpoint

SHARES = "shares.json"  # in the run folder: images of a batch for each rank


class RunFolder:
    """One training's folder, locked while the object lives.

    Raises:
        InputError: when another training holds it, when it cannot be written, or when it holds a run already and
            `resume` is False.
    """

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        self.path = path
        if resume and not (path / "recipe.toml").is_file():
            raise InputError(f"--resume {path}: no run there (no recipe.toml): the folder of an earlier run is wanted")
        try:
            (path / "checkpoints").mkdir(parents=True, exist_ok=True)
            self._lock = open(path / "lock", "a+")  # noqa: SIM115 - held as long as the run
        except OSError as error:
            raise InputError(
                f"{path}: cannot write there ({error.strerror}): choose another folder with --out"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.seek(0)
            owner = self._lock.read().strip() or "another process"
            self._lock.close()
            raise InputError(f"{path}: in use by a running training ({owner}): wait for it, or give --out") from error
        if not resume and (path / "recipe.toml").exists():
            self._lock.close()
            raise InputError(f"{path}: holds a run already: go on with --resume {path}, or give another --out")
        self._lock.truncate(0)
        self._lock.write(f"process {os.getpid()}")
        self._lock.flush()

    def close(self) -> None:
        """Gives the folder free."""
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def write(self, name: str, text: str) -> None:
        """Writes a small file whole or not at all."""
        write_text(self.path / name, text)

    def save(self, step: int, model: nn.Module, state: dict[str, Any], *, keep: int = 2) -> None:
        """Writes a checkpoint after `step` updates and removes all but the newest `keep`."""
        checkpoint.save(self.path, step, model, state, keep=keep)

    def newest(self, *, warn: Callable[[str], None]) -> checkpoint.Checkpoint | None:
        """The newest good checkpoint, or None; each damaged one is named through `warn` and set aside."""
        for part in (self.path / "checkpoints").glob(".part-*"):
            warn(f"checkpoint {part} was half written: passed over, removed")
            shutil.rmtree(part, ignore_errors=True)
        good = checkpoint.newest(self.path, warn=warn)
        for folder in (self.path / "checkpoints").glob("step-*"):
            if good is None or folder.name > good.folder.name:
                folder.rename(folder.with_name(f"damaged-{folder.name}-{time.time_ns()}"))
        return good


@contextmanager
def run_folder(comm: Comm, path: Path, *, resume: bool) -> Iterator[RunFolder | None]:
    """The run folder, held by rank 0; None on the others. Raises InputError on all where rank 0 cannot have it."""
    run = run_on_all_ranks(comm, lambda: RunFolder(path, resume=resume) if comm.rank == 0 else None)
    try:
        yield run
    finally:
        if run is not None:
            run.close()


def free_folder(name: str, parent: Path = Path("runs")) -> Path:
    """The first of runs/NAME-1, runs/NAME-2, ... that does not exist."""
    number = 1
    while (parent / f"{name}-{number}").exists():
        number += 1
    return parent / f"{name}-{number}"


def own_folder(out: Path | None, recipe: Path, word: str, *, written: Sequence[str] = ()) -> Path:
    """The folder for what a command makes of a recipe: `out`, or a free one of that word; it is made.

    Raises:
        InputError: where it holds a run, or a file that is to be `written` there is the recipe itself.
    """
    path = out or free_folder(f"{recipe.stem}-{word}")
    if any((path / name).exists() for name in ("environment.json", "checkpoints", "result.json")):
        raise InputError(f"{path}: holds a run, which would be lost: give another --out")
    if any((path / name).resolve() == recipe.resolve() for name in written):
        raise InputError(f"{path}: {recipe} lies there and would be written over: give another --out")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {path}: {error.strerror}: a folder is wanted") from error
    return path


def describe(run: RunFolder, recipe: Recipe, dataset: Dataset, chosen: Chosen, import_folders: Sequence[str]) -> None:
    """Writes what a run trains before it starts: its data, its machine, its resolved recipe."""
    d = dataset
    facts = {"name": d.name, "classes": d.classes, "channels": d.channels, "image_size": d.image_size}
    run.write("data.json", json.dumps({**facts, "mean": d.mean, "std": d.std}, indent=1) + "\n")
    more = {"chosen": str(chosen), "import_folders": [entry for entry in import_folders if entry]}
    run.write("environment.json", json.dumps({**environment(), **more}, indent=1) + "\n")
    run.write("recipe.toml", dumps(recipe))


def allow_own_modules(run: Path) -> None:
    """Lets a run's recipe name the user's modules again, from where they were when it was trained."""
    try:
        folders = json.loads((run / "environment.json").read_text())["import_folders"]
    except (OSError, ValueError, KeyError):
        return
    sys.path.extend(folder for folder in folders if folder not in sys.path)


def members_of(folder: Path) -> list[Path]:
    """The members' runs in the folder of an earlier ensemble; none if it is no such folder."""
    return sorted((p.parent for p in folder.glob("member-*/recipe.toml")), key=lambda p: int(p.name.split("-")[1]))


def keep_shares(run: RunFolder, job: Job) -> None:
    """Writes which shares a run begins with, where they are unequal."""
    shares = getattr(job.plain_loader, "shares", ())
    if shares:
        run.write(SHARES, json.dumps(shares) + "\n")


def shares_in(folder: Path, comm: Comm, batch: int) -> tuple[int, ...]:
    """The shares that a run began with, where it goes on with as many ranks and images; all ranks call it."""
    told: Any = []
    if comm.rank == 0:
        with suppress(OSError, ValueError):  # shares were equal
            told = json.loads((folder / SHARES).read_text())
    told = comm.broadcast_object(told)
    whole = isinstance(told, list) and all(type(n) is int and n > 0 for n in told)
    return tuple(told) if whole and len(told) == comm.size and sum(told) == batch else ()
