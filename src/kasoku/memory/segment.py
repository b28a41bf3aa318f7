"""A run of layers as one autograd function, which keeps some values between forward and backward.

A `Program` holds its instructions; they follow from the graph and from the values that are kept. Values that backward
needs and that were not kept are recomputed when they are needed. Each value is freed after its last use.
memory_model.py sums the bytes of the same instructions.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from kasoku.core import InputError
from kasoku.core.torch_internals import forward_pre_hooks, version
from kasoku.memory import ops
from kasoku.memory.graph import GraphNode, Instruction, LayerGraph

_NEAR = 4  # gradient steps during which a recomputed cheap value is kept for its next use


@dataclass(frozen=True)
class Program:
    """The instructions of a segment."""

    graph: LayerGraph
    kept: frozenset[int]  # values held from forward to backward, beside max-pool positions and statistics; 0: the input
    forward: tuple[Instruction, ...] = field(repr=False)
    backward: tuple[Instruction, ...] = field(repr=False)


def backward_reads(node: GraphNode, at: int) -> tuple[int, ...]:
    """The values that the backward of node number `at` reads."""
    if node.op in ("conv", "norm", "other"):
        return node.inputs
    return (at + 1,) if node.op == "relu" else ()


def build_program(
    graph: LayerGraph, kept: Iterable[int], input_gradient: bool, *, over_inputs: bool = False
) -> Program:
    """The instructions for a segment that keeps these values, if its backward reads them.

    `over_inputs`: norms write their gradient over their input if nothing reads it later. Ref: [003], which writes
    errors over the data that they belong to.
    """
    needs = [input_gradient]
    for node in graph.nodes:
        needs.append(any(p.requires_grad for p in node.params) or any(needs[v] for v in node.inputs))
    order, useful = _backward_order(graph, needs, {0, *kept})
    forward = _with_frees(graph, [Instruction("compute", i) for i in range(len(graph.nodes))], useful | {graph.out})
    backward = _with_frees(graph, order, frozenset(), over_inputs=over_inputs)
    return Program(graph, useful, tuple(forward), tuple(backward))


def _backward_order(graph: LayerGraph, needs: list[bool], kept: set[int]) -> tuple[list[Instruction], frozenset[int]]:
    """The gradients and recomputations in order, and the kept values that they read."""
    nodes, steps = graph.nodes, list[Instruction]()
    used, present = set[int](), set[int]()  # kept values that are read, recomputed ones that are held

    def ensure(v: int) -> None:
        if v in kept:
            used.add(v)
        elif v not in present:
            for u in nodes[v - 1].inputs:
                ensure(u)
            steps.append(Instruction("compute", v - 1))
            present.add(v)

    grads = [i for i in reversed(range(len(nodes))) if needs[i + 1]]
    own = {graph.out: False}  # value -> whether its gradient shares no memory, so that it may be written to
    for place, i in enumerate(grads):
        for v in backward_reads(nodes[i], i):
            ensure(v)
        incoming = own.pop(i + 1)
        new = nodes[i].op != "add" or (incoming and sum(needs[v] for v in nodes[i].inputs) == 1)
        joins = []
        for v in nodes[i].inputs:
            joins.append("" if not needs[v] else "set" if v not in own else "into" if new else "fresh")
            if needs[v]:
                own[v] = new or v in own
        steps.append(Instruction("grad", i, nodes[i].op == "relu" and incoming, tuple(joins)))
        soon = {v for j in grads[place + 1 : place + 1 + _NEAR] for v in backward_reads(nodes[j], j)}
        present -= {v for v in present if nodes[v - 1].cheap} - soon
    return steps, frozenset(used)


def _with_frees(
    graph: LayerGraph, steps: list[Instruction], end: frozenset[int], *, over_inputs: bool = False
) -> list[Instruction]:
    """The steps with each value freed after its last use; a first input that ends there may be written over.

    Values of `end` still exist afterwards. The segment's input and output, which its neighbours may hold too, are not
    written over.
    """
    reverse, alive = list[Instruction](), set(end)
    for step in reversed(steps):
        node, computes = graph.nodes[step.at], step.kind == "compute"
        reads = node.inputs if computes else backward_reads(node, step.at)
        ending = [v for v in dict.fromkeys(reads) if v not in alive]
        unread = (step.at + 1,) if computes and step.at + 1 not in alive else ()
        first, inplace = node.inputs[0], step.inplace
        if computes and node.op in ("relu", "add"):
            distinct = len(set(node.inputs)) == len(node.inputs)
            inplace = first in ending and first not in (0, graph.out) and distinct
        elif node.op == "norm" and not computes:
            inplace = over_inputs and first in ending and first != 0
        reverse.append(step._replace(inplace=inplace, frees=(*ending[::-1], *unread)))
        alive = (alive - {step.at + 1} if computes else alive) | {*ending}
    return reverse[::-1]


# ---- execution


@dataclass
class Segment:
    """Runs the layers of a program."""

    program: Program  # the instructions
    how: ops.Numerics  # precision, and whether recomputation must be exact
    chunk: int = 0  # images at a time, 0: all at once; only without BatchNorm over the batch
    name: str = ""  # of its first and last layer, for errors and the printed plan
    caller: nn.Module | None = None  # the module whose forward runs the segment, so torch calls its forward pre-hooks

    def __call__(self, x: Tensor) -> Tensor:
        nodes = self.program.graph.nodes
        for layer in [node.layer for node in nodes if node.layer is not None and node.layer is not self.caller]:
            for hook in forward_pre_hooks(layer):  # Overlap may have to update a layer before its forward
                hook(layer, (x,))
        weights = list(dict.fromkeys(p for node in nodes for p in node.params))  # each once
        learning = [p for p in weights if p.requires_grad]
        return cast(Tensor, _SegmentFunction.apply(self, x, weights, *learning))  # type: ignore[no-untyped-call]

    def parts(self, n: int) -> list[slice]:
        """The chunks of n images."""
        return [slice(i, i + (self.chunk or n)) for i in range(0, n, self.chunk or n)]


class _SegmentFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, segment: Segment, x: Tensor, weights: list[Tensor], *learning: Tensor) -> Tensor:
        graph, runs = segment.program.graph, list[SegmentRun]()
        out: Tensor | None = None
        for part in segment.parts(len(x)):
            run = SegmentRun(segment, x[part])
            out = _with_part(out, run.forward(), part, len(x))
            if graph.out in run.values:
                run.values[graph.out] = out[part].detach()
            runs.append(run)
        norms = [node.layer for node in graph.nodes if node.op == "norm" and not node.uses_batch_statistics]
        read = [*weights, *(t for norm in norms for t in (norm.running_mean, norm.running_var))]
        read += [run.values[v] for run in runs for v in {0, graph.out} & run.values.keys()]  # others may write to these
        ctx.segment, ctx.learning, ctx.images = segment, learning, len(x)
        ctx.runs, ctx.read_later = runs, [(t, version(t)) for t in read]
        return cast(Tensor, out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        segment: Segment = ctx.segment
        if ctx.runs is None:
            raise InputError(f"SavedMemory: a second backward through {segment.name}: the first one frees its values")
        if any(version(t) != then for t, then in ctx.read_later):
            raise InputError(f"SavedMemory: input, output or a weight of {segment.name} was written before backward")
        runs, ctx.runs, ctx.read_later = ctx.runs, None, None
        gradients: dict[Tensor, Tensor] = {}
        dx: Tensor | None = None
        for part in segment.parts(ctx.images):
            part_dx = runs.pop(0).backward(dy[part], gradients)
            if ctx.needs_input_grad[1] and part_dx is not None:
                dx = _with_part(dx, part_dx, part, ctx.images)
        return None, dx, None, *(gradients.get(p) for p in ctx.learning)


def _with_part(whole: Tensor | None, x: Tensor, part: slice, n: int) -> Tensor:
    """A tensor of n images of which a part is x; x itself if it has all of them."""
    if len(x) == n:
        return x
    if whole is None:
        whole = torch.empty_strided((n, *x.shape[1:]), x.stride(), dtype=x.dtype, device=x.device)
    whole[part].copy_(x)
    return whole


class SegmentRun:
    """One run of a segment on some images. Between forward and backward it holds the kept values."""

    def __init__(self, segment: Segment, x: Tensor) -> None:
        self.program, self.how = segment.program, segment.how
        self.values = {0: x}  # that exist now, by number
        self.dtypes = {0: x.dtype}  # of all values
        self.extras: dict[int, Any] = {}  # the results of nodes besides values: statistics, positions in max-pools

    def forward(self) -> Tensor:
        for step in self.program.forward:
            self._compute(step)
        out = self.values[self.program.graph.out]
        self.values = {v: self.values[v].detach() for v in self.program.kept}
        return out

    def backward(self, dy: Tensor, gradients: dict[Tensor, Tensor]) -> Tensor | None:
        """The input's gradient, None if it needs none; adds the gradients of weights to `gradients`."""
        arrived = {self.program.graph.out: dy}
        for step in self.program.backward:
            if step.kind == "compute":
                self._compute(step)
            else:
                self._differentiate(step, arrived, gradients)
        return arrived.get(0)

    def _compute(self, step: Instruction) -> None:
        """A node's value, for the first time or once more."""
        node = self.program.graph.nodes[step.at]
        inputs, extra = [self.values[v] for v in node.inputs], self.extras.get(step.at)
        value, extra = ops.compute(node, inputs, extra, how=self.how, inplace=step.inplace)
        self.values[step.at + 1], self.dtypes[step.at + 1] = value, value.dtype
        if extra is not None:
            self.extras[step.at] = extra
        for v in step.frees:
            del self.values[v]

    def _differentiate(self, step: Instruction, arrived: dict[int, Tensor], gradients: dict[Tensor, Tensor]) -> None:
        """Replaces the gradient of a node's value, of those that have arrived, by the gradients of its inputs."""
        node, extra = self.program.graph.nodes[step.at], self.extras.pop(step.at, None)
        value = next((self.values[v] for v in backward_reads(node, step.at)), None)
        new, of_weights = ops.gradients(node, step, arrived.pop(step.at + 1), value, extra, self.how)
        for p, g in zip(node.params, of_weights, strict=True):
            if g is not None:
                gradients[p] = gradients[p].add_(g) if p in gradients else g
        for v, join, gradient in zip(node.inputs, step.joins, new, strict=True):
            if join:
                own = gradient.to(self.dtypes[v])
                arrived[v] = own if join == "set" else arrived[v] + own if join == "fresh" else own.add_(arrived[v])
        for v in step.frees:
            del self.values[v]
