"""What a planner must know, measured in the first steps of a training: of each unit, of the links, of both together."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kasoku.core.cost import Link, Plan, Sized, Unit, forecast
from kasoku.parallel.buckets import MIB, Planned, cut, search

if TYPE_CHECKING:
    from kasoku.parallel.overlap import Engine

_KINDS = ("whole", "pieces", "overlap")  # all groups at once; the same in pieces; as they come, beside backward
_SHARES = [1 - 0.05 * k for k in range(11)]


@dataclass
class _Step:
    """The moments of one step."""

    begin: Any = None
    entered: dict[int, Any] = field(default_factory=dict)
    out: Any = None  # the first forward of the step has ended
    arrived: dict[int, Any] = field(default_factory=dict)
    called: Any = None  # optimizer.step()
    waited: Any = None
    transfer_s: float = 0.0
    end: Any = None


class Probe:
    """Times steps of three kinds, then hands the engine the plan that rank 0 finds.

    Note: what belongs to which unit. The forward of a unit lasts until the next one is entered, its backward from the
    last gradient of the unit behind it to its own last gradient. What lies between two steps (data) is a unit of its
    own in front, without parameters; loss and accumulated passes count as backward of the last unit.
    """

    def __init__(self, engine: Engine, settings: Planned) -> None:
        self.engine = engine
        kinds = [kind for _ in range(settings.measure) for kind in _KINDS[:2]] + [_KINDS[2]] * settings.measure
        self.kinds = ["warm"] * (settings.warm + 1) + kinds  # the first one has no begin
        self.steps: dict[str, list[_Step]] = {kind: [] for kind in ("warm", *_KINDS)}
        self.done, self.now = 0, _Step()
        self.cuda = engine.groups[0].flat.is_cuda
        engine.job.undo(engine.job.model.register_forward_hook(lambda *_: self.output()).remove)

    @property
    def holding(self) -> bool:
        """Nothing is sent before the step is called, so that computing is seen alone."""
        return self.kinds[self.done] in _KINDS[:2]

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
        if self.engine.probe is self and self.now.out is None and self.engine.job.model.training:
            self.now.out = self.moment()

    def arrived(self, p: Tensor) -> None:
        """A gradient has come."""
        self.now.arrived[self.engine.units.users[p][0]] = self.moment()

    def at_step(self) -> None:
        """`optimizer.step()` is called: sends what was held back."""
        self.now.called = self.moment()
        if not self.holding:
            return
        engine = self.engine
        order = engine.plan.order
        if self.kinds[self.done] == "pieces":
            order = tuple(cut(engine.plan.groups, engine.units.tensors, 2 * MIB))
        engine.comm.all_reduce(torch.zeros(1, device=engine.groups[0].flat.device)).wait()  # all ranks are here
        start = self.host()
        engine.layout = self.kinds[self.done]
        for piece in order:
            engine.send_piece(piece)
        engine.layout = "first"
        for group in engine.groups:
            group.wait()
        self.now.transfer_s = self.host() - start

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
        self.now.end = self.moment()
        if None not in (self.now.begin, self.now.out, self.now.called):
            self.steps[self.kinds[self.done]].append(self.now)
        self.done += 1
        self.now = _Step(begin=self.now.end)
        if self.done == len(self.kinds):
            if self.cuda:
                torch.cuda.synchronize()
            self.finish()

    # ---- the plan

    def finish(self) -> None:
        """All ranks agree on what was measured; rank 0 searches; all take its plan."""
        engine = self.engine
        comm, model = engine.job.comm, engine.units
        seen = self.steps["whole"] + self.steps["pieces"]
        flat = engine.groups[0].flat
        device = torch.device("cpu") if flat.is_meta else flat.device
        lacking = torch.tensor(float(not all(self.steps[kind] for kind in _KINDS)), device=device)
        comm.all_reduce(lacking, op="max").wait()
        if lacking:
            engine.probe = None
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
            link = self.fitted(units, tensors, rest)
            found = (*search(units, tensors, link, next_forward=engine.late), link)
        plan, seen_ahead, late, link = comm.broadcast_object(found)
        engine.adopt(plan, seen_ahead, link, late=late)

    def measured(self, seen: Sequence[_Step]) -> list[float]:
        """Medians in seconds: forward and backward of each unit, then what `as_units` leaves."""
        rows = [self.row(step) for step in seen]
        medians = [statistics.median(column) for column in zip(*rows, strict=True)]
        transfers = [statistics.median(s.transfer_s for s in self.steps[kind]) for kind in _KINDS[:2]]
        beside = self.steps["overlap"]
        backward = statistics.median(self.between(s.out, s.called) for s in beside)
        arrived = statistics.median(self.between(s.out, s.waited) for s in beside)
        return [*medians, *transfers, backward, arrived]

    def row(self, step: _Step) -> list[float]:
        """One step: forward of the start and of each unit, the same backward, the update."""
        order = self.engine.units.order
        entered = [step.entered[u] for u in order if u in step.entered]
        moments = [step.begin, *entered, step.out]
        forward = dict(zip([-1, *(u for u in order if u in step.entered)], itertools.pairwise(moments), strict=True))
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
        """The units in forward order, and the transfers and overlapped times that follow."""
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

    def fitted(self, units: Sequence[Unit], tensors: Sequence[Sized], rest: Sequence[float]) -> Link:
        """Latency and bandwidth from transfers of few and of many pieces; what is left of both speeds in company."""
        whole_s, pieces_s, backward_s, arrived_s = rest
        plan = self.engine.plan
        few, many = len(plan.order), len(cut(plan.groups, tensors, 2 * MIB))
        size = sum(t.size for t in tensors)
        latency = max(0.0, (pieces_s - whole_s) / (many - few)) if many > few else 0.0
        plain = Link(latency, size / max(whole_s - few * latency, 0.1 * whole_s, 1e-9))
        return _in_company(plain, units, tensors, plan, backward_s, arrived_s)


def _in_company(plain: Link, units: Sequence[Unit], tensors: Sequence[Sized], plan: Plan, *measured: float) -> Link:
    """The shares that explain best how long backward and all transfers took beside each other."""
    backward_s, arrived_s = measured

    def off(link: Link) -> float:
        seen = forecast(units, tensors, plan, link, next_forward=False)
        return abs(seen.backward_s - backward_s) + abs(max(seen.arrived_s) - arrived_s)

    tried = [Link(plain.latency_s, plain.bytes_per_s, a, b) for a in _SHARES for b in _SHARES]
    return min(tried, key=off)
