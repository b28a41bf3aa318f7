"""The engine of Asynchronous: when a rank sends its updates, reads fresh weights, and meets the other ranks.

Note: an exchange. Each rank steps its own copy with its own optimizer. It sends its updates to the owners of the
shards, which add them to the shared weights and reply with these. With `hidden`, transfer, addition and reply overlap
the next step (transport.py, Note: progress), and the reply is read at its end; otherwise the rank waits for it.

Note: sync points. `drain()` is collective: it finishes all exchanges, gives all ranks equal weights and ends all
threads. The next forward in training starts them again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from kasoku.core import InputError, Job
from kasoku.core.hardware import is_dense
from kasoku.distributed.async_sgd.exchange_settings import ExchangeSettings
from kasoku.distributed.async_sgd.parameter_server import CLOCK, RESTS, SHARE
from kasoku.distributed.async_sgd.peers import LostError
from kasoku.distributed.async_sgd.shared_memory import Segments
from kasoku.distributed.async_sgd.shared_weights import SharedWeights
from kasoku.distributed.async_sgd.survivors import Table, mean_buffers
from kasoku.distributed.async_sgd.sync_phases import Momentum, SyncPhases
from kasoku.distributed.async_sgd.transport import Roles, transport
from kasoku.distributed.async_sgd.update_transfer import UpdateTransfer
from kasoku.distributed.ddp.layer_index import LayerIndex


class Exchange:
    """The exchanges of one job.

    Attributes: `staleness`: the number of all ranks' updates by staleness, up to the last sync point; `step`: steps
        since then; `shares_dealt`: shares of the data that were dealt before it; `dead`: the reason of each rank's
        death.
    """

    def __init__(self, job: Job, settings: ExchangeSettings) -> None:
        self.job, self.settings = job, settings
        self.comm = job.comm.channel(patient=True)
        size, servers = job.comm.size, settings.servers
        self.trains = job.comm.rank >= servers
        self._units = LayerIndex(job.model)
        self._check_parameters()
        self.segments = Segments(self.comm)
        self.weights = self._divide((range(servers, size), range(servers or size)))
        self.transport = transport(self.comm, self.weights.server, self.weights.roles, self.segments)
        self.dead: dict[int, str] = self.transport.dead
        self.sync_phases = SyncPhases(job, settings.buckets, warmup=settings.warmup, finish=settings.finish)
        self._momentum = Momentum(job, settings.momentum) if settings.momentum is not None else None
        self.staleness: Counter[int] = Counter()
        self._earlier_staleness: Counter[int] = Counter()  # before the weights were last divided
        self._transfer = UpdateTransfer(self.transport, settings, self._momentum, job.trace)
        self.step, self.shares_dealt = 0, 0
        self._started = self._entered = False

    def _check_parameters(self) -> None:
        if not self._units.named:
            raise InputError(f"Asynchronous: {type(self.job.model).__name__} has no parameter that requires a gradient")
        for name, p in self._units.named:
            if p.dtype != torch.float32 or not is_dense(p):
                raise InputError(f"Asynchronous: {name} is {p.dtype} of strides {p.stride()}: dense float32 only")

    def install(self) -> None:
        job = self.job
        self.sync_phases.install()
        job.before_step(self._before_step)
        job.after_step(self._after_step)
        job.on_drain(self.drain)
        job.keep("asynchronous", self)
        model = job.model  # deep copies keep the hook, which must act on the original alone
        job.undo(model.register_forward_pre_hook(lambda m, _: self._before_forward() if m is model else None).remove)
        if self.settings.servers and hasattr(job.plain_loader, "configure"):
            rank = max(0, self.comm.rank - self.settings.servers)
            job.configure_loader(rank=rank, size=len(self.weights.workers))
        if not self.trains:
            job.around_loader(lambda _: ())

    def _divide(self, roles: Roles) -> SharedWeights:
        """Divides the weights, equal on all ranks, among the owners."""
        settings, units = self.settings, self._units
        plan = settings.buckets.plan(units.tensors)
        groups = [[units.named[i][1] for i in group] for group in plan.buckets]
        self.segments.open(2 * len(groups), 8 * self.trains * sum(t.elements for t in units.tensors))
        return SharedWeights(groups, roles, self.comm.rank, settings, self.segments.zeros)

    # ---- a step

    def _before_forward(self) -> None:
        if self._entered or not self.job.model.training:
            return
        if not self.trains:
            raise InputError(f"rank {self.comm.rank} is a server (servers={self.settings.servers}): it makes no step")
        self._entered = True
        if self.sync_phases.due != self.sync_phases.active:
            self.change_phase()
        if not self.sync_phases.active:
            self._start()
            self._send_clock(self.step)

    def change_phase(self) -> None:
        """Switches between asynchronous and synchronous steps; collective: all ranks do so at the same epoch."""
        if self.dead:
            raise InputError(f"ranks {sorted(self.dead)} are dead: synchronous steps need all ranks (finish=0)")
        self.drain()
        if self.sync_phases.active:
            self.sync_phases.end()
        else:
            self.sync_phases.begin()

    def _before_step(self) -> None:
        """Removes the prediction, as weight decay must act on the weights alone."""
        if not self.sync_phases.active:
            self._remove_predictions()
            if self._momentum is not None:
                self._momentum.lower()

    def _remove_predictions(self) -> None:
        for group in self.weights.groups:
            group.prediction.remove()

    @torch.no_grad()
    def _start(self) -> None:
        """Starts the transport after a sync point."""
        if self._started:
            return
        if not self.step and not self.weights.unchanged:
            raise InputError(
                "Asynchronous: the weights were changed since the last sync point: load them before apply, or by "
                "job.load_state_dict"
            )
        self.transport.start()
        self._started = True

    def deal(self, first: int, end: int) -> None:
        """Starts to deal these shares of the data until the next sync point; all ranks call it after the last one."""
        self.weights.server.deal(first, end)

    def share_of_data(self, stop: bool = False) -> int | None:
        """The number of this rank's next share; None: the sync point is reached.

        `stop` requests a sync point as soon as a whole batch is dealt.
        """
        self._start()
        none, share = torch.zeros(0), -1
        with suppress(LostError):
            share = self.transport.ask(self.weights.owners[0], (SHARE, int(stop)), none, none).wait()[0]
        return share if share >= 0 else None

    def _send_clock(self, clock: int) -> None:
        """Sends this worker's clock, and waits while it is too far ahead of the slowest worker."""
        if self.settings.max_staleness is not None and self.trains:
            none = torch.zeros(0)
            with self.job.trace.span("wait", "the slowest rank"), suppress(LostError):
                self.transport.ask(self.weights.owners[0], (CLOCK, clock), none, none).wait()

    @torch.no_grad()
    def _after_step(self) -> None:
        self.step += 1
        self._entered = False
        if self.sync_phases.active:
            return
        if self._momentum is not None:
            self._momentum.restore()
        if not self.settings.every or self.step % self.settings.every == 0:
            self._start()
            self._transfer.exchange_due(self.weights, self.step)
        for group in self.weights.groups:
            group.prediction.add()

    # ---- sync points and checkpoints

    @torch.no_grad()
    def drain(self) -> None:
        """A sync point: finishes all exchanges; all ranks have equal weights then."""
        model, weights = self.job.model, self.weights
        if self.sync_phases.active:
            _copy_buffers(model, mean_buffers(model, Table(self.comm), trains=True, workers=self.comm.size))
            self._begin()
            return
        self._start()
        self._remove_predictions()
        if self.trains:
            self._transfer.finish(weights, self.step)
        self._send_clock(RESTS)
        self.transport.finish_requests()
        (staleness, self.shares_dealt, buffers), living = self.transport.at_sync_point(
            lambda table: weights.sums(table, model)
        )
        self.staleness = staleness + self._earlier_staleness
        weights.store()
        _copy_buffers(model, buffers)
        self.transport.stop()
        if len(living) < len({*weights.owners, *weights.workers}):
            self._earlier_staleness = self.staleness
            self.weights = self._divide(weights.roles_among(living))
            self.transport.replace_server(self.weights.server, self.weights.roles)
        self._begin()
        self._started, self._entered, self.weights.server.dealt = False, False, None

    def _begin(self) -> None:
        self.weights.begin()
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"staleness": {str(steps): n for steps, n in sorted(self.staleness.items())}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Starts from the model's present weights; all ranks call it after a sync point."""
        if self.step:
            raise InputError(f"Asynchronous: {self.step} steps since the last sync point: call job.drain(), then load")
        if not self.comm.thread_safe:  # processes answer requests only after `_start`
            self.comm.gather_objects(None)
        self._earlier_staleness = Counter({int(steps): n for steps, n in state["staleness"].items()})
        self.staleness = Counter(self._earlier_staleness)
        self.weights.server.forget_staleness()
        self._begin()


def _copy_buffers(model: nn.Module, values: Iterable[Tensor]) -> None:
    for x, value in zip(model.buffers(), values, strict=True):
        x.copy_(value)
