"""A run of layers as one autograd function, which keeps the values of its program and recomputes the rest.

Note: one bf16 for two segments. The output of a segment is the input of the next one, and both may hold it in bf16. The
bf16 of such a tensor is remembered as long as the tensor lives, and shared unless the tensor has been written since.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakTensorKeyDictionary

from kasoku.core import InputError
from kasoku.core.torch_internals import forward_pre_hooks, version
from kasoku.memory import ops
from kasoku.memory.graph import weights_of
from kasoku.memory.schedule import Program, backward_reads

_rounded = WeakTensorKeyDictionary()  # tensor -> (its version, its bf16)


class SavedValues(NamedTuple):
    """The tensors that a segment holds between forward and backward.

    Attributes:
        values: by number, in their own type.
        in_bf16: the values held in bf16.
        dtypes: the types of all values in forward.
        extras: the results of nodes besides values: statistics, positions in max-pools.
    """

    values: dict[int, Tensor]
    in_bf16: dict[int, Tensor]
    dtypes: list[torch.dtype]
    extras: dict[int, Any]


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
            raise InputError(
                f"SavedMemory: the input, the output or a weight of {segment.name} was written before backward"
            )
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
                    arrived[v] = _join(arrived.get(v), gradient.to(saved.dtypes[v]), join)
            del new, gradient
        for v in step.frees:
            values.pop(v, None)
    return arrived.get(0)


def _join(old: Tensor | None, new: Tensor, how: str) -> Tensor:
    if old is None:
        return new
    return old + new if how == "fresh" else new.add_(old)
