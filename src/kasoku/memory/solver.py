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
from kasoku.memory.memory_model import ImageLayout, MemoryNeed, memory_need, work_of
from kasoku.memory.ops import Numerics
from kasoku.memory.schedule import Program, build_program, norms_in_place, values_for_backward

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


def segment_choices(units: Sequence[LayerGraph], setting: ChainSetting) -> Iterator[SegmentChoice]:
    """All considered programs for all runs of units."""
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
            yield from _choices_for(graph.pooled_first(), own, (first, last))


def _choices_for(graph: LayerGraph, setting: ChainSetting, units: tuple[int, int]) -> Iterator[SegmentChoice]:
    """The programs for the units from the first to the last; those with norm gradients in place come last."""
    shapes = graph.shapes(setting.images, setting.how.half)
    batch, exact = setting.images.shape[0], setting.how.exact
    bf16 = frozenset(_bf16_values(graph, shapes, setting) if setting.how.bf16 else ())
    whole_batch = exact or any(node.uses_batch_statistics for node in graph.nodes)
    chunks = [0] if whole_batch else [0, *(chunk for chunk in _CHUNKS if chunk < batch)]
    seen, in_place = set(), []
    for remedy, kept, reuse in _remedies(graph, setting.image_gradient):
        program = build_program(graph, kept, input_gradient=setting.image_gradient, reuse=reuse, bf16=bf16)
        if (program.kept, program.backward) in seen:
            continue
        seen.add((program.kept, program.backward))
        for chunk in chunks:
            parts = f", {chunk} images at a time" if chunk else ""
            choice = SegmentChoice(*units, program, chunk, _need(program, shapes, setting, chunk), f"{remedy}{parts}")
            yield choice
            over = program if exact else norms_in_place(program)
            need = choice.need if over == program else _need(over, shapes, setting, chunk)
            if need.backward < choice.need.backward:
                name = f"{remedy}, norm gradients in place{parts}"
                in_place.append(replace(choice, program=over, need=need, remedy=name))
    yield from in_place


def _need(program: Program, shapes: list[ValueShape], setting: ChainSetting, chunk: int) -> MemoryNeed:
    need = memory_need(program, shapes, how=setting.how, layout=setting.layout, chunk=chunk)
    if chunk:
        work = 0.02 * sum(work_of(program, shapes, i) for i in range(len(program.graph.nodes)))
        need = replace(need, work=need.work + work)
    return need


def _bf16_values(graph: LayerGraph, shapes: Sequence[ValueShape], setting: ChainSetting) -> set[int]:
    """The values that are held in bf16 if they are kept."""
    elsewhere = {v for v, held in zip((0, graph.out), setting.held_elsewhere, strict=True) if held}
    return {v for v, shape in enumerate(shapes) if shape.dtype.itemsize > 2} - elsewhere


def _remedies(graph: LayerGraph, input_gradient: bool) -> Iterator[tuple[str, set[int], bool]]:
    """(name, the kept values, whether recomputed values are reused), the most kept values first."""
    full = values_for_backward(graph, input_gradient=input_gradient)
    yield "kept", full, True
    lean = {v for v in full if v in (0, graph.out) or not _follows_cheaply(graph, v, full)}
    yield "norm and ReLU again", lean, True
    narrow = {v for v in lean if v in (0, graph.out) or not _widens(graph, v)}
    yield "norm, ReLU and wide 1x1 again", narrow, True
    ends = full & {0, graph.out}
    yield "all again", ends, True
    yield "all again, cheap ones twice", ends, False


def _follows_cheaply(graph: LayerGraph, v: int, kept: set[int]) -> bool:
    """Whether norms and ReLUs alone compute a value from a kept one."""
    node = graph.nodes[v - 1]
    if not node.cheap or node.op == "add":
        return False
    source = node.inputs[0]
    return source in kept or (source > 0 and _follows_cheaply(graph, source, kept))


def _widens(graph: LayerGraph, v: int) -> bool:
    """Whether a value is the output of a 1x1 convolution with more output than input channels."""
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


def plan_within(
    count: int, choices: Sequence[SegmentChoice], outside: OutsideBytes, budget: float
) -> MemoryPlan | None:
    """The plan of the least work whose peak is within the budget, among equals the one of the lowest peak.

    Args:
        count: units in the chain.
        choices: for all runs of units.
        outside: bytes outside the units.
        budget: bytes of the device.
    """
    by_end: list[list[SegmentChoice]] = [[] for _ in range(count)]
    gradients = [0] * count
    for choice in choices:
        by_end[choice.last].append(choice)
        if choice.first == choice.last:
            gradients[choice.first] = choice.need.gradients
    gradients_from = [0, *accumulate(reversed(gradients))][::-1]  # of the units from i on
    partial: list[list[_PartialPlan]] = [[_PartialPlan(0, 0, 0.0, ())]]
    for end in range(count):
        longer = []
        for choice in by_end[end]:
            need = choice.need
            later = outside.gradients + (gradients_from[end + 1] if outside.gradients_stay else 0)
            own_peak = max(need.backward + later, need.input + need.forward)
            for plan in partial[choice.first]:
                peak = max(outside.fixed + plan.kept + own_peak, plan.peak)
                if peak <= budget:
                    kept, work = plan.kept + need.kept + need.input, plan.work + need.work
                    longer.append(_PartialPlan(kept, peak, work, (*plan.choices, choice)))
        partial.append(_undominated(longer))
    plans = [_with_head(plan, outside) for plan in partial[count]]
    return min((p for p in plans if p.peak <= budget), key=lambda p: (p.work, p.peak), default=None)


def _with_head(plan: _PartialPlan, outside: OutsideBytes) -> MemoryPlan:
    kept = plan.kept + outside.head_kept
    peak = max(plan.peak, outside.fixed + kept + outside.copies + outside.head_backward)
    return MemoryPlan(plan.choices, kept, peak, plan.work)


def _undominated(plans: list[_PartialPlan]) -> list[_PartialPlan]:
    """The plans for which no other has less kept and no more work; of equals the one of the lowest peak."""
    front: list[_PartialPlan] = []
    for plan in sorted(plans, key=lambda p: (p.work, p.kept, p.peak)):
        if not front or plan.kept < front[-1].kept:
            front.append(plan)
    return front


def lowest_peak(count: int, choices: Sequence[SegmentChoice], outside: OutsideBytes) -> MemoryPlan:
    """The plan of the lowest peak, to 64 KiB."""
    plan = plan_within(count, choices, outside, math.inf)
    if plan is None:
        raise InputError("SavedMemory: there is nothing to plan")
    low = 0.0
    while plan.peak - low > 2**16:
        middle = (low + plan.peak) / 2
        lower = plan_within(count, choices, outside, middle)
        low, plan = (middle, plan) if lower is None else (low, lower)
    return plan
