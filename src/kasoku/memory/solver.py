"""Choose what each segment of a network keeps: the least time under a memory budget, by dynamic programming.

Note: the result is exact. A plan cuts a chain of units into segments and picks a program for each. The peak of a
segment's backward depends only on its own program and on the bytes kept before it. So for each position in the chain
it is enough to remember the Pareto front of (bytes kept so far, work so far). A smaller budget only removes plans, so
the peak of the best plan never rises as the budget falls.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from kasoku.core import InputError
from kasoku.memory.graph import LayerGraph, ValueShape
from kasoku.memory.memory_model import ImageLayout, MemoryNeed, need, work_of
from kasoku.memory.ops import Numerics
from kasoku.memory.schedule import Program, needed, over_inputs, program

_LONGEST = 4  # units in a segment
_CHUNKS = (4, 16)  # images at a time


@dataclass(frozen=True)
class ChainSetting:
    """What the programs of a chain depend on, besides its layers.

    Args:
        images: shape and type of the chain's input.
        image_gradient: the input needs a gradient.
        how: precision of the operations.
        layout: memory format and device.
        held_elsewhere: whether something outside the chain keeps its input, and its output, so that a copy in bf16
            would save nothing.
    """

    images: ValueShape
    image_gradient: bool
    how: Numerics
    layout: ImageLayout
    held_elsewhere: tuple[bool, bool] = (False, False)


@dataclass(frozen=True)
class SegmentChoice:
    """A program for the units from `first` to `last`, `chunk` images at a time (0: all at once)."""

    first: int
    last: int
    program: Program
    chunk: int
    need: MemoryNeed
    remedy: str


@dataclass(frozen=True)
class OutsideBytes:
    """Bytes outside the planned units.

    Args:
        fixed: weights and optimizer state, all the time.
        head_kept: activations that the layers after the units (the head) keep for backward.
        copies: copies of the head's weights (autocast's); they do not grow with the batch.
        gradients: gradients of the head that still exist when the units' backward begins.
        gradients_stay: the gradients of units also exist until the step.
        head_backward: peak of the head's backward, besides what is kept.
    """

    fixed: int
    head_kept: int
    copies: int
    gradients: int
    gradients_stay: bool
    head_backward: int


@dataclass(frozen=True)
class MemoryPlan:
    """The choices along the chain: bytes kept for backward, peak bytes, and recomputed multiply-adds."""

    choices: tuple[SegmentChoice, ...]
    kept: int
    peak: int
    work: float


def choices(units: Sequence[LayerGraph], setting: ChainSetting) -> Iterator[SegmentChoice]:
    """All ways to run all stretches of units that are considered."""
    shapes = [setting.images]
    for unit in units:
        shapes.append(unit.shapes(shapes[-1], setting.how.half)[-1])
    for first in range(len(units)):
        graph = LayerGraph(())
        for last in range(first, min(first + _LONGEST, len(units))):
            graph = graph.then(units[last])
            elsewhere = (setting.held_elsewhere[0] and first == 0, setting.held_elsewhere[1] and last == len(units) - 1)
            own = replace(
                setting,
                images=shapes[first],
                image_gradient=setting.image_gradient or first > 0,
                held_elsewhere=elsewhere,
            )
            yield from _of_stretch(graph.pooled_first(), own, (first, last))


def _of_stretch(graph: LayerGraph, setting: ChainSetting, place: tuple[int, int]) -> Iterator[SegmentChoice]:
    shapes = graph.shapes(setting.images, setting.how.half)
    seen = set()
    over = []
    batch, data = setting.images.shape[0], setting.image_gradient
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
            way = SegmentChoice(*place, one, chunk, _need(one, shapes, setting, chunk), remedy + _in_parts(chunk))
            yield way
            other = one if setting.how.exact else over_inputs(one)
            takes = way.need if other == one else _need(other, shapes, setting, chunk)
            if takes.backward < way.need.backward:
                name = f"{remedy}, norm gradients in place{_in_parts(chunk)}"
                over.append(replace(way, program=other, need=takes, remedy=name))
    yield from over


def _need(one: Program, shapes: list[ValueShape], setting: ChainSetting, chunk: int) -> MemoryNeed:
    takes = need(one, shapes, how=setting.how, layout=setting.layout, chunk=chunk)
    if chunk:
        work = 0.02 * sum(work_of(one, shapes, i) for i in range(len(one.graph.nodes)))
        takes = replace(takes, work=takes.work + work)
    return takes


def _in_parts(chunk: int) -> str:
    return f", {chunk} images at a time" if chunk else ""


def _halved(graph: LayerGraph, shapes: Sequence[ValueShape], setting: ChainSetting) -> set[int]:
    """The values that are held in bf16, if they are kept."""
    elsewhere = {v for v, held in zip((0, graph.out), setting.held_elsewhere, strict=True) if held}
    return {v for v, shape in enumerate(shapes) if shape.dtype.itemsize > 2} - elsewhere


def _keeps(graph: LayerGraph, data: bool) -> Iterator[tuple[str, set[int], bool]]:
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


def _follows(graph: LayerGraph, v: int, full: set[int]) -> bool:
    """A value that norms and ReLUs alone make of one that is kept anyway."""
    node = graph.nodes[v - 1]
    if not node.cheap or node.op == "add":
        return False
    source = node.inputs[0]
    return source in full or (source > 0 and _follows(graph, source, full))


def _widens(graph: LayerGraph, v: int) -> bool:
    node = graph.nodes[v - 1]
    if node.op != "conv" or tuple(node.layer.kernel_size) != (1, 1):
        return False
    return bool(node.layer.out_channels > node.layer.in_channels)


@dataclass(frozen=True)
class _PartialPlan:
    kept: int
    peak: int
    work: float
    choices: tuple[SegmentChoice, ...]


def best(count: int, ways: Sequence[SegmentChoice], around: OutsideBytes, budget: float) -> MemoryPlan | None:
    """The plan of the least work whose peak is within the budget, among equals the one of the lowest peak.

    Args:
        count: units in the chain.
        ways: all choices.
        around: bytes beside the units.
        budget: bytes of the device.
    """
    by_end: list[list[SegmentChoice]] = [[] for _ in range(count)]
    for way in ways:
        by_end[way.last].append(way)
    gradients = [0] * count
    for way in ways:
        if way.first == way.last:
            gradients[way.first] = way.need.gradients
    behind = [0, *accumulate(reversed(gradients))][::-1]  # of the units from i on
    states: list[list[_PartialPlan]] = [[_PartialPlan(0, 0, 0.0, ())]]
    for end in range(count):
        found = []
        for way in by_end[end]:
            later = around.gradients + (behind[end + 1] if around.gradients_stay else 0)
            most = max(way.need.backward + later, way.need.input + way.need.forward)
            for state in states[way.first]:
                peak = max(around.fixed + state.kept + most, state.peak)
                if peak <= budget:
                    kept, work = state.kept + way.need.kept + way.need.input, state.work + way.need.work
                    found.append(_PartialPlan(kept, peak, work, (*state.choices, way)))
        states.append(_undominated(found))
    ends = [_finished(state, around) for state in states[count]]
    ends = [plan for plan in ends if plan.peak <= budget]
    return min(ends, key=lambda plan: (plan.work, plan.peak), default=None)


def _finished(state: _PartialPlan, around: OutsideBytes) -> MemoryPlan:
    held = state.kept + around.head_kept
    peak = max(state.peak, around.fixed + held + around.copies + around.head_backward)
    return MemoryPlan(state.choices, held, peak, state.work)


def _undominated(states: list[_PartialPlan]) -> list[_PartialPlan]:
    """Those of which no other has as little kept and work; of equals the one of the lowest peak."""
    found: list[_PartialPlan] = []
    for state in sorted(states, key=lambda s: (s.work, s.kept, s.peak)):
        if not found or state.kept < found[-1].kept:
            found.append(state)
    return found


def lowest(count: int, ways: Sequence[SegmentChoice], around: OutsideBytes) -> MemoryPlan:
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
