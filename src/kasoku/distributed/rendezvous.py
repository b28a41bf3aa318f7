"""The ranks of one training: how they meet, and what they agree on.

Note: a group of two engines. Tensors on a CPU travel by gloo, tensors on a GPU by NCCL. So what ranks agree on (a
signal, an error, a file's name) goes past the GPU, and nobody waits for it.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

from kasoku.config.recipe import Recipe
from kasoku.core import Comm, InputError, Solo, Work
from kasoku.distributed import TorchComm
from kasoku.distributed.consensus import SHARED_ERRORS, raise_if, run_on_all_ranks
from kasoku.distributed.environment import Place
from kasoku.distributed.startup import Start
from kasoku.distributed.watchdog import Watchdog
from kasoku.training.checkpoint import RunFolder

TIMEOUT = timedelta(minutes=30)  # that a rank waits for the others: longer than any evaluation or checkpoint
_EVERY_S = 0.25
_SCHEME = "kasoku"  # of the address at which ranks meet
_was_rank: list[object] = []


class LostRankError(RuntimeError):
    """Another rank is gone; it said why, or died."""


@contextmanager
def joined(here: Place, start: Start) -> Iterator[Comm]:
    """The collectives of the ranks this process is one of; the process group is destroyed at the end.

    Args:
        here: which of the ranks it is.
        start: takes the meeting of the ranks as a task; while they do, the trainer is imported.

    Raises:
        InputError: where the launcher did not say where rank 0 is, or the ranks do not find each other.
        LostRankError: where another rank ended in the midst of what they do together.
    """
    trainer = partial(import_module, "kasoku.training.trainer")
    if here.size == 1:
        start.do("packages", trainer)
        yield Solo()
        return
    where = [os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")]
    if None in where:
        raise InputError(
            f"{here.size} ranks without MASTER_ADDR and MASTER_PORT: set them to rank 0's host and a free port there, "
            "or start with kasoku launch, which does"
        )
    _was_rank.append(here)
    cuda = torch.cuda.is_available()
    if cuda:  # before NCCL is there, which takes the device that is set
        torch.cuda.set_device(here.local_rank % torch.cuda.device_count())
        # NCCL would end this process before the Watchdog says which rank was lost (torch's own default is 3: tear down)
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    start.add("rendezvous", lambda: _meet(here, "cpu:gloo,cuda:nccl" if cuda else "gloo", where))
    start.do("packages", trainer)
    start.import_compiler()  # not before: what meets would wait for it (see _meet)
    _ = start["rendezvous"]
    comm = Watchdog().start(TorchComm(), (str(where[0]), int(str(where[1]))))
    try:
        yield comm
        comm.pulse.close()
    except SHARED_ERRORS:
        comm.pulse.close()
        raise
    except BaseException as error:
        if isinstance(error, RuntimeError) and "gloo" in str(error):
            comm.pulse.hear_out()  # mostly another rank is the cause
        comm.pulse.close(failed=" ".join(str(error).split())[:200] or type(error).__name__)
        if is_lost_rank(error):
            line = " ".join(str(error).split())[:120]
            raise LostRankError(f"rank {here.rank}: lost another rank ({line}); resume from a checkpoint") from error
        raise
    finally:
        dist.destroy_process_group()


def is_lost_rank(error: BaseException) -> bool:
    """Whether a collective failed, as when another rank is gone."""
    return isinstance(error, RuntimeError) and (isinstance(error, dist.DistError) or "gloo" in str(error))


def _meet(here: Place, backend: str, where: Sequence[str | None]) -> None:
    """Meets the other ranks.

    Torch first looks whether the compiler is imported, and waits where that is under way; then it looks for the others.
    So it is called at once and finds them itself, in a way of ours.
    """
    with suppress(RuntimeError):  # registered before
        register_rendezvous_handler(_SCHEME, _attempt)  # type: ignore[no-untyped-call]
    try:
        url = f"{_SCHEME}://"
        dist.init_process_group(backend, url, timeout=TIMEOUT, rank=here.rank, world_size=here.size)
    except (RuntimeError, ValueError) as error:
        line = " ".join(str(error).split())[:200]
        raise InputError(
            f"rank {here.rank} of {here.size} does not find the others at {':'.join(map(str, where))} ({line}): check "
            "MASTER_ADDR and MASTER_PORT, and that all ranks were started"
        ) from error


def _attempt(url: str, **more: Any) -> Iterator[tuple[Store, int, int]]:
    """The store of this attempt: torchrun may keep one for all of them."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    for store, rank, size in rendezvous(url.replace(_SCHEME, "env", 1), **more):
        yield PrefixStore(f"attempt {attempt}", store), rank, size


def leave(code: int) -> int:
    """Ends a process that was one of several ranks with this exit code; returns it in any other.

    At once, without Python's own end: threads of gloo may still be giving up tensors, for which they ask Python, and
    being refused at its end abort the process (torch 2.13).
    """
    if _was_rank:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    return code


@contextmanager
def folder(comm: Comm, path: Path, *, resume: bool) -> Iterator[RunFolder | None]:
    """The run folder, held by rank 0; None on the others. Raises InputError on all where rank 0 cannot have it."""
    run = run_on_all_ranks(comm, lambda: RunFolder(path, resume=resume) if comm.rank == 0 else None)
    try:
        yield run
    finally:
        if run is not None:
            run.close()


class Rounds:
    """What the ranks tell each other between steps: a few numbers, of which all get the largest.

    Note: never in the way. A round is begun after one step, goes by gloo, and is read when the next is due, long
    after it ended; neither the device nor the host waits. All ranks know when that is: each round tells how long the
    slowest rank's steps take, and the next is due after as many of them as fill a quarter of a second. So what one
    rank says is acted on by all after the same step, half a second later, or two steps where steps take longer.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._work: Work | None = None
        self._told = torch.zeros(0)
        self._gap, self._steps, self._since = 1, 0, comm.clock.now()

    def step(self, *mine: float) -> list[float] | None:
        """To be called after each step: what was told in the last round, or None while the next is not due."""
        if self._comm.size == 1:
            return list(mine)
        self._steps += 1
        if self._steps < self._gap:
            return None
        now = self._comm.clock.now()
        taken_s = (now - self._since) / self._steps
        told = self.close() or [0.0] * (len(mine) + 1)
        self._told = torch.tensor([*mine, taken_s], dtype=torch.float64)
        self._work = self._comm.all_reduce(self._told, op="max")
        self._gap = max(1, min(1000, math.floor(_EVERY_S / told[-1]))) if told[-1] else 1
        self._steps, self._since = 0, now
        return told[:-1]

    def close(self) -> list[float] | None:
        """Ends the round under way."""
        if self._work is None:
            return None
        self._work.wait()
        self._work = None
        told: list[float] = self._told.tolist()
        return told


class Gate:
    """Whether every rank has the next batch: one that has none cannot take a step, which the others cannot leave.

    Note: looking ahead. Each round tells how many batches the rank with the fewest has in hand for sure. So many need
    no word, and the next round goes by gloo meanwhile: neither the device nor the host waits. Only where a rank is not
    sure do all wait for each other, and then it is the input that they wait for.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._work: Work | None = None
        self._told = torch.zeros(0)
        self._batch = self._asked = self._sure = 0  # numbers of batches: this one, the one asked at, the last sure one

    def passes(self, failure: InputError | None, sure: int) -> bool:
        """To be called with each batch, or with why there is none; False, on all ranks, where one has none.

        Raises that at once, on this rank alone, for a batch that was said to be sure.

        `sure`: of the batches that come next, how many cannot fail any more.
        """
        self._batch += 1
        if self._batch > self._sure and self._work:
            self._hear()
        if self._batch > self._sure:
            self._ask(failure is not None, sure)
            return self._hear()
        raise_if(failure)  # of what was sure: nobody else knows
        if not self._work:
            self._ask(False, sure)
        return True

    def close(self) -> None:
        """Ends the round under way."""
        if self._work:
            self._hear()

    def _ask(self, failed: bool, sure: int) -> None:
        self._told = torch.tensor([float(failed), -float(sure)])
        self._work, self._asked = self._comm.all_reduce(self._told, op="max"), self._batch

    def _hear(self) -> bool:
        if self._work:
            self._work.wait()
        failed, least = self._told.tolist()
        self._work, self._sure = None, self._asked - int(least)
        return not failed


def check_share(recipe: Recipe, ranks: int) -> None:
    """Raises InputError where so many ranks cannot share the recipe's batch."""
    if not can_share(recipe, ranks):
        parts = f" x {recipe.parts(ranks)} parts" if recipe.parts(ranks) > 1 else ""
        groups = f", in groups of norm_batch={recipe.norm_batch}" if recipe.norm_batch else ""
        raise InputError(
            f"batch={recipe.batch}: {ranks} ranks{parts} cannot share it evenly{groups}; {most_ranks(recipe, ranks)} "
            "could, or choose another batch"
        )


def most_ranks(recipe: Recipe, limit: int) -> int:
    """The largest number of ranks up to `limit` that can share the recipe's batch."""
    return max((n for n in range(2, limit + 1) if can_share(recipe, n)), default=1)


def can_share(recipe: Recipe, ranks: int) -> bool:
    """Whether so many ranks get equal shares of the recipe's batch, in its parts and groups."""
    if ranks == 1 or recipe.auto_batch:
        return True
    once, left = divmod(recipe.batch, ranks * recipe.parts(ranks))
    group = recipe.norm_batch
    if left or not group or once % group == 0:
        return left == 0
    return group % once == 0 and ranks % (group // once) == 0  # a group spans equally many ranks
