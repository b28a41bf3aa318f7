"""Checkpoints: atomic, checked, and the newest good one of a run.

Note: a checkpoint that can be trusted. All files of a checkpoint are written and flushed into a hidden folder with a
file of their checksums, and the folder is renamed last, so a checkpoint with its final name was complete. The checksums
detect later damage; a damaged checkpoint is reported and skipped in favour of the one before it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_model
from torch import nn

from kasoku.core.files import flush, load_weights, write_error

_SUMS = "sums.json"


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint on disk, written after `step` updates."""

    step: int
    folder: Path

    def load(self, model: nn.Module) -> dict[str, Any]:
        """Fills the model; returns the rest of the state. Raises InputError for a checkpoint of another model."""
        load_weights(model, self.folder / "model.safetensors")
        state: dict[str, Any] = torch.load(self.folder / "state.pt", weights_only=True, map_location="cpu")
        return state


def save(path: Path, step: int, model: nn.Module, state: dict[str, Any], *, keep: int = 2) -> None:
    """Writes a checkpoint of the run folder `path` after `step` updates and removes all but the newest `keep`."""
    final = path / "checkpoints" / f"step-{step:09d}"
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
        (part / _SUMS).write_text(json.dumps({p.name: _checksum(p) for p in sorted(part.iterdir())}))
        for file in part.iterdir():
            flush(file)
        part.rename(final)
        flush(final.parent)
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(part, ignore_errors=True)
        raise write_error(final, error) from error
    for old in sorted(final.parent.glob("step-*"))[:-keep]:
        shutil.rmtree(old)


def newest(path: Path, *, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest good checkpoint of a run folder, or None; each damaged one on the way is named through `warn`."""
    for folder in sorted((path / "checkpoints").glob("step-*"), reverse=True):
        damage = _damage(folder)
        if damage is None:
            return Checkpoint(int(folder.name.removeprefix("step-")), folder)
        warn(f"checkpoint {folder} is damaged ({damage}): passed over")
    return None


def _checksum(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint's files; None if nothing is."""
    try:
        sums = json.loads((folder / _SUMS).read_text())
        for name in ("model.safetensors", "state.pt"):
            if _checksum(folder / name) != sums[name]:
                return f"{name} does not match its checksum"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None
