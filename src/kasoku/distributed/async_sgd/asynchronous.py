"""Ranks that train one set of weights without waiting for each other.

Note: an exchange. Each rank steps its own copy with its own optimizer. It sends its updates to the owners of the
shards, which add them to the shared weights and reply with these. With `hidden`, transfer, addition and reply overlap
the next step (see post.py, Note: progress), and the reply is read at its end; otherwise the rank waits for it.

Note: sync points. `drain()` is collective: it finishes all exchanges, gives all ranks equal weights and ends all
threads. The next forward in training starts them again.

Note: dead ranks. In a training loop of the user's own, the other ranks name a dead rank in a warning and go on. Each
updates its own copy of the dead rank's pieces; at the next sync point these copies are averaged and all weights are
divided among the survivors. `job.comm` still contains the dead rank, so its collectives (an evaluation's sums,
synchronous steps) would wait for it. So under `kasoku train` all ranks end instead, and resume from a checkpoint
(distributed/liveness.py, Note: two policies).

Note: joining ranks. The other ranks call `close()`, which leaves equal weights, and form a new group and new jobs with
the joining rank. It gets rank 0's weights from `apply`, and may be given rank 0's `state_dict`
(tests/parallel/test_joining.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kasoku.core import InputError, Job, Stage, Technique
from kasoku.core.hardware import is_dense
from kasoku.distributed.async_sgd.parameter_server import (
    CLOCK,
    RESTS,
    SHARE,
    UPDATE,
    Alone,
    ParameterServer,
    ParameterShard,
    Remedies,
)
from kasoku.distributed.async_sgd.peers import LostError
from kasoku.distributed.async_sgd.quantization import CODECS
from kasoku.distributed.async_sgd.shared_memory import Segments
from kasoku.distributed.async_sgd.survivors import Everybody, Table, mean_buffers
from kasoku.distributed.async_sgd.sync_phases import Momentum, Together
from kasoku.distributed.async_sgd.transport import transport
from kasoku.distributed.async_sgd.worker import WorkerGroup, most_alone, predict
from kasoku.distributed.ddp.all_reduce import start_equal
from kasoku.distributed.ddp.bucketing import Graded, Policy
from kasoku.distributed.ddp.layer_index import Units
from kasoku.distributed.ddp.overlap import Overlap


@dataclass(frozen=True)
class Asynchronous(Technique):
    """Adds each rank's updates to shared weights and reads fresh weights during the next step.

    `job.drain()`, `evaluation()`, `state_dict()` and `close()` are collective: they are sync points, after which all
    ranks have equal weights. Between them each rank has its own copy plus a prediction. `apply` broadcasts rank 0's
    parameters and buffers. A sync point averages floating-point buffers and takes the maximum of the others.

    Args:
        max_staleness: how many steps a rank may be ahead of the slowest one; 0: synchronous steps, by Overlap with
            these buckets; None: no limit.
        buckets: how parameters are grouped for the exchange.
        servers: the number of parameter servers, the first ranks, which do not train (their loaders are empty); 0: all
            ranks train and own equal parts of the weights.
        every: local steps between two exchanges; 0 sends again as soon as the previous exchange has finished, so that
            no step waits for the network (after at most 16 or max_staleness steps, times the groups with stream; after
            each step with hidden=False).
        hidden: exchange during the next step and read the reply at its end; False: wait for the reply at once.
        wire: the codec of updates and replies: "fp32", "bf16" or "int8" (256 elements share a scale, a power of two).
            Rounding errors are added to the next message.
        stream: exchange one group at a time, in turn, instead of all.
        remedies: corrections for stale updates.
        warmup: epochs of synchronous steps at the start.
        finish: the epoch from which steps are synchronous again; 0: none.

    Saves: the time that ranks wait for each other and for the network.
    Costs: memory on each rank, 20 bytes a parameter (16 without prediction, 8 with hidden=False in fp32; the
        prediction is on the model's device). An owner also keeps its shard of the weights, two buffers as large as its
        largest group for each rank of another host, and with bf16 or int8 a copy of its shard for each rank. The
        prediction takes two passes over the parameters a step. About four threads for each other rank. Updates are
        stale, and no two runs are alike; a resumed run has rank 0's optimizer state on all ranks, so it is only
        statistically the same.
    Maths: W += u / workers for each worker's update u, computed on a W that lacks the other workers' latest updates.
    Ref: [001]; Dean et al. 2012 (Downpour); Ho et al. 2013 (SSP: max_staleness); Sato 2017.
    """

    stage: ClassVar[Stage] = Stage.COMM
    refuses: ClassVar[tuple[str, ...]] = (
        "exchanges_gradients",
        "captures_graph",
        "needs_ranks_in_step",
        "averages_weights",
    )
    exchanges_gradients: ClassVar[bool] = True
    channels: ClassVar[int] = 1

    max_staleness: int | None = None
    buckets: Policy = field(default_factory=Graded)
    servers: int = 0
    every: int = 0
    hidden: bool = True
    wire: Literal["fp32", "bf16", "int8"] = "fp32"
    stream: bool = False
    remedies: Remedies = field(default_factory=Remedies)
    warmup: float = 0.0
    finish: float = 0.0

    def __post_init__(self) -> None:
        if self.max_staleness is not None and self.max_staleness < 0:
            raise InputError(f"max_staleness={self.max_staleness}: 0 steps or more, or None for any number")
        if self.servers < 0 or self.every < 0:
            raise InputError(f"servers={self.servers}, every={self.every}: 0 ranks or more, and 0 steps or more")
        if self.wire not in CODECS:
            raise InputError(f'wire="{self.wire}": "fp32", "bf16" or "int8"')
        if self.warmup < 0 or self.finish < 0:
            raise InputError(f"warmup={self.warmup}, finish={self.finish}: epochs, 0 or more")
        if self.servers and (self.warmup or self.finish):
            raise InputError(
                f"servers={self.servers}: servers do not train, so no step is synchronous: no warmup, no finish"
            )

    @property
    def ahead(self) -> float:
        """The prediction, in multiples of the other ranks' last movement."""
        wish = self.remedies.predict
        return wish if wish >= 0 else 2.0 * self.hidden

    @property
    def is_asynchronous(self) -> bool:
        """True unless `max_staleness` is 0."""
        return self.max_staleness != 0

    def for_ranks(self, ranks: int) -> Technique:
        """Overlap where no rank may run ahead. Raises InputError for `servers`: `kasoku train` has all ranks train."""
        if not self.is_asynchronous:
            return Overlap(self.buckets)
        if ranks > 1 and self.servers:
            raise InputError(
                f"kasoku.distributed.Asynchronous beside servers={self.servers}: kasoku train has all ranks train; "
                "leave it out"
            )
        return self

    def apply(self, job: Job) -> None:
        """Broadcasts rank 0's weights, then exchanges the optimizer's updates."""
        if self.max_staleness == 0:
            Overlap(self.buckets).apply(job)
        elif job.comm.size == 1:
            job.keep("asynchronous", Alone())
        elif self.servers >= job.comm.size:
            raise InputError(f"servers={self.servers} of {job.comm.size} ranks: at least one rank must train")
        else:
            start_equal(job)
            Exchange(job, self).install()


class Exchange:
    """The exchanges of one job.

    Attributes: `staleness`: the number of all ranks' updates by staleness, up to the last sync point; `clock`: steps
        since then; `dead`: the reason of each rank's death.
    """

    def __init__(self, job: Job, settings: Asynchronous) -> None:
        self.job, self.settings, self.remedies = job, settings, settings.remedies
        self.comm = job.comm.channel(patient=True)
        size, servers = job.comm.size, settings.servers
        self.trains = job.comm.rank >= servers
        self.units = Units(job.model)
        if not self.units.named:
            raise InputError(f"Asynchronous: {type(job.model).__name__} has no parameter that requires a gradient")
        for name, p in self.units.named:
            if p.dtype != torch.float32 or not is_dense(p):
                raise InputError(f"Asynchronous: {name} is {p.dtype} of strides {p.stride()}: dense float32 only")
        self.staleness: Counter[int] = Counter()
        self.before: Counter[int] = Counter()  # the staleness when the weights were last divided anew
        self.segments = Segments(self.comm)
        self.share_out(range(servers or size), range(servers, size))
        self.transport = transport(self.comm, self.owned, (self.workers, self.owners), self.segments)
        self.dead: dict[int, str] = self.transport.dead
        self.together = Together(job, settings.buckets, warmup=settings.warmup, finish=settings.finish)
        self.momentum = Momentum(job, self.remedies.momentum) if self.remedies.momentum >= 0 else None
        self.reached = 0  # shares of the data dealt at the last sync point
        self.alone = most_alone(settings.max_staleness) * (
            len(self.groups) if settings.stream else 1
        )  # the most steps between exchanges
        self.clock, self.turn, self.answers, self.entered = 0, 0, False, False

    def install(self) -> None:
        job = self.job
        self.together.install()
        job.before_step(self.to_weights)
        job.after_step(self.stepped)
        job.on_drain(self.drain)
        job.keep("asynchronous", self)
        model = job.model  # deep copies keep the hook, which must act on the original alone
        job.undo(model.register_forward_pre_hook(lambda m, _: self.enter() if m is model else None).remove)
        if self.settings.servers and hasattr(job.plain_loader, "configure"):
            rank = max(0, self.comm.rank - self.settings.servers)
            job.configure_loader(rank=rank, size=len(self.workers))
        if not self.trains:
            job.around_loader(lambda _: ())

    def share_out(self, owners: Sequence[int], workers: Sequence[int]) -> None:
        """Divides the weights, equal on all ranks, among the owners."""
        self.owners, self.workers, self.share = owners, workers, 1 / max(1, len(workers))
        settings, code = self.settings, CODECS[self.settings.wire]
        predicts = settings.ahead > 0
        still = not settings.hidden and not predicts
        plan = settings.buckets.plan(self.units.tensors)
        named = self.units.named
        some = [[named[i][1] for i in group] for group in plan.groups]
        self.segments.open(2 * len(some), 8 * self.trains * sum(t.elements for t in self.units.tensors))
        zeros = self.segments.zeros
        self.groups = [WorkerGroup(x, owners, code, still=still, predicts=predicts, zeros=zeros) for x in some]
        mine = [group.pieces.get(self.comm.rank) for group in self.groups]
        share = self.share if code.exact else 1.0  # other codecs scale before they round
        shards = [ParameterShard(x.stop - x.start, workers, code, share=share) if x else None for x in mine]
        self.owned = ParameterServer(shards, workers, settings.max_staleness)
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """Takes the parameters, equal on all ranks, as the weights."""
        for group, shard in zip(self.groups, self.owned.shards, strict=True):
            group.begin()
            if shard:
                shard.begin(group.base.flat[group.pieces[self.comm.rank]])
        self.owned.reset()
        self.clock = 0

    # ---- a step

    def enter(self) -> None:
        """Before the first forward of a step."""
        if self.entered or not self.job.model.training:
            return
        if not self.trains:
            raise InputError(f"rank {self.comm.rank} is a server (servers={self.settings.servers}): it makes no step")
        self.entered = True
        if self.together.due != self.together.active:
            self.change()
        if not self.together.active:
            self.start()
            self.say(self.clock)

    def change(self) -> None:
        """Switches between asynchronous and synchronous steps; all ranks do so at the same epoch."""
        if self.transport.dead:
            raise InputError(
                f"ranks {sorted(self.transport.dead)} are dead: the others cannot step together (finish=0)"
            )
        self.drain()
        if self.together.active:
            self.together.end()
        else:
            self.together.begin()

    def to_weights(self) -> None:
        """Before the optimizer's step: removes the prediction, as weight decay must act on the weights alone."""
        if not self.together.active:
            predict(self.groups, ahead=False)
            if self.momentum is not None:
                self.momentum.lower()

    @torch.no_grad()
    def start(self) -> None:
        """Starts the transport after a sync point."""
        if self.answers:
            return
        bits = torch.int32  # NaN is not equal to itself
        same = (torch.equal(group.gather().view(bits), group.base.flat.view(bits)) for group in self.groups)
        if not self.clock and not all(same):
            raise InputError(
                "Asynchronous: the weights were changed since the ranks met last: load them before apply, or by "
                "job.load_state_dict"
            )
        self.transport.start()
        self.answers = True

    def deal(self, first: int, end: int) -> None:
        """Starts to deal these shares of the data until the next sync point; all ranks call it after the last one."""
        self.owned.deal(first, end)

    def share_of_data(self, wish: int = 0) -> int | None:
        """The number of this rank's next share; None: the sync point is reached.

        `wish`: above 0 asks for a sync point as soon as a whole batch is dealt.
        """
        self.start()
        none, share = torch.zeros(0), -1
        with suppress(LostError):
            share = self.transport.ask(self.owners[0], (SHARE, wish), none, none).wait()[0]
        return share if share >= 0 else None

    def say(self, clock: int) -> None:
        """Sends this worker's clock, and waits while it is too far ahead of the slowest worker."""
        if self.settings.max_staleness is not None and self.trains:
            none = torch.zeros(0)
            with self.job.trace.span("wait", "the slowest rank"), suppress(LostError):
                self.transport.ask(self.owners[0], (CLOCK, clock), none, none).wait()

    @torch.no_grad()
    def stepped(self) -> None:
        """After the optimizer's step: exchanges the groups that are due, and adds the prediction."""
        self.clock += 1
        self.entered = False
        if self.together.active:
            return
        if self.momentum is not None:
            self.momentum.restore()
        if not self.settings.every or self.clock % self.settings.every == 0:
            self.trade()
        predict(self.groups, ahead=True)

    def trade(self) -> None:
        """Reads the last reply and sends the next update of each group that is due."""
        self.start()
        among = [self.turn] if self.settings.stream else list(range(len(self.groups)))
        some = [g for g in among if self.settings.every or self.groups[g].due(self.clock, self.alone)]
        for g in some:
            self.turn = (g + 1) % len(self.groups)
            self.collect(self.groups[g])
            self.send(g)
        for g in some if not self.settings.hidden else ():
            self.collect(self.groups[g])
            self.groups[g].basis.update(self.groups[g].read)

    def send(self, g: int) -> None:
        self.transport.check()
        group = self.groups[g]
        group.clock = self.clock
        group.take_update(self.share, self.momentum.factors(group.params) if self.momentum else None)
        for owner, where in group.written.items():
            head = (UPDATE, g, group.basis[owner])
            group.under_way[owner] = self.transport.ask(owner, head, group.sent[where], group.come[where])
        group.basis.update(group.read)

    def collect(self, group: WorkerGroup) -> None:
        """Reads the replies of a group into the parameters."""
        if group.under_way:
            lost = []
            with self.job.trace.span("wait", "fresh weights", bytes=group.come.nbytes):
                for owner, reply in group.under_way.items():
                    try:
                        group.read[owner] = reply.wait()[0]
                    except LostError:
                        lost.append(owner)
            for owner in lost:  # after all other owners have replied
                group.lose(owner)
            group.under_way.clear()
            group.take_answer(self.settings.ahead)

    # ---- sync points

    @torch.no_grad()
    def drain(self) -> None:
        """A sync point: finishes all exchanges; all ranks have equal weights then."""
        if self.together.active:
            for x, value in zip(self.job.model.buffers(), self.buffers(Everybody(self.comm)), strict=True):
                x.copy_(value)
            return self.begin()
        self.start()
        predict(self.groups, ahead=False)
        for g, group in enumerate(self.groups if self.trains else ()):
            self.collect(group)
            if self.clock > group.clock:
                self.send(g)
                self.collect(group)
        self.say(RESTS)
        self.transport.quiet()
        (told, reached, buffers), living = self.transport.meet(self.sums)
        self.staleness = sum((Counter({int(s): n for s, n in one.items()}) for one in told), self.before)
        self.reached = reached
        for group in self.groups:
            group.scatter(group.now)
        for x, value in zip(self.job.model.buffers(), buffers, strict=True):
            x.copy_(value)
        self.transport.stop()
        if len(living) < len({*self.owners, *self.workers}):
            self.go_on_with(living)
        self.begin()
        self.answers, self.entered, self.owned.dealt = False, False, None
        return None

    def go_on_with(self, living: Sequence[int]) -> None:
        self.before = self.staleness
        workers = [rank for rank in self.workers if rank in living]
        owners = [rank for rank in self.owners if rank in living] or workers
        self.share_out(owners, workers)
        self.transport.hand_over(self.owned, (workers, owners))

    def sums(self, table: Table) -> tuple[list[dict[str, int]], int, list[Tensor]]:
        """Sums over the living ranks: the weights into `now` of each group; staleness; shares dealt; buffers."""
        workers = sum(rank in table.ranks for rank in self.workers) if self.trains else 0
        for group, shard in zip(self.groups, self.owned.shards, strict=True):
            owned = {self.comm.rank: shard.weights} if shard else {}
            table.all_reduce(group.part(owned, table.ranks, workers))
        told = {str(steps): n for steps, n in self.owned.staleness().items()}
        reached = self.owned.dealt[0] if self.owned.dealt and self.comm.rank == self.owners[0] else 0
        both = table.gather((told, reached))
        return [found for found, _ in both], max(reached for _, reached in both), self.buffers(table)

    def buffers(self, table: Table) -> list[Tensor]:
        workers = sum(rank in table.ranks for rank in self.workers)
        return mean_buffers(self.job.model, table, trains=self.trains, workers=workers)

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        return {"staleness": {str(steps): n for steps, n in sorted(self.staleness.items())}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Starts from the model's present weights; all ranks call it after a sync point."""
        if self.clock:
            raise InputError(f"Asynchronous: {self.clock} steps since the ranks met: call job.drain(), then load")
        if not self.comm.thread_safe:  # processes answer requests only after `start`
            self.comm.gather_objects(None)
        for shard in self.owned.shards:
            if shard:
                shard.staleness.clear()
        self.before = Counter({int(steps): n for steps, n in state["staleness"].items()})
        self.staleness = Counter(self.before)
        self.begin()
