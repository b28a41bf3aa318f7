"""What a planner must know, measured in the first steps of a training: of each unit, of the links, of both together."""

from __future__ import annotations

import itertools
import math
import operator
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kasoku.core import Work
from kasoku.distributed.ddp.bucketing import MIB, Planned, cut, search
from kasoku.distributed.ddp.cost_model import Link, Sized, Unit

if TYPE_CHECKING:
    from kasoku.distributed.ddp.overlap import Engine

_KINDS = ("alone", "beside")  # gradients are sent after backward; the same, and computing goes on beside transfers
_PIECE = 2 * MIB
_LONGER = 1.25  # what is sent beside computing takes so many times as long
_MOST = 8  # but is at most so many times all gradients
_LEAST = 0.3  # of a speed; less is noise
_LATENCIES = 2  # empty all-reduces that are timed
_SHARE = 50  # of so many steps of an epoch, one of each kind is measured


@dataclass
class _Step:
    """The moments of one step."""

    begin: Any = None
    entered: dict[int, Any] = field(default_factory=dict)
    out: Any = None  # the first forward of the step has ended
    arrived: dict[int, Any] = field(default_factory=dict)
    called: Any = None  # optimizer.step()
    arrived_beside: Any = None  # what was sent beside it
    transfer_s: float = 0.0
    waited: Any = None
    end: Any = None


class Probe:
    """Times an empty all-reduce and steps of two kinds, then hands the engine the plan that rank 0 finds.

    Note: what belongs to which unit. The forward of a unit lasts until the next one is entered, its backward from the
    last gradient of the unit behind it to its own last gradient. What lies between two steps (data) is a unit of its
    own in front, without parameters; loss and accumulated passes count as backward of the last unit.
    """

    def __init__(self, engine: Engine, settings: Planned) -> None:
        self.engine = engine
        batches = operator.length_hint(engine.job.loader)  # 0: not known
        most = max(1, batches // engine.job.accumulate // _SHARE) if batches else settings.measure
        each = min(settings.measure, most)
        self.steps: dict[str, list[_Step]] = {kind: [] for kind in ("warm", *_KINDS)}
        self.parts: tuple[Tensor, ...] = ()  # what is sent beside computing, over and over
        self.transfers = 0  # how many of them
        self.sending_s: list[float] = []  # what sending all gradients takes after each step alone
        self.beside: list[Work] = []
        self.done, self.now = 0, _Step()
        flat = engine.groups[0].flat
        self.cuda = flat.is_cuda
        self.device = torch.device("cpu") if flat.is_meta else flat.device
        self.latency_s, each = self.meet(each)
        self.kinds = ["warm"] * (settings.warm + 1) + [*_KINDS] * each  # the first one has no begin
        self.hook = engine.job.model.register_forward_hook(lambda *_: self.output())
        engine.job.undo(self.close)

    def close(self) -> None:
        """Leaves nothing under way and no memory taken."""
        self.hook.remove()  # first: waiting fails where another rank is gone
        self.wait_beside()
        self.parts, self.steps = (), {}

    def wait_beside(self) -> None:
        """Waits for what was sent beside computing."""
        for work in self.beside:
            work.wait()
        self.beside.clear()

    def meet(self, each: int) -> tuple[float, int]:
        """Seconds of an all-reduce of one number, to which no rank comes late; the least that a rank gives."""
        least = torch.tensor(-float(each), device=self.device)
        moments = []
        for _ in range(1 + _LATENCIES):
            self.engine.comm.all_reduce(least, op="max").wait()
            moments.append(self.host())
        return statistics.median_low(b - a for a, b in itertools.pairwise(moments)), round(-least.item())

    @property
    def holding(self) -> bool:
        """Nothing is sent before the step is called, so that computing is seen alone."""
        return self.kinds[self.done] in _KINDS

    @property
    def late(self) -> bool:
        """Updates may wait for the next forward: it is not measured, and neither is this step."""
        return not self.holding and self.kinds[self.done + 1] not in _KINDS

    # ---- moments

    def moment(self) -> Any:
        """Now, on the stream where there is one."""
        if not self.cuda:
            return self.engine.job.clock.now()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def between(self, start: Any, stop: Any) -> float:
        """Seconds between two moments."""
        return float(start.elapsed_time(stop) / 1e3 if self.cuda else stop - start)

    def entered(self, unit: int) -> None:
        """A unit's forward begins."""
        if self.now.out is None and self.engine.job.model.training:
            self.now.entered.setdefault(unit, self.moment())

    def output(self) -> None:
        """The model's forward has ended. What was evaluated before a step is no part of it."""
        if not self.engine.job.model.training:
            if not self.now.entered and self.now.begin is not None:
                self.now.begin = self.moment()
        elif self.now.out is None:
            self.now.out = self.moment()

    def arrived(self, p: Tensor) -> None:
        """A gradient has come."""
        self.now.arrived[self.engine.units.users[p][0]] = self.moment()

    def at_step(self) -> None:
        """`optimizer.step()` is called: sends what was held back."""
        self.now.called = self.moment()
        if not self.holding:
            return
        self.wait_beside()
        self.now.arrived_beside = self.moment()
        engine = self.engine
        begin = self.host()
        engine.layout = "measured"
        for piece in cut(engine.plan.groups, engine.units.tensors, _PIECE):
            engine.send_piece(piece)
        engine.layout = "first"
        for group in engine.groups:
            group.wait()
        self.now.transfer_s = self.host() - begin

    def send_beside(self) -> None:
        """Starts transfers that mean nothing, and should outlast the computing of the step that begins.

        The same zeros are under way several times, if those of all gradients do not last as long: what a reducer keeps
        of them is mixed up, and thrown away with the plan.
        """
        self.measure_out()
        for k in range(self.transfers):
            part = k % len(self.parts)
            self.beside.append(self.engine.reduce(f"beside {part}", self.parts[part]))

    def measure_out(self) -> None:
        """What a step without company takes, the same on all ranks; once, how much to send beside computing."""
        last = self.steps["alone"][-1:]
        alone_s = [self.between(s.begin, s.called) for s in last] or [0.0]
        sending_s = [s.transfer_s for s in last] or [math.inf]
        computing_s, negative_s = self.agreed([*alone_s, -sending_s[0]], op="max")  # the last rank waits for nobody
        if math.isinf(negative_s):  # no rank has seen such a step so far; where none ever does, finish() tells
            return
        self.sending_s.append(max(-negative_s, 1e-9))
        if not self.parts:
            like = self.engine.groups[0].flat
            size = sum(t.size for t in self.engine.units.tensors)
            elements = size // like.element_size()
            scratch = torch.zeros(elements, dtype=like.dtype, device=like.device)
            step = max(1, min(_PIECE, size) // like.element_size())
            self.parts = tuple(scratch[start : start + step] for start in range(0, elements, step))
            wanted = math.ceil(_LONGER * computing_s / self.sending_s[0] * len(self.parts))
            self.transfers = min(_MOST * len(self.parts), wanted)

    def agreed(self, values: Sequence[float], *, op: str) -> list[float]:
        """The same numbers on all ranks: the mean, or the largest."""
        mine = torch.tensor(values, dtype=torch.float64, device=self.device)
        self.engine.job.comm.all_reduce(mine, op=op).wait()
        found: list[float] = mine.tolist()
        return found

    def host(self) -> float:
        """Now, with nothing under way on the device."""
        if self.cuda:
            torch.cuda.synchronize()
        return self.engine.job.clock.now()

    def waited(self) -> None:
        """Every gradient is the mean now."""
        self.now.waited = self.moment()

    def stepped(self) -> None:
        """The step has ended; the last one makes the plan."""
        self.wait_beside()  # where no backward came
        self.now.end = self.moment()
        kind = self.kinds[self.done]
        whole = None not in (self.now.begin, self.now.out, self.now.called)
        if whole and (kind != "beside" or self.parts):  # without them it had no company
            self.steps[kind].append(self.now)
        self.done += 1
        if self.cuda:
            torch.cuda.synchronize()
        if self.done == len(self.kinds):
            self.finish()
            return
        if self.kinds[self.done] == "beside":
            self.send_beside()
        self.now = _Step(begin=self.moment())

    # ---- the plan

    def finish(self) -> None:
        """All ranks agree on what was measured; rank 0 searches; all take its plan."""
        engine, model = self.engine, self.engine.units
        lacking = not all(self.steps[kind] for kind in _KINDS)
        nothing = [0.0] * (2 * len(model.modules) + 6)
        lacks, *values = self.agreed([float(lacking), *(nothing if lacking else self.measured())], op="mean")
        if lacks:
            engine.end_probe()
            engine.say("Overlap: no whole step in training mode was seen, so the first groups stay as they are")
            return
        found: Any = None
        if engine.comm.rank == 0:
            called = list(self.steps["alone"][0].entered)
            model.order = [*called, *(i for i in range(len(model.modules)) if i not in called)]
            units, rest = self.as_units(values)
            tensors = [Sized(t.unit + 1, t.elements, t.size, t.kind) for t in model.tensors]
            link = self.fitted(tensors, *rest)
            found = (model.order, *search(units, tensors, link, next_forward=engine.late), link)
        model.order, plan, seen_ahead, late, link = engine.job.comm.broadcast_object(found)
        engine.adopt(plan, seen_ahead, link, late=late)

    def measured(self) -> list[float]:
        """Medians in seconds: forward and backward of each unit, then what `as_units` leaves."""
        alone, beside = (self.steps[kind] for kind in _KINDS)
        medians = [statistics.median_low(column) for column in zip(*(self.row(step) for step in alone), strict=True)]
        alone_s = statistics.median_low([self.between(s.begin, s.called) for s in alone])
        beside_s = statistics.median_low([self.between(s.begin, s.called) for s in beside])
        rest_s = statistics.median_low([self.between(s.called, s.arrived_beside) for s in beside])
        return [*medians, alone_s, beside_s, rest_s]

    def row(self, step: _Step) -> list[float]:
        """One step: forward of the start and of each unit by its number, the same backward, the update."""
        moments = [step.begin, *step.entered.values(), step.out]
        forward = dict(zip([-1, *step.entered], itertools.pairwise(moments), strict=True))
        backward: dict[int, float] = {}
        passed = 0.0
        places = range(len(self.engine.units.modules))
        for u in reversed([*step.entered, *(u for u in places if u not in step.entered)]):
            now = self.between(step.out, step.arrived[u]) if u in step.arrived else passed
            backward[u] = max(0.0, now - passed)
            passed = max(passed, now)
        backward[-1] = max(0.0, self.between(step.out, step.called) - passed)
        return [
            *(self.between(*forward[u]) if u in forward else 0.0 for u in (-1, *places)),
            *(backward[u] for u in (-1, *places)),
            self.between(step.waited, step.end),
        ]

    def as_units(self, values: Sequence[float]) -> tuple[list[Unit], Sequence[float]]:
        """The units in forward order, and what follows of `measured`."""
        model = self.engine.units
        names = ["", *(model.modules[u][0] for u in model.order)]
        n = len(names)
        sizes = [0] * n
        for t in model.tensors:
            sizes[t.unit + 1] += t.size
        update = values[2 * n]
        columns = [0, *(1 + u for u in model.order)]  # of what is measured, unit by unit in their own numbers
        units = [
            Unit(name, values[i], values[n + i], update * size / sum(sizes))
            for name, size, i in zip(names, sizes, columns, strict=True)
        ]
        return units, values[2 * n + 1 :]

    def fitted(self, tensors: Sequence[Sized], alone_s: float, beside_s: float, rest_s: float) -> Link:
        """Latency of an all-reduce, bandwidth of many pieces behind each other, what is left of speeds in company."""
        transfer_s = statistics.median_low(self.sending_s)
        pieces = len(cut(self.engine.plan.groups, tensors, _PIECE))
        moving_s = max(transfer_s - pieces * self.latency_s, 0.1 * transfer_s, 1e-9)
        compute_share, link_share = shares(alone_s, beside_s, rest_s, self.transfers / len(self.parts) * transfer_s)
        return Link(self.latency_s, sum(t.size for t in tensors) / moving_s, compute_share, link_share)


def shares(alone_s: float, beside_s: float, rest_s: float, sent_s: float) -> tuple[float, float]:
    """What computing and communicating keep of their speeds in each other's company.

    Args:
        alone_s: computing alone.
        beside_s: the same beside transfers.
        rest_s: what these took on alone once it had ended.
        sent_s: what these take alone.
    """
    if rest_s > 0.02 * beside_s:  # they were under way all the time
        found = alone_s / beside_s, (sent_s - rest_s) / beside_s
    else:
        found = 1 - (beside_s - alone_s) / max(sent_s, 1e-9), 1.0
    compute, link = (min(1.0, max(_LEAST, share)) for share in found)
    return compute, link
