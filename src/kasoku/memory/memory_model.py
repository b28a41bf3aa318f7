"""Memory model: bytes and work of a program, summed over the same steps that the runner executes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from kasoku.memory.graph import GraphNode, ValueShape
from kasoku.memory.ops import Numerics, wide_bytes
from kasoku.memory.pool import code_bytes, is_quarter
from kasoku.memory.schedule import Instruction, Program

_WORK_OF_A_BYTE = 16.0  # multiply-adds that a machine does while it moves a byte: 490 GFLOP/s against some 30 GB/s


@dataclass(frozen=True)
class ImageLayout:
    """What the size of workspaces depends on: channels_last or not, and the kind of device."""

    last: bool
    kind: str = "cpu"


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
        out_is_in: the output is counted in `kept`.
    """

    kept: int
    input: int
    output: int
    forward: int
    backward: int
    gradients: int
    work: float
    rounding: float = 0.0
    out_is_in: bool = False

    def beside(self, given: bool, last: bool) -> MemoryNeed:
        """In a chain. `given`: the input is the batch, counted already; `last`: no neighbour counts its output."""
        takes = replace(self, input=0, backward=self.backward - self.input) if given else self
        return replace(takes, kept=takes.kept + takes.output, out_is_in=True) if last else takes


def need(
    program: Program, shapes: list[ValueShape], *, how: Numerics, layout: ImageLayout, chunk: int = 0
) -> MemoryNeed:
    """What a program takes for values of these shapes, `chunk` images at a time (0: all at once)."""
    n = shapes[0].shape[0]
    parts = -(-n // chunk) if chunk else 1
    if parts > 1:
        shapes = [ValueShape((chunk, *s.shape[1:]), s.dtype) for s in shapes]
    walk = _ByteCount(program, shapes, how, layout)
    share = n / shapes[0].shape[0]
    whole = (shapes[0].nbytes, shapes[-1].nbytes, walk.kept, walk.held[0], walk.held[program.graph.out])
    x, out, kept, kept_x, kept_out = (round(part * share) for part in whole)
    rounded = kept_out if program.graph.out in program.halved else 0  # beside the output, when all else is done
    if parts == 1:
        forward = max(walk.forward() + walk.side, out + walk.kept + rounded)
        backward = walk.backward(kept_out) + kept_x + out
    else:  # what is whole beside one part: the output, or the gradients that come and go
        dx = x if any(join for do in program.backward for join in _into_input(program, do)) else 0
        forward = out + kept + max(walk.forward(), rounded)
        twice = max((p.nbytes for node in program.graph.nodes for p in node.params), default=0)  # a part's, and the sum
        backward = kept_x + kept_out + out + kept + dx + walk.backward(0) - walk.kept + twice
    if 0 in program.halved:  # it is there in forward, beside its bf16
        forward += x
    gradients = sum(p.nbytes for node in program.graph.nodes for p in node.params if p.requires_grad)
    work = sum(work_of(program, shapes, do.at) for do in program.backward if do.what == "make")
    work += sum(_work_over(program, shapes, do, layout) for do in program.backward)
    loads = [do.at for do in program.backward if do.what == "load"]
    passes = sum(1.5 * walk.sizes[v] for v in (*loads, *program.halved - {program.graph.out}))
    rounding = passes * _WORK_OF_A_BYTE * share
    return MemoryNeed(kept, kept_x, kept_out, forward, backward, gradients, work * share, rounding)


def work_of(program: Program, shapes: list[ValueShape], at: int) -> float:
    """Multiply-adds of a node; what only moves bytes counts as the multiply-adds of the same time."""
    node, out = program.graph.nodes[at], shapes[at + 1]
    moved = sum(shapes[v].nbytes for v in node.inputs) + out.nbytes
    if node.op != "conv":
        return moved * _WORK_OF_A_BYTE
    weight: Tensor = node.layer.weight
    made = out.nbytes // out.dtype.itemsize
    return max(made * weight[0].numel() * (0.5 if out.dtype.itemsize == 2 else 1.0), moved * _WORK_OF_A_BYTE)


def _work_over(program: Program, shapes: list[ValueShape], do: Instruction, layout: ImageLayout) -> float:
    """Of a norm's gradient over its input, beyond that of torch's kernel: measured with one thread of an AVX2 core.

    Left out: the pages of a new area, which the system clears; where they are new each time it takes less in all.
    """
    if not (do.what == "grad" and do.inplace and program.graph.nodes[do.at].op == "norm"):
        return 0.0
    return (1 if layout.last else 5) * shapes[do.at + 1].nbytes * _WORK_OF_A_BYTE


class _ByteCount:
    """A program's bytes; input, output and incoming gradient are left to the caller."""

    def __init__(self, program: Program, shapes: list[ValueShape], how: Numerics, layout: ImageLayout) -> None:
        self.program, self.shapes, self.how, self.layout = program, shapes, how, layout
        graph = program.graph
        self.sizes = [s.nbytes for s in shapes]
        self.ends = {0, graph.out}
        self.held = [self._held(v) for v in range(len(shapes))]
        self.sides = {i: self._side(node, i) for i, node in enumerate(graph.nodes)}

    @cached_property
    def side(self) -> int:
        """Codes and statistics."""
        return sum(self.sides.values())

    @property
    def kept(self) -> int:
        """From forward to backward, without the ends."""
        return sum(self.held[v] for v in self.program.kept - self.ends) + self.side

    def _held(self, v: int) -> int:
        """Of a value, from forward to backward."""
        if v not in self.program.kept:
            return 0
        shape = self.shapes[v]
        return self.sizes[v] // shape.dtype.itemsize * 2 if v in self.program.halved else self.sizes[v]

    def _side(self, node: GraphNode, i: int) -> int:
        if node.op == "norm":
            return 8 * int(node.layer.num_features)
        if node.op == "pool":
            s = self.shapes[i + 1]
            return code_bytes(node.layer, self.shapes[node.inputs[0]].shape, s.nbytes // s.dtype.itemsize)
        return 0

    def forward(self) -> int:
        """The most in forward, with the output."""
        graph = self.program.graph
        held = {0: 0}
        live = most = 0
        for do in self.program.forward:
            if do.what == "free":
                ended = held.pop(do.at)
                if do.at in self.program.halved - self.ends:
                    live += self.held[do.at]
                    most = max(most, live)
                live -= ended
                continue
            node = graph.nodes[do.at]
            held[do.at + 1] = self._made(do, held)
            live += held[do.at + 1] if not do.inplace else 0
            most = max(most, live + self._aside(node, do.at))
        return most

    def _made(self, do: Instruction, held: dict[int, int]) -> int:
        first = self.program.graph.nodes[do.at].inputs[0]
        if do.inplace:
            taken, held[first] = held[first], 0
            return taken
        return self.sizes[do.at + 1]

    def backward(self, out: int) -> int:
        """The most in backward, without input and incoming gradient; the output is let go after its last use.

        Args:
            out: bytes of the output, if it is held here and nowhere else.
        """
        graph = self.program.graph
        program = self.program
        short = {v: 0 if v in self.ends else self.held[v] for v in program.halved}
        held = {v: 0 if v in self.ends else self.held[v] for v in program.kept - program.halved}
        (short if graph.out in program.halved else held)[graph.out] = out
        live = most = self.kept + out
        areas: dict[int, list[int]] = {graph.out: [0, 2]}  # value -> [bytes, who share it]
        for do in self.program.backward:
            if do.what == "free":
                live -= held.pop(do.at, 0)
            elif do.what == "load":
                held[do.at] = self.sizes[do.at]
                live += held[do.at]
                most = max(most, live)
                live -= short.pop(do.at) if do.inplace else 0
            elif do.what == "make":
                held[do.at + 1] = self._made(do, held)
                live += held[do.at + 1] if not do.inplace else 0
                most = max(most, live + self._aside(graph.nodes[do.at], do.at))
            else:
                grown, peak = self._grad(do, areas, held)
                most = max(most, live + peak)
                live += grown
        return most

    def _grad(self, do: Instruction, areas: dict[int, list[int]], held: dict[int, int]) -> tuple[int, int]:
        """(bytes more after it, the most during it)."""
        node = self.program.graph.nodes[do.at]
        mine = areas.pop(do.at + 1)
        passes = node.op == "add" or (node.op == "relu" and do.inplace)
        weights = sum(p.nbytes for p in node.params if p.requires_grad)
        beside = self._beside(node, do)
        grown = weights
        peak = weights + beside
        if passes:
            mine[1] += sum(1 for j in do.joins if j) - 1
        for v, join in zip(node.inputs, do.joins, strict=True):
            if not join:
                continue
            new = mine if passes else [self.sizes[v], 1]
            if node.op == "norm" and do.inplace:
                held[v] = 0  # the area is the gradient's now
            elif not passes:
                grown += new[0]
            peak = max(peak, grown + beside)
            grown += self._join(v, new, join, areas)
            peak = max(peak, grown)
        if not passes:
            grown -= _release(mine)
        return grown, peak

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

    def _aside(self, node: GraphNode, at: int) -> int:
        """Temporary bytes while a value is made."""
        out, x = self.shapes[at + 1], self.shapes[node.inputs[0]]
        if node.op == "conv":
            return _conv_bytes(node, x, out, how=self.how, layout=self.layout, backward=False)
        if node.op == "pool":
            count = out.nbytes // out.dtype.itemsize
            return out.nbytes + 4 * count if is_quarter(node.layer, x.shape) else 27 * count
        return 0

    def _beside(self, node: GraphNode, do: Instruction) -> int:
        """Temporary bytes while gradients are taken."""
        out, x = self.shapes[do.at + 1], self.shapes[node.inputs[0]]
        count = out.nbytes // out.dtype.itemsize
        if node.op == "conv":
            return _conv_bytes(node, x, out, how=self.how, layout=self.layout, backward=True)
        if node.op == "pool":
            return out.nbytes + 2 * count
        if node.op == "norm" and do.inplace:
            return wide_bytes(x)
        own_copy = node.op == "norm" and self.layout.kind == "cpu"  # torch's kernel takes room for another gradient
        if node.op == "other":  # its output; in place: the copy, and what torch keeps of that
            return out.nbytes * (2 if getattr(node.layer, "inplace", False) else 1)
        return out.nbytes if own_copy else 0


def _release(area: list[int]) -> int:
    """One sharer less: the bytes that become free."""
    area[1] -= 1
    return area[0] if area[1] == 0 else 0


def _conv_bytes(
    node: GraphNode, x: ValueShape, out: ValueShape, *, how: Numerics, layout: ImageLayout, backward: bool
) -> int:
    """OneDNN's reordered copies, as measured on AVX-512: of weights always, of images in the NCHW layout.

    On a GPU cuDNN is free to choose; it is left to the margin.
    """
    layer = node.layer
    own: int = layer.weight.nbytes
    weight = own
    cast = x.nbytes // 2 if how.half is not None and x.dtype is not how.half else 0
    if layout.kind != "cpu":
        return cast + (weight // 2 if cast else 0)
    if how.half is not None:
        one = out.nbytes // out.shape[0] * 2
        weight = weight + one if backward else weight
    elif backward:
        weight *= 2
    if tuple(layer.kernel_size) == (1, 1) and how.half is None:
        return cast + (own // 8 if tuple(layer.stride) == (1, 1) else own * (1 + backward))
    if layout.last:
        return cast + weight
    wide = x.nbytes + out.nbytes if backward else max(x.nbytes, out.nbytes)
    return cast + wide + weight


def _into_input(program: Program, do: Instruction) -> list[str]:
    inputs = program.graph.nodes[do.at].inputs if do.what == "grad" else ()
    return [join for v, join in zip(inputs, do.joins, strict=False) if v == 0]
