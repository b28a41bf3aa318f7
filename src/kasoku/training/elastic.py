"""Trainings whose ranks may be lost: copies of their state in host memory, and going on from one with the ranks left.

Note: same result. The batch is cut into the parts that the first ranks passed through the network at once. The ranks
that are left take whole parts, some one more than others; global batch, order of samples, BatchNorm's groups and random
numbers stay. The weights are those of an undisturbed training up to the order of summation, and bit for bit with
`AllReduce(exact=true)`. All ranks go back to the newest copy that all of them have, so no step counts twice.

Note: how often a copy is made. All copies since the start or the last loss take at most 1 % of the time, by the slowest
rank's clock: after each copy the ranks agree how many steps that needs.

Note: what ends all ranks, with exit code 4: `faults.elastic = false`; a loss before the first step or after the last; a
rank that failed by an error of its own, or hangs in a step though its process lives; ranks that step without waiting
for each other; CUDA graphs; unequal shares by speed; no part for each rank; a second loss while the ranks regroup.
Launchers that start ranks again do so, as a new rank cannot join yet. State that a reducer keeps for each rank (Wire,
LowRank) starts anew, as in a run that is resumed on other ranks.
"""

import os
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kasoku.config.ranks import is_asynchronous, part_of, spread
from kasoku.core import Comm, InputError, say
from kasoku.distributed.consensus import run_on_all_ranks
from kasoku.distributed.liveness import LostRankError, is_lost_rank
from kasoku.training.checkpoint import Checkpointing, restore
from kasoku.training.run_folder import RunFolder, run_folder
from kasoku.training.run_state import Progress, Result, RunState, Training
from kasoku.training.trainer import build, fit

# Set by launchers that end all ranks, or start single ones again, when one dies: torchrun, Kubernetes, SkyPilot.
_RESTARTS = ("TORCHELASTIC_RUN_ID", "JOB_COMPLETION_INDEX", "SKYPILOT_NODE_RANK")
_COST = 0.01  # of the time, for copies
_KEPT = 2  # copies: while one is made, the one before it is whole


def fit_in(
    folder: Path,
    training: Training,
    begin: Callable[[RunFolder], object],
    *,
    started: float,
    resume: bool = False,
    quiet: bool = False,
) -> Result:
    """Locks the run folder; `begin` writes into it on rank 0; then as `fit`. Collective.

    Ranks that were started by `kasoku train` go on in place where others are lost, unless they are asynchronous; then
    the comm has changed when this returns.
    """
    comm, recipe, snapshots = training.job.comm, training.recipe, Snapshots()
    members: Any = getattr(comm.activity, "membership", None)
    part = part_of(recipe, comm.size)
    fixed = recipe if recipe.device.graphs else replace(recipe, norm_batch=recipe.images_per_norm(comm.size))
    with ExitStack() as stack:
        run = stack.enter_context(run_folder(comm, folder, resume=resume))
        run_on_all_ranks(comm, lambda: begin(run) if run else None)
        if members:
            elastic = _can_go_on(training, part)
            members.arm(partial(_claim, folder, members.token) if elastic else None, recipe.faults.dead_s)
            stack.callback(members.disarm)
            training = replace(training, snapshots=snapshots if elastic else None)
        lost = False
        while True:
            try:
                if lost:
                    members.regroup()
                    if comm.rank == 0 and run is None:
                        run = stack.enter_context(closing(_take_over(folder)))
                    shares = spread(recipe, part, comm.size)
                    training = replace(
                        build(fixed, comm, dataset=training.dataset, shares=shares), recipe=recipe, snapshots=snapshots
                    )
                return fit(training, run, started=started, resume=resume, quiet=quiet)
            except Exception as error:
                if is_lost_rank(error):
                    comm.activity.wait_for_verdict()
                alone = comm.size == 1 or isinstance(error, LostRankError)
                if not training.snapshots or alone or not comm.activity.heartbeat.fault[1]:
                    raise
                lost, started = True, snapshots.taken_s
                with suppress(RuntimeError):  # of what still waits for the others
                    training.job.patches.close()


def _can_go_on(training: Training, part: int) -> bool:
    """Whether the training can go on with fewer ranks."""
    recipe, size = training.recipe, training.job.comm.size
    alike = not is_asynchronous(recipe, size) and not training.job.plain_loader.shares
    restarted = any(name in os.environ for name in _RESTARTS)
    return recipe.faults.elastic and alike and not (recipe.device.graphs or restarted) and recipe.batch // part >= size


def _claim(folder: Path, token: str, number: int) -> None:
    """Claims the number of a group for this process. Raises InputError if another group has it."""
    if not (folder / "recipe.toml").exists():
        raise InputError(f"the run folder {folder} is not on this host")
    try:
        (folder / f"group-{token[:8]}-{number}").touch(exist_ok=False)
    except FileExistsError as error:
        raise InputError("another group of ranks goes on") from error


def _take_over(folder: Path) -> RunFolder:
    """The run folder of a rank 0 that is lost. If it was only stopped, it sees the new lock."""
    (folder / "lock").unlink(missing_ok=True)
    return RunFolder(folder, resume=True)


class Snapshots:
    """The newest copies of a training's state in host memory, by step.

    Attributes: `spent_s`: seconds that copies took, since the start or the last loss; `taken_s`: when the newest was
        made, by the job's clock.
    """

    def __init__(self) -> None:
        self._copies: dict[int, dict[str, Any]] = {}
        self.taken_s = self.spent_s = self._cost_s = self._since_s = 0.0
        self._first = self._due = 0  # steps

    @property
    def newest(self) -> int:
        """The step of the newest copy; -1 if there is none."""
        return max(self._copies, default=-1)

    def begin(self, checkpointing: Checkpointing) -> None:
        """Makes the first copy, unless the training goes on from one. Collective; drains."""
        job = checkpointing.job
        self.spent_s = 0.0
        if self.newest < 0:
            self._take(checkpointing)
        self._since_s, self._first, self._due = job.clock.now(), job.steps, job.steps + 1
        job.document("copies.json", lambda: {"spent_s": self.spent_s, "of_s": job.clock.now() - self._since_s})

    def take_if_due(self, checkpointing: Checkpointing) -> None:
        """After a step: makes a copy if that keeps their cost. Collective; drains if it does."""
        job = checkpointing.job
        if job.steps < self._due or checkpointing.state.over:
            return
        elapsed_s = job.clock.now() - self._since_s
        slowest = torch.tensor([self.spent_s + self._cost_s, -elapsed_s], dtype=torch.float64)
        job.comm.all_reduce(slowest, op="max").wait()
        needed_s, elapsed_s = float(slowest[0]) / _COST, -float(slowest[1])
        if elapsed_s >= needed_s:
            self._take(checkpointing)
            needed_s += self._cost_s / _COST
        step_s = elapsed_s / (job.steps - self._first)
        steps = torch.tensor([max(1, min(1e6, ceil((needed_s - elapsed_s) / step_s)))], dtype=torch.float64)
        job.comm.all_reduce(steps, op="max").wait()
        self._due = job.steps + int(steps)

    def _take(self, checkpointing: Checkpointing) -> None:
        job = checkpointing.job
        began_s = job.clock.now()
        with checkpointing.state.busy("save"):
            oldest = self._copies.pop(min(self._copies)) if len(self._copies) == _KEPT else None
            content = checkpointing.content()
            content["weights"] = job.model.state_dict()
            self._copies[job.steps] = _copied(content, oldest)
        self.taken_s = job.clock.now()
        self._cost_s = self.taken_s - began_s
        self.spent_s += self._cost_s

    def restore(self, state: RunState) -> None:
        """Goes on from the newest copy that all ranks have. Collective. Raises InputError if there is none."""
        comm, job = state.job.comm, state.job
        step = _common(comm, self._copies)
        copy = self._copies[step]
        self._copies = {step: copy}
        content = _copied(copy)
        job.model.load_state_dict(content["weights"])
        job.load_state_dict(content["job"])
        restore(state, Progress(**content["progress"]))
        if comm.rank == 0:
            say(f"going on from step {job.steps} of {state.training.total_steps}, from memory")


def _common(comm: Comm, copies: dict[int, dict[str, Any]]) -> int:
    """The newest step of which all ranks have a copy."""
    common = set.intersection(*map(set, comm.gather_objects([*copies])))
    if not common:
        raise InputError("the ranks that are left have no copy of the same step: resume from the last checkpoint")
    return int(max(common))


def _copied(thing: Any, old: Any = None) -> Any:
    """A copy in host memory, where possible in that of an older one."""
    if isinstance(thing, Tensor):
        if isinstance(old, Tensor) and (old.shape, old.dtype) == (thing.shape, thing.dtype):
            return old.copy_(thing)
        return thing.detach().to("cpu", copy=True)
    if isinstance(thing, dict):
        olds = old if isinstance(old, dict) else {}
        return {key: _copied(value, olds.get(key)) for key, value in thing.items()}
    if isinstance(thing, list | tuple):
        return type(thing)(_copied(value) for value in thing)
    return thing
