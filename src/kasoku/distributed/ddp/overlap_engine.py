"""The engine of Overlap: sends buckets of gradients, and updates their parameters when the means arrive.

Note: one static order. Ranks must issue collectives in the same order, and collectives cannot overtake each other. So
the chunks of all buckets are sent in the order of the plan, each when its bucket is whole and all chunks before it have
been sent, whatever the order in which gradients arrive.

Note: changes are detected. A gradient is copied into its bucket, and `p.grad` becomes a view of that memory with a
version counter of its own. A write to it (clipping by hand, a second backward) changes the counter.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kasoku.core import Adaptive, Comm, Hyper, InputError, Job, say
from kasoku.core.backward_updates import BackwardUpdates
from kasoku.distributed.ddp.bucket_buffers import Bucket, BucketLayout
from kasoku.distributed.ddp.bucket_plan import PerTensor, Planned, Policy
from kasoku.distributed.ddp.compression import Reduce
from kasoku.distributed.ddp.cost_model import BucketPlan, Chunk, Forecast, LinkModel
from kasoku.distributed.ddp.layer_index import LayerIndex
from kasoku.distributed.ddp.sharded_update import SharedUpdates
from kasoku.distributed.ddp.step_profiler import StepProfiler

_MEASURED = 3  # steps of each kind, at most, for a later plan


class Engine:
    """Overlap at work on one job; `vetoed`: a technique decides at each step whether any parameter changes."""

    allocated = True  # the buffers are there all the time

    def __init__(self, job: Job, settings: Any, ranks: Comm, *, vetoed: bool) -> None:
        self.job, self.settings = job, settings
        self.late = self.may_be_late = settings.next_forward
        self.ranks, self.comm = ranks, ranks.channel()  # gradients must not hold up the other collectives
        self.reduce = settings.reducer.bind(self.comm)
        self.layers = LayerIndex(job.model, whole=any(technique.captures_graph for technique in job.applied))
        self.profiler: StepProfiler | None = None  # measures steps for the search of a plan
        self.replanning: Replanning | None = None
        self.hyper: Hyper = []
        self.sent, self.key_prefix = 0, "first"  # chunks of this step; of the reducer's keys
        self.forecast: Forecast | None = None  # of the plan that was searched, if it was
        self.link: LinkModel | None = None
        least_max = min(torch.finfo(p.dtype).max for _, p in self.layers.named)
        exact = ranks.size.bit_count() == 1 and least_max > torch.finfo(torch.float16).max  # division by the ranks
        if exact and type(self.reduce) is Reduce and self.reduce.comm is self.comm:
            self.reduce.scale = 1 / ranks.size  # saves a pass over all gradients after the all-reduce
        self.largest = min(settings.reducer.largest(self.comm.size), least_max / self.comm.size)  # 0: not known
        self.decides = vetoed and self.largest > 0
        self.lay_out = partial(BucketLayout, layers=self.layers, allocated=self.allocated, notes_ranges=self.decides)
        self.layout = self.lay_out(settings.buckets.plan(self.layers.tensors))
        self.factor: float | None = 1.0  # of this step's gradients; None: no parameter changes
        kind = self.layout.buckets[0].flat.device.type
        autocasts = torch.amp.is_autocast_available(kind)
        self.full_precision = torch.autocast(kind, enabled=False) if autocasts else nullcontext()
        shard = settings.shard or getattr(settings.buckets, "shards", False)
        self.shares = SharedUpdates(job, self.comm, self.full_precision, self.reduce.scale) if shard else None
        self.sharing: SharedUpdates | None = None  # `shares`, from the first plan that is not measured

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
        self.layout.copy_in(p, self.reduce.scale)
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
        while self.sent < len(order) and (bucket := buckets[order[self.sent].bucket]).whole:
            if any(p.requires_grad for p in bucket.views):  # else all were frozen since
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
            self.layout.fill_missing(self.ranks, self.job.trace)
        else:
            self.layout.refuse_missing()
        self.send()
        late = self.late and (self.profiler is None or self.profiler.allows_late_updates)
        if self.profiler is not None:
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
        if self.profiler is None:
            if self.replanning:  # measures without a profiler: resumed
                (self.replanning.choose if self.replanning.measures else self.replanning.end_step)()
            return
        if not self.profiler.stepped():
            return
        again = self.replanning if self.replanning and self.replanning.measures else None
        found = self.profiler.search_plan(next_forward=self.may_be_late, now_late=self.late if again else None)
        if again:
            again.end_measuring(found)
        elif found is None:
            self.change_plan(self.layout.plan, self.late)
            say("Overlap: no whole step in training mode was seen, so the first buckets stay", self.job.comm.rank)
        else:
            plan, self.forecast, late, self.link = found
            self.change_plan(plan, late)

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

    def change_plan(self, plan: BucketPlan, late: bool) -> None:
        """Takes a plan and ends profiling; between two steps. The reducer's state belongs to the chunks so far."""
        self.drain()
        if self.profiler is not None:
            self.profiler.close()
            self.profiler = None
        self.reduce.load_state_dict({})
        shard = self.settings.shard or (plan.ranks > 1 and self.settings.buckets.shards)
        plan = replace(plan, ranks=self.comm.size if shard else 1)
        self.late = self.may_be_late and (late or shard)  # the next forward hides gathers
        self.layout, self.key_prefix = self.lay_out(plan), "planned"
        self.sharing = self.shares if shard else None
        if self.sharing:
            self.sharing.share(self.layout)

    def state_dict(self) -> dict[str, Any]:
        """The plan that was searched, the reducer's state, and what decides on later plans."""
        known = self.profiler is None or (self.replanning and self.replanning.measures)
        searched = self.layout.plan.state_dict(self.late) if known else {}
        keeps = type(self.reduce).state_dict is not Reduce.state_dict  # by rank, and only one writes the checkpoint
        reduce = self.job.comm.gather_objects(self.reduce.state_dict()) if keeps else []
        retune = self.replanning.state_dict() if self.replanning else {}
        return {"plan": searched, "order": [*self.layers.order], "reduce": reduce, "retune": retune}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on with the checkpoint's plan. Raises InputError for a plan of another model."""
        if state["plan"] and isinstance(self.settings.buckets, Planned):
            if sorted(order := state.get("order", [])) == [*range(len(self.layers.modules))]:  # compiled as then
                self.layers.order = order
            self.change_plan(*BucketPlan.of_state(state["plan"], len(self.layers.tensors)))
        if state.get("retune") and self.replanning:
            self.replanning.load_state_dict(state["retune"])
        states = state["reduce"]
        self.reduce.load_state_dict(states[self.job.comm.rank] if len(states) == self.job.comm.size else {})


def refuse_retuning(job: Job, buckets: Policy, *, shard: bool, frees: bool) -> None:
    """Raises InputError where buckets cannot be planned again. `frees`: gradients are freed in backward."""
    advice = "" if isinstance(buckets, Planned) else f"take buckets = Planned in place of {type(buckets).__name__}"
    advice = (
        "leave shard out, and shards of Planned"
        if shard
        else "set in_backward = false in SavedMemory"
        if frees
        else advice
    )
    advice = "leave Asynchronous out" if any(technique.is_asynchronous for technique in job.applied) else advice
    if advice:
        raise InputError(f"Overlap(retune=true): buckets cannot be planned again: {advice}, or set retune = false")


class Replanning(Adaptive):
    """The buckets of an engine. Attributes: `measures`: the steps now under way are measured for a new plan."""

    name = "buckets"
    saved = (*Adaptive.saved, "measures")  # steps that were being measured are measured again, after the next one

    def __init__(self, engine: Engine, policy: Planned) -> None:
        super().__init__(engine.job, engine.layout.buckets[0].flat.device)
        self.engine, self.policy = engine, replace(policy, warm=0, measure=min(policy.measure, _MEASURED))
        self.measures = False

    def values(self, step_s: float, owns: Sequence[float]) -> Sequence[float]:
        return [step_s]

    def choose(self, owns: Sequence[float] = ()) -> None:
        engine, self.measures = self.engine, True
        engine.drain()
        engine.profiler = StepProfiler(self.job, self.policy, engine.comm, engine.reduce, engine.layers, engine.layout)

    def end_measuring(self, found: tuple[BucketPlan, Forecast, bool, LinkModel] | None) -> None:
        """Takes the plan that was found, or goes on with the present one."""
        engine, self.measures = self.engine, False
        now, late = engine.layout.plan, engine.late
        if found is None:
            engine.change_plan(now, late)
            self.chosen("")
            return
        plan, engine.forecast, new_late, engine.link = found
        engine.change_plan(plan, new_late)
        what = f"{len(plan.buckets)} in {len(plan.order)} chunks instead of {len(now.buckets)} in {len(now.order)}"
        self.chosen(f"{what} (an all-reduce moves {engine.link.bytes_per_s / 1e6:,.0f} MB/s)", now.state_dict(late))

    def take(self, setting: Any) -> None:
        self.engine.change_plan(*BucketPlan.of_state(setting, len(self.engine.layers.tensors)))


class FreeingEngine(Engine):
    """Allocates, uses and frees the buckets in backward: the `exchange` of the job's `in_backward`."""

    allocated = False

    def __init__(self, job: Job, settings: Any, updates: BackwardUpdates) -> None:
        self.updates = updates
        buckets = PerTensor() if isinstance(settings.buckets, Planned) else settings.buckets
        super().__init__(job, replace(settings, buckets=buckets, next_forward=False), job.step_comm, vetoed=False)
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
                self.layout.copy_in(p, self.reduce.scale)
        if bucket.flat.numel():  # else its factors are sent
            super().send_chunk(chunk)
            bucket.pending = not bucket.unsent
            if bucket.pending:
                self.updates.enqueue(bucket.nbytes, bucket.works, partial(self.update, bucket))

    def update(self, bucket: Bucket) -> None:
        if bucket.pending:
            self.layout.refuse_changed([bucket])
            self.hyper = self.updates.settings()
            bucket.idle = frozenset(p for p in bucket.views if not p.requires_grad)
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
