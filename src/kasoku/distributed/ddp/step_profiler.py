"""Measures the first steps of a training for the search of a bucket plan: layers, link, both beside each other.

Note: times of layers. The forward of a layer lasts until the next layer is entered; its backward lasts from the last
gradient of the layer behind it to its own last gradient. The time between two steps (data) belongs to a unit of its own
in front, without parameters; loss and accumulated passes count as backward of the last layer.

Note: background transfers. Zeros are sent beside the compute of a step, and should outlast it. If those of all
gradients are too short, the same zeros are sent several times: the reducer's state for them is then wrong, and is
thrown away with the first plan.
"""

import itertools
import math
import operator
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from kasoku.core import Comm, Job, Work
from kasoku.core.clock import Stopwatch
from kasoku.distributed.ddp.bucket_buffers import BucketLayout
from kasoku.distributed.ddp.bucket_plan import MIB, Planned, cut, search
from kasoku.distributed.ddp.compression import Reduce
from kasoku.distributed.ddp.cost_model import BucketPlan, Forecast, LinkModel, Sized, UnitTimes, forecast
from kasoku.distributed.ddp.layer_index import LayerIndex

_KINDS = ("alone", "beside")  # gradients are sent after backward; the same, and compute runs beside transfers
_CHUNK = 4 * MIB  # the least of a plan's, up to 64 MiB of gradients: small ones cost more processor time
_LONGER = 1.25  # transfers beside compute should take this many times as long
_MOST = 8  # but have at most this many times the bytes of all gradients
_LATENCIES = 2  # empty all-reduces that are timed
_SHARE = 50  # of this many steps of an epoch, one of each kind is measured
_LEAST_SHARE = 0.3  # of a speed; less is noise
_WORTH = 0.98  # of the step with the present plan: another one must promise less


@dataclass
class StepMoments:
    """The moments of one step; None until they come."""

    begin: Any = None
    entered: dict[int, Any] = field(default_factory=dict)  # forwards of layers
    out: Any = None  # the first forward of the step has ended
    arrived: dict[int, Any] = field(default_factory=dict)  # the last gradient of each layer
    called: Any = None  # optimizer.step()
    background_done: Any = None  # the transfers beside compute have ended
    transfer_s: float = 0.0
    averaged: Any = None  # or they will be before the next forward
    end: Any = None


class StepProfiler:
    """Times an empty all-reduce and steps of two kinds; then rank 0 searches a plan for all."""

    def __init__(
        self, job: Job, settings: Planned, comm: Comm, reduce: Reduce, layers: LayerIndex, layout: BucketLayout
    ) -> None:
        self.job, self.reduce, self.layers, self.layout, self.shards = job, reduce, layers, layout, settings.shards
        self.ranks = job.step_comm  # of now: in a synchronous phase other nodes, which may have a plan, step along
        batches = operator.length_hint(job.loader)  # 0: not known
        most = max(1, batches // job.accumulate // _SHARE) if batches else settings.measure
        each = min(settings.measure, most)
        self.steps: dict[str, list[StepMoments]] = {kind: [] for kind in ("warm", *_KINDS)}
        self.sending_s: list[float] = []  # of all gradients, after each step alone
        self.zeros: tuple[Tensor, ...] = ()  # as many bytes as all gradients, in chunks
        self.transfers = 0  # beside each step
        self.background: list[Work] = []
        self.done, self.now = 0, StepMoments()
        flat = layout.buckets[0].flat
        self.watch = Stopwatch(job.clock, flat.device)
        self.device = torch.device("cpu") if flat.is_meta else flat.device
        least = torch.tensor(-float(each), device=self.device)
        moments = []
        for _ in range(1 + _LATENCIES):
            comm.all_reduce(least, op="max").wait()
            moments.append(self.watch.synchronize())
        self.latency_s = statistics.median_low(b - a for a, b in itertools.pairwise(moments))  # no rank was late
        each = round(-least.item())
        self.kinds = ["warm"] * (settings.warm + 1) + [*_KINDS] * each  # the first one has no begin
        self.hook = job.model.register_forward_hook(lambda *_: self.output())
        job.on_close(self.close)

    def close(self) -> None:
        """Waits for its transfers and frees its memory."""
        self.hook.remove()  # first: waiting fails if another rank has died
        self.wait_background()
        self.zeros, self.steps = (), {}
        vars(self).pop("layout", None)  # its buckets: the job keeps this object until its end

    @property
    def holds_back(self) -> bool:
        """In a measured step nothing is sent before `optimizer.step()`, so that compute is seen alone."""
        return self.kinds[self.done] in _KINDS

    @property
    def allows_late_updates(self) -> bool:
        """Updates may wait for the next forward if neither it nor this step is measured."""
        return not self.holds_back and self.kinds[self.done + 1] not in _KINDS

    # ---- moments

    def entered(self, layer: int) -> None:
        """The forward of a layer begins."""
        if self.now.out is None and self.job.model.training and not self.job.rehearses:
            self.now.entered.setdefault(layer, self.watch.moment())

    def output(self) -> None:
        """The model's forward has ended. Evaluation before a step does not belong to the step."""
        if not self.job.model.training:
            if not self.now.entered and self.now.begin is not None:
                self.now.begin = self.watch.moment()
        elif self.now.out is None:
            self.now.out = self.watch.moment()

    def arrived(self, p: Tensor) -> None:
        """The gradient of p is in its bucket."""
        self.now.arrived[self.layers.users[p][0]] = self.watch.moment()

    def called(self) -> None:
        """`optimizer.step()` was called, and all buckets are whole: sends those that were held back, and times that."""
        self.now.called = self.watch.moment()
        if not self.holds_back:
            return
        with self.job.trace.span("wait", "a measurement of the link"):
            self.wait_background()
            self.now.background_done = self.watch.moment()
            begin = self.watch.synchronize()
            for chunk in cut(self.layout.plan.buckets, self.layers.tensors, _CHUNK):
                self.layout.send(chunk, "measured", self.reduce, self.job.trace)
            for bucket in self.layout.buckets:
                bucket.wait()
            self.now.transfer_s = self.watch.synchronize() - begin

    def stepped(self) -> bool:
        """`optimizer.step()` has ended; returns whether it was the last step to measure."""
        self.wait_background()  # if there was no backward
        self.now.end = self.watch.moment()
        kind = self.kinds[self.done]
        whole = None not in (self.now.begin, self.now.out, self.now.called)
        if whole and (kind != "beside" or self.zeros):  # without zeros nothing was sent beside it
            self.steps[kind].append(self.now)
        self.done += 1
        self.watch.synchronize()
        if self.done == len(self.kinds):
            return True
        if self.kinds[self.done] == "beside":
            self.start_background()
        self.now = StepMoments(begin=self.watch.moment())
        return False

    def start_background(self) -> None:
        """All ranks agree on the times of a step alone; the first time, on how much to send beside compute."""
        last = self.steps["alone"][-1:]
        alone_s = [self.watch.seconds(s.begin, s.called) for s in last] or [0.0]
        sending_s = [s.transfer_s for s in last] or [math.inf]
        with self.job.trace.span("wait", "a measurement of the link"):
            computes_s, sendings_s = zip(*self.ranks.gather_objects((*alone_s, *sending_s)), strict=True)
        compute_s, sent_s = max(computes_s), min(sendings_s)  # the last rank waits for none
        if math.isinf(sent_s):  # no rank has seen such a step so far; if none ever does, Overlap prints it
            return
        self.sending_s.append(max(sent_s, 1e-9))
        if not self.zeros:
            total_bytes = sum(t.size for t in self.layers.tensors)
            flat = self.layout.buckets[0].flat
            step = max(1, min(_CHUNK, total_bytes) // flat.element_size())
            self.zeros = torch.split(flat.new_zeros(total_bytes // flat.element_size()), step)
            passes = _LONGER * compute_s / self.sending_s[0]
            self.transfers = min(_MOST * len(self.zeros), math.ceil(passes * len(self.zeros)))
        for k in range(self.transfers):
            part = k % len(self.zeros)
            self.background.append(self.reduce(f"beside {part}", self.zeros[part]))

    def wait_background(self) -> None:
        while self.background:
            self.background.pop(0).wait()

    # ---- the plan

    def search_plan(
        self, *, next_forward: bool, now_late: bool | None = None
    ) -> tuple[BucketPlan, Forecast, bool, LinkModel] | None:
        """The result of rank 0's `search`, and the link; None if a rank saw no whole step. Collective.

        With `now_late` (whether updates are late now) also None if no plan promises 2 % less time than the present one.
        """
        layers, comm, n = self.layers, self.ranks, len(self.layers.modules)
        alone, beside = (self.steps[kind] for kind in _KINDS)
        rows = comm.gather_objects(medians(alone, beside, self.watch, n) if alone and beside else None)
        if None in rows:
            return None
        result: Any = None
        if comm.rank == 0:
            called = list(alone[0].entered)
            layers.order = [*called, *(i for i in range(n) if i not in called)]
            tensors = [Sized(t.unit + 1, t.elements, t.size, t.kind) for t in layers.tensors]
            sizes = [0] * (n + 1)
            for t in tensors:
                sizes[t.unit] += t.size
            values = [statistics.fmean(column) for column in zip(*rows, strict=True)]
            *_, update_s, alone_s, beside_s, rest_s = values
            units = [UnitTimes("", values[0], values[n + 1])]
            for i, size in zip(layers.order, sizes[1:], strict=True):
                name, own_update_s = layers.modules[i][0], update_s * size / sum(sizes)
                units.append(UnitTimes(name, values[1 + i], values[n + 2 + i], own_update_s))
            transfer_s = statistics.median_low(self.sending_s)
            latencies_s = len(cut(self.layout.plan.buckets, tensors, _CHUNK)) * self.latency_s
            moving_s = max(transfer_s - latencies_s, 0.1 * transfer_s, 1e-9)
            kept = shares(alone_s, beside_s, rest_s, self.transfers / len(self.zeros) * transfer_s)
            link = LinkModel(self.latency_s, sum(t.size for t in tensors) / moving_s, *kept)
            plan, seen, late = search(units, tensors, link, next_forward=next_forward)
            if self.shards:
                sharded = replace(plan, ranks=comm.size, policy=f"{plan.policy}, updates shared")
                other = forecast(units, tensors, sharded, link, next_forward=next_forward)
                if other.step_s < seen.step_s:
                    plan, seen, late = sharded, other, next_forward
            result = (layers.order, (plan, seen, late, link))
            if now_late is not None:
                now = forecast(units, tensors, self.layout.plan, link, next_forward=now_late)
                if seen.step_s >= _WORTH * now.step_s:
                    result = (layers.order, None)
        layers.order, found = comm.broadcast_object(result)
        return cast(tuple[BucketPlan, Forecast, bool, LinkModel] | None, found)


def medians(alone: Sequence[StepMoments], beside: Sequence[StepMoments], watch: Stopwatch, layers: int) -> list[float]:
    """Medians in seconds: forward of the start and of each layer by its number, the same for backward, the update, then
    the compute of both kinds of steps.

    `alone`: steps that send after backward. `beside`: steps that compute beside transfers; the last value is what these
    took after the end of compute.
    """
    numbers = range(layers)
    rows = []
    for step in alone:
        moments = [step.begin, *step.entered.values(), step.out]
        forward = dict(zip([-1, *step.entered], itertools.pairwise(moments), strict=True))
        backward: dict[int, float] = {}
        passed = 0.0
        for i in reversed([*step.entered, *(i for i in numbers if i not in step.entered)]):
            now = watch.seconds(step.out, step.arrived[i]) if i in step.arrived else passed
            backward[i] = max(0.0, now - passed)
            passed = max(passed, now)
        backward[-1] = max(0.0, watch.seconds(step.out, step.called) - passed)
        forward_s = [watch.seconds(*forward[i]) if i in forward else 0.0 for i in (-1, *numbers)]
        rows.append([*forward_s, *(backward[i] for i in (-1, *numbers)), watch.seconds(step.averaged, step.end)])
    columns = [statistics.median_low(column) for column in zip(*rows, strict=True)]
    alone_s = statistics.median_low([watch.seconds(s.begin, s.called) for s in alone])
    beside_s = statistics.median_low([watch.seconds(s.begin, s.called) for s in beside])
    rest_s = statistics.median_low([watch.seconds(s.called, s.background_done) for s in beside])
    return [*columns, alone_s, beside_s, rest_s]


def shares(alone_s: float, beside_s: float, rest_s: float, sent_s: float) -> tuple[float, float]:
    """The fractions of their speeds that compute and transfers keep beside each other.

    Compute took `alone_s`, and `beside_s` beside transfers; these went on for `rest_s`, and take `sent_s` alone.
    """
    if rest_s > 0.02 * beside_s:  # transfers ran during all of the compute
        compute, link = alone_s / beside_s, (sent_s - rest_s) / beside_s
    else:
        compute, link = 1 - (beside_s - alone_s) / max(sent_s, 1e-9), 1.0
    return min(1.0, max(_LEAST_SHARE, compute)), min(1.0, max(_LEAST_SHARE, link))
