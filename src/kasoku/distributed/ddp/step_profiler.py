"""Measures the first steps of a training for the search of a bucket plan: layers, link, both beside each other."""

from __future__ import annotations

import itertools
import math
import operator
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kasoku.core import Work
from kasoku.distributed.ddp.bucket_plan import MIB, Planned, cut, search
from kasoku.distributed.ddp.compression import Reduce
from kasoku.distributed.ddp.cost_model import Sized
from kasoku.distributed.ddp.engine import Engine, StepListener
from kasoku.distributed.ddp.step_times import StepMoments, Stopwatch, link_model, medians, shares, unit_times

_KINDS = ("alone", "beside")  # gradients are sent after backward; the same, and compute runs beside transfers
_CHUNK = 2 * MIB
_LONGER = 1.25  # transfers beside compute should take this many times as long
_MOST = 8  # but have at most this many times the bytes of all gradients
_LATENCIES = 2  # empty all-reduces that are timed
_SHARE = 50  # of this many steps of an epoch, one of each kind is measured


class BackgroundTransfers:
    """Transfers of zeros that run beside the compute of a step, and should outlast it.

    If those of all gradients are too short, the same zeros are sent several times: the reducer's state for them is then
    wrong, and is thrown away with the first plan.
    """

    def __init__(self) -> None:
        self.parts: tuple[Tensor, ...] = ()  # of one pass over all gradients
        self.count = 0  # transfers beside each step
        self.works: list[Work] = []

    def size(self, like: Tensor, total_bytes: int, passes: float) -> None:
        """Makes parts of `total_bytes` in all, of the type of `like`, to be sent `passes` times or at most _MOST."""
        elements = total_bytes // like.element_size()
        zeros = torch.zeros(elements, dtype=like.dtype, device=like.device)
        step = max(1, min(_CHUNK, total_bytes) // like.element_size())
        self.parts = tuple(zeros[start : start + step] for start in range(0, elements, step))
        self.count = min(_MOST * len(self.parts), math.ceil(passes * len(self.parts)))

    def start(self, reduce: Reduce) -> None:
        for k in range(self.count):
            part = k % len(self.parts)
            self.works.append(reduce(f"beside {part}", self.parts[part]))

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works.clear()


class StepProfiler(StepListener):
    """Times an empty all-reduce and steps of two kinds, then hands the engine the plan that rank 0 finds."""

    profiling = True

    def __init__(self, engine: Engine, settings: Planned) -> None:
        self.engine = engine
        batches = operator.length_hint(engine.job.loader)  # 0: not known
        most = max(1, batches // engine.job.accumulate // _SHARE) if batches else settings.measure
        each = min(settings.measure, most)
        self.steps: dict[str, list[StepMoments]] = {kind: [] for kind in ("warm", *_KINDS)}
        self.sending_s: list[float] = []  # of all gradients, after each step alone
        self.background = BackgroundTransfers()
        self.done, self.now = 0, StepMoments()
        flat = engine.layout.buckets[0].flat
        self.watch = Stopwatch(engine.job.clock, cuda=flat.is_cuda)
        self.device = torch.device("cpu") if flat.is_meta else flat.device
        self.latency_s, each = self.measure_latency(each)
        self.kinds = ["warm"] * (settings.warm + 1) + [*_KINDS] * each  # the first one has no begin
        self.hook = engine.job.model.register_forward_hook(lambda *_: self.output())
        engine.job.undo(self.close)

    def close(self) -> None:
        """Waits for its transfers and frees its memory."""
        self.hook.remove()  # first: waiting fails if another rank has died
        self.background.wait()
        self.background.parts, self.steps = (), {}

    def measure_latency(self, each: int) -> tuple[float, int]:
        """Seconds of an all-reduce of one number for which no rank is late, and the minimum of `each` over ranks."""
        least = torch.tensor(-float(each), device=self.device)
        moments = []
        for _ in range(1 + _LATENCIES):
            self.engine.comm.all_reduce(least, op="max").wait()
            moments.append(self.watch.synchronize())
        return statistics.median_low(b - a for a, b in itertools.pairwise(moments)), round(-least.item())

    @property
    def holds_back(self) -> bool:  # type: ignore[override]
        """In a measured step nothing is sent before `optimizer.step()`, so that compute is seen alone."""
        return self.kinds[self.done] in _KINDS

    @property
    def allows_late_updates(self) -> bool:  # type: ignore[override]
        """Updates may wait for the next forward if neither it nor this step is measured."""
        return not self.holds_back and self.kinds[self.done + 1] not in _KINDS

    # ---- moments

    def entered(self, layer: int) -> None:
        if self.now.out is None and self.engine.job.model.training:
            self.now.entered.setdefault(layer, self.watch.moment())

    def output(self) -> None:
        """The model's forward has ended. Evaluation before a step does not belong to the step."""
        if not self.engine.job.model.training:
            if not self.now.entered and self.now.begin is not None:
                self.now.begin = self.watch.moment()
        elif self.now.out is None:
            self.now.out = self.watch.moment()

    def arrived(self, p: Tensor) -> None:
        self.now.arrived[self.engine.layers.users[p][0]] = self.watch.moment()

    def called(self) -> None:
        """Sends the gradients that were held back, and times that."""
        self.now.called = self.watch.moment()
        if not self.holds_back:
            return
        self.background.wait()
        self.now.background_done = self.watch.moment()
        engine = self.engine
        begin = self.watch.synchronize()
        engine.key_prefix = "measured"
        for chunk in cut(engine.layout.plan.buckets, engine.layers.tensors, _CHUNK):
            engine.send_chunk(chunk)
        engine.key_prefix = "first"
        for bucket in engine.layout.buckets:
            bucket.wait()
        self.now.transfer_s = self.watch.synchronize() - begin

    def averaged(self) -> None:
        self.now.averaged = self.watch.moment()

    def stepped(self) -> None:
        """Notes the step; after the last one, makes the plan."""
        self.background.wait()  # if there was no backward
        self.now.end = self.watch.moment()
        kind = self.kinds[self.done]
        if self.now.whole and (kind != "beside" or self.background.parts):  # without parts nothing was sent beside it
            self.steps[kind].append(self.now)
        self.done += 1
        self.watch.synchronize()
        if self.done == len(self.kinds):
            self.finish()
            return
        if self.kinds[self.done] == "beside":
            self.size_background()
            self.background.start(self.engine.reduce)
        self.now = StepMoments(begin=self.watch.moment())

    def size_background(self) -> None:
        """All ranks agree on the times of a step alone; the first time, on how much to send beside compute."""
        last = self.steps["alone"][-1:]
        alone_s = [self.watch.seconds(s.begin, s.called) for s in last] or [0.0]
        sending_s = [s.transfer_s for s in last] or [math.inf]
        compute_s, negative_s = self.all_reduced([*alone_s, -sending_s[0]], op="max")  # the last rank waits for none
        if math.isinf(negative_s):  # no rank has seen such a step so far; if none ever does, finish() prints it
            return
        self.sending_s.append(max(-negative_s, 1e-9))
        if not self.background.parts:
            total_bytes = sum(t.size for t in self.engine.layers.tensors)
            passes = _LONGER * compute_s / self.sending_s[0]
            self.background.size(self.engine.layout.buckets[0].flat, total_bytes, passes)

    def all_reduced(self, values: Sequence[float], *, op: str) -> list[float]:
        """The mean or the maximum over ranks."""
        x = torch.tensor(values, dtype=torch.float64, device=self.device)
        self.engine.job.comm.all_reduce(x, op=op).wait()
        result: list[float] = x.tolist()
        return result

    # ---- the plan

    def finish(self) -> None:
        """All ranks agree on the measurements; rank 0 searches; all ranks change to its plan."""
        engine, layers = self.engine, self.engine.layers
        n = len(layers.modules)
        incomplete = not all(self.steps[kind] for kind in _KINDS)
        alone, beside = (self.steps[kind] for kind in _KINDS)
        own = [0.0] * (2 * n + 6) if incomplete else medians(alone, beside, self.watch, n)
        lacks, *values = self.all_reduced([float(incomplete), *own], op="mean")
        if lacks:
            engine.stop_profiling()
            engine.print_once("Overlap: no whole step in training mode was seen, so the first buckets stay")
            return
        result: Any = None
        if engine.comm.rank == 0:
            called = list(alone[0].entered)
            layers.order = [*called, *(i for i in range(n) if i not in called)]
            units, (alone_s, beside_s, rest_s) = unit_times(layers, values)
            tensors = [Sized(t.unit + 1, t.elements, t.size, t.kind) for t in layers.tensors]
            transfer_s = statistics.median_low(self.sending_s)
            sent_s = self.background.count / len(self.background.parts) * transfer_s
            link = link_model(
                self.latency_s,
                transfer_s,
                sum(t.size for t in tensors),
                len(cut(engine.layout.plan.buckets, tensors, _CHUNK)),
                shares(alone_s, beside_s, rest_s, sent_s),
            )
            result = (layers.order, *search(units, tensors, link, next_forward=engine.late), link)
        layers.order, plan, forecast, late, link = engine.job.comm.broadcast_object(result)
        engine.adopt(plan, forecast, link, late=late)
