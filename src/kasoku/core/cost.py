"""The cost model of data-parallel training: what a step takes, and what of its communication shows.

The planner of gradient groups and the simulator of clusters both use it. All times in seconds, sizes in bytes.

Note: two streams of work. Compute does the backward of every unit from the last to the first, then updates and runs
the units forward from the first to the last, and waits where a unit's gradients have not arrived. The link moves one
piece at a time, in one static order, each as soon as its group is ready and the piece before it has arrived. While
both work, each may slow the other down (a CPU that computes also moves the bytes): `compute_share` and `link_share`
are the speeds that are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Link:
    """What an all-reduce of n bytes takes: latency_s + n / bytes_per_s; and what is left of the speeds in company.

    bytes_per_s is that of the whole collective (a ring over p ranks moves 2 (p - 1) / p of the bytes on every link).
    """

    latency_s: float
    bytes_per_s: float
    compute_share: float = 1.0  # speed of computing while a transfer is under way
    link_share: float = 1.0  # speed of a transfer while the device computes

    def seconds(self, size: float) -> float:
        """An all-reduce of `size` bytes, alone."""
        return self.latency_s + size / self.bytes_per_s


@dataclass(frozen=True)
class Unit:
    """A part of a model that runs as one: its times on one device."""

    name: str
    forward_s: float
    backward_s: float
    update_s: float = 0.0


@dataclass(frozen=True)
class Sized:
    """One tensor of gradients: whose it is, and how large. `kind`: tensors of one kind may share a buffer."""

    unit: int
    elements: int
    size: int
    kind: str = ""
    name: str = ""

    @property
    def width(self) -> float:
        """Bytes of an element."""
        return self.size / self.elements


@dataclass(frozen=True, order=True)
class Piece:
    """What is sent at once: a stretch of a group's flat buffer, in elements."""

    group: int
    start: int
    stop: int


@dataclass(frozen=True)
class Plan:
    """Groups of tensors (indices), each one flat buffer, and the order in which their pieces are sent."""

    groups: tuple[tuple[int, ...], ...]
    order: tuple[Piece, ...]
    policy: str = ""


@dataclass(frozen=True)
class Forecast:
    """What the cost model says of a plan. `arrived_s`: of each group, counted from the start of backward."""

    step_s: float
    compute_s: float
    link_s: float
    backward_s: float = 0.0  # until backward has ended
    arrived_s: tuple[float, ...] = field(repr=False, default=())

    @property
    def bound_s(self) -> float:
        """No order can be faster than the slower of computing alone and communicating alone."""
        return max(self.compute_s, self.link_s)

    @property
    def exposed_s(self) -> float:
        """What communication adds to computing."""
        return self.step_s - self.compute_s


def forecast(
    units: Sequence[Unit], tensors: Sequence[Sized], plan: Plan, link: Link, *, next_forward: bool = True
) -> Forecast:
    """The step under a plan, in the steady state.

    Args:
        units: in forward order.
        tensors: what the plan's indices mean.
        plan: the groups and the order of their pieces.
        link: the link.
        next_forward: a unit's update and next forward wait for its own groups only; False: for all groups.
    """
    homes = [sorted({tensors[i].unit for i in group}) for group in plan.groups]
    width = [tensors[group[0]].width for group in plan.groups]
    pieces = [(p.group, link.seconds((p.stop - p.start) * width[p.group])) for p in plan.order]
    last = [0] * len(plan.groups)
    for i, (group, _) in enumerate(pieces):
        last[group] = i
    ready_after = [len(units) - home[0] for home in homes]  # backward tasks that must have ended
    streams = _Streams(link, pieces, ready_after, last)
    wanted = _wanted(units, homes, next_forward)
    return streams.run(units, wanted, _updates(units, tensors, plan), barrier=not next_forward)


def _updates(units: Sequence[Unit], tensors: Sequence[Sized], plan: Plan) -> list[float]:
    """Seconds to update each group: of each unit the share of its elements."""
    whole = [0] * len(units)
    for t in tensors:
        whole[t.unit] += t.elements
    shares = [units[t.unit].update_s * t.elements / max(1, whole[t.unit]) for t in tensors]
    return [sum(shares[i] for i in group) for group in plan.groups]


def _wanted(units: Sequence[Unit], homes: Sequence[Sequence[int]], next_forward: bool) -> list[list[int]]:
    """The groups that the forward of each unit is the first to wait for."""
    wanted: list[list[int]] = [[] for _ in units]
    for group, home in enumerate(homes):
        wanted[home[0] if next_forward else 0].append(group)
    return wanted


class _Streams:
    """Compute and link, moved on together from event to event."""

    def __init__(
        self, link: Link, pieces: list[tuple[int, float]], ready_after: Sequence[int], last: Sequence[int]
    ) -> None:
        self.link, self.pieces, self.ready_after, self.last = link, pieces, ready_after, last
        self.now, self.sent, self.ended = 0.0, 0, 0  # time, pieces arrived, backward tasks ended
        self.left = pieces[0][1] if pieces else 0.0
        self.arrived = [0.0] * len(last)

    def run(
        self, units: Sequence[Unit], wanted: Sequence[Sequence[int]], update_s: Sequence[float], *, barrier: bool
    ) -> Forecast:
        """The whole step; with a barrier no group is updated before all have arrived."""
        for unit in reversed(units):
            self.compute(unit.backward_s)
            self.ended += 1
        backward_s = self.now
        for unit, groups in zip(units, wanted, strict=True):
            ordered = sorted(groups, key=lambda g: self.last[g])
            if barrier and ordered:
                self.wait(ordered[-1])
            for group in ordered:
                self.wait(group)
                self.compute(update_s[group])
            self.compute(unit.forward_s)
        compute_s = sum(unit.backward_s + unit.forward_s + unit.update_s for unit in units)
        return Forecast(
            self.now, compute_s, sum(seconds for _, seconds in self.pieces), backward_s, tuple(self.arrived)
        )

    def sending(self) -> bool:
        return self.sent < len(self.pieces) and self.ready_after[self.pieces[self.sent][0]] <= self.ended

    def compute(self, work_s: float) -> None:
        while self.sending() and work_s > 0:
            mine, theirs = work_s / self.link.compute_share, self.left / self.link.link_share
            span = min(mine, theirs)
            work_s = 0.0 if mine <= theirs else work_s - span * self.link.compute_share
            self.transfer(span, span * self.link.link_share if mine < theirs else self.left)
        self.now += max(0.0, work_s)

    def wait(self, group: int) -> None:
        while self.sent <= self.last[group]:
            self.transfer(self.left, self.left)

    def transfer(self, span: float, done: float) -> None:
        self.now += span
        self.left -= done
        if self.left <= 0:
            self.arrived[self.pieces[self.sent][0]] = self.now
            self.sent += 1
            self.left = self.pieces[self.sent][1] if self.sent < len(self.pieces) else 0.0
