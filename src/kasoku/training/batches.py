"""How ranks take their batches: none steps together without the others' input, none that waits for input hangs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice

import torch

from kasoku.core import Batch, Comm, InputError, Job, Work
from kasoku.distributed.consensus import raise_if, run_on_all_ranks
from kasoku.distributed.counting_comm import Activity

_INPUT_S = 120.0  # that a rank may wait for a batch before it hangs: who reads it asks a source again for a minute


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


def batches(job: Job, activity: Activity, gate: Gate) -> Iterator[Batch]:
    """What is left of an epoch: each batch on all ranks, or on none of them, where all raise what one of them met."""
    plain = job.plain_loader
    left = iter(job.loader)
    if job.comm.size == 1 or getattr(plain, "skipped", None) is None:  # what is in memory does not fail
        yield from left
        return
    while True:
        found: list[Batch] = []
        failure: InputError | None = None
        try:
            found.extend(_next(left, activity))
        except InputError as error:
            failure = error
        if not found and not failure:
            return  # all ranks have as many
        with job.trace.span("wait", "the other ranks' input"):
            passes = gate.passes(failure, plain.safe_batches)
        if not passes:
            run_on_all_ranks(job.comm, partial(raise_if, failure))
        yield found.pop()


def own_batches(loader: Iterable[Batch], activity: Activity) -> Iterator[Batch]:
    """This rank's batches, whether or not the others have one."""
    left = iter(loader)
    while found := _next(left, activity):
        yield found.pop()


def _next(left: Iterator[Batch], activity: Activity) -> list[Batch]:
    with activity.busy("input", _INPUT_S):
        return [*islice(left, 1)]
