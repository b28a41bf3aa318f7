"""The technique that hides the communication of gradients behind backward and behind the next forward."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from kasoku.core import InputError, Job, Stage, Technique
from kasoku.distributed.ddp.all_reduce import start_equal
from kasoku.distributed.ddp.bucket_plan import Planned, Policy, table
from kasoku.distributed.ddp.compression import Mean, Reducer
from kasoku.distributed.ddp.engine import Engine
from kasoku.distributed.ddp.step_profiler import StepProfiler


@dataclass(frozen=True)
class Overlap(Technique):
    """Averages gradients over all ranks in planned buckets, hidden behind backward and behind the next forward.

    A gradient is copied into its bucket as it arrives. A bucket is sent when it is whole, and its parameters are
    updated when its mean has arrived: at the latest before the next forward of a layer with one of them. At `apply`
    all ranks copy rank 0's parameters and buffers. Call `job.drain()` before you read parameters; `state_dict()`,
    evaluation and `close()` drain themselves.

    Args:
        buckets: the policy that assigns gradients to buckets: Planned, OneGroup, Fixed, Graded, Layer.
        next_forward: False: the step waits for all buckets, as DDP does.
        reducer: how a chunk is averaged: Mean, Wire (bf16 or fp16), LowRank, Hierarchical.
        unused: a parameter without a gradient: "refuse" it, or "skip" it on ranks without (one more collective a step).
        show: print the plan once it is known.

    Saves: the time of communication, as far as compute covers it.
    Costs: a copy of the gradients; the reducer's state, in a checkpoint for every rank. With a technique that needs
        whole gradients (clipping, fp16 loss scaling) the update waits for all of them; a line says so once.
        A forward that reads parameters before it calls their layer (a weight penalty) needs next_forward = False.
    Maths: g = mean over ranks of g; bit for bit the step that waits for the same buckets.
    Ref: [000] 4.4; [003]; Jayarajan et al. 2019 (P3, arXiv 1905.03960); Peng et al. 2019 (ByteScheduler).
    """

    stage: ClassVar[Stage] = Stage.COMM
    refuses: ClassVar[tuple[str, ...]] = ("exchanges_gradients", "captures_graph")
    exchanges_gradients: ClassVar[bool] = True
    overlaps_backward: ClassVar[bool] = True
    channels: ClassVar[int] = 1
    buckets: Policy = field(default_factory=Planned)
    next_forward: bool = True
    reducer: Reducer = field(default_factory=Mean)
    unused: Literal["refuse", "skip"] = "refuse"
    show: bool = False

    def __post_init__(self) -> None:
        if self.unused not in ("refuse", "skip"):
            raise InputError(f'unused="{self.unused}": "refuse" or "skip"')

    def apply(self, job: Job) -> None:
        if job.comm.size == 1:
            job.keep("overlap", _OneRank())
            return
        start_equal(job)
        engine = Engine(
            job,
            self.buckets,
            reducer=self.reducer,
            next_forward=self.next_forward,
            skip_unused=self.unused == "skip",
            show=self.show,
        )
        engine.install()
        if isinstance(self.buckets, Planned):
            engine.listener = StepProfiler(engine, self.buckets)
        elif self.show:
            engine.print_once(table(engine.layout.plan, engine.layers.tensors))


class _OneRank:
    """The state on one rank: empty. It ignores the state of several ranks, so that one can resume their run."""

    def state_dict(self) -> dict[str, Any]:
        return {"plan": {}, "reduce": []}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass
