"""A run of layers as one autograd function, which keeps some values between forward and backward.

A `Program` holds its instructions; they follow from the graph and from the values that are kept. Values that backward
needs and that were not kept are recomputed when they are needed. Each value is freed after its last use.
memory_model.py sums the bytes of the same instructions.

Note: values held in bf16. A kept value of more than 16 bits may be held in bf16 between forward and backward. It is
rounded after its last use in forward, so that outputs do not change, and converted back where backward reads it. If two
reads are far apart, only the bf16 is held between them.

Note: one bf16 for two segments. The output of a segment is the input of the next one, and both may hold it in bf16. The
bf16 of such a tensor is remembered as long as the tensor lives, and shared unless the tensor has been written since.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakTensorKeyDictionary

from kasoku.core import InputError
from kasoku.core.torch_internals import forward_pre_hooks, version
from kasoku.memory import ops
from kasoku.memory.graph import GraphNode, Instruction, LayerGraph, weights_of
from kasoku.memory.norms import group_sizes

_NEAR = 4  # gradient steps during which a recomputed cheap value, or one converted from bf16, is kept for its next use
_rounded = WeakTensorKeyDictionary()  # tensor -> (its version, its bf16)


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


def norms_in_place(program: Program, images: int) -> Program:
    """The same program, in which norms write their gradient over their input if nothing reads it later.

    Not those whose groups span ranks, for a batch of so many images.
    Ref: [003], which writes errors over the data that they belong to.
    """
    nodes, steps = program.graph.nodes, list(program.backward)
    for i, step in enumerate(steps):
        if step.kind == "grad" and nodes[step.at].op == "norm" and group_sizes(nodes[step.at].layer, images):
            (x,) = nodes[step.at].inputs
            steps[i] = step._replace(inplace=x != 0 and x in step.frees)
    return replace(program, backward=tuple(steps))


def backward_reads(node: GraphNode, at: int) -> tuple[int, ...]:
    """The values that the backward of node number `at` reads."""
    if node.op in ("conv", "norm", "other"):
        return node.inputs
    return (at + 1,) if node.op == "relu" else ()


def build_program(
    graph: LayerGraph, kept: Iterable[int], *, input_gradient: bool, bf16: frozenset[int] = frozenset()
) -> Program:
    """The instructions for a segment that keeps values, those of `bf16` in bf16, if its backward reads them.

    `input_gradient`: the segment's input needs a gradient.
    """
    needs = [input_gradient]
    for node in graph.nodes:
        learns = any(p.requires_grad for p in node.params)
        needs.append(learns or any(needs[v] for v in node.inputs))
    order, useful = _backward_order(graph, needs, {0, *kept})
    in_bf16 = useful & bf16
    inner = in_bf16 - {0, graph.out}  # the ends are rounded after the forward
    computes = [Instruction("compute", i) for i in range(len(graph.nodes))]
    forward = _with_frees(graph, computes, end=(useful - inner) | {graph.out}, not_over=inner)
    backward = _with_frees(graph, order)
    grads_before = [*accumulate((step.kind == "grad" for step in backward), initial=0)]
    for v in sorted(in_bf16):  # converted before use, and freed again if the next use is far away
        uses = [i for i, step in enumerate(backward) if v in _reads(graph, step)]
        far = [(i, j) for i, j in pairwise(uses) if grads_before[j] - grads_before[i] > _NEAR]
        for i, _ in far:
            backward[i] = backward[i]._replace(frees=(v, *backward[i].frees))
        loads = [uses[0], *(j for _, j in far)]
        for i in loads:
            backward[i] = backward[i]._replace(loads=(*backward[i].loads, (v, i == loads[-1])))
    return Program(graph, useful, tuple(forward), tuple(backward), in_bf16)


def _backward_order(graph: LayerGraph, needs: list[bool], kept: set[int]) -> tuple[list[Instruction], frozenset[int]]:
    """The gradients and recomputations in order, and the kept values that they read.

    A cheap value that was recomputed is held over the next few steps only, any other one until its last use.
    """
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
    own = {graph.out: False}  # value -> whether its gradient shares no memory, so that it may be written to
    for place, i in enumerate(grads):
        for v in backward_reads(nodes[i], i):
            ensure(v)
        incoming = own.pop(i + 1)
        new = nodes[i].op != "add" or (incoming and sum(needs[v] for v in nodes[i].inputs) == 1)
        joins = []
        for v in nodes[i].inputs:
            # no gradient; the first one; added into one that is there; added in a new tensor
            joins.append("" if not needs[v] else "set" if v not in own else "into" if new else "fresh")
            if needs[v]:
                own[v] = new or v in own
        steps.append(Instruction("grad", i, nodes[i].op == "relu" and incoming, tuple(joins)))
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
        first, inplace = node.inputs[0], step.inplace
        if step.kind == "compute":
            distinct = len(set(node.inputs)) == len(node.inputs)
            free_input = first not in not_over | {0, graph.out} and first in ending and distinct
            inplace = free_input and node.op in ("relu", "add")
        unread = () if step.kind == "grad" or step.at + 1 in alive else (step.at + 1,)
        reverse.append(step._replace(inplace=inplace, frees=(*ending[::-1], *unread)))
        alive = (alive - {step.at + 1} if step.kind == "compute" else alive) | {*ending}
    return reverse[::-1]


# ---- execution


class SavedValues(NamedTuple):
    """The tensors that a segment holds between forward and backward."""

    values: dict[int, Tensor]  # by number, in their own type
    in_bf16: dict[int, Tensor]  # the values held in bf16
    dtypes: list[torch.dtype]  # of all values in forward
    extras: dict[int, Any]  # the results of nodes besides values: statistics, positions in max-pools


@dataclass
class Segment:
    """Runs the layers of a program.

    Args:
        program: the instructions.
        how: precision, and whether recomputation must be exact.
        chunk: images at a time, 0: all at once. Only without BatchNorm over the batch.
        name: of its first and last layer, for errors and the printed plan.
        caller: the module whose forward runs the segment, so that torch calls its forward pre-hooks.
    """

    program: Program
    how: ops.Numerics
    chunk: int = 0
    name: str = ""
    caller: nn.Module | None = None

    def __call__(self, x: Tensor) -> Tensor:
        nodes = self.program.graph.nodes
        for layer in [node.layer for node in nodes if node.layer is not None and node.layer is not self.caller]:
            for hook in forward_pre_hooks(layer):  # Overlap may have to update a layer before its forward
                hook(layer, (x,))
        params = [p for p in weights_of(nodes) if p.requires_grad]
        out: Tensor = _SegmentFunction.apply(self, x, *params)  # type: ignore[no-untyped-call]
        return out

    def parts(self, n: int) -> list[slice]:
        """The chunks of n images."""
        return [slice(i, i + (self.chunk or n)) for i in range(0, n, self.chunk or n)]


class _SegmentFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, segment: Segment, x: Tensor, *params: Tensor) -> Tensor:
        program, parts = segment.program, segment.parts(len(x))
        ctx.segment, ctx.params, ctx.images = segment, params, len(x)
        ends = {0, program.graph.out}
        saved: list[SavedValues] = []
        out: Tensor | None = None
        for part in parts:
            part_out, held = run_forward(program, x[part], segment.how)
            out = _with_part(out, part_out, part, len(x))
            if program.graph.out in held.values:
                held.values[program.graph.out] = out[part].detach()
            saved.append(held)
            del part_out
        for v in program.in_bf16 & ends:
            rounded = shared_bf16(x if v == 0 else cast(Tensor, out))
            for part, held in zip(parts, saved, strict=True):
                del held.values[v]
                held.in_bf16[v] = rounded[part] if len(parts) > 1 else rounded
        nodes = program.graph.nodes
        norms = [node.layer for node in nodes if node.op == "norm" and not node.uses_batch_statistics]
        read = [*weights_of(nodes), *(t for norm in norms for t in (norm.running_mean, norm.running_var))]
        read += [held.values[v] for held in saved for v in ends & held.values.keys()]  # other code may write to these
        ctx.saved_values, ctx.read_later = saved, [(t, version(t)) for t in read]
        return cast(Tensor, out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        segment: Segment = ctx.segment
        if ctx.saved_values is None:
            raise InputError(f"SavedMemory: a second backward through {segment.name}: the first one frees its values")
        if any(version(t) != then for t, then in ctx.read_later):
            raise InputError(f"SavedMemory: input, output or a weight of {segment.name} was written before backward")
        saved, ctx.saved_values, ctx.read_later = ctx.saved_values, None, None
        gradients: dict[Tensor, Tensor] = {}
        dx: Tensor | None = None
        for part in segment.parts(ctx.images):
            part_dx = run_backward(segment, saved.pop(0), dy[part], gradients)
            if ctx.needs_input_grad[1] and part_dx is not None:
                dx = _with_part(dx, part_dx, part, ctx.images)
        return None, dx, *(gradients.get(p) for p in ctx.params)


def _with_part(whole: Tensor | None, x: Tensor, part: slice, n: int) -> Tensor:
    """A tensor of n images of which a part is x; x itself if it has all of them."""
    if len(x) == n:
        return x
    if whole is None:
        whole = torch.empty_strided((n, *x.shape[1:]), x.stride(), dtype=x.dtype, device=x.device)
    whole[part].copy_(x)
    return whole


def shared_bf16(x: Tensor) -> Tensor:
    """The bf16 of x, the same tensor for every segment that holds x; see the note."""
    cached: tuple[int, Tensor] | None = _rounded.get(x)  # type: ignore[no-untyped-call]
    if cached is None or cached[0] != version(x):
        cached = (version(x), x.detach().to(torch.bfloat16))
        _rounded[x] = cached
    return cached[1]


def run_forward(program: Program, x: Tensor, how: ops.Numerics) -> tuple[Tensor, SavedValues]:
    """The output, and the values held for backward; input and output are not rounded yet."""
    values, in_bf16, extras, dtypes = {0: x}, {}, {}, [x.dtype]
    for step in program.forward:
        node = program.graph.nodes[step.at]
        value, extra = ops.compute(node, [values[v] for v in node.inputs], how=how, inplace=step.inplace)
        values[step.at + 1] = value
        dtypes.append(value.dtype)
        if extra is not None:
            extras[step.at] = extra
        for v in step.frees:
            value = values.pop(v)
            if v in program.in_bf16:
                in_bf16[v] = value.to(torch.bfloat16)
        del value
    out = values[program.graph.out]
    kept = {v: values[v].detach() for v in program.kept - in_bf16.keys()}
    return out, SavedValues(kept, in_bf16, dtypes, extras)


def run_backward(segment: Segment, saved: SavedValues, dy: Tensor, gradients: dict[Tensor, Tensor]) -> Tensor | None:
    """The input's gradient, None if it needs none; adds the gradients of weights to `gradients`."""
    graph, how, values = segment.program.graph, segment.how, saved.values
    arrived = {graph.out: dy}
    for step in segment.program.backward:
        node = graph.nodes[step.at]
        for v, last in step.loads:
            values[v] = (saved.in_bf16.pop(v) if last else saved.in_bf16[v]).to(saved.dtypes[v])
        if step.kind == "compute":
            inputs, extra = [values[v] for v in node.inputs], saved.extras.get(step.at)
            values[step.at + 1] = ops.recompute(node, inputs, extra, how=how, inplace=step.inplace)
            del inputs, extra
        else:
            value = next((values[v] for v in backward_reads(node, step.at)), None)
            extra, incoming = saved.extras.pop(step.at, None), arrived.pop(step.at + 1)
            new, of_weights = ops.gradients(node, step, incoming, value, extra, how)
            del value, extra, incoming
            for p, g in zip(node.params, of_weights, strict=True):
                if g is not None:
                    gradients[p] = gradients[p].add_(g) if p in gradients else g
            for v, join, gradient in zip(node.inputs, step.joins, new, strict=True):
                if join:
                    own = gradient.to(saved.dtypes[v])
                    arrived[v] = own if join == "set" else arrived[v] + own if join == "fresh" else own.add_(arrived[v])
                    del own
            del new, gradient
        for v in step.frees:
            values.pop(v, None)
    return arrived.get(0)
