"""A run of layers as one step of autograd, that keeps what its program says and computes the rest again.

Note: one bf16 for two. What leaves a segment enters the next one, and both hold it. So the bf16 of such a tensor is
remembered as long as the tensor lives, and whoever holds it next takes the same one, unless it was written since.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakTensorKeyDictionary

from kasoku.core import InputError
from kasoku.core.torch_internals import forward_pre_hooks, version
from kasoku.memory import ops
from kasoku.memory.graph import LayerGraph, tensors
from kasoku.memory.schedule import Instruction, Program

Gradients = dict[Tensor, Tensor]
_rounded = WeakTensorKeyDictionary()  # tensor -> (its version, its bf16)


@dataclass
class SavedValues:
    """What lies between forward and backward.

    Attributes:
        values: as they are.
        halved: others, in bf16.
        dtypes: of all values, as they are in forward.
        sides: what nodes leave beside: statistics, codes.
        versions: of the ends, which others may write to.
    """

    values: dict[int, Tensor]
    halved: dict[int, Tensor]
    dtypes: list[torch.dtype]
    sides: dict[int, Any] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)

    @property
    def written(self) -> bool:
        """An end that is held as it is was written to."""
        return any(v in self.values and version(self.values[v]) != then for v, then in self.versions.items())


@dataclass
class Segment:
    """The layers of `program`, run as it says.

    Args:
        program: the steps.
        how: precision, and whether recomputation must be exact.
        chunk: images at a time, 0: all at once. Only without BatchNorm over the batch.
        name: of its first and last layer, for errors and the printed plan.
        own: the module whose forward runs it: who waits for that has been told.
    """

    program: Program
    how: ops.Numerics
    chunk: int = 0
    name: str = ""
    own: nn.Module | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """The output for x, with a backward of our own."""
        for node in self.program.graph.nodes:
            if node.layer is not self.own:
                _enter(node.layer, x)
        params = [p for p in tensors(self.program.graph.nodes) if p.requires_grad]
        out: Tensor = _SegmentFunction.apply(self, x, *params)  # type: ignore[no-untyped-call]
        return out

    def parts(self, n: int) -> list[slice]:
        """The images that are run at once."""
        size = self.chunk or n
        return [slice(i, min(i + size, n)) for i in range(0, n, size)]


def _enter(layer: nn.Module | None, x: Tensor) -> None:
    """Tells whoever waits for a layer's forward (its update may be due before it) that it begins."""
    if layer is not None:
        for hook in forward_pre_hooks(layer):
            hook(layer, (x,))


class _SegmentFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, segment: Segment, x: Tensor, *params: Tensor) -> Tensor:
        ctx.segment, ctx.params, ctx.held, ctx.images = segment, params, [], len(x)
        graph, parts = segment.program.graph, segment.parts(len(x))
        whole: Tensor | None = None
        for part in parts:
            out, held = forward(segment.program, x if len(parts) == 1 else x[part], segment.how)
            if len(parts) > 1:
                if whole is None:
                    whole = _of_more(out, len(x))
                whole[part].copy_(out)
                out = whole[part]
            if graph.out in held.values:
                held.values[graph.out] = out.detach()
            ctx.held.append(held)
        _halve(segment.program, {0: x, graph.out: out if whole is None else whole}, ctx.held, parts)
        out = out if whole is None else whole
        for one in ctx.held:
            one.versions = {v: version(t) for v, t in one.values.items() if v in (0, graph.out)}
        ctx.watched = [(t, version(t)) for t in _settings(graph)]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        segment: Segment = ctx.segment
        if ctx.held is None:
            raise InputError(f"SavedMemory: a second backward through {segment.name}: it is let go in the first one")
        if any(one.written for one in ctx.held) or any(version(t) != then for t, then in ctx.watched):
            raise InputError(
                f"SavedMemory: what enters or leaves {segment.name}, or a weight of it, was written before backward"
            )
        held, ctx.held = ctx.held, None
        ctx.watched, n = None, ctx.images
        gradients: Gradients = {}
        parts = segment.parts(n)
        data = ctx.needs_input_grad[1]
        whole: Tensor | None = None
        dx: Tensor | None = None
        for part in parts:
            one = held.pop(0)
            dx = backward(segment, one, dy if len(parts) == 1 else dy[part], gradients)
            if data and len(parts) > 1 and dx is not None:
                if whole is None:
                    whole = _of_more(dx, n)
                whole[part].copy_(dx)
        return None, (dx if whole is None else whole) if data else None, *(gradients.get(p) for p in ctx.params)


def _halve(program: Program, ends: dict[int, Tensor], held: Sequence[SavedValues], parts: Sequence[slice]) -> None:
    """Input and output of a segment, if they are to be held in bf16."""
    for v in program.halved & set(ends):
        whole = _bf16_of(ends[v])
        for one, part in zip(held, parts, strict=True):
            del one.values[v]
            one.halved[v] = whole[part] if len(parts) > 1 else whole


def _bf16_of(x: Tensor) -> Tensor:
    """See the note."""
    known: tuple[int, Tensor] | None = _rounded.get(x)  # type: ignore[no-untyped-call]
    if known is None or known[0] != version(x):
        known = (version(x), x.detach().to(torch.bfloat16))
        _rounded[x] = known
    return known[1]


def forward(program: Program, x: Tensor, how: ops.Numerics) -> tuple[Tensor, SavedValues]:
    """Runs the forward steps: the output, and what is held; the ends as they are."""
    values, halved, sides, dtypes = {0: x}, {}, {}, [x.dtype]
    for do in program.forward:
        if do.what == "free":
            ended = values.pop(do.at)
            if do.at in program.halved:
                halved[do.at] = ended.to(torch.bfloat16)
            del ended
            continue
        node = program.graph.nodes[do.at]
        made, side = ops.make(node, [values[v] for v in node.inputs], how=how, inplace=do.inplace)
        values[do.at + 1] = made
        dtypes.append(made.dtype)
        if side is not None:
            sides[do.at] = side
        del made
    out = values[program.graph.out]
    kept = {v: values[v].detach() for v in program.kept - halved.keys()}
    return out, SavedValues(kept, halved, dtypes, sides)


def backward(segment: Segment, held: SavedValues, dy: Tensor, gradients: Gradients) -> Tensor | None:
    """Runs the backward steps: the gradient of the input, None where it needs none; adds those of weights."""
    program, how = segment.program, segment.how
    graph, values, sides = program.graph, held.values, held.sides
    arrived = {graph.out: dy}
    for do in program.backward:
        if do.what == "free":
            values.pop(do.at, None)
            continue
        if do.what == "load":
            half = held.halved.pop(do.at) if do.inplace else held.halved[do.at]
            values[do.at] = half.to(held.dtypes[do.at])
            del half
            continue
        node = graph.nodes[do.at]
        if do.what == "make":
            values[do.at + 1] = ops.again(
                node, [values[v] for v in node.inputs], sides.get(do.at), how=how, inplace=do.inplace
            )
            continue
        found = _gradients(do, program, held, dy=arrived.pop(do.at + 1), how=how, gradients=gradients)
        for v, join, new in zip(node.inputs, do.joins, found, strict=True):
            if join and new is not None:
                arrived[v] = _join(arrived.get(v), new.to(held.dtypes[v]), join)
        del found, new
    return arrived.get(0)


def _gradients(
    do: Instruction, program: Program, held: SavedValues, *, dy: Tensor, how: ops.Numerics, gradients: Gradients
) -> list[Tensor | None]:
    """Of one node: those of its inputs; those of its weights are added up."""
    node, values, sides = program.graph.nodes[do.at], held.values, held.sides
    if node.op == "add":
        return [dy, dy]
    if node.op == "relu":
        return [ops.relu_gradient(dy, values[do.at + 1], inplace=do.inplace)]
    if node.op == "pool":
        return [ops.pool_gradient(node, dy, sides.pop(do.at))]
    x = values[node.inputs[0]]
    if node.op == "other":
        return [ops.other_gradient(node, dy, x)]
    if node.op == "conv":
        dx, found = ops.conv_gradients(node, dy, x, how=how, data=bool(do.joins[0]))
    else:
        dx, found = ops.norm_gradients(node, dy, x, sides.pop(do.at), inplace=do.inplace)
    for p, g in zip(node.params, found, strict=True):
        if g is not None:
            gradients[p] = gradients[p].add_(g) if p in gradients else g
    return [dx]


def _join(old: Tensor | None, new: Tensor, how: str) -> Tensor:
    if old is None:
        return new
    if how == "fresh":
        return old + new
    return new.add_(old) if how == "into new" else old.add_(new)


def _settings(graph: LayerGraph) -> list[Tensor]:
    """What backward reads of the layers: weights, and running statistics where the batch's are not taken."""
    norms = [node.layer for node in graph.nodes if node.op == "norm" and not node.steers]
    return [*tensors(graph.nodes), *(t for norm in norms for t in (norm.running_mean, norm.running_var))]


def _of_more(x: Tensor, n: int) -> Tensor:
    """Room for n images like those of x, in its layout."""
    return torch.empty_strided((n, *x.shape[1:]), x.stride(), dtype=x.dtype, device=x.device)
