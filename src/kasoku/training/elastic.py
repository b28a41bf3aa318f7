"""Trainings that lose ranks and take in new ones: copies of their state in host memory, and going on from one.

Note: same result. A part is what a rank took in one forward pass at the start. The ranks that are left take whole
parts, some one more than others; global batch, order of samples, BatchNorm's groups and random numbers stay. The
weights are those of an undisturbed training up to the order of summation, and bit for bit with
`AllReduce(exact=true)`. All ranks go back to the newest copy that all of them have, so no step counts twice.

Note: how often a copy is made. All copies since the start or the last meeting take at most 1 % of the time, by the
slowest rank's clock: after each copy the ranks agree how many steps that needs.

Note: asynchronous ranks, newcomers, and what ends all ranks: docs/faults.md, "Going on without the dead". State that a
reducer keeps for each rank (Wire, LowRank) starts anew, as in a run that is resumed on other ranks.
"""

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kasoku.config.ranks import is_asynchronous, part_of, spread
from kasoku.config.recipe import dumps
from kasoku.core import Comm, InputError, say
from kasoku.data import Shares
from kasoku.distributed.async_sgd.parameter_server import means_over
from kasoku.distributed.consensus import run_on_all_ranks, version_facts
from kasoku.distributed.liveness import LostRankError, is_lost_rank
from kasoku.distributed.membership import MissingRankError
from kasoku.training.batches import AsyncSource, SyncSource
from kasoku.training.checkpoint import Checkpointing, restore
from kasoku.training.control import signals
from kasoku.training.run_folder import RunFolder, run_folder
from kasoku.training.run_state import MeetError, Result, RunState, Training
from kasoku.training.trainer import build, fit

# Set by launchers that end all ranks when one dies: torchrun, SkyPilot.
_RESTARTS = ("TORCHELASTIC_RUN_ID", "SKYPILOT_NODE_RANK")
_COST = 0.01  # of the time, for copies
_KEPT = 2  # copies: while one is made, the one before it is whole
_MOST = 1_000_000  # asynchronous ranks
_MEETINGS = 3  # while further ranks die


def fit_in(
    folder: Path, training: Training, begin: Callable[[RunFolder], object], *, started: float, resume: bool, quiet: bool
) -> Result:
    """Locks the run folder; `begin` writes into it on rank 0; then as `fit`. Collective.

    Ranks that were started by `kasoku train` go on in place where others are lost, and take in newcomers; then the comm
    has changed when this returns. A newcomer, alone so far, joins them.
    """
    comm, caught = training.job.comm, list[str]()
    members: Any = getattr(comm.activity, "membership", None)
    meets = bool(members) and members.newcomer
    with ExitStack() as stack, signals(caught):
        run = None
        if not meets:
            run = stack.enter_context(run_folder(comm, folder, resume=resume))
            run_on_all_ranks(comm, lambda: begin(run) if run else None)
        group = Regrouping(folder, training, members) if meets or (members and _can_go_on(training)) else None
        if group:
            stack.callback(members.disarm)
            training = replace(training, snapshots=group.snapshots)
        while True:
            try:
                if group and meets:
                    group.meet()
                    if comm.rank == 0 and run is None:  # the old one is lost; if it was only stopped, it sees the lock
                        (folder / "lock").unlink(missing_ok=True)
                        run = stack.enter_context(closing(RunFolder(folder, resume=True)))
                    training, started = group.build(training), group.snapshots.taken_s or started
                return fit(training, run, started=started, resume=resume, quiet=quiet, caught=caught)
            except Exception as error:
                if not group or not group.goes_on_after(error):
                    raise
                meets = True
                group.snapshots.leave(in_place=not isinstance(error, MeetError))
                _free(training)


class Regrouping:
    """How a training goes on with other ranks: what stays the same, and the copies of its state."""

    def __init__(self, folder: Path, training: Training, members: Any) -> None:
        self.recipe, self.members, self.snapshots = training.recipe, members, Snapshots(members)
        recipe, first = self.recipe, members.election.first
        self._part, in_turn = part_of(recipe, first), is_asynchronous(recipe, first)
        alike = in_turn or recipe.device.graphs
        self._grouped = recipe if alike else replace(recipe, norm_batch=recipe.images_per_norm(first))
        most = _MOST if in_turn else recipe.batch // self._part
        facts = json.dumps({"recipe": dumps(recipe), **version_facts()}).encode()
        members.arm(folder, hashlib.sha256(facts).hexdigest(), dead_s=recipe.faults.dead_s, most=most)
        self._planned = members.newcomer

    def goes_on_after(self, error: Exception) -> bool:
        """Whether the training goes on with other ranks. Waits for the verdict on an error that looks like a death.

        Without one, the ranks meet: another one may have noticed the death elsewhere.
        """
        lost = is_lost_rank(error) and not isinstance(error, LostRankError) and self.members.comm.size > 1
        if lost:
            self.members.comm.activity.wait_for_verdict()
        self._planned = isinstance(error, MeetError) or not self.members.election.lost
        return lost or isinstance(error, MeetError)

    def meet(self) -> None:
        """Makes the group of the ranks that are left and those that join. Collective among them."""
        for tries in range(_MEETINGS):
            if self._planned or tries:
                self.members.meet()
            try:
                self.members.regroup()
                return
            except MissingRankError as error:  # it died meanwhile
                failure = error
        raise LostRankError(str(failure)) from failure

    def build(self, training: Training) -> Training:
        """The same training on the ranks of the new group. Collective."""
        members, recipe = self.members, self.recipe
        comm = members.comm
        first, turns = members.election.first, is_asynchronous(recipe, comm.size)
        shares = Shares((recipe.batch // first,) * first) if turns else spread(recipe, self._part, comm.size)
        self.snapshots.goes_on = True
        new = build(self._grouped, comm, dataset=training.dataset, shares=shares)
        return replace(new, recipe=recipe, snapshots=self.snapshots)


def _free(training: Training) -> None:
    """Frees the memory of a training that another one follows; callers still hold it."""
    job = training.job
    with suppress(RuntimeError):  # of what still waits for the others
        job.patches.close()
    job.optimizer.state.clear()
    for x in (*job.model.parameters(), *job.model.buffers()):
        x.grad = None
        x.data = x.new_empty(0)


def _can_go_on(training: Training) -> bool:
    """Whether the training can go on with fewer ranks."""
    recipe, job = training.recipe, training.job
    size, alike = job.comm.size, not job.plain_loader.shares
    restarted = any(name in os.environ for name in _RESTARTS)
    alone = job.step_comm.size == 1  # the ranks of a node have places that they would lose
    shared = alone if is_asynchronous(recipe, size) else recipe.batch // part_of(recipe, size) >= size
    return recipe.faults.elastic and alike and shared and not (recipe.device.graphs or restarted)


class Snapshots:
    """The newest copies of a training's state in host memory, by step."""

    def __init__(self, members: Any) -> None:
        self.members, self.goes_on = members, False  # the ranks, and whether to go on from a copy
        self._copies: dict[int, dict[str, Any]] = {}
        self._saved: tuple[float, int, str] | None = None
        self.taken_s = self._since_s = 0.0  # when the newest was made, and since when, by the job's clock
        self.spent_s = self._cost_s = 0.0  # that copies took since the start or the last loss, and the newest
        self._first = self._due = 0  # steps
        self._checkpointing: Checkpointing | None = None
        self._source: AsyncSource | SyncSource | None = None

    def begin(self, checkpointing: Checkpointing, source: AsyncSource | SyncSource) -> None:
        """Makes the first copy, unless the training goes on from one. Collective; drains."""
        job = checkpointing.job
        self._checkpointing, self._source, self.spent_s = checkpointing, source, 0.0
        if not self.goes_on:
            self.take(checkpointing)
        elif self._saved:
            checkpointing.saved_s, checkpointing.steps, checkpointing.state.last_checkpoint = self._saved
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
            self.take(checkpointing)
            needed_s += self._cost_s / _COST
        step_s = elapsed_s / (job.steps - self._first)
        steps = torch.tensor([max(1, min(1e6, ceil((needed_s - elapsed_s) / step_s)))], dtype=torch.float64)
        job.comm.all_reduce(steps, op="max").wait()
        self._due = job.steps + int(steps)

    def take(self, checkpointing: Checkpointing, *, alone: bool = False) -> None:
        """Makes a copy. Collective; drains. With `alone` neither."""
        job = checkpointing.job
        began_s = job.clock.now()
        with checkpointing.state.busy("save"):
            oldest = self._copies.pop(min(self._copies)) if len(self._copies) == _KEPT else None
            content = checkpointing.content(alone=alone)
            content["weights"] = job.model.state_dict()
            self._copies[job.steps] = _copied(content, oldest)
        self.taken_s = job.clock.now()
        self._saved = checkpointing.saved_s, checkpointing.steps, checkpointing.state.last_checkpoint
        self._cost_s = self.taken_s - began_s
        self.spent_s += self._cost_s

    def leave(self, *, in_place: bool) -> None:
        """Leaves the training that another one follows. `in_place`: an asynchronous rank goes on from where it is."""
        if in_place and self._checkpointing and isinstance(self._source, AsyncSource) and self._source.leave():
            self._copies.clear()
            self.take(self._checkpointing, alone=True)
        self._checkpointing = self._source = None

    def restore(self, state: RunState) -> None:
        """Goes on from the newest copy that all ranks but newcomers have. Collective. Raises InputError without one.

        Asynchronous ranks take the mean of the weights in their newest copies.
        """
        comm, job = state.job.comm, state.job
        held = comm.gather_objects([*self._copies])
        if job.step_comm is not job.comm and any(held):
            self._copies = self._means(comm, held, job.model)
            held = [[*self._copies]] * comm.size
        common = set.intersection(*([set(steps) for steps in held if steps] or [set[int]()]))
        if not common:
            raise InputError("the ranks that are left have no copy of the same step: resume from the last checkpoint")
        step = max(common)
        copy = self._copies.get(step)
        if not all(held):  # newcomers have none
            source = next(rank for rank, steps in enumerate(held) if steps)
            theirs = comm.broadcast_object(copy, root=source)
            copy = copy or theirs
        self._copies = {step: copy or {}}
        content = _copied(copy)
        job.model.load_state_dict(content["weights"])
        restore(state, content)
        if comm.rank == 0:
            say(f"going on with {comm.size} ranks from step {job.steps} of {state.training.total_steps}, from memory")

    def _means(self, comm: Comm, held: list[list[int]], model: nn.Module) -> dict[int, dict[str, Any]]:
        """The copy from which asynchronous ranks go on; newcomers hold none. Collective."""
        newest = [max(steps, default=-1) for steps in held]
        source = newest.index(max(newest))
        own = dict(self._copies.get(newest[comm.rank], {}))
        weights = own.pop("weights", model.state_dict())
        copy = comm.broadcast_object(own, root=source)
        copy["weights"] = dict(zip(weights, means_over(weights.values(), comm, held), strict=True))
        return {newest[source]: copy}


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
