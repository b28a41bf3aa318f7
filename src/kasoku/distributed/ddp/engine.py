"""Averages gradients in buckets while backward runs, and updates parameters while the next forward runs.

Note: one static order. Ranks must issue collectives in the same order, and collectives cannot overtake each other. So
the chunks of all buckets are sent in the order of the plan, each when its bucket is whole and all chunks before it have
been sent, whatever the order in which gradients arrive.

Note: changes are detected. A gradient is copied into its bucket, and `p.grad` becomes a view of that memory with a
version counter of its own. A write to it (clipping by hand, a second backward) changes the counter.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from kasoku.core import Hyper, InputError, Job
from kasoku.core.torch_internals import version
from kasoku.distributed.ddp.bucket_buffers import Bucket, BucketLayout
from kasoku.distributed.ddp.bucket_plan import Planned, Policy, table
from kasoku.distributed.ddp.compression import Mean, Reduce, Reducer
from kasoku.distributed.ddp.cost_model import BucketPlan, Chunk, Forecast, LinkModel
from kasoku.distributed.ddp.layer_index import LayerIndex


class StepListener:
    """Is called at the moments of each step. This one does nothing; a profiler overrides it.

    Attributes:
        profiling: whether it measures steps.
        holds_back: nothing is sent before `optimizer.step()`.
        allows_late_updates: updates may wait for the next forward.
    """

    profiling: bool = False
    holds_back: bool = False
    allows_late_updates: bool = True

    def entered(self, layer: int) -> None:
        """The forward of a layer begins."""

    def arrived(self, p: Tensor) -> None:
        """The gradient of p is in its bucket."""

    def called(self) -> None:
        """`optimizer.step()` was called, and every bucket is whole."""

    def averaged(self) -> None:
        """The gradients are averaged, or will be before the next forward."""

    def stepped(self) -> None:
        """`optimizer.step()` has ended."""

    def close(self) -> None:
        """Nothing is measured any more."""


class Engine:
    """Overlap at work on one job.

    Attributes: `layout`: the buckets now; `forecast` and `link`: of the plan that was searched, if it was.
    """

    def __init__(
        self,
        job: Job,
        policy: Policy,
        *,
        reducer: Reducer | None = None,
        next_forward: bool = True,
        skip_unused: bool = False,
        show: bool = False,
    ) -> None:
        self.job, self.policy, self.late, self.skip_unused, self.show = job, policy, next_forward, skip_unused, show
        self.comm = job.comm.channel()  # gradients must not hold up the other collectives
        self.reduce: Reduce = (reducer or Mean()).bind(self.comm)
        self.layers = LayerIndex(job.model)
        self.listener = StepListener()
        self.hyper: Hyper = []
        self.sent, self.key_prefix = 0, "first"  # chunks of this step; of the reducer's keys
        if not self.layers.named:
            raise InputError(f"Overlap: {type(job.model).__name__} has no parameter that requires a gradient")
        self.forecast: Forecast | None = None
        self.link: LinkModel | None = None
        self.layout = BucketLayout(policy.plan(self.layers.tensors), self.layers)
        kind = self.layout.buckets[0].flat.device.type
        autocast = torch.amp.is_autocast_available(kind)
        self.full_precision = torch.autocast(kind, enabled=False) if autocast else nullcontext()

    def install(self) -> None:
        """Adds its hooks to the job."""
        job = self.job
        job.gradient_ready(self.arrive)
        job.before_step(self.step)
        job.after_step(lambda: self.listener.stepped())
        job.on_drain(self.drain)
        job.keep("overlap", self)
        job.document("buckets.json", lambda: {"text": table(self.layout.plan, self.layers.tensors)})
        self.layers.before(job, self.enter)
        saving: Any = job.model.register_state_dict_pre_hook
        job.undo(saving(lambda *_: self.drain()).remove)
        job.undo(self.reduce.settle)
        if job.needs_whole_gradients and self.late:
            self.late = False
            self.print_once("Overlap: a technique needs all gradients before any update, so it waits for all of them")

    def print_once(self, line: str) -> None:
        """Prints on rank 0."""
        if self.comm.rank == 0:
            print(f"kasoku: {line}", flush=True)

    # ---- in backward

    def arrive(self, p: Tensor) -> None:
        """Copies a whole gradient into its bucket, and sends the chunks whose turn has come."""
        member = self.layout.members.get(p)
        if member is None:
            return  # refused in step()
        if member.bucket.pending:
            layer = self.layers.modules[self.layers.users[p][0]][0] or "the model"
            raise InputError(
                f"Overlap: {member.name} got a gradient before its last update, since the forward of its layer "
                f"({layer}) was bypassed: call that module itself, or set next_forward = false"
            )
        if p.grad is not member.view:
            if p.grad is None or p.grad.layout != torch.strided:
                raise InputError(f"Overlap: {member.name} has a sparse gradient: dense ones only")
            member.view.copy_(p.grad)
            p.grad = member.view
        member.bucket.versions[p] = version(member.view)
        self.listener.arrived(p)
        if member.bucket.whole:
            self.send()

    def send(self) -> None:
        """Sends the chunks whose turn has come, in the plan's order."""
        if self.listener.holds_back:
            return
        self.job.trace.poll_transfers()
        order, buckets = self.layout.plan.order, self.layout.buckets
        while self.sent < len(order) and buckets[order[self.sent].bucket].whole:
            self.send_chunk(order[self.sent])
            self.sent += 1

    def send_chunk(self, chunk: Chunk) -> None:
        """Sends one chunk; the reducer keeps its state by the chunk's key."""
        bucket = self.layout.buckets[chunk.bucket]
        key = f"{self.key_prefix} {chunk.bucket}:{chunk.start}"
        x = bucket.flat[chunk.start : chunk.stop]
        bucket.works.append(self.job.trace.transfer(f"bucket {chunk.bucket}", x, self.reduce(key, x)))

    # ---- at the step

    def step(self) -> None:
        """Sends all chunks; parameters are updated as the means arrive, or at once where updates cannot be late."""
        self.layout.refuse_unknown(self.job.optimizer)
        # gradients of layers that only some of the accumulated backward passes used
        for m in [m for m in self.layout.missing() if m.p.grad is not None]:
            self.drain()
            self.arrive(m.p)
        if not any(bucket.versions for bucket in self.layout.buckets) and not self.skip_unused:
            self.drain()
            return  # no backward since the last step: nothing changes
        self.layout.refuse_changed()
        if self.skip_unused:
            self.drain()
            self.layout.fill_missing(self.job.comm)
            self.send()
        else:
            self.layout.refuse_missing()
        late = self.late and self.listener.allows_late_updates
        self.listener.called()
        if late:
            hyper = self.job.hyper()  # as they are now: a scheduler may change them in place
            self.hyper = [{k: v.clone() if isinstance(v, Tensor) else v for k, v in g.items()} for g in hyper]
        for bucket in self.layout.by_arrival:
            if not late:
                self.wait(bucket)
            bucket.pending = late
            if late:
                bucket.detach()
            else:
                bucket.attach()
            bucket.versions.clear()
        self.sent = 0
        self.listener.averaged()

    # ---- after the step

    def enter(self, layer: int) -> None:
        """Updates the buckets of a layer before its forward."""
        for bucket in self.layout.needed[layer]:
            self.update(bucket)
        self.listener.entered(layer)

    def drain(self) -> None:
        """Updates all pending buckets."""
        for bucket in self.layout.by_arrival:
            self.update(bucket)

    def update(self, bucket: Bucket) -> None:
        """Updates a pending bucket when its mean has arrived."""
        if not bucket.pending:
            return
        self.wait(bucket)
        bucket.pending = False
        bucket.attach()
        with torch.inference_mode(False), self.full_precision, self.job.trace.span("update"):
            self.job.update([m.p for m in bucket.members if m.p not in bucket.idle], self.hyper)
        bucket.detach()

    def wait(self, bucket: Bucket) -> None:
        """Waits for a bucket; on a GPU its stream does."""
        with self.job.trace.span("wait", bytes=bucket.flat.nbytes):
            bucket.wait()
        self.job.trace.poll_transfers()

    # ---- plans and checkpoints

    def change_plan(self, plan: BucketPlan, *, late: bool) -> None:
        """Changes to a plan and ends profiling; between two steps."""
        self.stop_profiling()
        self.late = self.late and late
        self.key_prefix = "planned"
        self.layout = BucketLayout(plan, self.layers)

    def stop_profiling(self) -> None:
        """Ends profiling. The reducer's state so far belongs to other chunks than those of the plan."""
        self.listener.close()
        self.listener = StepListener()
        self.reduce.load_state_dict({})

    def state_dict(self) -> dict[str, Any]:
        """The plan that was searched, and the reducer's state."""
        plan, searched = self.layout.plan, {}
        if not self.listener.profiling:
            order = [[chunk.bucket, chunk.start, chunk.stop] for chunk in plan.order]
            buckets = [list(bucket) for bucket in plan.buckets]
            searched = {"groups": buckets, "order": order, "policy": plan.policy, "late": self.late}
        own = self.reduce.state_dict()  # errors not sent yet differ by rank, and only one rank writes the checkpoint
        return {"plan": searched, "reduce": self.job.comm.gather_objects(own) if own else []}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on with the checkpoint's plan. Raises InputError for a plan of another model."""
        searched = state["plan"]
        if searched and isinstance(self.policy, Planned):
            buckets = tuple(tuple(bucket) for bucket in searched["groups"])
            if sorted(i for bucket in buckets for i in bucket) != list(range(len(self.layers.tensors))):
                raise InputError("checkpoint of Overlap: a plan for another model; resume with the run's recipe")
            order = tuple(Chunk(*chunk) for chunk in searched["order"])
            self.change_plan(BucketPlan(buckets, order, searched["policy"]), late=searched["late"])
        states = state["reduce"]
        self.reduce.load_state_dict(states[self.comm.rank] if len(states) == self.comm.size else {})
