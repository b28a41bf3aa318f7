"""Ranks that train one set of weights without waiting for each other.

Note: dead ranks. In a training loop of the user's own, the other ranks name a dead rank in a warning and go on. Each
updates its own copy of the dead rank's pieces; at the next sync point these copies are averaged and all weights are
divided among the survivors. `job.comm` still contains the dead rank, so its collectives (an evaluation's sums,
synchronous steps) would wait for it. So under `kasoku train` all ranks end instead, and resume from a checkpoint
(distributed/liveness.py, Note: two policies).

Note: joining ranks. The other ranks call `close()`, which leaves equal weights, and form a new group and new jobs with
the joining rank. It gets rank 0's weights from `apply`, and may load rank 0's `state_dict`
(tests/distributed/test_joining.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from kasoku.core import InputError, Job, Stage, Technique
from kasoku.distributed.async_sgd.exchange import Exchange
from kasoku.distributed.async_sgd.exchange_settings import ExchangeSettings
from kasoku.distributed.async_sgd.quantization import CODECS
from kasoku.distributed.ddp.all_reduce import start_equal
from kasoku.distributed.ddp.bucket_plan import Graded, Policy
from kasoku.distributed.ddp.overlap import Overlap


@dataclass(frozen=True)
class Remedies:
    """Corrections for stale updates.

    Args:
        predict: computes gradients at the weights' predicted position: this multiple of the other ranks' last movement
            ahead; 0: no prediction. Below 0: 2 with hidden=True, where the weights read are that many exchanges old,
            else 0 (chosen by measurement: RECORDS.md).
        momentum: the optimizers' momentum between sync points, as several workers act like momentum themselves; rates
            are scaled so that a gradient moves the weights as far as before. Below 0: unchanged.

    Ref: predict: Sato 2017 (the [001] team). momentum: Mitliagkas et al. 2016 (arXiv 1605.09774).
    """

    predict: float = -1.0
    momentum: float = -1.0

    def __post_init__(self) -> None:
        if self.momentum >= 1:
            raise InputError(f"momentum={self.momentum}: from 0 to below 1, or below 0 to leave it as it is")


@dataclass(frozen=True)
class Asynchronous(Technique):
    """Adds each rank's updates to shared weights and reads fresh weights during the next step.

    `job.drain()`, `evaluation()`, `state_dict()` and `close()` are collective: they are sync points, after which all
    ranks have equal weights. Between them each rank has its own copy plus a prediction. `apply` broadcasts rank 0's
    parameters and buffers. A sync point averages floating-point buffers and takes the maximum of integer ones.

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
        predict = self.remedies.predict
        return predict if predict >= 0 else 2.0 * self.hidden

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
            job.keep("asynchronous", SingleRank())
        elif self.servers >= job.comm.size:
            raise InputError(f"servers={self.servers} of {job.comm.size} ranks: at least one rank must train")
        else:
            start_equal(job)
            Exchange(job, self._resolved()).install()

    def _resolved(self) -> ExchangeSettings:
        return ExchangeSettings(
            code=CODECS[self.wire],
            ahead=self.ahead,
            momentum=self.remedies.momentum if self.remedies.momentum >= 0 else None,
            max_staleness=self.max_staleness,
            buckets=self.buckets,
            servers=self.servers,
            every=self.every,
            hidden=self.hidden,
            stream=self.stream,
            warmup=self.warmup,
            finish=self.finish,
        )


class SingleRank:
    """The state of a single rank, which exchanges nothing."""

    def state_dict(self) -> dict[str, Any]:
        return {"staleness": {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass
