"""Memory model: bytes and work of a program, summed over the same instructions that the segment executes."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from kasoku.memory.graph import GraphNode, Instruction, LayerGraph
from kasoku.memory.norms import IN_PLACE_PARTS, group_sizes
from kasoku.memory.ops import Numerics, has_2_bit_positions
from kasoku.memory.segment import Program

_WORK_OF_A_BYTE = 16.0  # multiply-adds that a machine does while it moves a byte: 490 GFLOP/s against some 30 GB/s


@dataclass(frozen=True)
class ChainSetting:
    """What the programs of a chain of layers depend on, besides the layers."""

    images: Tensor  # the chain's input, as a meta tensor
    image_gradient: bool  # the input needs a gradient
    how: Numerics
    channels_last: bool
    device: str = "cpu"  # its kind
    reads_batch: bool = False  # the input is the batch, which is counted elsewhere
    # whether something outside the chain keeps its input, and its output, so that a copy in bf16 would save nothing
    held_elsewhere: tuple[bool, bool] = (False, False)
    ends_chain: bool = True  # no neighbour counts the output


class MemoryNeed(NamedTuple):
    """The bytes and the extra work (in multiply-adds) of a segment."""

    kept: int  # from forward to backward, with the input, without the output, which the next segment counts
    forward: int  # peak of forward, with the output, and with the input if it is kept
    backward: int  # peak of backward, with everything that it keeps, its input and its output
    gradients: int  # of its weights
    work: float  # recomputation, and the extra cost of parts and of norm gradients in place
    rounding: float  # cost of rounding to bf16 and back, as multiply-adds that take equally long


def memory_need(program: Program, shapes: list[Tensor], setting: ChainSetting, chunk: int = 0) -> MemoryNeed:
    """The need of a program for values of these shapes, `chunk` images at a time (0: all at once)."""
    n, nodes, out_at = shapes[0].shape[0], program.graph.nodes, program.graph.out
    slower = 0.02 * work_of(program.graph, shapes, range(len(nodes))) if chunk else 0.0
    if chunk:
        shapes = [s[:chunk] for s in shapes]
    count = _ByteCount(program, shapes, setting)
    scale = n / shapes[0].shape[0]
    of_part = (shapes[0].nbytes, shapes[-1].nbytes, count.kept, count.held[0], count.held[out_at])
    x, out, kept, kept_x, kept_out = (round(size * scale) for size in of_part)
    rounded = kept_out if out_at in program.in_bf16 else 0  # beside the output, at the end of forward
    grads = [step for step in program.backward if step.kind == "grad"]
    if not chunk:
        forward = max(count.forward() + count.extras, out + count.kept + rounded)
        backward = count.backward(kept_out) + kept_x + out
    else:  # whole tensors beside those of one part: the output, or the incoming and outgoing gradients
        forward = out + kept + max(count.forward(), rounded)
        weights = max((p.nbytes for node in nodes for p in node.params), default=0)  # the sum, beside a part's gradient
        backward = kept_x + kept_out + out + kept + count.backward(0) - count.kept + weights
        backward += x if setting.image_gradient else 0
    if 0 in program.in_bf16:  # the input exists in forward, beside its bf16
        forward += x
    gradients = sum(p.nbytes for node in nodes for p in node.params if p.requires_grad)
    work = work_of(program.graph, shapes, [step.at for step in program.backward if step.kind == "compute"])
    # A norm's gradient in place beside torch's kernel: measured with one thread of an AVX2 core. Left out: the system
    # clears the pages of a newly allocated gradient; where it does so each time, in place is faster.
    norms = [step.at + 1 for step in grads if step.inplace and nodes[step.at].op == "norm"]
    work += sum((1 if setting.channels_last else 5) * shapes[v].nbytes * _WORK_OF_A_BYTE for v in norms)
    loads = [v for step in program.backward for v, _ in step.loads]
    passes = sum(1.5 * shapes[v].nbytes for v in (*loads, *program.in_bf16 - {out_at}))
    rounding = passes * _WORK_OF_A_BYTE * scale
    if setting.reads_batch:
        kept_x, backward = 0, backward - kept_x
    kept += kept_x + (kept_out if setting.ends_chain else 0)
    return MemoryNeed(kept, kept_x + forward, backward, gradients, work * scale + slower, rounding)


def work_of(graph: LayerGraph, shapes: list[Tensor], nodes: Iterable[int]) -> float:
    """Multiply-adds of nodes; one that only moves bytes counts as the multiply-adds of the same time."""
    total = 0.0
    for at in nodes:
        node, out = graph.nodes[at], shapes[at + 1]
        work = (sum(shapes[v].nbytes for v in node.inputs) + out.nbytes) * _WORK_OF_A_BYTE
        if node.op == "conv":
            weight: Tensor = node.layer.weight
            work = max(out.numel() * weight[0].numel() * (0.5 if out.dtype.itemsize == 2 else 1.0), work)
        total += work
    return total


class _ByteCount:
    """A program's bytes; the caller adds input, output and incoming gradient."""

    def __init__(self, program: Program, shapes: list[Tensor], setting: ChainSetting) -> None:
        self.program, self.shapes, self.setting = program, shapes, setting
        self.nodes, self.ends = program.graph.nodes, {0, program.graph.out}
        self.held = [0] * len(shapes)  # of each value from forward to backward
        for v in program.kept:
            self.held[v] = shapes[v].numel() * 2 if v in program.in_bf16 else shapes[v].nbytes
        self.extras = 0  # positions in max-pools, and statistics
        for node, out in zip(self.nodes, shapes[1:], strict=True):
            if node.op == "norm":
                self.extras += 8 * int(node.layer.num_features)
            elif node.op == "pool":
                two_bits = has_2_bit_positions(node.layer, shapes[node.inputs[0]].shape)
                self.extras += -(-out.numel() // 4) if two_bits else out.numel()
        self.kept = sum(self.held[v] for v in program.kept - self.ends) + self.extras
        self.present: dict[int, int] = {}  # the values that exist now
        # the memory of each value's gradient, which several may share: (the step that took it, bytes)
        self.areas: dict[int, tuple[int, int]] = {}
        self.live = 0  # bytes that exist now, without those of `gradients`
        self.gradients = 0  # bytes of the gradients of values now
        self.peak = 0  # of both together, at most

    def _add(self, n: int, beside: int = 0) -> None:
        """Allocates n bytes, or frees them; `beside`: temporary bytes."""
        self.live += n
        self.peak = max(self.peak, self.live + self.gradients + beside)

    def forward(self) -> int:
        """The peak of forward, with the output."""
        self.present, self.live, self.gradients, self.peak = {0: 0}, 0, 0, 0
        for step in self.program.forward:
            self._compute(step)
            for v in step.frees:
                if v in self.program.in_bf16 - self.ends:
                    self._add(self.held[v])
                self._add(-self.present.pop(v))
        return self.peak

    def backward(self, out: int) -> int:
        """The peak of backward, without input and incoming gradient; the output is freed after its last use.

        Args:
            out: bytes of the output, if it is held here and nowhere else.
        """
        program = self.program
        held = {v: 0 if v in self.ends else self.held[v] for v in program.kept} | {program.graph.out: out}
        rounded = {v: held.pop(v) for v in program.in_bf16}
        self.present, self.live, self.peak = held, self.kept + out, self.kept + out
        self.areas, self.gradients = {program.graph.out: (-1, 0)}, 0
        for step in program.backward:
            for v, last in step.loads:
                self.present[v] = self.shapes[v].nbytes
                self._add(self.present[v])
                self._add(-rounded.pop(v) if last else 0)
            if step.kind == "compute":
                self._compute(step)
            else:
                self._grad(step)
            self._add(-sum(self.present.pop(v, 0) for v in step.frees))
        return self.peak

    def _compute(self, step: Instruction) -> None:
        first = self.nodes[step.at].inputs[0]
        new = 0 if step.inplace else self.shapes[step.at + 1].nbytes
        self.present[step.at + 1] = new
        if step.inplace:
            self.present[step.at + 1], self.present[first] = self.present[first], 0
        self._add(new, self._workspace(step))

    def _grad(self, step: Instruction) -> None:
        node, areas = self.nodes[step.at], self.areas
        passes_on = node.op == "add" or (node.op == "relu" and step.inplace)
        joins = {v: join for v, join in zip(node.inputs, step.joins, strict=True) if join}
        own = {v: (step.at, self.shapes[v].nbytes) for v in joins}
        if node.op == "norm" and step.inplace:  # the gradient takes the memory of the input
            self._add(-self.present[node.inputs[0]])
            self.present[node.inputs[0]] = 0
        new = dict.fromkeys(joins, areas[step.at + 1]) if passes_on else own
        self.gradients = sum(n for _, n in {*areas.values(), *new.values()})
        self._add(sum(p.nbytes for p in node.params if p.requires_grad), self._workspace(step))
        del areas[step.at + 1]
        areas.update({v: own[v] if join == "fresh" else new[v] for v, join in joins.items()})
        self.gradients = sum(n for _, n in {*areas.values()})
        self._add(0)

    def _workspace(self, step: Instruction) -> int:
        """Temporary bytes of a step."""
        node, out = self.nodes[step.at], self.shapes[step.at + 1]
        x, backward = self.shapes[node.inputs[0]], step.kind == "grad"
        if node.op == "conv":
            return self._conv_workspace(node, x, out, backward=backward)
        if node.op == "pool":
            two_bits = has_2_bit_positions(node.layer, x.shape)
            if backward:  # torch's index of 8 bytes, and unpacked positions
                return (9 if two_bits else 8) * out.numel()
            return out.nbytes + 4 * out.numel() if two_bits else 19 * out.numel()
        if node.op == "norm":
            return self._norm_workspace(node, x, out, step)
        if node.op == "other" and backward:  # its output; in place: the copy, and what torch keeps of that
            return out.nbytes * (2 if getattr(node.layer, "inplace", False) else 1)
        return 0

    def _norm_workspace(self, node: GraphNode, x: Tensor, out: Tensor, step: Instruction) -> int:
        images = x.shape[0]
        sizes = group_sizes(node.layer, images)
        if not sizes:  # the group spans ranks: the normalised input, or a product
            return out.nbytes
        group = max(sizes)
        if step.inplace:  # parts of it and of the gradient in fp32, if they have fewer bits
            return 0 if x.dtype.itemsize >= 4 else 8 * -(-group // IN_PLACE_PARTS) * (x.numel() // images)
        copies_gradient = step.kind == "grad" and self.setting.device == "cpu"  # as torch's kernel does
        beside = len(sizes) > 1  # the result of a group, which is copied into the whole
        return (copies_gradient + beside) * out.nbytes * group // images

    def _conv_workspace(self, node: GraphNode, x: Tensor, out: Tensor, *, backward: bool) -> int:
        """OneDNN's reordered copies, as measured on AVX-512: of weights always, of images in the NCHW layout.

        On a GPU cuDNN chooses its workspace; the margin of the budget covers it.
        """
        layer, half = node.layer, self.setting.how.half
        own: int = layer.weight.nbytes
        weight = own
        cast = x.nbytes // 2 if half is not None and x.dtype is not half else 0
        if self.setting.device != "cpu":
            return cast + (weight // 2 if cast else 0)
        if half is not None:
            weight += out.nbytes // out.shape[0] * 2 if backward else 0
        elif backward:
            weight *= 2
        if tuple(layer.kernel_size) == (1, 1) and half is None:
            return cast + (own // 8 if tuple(layer.stride) == (1, 1) else own * (1 + backward))
        if self.setting.channels_last:
            return cast + weight
        images = x.nbytes + out.nbytes if backward else max(x.nbytes, out.nbytes)
        return cast + images + weight
