"""The run folder: its lock, the digests of its files, and the paths of runs.

Note: the manifest. manifest.json has the SHA-256 of each file that decides a result and has no checksum elsewhere: the
resolved recipe, the shape of the data, the shares of ranks, the weights. They are compared before a file is used.
Before a new version replaces a file, its digest is added to that of the old one (or to "", where there was none), so a
kill between the two writes does no harm. Afterwards the old digest goes.

Note: the format. The first line of a run's recipe has a number that rises where an older recipe would mean something
else, or has a removed setting. Runs of another format are not read.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from itertools import count
from os import fstat
from os.path import samestat
from pathlib import Path
from typing import Any

from safetensors.torch import save_model
from torch import nn

from kasoku.config import trust
from kasoku.config.recipe import CHANGEABLE, Recipe, flat_settings, from_document, read_document
from kasoku.config.toml import table
from kasoku.core import Comm, InputError, files, say
from kasoku.core.files import MANIFEST, check_regular, checked_file, digests_in, is_number, read_json
from kasoku.data.remote.store import send
from kasoku.distributed.consensus import run_on_all_ranks

SHARES = "shares.json"  # in the run folder: images of a batch for each rank
ENSEMBLE = "ensemble.json"  # in the folder of an ensemble: its scores, once all members are trained
FORMAT = "# format 6 of kasoku's run folders: a time below 1 is a share of the training\n"
_BEFORE_RECIPE = {"lock", "checkpoints", "data.json", "environment.json", MANIFEST}  # what a run writes first
_RESULTS = ("model.safetensors", "result.json", "recipe.toml", "metrics.jsonl", "report.html", ENSEMBLE)
_DECISIVE = ("recipe.toml", "data.json", SHARES, "best.safetensors", "model.safetensors")


class RunFolder:
    """One training's folder, locked while the object lives.

    Raises InputError if another training holds it, if it cannot be written, and if it holds a run and is not resumed.
    """

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        self.path = path
        self._lock = files.locked_folder(path, "training", below="checkpoints")
        if not resume and (taken := self.why_taken(path)):
            self._lock.close()
            raise InputError(taken)
        self._digests = digests_in(path) if resume else {}

    @staticmethod
    def why_taken(path: Path) -> str:
        """Why no other training can begin in a folder; empty if one can."""
        holds = (path / "recipe.toml").exists() or members_of(path) or any(path.glob("checkpoints/step-*"))
        return f"{path}: holds a run already: go on with --resume {path}, or give another --out" if holds else ""

    def close(self) -> None:
        with closing(self._lock), suppress(InputError):  # the disk is full, or the folder gone
            if self._digests and self._digests != digests_in(self.path):
                self._write_manifest()

    def write(self, name: str, text: str) -> None:
        """Writes a small UTF-8 file whole or not at all."""
        self._write(name, lambda part: part.write_text(text, encoding="utf-8"))

    def write_weights(self, name: str, model: nn.Module) -> None:
        """Writes a model's weights as safetensors, whole or not at all."""
        self._write(name, lambda part: save_model(model, str(part)))

    def _write(self, name: str, write: Callable[[Path], object]) -> None:
        file = self.path / name
        self._check_owner()

        def write_and_note(part: Path) -> None:
            write(part)
            if name in _DECISIVE:
                old = self._digests.get(name) or [files.digest(file) if file.exists() else ""]
                self._digests[name] = [*old, files.digest(part)]
                self._write_manifest()

        files.write_atomically(file, write_and_note)
        if name in _DECISIVE:
            self._digests[name] = self._digests[name][-1:]  # on disk with the next file, or at the end

    def _check_owner(self) -> None:
        """Raises InputError if the ranks that went on without this one have taken the folder over."""
        with suppress(FileNotFoundError):
            if not samestat(fstat(self._lock.fileno()), (self.path / "lock").stat()):
                raise InputError(f"{self.path}: other ranks go on with this run, without this one")

    def _write_manifest(self) -> None:
        self._check_owner()
        files.write_text(self.path / MANIFEST, files.json_text(self._digests))


def load_recipe(folder: Path, settings: Sequence[str] = ()) -> Recipe:
    """The recipe of a run, with settings over it.

    Raises InputError where there is none, where it was changed, and for one that another version wrote.
    """
    if not (folder / "recipe.toml").is_file():
        raise InputError(f"{folder}: no run there (no recipe.toml): the folder of a training is wanted")
    check_regular(folder)
    file = checked_file(folder, "recipe.toml")
    trust.search_import_folders(file)
    document = read_document(file)
    if not file.read_text(encoding="utf-8").startswith(FORMAT):
        advice = "another version of kasoku wrote it: evaluate it with that version, or train anew"
        raise InputError(f'{file}: the first line is not "{FORMAT.strip()}": {advice}')
    return from_document(document, settings)


def resumed_recipe(folder: Path, settings: Sequence[str] = ()) -> Recipe:
    """The recipe of a run to resume, with settings over it. Raises InputError as `load_recipe`, and as the check."""
    recipe = load_recipe(folder, settings)
    check_same_training(folder, recipe)
    return recipe


@contextmanager
def run_folder(comm: Comm, path: Path, *, resume: bool) -> Iterator[RunFolder | None]:
    """The run folder, locked by rank 0; None on the other ranks. Collective: if that fails, all ranks raise."""
    run = run_on_all_ranks(comm, lambda: RunFolder(path, resume=resume) if comm.rank == 0 else None)
    with closing(run) if run else nullcontext():
        yield run


def free_folder(name: str) -> Path:
    """The first of runs/NAME-1, runs/NAME-2, ... that does not exist."""
    return next(folder for folder in (Path("runs", f"{name}-{number}") for number in count(1)) if not folder.exists())


def finished(folder: Path, recipe: Recipe) -> str:
    """The line for a run that this recipe would train no further: its end, and how to train on; empty if it would."""
    result: dict[str, Any] = {}
    with suppress(InputError):  # damaged: only a record
        result = read_json(folder / "result.json")
    numbers = [result.get(name) for name in ("epochs", "steps", "top1")]
    if result.get("stopped") or not all(map(is_number, numbers)) or not (folder / "model.safetensors").exists():
        return ""
    epochs, steps, top1 = map(float, numbers)  # type: ignore[arg-type]
    goal, best = recipe.evaluate.target, result.get("best_top1", 0.0)
    on_target = recipe.evaluate.stop and is_number(best) and 0 < goal <= best
    if not on_target and epochs + epochs / max(1.0, steps) <= recipe.epochs:
        return ""
    more = "evaluate.stop=false" if on_target else f"epochs=N, N above {recipe.epochs:g}"
    return f"finished: {epochs:g} epoch{'s' * (epochs != 1)}, accuracy {top1:.2%}; train on: --resume with --set {more}"


def check_same_training(folder: Path, recipe: Recipe) -> None:
    """Raises InputError where a recipe is not the run's in more than a resumed run may change."""
    old, new = (flat_settings(table(each)) for each in (load_recipe(folder), recipe))
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name) and not name.startswith(CHANGEABLE):
            got = f"its recipe has {name} = {old.get(name)}, this one {new.get(name)}: that would be another training"
            raise InputError(f"{folder}: {got}; only {', '.join(CHANGEABLE)} may change")


def upload(comm: Comm, folder: Path, address: str) -> None:
    """Uploads the results of a run, or of an ensemble and its members; nothing without an address. Collective.

    Only rank 0 does. Raises InputError if it fails: the run is whole, and going on with it uploads again.
    """

    def send_all() -> None:
        found = [file for run in (folder, *members_of(folder)) for name in _RESULTS if (file := run / name).is_file()]
        try:
            shown = send(address, {f"{folder.resolve().name}/{file.relative_to(folder)}": file for file in found})
        except InputError as error:
            error.resumable = True
            error.args = (f"{error}; not uploaded, but whole in {folder}",)
            raise
        say(f"{len(found)} files of results are in {shown}/{folder.resolve().name}")

    with comm.activity.busy() if comm.activity else nullcontext():
        run_on_all_ranks(comm, lambda: send_all() if address and comm.rank == 0 else None)


def output_folder(out: Path | None, recipe: Path, word: str, *, written: str = "", create: bool = True) -> Path:
    """A folder for a command's output: `out`, or a free one named after the recipe and `word`; created, if wanted.

    Raises InputError if it holds a run, if the file to be `written` is the recipe itself, and if it cannot be created.
    """
    path = out or free_folder(f"{recipe.stem}-{word}")
    if any((path / name).exists() for name in ("environment.json", "checkpoints", "result.json")):
        raise InputError(f"{path}: holds a run, which would be lost: give another --out")
    if written and (path / written).resolve() == recipe.resolve():
        raise InputError(f"{path}: {recipe} lies there and would be written over: give another --out")
    try:
        if create:
            path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {path}: {error.strerror}: a folder is wanted") from error
    return path


def members_of(folder: Path, *, unbegun: bool = False) -> list[Path]:
    """The run folders of an ensemble's members; empty if the folder is not an ensemble's.

    `unbegun`: also those without a recipe, as a training leaves that is killed before it describes its members.
    """
    found = {path.name.removeprefix("member-"): path for path in folder.glob("member-*")}
    members = [found[number] for number in sorted(filter(str.isdecimal, found), key=int)]
    begun = [path for path in members if (path / "recipe.toml").exists()]
    if begun:
        check_regular(folder)
    return members if unbegun else begun


def remove_empty_members(folder: Path, kept: Sequence[Path]) -> None:
    """Removes the folders of other members than those `kept`, if they were not begun."""
    for path in members_of(folder, unbegun=True):
        if path not in kept and {file.name for file in path.rglob("*")} <= _BEFORE_RECIPE:
            shutil.rmtree(path)


def shares_in(folder: Path, comm: Comm, batch: int) -> tuple[int, ...]:
    """The shares that a run started with; empty for another number of ranks or images. Collective."""

    def read() -> Any:
        file = checked_file(folder, SHARES) if comm.rank == 0 else None
        try:
            return json.loads(file.read_text()) if file else []
        except (FileNotFoundError, ValueError, RecursionError):  # they were equal
            return []

    shares = comm.broadcast_object(run_on_all_ranks(comm, read))
    valid = isinstance(shares, list) and all(type(n) is int and n > 0 for n in shares)
    return tuple(shares) if valid and len(shares) == comm.size and sum(shares) == batch else ()
