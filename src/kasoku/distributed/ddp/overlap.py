"""The technique that hides the communication of gradients behind backward and behind the next forward, and its engine.

Note: one static order. Ranks must issue collectives in the same order, and collectives cannot overtake each other. So
the chunks of all buckets are sent in the order of the plan, each when its bucket is whole and all chunks before it have
been sent, whatever the order in which gradients arrive.

Note: changes are detected. A gradient is copied into its bucket, and `p.grad` becomes a view of that memory with a
version counter of its own. A write to it (clipping by hand, a second backward) changes the counter.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kasoku.core import Comm, Hyper, InputError, Job, Stage, Technique
from kasoku.core.backward_updates import BackwardUpdates
from kasoku.distributed.ddp.all_reduce import TWO_AVERAGES, start_equal
from kasoku.distributed.ddp.bucket_buffers import Bucket, BucketLayout
from kasoku.distributed.ddp.bucket_plan import PerTensor, Planned, Policy, table
from kasoku.distributed.ddp.compression import Mean, Reduce, Reducer
from kasoku.distributed.ddp.cost_model import BucketPlan, Chunk, Forecast, LinkModel
from kasoku.distributed.ddp.layer_index import LayerIndex
from kasoku.distributed.ddp.sharded_update import SharedUpdates, refuse
from kasoku.distributed.ddp.step_profiler import StepProfiler


@dataclass(frozen=True)
class Overlap(Technique):
    """Averages gradients over all ranks in planned buckets, hidden behind backward and behind the next forward.

    A gradient is copied into its bucket as it arrives. A bucket is sent when it is whole, and its parameters are
    updated when its mean has arrived: at the latest before the next forward of a layer with one of them. At `apply`
    all ranks copy rank 0's parameters and buffers. Call `job.drain()` before you read parameters; `state_dict()`,
    evaluation and `close()` drain themselves. Beside Asynchronous it averages within a node, and the step waits for it.

    Beside a technique that frees gradients in backward (SavedMemory), a bucket is allocated when its first gradient
    arrives, and updated and freed in backward, when its mean has arrived; nothing is left for the next forward. Planned
    then measures nothing, and takes one bucket for each large tensor.

    Args:
        buckets: the policy that assigns gradients to buckets: Planned, OneBucket, Fixed, Graded, PerLayer.
        next_forward: False: the step waits for all buckets, as DDP does.
        reducer: how a chunk is averaged: Mean, Wire (bf16 or fp16), LowRank, Hierarchical.
        unused: a parameter without a gradient: "refuse" it, or "skip" it on ranks without (one more collective a step).
        shard: each rank receives the mean of its part of each bucket, updates it, and gathers the other parts ahead of
            the layers that need them. For SGD, AdamW and other rules by element, and LARS; Planned does not choose it.
            `job.drain()`, `close()`, every `state_dict()` and the first forward after a step, in evaluation too, are
            then collective: call `job.drain()` on all ranks before one of them uses the model alone.

    Saves: the time of communication, as far as compute covers it. Sharded: all but 1/N of updates and their state.
    Costs: a copy of the gradients; the reducer's state, in a checkpoint for every rank. The update waits for all
        gradients, and a line says so once, beside a technique that needs them whole (clipping), and with fp16 loss
        scaling where the reducer may make a finite gradient infinite (LowRank). CUDA graphs have no layers to wait for:
        a backward hides nothing, and late updates end before the model's forward.
        A forward that reads parameters before it calls their layer (a weight penalty) needs next_forward = False.
        Sharded: two collectives a chunk, of the same bytes; a third one a bucket with LARS. While Planned measures,
        and at a checkpoint, which gathers the state, the peak memory is that of whole updates. Not yet seen on a GPU.
    Maths: g = mean over ranks of g; bit for bit the step that waits for the same buckets; sharded on two ranks, for
        rules by element. Elsewhere sums have another order.
    Ref: [000] 4.4; [003]; Jayarajan et al. 2019 (P3, arXiv 1905.03960); Peng et al. 2019 (ByteScheduler);
        ZeRO (arXiv 1910.02054).
    """

    stage: ClassVar[Stage] = Stage.COMM
    refuses: ClassVar[Mapping[str, str]] = TWO_AVERAGES
    exchanges_gradients: ClassVar[bool] = True
    averages_gradients: ClassVar[bool] = True
    overlaps_backward: ClassVar[bool] = True
    channels: ClassVar[int] = 1
    buckets: Policy = field(default_factory=Planned)
    next_forward: bool = True
    reducer: Reducer = field(default_factory=Mean)
    unused: Literal["refuse", "skip"] = "refuse"
    shard: bool = False

    @property
    def skips_unused(self) -> bool:
        return self.unused == "skip"

    def apply(self, job: Job) -> None:
        if job.step_comm.size == 1:
            job.keep("overlap", SingleRank({"plan": {}, "reduce": []}))
            return
        start_equal(job, job.step_comm)
        updates = job.in_backward
        frees = updates is not None and not self.skips_unused and updates.active(exchanged=True)
        if self.shard:
            refuse(job, self.reducer, frees=frees)
        if updates is not None and frees:
            engine: Engine = FreeingEngine(job, self, updates, vetoed=job.vetoes_steps)
        else:
            engine = Engine(job, self, job.step_comm, vetoed=job.vetoes_steps)
        if frees and self.next_forward:
            engine.print_once("Overlap: gradients are freed in backward, so no update waits for the next forward")
        job.gradient_ready(engine.arrive)
        job.before_step(engine.step)
        job.after_step(engine.end_step)
        job.on_drain(engine.drain)
        job.keep("overlap", engine)
        job.document("buckets.json", lambda: {"text": table(engine.layout.plan, engine.layers.tensors)})
        engine.layers.before(job, engine.enter)
        saving: Any = job.model.register_state_dict_pre_hook
        job.on_close(saving(lambda *_: engine.drain()).remove)
        job.on_close(engine.reduce.settle)
        if self.shard and not isinstance(self.buckets, Planned):
            engine.change_plan(engine.layout.plan, late=True)
        if engine.late and (reason := engine.needs_all()):
            engine.late = False
            engine.print_once(f"Overlap: {reason}, so it waits for all of them")
        if isinstance(self.buckets, Planned) and not frees:
            engine.profiler = StepProfiler(job, self.buckets, engine.comm, engine.reduce, engine.layers, engine.layout)


@dataclass
class SingleRank:
    """The state on one rank: empty. It ignores the state of several ranks, so that one can resume their run."""

    empty: dict[str, Any]

    def state_dict(self) -> dict[str, Any]:
        return self.empty

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Engine:
    """Overlap at work on one job; `vetoed`: a technique decides at each step whether any parameter changes."""

    allocated = True  # the buffers are there all the time

    def __init__(self, job: Job, settings: Overlap, ranks: Comm, *, vetoed: bool) -> None:
        self.job, self.settings, self.late = job, settings, settings.next_forward
        self.ranks, self.comm = ranks, ranks.channel()  # gradients must not hold up the other collectives
        self.reduce = settings.reducer.bind(self.comm)
        self.layers = LayerIndex(job.model, whole=any(technique.captures_graph for technique in job.applied))
        self.profiler: StepProfiler | None = None  # measures the first steps for the search of a plan
        self.hyper: Hyper = []
        self.sent, self.key_prefix = 0, "first"  # chunks of this step; of the reducer's keys
        self.forecast: Forecast | None = None  # of the plan that was searched, if it was
        self.link: LinkModel | None = None
        least_max = min(torch.finfo(p.dtype).max for _, p in self.layers.named)
        self.largest = min(settings.reducer.largest(self.comm.size), least_max / self.comm.size)  # 0: not known
        self.decides = vetoed and self.largest > 0
        self.sharing: SharedUpdates | None = None  # from the first plan that is not measured
        self.lay_out = partial(BucketLayout, layers=self.layers, allocated=self.allocated, notes_ranges=self.decides)
        self.layout = self.lay_out(settings.buckets.plan(self.layers.tensors))
        self.factor: float | None = 1.0  # of this step's gradients; None: no parameter changes
        kind = self.layout.buckets[0].flat.device.type
        autocast = torch.amp.is_autocast_available(kind)
        self.full_precision = torch.autocast(kind, enabled=False) if autocast else nullcontext()

    def needs_all(self) -> str:
        """Why no bucket can be updated before all gradients are there; empty if it can."""
        if self.job.needs_whole_gradients:
            return "a technique needs all gradients before any update"
        if self.job.vetoes_steps and not self.decides:
            return f"{type(self.settings.reducer).__name__} may make gradients infinite, which a step must know"
        return ""

    def print_once(self, line: str) -> None:
        """Prints on rank 0."""
        if self.job.comm.rank == 0:
            print(f"kasoku: {line}", flush=True)

    # ---- in backward

    def arrive(self, p: Tensor) -> None:
        """Copies a whole gradient into its bucket, and sends the chunks whose turn has come."""
        bucket = self.layout.bucket_of.get(p)
        if bucket is None:
            return  # refused in step()
        if bucket.pending:
            name, layer = self.layout.names[p], self.layers.modules[self.layers.users[p][0]][0] or "the model"
            early = f"Overlap: {name} got a gradient before its last update, since its layer ({layer}) was bypassed"
            raise InputError(f"{early}: call that module itself, or set next_forward = false")
        self.layout.copy_in(p)
        if self.profiler is not None:
            self.profiler.arrived(p)
        if bucket.whole:
            self.send()

    def send(self) -> None:
        """Sends the chunks whose turn has come, in the plan's order."""
        if self.profiler is not None and self.profiler.holds_back:
            return
        self.job.trace.poll_transfers()
        order, buckets = self.layout.order, self.layout.buckets
        while self.sent < len(order) and buckets[order[self.sent].bucket].whole:
            self.send_chunk(order[self.sent])
            self.sent += 1

    def send_chunk(self, chunk: Chunk) -> None:
        """Starts to average a chunk."""
        self.layout.send(chunk, self.key_prefix, self.sharing.send if self.sharing else self.reduce, self.job.trace)

    # ---- at the step

    def step(self) -> None:
        """Sends all chunks; parameters are updated as the means arrive, or at once where updates cannot be late."""
        self.layout.refuse_unknown(self.job.optimizer)
        partly_used = [p for p in self.layout.missing() if p.grad is not None]  # not in the last accumulated pass
        self.drain()  # buckets of layers that this step did not use
        for p in partly_used:
            self.arrive(p)
        skip_unused = self.settings.skips_unused
        if not any(bucket.versions for bucket in self.layout.buckets) and not skip_unused:
            return  # no backward since the last step: nothing changes
        self.layout.refuse_changed(self.layout.buckets)
        if skip_unused:
            self.layout.fill_missing(self.ranks)
            self.send()
        else:
            self.layout.refuse_missing()
        late = self.late
        if self.profiler is not None:
            late = late and self.profiler.allows_late_updates
            self.profiler.called()
        self.finish_step(late=late)
        self.sent = 0
        if self.profiler is not None:
            self.profiler.now.averaged = self.profiler.watch.moment()

    def finish_step(self, *, late: bool) -> None:
        """Leaves the updates for later, or hands the means to the optimizer; drops them if the step is vetoed."""
        self.factor = self.job.decision(self.layout.overflow(self.largest)) if self.decides else 1.0
        waits, late = not late, (late or self.sharing is not None) and self.factor is not None
        if late:
            self.hyper = self.job.hyper()
        for bucket in self.layout.by_arrival:
            bucket.pending = late
            bucket.versions.clear()
            if not late:
                self.receive(bucket)
            if late or self.factor is None:
                bucket.detach()
        if self.sharing and self.factor is not None:
            self.sharing.start(self.layout.by_need, self.hyper, self.factor)
            if waits:
                self.drain()

    # ---- after the step

    def end_step(self) -> None:
        """After the last measured step: searches a plan and takes it."""
        if self.profiler is None or not self.profiler.stepped():
            return
        found = self.profiler.search_plan(next_forward=self.late)
        if found is None:
            self.change_plan(self.layout.plan, late=self.late)
            self.print_once("Overlap: no whole step in training mode was seen, so the first buckets stay")
            return
        plan, self.forecast, late, self.link = found
        self.change_plan(plan, late=late)

    def enter(self, layer: int) -> None:
        """Updates the buckets of a layer before its forward."""
        for bucket in self.layout.needed[layer]:
            self.update(bucket)
        if self.profiler is not None:
            self.profiler.entered(layer)

    def drain(self) -> None:
        """Updates all pending buckets."""
        for bucket in self.layout.by_arrival:
            self.update(bucket)

    def update(self, bucket: Bucket) -> None:
        """Updates a pending bucket when its mean has arrived."""
        if self.sharing:
            self.sharing.update(bucket)
        if not bucket.pending:
            return
        self.receive(bucket)
        bucket.pending = False
        with torch.inference_mode(False), self.full_precision, self.job.trace.span("update"):
            self.job.update([p for p in bucket.views if p not in bucket.idle], self.hyper)
        bucket.detach()

    def receive(self, bucket: Bucket) -> None:
        """Waits for a bucket (on a GPU its stream does), and gives its parameters their gradients."""
        with self.job.trace.span("wait", bytes=bucket.flat.nbytes):
            bucket.wait()
        self.job.trace.poll_transfers()
        if self.factor not in (None, 1.0):
            bucket.flat.mul_(self.factor)
        bucket.attach()

    # ---- plans and checkpoints

    def change_plan(self, plan: BucketPlan, *, late: bool) -> None:
        """Takes a plan and ends profiling; between two steps. The reducer's state belongs to the chunks so far."""
        self.drain()
        if self.profiler is not None:
            self.profiler.close()
            self.profiler = None
        self.reduce.load_state_dict({})
        self.late = self.late and (late or self.settings.shard)  # only the next forward can hide what is gathered
        self.key_prefix = "planned"
        self.layout = self.lay_out(plan, ranks=self.comm.size if self.settings.shard else 1)
        if self.settings.shard:
            self.sharing = self.sharing or SharedUpdates(self.job, self.comm, self.full_precision)
            self.sharing.share(self.layout)

    def state_dict(self) -> dict[str, Any]:
        """The plan that was searched, and the reducer's state."""
        plan, searched = self.layout.plan, {}
        if self.profiler is None:
            order = [[chunk.bucket, chunk.start, chunk.stop] for chunk in plan.order]
            buckets = [list(bucket) for bucket in plan.buckets]
            searched = {"groups": buckets, "order": order, "policy": plan.policy, "late": self.late}
        keeps = type(self.reduce).state_dict is not Reduce.state_dict  # by rank, and only one writes the checkpoint
        return {"plan": searched, "reduce": self.job.comm.gather_objects(self.reduce.state_dict()) if keeps else []}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on with the checkpoint's plan. Raises InputError for a plan of another model."""
        searched = state["plan"]
        if searched and isinstance(self.settings.buckets, Planned):
            buckets = tuple(tuple(bucket) for bucket in searched["groups"])
            if sorted(i for bucket in buckets for i in bucket) != list(range(len(self.layers.tensors))):
                raise InputError("checkpoint of Overlap: a plan for another model; resume with the run's recipe")
            order = tuple(Chunk(*chunk) for chunk in searched["order"])
            self.change_plan(BucketPlan(buckets, order, searched["policy"]), late=searched["late"])
        states = state["reduce"]
        self.reduce.load_state_dict(states[self.job.comm.rank] if len(states) == self.job.comm.size else {})


class FreeingEngine(Engine):
    """Allocates, uses and frees the buckets in backward: the `exchange` of the job's `in_backward`."""

    allocated = False

    def __init__(self, job: Job, settings: Overlap, updates: BackwardUpdates, *, vetoed: bool) -> None:
        self.updates = updates
        buckets = PerTensor() if isinstance(settings.buckets, Planned) else settings.buckets
        super().__init__(job, replace(settings, buckets=buckets, next_forward=False), job.step_comm, vetoed=vetoed)
        self.factors = self.comm.channel()
        self.factors.warm(self.layout.buckets[0].flat.device)  # now, and not in the first step
        self.updates.exchange = self

    def bucket_bytes(self, p: Tensor) -> int:
        return self.layout.bucket_of[p].nbytes

    def hold(self, p: Tensor) -> None:
        self.layout.bucket_of[p].versions[p] = None
        self.send()

    def arrive(self, p: Tensor) -> None:
        bucket = self.layout.bucket_of.get(p)
        self.updates.finish(wait=False)
        if bucket is not None and p not in bucket.versions:  # else refused in step(), or its layer holds factors
            self.allocate(bucket)
            super().arrive(p)

    def allocate(self, bucket: Bucket) -> None:
        """Allocates a bucket that is not, when there is memory for it."""
        if not bucket.flat.numel():
            self.updates.reserve(bucket.nbytes)
            bucket.allocate()

    def send_chunk(self, chunk: Chunk) -> None:
        bucket = self.layout.buckets[chunk.bucket]
        (p, *others), first = bucket.views, bucket.unsent == bucket.size
        if first and not others and (send_factors := self.updates.senders.get(p)) is not None:
            if send_factors():
                bucket.unsent = 0
            elif p.grad is not bucket.views[p]:
                self.allocate(bucket)
                self.layout.copy_in(p)
        if bucket.flat.numel():  # else its factors are sent
            super().send_chunk(chunk)
            bucket.pending = not bucket.unsent
            if bucket.pending:
                self.updates.enqueue(bucket.nbytes, bucket.works, partial(self.update, bucket))

    def update(self, bucket: Bucket) -> None:
        if bucket.pending:
            self.layout.refuse_changed([bucket])
            self.hyper = self.updates.settings()
            super().update(bucket)
            bucket.free()
            for p in bucket.views:
                self.updates.free_gradient(p)

    def finish_step(self, *, late: bool) -> None:
        """Waits for the buckets that are still under way, and updates them; the others were updated in backward."""
        self.updates.finish(wait=True)
        for bucket in self.layout.buckets:
            bucket.versions.clear()
            bucket.unsent = bucket.size
