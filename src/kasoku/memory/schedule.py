"""What a segment does in forward and in backward, step by step: the runner runs it, the predictor adds its bytes up.

A `Program` follows from the graph and the values that are kept between forward and backward. What backward needs and
was not kept is computed again when it is needed; every value is let go after its last use.

Note: held in bf16. A value of more than 16 bits may lie in bf16 between forward and backward. It is rounded after its
last use in forward, so that outputs are what they are without it, and loaded into its own type where backward reads it;
between reads that are far from one another only the bf16 is held. What enters and what leaves a segment its neighbours
hold too: that is rounded once for both (segment.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

from kasoku.memory.graph import GraphNode, LayerGraph

_NEAR = 2  # gradient steps over which a cheap value computed again is held rather than computed (or loaded) once more


class Instruction(NamedTuple):
    """One step: "make" a node's value, take the "grad" of a node, "free" a value, or "load" one held in bf16.

    Args:
        what: the kind.
        at: the node, or the value to free or load.
        inplace: the result takes the place of the first input (make), of the incoming gradient (grad of a ReLU), of the
            input (grad of a norm), or of the bf16, which is not read again (load).
        joins: for "grad", how the gradient of each input meets what has arrived there before: "set" (nothing has),
            "into new", "into old", "fresh" (a new tensor), or "" where the input needs none.
    """

    what: str
    at: int
    inplace: bool = False
    joins: tuple[str, ...] = ()


@dataclass(frozen=True)
class Program:
    """The steps of a segment.

    Attributes:
        kept: the values held from forward to backward, beside codes and statistics; 0 is the input.
        forward: steps of the first forward.
        backward: steps of backward.
        halved: those of them that are held in bf16.
        again: the nodes computed again.
    """

    graph: LayerGraph
    kept: frozenset[int]
    forward: tuple[Instruction, ...] = field(repr=False)
    backward: tuple[Instruction, ...] = field(repr=False)
    halved: frozenset[int] = frozenset()

    @property
    def again(self) -> list[GraphNode]:
        """What is computed a second time."""
        return [self.graph.nodes[do.at] for do in self.backward if do.what == "make"]


def over_inputs(one: Program) -> Program:
    """The same program; a norm that is the last to read its input, which nobody else holds, leaves its gradient there.

    Ref: [003], which writes errors over the data that they are of.
    """
    nodes, steps = one.graph.nodes, list(one.backward)
    for i, (do, then) in enumerate(pairwise(one.backward)):
        if do.what == "grad" and nodes[do.at].op == "norm":
            (x,) = nodes[do.at].inputs
            steps[i] = do._replace(inplace=x != 0 and then == Instruction("free", x))
    return replace(one, backward=tuple(steps))


def needed_by(node: GraphNode, at: int) -> tuple[int, ...]:
    """The values that the backward of a node reads; `at`: its place."""
    if node.op in ("conv", "norm", "other"):
        return node.inputs
    return (at + 1,) if node.op == "relu" else ()


def learning(graph: LayerGraph, *, data: bool) -> list[bool]:
    """Which values need a gradient; `data`: the input does."""
    needs = [data]
    for node in graph.nodes:
        needs.append(node.learns or any(needs[v] for v in node.inputs))
    return needs


def needed(graph: LayerGraph, *, data: bool) -> set[int]:
    """The values that backward reads."""
    needs = learning(graph, data=data)
    return {v for i, node in enumerate(graph.nodes) if needs[i + 1] for v in needed_by(node, i)}


def program(
    graph: LayerGraph,
    kept: Iterable[int],
    *,
    data: bool,
    hold: bool = True,
    halve: frozenset[int] = frozenset(),
) -> Program:
    """The steps for a choice of values kept.

    Args:
        graph: of the segment.
        kept: values held from forward to backward, as far as they are of use.
        data: the input needs a gradient.
        hold: hold what is computed again until its last use; False: cheap values only over the next few steps.
        halve: values that are held in bf16 if they are kept.
    """
    needs = learning(graph, data=data)
    wanted = _BackwardOrder(graph, needs, set(kept), hold)
    useful = frozenset(wanted.order())
    halved = useful & halve
    inner = halved - {0, graph.out}  # the ends are rounded by the runner, when all is done
    backward = _with_frees(graph, wanted.steps, start=useful, stay=frozenset())
    order = [Instruction("make", i) for i in range(len(graph.nodes))]
    stay = (useful - inner) | {graph.out}
    forward = _with_frees(graph, order, start=frozenset({0}), stay=stay, whole=inner)
    steps = _with_loads(graph, _joined(graph, needs, backward), halved)
    return Program(graph, useful, tuple(forward), tuple(steps), halved)


class _BackwardOrder:
    """Finds the order of backward: what is made again, and when."""

    def __init__(self, graph: LayerGraph, needs: list[bool], kept: set[int], hold: bool) -> None:
        self.graph, self.needs, self.hold = graph, needs, hold
        self.kept = kept | {0}
        self.have = set(self.kept)
        self.steps: list[Instruction] = []
        self.used: set[int] = set()
        self.grads = [i for i in reversed(range(len(graph.nodes))) if needs[i + 1]]

    def order(self) -> set[int]:
        """Fills `steps`; returns the kept values that are of use."""
        for place, i in enumerate(self.grads):
            for v in needed_by(self.graph.nodes[i], i):
                self.ensure(v)
            self.steps.append(Instruction("grad", i))
            if not self.hold:
                soon = {v for j in self.grads[place + 1 : place + 1 + _NEAR] for v in needed_by(self.graph.nodes[j], j)}
                cheap = {v for v in self.have - self.kept if self.graph.nodes[v - 1].cheap}
                self.have -= cheap - soon
        return self.used

    def ensure(self, v: int) -> None:
        if v in self.have:
            self.used |= {v} & self.kept
            return
        for u in self.graph.nodes[v - 1].inputs:
            self.ensure(u)
        self.steps.append(Instruction("make", v - 1))
        self.have.add(v)


def reads(graph: LayerGraph, do: Instruction) -> tuple[int, ...]:
    """The values a step reads."""
    node = graph.nodes[do.at]
    return node.inputs if do.what == "make" else needed_by(node, do.at)


def _with_frees(
    graph: LayerGraph,
    steps: list[Instruction],
    *,
    start: frozenset[int],
    stay: frozenset[int],
    whole: frozenset[int] = frozenset(),
) -> list[Instruction]:
    """The steps with every value freed after its last use; a first input that ends there may be written over.

    Values of `start` are there before, values of `stay` are still there at the end. What others may hold too, the
    input and the output, is not written over, nor are values of `whole`, which are read once more when they are freed.
    """
    found: list[Instruction] = []
    alive = set(stay)
    for do in reversed(steps):
        if do.what == "make":
            if do.at + 1 not in alive:
                alive.add(do.at + 1)
                found.append(Instruction("free", do.at + 1))
            alive.discard(do.at + 1)
        ends = [v for v in dict.fromkeys(reads(graph, do)) if v not in alive]
        found += [Instruction("free", v) for v in ends]
        alive.update(ends)
        node = graph.nodes[do.at]
        own = (
            node.inputs[0] not in whole | {0, graph.out}
            and node.inputs[0] in ends
            and len(set(node.inputs)) == len(node.inputs)
        )
        found.append(do._replace(inplace=do.what == "make" and own and node.op in ("relu", "add")))
    found += [Instruction("free", v) for v in sorted(start - alive)]
    return found[::-1]


def _with_loads(graph: LayerGraph, steps: list[Instruction], apart: frozenset[int]) -> list[Instruction]:
    """The steps with values `apart`, held in bf16, loaded ahead of use, let go where the next one is far."""
    passed = [0, *accumulate(do.what == "grad" for do in steps)]  # gradients taken before each step
    before: dict[int, list[Instruction]] = {}
    after: dict[int, list[Instruction]] = {}
    for v in sorted(apart):
        places = [i for i, do in enumerate(steps) if do.what != "free" and v in reads(graph, do)]
        firsts = [j for i, j in pairwise(places) if passed[j] - passed[i] > _NEAR]
        firsts = [places[0], *firsts]
        for i, j in pairwise([*firsts, len(steps)]):
            last = max(place for place in places if place < j)
            before.setdefault(i, []).append(Instruction("load", v, inplace=j == len(steps)))
            if j < len(steps):
                after.setdefault(last, []).append(Instruction("free", v))
    return [one for i, do in enumerate(steps) for one in (*before.get(i, ()), do, *after.get(i, ()))]


def _joined(graph: LayerGraph, needs: list[bool], steps: list[Instruction]) -> list[Instruction]:
    """The steps with what becomes of each gradient: who shares an area of memory is known here, once for all."""
    area = {graph.out: -1}  # value -> the area of its gradient; -1 is autograd's own
    sharers = {-1: 2}
    fresh = 0
    found = []
    for do in steps:
        if do.what != "grad":
            found.append(do)
            continue
        node, mine = graph.nodes[do.at], area.pop(do.at + 1)
        inplace = node.op == "relu" and sharers[mine] == 1
        passes = node.op == "add" or inplace
        if not passes:
            sharers[mine] -= 1
        else:
            sharers[mine] += sum(needs[v] for v in node.inputs) - 1
        joins = []
        for v in node.inputs:
            if not needs[v]:
                joins.append("")
                continue
            new = mine if passes else (fresh := fresh + 1)
            sharers.setdefault(new, 1)
            old = area.get(v)
            if old is None:
                joins.append("set")
                area[v] = new
            elif sharers[new] == 1:
                joins.append("into new")
                area[v] = new
                sharers[old] -= 1
            elif sharers[old] == 1:
                joins.append("into old")
                sharers[new] -= 1
            else:
                joins.append("fresh")
                sharers[old] -= 1
                sharers[new] -= 1
                area[v] = fresh = fresh + 1
                sharers[fresh] = 1
        found.append(do._replace(inplace=inplace, joins=tuple(joins)))
    return found
