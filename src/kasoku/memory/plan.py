"""Chooses what each part of a network keeps: the least time under a budget, found exactly.

Note: why it is exact. The network is a chain of units; a plan cuts it into segments and picks a program for each. What
a segment's backward takes at most depends on its own program and on the bytes kept before it, no more.
So going along the chain it is enough to remember, for each place, the pairs of (bytes kept so far, work so far) of
which no other has less of both. A smaller budget can only take plans away, so the peak of the best plan falls with it
or stays.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from kasoku.core import InputError
from kasoku.memory.graph import Graph, Shape
from kasoku.memory.ops import How
from kasoku.memory.predict import Layout, Need, need, work_of
from kasoku.memory.program import Program, needed, over_inputs, program

_LONGEST = 4  # units in a segment
_CHUNKS = (4, 16)  # images at a time


@dataclass(frozen=True)
class Setting:
    """What the programs of a network depend on, beside its units.

    Args:
        x: the images that enter it.
        data: they need a gradient.
        how: precision.
        layout: of images in memory.
        there: what enters the first of them, and what leaves the last, lies there for others anyway, so that it is not
            held in bf16.
    """

    x: Shape
    data: bool
    how: How
    layout: Layout
    there: tuple[bool, bool] = (False, False)


@dataclass(frozen=True)
class Choice:
    """One way to run the units from `first` to `last`."""

    first: int
    last: int
    program: Program
    chunk: int
    need: Need
    remedy: str


@dataclass(frozen=True)
class Around:
    """Bytes beside the units.

    Args:
        fixed: there at all times: weights, state.
        after: kept for backward behind the units (the head).
        copies: of weights there (autocast's), beside `after`, whatever the batch.
        gradients: of weights behind the units that are still there when the units' backward begins.
        stays: gradients of units stay until the step, too.
        head: the most that the head's own backward takes beside what is kept.
    """

    fixed: int
    after: int
    copies: int
    gradients: int
    stays: bool
    head: int


@dataclass(frozen=True)
class Plan:
    """The choices along the chain, what they keep in all, the peak, and the work done twice."""

    choices: tuple[Choice, ...]
    kept: int
    peak: int
    work: float


def choices(units: Sequence[Graph], setting: Setting) -> Iterator[Choice]:
    """All ways to run all stretches of units that are considered."""
    shapes = [setting.x]
    for unit in units:
        shapes.append(unit.shapes(shapes[-1], setting.how.half)[-1])
    for first in range(len(units)):
        graph = Graph(())
        for last in range(first, min(first + _LONGEST, len(units))):
            graph = graph.then(units[last])
            there = (setting.there[0] and first == 0, setting.there[1] and last == len(units) - 1)
            own = replace(setting, x=shapes[first], data=setting.data or first > 0, there=there)
            yield from _of_stretch(graph.pooled_first(), own, (first, last))


def _of_stretch(graph: Graph, setting: Setting, place: tuple[int, int]) -> Iterator[Choice]:
    shapes = graph.shapes(setting.x, setting.how.half)
    seen = set()
    over = []
    batch, data = setting.x.shape[0], setting.data
    halve = frozenset(_halved(graph, shapes, setting) if setting.how.bf16 else ())
    chunks = (
        [0]
        if setting.how.exact or any(node.steers for node in graph.nodes)
        else [0, *(c for c in _CHUNKS if c < batch)]
    )
    for remedy, kept, hold in _keeps(graph, data):
        one = program(graph, kept, data=data, hold=hold, halve=halve)
        if (one.kept, one.backward) in seen:
            continue
        seen.add((one.kept, one.backward))
        for chunk in chunks:
            way = Choice(*place, one, chunk, _need(one, shapes, setting, chunk), remedy + _in_parts(chunk))
            yield way
            other = one if setting.how.exact else over_inputs(one)
            takes = way.need if other == one else _need(other, shapes, setting, chunk)
            if takes.backward < way.need.backward:
                name = f"{remedy}, norm gradients in place{_in_parts(chunk)}"
                over.append(replace(way, program=other, need=takes, remedy=name))
    yield from over


def _need(one: Program, shapes: list[Shape], setting: Setting, chunk: int) -> Need:
    takes = need(one, shapes, how=setting.how, layout=setting.layout, chunk=chunk)
    if chunk:
        work = 0.02 * sum(work_of(one, shapes, i) for i in range(len(one.graph.nodes)))
        takes = replace(takes, work=takes.work + work)
    return takes


def _in_parts(chunk: int) -> str:
    return f", {chunk} images at a time" if chunk else ""


def _halved(graph: Graph, shapes: Sequence[Shape], setting: Setting) -> set[int]:
    """The values that are held in bf16, if they are kept."""
    there = {v for v, is_there in zip((0, graph.out), setting.there, strict=True) if is_there}
    return {v for v, shape in enumerate(shapes) if shape.dtype.itemsize > 2} - there


def _keeps(graph: Graph, data: bool) -> Iterator[tuple[str, set[int], bool]]:
    """(what it is called, the values kept, whether what is made again is held), the most kept first."""
    full = needed(graph, data=data)
    yield "kept", full, True
    lean = {v for v in full if v in (0, graph.out) or not _follows(graph, v, full)}
    yield "norm and ReLU again", lean, True
    narrow = {v for v in lean if v in (0, graph.out) or not _widens(graph, v)}
    yield "norm, ReLU and wide 1x1 again", narrow, True
    ends = full & {0, graph.out}
    yield "all again", ends, True
    yield "all again, cheap ones twice", ends, False


def _follows(graph: Graph, v: int, full: set[int]) -> bool:
    """A value that norms and ReLUs alone make of one that is kept anyway."""
    node = graph.nodes[v - 1]
    if not node.cheap or node.op == "add":
        return False
    source = node.inputs[0]
    return source in full or (source > 0 and _follows(graph, source, full))


def _widens(graph: Graph, v: int) -> bool:
    node = graph.nodes[v - 1]
    if node.op != "conv" or tuple(node.layer.kernel_size) != (1, 1):
        return False
    return bool(node.layer.out_channels > node.layer.in_channels)


@dataclass(frozen=True)
class _State:
    kept: int
    peak: int
    work: float
    choices: tuple[Choice, ...]


def best(count: int, ways: Sequence[Choice], around: Around, budget: float) -> Plan | None:
    """The plan of the least work whose peak is within the budget, among equals the one of the lowest peak.

    Args:
        count: units in the chain.
        ways: all choices.
        around: bytes beside the units.
        budget: bytes of the device.
    """
    by_end: list[list[Choice]] = [[] for _ in range(count)]
    for way in ways:
        by_end[way.last].append(way)
    gradients = [0] * count
    for way in ways:
        if way.first == way.last:
            gradients[way.first] = way.need.gradients
    behind = [0, *accumulate(reversed(gradients))][::-1]  # of the units from i on
    states: list[list[_State]] = [[_State(0, 0, 0.0, ())]]
    for end in range(count):
        found = []
        for way in by_end[end]:
            later = around.gradients + (behind[end + 1] if around.stays else 0)
            most = max(way.need.backward + later, way.need.x + way.need.forward)
            for state in states[way.first]:
                peak = max(around.fixed + state.kept + most, state.peak)
                if peak <= budget:
                    kept, work = state.kept + way.need.kept + way.need.x, state.work + way.need.work
                    found.append(_State(kept, peak, work, (*state.choices, way)))
        states.append(_undominated(found))
    ends = [_finished(state, around) for state in states[count]]
    ends = [plan for plan in ends if plan.peak <= budget]
    return min(ends, key=lambda plan: (plan.work, plan.peak), default=None)


def _finished(state: _State, around: Around) -> Plan:
    held = state.kept + around.after
    peak = max(state.peak, around.fixed + held + around.copies + around.head)
    return Plan(state.choices, held, peak, state.work)


def _undominated(states: list[_State]) -> list[_State]:
    """Those of which no other has as little kept and work; of equals the one of the lowest peak."""
    found: list[_State] = []
    for state in sorted(states, key=lambda s: (s.work, s.kept, s.peak)):
        if not found or state.kept < found[-1].kept:
            found.append(state)
    return found


def lowest(count: int, ways: Sequence[Choice], around: Around) -> Plan:
    """The plan of the lowest peak, to 64 KiB."""
    plan = best(count, ways, around, math.inf)
    if plan is None:
        raise InputError("SavedMemory: there is nothing to plan")
    low = 0.0
    while plan.peak - low > 2**16:
        middle = (low + plan.peak) / 2
        found = best(count, ways, around, middle)
        if found is None:
            low = middle
        else:
            plan = found
    return plan
