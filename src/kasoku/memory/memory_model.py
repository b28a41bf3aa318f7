"""Memory model: bytes and work of a program, summed over the same instructions that the segment executes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from kasoku.memory.graph import GraphNode, ValueShape
from kasoku.memory.ops import Numerics, has_2_bit_positions, norm_in_place_bytes, position_bytes
from kasoku.memory.schedule import Instruction, Program

_WORK_OF_A_BYTE = 16.0  # multiply-adds that a machine does while it moves a byte: 490 GFLOP/s against some 30 GB/s


@dataclass(frozen=True)
class ImageLayout:
    """The memory format and the kind of device, on which the size of workspaces depends."""

    channels_last: bool
    device: str = "cpu"


@dataclass(frozen=True)
class MemoryNeed:
    """The bytes and the extra work of a segment.

    Attributes:
        kept: bytes from forward to backward, without input and output, which the neighbours keep too.
        input: bytes of its input, if it is kept.
        output: bytes of its output, if it is kept.
        forward: peak of forward, without the input, with the output.
        backward: peak of backward, with everything that it keeps, its input and its output.
        gradients: bytes of the gradients of its weights.
        work: recomputation, and the extra cost of norm gradients in place, in multiply-adds.
        rounding: rounding to bf16 and back, in multiply-adds of the same time.
        output_in_kept: the output is counted in `kept`.
    """

    kept: int
    input: int
    output: int
    forward: int
    backward: int
    gradients: int
    work: float
    rounding: float = 0.0
    output_in_kept: bool = False

    def in_chain(self, *, reads_batch: bool, last: bool) -> MemoryNeed:
        """In a chain: the batch is counted elsewhere, and the output of the last segment is counted by no neighbour."""
        need = replace(self, input=0, backward=self.backward - self.input) if reads_batch else self
        return replace(need, kept=need.kept + need.output, output_in_kept=True) if last else need


def memory_need(
    program: Program, shapes: list[ValueShape], *, how: Numerics, layout: ImageLayout, chunk: int = 0
) -> MemoryNeed:
    """The need of a program for values of these shapes, `chunk` images at a time (0: all at once)."""
    n, nodes, out_at = shapes[0].shape[0], program.graph.nodes, program.graph.out
    parts = -(-n // chunk) if chunk else 1
    if parts > 1:
        shapes = [ValueShape((chunk, *s.shape[1:]), s.dtype) for s in shapes]
    count = _ByteCount(program, shapes, how, layout)
    scale = n / shapes[0].shape[0]
    of_part = (shapes[0].nbytes, shapes[-1].nbytes, count.kept, count.held[0], count.held[out_at])
    x, out, kept, kept_x, kept_out = (round(size * scale) for size in of_part)
    rounded = kept_out if out_at in program.in_bf16 else 0  # beside the output, at the end of forward
    if parts == 1:
        forward = max(count.forward() + count.all_extras, out + count.kept + rounded)
        backward = count.backward(kept_out) + kept_x + out
    else:  # whole tensors beside those of one part: the output, or the incoming and outgoing gradients
        dx = x if any(join for step in program.backward for join in _input_joins(program, step)) else 0
        forward = out + kept + max(count.forward(), rounded)
        weights = max((p.nbytes for node in nodes for p in node.params), default=0)  # the sum, beside a part's gradient
        backward = kept_x + kept_out + out + kept + dx + count.backward(0) - count.kept + weights
    if 0 in program.in_bf16:  # the input exists in forward, beside its bf16
        forward += x
    gradients = sum(p.nbytes for node in nodes for p in node.params if p.requires_grad)
    work = sum(work_of(program, shapes, step.at) for step in program.backward if step.kind == "compute")
    work += sum(_in_place_work(program, shapes, step, layout) for step in program.backward)
    loads = [step.at for step in program.backward if step.kind == "load"]
    passes = sum(1.5 * count.sizes[v] for v in (*loads, *program.in_bf16 - {out_at}))
    rounding = passes * _WORK_OF_A_BYTE * scale
    return MemoryNeed(kept, kept_x, kept_out, forward, backward, gradients, work * scale, rounding)


def work_of(program: Program, shapes: list[ValueShape], at: int) -> float:
    """Multiply-adds of a node; a node that only moves bytes counts as the multiply-adds of the same time."""
    node, out = program.graph.nodes[at], shapes[at + 1]
    moved = sum(shapes[v].nbytes for v in node.inputs) + out.nbytes
    if node.op != "conv":
        return moved * _WORK_OF_A_BYTE
    weight: Tensor = node.layer.weight
    elements = out.nbytes // out.dtype.itemsize
    return max(elements * weight[0].numel() * (0.5 if out.dtype.itemsize == 2 else 1.0), moved * _WORK_OF_A_BYTE)


def _in_place_work(program: Program, shapes: list[ValueShape], step: Instruction, layout: ImageLayout) -> float:
    """The extra work of a norm's gradient in place over torch's kernel: measured with one thread of an AVX2 core.

    Left out: the system clears the pages of a newly allocated gradient; where it does so each time, in place is faster.
    """
    if not (step.kind == "grad" and step.inplace and program.graph.nodes[step.at].op == "norm"):
        return 0.0
    return (1 if layout.channels_last else 5) * shapes[step.at + 1].nbytes * _WORK_OF_A_BYTE


class _ByteCount:
    """A program's bytes; the caller adds input, output and incoming gradient."""

    def __init__(self, program: Program, shapes: list[ValueShape], how: Numerics, layout: ImageLayout) -> None:
        self.program, self.shapes, self.how, self.layout = program, shapes, how, layout
        self.nodes = program.graph.nodes
        self.sizes = [s.nbytes for s in shapes]
        self.ends = {0, program.graph.out}
        self.held = [self._held(v) for v in range(len(shapes))]

    @cached_property
    def all_extras(self) -> int:
        """Bytes of positions in max-pools and of statistics."""
        return sum(self._extra(node, i) for i, node in enumerate(self.nodes))

    @property
    def kept(self) -> int:
        """Bytes from forward to backward, without input and output."""
        return sum(self.held[v] for v in self.program.kept - self.ends) + self.all_extras

    def _held(self, v: int) -> int:
        if v not in self.program.kept:
            return 0
        elements = self.sizes[v] // self.shapes[v].dtype.itemsize
        return elements * 2 if v in self.program.in_bf16 else self.sizes[v]

    def _extra(self, node: GraphNode, i: int) -> int:
        if node.op == "norm":
            return 8 * int(node.layer.num_features)
        if node.op == "pool":
            out = self.shapes[i + 1]
            return position_bytes(node.layer, self.shapes[node.inputs[0]].shape, out.nbytes // out.dtype.itemsize)
        return 0

    def forward(self) -> int:
        """The peak of forward, with the output."""
        present = {0: 0}
        live = peak = 0
        for step in self.program.forward:
            if step.kind == "free":
                ended = present.pop(step.at)
                if step.at in self.program.in_bf16 - self.ends:
                    live += self.held[step.at]
                    peak = max(peak, live)
                live -= ended
                continue
            live += self._compute(step, present)
            peak = max(peak, live + self._forward_workspace(self.nodes[step.at], step.at))
        return peak

    def _compute(self, step: Instruction, present: dict[int, int]) -> int:
        """Notes a computed value in `present`; the additional bytes."""
        first = self.nodes[step.at].inputs[0]
        if step.inplace:
            present[step.at + 1], present[first] = present[first], 0
            return 0
        present[step.at + 1] = self.sizes[step.at + 1]
        return self.sizes[step.at + 1]

    def backward(self, out: int) -> int:
        """The peak of backward, without input and incoming gradient; the output is freed after its last use.

        Args:
            out: bytes of the output, if it is held here and nowhere else.
        """
        program, out_at = self.program, self.program.graph.out
        rounded = {v: 0 if v in self.ends else self.held[v] for v in program.in_bf16}
        present = {v: 0 if v in self.ends else self.held[v] for v in program.kept - program.in_bf16}
        (rounded if out_at in program.in_bf16 else present)[out_at] = out
        live = peak = self.kept + out
        areas: dict[int, list[int]] = {out_at: [0, 2]}  # value -> [bytes of its gradient, sharers of that memory]
        for step in program.backward:
            if step.kind == "free":
                live -= present.pop(step.at, 0)
            elif step.kind == "load":
                present[step.at] = self.sizes[step.at]
                live += present[step.at]
                peak = max(peak, live)
                live -= rounded.pop(step.at) if step.inplace else 0
            elif step.kind == "compute":
                live += self._compute(step, present)
                peak = max(peak, live + self._forward_workspace(self.nodes[step.at], step.at))
            else:
                added, above = self._grad(step, areas, present)
                peak = max(peak, live + above)
                live += added
        return peak

    def _grad(self, step: Instruction, areas: dict[int, list[int]], present: dict[int, int]) -> tuple[int, int]:
        """(additional bytes after the step, peak during it)."""
        node = self.nodes[step.at]
        incoming = areas.pop(step.at + 1)
        passes_on = node.op == "add" or (node.op == "relu" and step.inplace)
        added = sum(p.nbytes for p in node.params if p.requires_grad)
        workspace = self._backward_workspace(node, step)
        peak = added + workspace
        if passes_on:
            incoming[1] += sum(1 for j in step.joins if j) - 1
        for v, join in zip(node.inputs, step.joins, strict=True):
            if not join:
                continue
            new = incoming if passes_on else [self.sizes[v], 1]
            if node.op == "norm" and step.inplace:
                present[v] = 0  # its memory is the gradient's now
            elif not passes_on:
                added += new[0]
            peak = max(peak, added + workspace)
            added += self._join(v, new, join, areas)
            peak = max(peak, added)
        if not passes_on:
            added -= _release(incoming)
        return added, peak

    def _join(self, v: int, new: list[int], join: str, areas: dict[int, list[int]]) -> int:
        old = areas.get(v)
        if old is None:
            areas[v] = new
            return 0
        if join == "into new":
            areas[v] = new
            return -_release(old)
        if join == "into old":
            return -_release(new)
        areas[v] = [self.sizes[v], 1]
        return self.sizes[v] - _release(old) - _release(new)

    def _forward_workspace(self, node: GraphNode, at: int) -> int:
        """Temporary bytes while a value is computed."""
        out, x = self.shapes[at + 1], self.shapes[node.inputs[0]]
        if node.op == "conv":
            return _conv_workspace(node, x, out, how=self.how, layout=self.layout, backward=False)
        if node.op == "pool":
            count = out.nbytes // out.dtype.itemsize
            return out.nbytes + 4 * count if has_2_bit_positions(node.layer, x.shape) else 27 * count
        return 0

    def _backward_workspace(self, node: GraphNode, step: Instruction) -> int:
        """Temporary bytes while gradients are taken."""
        out, x = self.shapes[step.at + 1], self.shapes[node.inputs[0]]
        if node.op == "conv":
            return _conv_workspace(node, x, out, how=self.how, layout=self.layout, backward=True)
        if node.op == "pool":
            return out.nbytes + 2 * (out.nbytes // out.dtype.itemsize)
        if node.op == "norm" and step.inplace:
            return norm_in_place_bytes(x)
        if node.op == "other":  # its output; in place: the copy, and what torch keeps of that
            return out.nbytes * (2 if getattr(node.layer, "inplace", False) else 1)
        copies_gradient = node.op == "norm" and self.layout.device == "cpu"  # torch's kernel allocates another gradient
        return out.nbytes if copies_gradient else 0


def _release(area: list[int]) -> int:
    """Takes one sharer off; the bytes that become free."""
    area[1] -= 1
    return area[0] if area[1] == 0 else 0


def _conv_workspace(
    node: GraphNode, x: ValueShape, out: ValueShape, *, how: Numerics, layout: ImageLayout, backward: bool
) -> int:
    """OneDNN's reordered copies, as measured on AVX-512: of weights always, of images in the NCHW layout.

    On a GPU cuDNN chooses its workspace; the margin of the budget covers it.
    """
    layer = node.layer
    own: int = layer.weight.nbytes
    weight = own
    cast = x.nbytes // 2 if how.half is not None and x.dtype is not how.half else 0
    if layout.device != "cpu":
        return cast + (weight // 2 if cast else 0)
    if how.half is not None:
        weight += out.nbytes // out.shape[0] * 2 if backward else 0
    elif backward:
        weight *= 2
    if tuple(layer.kernel_size) == (1, 1) and how.half is None:
        return cast + (own // 8 if tuple(layer.stride) == (1, 1) else own * (1 + backward))
    if layout.channels_last:
        return cast + weight
    images = x.nbytes + out.nbytes if backward else max(x.nbytes, out.nbytes)
    return cast + images + weight


def _input_joins(program: Program, step: Instruction) -> list[str]:
    inputs = program.graph.nodes[step.at].inputs if step.kind == "grad" else ()
    return [join for v, join in zip(inputs, step.joins, strict=False) if v == 0]
