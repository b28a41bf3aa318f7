"""The technique that hides the communication of gradients behind backward and behind the next forward."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from kasoku.core import Job, Stage, Technique, say
from kasoku.distributed.ddp.all_reduce import TWO_AVERAGES, start_equal
from kasoku.distributed.ddp.bucket_plan import Planned, Policy, table
from kasoku.distributed.ddp.compression import Mean, Reducer
from kasoku.distributed.ddp.overlap_engine import Engine, FreeingEngine, Replanning, refuse_retuning
from kasoku.distributed.ddp.sharded_update import refuse
from kasoku.distributed.ddp.step_profiler import StepProfiler


@dataclass(frozen=True)
class Overlap(Technique, stage=Stage.COMM, refuses=TWO_AVERAGES, exchanges_gradients=True, averages_gradients=True):
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
            the layers that need them. For SGD, AdamW, other rules by element, and LARS; see also Planned.shards.
            `job.drain()`, `close()`, every `state_dict()` and the first forward after a step, in evaluation too, are
            then collective: call `job.drain()` on all ranks before one of them uses the model alone.
        retune: where steps take 15 % more or less time for two windows of 15 steps, and half as many windows more after
            each choice (64 at most), layers and link are measured again; a plan that promises 2 % less is tried. Each
            time the reducer starts anew, without kept errors or factors. Needs Planned; not with shard, Planned.shards,
            Asynchronous, updates in backward.

    Saves: the time of communication, as far as compute covers it. Sharded: all but 1/N of updates and their state.
    Costs: a copy of the gradients; the reducer's state, in a checkpoint for every rank. The update waits for all
        gradients, and a line says so once, beside a technique that needs them whole (clipping), and with fp16 loss
        scaling where the reducer may make a finite gradient infinite (LowRank). With CUDA graphs no layer is waited
        for: backward hides nothing, and late updates end before the model's forward.
        A forward that reads parameters before it calls their layer (a weight penalty) needs next_forward = False.
        Sharded: two collectives a chunk, of the same bytes; a third one a bucket with LARS. While Planned measures,
        and at a checkpoint, which gathers the state, the peak memory is that of whole updates. No GPU has run it.
    Maths: g = mean over ranks of g; bit for bit the step that waits for the same buckets; sharded on two ranks, for
        rules by element. Elsewhere sums have another order.
    Ref: [000] 4.4; [003]; Jayarajan 2019 (P3, arXiv 1905.03960); Peng 2019 (ByteScheduler); ZeRO (arXiv 1910.02054).
    """

    overlaps_backward: ClassVar[bool] = True
    channels: ClassVar[int] = 1
    buckets: Policy = field(default_factory=Planned)
    next_forward: bool = True
    reducer: Reducer = field(default_factory=Mean)
    unused: Literal["refuse", "skip"] = "refuse"
    shard: bool = False
    retune: bool = False

    @property
    def skips_unused(self) -> bool:  # type: ignore[override]
        return self.unused == "skip"

    def apply(self, job: Job) -> None:
        if job.step_comm.size == 1:
            job.keep("overlap", SingleRank({"plan": {}, "reduce": []}))
            return
        start_equal(job, job.step_comm)
        updates = job.in_backward
        frees = updates is not None and not self.skips_unused and updates.active(exchanged=True)
        if may_shard := self.shard or (isinstance(self.buckets, Planned) and self.buckets.shards):
            refuse(job, self.reducer, frees=frees)
        if self.retune:
            refuse_retuning(job, self.buckets, shard=may_shard, frees=frees)
        if updates is not None and frees:
            engine: Engine = FreeingEngine(job, self, updates)
        else:
            engine = Engine(job, self, job.step_comm, vetoed=job.vetoes_steps)
        if frees and self.next_forward:
            say("Overlap: gradients are freed in backward, so no update waits for the next forward", job.comm.rank)
        job.gradient_ready(engine.arrive)
        job.before_step(engine.step)
        job.after_step(engine.end_step)
        job.on_drain(engine.drain)
        job.keep("overlap", engine)

        def document() -> dict[str, Any]:
            changes = {"retuned": engine.replanning.changes} if engine.replanning else {}
            return {"text": table(engine.layout.plan, engine.layers.tensors), **changes}

        job.document("buckets.json", document)
        engine.layers.before(job, engine.enter)
        model: Any = job.model
        job.on_close(model.register_state_dict_pre_hook(lambda *_: engine.drain()).remove)
        job.on_close(model.register_load_state_dict_pre_hook(lambda *_: engine.drain()).remove)
        job.on_close(engine.reduce.settle)
        if self.shard and not isinstance(self.buckets, Planned):
            engine.change_plan(engine.layout.plan, True)
        vetoed = job.vetoes_steps and not engine.decides
        reason = f"{type(self.reducer).__name__} may make gradients infinite, which a step must know" if vetoed else ""
        reason = "a technique needs all gradients before any update" if job.needs_whole_gradients else reason
        if engine.late and reason:
            engine.late = engine.may_be_late = False
            say(f"Overlap: {reason}, so it waits for all of them", job.comm.rank)
        if isinstance(self.buckets, Planned) and not frees:
            engine.profiler = StepProfiler(job, self.buckets, engine.comm, engine.reduce, engine.layers, engine.layout)
            engine.replanning = Replanning(engine, self.buckets) if self.retune else None


@dataclass
class SingleRank:
    """The state on one rank: empty. It ignores the state of several ranks, so that one can resume their run."""

    empty: dict[str, Any]

    def state_dict(self) -> dict[str, Any]:
        return self.empty

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass
