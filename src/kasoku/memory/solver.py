"""Choose what each segment of a network keeps: the least time under a memory budget, by dynamic programming.

Note: the result is exact. A plan cuts a chain of units into segments and picks a program for each. The peak of a
segment's backward depends only on its own program and on the bytes kept before it. So for each position in the chain
it is enough to remember the Pareto front of (bytes kept so far, work so far). A smaller budget only removes plans, so
the peak of the best plan never rises as the budget falls.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import NamedTuple

from kasoku.memory.graph import LayerGraph
from kasoku.memory.memory_model import ChainSetting, MemoryNeed, memory_need
from kasoku.memory.ops import group_sizes
from kasoku.memory.segment import Program, build_program

_LONGEST = 4  # units in a segment
_CHUNK = 4  # images at a time


@dataclass(frozen=True)
class SegmentChoice:
    """A program for the units from `first` to `last`, `chunk` images at a time (0: all at once)."""

    first: int
    last: int
    program: Program
    chunk: int
    need: MemoryNeed
    remedy: str


class OutsideBytes(NamedTuple):
    """Bytes outside the planned units; `head`: the layers after the planned units."""

    fixed: int  # weights and optimizer state, all the time
    head_kept: int  # activations that the head keeps for backward
    gradients: int  # of the head, that still exist when the units' backward begins
    gradients_stay: bool  # the gradients of units also exist until the step
    head_backward: int  # peak of the head's backward, with copies of its weights (autocast's), besides what is kept


class MemoryPlan(NamedTuple):
    """The choices along the chain: bytes kept for backward, peak bytes, and recomputed multiply-adds."""

    choices: tuple[SegmentChoice, ...]
    kept: int
    peak: int
    work: float


def segment_choices(units: Sequence[LayerGraph], setting: ChainSetting, number: int = 0) -> Iterator[SegmentChoice]:
    """All considered programs for all runs of units, the first of which has this number."""
    shapes = [*accumulate(units, lambda x, unit: unit.shapes(x, setting.how.half)[-1], initial=setting.images)]
    for first in range(len(units)):
        later = replace(setting, images=shapes[first], image_gradient=True, reads_batch=False)
        graph, own = LayerGraph(()), later if first else setting
        for last in range(first, min(first + _LONGEST, len(units))):
            graph = graph.then(units[last].nodes)
            run = replace(own, ends_chain=last == len(units) - 1)
            yield from _choices_for(graph.pooled_first(), run, (number + first, number + last))


def _choices_for(graph: LayerGraph, setting: ChainSetting, units: tuple[int, int]) -> Iterator[SegmentChoice]:
    shapes = graph.shapes(setting.images, setting.how.half)
    batch, how = setting.images.shape[0], setting.how
    whole_batch = how.exact or any(node.uses_batch_statistics for node in graph.nodes)
    chunks = [0] if whole_batch or batch <= _CHUNK else [0, _CHUNK]
    seen = set()
    # not beside a norm whose group spans ranks
    over_inputs = not how.exact and all(group_sizes(node.layer, batch) for node in graph.nodes if node.op == "norm")
    for remedy, kept in _remedies(graph, setting.image_gradient):
        program = build_program(graph, kept, setting.image_gradient)
        if (program.kept, program.backward) in seen:
            continue
        seen.add((program.kept, program.backward))
        over = build_program(graph, kept, setting.image_gradient, over_inputs=True) if over_inputs else program
        for chunk in chunks:
            parts = f", {chunk} images at a time" if chunk else ""
            need = memory_need(program, shapes, setting, chunk)
            yield SegmentChoice(*units, program, chunk, need, f"{remedy}{parts}")
            less = need if over == program else memory_need(over, shapes, setting, chunk)
            if less.backward < need.backward:
                yield SegmentChoice(*units, over, chunk, less, f"{remedy}, norm gradients in place{parts}")


def _remedies(graph: LayerGraph, input_gradient: bool) -> Iterator[tuple[str, frozenset[int]]]:
    """(name, the kept values), the most kept values first."""
    full = build_program(graph, range(graph.out + 1), input_gradient).kept
    ends = full & {0, graph.out}

    def follows_cheaply(v: int) -> bool:
        """Whether norms and ReLUs alone compute a value from a kept one."""
        node, source = graph.nodes[v - 1], graph.nodes[v - 1].inputs[0]
        return node.cheap and node.op != "add" and (source in full or (source > 0 and follows_cheaply(source)))

    def widens(v: int) -> bool:
        """Whether a value is the output of a 1x1 convolution with more output than input channels."""
        node = graph.nodes[v - 1]
        narrow = node.op != "conv" or tuple(node.layer.kernel_size) != (1, 1)
        return not narrow and bool(node.layer.out_channels > node.layer.in_channels)

    lean = ends | {v for v in full - ends if not follows_cheaply(v)}
    yield "kept", full
    yield "norm and ReLU again", lean
    yield "norm, ReLU and wide 1x1 again", ends | {v for v in lean - ends if not widens(v)}
    yield "all again", ends


def plan_within(choices: Sequence[SegmentChoice], outside: OutsideBytes, budget: float) -> MemoryPlan | None:
    """The plan of the least work whose peak is within the budget, among equals the one of the lowest peak."""
    count = 1 + max(choice.last for choice in choices)  # units
    gradients = {choice.first: choice.need.gradients for choice in choices if choice.first == choice.last}
    gradients_from = [0, *accumulate(gradients.get(i, 0) for i in reversed(range(count)))][::-1]  # of units from i on
    fronts = [[MemoryPlan((), 0, 0, 0.0)]]  # plans for the units before i: none has less kept and no more work
    for end, ending in groupby(sorted(choices, key=lambda c: c.last), key=lambda c: c.last):
        longer = []
        for choice in ending:
            need = choice.need
            later = outside.gradients + (gradients_from[end + 1] if outside.gradients_stay else 0)
            own_peak = max(need.backward + later, need.forward)
            for plan in fronts[choice.first]:
                peak = max(outside.fixed + plan.kept + own_peak, plan.peak)
                if peak <= budget:
                    kept, work = plan.kept + need.kept, plan.work + need.work
                    longer.append(MemoryPlan((*plan.choices, choice), kept, peak, work))
        front: list[MemoryPlan] = []
        for plan in sorted(longer, key=lambda p: (p.work, p.kept, p.peak)):
            if not front or plan.kept < front[-1].kept:
                front.append(plan)
        fronts.append(front)
    whole = (plan._replace(kept=plan.kept + outside.head_kept) for plan in fronts[count])
    plans = [p._replace(peak=max(p.peak, outside.fixed + p.kept + outside.head_backward)) for p in whole]
    return min((p for p in plans if p.peak <= budget), key=lambda p: (p.work, p.peak), default=None)
