"""A run of layers as one autograd function, which keeps the values of its program and recomputes the rest.

Note: one bf16 for two segments. The output of a segment is the input of the next one, and both may hold it in bf16. The
bf16 of such a tensor is remembered as long as the tensor lives, and shared unless the tensor has been written since.
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
from kasoku.memory.graph import LayerGraph, weights_of
from kasoku.memory.schedule import Instruction, Program

Gradients = dict[Tensor, Tensor]
_rounded = WeakTensorKeyDictionary()  # tensor -> (its version, its bf16)


@dataclass
class SavedValues:
    """The tensors that a segment holds between forward and backward.

    Attributes:
        values: by number, in their own type.
        in_bf16: the values held in bf16.
        dtypes: the types of all values in forward.
        extras: the results of nodes besides values: statistics, positions in max-pools.
        versions: of the segment's input and output, which other code may write to.
    """

    values: dict[int, Tensor]
    in_bf16: dict[int, Tensor]
    dtypes: list[torch.dtype]
    extras: dict[int, Any] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)

    @property
    def modified(self) -> bool:
        """Whether the input or the output was written to since forward, if it is held."""
        return any(v in self.values and version(self.values[v]) != then for v, then in self.versions.items())


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
        size = self.chunk or n
        return [slice(i, min(i + size, n)) for i in range(0, n, size)]


class _SegmentFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, segment: Segment, x: Tensor, *params: Tensor) -> Tensor:
        program, parts = segment.program, segment.parts(len(x))
        ctx.segment, ctx.params, ctx.images = segment, params, len(x)
        saved: list[SavedValues] = []
        out = x
        whole: Tensor | None = None
        for part in parts:
            out, values = run_forward(program, x if len(parts) == 1 else x[part], segment.how)
            if len(parts) > 1:
                whole = _empty_batch(out, len(x)) if whole is None else whole
                whole[part].copy_(out)
                out = whole[part]
            if program.graph.out in values.values:
                values.values[program.graph.out] = out.detach()
            saved.append(values)
        out = out if whole is None else whole
        _round_ends(program, {0: x, program.graph.out: out}, saved, parts)
        for values in saved:
            values.versions = {v: version(t) for v, t in values.values.items() if v in (0, program.graph.out)}
        ctx.saved_values = saved
        ctx.read_later = [(t, version(t)) for t in _read_in_backward(program.graph)]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        segment: Segment = ctx.segment
        if ctx.saved_values is None:
            raise InputError(f"SavedMemory: a second backward through {segment.name}: the first one frees its values")
        if any(values.modified for values in ctx.saved_values) or any(version(t) != then for t, then in ctx.read_later):
            raise InputError(
                f"SavedMemory: the input, the output or a weight of {segment.name} was written before backward"
            )
        saved, ctx.saved_values = ctx.saved_values, None
        ctx.read_later = None
        parts, input_gradient = segment.parts(ctx.images), ctx.needs_input_grad[1]
        gradients: Gradients = {}
        whole: Tensor | None = None
        dx: Tensor | None = None
        for part in parts:
            values = saved.pop(0)
            dx = run_backward(segment, values, dy if len(parts) == 1 else dy[part], gradients)
            if input_gradient and len(parts) > 1 and dx is not None:
                whole = _empty_batch(dx, ctx.images) if whole is None else whole
                whole[part].copy_(dx)
        dx = dx if whole is None else whole
        return None, dx if input_gradient else None, *(gradients.get(p) for p in ctx.params)


def _round_ends(
    program: Program, ends: dict[int, Tensor], saved: Sequence[SavedValues], parts: Sequence[slice]
) -> None:
    """Holds the segment's input and output in bf16, if the program says so."""
    for v in program.in_bf16 & set(ends):
        rounded = shared_bf16(ends[v])
        for values, part in zip(saved, parts, strict=True):
            del values.values[v]
            values.in_bf16[v] = rounded[part] if len(parts) > 1 else rounded


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
        if step.kind == "free":
            ended = values.pop(step.at)
            if step.at in program.in_bf16:
                in_bf16[step.at] = ended.to(torch.bfloat16)
            del ended
            continue
        node = program.graph.nodes[step.at]
        value, extra = ops.compute(node, [values[v] for v in node.inputs], how=how, inplace=step.inplace)
        values[step.at + 1] = value
        dtypes.append(value.dtype)
        if extra is not None:
            extras[step.at] = extra
        del value
    out = values[program.graph.out]
    kept = {v: values[v].detach() for v in program.kept - in_bf16.keys()}
    return out, SavedValues(kept, in_bf16, dtypes, extras)


def run_backward(segment: Segment, saved: SavedValues, dy: Tensor, gradients: Gradients) -> Tensor | None:
    """The input's gradient, None if it needs none; adds the gradients of weights to `gradients`."""
    program, how = segment.program, segment.how
    graph, values, extras = program.graph, saved.values, saved.extras
    arrived = {graph.out: dy}
    for step in program.backward:
        if step.kind == "free":
            values.pop(step.at, None)
            continue
        if step.kind == "load":
            rounded = saved.in_bf16.pop(step.at) if step.inplace else saved.in_bf16[step.at]
            values[step.at] = rounded.to(saved.dtypes[step.at])
            del rounded
            continue
        node = graph.nodes[step.at]
        if step.kind == "compute":
            inputs = [values[v] for v in node.inputs]
            values[step.at + 1] = ops.recompute(node, inputs, extras.get(step.at), how=how, inplace=step.inplace)
            del inputs
            continue
        new = _node_gradients(step, program, saved, dy=arrived.pop(step.at + 1), how=how, gradients=gradients)
        for v, join, gradient in zip(node.inputs, step.joins, new, strict=True):
            if join and gradient is not None:
                arrived[v] = _join(arrived.get(v), gradient.to(saved.dtypes[v]), join)
        del new, gradient
    return arrived.get(0)


def _node_gradients(
    step: Instruction, program: Program, saved: SavedValues, *, dy: Tensor, how: ops.Numerics, gradients: Gradients
) -> list[Tensor | None]:
    """The gradients of a node's inputs; adds those of its weights to `gradients`."""
    node, values, extras = program.graph.nodes[step.at], saved.values, saved.extras
    if node.op == "add":
        return [dy, dy]
    if node.op == "relu":
        return [ops.relu_gradient(dy, values[step.at + 1], inplace=step.inplace)]
    if node.op == "pool":
        return [ops.unpool(node.layer, dy, extras.pop(step.at))]
    x = values[node.inputs[0]]
    if node.op == "other":
        return [ops.other_gradient(node, dy, x)]
    if node.op == "conv":
        dx, of_weights = ops.conv_gradients(node, dy, x, how=how, input_gradient=bool(step.joins[0]))
    else:
        dx, of_weights = ops.norm_gradients(node, dy, x, extras.pop(step.at), inplace=step.inplace)
    for p, g in zip(node.params, of_weights, strict=True):
        if g is not None:
            gradients[p] = gradients[p].add_(g) if p in gradients else g
    return [dx]


def _join(old: Tensor | None, new: Tensor, how: str) -> Tensor:
    if old is None:
        return new
    if how == "fresh":
        return old + new
    return new.add_(old) if how == "into new" else old.add_(new)


def _read_in_backward(graph: LayerGraph) -> list[Tensor]:
    """The layers' tensors that backward reads: weights, and running statistics where the batch's are not used."""
    norms = [node.layer for node in graph.nodes if node.op == "norm" and not node.uses_batch_statistics]
    return [*weights_of(graph.nodes), *(t for norm in norms for t in (norm.running_mean, norm.running_var))]


def _empty_batch(x: Tensor, n: int) -> Tensor:
    """An empty tensor for n images like those of x, in its layout."""
    return torch.empty_strided((n, *x.shape[1:]), x.stride(), dtype=x.dtype, device=x.device)
