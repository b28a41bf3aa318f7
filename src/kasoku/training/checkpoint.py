"""Checkpoints: when they are written, what they hold, their files, and how a training resumes from one.

Note: a checkpoint that can be trusted. All files of a checkpoint are written and flushed into a hidden folder with a
file of their checksums, and the folder is renamed last, so a checkpoint with its final name was complete. The checksums
detect later damage; a damaged checkpoint is reported and skipped in favour of the one before it.
"""

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_model
from torch import nn

from kasoku.config.updates import updates
from kasoku.core import InputError, say, summary
from kasoku.core.files import digest, flush, load_weights, read_json, write_error
from kasoku.distributed.consensus import run_on_all_ranks
from kasoku.training.metrics import Metrics
from kasoku.training.run_state import Progress, RunState

_SUMS = "sums.json"


class Checkpointing:
    """Writes the checkpoints of one training. Attributes: `steps`, `saved_s`: when it last looked, and saved."""

    def __init__(self, state: RunState, metrics: Metrics) -> None:
        self.state, self.job, self.metrics = state, state.job, metrics
        self.steps, self.saved_s = self.job.steps, self.job.clock.now()

    def is_due_by_time(self) -> bool:
        """Whether `save.every_s` have passed by rank 0's clock; False on the other ranks."""
        every_s = self.state.recipe.save.every_s
        return bool(every_s and self.state.run and self.job.clock.now() - self.saved_s > every_s)

    def is_due_by_steps(self) -> bool:
        """Whether a multiple of `save.every_steps` was reached since the last call."""
        before, self.steps, every = self.steps, self.job.steps, self.state.recipe.save.every_steps
        return bool(every and self.steps // every > before // every)

    def save(self) -> None:
        """Writes a checkpoint. Collective; drains. Raises DivergedError if the weights are not finite."""
        state, job = self.state, self.job
        self.metrics.read()
        with state.busy("save"):
            job.drain()
            weights = [p.detach().float().sum() for p in job.model.parameters() if p.is_floating_point()]
            if not torch.stack(weights).isfinite().all():
                raise state.diverged("the weights are not finite", job.steps)
            whole = self.content()
            state.write(lambda run: save(run.path, job.steps, job.model, whole, keep=state.recipe.save.keep))
            state.last_checkpoint = f"step {job.steps}"
        self.saved_s = job.clock.now()

    def content(self, *, alone: bool = False) -> dict[str, Any]:
        """All that resuming needs besides the weights; tensors are not copied.

        Collective; drains. With `alone` neither: the other ranks cannot be reached.
        """
        state, job = self.state, self.job
        content = job.state_dict(drain=not alone)
        content["loader"] |= state.position  # after the last whole step
        if job.plain_loader.skipped and not alone:
            ranks = job.comm.gather_objects(content["loader"].get("skipped", {}))
            content["loader"]["skipped"] = {index: why for skipped in ranks for index, why in skipped.items()}
        return {"job": content, "progress": {**asdict(state.progress), "spent_s": self.metrics.ledger.rows()}}


def resume_from_checkpoint(state: RunState) -> None:
    """Resumes from the newest good checkpoint: rank 0 chooses it, every rank reads it. Collective."""
    comm, job, run = state.job.comm, state.job, state.run

    def load(checkpoint: Path) -> None:
        load_weights(job.model, checkpoint / "model.safetensors")
        try:
            restore(state, torch.load(checkpoint / "state.pt", weights_only=True, map_location="cpu"))
        except InputError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, UnpicklingError) as error:
            what = f"{checkpoint}: state.pt has unexpected contents ({type(error).__name__}: {summary(error)})"
            raise InputError(f"{what}: resume with the version of kasoku that wrote it") from error

    found = run_on_all_ranks(comm, lambda: newest(run.path, warn=say, clean=True) if run else None)
    checkpoint = comm.broadcast_object(found)
    if checkpoint is None:
        say("no good checkpoint there: starting from the beginning", comm.rank)
        return
    run_on_all_ranks(comm, lambda: load(checkpoint))
    if job.steps:
        state.last_checkpoint = f"step {job.steps}"
    say(f"going on from step {job.steps} of {state.training.total_steps}", comm.rank)


def restore(state: RunState, content: dict[str, Any]) -> None:
    """Goes on from the content of a checkpoint, once the model has its weights. Not collective."""
    kept = content["job"]["kept"]
    try:  # with another precision, scales are left out, or begin anew
        kept.setdefault("loss_scale", state.job.kept("loss_scale").state_dict())
    except KeyError:
        kept.pop("loss_scale", None)
    state.job.load_state_dict(content["job"])
    rest = updates(state.recipe, state.job.plain_loader.images, state.job.progress)
    # the number of epochs may be another, and with it when a batch grows
    state.training = replace(state.training, total_steps=state.job.steps + rest)
    state.progress = Progress(**content["progress"])
    state.mark_position()
    if not 0 < state.recipe.evaluate.target <= state.progress.best:  # a target above the best so far, or none
        state.progress.reached_s = None
    state.target_reached = state.recipe.evaluate.stop and state.progress.reached_s is not None


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
        (part / _SUMS).write_text(json.dumps({p.name: digest(p) for p in sorted(part.iterdir())}))
        for file in part.iterdir():
            flush(file)
        part.rename(final)
        flush(final.parent)
    except (OSError, RuntimeError, SafetensorError) as error:
        refused = write_error(final, error)  # looks how full the disk is
        shutil.rmtree(part, ignore_errors=True)
        raise refused from error
    for old in [folder for folder in sorted(final.parent.glob("step-*")) if folder.is_dir()][:-keep]:
        shutil.rmtree(old)


def newest(path: Path, *, warn: Callable[[str], None], clean: bool = False) -> Path | None:
    """The newest good checkpoint of a run folder, or None; each bad one on the way is named through `warn`.

    `clean` removes half-written checkpoints and renames damaged ones: only for the process that holds the folder.
    """
    if clean:
        for part in (path / "checkpoints").glob(".part-*"):
            warn(f"checkpoint {part} was half written: passed over, removed")
            shutil.rmtree(part, ignore_errors=True)
    for folder in sorted((path / "checkpoints").glob("step-*"), reverse=True):
        if (damage := _damage(folder)) is None:
            return folder
        warn(f"checkpoint {folder} is damaged ({damage}): passed over")
        if clean:
            folder.rename(folder.with_name(f"damaged-{folder.name}-{time.time_ns()}"))
    return None


def set_aside(path: Path, trusted: int) -> None:
    """Renames checkpoints of steps after `trusted`, as their weights may be wrong: no training resumes from them."""
    for folder in (path / "checkpoints").glob("step-*"):
        if int(folder.name.removeprefix("step-")) > trusted:
            folder.rename(folder.with_name(f"suspect-{folder.name}-{time.time_ns()}"))


def _damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint's files; None if nothing is."""
    try:
        sums = read_json(folder / _SUMS)
        for name in ("model.safetensors", "state.pt"):
            if digest(folder / name) != sums.get(name):
                return f"{name} does not match its checksum"
    except (OSError, InputError) as error:
        return str(error)
    return None
