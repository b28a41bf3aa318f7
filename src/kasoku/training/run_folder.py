"""The run folder: its lock, and the paths of runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from kasoku.core import Comm, InputError
from kasoku.core.files import locked_folder, write_text
from kasoku.distributed.consensus import run_on_all_ranks

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
        self._lock = locked_folder(path, "training", below="checkpoints")
        if not resume and (path / "recipe.toml").exists():
            self._lock.close()
            raise InputError(f"{path}: holds a run already: go on with --resume {path}, or give another --out")

    def close(self) -> None:
        self._lock.close()

    def write(self, name: str, text: str) -> None:
        """Writes a small file whole or not at all."""
        write_text(self.path / name, text)


@contextmanager
def run_folder(comm: Comm, path: Path, *, resume: bool) -> Iterator[RunFolder | None]:
    """The run folder, locked by rank 0; None on the other ranks. Collective: if that fails, all ranks raise."""
    run = run_on_all_ranks(comm, lambda: RunFolder(path, resume=resume) if comm.rank == 0 else None)
    with closing(run) if run else nullcontext():
        yield run


def free_folder(name: str, parent: Path = Path("runs")) -> Path:
    """The first of runs/NAME-1, runs/NAME-2, ... that does not exist."""
    number = 1
    while (parent / f"{name}-{number}").exists():
        number += 1
    return parent / f"{name}-{number}"


def unused_folder(out: Path | None, recipe: Path, word: str, *, written: Sequence[str] = ()) -> Path:
    """A folder for a command's output, not created yet: `out`, or a free one named after the recipe and `word`.

    Raises:
        InputError: if it holds a run, or one of the files to be `written` is the recipe itself.
    """
    path = out or free_folder(f"{recipe.stem}-{word}")
    if any((path / name).exists() for name in ("environment.json", "checkpoints", "result.json")):
        raise InputError(f"{path}: holds a run, which would be lost: give another --out")
    if any((path / name).resolve() == recipe.resolve() for name in written):
        raise InputError(f"{path}: {recipe} lies there and would be written over: give another --out")
    return path


def create_folder(path: Path) -> None:
    """Creates the folder for a command's output. Raises InputError if it cannot be created."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {path}: {error.strerror}: a folder is wanted") from error


def members_of(folder: Path) -> list[Path]:
    """The run folders of an ensemble's members; empty if the folder is not an ensemble's."""
    return sorted((p.parent for p in folder.glob("member-*/recipe.toml")), key=lambda p: int(p.name.split("-")[1]))


def shares_in(folder: Path, comm: Comm, batch: int) -> tuple[int, ...]:
    """The shares that a run started with; empty for another number of ranks or images. Collective."""
    shares: Any = []
    if comm.rank == 0:
        with suppress(OSError, ValueError):  # shares were equal
            shares = json.loads((folder / SHARES).read_text())
    shares = comm.broadcast_object(shares)
    valid = isinstance(shares, list) and all(type(n) is int and n > 0 for n in shares)
    return tuple(shares) if valid and len(shares) == comm.size and sum(shares) == batch else ()
