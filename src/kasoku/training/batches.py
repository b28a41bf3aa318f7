"""How ranks take their batches: each a part of every batch, or its own shares of the data (Asynchronous).

No rank starts a step that another rank has no input for, and none seems to hang while it waits for input.

Note: shares of the data. A rank takes the next share of the epoch's batches when it is ready for it, so fast ranks take
more of them, and each image is trained on once an epoch, as ever. Sync points are at the end of an epoch, at an
evaluation, when a rank requests one (a signal, a checkpoint that is due, a loss that is not finite, a newcomer), and
where synchronous steps begin or end; always after whole batches. There a step is counted for each batch, and the
weights are equal on all ranks.
"""

import json
import math
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from itertools import islice
from typing import ClassVar

import torch
from torch import Tensor

from kasoku.core import Batch, Comm, InputError, Job, Work
from kasoku.data import Loader
from kasoku.distributed.async_sgd.asynchronous import Exchange
from kasoku.distributed.consensus import ReportedElsewhereError, raise_on_all_ranks
from kasoku.distributed.counting_comm import Activity
from kasoku.training.control import ControlChannel, Request
from kasoku.training.metrics import Metrics
from kasoku.training.run_state import RunState

_INPUT_S = 120.0  # a rank that waits longer for a batch hangs: a reader repeats its requests to a source for a minute
_PATIENCE = 10  # at a sync point ranks wait this many times as long as a rank may be without a step


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
        loader: Loader = self.job.plain_loader
        if not loader.shares:
            return len(y_N) * self.job.comm.size
        return min(-(-loader.batch // self.job.accumulate), loader.batch - self.metrics.images_begun)

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
        return request._replace(save=self._answered)

    def close(self) -> None:
        """Ends the exchanges under way. Collective."""
        self._channel.close()
        self._barrier.close()


class AsyncSource:
    """The shares of the data that one rank trains on between two sync points."""

    syncs_each_step: ClassVar[bool] = False

    def __init__(self, state: RunState, metrics: Metrics, own_request: Callable[[], Request]) -> None:
        self.state, self.job, self.metrics, self.own_request = state, state.job, metrics, own_request
        self._exchange: Exchange = self.job.kept("asynchronous")
        self._channel = ControlChannel(self.job.comm)
        self._request, self._failure = Request(), None  # type: Request, InputError | None
        self._synchronous, self._steps = False, self.job.steps
        loader: Loader = self.job.plain_loader
        self._epoch, self._first = loader.epoch, loader.position // loader.parts  # where it was at the last sync point
        self._begun = self._first  # the end of the batches of that epoch of which this rank has trained on a share

    @property
    def _in_epoch(self) -> int:
        """The batches of an epoch."""
        return len(self.job.plain_loader) // int(self.job.plain_loader.parts)

    def batches(self) -> Iterator[Batch]:
        """This rank's batches, in parts, up to the next sync point."""
        job, loader, exchange, activity = self.job, self.job.plain_loader, self._exchange, self.state.activity
        self._request, self._synchronous = Request(), exchange.sync_phases.due
        if self._synchronous != exchange.sync_phases.active:  # on all ranks, also on those that get no share
            exchange.change_phase()
        barrier = BatchBarrier(job.step_comm)
        try:
            if self._synchronous:
                for part, batch in enumerate(batches(job, activity, barrier), 1):
                    end = self._end()
                    yield batch
                    batch_number, within = divmod(part, loader.parts)
                    request = None if within else self._channel.exchange(self._update_request())
                    if request is not None:  # of all ranks
                        self._request = request
                    if any(request or ()) or (not within and self._first + batch_number == end):
                        return
            else:
                with loader.deal_from(self._next_share):
                    for batch in batches(job, activity, barrier):
                        number = loader.last_share // loader.size  # all shares of a batch have the same progress
                        self._begun = number + 1
                        job.set_progress(self._epoch + number / self._in_epoch)
                        yield batch
        except InputError as error:
            self._failure, self._request = error, Request(failed=True)
            if not self._synchronous:
                exchange.share_of_data(self._first, self._end(), last=True)
        finally:
            barrier.close()

    def _next_share(self) -> int | None:
        # the end is not known earlier: a growing batch grows with the first share
        return self._exchange.share_of_data(self._first, self._end(), stop=any(self._update_request()))

    def images(self, y_N: Tensor) -> int:
        """0: images are counted at the sync points."""
        return 0

    def sync(self) -> Request:
        """Finishes all exchanges, so that all ranks have equal weights. Collective; drains."""
        job, state, metrics = self.job, self.state, self.metrics
        self._channel.close()
        limit_s = _PATIENCE * state.activity.limit_s
        with job.trace.span("wait", "the other ranks"), state.activity.busy(limit_s):
            job.drain()
        self._mark_position(self._exchange.batches_dealt)
        metrics.read_own()
        own = self._request, metrics.own_sum, metrics.own_count
        requests, sums, counts = zip(*job.comm.gather_objects(own), strict=True)
        raise_on_all_ranks(job.comm, self._failure)
        metrics.read_mean(sum(sums), sum(counts))
        return Request.merge(requests)

    def leave(self) -> bool:
        """After a death: leaves this rank's weights in the model, and marks how far it is. Not collective.

        False in a synchronous phase, where a step may be half done.
        """
        self._exchange.weights.remove_predictions()
        if not self._synchronous:
            self._mark_position(self._begun)
        return not self._synchronous

    def _mark_position(self, dealt: int) -> None:
        """Counts the steps since the last sync point. `dealt`: batches of its epoch, for shares in turn."""
        job, loader, length = self.job, self.job.plain_loader, self._in_epoch
        if not self._synchronous:
            epochs, position = divmod(dealt, length)
            loader.seek(self._epoch + epochs, position * loader.parts)
        self.state.mark_position()
        passed = (loader.epoch - self._epoch) * length + loader.position // loader.parts - self._first
        self._steps += passed
        job.set_progress(loader.epoch + loader.position / len(loader), self._steps)
        self.state.progress.images += passed * loader.batch
        self._epoch, self._first = loader.epoch, loader.position // loader.parts
        self._begun = self._first

    def close(self) -> None:
        """Writes how stale the updates were. Collective."""
        counts = self._exchange.staleness
        mean = sum(staleness * n for staleness, n in counts.items()) / max(1, counts.total())
        document = {"mean": round(mean, 3), "updates": dict(sorted(counts.items()))}
        self.state.write(lambda run: run.write("staleness.json", json.dumps(document) + "\n"))
        lacked = f"{mean:.1f} updates of other ranks on average, at most {max(counts, default=0)}"
        self.metrics.bar.say(f"staleness: an update lacked {lacked}")
        self._channel.close()

    def _end(self) -> int:
        """The batch of this epoch before which the next sync point is."""
        length, position, recipe = self._in_epoch, self._first, self.state.recipe
        every, every_steps = recipe.evaluate.every, recipe.save.every_steps
        epoch = self._epoch + position / length
        evaluation = (math.floor(epoch / every + 1e-9) + 1) * every
        change = min((bound for bound in self._exchange.sync_phases.bounds if bound > epoch + 1e-9), default=math.inf)
        left = self.state.training.total_steps - self._steps
        until_save = every_steps - self._steps % every_steps if every_steps else left
        in_epoch = min(evaluation, change, self._epoch + 1.0) - self._epoch
        end: int = min(length, position + min(left, until_save), math.ceil(in_epoch * length - 1e-6))
        return max(position + 1, end)

    def _update_request(self) -> Request:
        """This rank's requests since the last sync point."""
        diverged = Request(failed=self.metrics.diverged)
        self._request = Request.merge((self._request, self.own_request(), diverged))
        return self._request


def batches(job: Job, activity: Activity, barrier: "BatchBarrier") -> Iterator[Batch]:
    """The rest of an epoch. If the input of one rank fails, all ranks raise before that batch. Collective.

    `barrier`: of the ranks that step together; those of a node raise without the other nodes.
    """
    loader = job.plain_loader
    if barrier.comm.size == 1 or loader.skipped is None:  # memory does not fail
        yield from own_batches(job.loader, activity)
        return
    loader.whole_shares, pipeline = True, loader.pipeline
    with closing(own_batches(job.loader, activity)) as own:  # an error's traceback would keep its threads
        rest = 0  # parts of this rank's share that are still to come: the loader has them all
        while True:
            failure: InputError | None = None
            batch: list[Batch] = []
            try:
                batch += islice(own, 1)
            except InputError as error:
                failure = error
            if not batch and not failure:
                return  # all ranks have equally many
            if not rest:
                rest = together = loader.parts if loader.at_once else 1
                with job.trace.span("wait", "the other ranks' input"):
                    anew = loader.pipeline is not pipeline  # on all ranks: what was ready is decoded anew
                    passes = barrier.passes(failure, loader.safe_batches // together, anew=anew)
                    pipeline = loader.pipeline
                if not passes:
                    if barrier.comm is job.comm:
                        raise_on_all_ranks(job.comm, failure)
                    raise failure or ReportedElsewhereError("another rank of this node has no batch")
            elif failure:
                raise failure  # of a technique
            rest -= 1
            yield batch.pop()


def own_batches(loader: Iterable[Batch], activity: Activity) -> Generator[Batch]:
    """This rank's batches, whether or not the other ranks have one."""
    iterator = iter(loader)
    while True:
        with activity.busy(_INPUT_S):
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
        self.comm = comm
        self._work: Work | None = None  # the exchange under way
        self._values = torch.zeros(0)
        self._batch = self._started = self._sure = 0  # numbers: this batch, that of the exchange, the last sure one

    def passes(self, failure: InputError | None, sure: int, *, anew: bool = False) -> bool:
        """Whether all ranks have the next batch. Collective: all ranks call it for each batch.

        `failure`: why this rank has no batch; of one that was declared sure it is raised at once, on this rank alone.
        `sure`: how many of the batches after it cannot fail any more. `anew`: those so far may, on all ranks.
        """
        if anew:
            self.close()
            self._sure = self._batch
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
        if self._work:
            self._finish()

    def _start(self, failed: bool, sure: int) -> None:
        self._values = torch.tensor([float(failed), -float(sure)])
        self._work, self._started = self.comm.all_reduce(self._values, op="max"), self._batch

    def _finish(self) -> bool:
        if self._work:
            self._work.wait()
        failed, fewest = self._values.tolist()
        self._work, self._sure = None, self._started - int(fewest)
        return not failed
