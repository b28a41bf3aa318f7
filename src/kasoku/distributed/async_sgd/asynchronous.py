"""Ranks that train one set of weights without waiting for each other: the technique and its engine.

Note: an exchange. Each rank steps its own copy with its own optimizer. It sends its updates to the owners of the
shards, which add them to the shared weights and reply with these. With `hidden`, transfer, addition and reply overlap
the next step (transport.py, Note: progress), and the reply is read at its end; otherwise the rank waits for it.

Note: dead and joining ranks. The death of a rank ends the exchanges of all; `kasoku train` goes on (docs/faults.md). In
a loop of the user's own the other ranks call `close()`, and form a new group and new jobs with a joining rank. It gets
rank 0's weights from `apply`, and may load rank 0's `state_dict` (tests/distributed/test_joining.py).

Note: optimizer states. Synchronous ranks need equal optimizer states, or their weights drift apart; asynchronous ranks
each have their own. So the states are averaged over all ranks when a synchronous phase begins.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from kasoku.core import Comm, InputError, Job, Range, Solo, Stage, Technique, say
from kasoku.core.hardware import is_dense
from kasoku.distributed.async_sgd.parameter_server import CLOCK, RESTS, SHARE, SharedWeights, means_over
from kasoku.distributed.async_sgd.transport import InProcess, NetworkTransport
from kasoku.distributed.async_sgd.worker import CODECS, WorkerGroup, most_local_steps
from kasoku.distributed.ddp.all_reduce import start_equal
from kasoku.distributed.ddp.bucket_plan import Graded, Policy
from kasoku.distributed.ddp.layer_index import LayerIndex
from kasoku.distributed.ddp.overlap import Overlap, SingleRank
from kasoku.distributed.ddp.overlap_engine import Engine
from kasoku.distributed.environment import nodes_of

_REFUSED = {"moves_weights": "all ranks would add its jump to the slow weights as an update; use EMA instead"}


@dataclass(frozen=True)
class Asynchronous(Technique, stage=Stage.NODE, refuses=_REFUSED, exchanges_gradients=True, channels=1, stale=True):
    """Adds each rank's updates to shared weights and reads fresh weights during the next step.

    `job.drain()`, `evaluation()`, `state_dict()` and `close()` are collective: they are sync points, after which all
    ranks have equal weights. Between them each rank has its own copy plus a prediction. `apply` broadcasts rank 0's
    parameters and buffers. A sync point averages floating-point buffers and takes the maximum of integer ones. Beside
    Overlap or AllReduce, which then average within a node only, each node takes the place of a rank: its ranks step
    together and have equal weights.

    Args:
        max_staleness: how many steps a rank may be ahead of the slowest one, 0 or more; 0: synchronous steps, by
            Overlap with these buckets; left out (None): no limit.
        buckets: how parameters are grouped for the exchange.
        every: local steps between two exchanges, 0 or more; 0 sends again as soon as the previous exchange has
            finished, so that no step waits for the network (after at most 16 or max_staleness steps; after each step
            with hidden=False).
        hidden: exchange during the next step and read the reply at its end; False: wait for the reply at once.
        wire: the codec of updates and replies: "fp32", "bf16" or "int8" (256 elements share a scale, a power of two).
            Rounding errors are added to the next message.
        predict: computes gradients at the weights' predicted position: any multiple of the other ranks' last movement
            ahead; 0: no prediction. Below 0: 2 with hidden=True, where the weights read are that many exchanges old,
            else 0 (chosen by measurement: RECORDS.md).
        warmup: epochs of synchronous steps at the start, 0 or more; never a share of the training.
        finish: the epoch from which steps are synchronous again, 0 or more; never a share of the training; 0: none.
        node: ranks of a node that step together beside Overlap or AllReduce, which have consecutive numbers, 0 or more;
            0: those that share a host.

    Saves: the time that ranks wait for each other and for the network.
    Costs: memory on each rank, 12 bytes a parameter (8 without prediction, which is on the model's device), with bf16 6
        and with int8 5 more. An owner also keeps its shard of the weights, two buffers as large as its largest piece
        for each other rank, and with bf16 or int8 a copy of its shard for each rank. The prediction takes two passes
        over the parameters a step. About two threads for each other rank. Updates are stale, and no two runs are alike;
        a resumed run has rank 0's optimizer state on all ranks, so it is only statistically the same.
    Maths: W += u / workers for each worker's update u, computed on a W that lacks the other workers' latest updates.
    Ref: [001]; Dean et al. 2012 (Downpour); Ho et al. 2013 (SSP: max_staleness); Sato 2017 (the [001] team: predict).
    """

    max_staleness: Annotated[int | None, Range("None for any number of steps", at_least=0)] = None
    buckets: Policy = field(default_factory=Graded)
    every: Annotated[int, Range(at_least=0)] = 0
    hidden: bool = True
    wire: Literal["fp32", "bf16", "int8"] = "fp32"
    predict: float = -1.0
    warmup: Annotated[float, Range(at_least=0)] = 0.0
    finish: Annotated[float, Range(at_least=0)] = 0.0
    node: Annotated[int, Range(at_least=0)] = 0

    @property
    def ahead(self) -> float:
        """The prediction, in multiples of the other ranks' last movement."""
        return self.predict if self.predict >= 0 else 2.0 * self.hidden

    @property
    def is_asynchronous(self) -> bool:  # type: ignore[override]
        """True unless `max_staleness` is 0."""
        return self.max_staleness != 0

    def over(self, epochs: float) -> Technique:
        """Overlap where no rank may run ahead."""
        return self if self.is_asynchronous else Overlap(self.buckets)

    def ranks_in_step(self, comm: Comm, applied: Sequence[Technique]) -> Comm:
        """This rank alone, or the ranks of its node beside a technique that averages gradients."""
        if not self.is_asynchronous or comm.size == 1:
            return comm
        beside = next((type(t).__name__ for t in applied if t.averages_gradients), "")
        if not beside:
            return Solo(comm.clock)
        nodes = nodes_of(comm, self.node, f"Asynchronous beside {beside}")
        if len(nodes) > 1:
            own = comm.sub(nodes)
            return own if own.size > 1 else Solo(comm.clock)
        every = f"all ranks share a host, so that {beside} has them all step together"
        say(f"Asynchronous: {every}; node=... divides them", comm.rank)
        return comm

    def apply(self, job: Job) -> None:
        """Broadcasts rank 0's weights, then exchanges the optimizer's updates."""
        if not self.is_asynchronous:
            if not any(technique.averages_gradients for technique in job.applied):
                Overlap(self.buckets).apply(job)
        elif job.step_comm is job.comm:
            job.keep("asynchronous", SingleRank({"staleness": {}}))
        else:
            job.needs_whole_gradients = True  # predictions leave the weights before any of them is updated
            start_equal(job, job.comm)
            Exchange(job, self)


class Exchange:
    """The exchanges of one job."""

    def __init__(self, job: Job, settings: Asynchronous) -> None:
        self.job, self.settings = job, settings
        self.comm = job.comm.channel(patient=True)
        self.node = job.step_comm.channel()
        leaders = job.comm.gather_objects(self.node.broadcast_object(job.comm.rank))
        units = LayerIndex(job.model)
        for name, p in units.named:
            if p.dtype != torch.float32 or not is_dense(p):
                raise InputError(f"Asynchronous: {name} is {p.dtype} of strides {p.stride()}: dense float32 only")
        groups = [[units.named[i][1] for i in group] for group in settings.buckets.plan(units.tensors).buckets]
        workers, codec, ahead = sorted({*leaders}), CODECS[settings.wire], settings.ahead
        blocking = not settings.hidden and not ahead
        copies = [WorkerGroup(params, workers, codec, blocking=blocking, ahead=ahead) for params in groups]
        size = getattr(job.plain_loader, "size", self.comm.size)  # ranks may be fewer or more than shares
        shares = len(workers) if size == self.comm.size else size // self.node.size
        self.weights = SharedWeights(copies, leaders, self.comm.rank, self.node, settings.max_staleness, shares)
        in_turn, server = not self.comm.thread_safe, self.weights.server  # in turn: ranks in one process
        self.transport = InProcess(self.comm, server) if in_turn else NetworkTransport(self.comm, server)
        self.sync_phases = SyncPhases(job, settings.buckets, settings.warmup, settings.finish)
        self.staleness: Counter[int] = Counter()  # all ranks' updates by staleness, up to the last sync point
        self.batches_dealt = 0  # before it
        self.step = self._shares = 0  # of this rank since then; shares of the data: that it asked for
        self._started = self._entered = False
        job.before_step(self.weights.remove_predictions)  # weight decay must act on the weights alone
        job.after_step(self._after_step)
        job.on_drain(self.drain)
        job.keep("asynchronous", self)
        model = job.model  # deep copies keep the hook, which must act on the original alone
        hook = model.register_forward_pre_hook(lambda m, _: self._before_forward() if m is model else None)
        job.on_close(hook.remove)

    # ---- a step

    def _before_forward(self) -> None:
        if self._entered or not self.job.model.training:
            return
        self._entered = True
        if self.sync_phases.due != self.sync_phases.active:
            self.change_phase()
        if not self.sync_phases.active:
            self._start()
            self._send_clock(self.step)

    def change_phase(self) -> None:
        """Switches between asynchronous and synchronous steps; collective: all ranks do so at the same epoch."""
        self.drain()
        self.sync_phases.switch()

    @torch.no_grad()
    def _start(self) -> None:
        """Starts the transport after a sync point."""
        if self._started:
            return
        if not self.step and not self.weights.unchanged:
            changed = "Asynchronous: the weights were changed since the last sync point"
            raise InputError(f"{changed}: load them before apply, or by job.load_state_dict")
        self.transport.start()
        self._started = True

    def share_of_data(self, first: int, end: int, *, stop: bool = False, last: bool = False) -> int | None:
        """The number of this rank's next share, as a loader's `deal_from` counts; None: the sync point is reached.

        `first`, `end`: the batches until then; those of the first call count. `stop` requests a sync point as soon as a
        whole batch is dealt; so does `last`, from a rank that takes no more. All ranks call it.
        """
        self.weights.server.deal(first, end)
        self._start()
        share = self._ask_first_owner(SHARE, int(stop or last), -1 if last else self._shares)
        self._shares += 1
        return share * self.node.size + self.node.rank if share >= 0 else None

    def _send_clock(self, clock: int) -> None:
        """Sends this worker's clock, and waits while it is too far ahead of the slowest worker."""
        if self.settings.max_staleness is not None and self.node.rank == 0:
            with self.job.trace.span("wait", "the slowest rank"):
                self._ask_first_owner(CLOCK, clock)

    def _ask_first_owner(self, *head: int) -> int:
        """The reply of the owner that deals the data and keeps the clocks."""
        return int(self.transport.ask(self.weights.workers[0], head, torch.zeros(0)).result()[0])

    @torch.no_grad()
    def _after_step(self) -> None:
        self.step += 1
        self._entered = False
        if self.sync_phases.active:
            return
        settings, weights, groups, due = self.settings, self.weights, self.weights.groups, list[int]()
        if not settings.every or self.step % settings.every == 0:
            self._start()
            most = most_local_steps(settings.max_staleness)
            due = list(range(len(groups))) if settings.every else weights.due(self.step, most)
        for g in due:
            weights.receive(groups[g], self.job.trace)
            weights.send(g, self.step, self.transport)
        for g in due if not settings.hidden else ():
            weights.receive(groups[g], self.job.trace)
            groups[g].version_used.update(groups[g].version_read)
        for group in groups:
            group.prediction.move(ahead=True)

    # ---- sync points and checkpoints

    @torch.no_grad()
    def drain(self) -> None:
        """A sync point: finishes all exchanges, gives all ranks equal weights and ends all threads."""
        weights, steps = self.weights, 0.0
        if not self.sync_phases.active:
            self._start()
            weights.remove_predictions()
            for g, group in enumerate(weights.groups):
                weights.receive(group, self.job.trace)
                if self.step > group.sent_at:
                    weights.send(g, self.step, self.transport)
                    weights.receive(group, self.job.trace)
            self._send_clock(RESTS)
            self.transport.stop()
            staleness, self.batches_dealt, steps = weights.gather(self.comm, self.step)
            self.staleness += staleness  # keeps those above 0
            self._started, self._entered, weights.server.dealt, self._shares = False, False, None, 0
        for x, mean in zip(self.job.model.buffers(), means_over(self.job.model.buffers(), self.comm), strict=True):
            x.copy_(mean)
        weights.begin()
        self.step = 0
        if steps:
            self.job.run_hooks("at_sync_point", steps)

    def state_dict(self) -> dict[str, Any]:
        return {"staleness": {str(steps): n for steps, n in sorted(self.staleness.items())}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Starts from the model's present weights; all ranks call it after a sync point."""
        if self.step:
            raise InputError(f"Asynchronous: {self.step} steps since the last sync point: call job.drain(), then load")
        if not self.comm.thread_safe:  # processes answer requests only after `_start`
            self.comm.gather_objects(None)
        self.staleness = Counter({int(steps): n for steps, n in state["staleness"].items()})
        self.weights.begin()


class SyncPhases:
    """The synchronous steps at the start and the end, by an Overlap without next-forward overlap.

    No phase is active until `switch()`. The first one has `warmup` epochs; the last begins in epoch `finish`; 0: none.
    Where ranks of a node step together, it averages their mean gradients over all ranks, after backward.
    """

    def __init__(self, job: Job, buckets: Policy, warmup: float, finish: float) -> None:
        self._job, self.bounds, self.active, self._own = job, (warmup, finish), False, job.step_comm
        self._whole = getattr(job.plain_loader, "size", job.comm.size) == job.comm.size
        if warmup or finish:
            skips = any(t.skips_unused for t in job.applied)
            settings = Overlap(buckets, next_forward=False, unused="skip" if skips else "refuse")
            # the means of a node are whole, and a loss scale has decided on them
            self._engine = Engine(job, settings, job.comm, vetoed=job.vetoes_steps and self._own.size == 1)
            if self._own.size == 1:
                job.gradient_ready(lambda p: self._engine.arrive(p) if self.active else None)
            job.before_step(lambda: self._average() if self.active else None)

    def _average(self) -> None:
        for p in self._job.model.parameters() if self._own.size > 1 else ():
            if p.grad is not None:
                self._engine.arrive(p)
        self._engine.step()

    @property
    def due(self) -> bool:
        """Whether the next step is synchronous; none is where there are not as many ranks as shares of a batch."""
        (warmup, finish), epochs = self.bounds, self._job.progress + 1e-9
        return self._whole and (epochs < warmup or 0 < finish <= epochs)

    def switch(self) -> None:
        """Makes the next step synchronous, or asynchronous again; collective."""
        job, self.active = self._job, not self.active
        job.step_comm = job.comm if self.active else self._own
        job.run_hooks("after_regrouping")
        if not (self.active and job.steps):
            return
        params = enumerate(p for group in job.optimizer.param_groups for p in group["params"])
        states = ((i, name, x) for i, p in params for name, x in sorted(job.state_of(p).items()))
        tensors = {(i, name, x.shape): x for i, name, x in states if isinstance(x, Tensor) and x.is_floating_point()}
        keys = job.comm.gather_objects([*tensors])
        if any(other != keys[0] for other in keys):  # averages of different states have no meaning
            job.optimizer.state.clear()
            return
        with torch.no_grad():
            for x in tensors.values():
                job.comm.all_reduce(x, op="mean").wait()
