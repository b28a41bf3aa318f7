"""What a planner must know, measured in the first steps of a training: of each unit, of the links, of both together."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kasoku.core import Work
from kasoku.core.cost import Link, Sized, Unit
from kasoku.parallel.buckets import MIB, Planned, cut, search

if TYPE_CHECKING:
    from kasoku.parallel.overlap import Engine

_KINDS = ("alone", "beside")  # gradients are sent after backward; the same, and computing goes on beside transfers
_PIECE = 2 * MIB
_LONGER = 1.25  # what is sent beside computing takes so many times as long
_MOST = 8  # but is at most so many times all gradients
_LEAST = 0.3  # of a speed; less is noise


@dataclass
class _Step:
    """The moments of one step."""

    begin: Any = None
    entered: dict[int, Any] = field(default_factory=dict)
    out: Any = None  # the first forward of the step has ended
    arrived: dict[int, Any] = field(default_factory=dict)
    called: Any = None  # optimizer.step()
    arrived_beside: Any = None  # what was sent beside it
    latency_s: float = 0.0
    transfer_s: float = 0.0
    waited: Any = None
    end: Any = None


class Probe:
    """Times steps of two kinds, then hands the engine the plan that rank 0 finds.

    Note: what belongs to which unit. The forward of a unit lasts until the next one is entered, its backward from the
    last gradient of the unit behind it to its own last gradient. What lies between two steps (data) is a unit of its
    own in front, without parameters; loss and accumulated passes count as backward of the last unit.
    """

    def __init__(self, engine: Engine, settings: Planned) -> None:
        self.engine = engine
        self.kinds = ["warm"] * (settings.warm + 1) + [*_KINDS] * settings.measure  # the first one has no begin
        self.steps: dict[str, list[_Step]] = {kind: [] for kind in ("warm", *_KINDS)}
        self.parts: tuple[Tensor, ...] = ()  # what is sent beside computing, over and over
        self.transfers, self.transfers_s = 0, 0.0  # how many of them, and what they take alone
        self.beside: list[Work] = []
        self.done, self.now = 0, _Step()
        self.cuda = engine.groups[0].flat.is_cuda
        self.hook = engine.job.model.register_forward_hook(lambda *_: self.output())
        engine.job.undo(self.close)

    def close(self) -> None:
        """Leaves nothing under way and no memory taken."""
        self.wait_beside()
        self.hook.remove()
        self.parts, self.steps = (), {}

    def wait_beside(self) -> None:
        """Waits for what was sent beside computing."""
        for work in self.beside:
            work.wait()
        self.beside.clear()

    @property
    def holding(self) -> bool:
        """Nothing is sent before the step is called, so that computing is seen alone."""
        return self.kinds[self.done] in _KINDS

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
        if self.engine.job.model.training:
            self.now.entered.setdefault(unit, self.moment())

    def output(self) -> None:
        """The model's forward has ended."""
        if self.now.out is None and self.engine.job.model.training:
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
        self.meet()
        start = self.host()
        self.meet()  # an all-reduce of one number, which no rank comes late to
        begin = self.host()
        self.now.latency_s = begin - start
        engine.layout = "measured"
        for piece in cut(engine.plan.groups, engine.units.tensors, _PIECE):
            engine.send_piece(piece)
        engine.layout = "first"
        for group in engine.groups:
            group.wait()
        self.now.transfer_s = self.host() - begin

    def meet(self) -> None:
        """All ranks are here."""
        self.engine.comm.all_reduce(torch.zeros(1, device=self.engine.groups[0].flat.device)).wait()

    def send_beside(self) -> None:
        """Starts transfers that mean nothing, and should outlast the computing of the step that begins.

        The same zeros are under way several times, if those of all gradients do not last as long: what a reducer keeps
        of them is mixed up, and thrown away with the plan.
        """
        if not self.parts:
            self.measure_out()
        self.meet()
        for k in range(self.transfers):
            part = k % len(self.parts)
            self.beside.append(self.engine.reduce(f"beside {part}", self.parts[part]))

    def measure_out(self) -> None:
        """How much to send beside computing, by the steps so far; the same on all ranks."""
        comm, like = self.engine.job.comm, self.engine.groups[0].flat
        size = sum(t.size for t in self.engine.units.tensors)
        elements = size // like.element_size()
        scratch = torch.zeros(elements, dtype=like.dtype, device=like.device)
        step = max(1, min(_PIECE, size) // like.element_size())
        self.parts = tuple(scratch[start : start + step] for start in range(0, elements, step))
        seen = self.steps["alone"]  # where there is none, finish() tells
        computing_s = statistics.median([self.between(s.begin, s.called) for s in seen] or [0.0])
        sending_s = statistics.median([s.transfer_s for s in seen] or [1.0])
        wanted = math.ceil(_LONGER * computing_s / max(sending_s, 1e-9) * len(self.parts))
        self.transfers, sending_s = comm.broadcast_object((min(_MOST * len(self.parts), wanted), sending_s))
        self.transfers_s = self.transfers / len(self.parts) * sending_s

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
        if None not in (self.now.begin, self.now.out, self.now.called):
            self.steps[self.kinds[self.done]].append(self.now)
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
        engine = self.engine
        comm, model = engine.job.comm, engine.units
        seen = self.steps["alone"]
        flat = engine.groups[0].flat
        device = torch.device("cpu") if flat.is_meta else flat.device
        lacking = torch.tensor(float(not all(self.steps[kind] for kind in _KINDS)), device=device)
        comm.all_reduce(lacking, op="max").wait()
        if lacking:
            engine.end_probe()
            engine.say(
                "Overlap: no forward of the model in training mode was seen, so the first groups stay as they are"
            )
            return
        order: list[int] = comm.broadcast_object(list(seen[0].entered))
        model.order = [*order, *(i for i in range(len(model.modules)) if i not in order)]
        mine = torch.tensor(self.measured(seen), dtype=torch.float64, device=device)
        comm.all_reduce(mine, op="mean").wait()
        found: Any = None
        if comm.rank == 0:
            units, rest = self.as_units(mine.tolist())
            tensors = [Sized(t.unit + 1, t.elements, t.size, t.kind) for t in model.tensors]
            link = self.fitted(tensors, rest)
            found = (*search(units, tensors, link, next_forward=engine.late), link)
        plan, seen_ahead, late, link = comm.broadcast_object(found)
        engine.adopt(plan, seen_ahead, link, late=late)

    def measured(self, seen: Sequence[_Step]) -> list[float]:
        """Medians in seconds: forward and backward of each unit, then what `as_units` leaves."""
        rows = [self.row(step) for step in seen]
        medians = [statistics.median(column) for column in zip(*rows, strict=True)]
        beside = self.steps["beside"]
        both = [*seen, *beside]  # of which the transfers do not differ
        transfers = [statistics.median(s.latency_s for s in both), statistics.median(s.transfer_s for s in both)]
        alone_s = statistics.median(self.between(s.begin, s.called) for s in seen)
        beside_s = statistics.median(self.between(s.begin, s.called) for s in beside)
        rest_s = statistics.median(self.between(s.called, s.arrived_beside) for s in beside)
        return [*medians, *transfers, alone_s, beside_s, rest_s]

    def row(self, step: _Step) -> list[float]:
        """One step: forward of the start and of each unit, the same backward, the update."""
        order = self.engine.units.order
        entered = [u for u in order if u in step.entered]
        moments = [step.begin, *(step.entered[u] for u in entered), step.out]
        forward = dict(zip([-1, *entered], itertools.pairwise(moments), strict=True))
        backward: dict[int, float] = {}
        passed = 0.0
        for u in reversed(order):
            now = self.between(step.out, step.arrived[u]) if u in step.arrived else passed
            backward[u] = max(0.0, now - passed)
            passed = max(passed, now)
        backward[-1] = max(0.0, self.between(step.out, step.called) - passed)
        places = [-1, *order]
        return [
            *(self.between(*forward[u]) if u in forward else 0.0 for u in places),
            *(backward[u] for u in places),
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
        units = [
            Unit(name, forward, backward, update * size / sum(sizes))
            for name, forward, backward, size in zip(names, values[:n], values[n : 2 * n], sizes, strict=True)
        ]
        return units, values[2 * n + 1 :]

    def fitted(self, tensors: Sequence[Sized], rest: Sequence[float]) -> Link:
        """Latency of an all-reduce, bandwidth of many pieces behind each other, what is left of speeds in company."""
        latency_s, transfer_s, alone_s, beside_s, rest_s = rest
        pieces = len(cut(self.engine.plan.groups, tensors, _PIECE))
        moving_s = max(transfer_s - pieces * latency_s, 0.1 * transfer_s, 1e-9)
        compute_share, link_share = shares(alone_s, beside_s, rest_s, self.transfers_s)
        return Link(latency_s, sum(t.size for t in tensors) / moving_s, compute_share, link_share)


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
