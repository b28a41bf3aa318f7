"""The run folder: who may write in it, its checkpoints (atomic, checked), and which one is good to go on from.

Note: a checkpoint that can be trusted. All files of a checkpoint are written and flushed into a hidden folder with a
file of their checksums, and the folder is renamed last: what has its final name was whole. Damage after that is found
by the checksums; a damaged one is named and passed over, the one before it serves.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from torch import nn

from kasoku.core.errors import InputError

_SUMS = "sums.json"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk, verified: `step` updates were made when it was written."""

    step: int
    folder: Path

    def load(self, model: nn.Module) -> dict[str, Any]:
        """Fills the model; returns the rest of the state. Raises InputError for a checkpoint of another model."""
        load_weights(model, self.folder / "model.safetensors")
        state: dict[str, Any] = torch.load(self.folder / "state.pt", weights_only=True, map_location="cpu")
        return state


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
        write_atomically(self.path / name, lambda part: part.write_text(text))

    def save(self, step: int, model: nn.Module, state: dict[str, Any], *, keep: int = 2) -> None:
        """Writes a checkpoint after `step` updates and removes all but the newest `keep`."""
        final = self.path / "checkpoints" / f"step-{step:09d}"
        if final.exists():
            if _damage(final) is None:
                return
            shutil.rmtree(final)
        part = final.with_name(f".part-{os.getpid()}")
        shutil.rmtree(part, ignore_errors=True)
        try:
            part.mkdir()
            save_model(model, str(part / "model.safetensors"))
            torch.save(state, part / "state.pt")
            (part / _SUMS).write_text(json.dumps({p.name: _sum(p) for p in sorted(part.iterdir())}))
            for file in part.iterdir():
                _flush(file)
            part.rename(final)
            _flush(final.parent)
        except (OSError, RuntimeError, SafetensorError) as error:
            shutil.rmtree(part, ignore_errors=True)
            raise _cannot_write(final, error) from error
        for old in sorted(final.parent.glob("step-*"))[:-keep]:
            shutil.rmtree(old)

    def newest(self, *, warn: Callable[[str], None]) -> Checkpoint | None:
        """The newest good checkpoint, or None; each damaged one is named through `warn` and set aside."""
        for part in (self.path / "checkpoints").glob(".part-*"):
            warn(f"checkpoint {part} was half written: passed over, removed")
            shutil.rmtree(part, ignore_errors=True)
        good = newest(self.path, warn=warn)
        for folder in (self.path / "checkpoints").glob("step-*"):
            if good is None or folder.name > good.folder.name:
                folder.rename(folder.with_name(f"damaged-{folder.name}-{time.time_ns()}"))
        return good


def newest(path: Path, *, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest good checkpoint of a run folder, or None; each damaged one on the way is named through `warn`."""
    for folder in sorted((path / "checkpoints").glob("step-*"), reverse=True):
        damage = _damage(folder)
        if damage is None:
            return Checkpoint(int(folder.name.removeprefix("step-")), folder)
        warn(f"checkpoint {folder} is damaged ({damage}): passed over")
    return None


def save_weights(model: nn.Module, path: Path) -> None:
    """Writes the model's weights as safetensors, whole or not at all."""
    write_atomically(path, lambda part: save_model(model, str(part)))


def load_weights(model: nn.Module, path: Path) -> None:
    """Fills a model from safetensors. Raises InputError when the file is damaged or of another model."""
    try:
        load_model(model, str(path), strict=True)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: cannot be read as safetensors ({error})") from error
    except RuntimeError as error:
        detail = " ".join(str(error).split())[:200]
        raise InputError(f"{path}: weights of another model, not of {type(model).__name__} ({detail})") from error


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Calls write(part) on a file beside `path`, flushes it to disk and renames it to `path`."""
    part = path.with_name(f".{path.name}.part")
    try:
        write(part)
        part.chmod(0o644)  # safetensors makes its files private
        _flush(part)
        os.replace(part, path)
    except (OSError, RuntimeError, SafetensorError) as error:
        part.unlink(missing_ok=True)
        raise _cannot_write(path, error) from error


def _cannot_write(path: Path, error: Exception) -> InputError:
    reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
    return InputError(
        f"{path}: cannot be written ({reason}): mend that and go on (a training: --resume); what was written is whole"
    )


def _sum(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint's files; None if nothing is."""
    try:
        sums = json.loads((folder / _SUMS).read_text())
        for name in ("model.safetensors", "state.pt"):
            if _sum(folder / name) != sums[name]:
                return f"{name} does not match its checksum"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None
