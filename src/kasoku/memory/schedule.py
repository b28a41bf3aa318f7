"""The instructions of a segment's forward and backward; segment.py runs them, memory_model.py sums their bytes.

A `Program` follows from the graph and from the values that are kept between forward and backward. Values that backward
needs and that were not kept are recomputed when they are needed. Each value is freed after its last use.

Note: values held in bf16. A kept value of more than 16 bits may be held in bf16 between forward and backward. It is
rounded after its last use in forward, so that outputs do not change, and converted back where backward reads it. If two
reads are far apart, only the bf16 is held between them. A segment's input and output are held by its neighbours too, so
each is rounded once for both (segment.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

from kasoku.memory.graph import GraphNode, LayerGraph

_NEAR = 2  # gradient steps during which a recomputed cheap value, or one converted from bf16, is kept for its next use


class Instruction(NamedTuple):
    """One step: "compute" a node's value, or take the "grad" of a node.

    Args:
        kind: one of the two.
        at: the node.
        inplace: the result takes the memory of the first input (compute), of the incoming gradient (grad of a ReLU) or
            of the input (grad of a norm).
        joins: for "grad", how the gradient of each input is added to the gradient of the same value from another
            reader: "set" (there is none yet), "into" (the other is added to it), "fresh" (a new tensor, as it shares
            its memory), or "" if the input needs no gradient.
        loads: the values converted from bf16 before it, and whether the bf16 is freed, as it is not read again.
        frees: the values freed after it.
    """

    kind: str
    at: int
    inplace: bool = False
    joins: tuple[str, ...] = ()
    loads: tuple[tuple[int, bool], ...] = ()
    frees: tuple[int, ...] = ()


@dataclass(frozen=True)
class Program:
    """The instructions of a segment.

    Attributes:
        kept: the values held from forward to backward, besides max-pool positions and statistics; 0 is the input.
        in_bf16: those of them that are held in bf16.
    """

    graph: LayerGraph
    kept: frozenset[int]
    forward: tuple[Instruction, ...] = field(repr=False)
    backward: tuple[Instruction, ...] = field(repr=False)
    in_bf16: frozenset[int] = frozenset()


def norms_in_place(program: Program) -> Program:
    """The same program, in which norms write their gradient over their input if nothing reads it later.

    Ref: [003], which writes errors over the data that they belong to.
    """
    nodes, steps = program.graph.nodes, list(program.backward)
    for i, step in enumerate(steps):
        if step.kind == "grad" and nodes[step.at].op == "norm":
            (x,) = nodes[step.at].inputs
            steps[i] = step._replace(inplace=x != 0 and x in step.frees)
    return replace(program, backward=tuple(steps))


def backward_reads(node: GraphNode, at: int) -> tuple[int, ...]:
    """The values that the backward of node number `at` reads."""
    if node.op in ("conv", "norm", "other"):
        return node.inputs
    return (at + 1,) if node.op == "relu" else ()


def build_program(
    graph: LayerGraph,
    kept: Iterable[int],
    *,
    input_gradient: bool,
    reuse: bool = True,
    bf16: frozenset[int] = frozenset(),
) -> Program:
    """The instructions for a choice of kept values.

    Args:
        graph: of the segment.
        kept: values to hold from forward to backward; those that backward does not read are left out.
        input_gradient: the segment's input needs a gradient.
        reuse: hold recomputed values until their last use; False: cheap values only over the next few steps.
        bf16: values that are held in bf16 if they are kept.
    """
    needs = [input_gradient]
    for node in graph.nodes:
        learns = any(p.requires_grad for p in node.params)
        needs.append(learns or any(needs[v] for v in node.inputs))
    order, useful = _backward_order(graph, needs, {0, *kept}, reuse)
    in_bf16 = useful & bf16
    inner = in_bf16 - {0, graph.out}  # the ends are rounded after the forward
    computes = [Instruction("compute", i) for i in range(len(graph.nodes))]
    forward = _with_frees(graph, computes, end=(useful - inner) | {graph.out}, not_over=inner)
    backward = _with_joins(graph, needs, _with_frees(graph, order))
    return Program(graph, useful, tuple(forward), tuple(_with_loads(graph, backward, in_bf16)), in_bf16)


def _backward_order(
    graph: LayerGraph, needs: list[bool], kept: set[int], reuse: bool
) -> tuple[list[Instruction], frozenset[int]]:
    """The gradients and recomputations in order, and the kept values that they read."""
    nodes, present = graph.nodes, set(kept)
    steps: list[Instruction] = []
    used: set[int] = set()

    def ensure(v: int) -> None:
        if v in present:
            used.update({v} & kept)
            return
        for u in nodes[v - 1].inputs:
            ensure(u)
        steps.append(Instruction("compute", v - 1))
        present.add(v)

    grads = [i for i in reversed(range(len(nodes))) if needs[i + 1]]
    for place, i in enumerate(grads):
        for v in backward_reads(nodes[i], i):
            ensure(v)
        steps.append(Instruction("grad", i))
        if not reuse:
            soon = {v for j in grads[place + 1 : place + 1 + _NEAR] for v in backward_reads(nodes[j], j)}
            present -= {v for v in present - kept if nodes[v - 1].cheap} - soon
    return steps, frozenset(used)


def _reads(graph: LayerGraph, step: Instruction) -> tuple[int, ...]:
    node = graph.nodes[step.at]
    return node.inputs if step.kind == "compute" else backward_reads(node, step.at)


def _with_frees(
    graph: LayerGraph,
    steps: list[Instruction],
    *,
    end: frozenset[int] = frozenset(),
    not_over: frozenset[int] = frozenset(),
) -> list[Instruction]:
    """The steps with each value freed after its last use; a first input that ends there may be written over.

    Values of `end` still exist afterwards. The segment's input and output, which its neighbours may hold too, are not
    written over, nor are values of `not_over`, which are read when they are freed.
    """
    reverse: list[Instruction] = []
    alive = set(end)
    for step in reversed(steps):
        node, ending = graph.nodes[step.at], [v for v in dict.fromkeys(_reads(graph, step)) if v not in alive]
        first, inplace = node.inputs[0], False
        if step.kind == "compute":
            distinct = len(set(node.inputs)) == len(node.inputs)
            free_input = first not in not_over | {0, graph.out} and first in ending and distinct
            inplace = free_input and node.op in ("relu", "add")
        unread = () if step.kind == "grad" or step.at + 1 in alive else (step.at + 1,)
        reverse.append(step._replace(inplace=inplace, frees=(*ending[::-1], *unread)))
        alive = (alive - {step.at + 1} if step.kind == "compute" else alive) | {*ending}
    return reverse[::-1]


def _with_loads(graph: LayerGraph, steps: list[Instruction], in_bf16: frozenset[int]) -> list[Instruction]:
    """The steps with values converted from bf16 before use, and freed again if the next use is far away."""
    grads_before = [*accumulate((step.kind == "grad" for step in steps), initial=0)]
    steps = list(steps)
    for v in sorted(in_bf16):
        uses = [i for i, step in enumerate(steps) if v in _reads(graph, step)]
        far = [(i, j) for i, j in pairwise(uses) if grads_before[j] - grads_before[i] > _NEAR]
        for i, _ in far:
            steps[i] = steps[i]._replace(frees=(v, *steps[i].frees))
        for i in (uses[0], *(j for _, j in far)):
            last = i == (far[-1][1] if far else uses[0])
            steps[i] = steps[i]._replace(loads=(*steps[i].loads, (v, last)))
    return steps


def _with_joins(graph: LayerGraph, needs: list[bool], steps: list[Instruction]) -> list[Instruction]:
    """The steps with the `joins` of each gradient: one that shares its memory is not written to."""
    own = {graph.out: False}  # value -> whether its gradient has memory of its own; autograd holds the output's
    joined = []
    for step in steps:
        if step.kind == "grad":
            node, incoming = graph.nodes[step.at], own.pop(step.at + 1)
            new = node.op != "add" or (incoming and sum(needs[v] for v in node.inputs) == 1)
            joins = []
            for v in node.inputs:
                joins.append("" if not needs[v] else "set" if v not in own else "into" if new else "fresh")
                if needs[v]:
                    own[v] = new or v in own
            step = step._replace(inplace=node.op == "relu" and incoming, joins=tuple(joins))
        joined.append(step)
    return joined
