"""When checkpoints are written, what they hold, and how a training resumes from one."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

import torch

from kasoku.core import InputError
from kasoku.distributed.consensus import run_on_all_ranks
from kasoku.training.checkpoint_files import Checkpoint
from kasoku.training.metrics import Metrics
from kasoku.training.run_state import Progress, RunState


class Checkpointing:
    """Writes the checkpoints of one training."""

    def __init__(self, state: RunState, metrics: Metrics) -> None:
        self.state, self.job, self.metrics = state, state.job, metrics
        self._steps, self._saved_s = self.job.steps, self.job.clock.now()

    def is_time(self) -> bool:
        """Whether `save.every_s` have passed by rank 0's clock; False on the other ranks."""
        every_s = self.state.recipe.save.every_s
        return bool(every_s and self.state.run and self.job.clock.now() - self._saved_s > every_s)

    def crossed(self) -> bool:
        """Whether a multiple of `save.every_steps` was reached since the last call."""
        before, self._steps, every = self._steps, self.job.steps, self.state.recipe.save.every_steps
        return bool(every and self._steps // every > before // every)

    def save(self) -> None:
        """Writes a checkpoint. Collective; drains. Raises DivergedError if the weights are not finite."""
        state, job = self.state, self.job
        self.metrics.read()
        with state.busy("save"):
            job.drain()
            weights = [p.detach().float().sum() for p in job.model.parameters() if p.is_floating_point()]
            if not torch.stack(weights).isfinite().all():
                raise state.diverged("the weights are not finite", job.steps)
            content = self._content()
            state.write(lambda run: run.save(job.steps, job.model, content, keep=state.recipe.save.keep))
            state.last_checkpoint = f"step {job.steps}"
        self._saved_s = job.clock.now()

    def _content(self) -> dict[str, Any]:
        """A checkpoint beside the weights. The loader's position is that after the last whole step."""
        content = self.job.state_dict()
        content["loader"] |= self.state.position
        if getattr(self.job.plain_loader, "skipped", None):
            ranks = self.job.comm.gather_objects(content["loader"].get("skipped", {}))
            content["loader"]["skipped"] = {index: why for skipped in ranks for index, why in skipped.items()}
        return {"job": content, "progress": {**asdict(self.state.progress), "spent_s": self.metrics.ledger.rows()}}


def resume_from_checkpoint(state: RunState) -> None:
    """Resumes from the newest good checkpoint: rank 0 chooses it, every rank reads it. Collective."""
    comm, job, run = state.job.comm, state.job, state.run

    def say(line: str) -> None:
        if comm.rank == 0:
            print(f"kasoku: {line}", file=sys.stderr)

    def load(checkpoint: Checkpoint) -> Progress:
        content = checkpoint.load(job.model)
        job.load_state_dict(content["job"])
        try:
            return Progress(**content["progress"])
        except TypeError as error:
            raise InputError(f"{checkpoint.folder}: of another version of kasoku ({error}): use that one") from error

    checkpoint = comm.broadcast_object(run_on_all_ranks(comm, lambda: run.newest(warn=say) if run else None))
    if checkpoint is None:
        say("no good checkpoint there: starting from the beginning")
        return
    state.progress = run_on_all_ranks(comm, lambda: load(checkpoint))
    state.mark_position()
    if job.steps:
        state.last_checkpoint = f"step {job.steps}"
    state.target_reached = state.recipe.evaluate.stop and state.progress.reached_s is not None
    say(f"going on from step {job.steps} of {state.training.total_steps}")
