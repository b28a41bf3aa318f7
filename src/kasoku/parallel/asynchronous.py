"""Ranks that train on one set of weights without waiting for each other.

Note: how an update travels. Each rank steps its own copy with its own optimizer. What that moved is sent to the owners
of the shards, which add it to the true weights and answer with them. The bytes, the adding and the answer go on while
the next step computes (see post.py: who makes progress); they are read at its end, `hidden`, or waited for at once.

Note: between two drains. `drain()` is a meeting of all ranks: what is under way is finished, all have the same weights
then, and no thread is left. The next forward in training begins anew.

Note: when a rank dies. The others name it (a warning) and go on: each moves its own copy of what the dead one owned;
where they meet next those copies become their mean, and all weights are shared out anew. `job.comm` still has the dead
rank: what else a training does with it (sums of an evaluation, steps together) would wait for it.

Note: when a rank joins. The others meet and close their jobs, which leaves equal weights; with the new one they make a
group anew, and jobs: rank 0's weights are given to all, its `state_dict` may be (tests/parallel/test_joining.py).
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
from kasoku.parallel.barrier import start_equal
from kasoku.parallel.buckets import Graded, Policy
from kasoku.parallel.life import LostError
from kasoku.parallel.overlap import Overlap
from kasoku.parallel.phases import Momentum, Together
from kasoku.parallel.pieces import Group, most_alone, predict
from kasoku.parallel.post import post
from kasoku.parallel.segments import Segments
from kasoku.parallel.shards import CLOCK, RESTS, SHARE, UPDATE, Alone, Owned, Remedies, Shard
from kasoku.parallel.survivors import Everybody, Table, mean_buffers
from kasoku.parallel.units import Units
from kasoku.parallel.wires import WIRES


@dataclass(frozen=True)
class Asynchronous(Technique):
    """Adds each rank's updates into shared weights and reads fresh ones while it goes on: no rank waits for a slow one.

    All ranks call `job.drain()`, `evaluation()`, `state_dict()` and `close()` alike: there they meet, and have equal
    weights. In between each has its own copy, gone ahead by what is predicted. Rank 0's parameters and buffers are
    given to all at `apply`; at a meeting floating-point buffers become their means, and others the largest of them.

    Args:
        max_staleness: how many steps a rank may be ahead of the slowest one; 0: synchronous, which is Overlap with
            these groups; None: any number.
        buckets: the groups that are exchanged one by one.
        servers: so many ranks, the first ones, own the weights and do not train (their loader gives no batch); 0: all
            ranks own an equal part and train.
        every: steps that a rank makes alone before it sends what they moved; 0: as many as it makes until the last
            exchange is over, so that it does not wait for the network; at most 16 or max_staleness (times the groups,
            with stream), and one with hidden=False.
        hidden: exchange while the next step computes, and read at its end; False: wait for it at once.
        wire: "fp32", or "bf16" or "int8" (a power of two for 256 elements) both ways; what rounding takes is sent with
            the next update, either way.
        stream: one group each time, in turn, instead of all.
        remedies: what is done about stale updates.
        warmup: epochs at first in which ranks step together.
        finish: the epoch from which they do so again; 0: never.

    Saves: the time that ranks wait for each other and for the network.
    Costs: memory, 4 bytes a parameter times five on each rank (four without a prediction, two with hidden=False in
        fp32; a prediction's on the model's device). For what it owns: the weights, two rooms of its largest group for
        each rank of another host, and with fewer bits a copy for each rank. A prediction: two passes over
        the parameters a step. Some four threads for each other rank. Updates are stale, and no two runs are alike; a
        resumed one has rank 0's optimizer state on all ranks: the same statistically.
    Maths: W += u / workers for each worker's update u, computed on a W that others' updates have moved since.
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
        if self.wire not in WIRES:
            raise InputError(f'wire="{self.wire}": "fp32", "bf16" or "int8"')
        if self.warmup < 0 or self.finish < 0:
            raise InputError(f"warmup={self.warmup}, finish={self.finish}: epochs, 0 or more")
        if self.servers and (self.warmup or self.finish):
            raise InputError(f"servers={self.servers}: who does not train cannot step together: no warmup, no finish")

    @property
    def ahead(self) -> float:
        """How many times the others' last movement ahead gradients are taken."""
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
                f"kasoku.parallel.Asynchronous beside servers={self.servers}: kasoku train has all ranks train; "
                "leave it out"
            )
        return self

    def apply(self, job: Job) -> None:
        """Starts all ranks equal, then takes over what the optimizer moves."""
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
    """Asynchronous at work on one job.

    Attributes: `staleness`: over all ranks, how many updates were how stale, up to the last meeting; `clock`: steps
        since then; `dead`: why ranks were given up, by rank.
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
        self.before: Counter[int] = Counter()  # staleness, when ranks shared out anew
        self.segments = Segments(self.comm)
        self.share_out(range(servers or size), range(servers, size))
        self.post = post(self.comm, self.owned, (self.workers, self.owners), self.segments)
        self.dead: dict[int, str] = self.post.dead
        self.together = Together(job, settings.buckets, warmup=settings.warmup, finish=settings.finish)
        self.momentum = Momentum(job, self.remedies.momentum) if self.remedies.momentum >= 0 else None
        self.reached = 0  # shares of the data given away when the ranks met last; by the first owner
        self.alone = most_alone(settings.max_staleness) * (len(self.groups) if settings.stream else 1)  # steps at most
        self.clock, self.turn, self.answers, self.entered = 0, 0, False, False

    def install(self) -> None:
        """Puts itself into the job's moments."""
        job = self.job
        self.together.install()
        job.before_step(self.to_weights)
        job.after_step(self.stepped)
        job.on_drain(self.drain)
        job.keep("asynchronous", self)
        model = job.model  # a deep copy has its hooks too
        job.undo(model.register_forward_pre_hook(lambda m, _: self.enter() if m is model else None).remove)
        plain = job.plain_loader
        if self.settings.servers and hasattr(plain, "rank") and hasattr(plain, "size"):
            job.patch(plain, "rank", max(0, self.comm.rank - self.settings.servers))
            job.patch(plain, "size", len(self.workers))
        if not self.trains:
            job.around_loader(lambda _: ())

    def share_out(self, owners: Sequence[int], workers: Sequence[int]) -> None:
        """Cuts the weights, equal on all ranks, into parts for their owners."""
        self.owners, self.workers, self.share = owners, workers, 1 / max(1, len(workers))
        settings, code = self.settings, WIRES[self.settings.wire]
        predicts = settings.ahead > 0
        still = not settings.hidden and not predicts
        plan = settings.buckets.plan(self.units.tensors)
        named = self.units.named
        some = [[named[i][1] for i in group] for group in plan.groups]
        self.segments.open(2 * len(some), 8 * self.trains * sum(t.elements for t in self.units.tensors))
        zeros = self.segments.zeros
        self.groups = [Group(x, owners, code, still=still, predicts=predicts, zeros=zeros) for x in some]
        mine = [group.pieces.get(self.comm.rank) for group in self.groups]
        share = self.share if code.exact else 1.0  # else it is taken before what is sent is rounded
        shards = [Shard(x.stop - x.start, workers, code, share=share) if x else None for x in mine]
        self.owned = Owned(shards, workers, settings.max_staleness)
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """From here on the parameters as they are, equal on all ranks, are the weights."""
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
        """From asynchronous steps to those of all ranks together, or back; all ranks do so at the same epoch."""
        if self.post.dead:
            raise InputError(f"ranks {sorted(self.post.dead)} are dead: the others cannot step together (finish=0)")
        self.drain()
        if self.together.active:
            self.together.end()
        else:
            self.together.begin()

    def to_weights(self) -> None:
        """Before the optimizer's own step: it is one of the weights, which it may scale, not of what is predicted."""
        if not self.together.active:
            predict(self.groups, ahead=False)
            if self.momentum is not None:
                self.momentum.lower()

    @torch.no_grad()
    def start(self) -> None:
        """Has this rank ask and answer, if it does not yet since the ranks met last."""
        if self.answers:
            return
        bits = torch.int32  # NaN is not equal to itself
        same = (torch.equal(group.gather().view(bits), group.base.flat.view(bits)) for group in self.groups)
        if not self.clock and not all(same):
            raise InputError(
                "Asynchronous: the weights were changed since the ranks met last: load them before apply, or by "
                "job.load_state_dict"
            )
        self.post.start()
        self.answers = True

    def deal(self, first: int, end: int) -> None:
        """Has the ranks share these shares of the data until they meet; called by all of them after a meeting."""
        self.owned.deal(first, end)

    def share_of_data(self, wish: int = 0) -> int | None:
        """The number of the next share that this rank trains on; None: it is time to meet.

        `wish`: above 0, all ranks are to meet as soon as a whole batch is dealt.
        """
        self.start()
        none, share = torch.zeros(0), -1
        with suppress(LostError):
            share = self.post.ask(self.owners[0], (SHARE, wish), none, none).wait()[0]
        return share if share >= 0 else None

    def say(self, clock: int) -> None:
        """Tells this worker's clock, and waits while it is too far ahead of the slowest one."""
        if self.settings.max_staleness is not None and self.trains:
            none = torch.zeros(0)
            with self.job.trace.span("wait", "the slowest rank"), suppress(LostError):
                self.post.ask(self.owners[0], (CLOCK, clock), none, none).wait()

    @torch.no_grad()
    def stepped(self) -> None:
        """After the optimizer's own step: exchanges what is due, and goes ahead."""
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
        """Reads what others moved, and sends what this worker did, of each group whose time it is."""
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
        """Sends what this worker moved of a group since it sent last."""
        self.post.check()
        group = self.groups[g]
        group.clock = self.clock
        group.take_update(self.share, self.momentum.factors(group.params) if self.momentum else None)
        for owner, where in group.written.items():
            head = (UPDATE, g, group.basis[owner])
            group.under_way[owner] = self.post.ask(owner, head, group.sent[where], group.come[where])
        group.basis.update(group.read)

    def collect(self, group: Group) -> None:
        """Reads the answers to what was sent of a group: what others moved comes into the parameters."""
        if group.under_way:
            lost = []
            with self.job.trace.span("wait", "fresh weights", bytes=group.come.nbytes):
                for owner, question in group.under_way.items():
                    try:
                        group.read[owner] = question.wait()[0]
                    except LostError:
                        lost.append(owner)
            for owner in lost:  # when all others have answered
                group.lose(owner)
            group.under_way.clear()
            group.take_answer(self.settings.ahead)

    # ---- meetings

    @torch.no_grad()
    def drain(self) -> None:
        """Meets all ranks: what is under way is added, and all have the same weights."""
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
        self.post.quiet()
        (told, reached, buffers), living = self.post.meet(self.sums)
        self.staleness = sum((Counter({int(s): n for s, n in one.items()}) for one in told), self.before)
        self.reached = reached
        for group in self.groups:
            group.scatter(group.now)
        for x, value in zip(self.job.model.buffers(), buffers, strict=True):
            x.copy_(value)
        self.post.stop()
        if len(living) < len({*self.owners, *self.workers}):
            self.go_on_with(living)
        self.begin()
        self.answers, self.entered, self.owned.dealt = False, False, None
        return None

    def go_on_with(self, living: Sequence[int]) -> None:
        """The survivors share out what the dead had."""
        self.before = self.staleness
        workers = [rank for rank in self.workers if rank in living]
        owners = [rank for rank in self.owners if rank in living] or workers
        self.share_out(owners, workers)
        self.post.hand_over(self.owned, (workers, owners))

    def sums(self, table: Table) -> tuple[list[dict[str, int]], int, list[Tensor]]:
        """What all that live have together: the weights, in `now` of each group; staleness; shares dealt; buffers."""
        workers = sum(rank in table.ranks for rank in self.workers) if self.trains else 0
        for group, shard in zip(self.groups, self.owned.shards, strict=True):
            owned = {self.comm.rank: shard.weights} if shard else {}
            table.all_reduce(group.part(owned, table.ranks, workers))
        told = {str(steps): n for steps, n in self.owned.staleness().items()}
        reached = self.owned.dealt[0] if self.owned.dealt and self.comm.rank == self.owners[0] else 0
        both = table.gather((told, reached))
        return [found for found, _ in both], max(reached for _, reached in both), self.buffers(table)

    def buffers(self, table: Table) -> list[Tensor]:
        """What the workers have together of the model's buffers."""
        workers = sum(rank in table.ranks for rank in self.workers)
        return mean_buffers(self.job.model, table, trains=self.trains, workers=workers)

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """How stale updates were; the weights are the model's."""
        return {"staleness": {str(steps): n for steps, n in sorted(self.staleness.items())}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from the model's weights as they are now; called on all ranks when they have met."""
        if self.clock:
            raise InputError(f"Asynchronous: {self.clock} steps since the ranks met: call job.drain(), then load")
        if not self.comm.own_threads:  # else a rank that is asked answers when it has begun
            self.comm.gather_objects(None)
        for shard in self.owned.shards:
            if shard:
                shard.staleness.clear()
        self.before = Counter({int(steps): n for steps, n in state["staleness"].items()})
        self.staleness = Counter(self.before)
        self.begin()
