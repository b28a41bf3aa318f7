"""How ranks take their batches: none starts a step that another rank has no input for, and none seems to hang."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import ClassVar

import torch
from torch import Tensor

from kasoku.core import Batch, Comm, InputError, Job, Work
from kasoku.distributed.consensus import raise_on_all_ranks
from kasoku.distributed.counting_comm import Activity
from kasoku.training.control import ControlChannel, Request
from kasoku.training.metrics import Metrics
from kasoku.training.run_state import RunState

_INPUT_S = 120.0  # a rank that waits longer for a batch hangs: a reader repeats its requests to a source for a minute


class SyncSource:
    """Batches of which each rank takes its part: every step is a sync point."""

    syncs_each_step: ClassVar[bool] = True

    def __init__(self, state: RunState, metrics: Metrics, own_request: Callable[[], Request]) -> None:
        self.state, self.job, self.metrics, self.own_request = state, state.job, metrics, own_request
        self._barrier, self._channel = BatchBarrier(state.job.comm), ControlChannel(state.job.comm)
        self._answered = False  # a request to save, by the last exchange

    def batches(self) -> Iterator[Batch]:
        """The rest of the epoch."""
        return batches(self.job, self.state.activity, self._barrier)

    def images(self, y_N: Tensor) -> int:
        """The images of a micro-batch on all ranks."""
        loader = self.job.plain_loader
        uneven = getattr(loader, "shares", ())
        return loader.batch // self.job.accumulate if uneven else len(y_N) * self.job.comm.size

    def sync(self) -> Request:
        """The requests of the last exchange between ranks, which is not after every step. Collective."""
        self.state.mark_position()
        alone = self.job.comm.size == 1
        request = self._channel.exchange(self.own_request())
        if (self.metrics.is_read_due if alone else request) or self.state.over:
            self.metrics.read()
        if request is None:
            return Request()
        self._answered = request.save and (alone or not self._answered)  # a rank repeats it until it has saved
        return request if request.save == self._answered else request._replace(save=self._answered)

    def close(self) -> None:
        """Ends the exchange of requests under way. Collective."""
        self._channel.close()


def batches(job: Job, activity: Activity, barrier: BatchBarrier) -> Iterator[Batch]:
    """The rest of an epoch. If the input of one rank fails, all ranks raise before that batch. Collective."""
    loader = job.plain_loader
    if job.comm.size == 1 or getattr(loader, "skipped", None) is None:  # memory does not fail
        yield from job.loader
        return
    own = own_batches(job.loader, activity)
    while True:
        batch: list[Batch] = []
        failure: InputError | None = None
        try:
            batch.extend(islice(own, 1))
        except InputError as error:
            failure = error
        if not batch and not failure:
            return  # all ranks have equally many
        with job.trace.span("wait", "the other ranks' input"):
            passes = barrier.passes(failure, loader.safe_batches)
        if not passes:
            raise_on_all_ranks(job.comm, failure)
        yield batch.pop()


def own_batches(loader: Iterable[Batch], activity: Activity) -> Iterator[Batch]:
    """This rank's batches, whether or not the other ranks have one."""
    iterator = iter(loader)
    while True:
        with activity.busy("input", _INPUT_S):
            batch = [*islice(iterator, 1)]
        if not batch:
            return
        yield batch.pop()  # nothing here holds it, so its memory is free after its step


class BatchBarrier:
    """Lets a batch pass if every rank has it: a rank without it cannot take a step, and the rest would wait in it.

    Note: looking ahead. Each exchange says how many batches the rank with the fewest certainly has. These pass without
    another exchange, and the next one runs by gloo meanwhile: neither the device nor the host waits. Ranks wait for
    each other only where one of them is not certain, and then it is the input that they wait for.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._work: Work | None = None
        self._values = torch.zeros(0)
        self._batch = self._started = self._sure = (
            0  # numbers of batches: this one, that of the exchange, the last sure
        )

    def passes(self, failure: InputError | None, sure: int) -> bool:
        """Whether all ranks have the next batch. Collective: all ranks call it for each batch.

        Raises the failure at once, on this rank alone, for a batch that was declared sure.

        Args:
            failure: why this rank has no batch.
            sure: how many of the batches after it cannot fail any more.
        """
        self._batch += 1
        if self._batch > self._sure and self._work:
            self._finish()
        if self._batch > self._sure:
            self._start(failure is not None, sure)
            return self._finish()
        if failure:
            raise failure  # the batch was sure: no other rank hears of it
        if not self._work:
            self._start(False, sure)
        return True

    def close(self) -> None:
        """Ends the exchange under way."""
        if self._work:
            self._finish()

    def _start(self, failed: bool, sure: int) -> None:
        self._values = torch.tensor([float(failed), -float(sure)])
        self._work, self._started = self._comm.all_reduce(self._values, op="max"), self._batch

    def _finish(self) -> bool:
        if self._work:
            self._work.wait()
        failed, fewest = self._values.tolist()
        self._work, self._sure = None, self._started - int(fewest)
        return not failed
