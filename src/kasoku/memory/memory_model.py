"""Memory model: bytes and work of a program, summed over the same instructions that the segment executes."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from kasoku.memory.graph import GraphNode, Instruction, LayerGraph
from kasoku.memory.ops import IN_PLACE_PARTS, Numerics, group_sizes, has_2_bit_positions
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
    ends_chain: bool = True  # no neighbour counts the output


class MemoryNeed(NamedTuple):
    """The bytes and the extra work (in multiply-adds) of a segment."""

    kept: int  # from forward to backward, with the input, without the output, which the next segment counts
    forward: int  # peak of forward, with the output, and with the input if it is kept
    backward: int  # peak of backward, with everything that it keeps, its input and its output
    gradients: int  # of its weights
    work: float  # recomputation, and the extra cost of parts and of norm gradients in place


def memory_need(program: Program, shapes: list[Tensor], setting: ChainSetting, chunk: int = 0) -> MemoryNeed:
    """The need of a program for values of these shapes, `chunk` images at a time (0: all at once)."""
    n, nodes, out_at = shapes[0].shape[0], program.graph.nodes, program.graph.out
    slower = 0.02 * work_of(program.graph, shapes, range(len(nodes))) if chunk else 0.0
    if chunk:
        shapes = [s[:chunk] for s in shapes]
    count = _ByteCount(program, shapes, setting)
    scale = n / shapes[0].shape[0]
    ends = (shapes[v].nbytes if v in program.kept else 0 for v in (0, out_at))
    of_part = (shapes[0].nbytes, shapes[-1].nbytes, count.kept, *ends)
    x, out, kept, kept_x, kept_out = (round(size * scale) for size in of_part)
    if not chunk:
        forward = count.forward() + count.extras
        backward = count.backward(kept_out) + kept_x + out
    else:  # whole tensors beside those of one part: the output, or the incoming and outgoing gradients
        forward = out + kept + count.forward()
        weights = max((p.nbytes for node in nodes for p in node.params), default=0)  # the sum, beside a part's gradient
        backward = kept_x + kept_out + out + kept + count.backward(0) - count.kept + weights
        backward += x if setting.image_gradient else 0
    gradients = sum(p.nbytes for node in nodes for p in node.params if p.requires_grad)
    work = work_of(program.graph, shapes, [step.at for step in program.backward if step.kind == "compute"])
    # A norm's gradient in place beside torch's kernel: measured with one thread of an AVX2 core. Left out: the system
    # clears the pages of a newly allocated gradient; where it does so each time, in place is faster.
    norms = [shapes[step.at + 1] for step in program.backward if step.inplace and nodes[step.at].op == "norm"]
    work += sum((1 if setting.channels_last else 5) * out.nbytes * _WORK_OF_A_BYTE for out in norms)
    if setting.reads_batch:
        kept_x, backward = 0, backward - kept_x
    kept += kept_x + (kept_out if setting.ends_chain else 0)
    return MemoryNeed(kept, kept_x + forward, backward, gradients, work * scale + slower)


def work_of(graph: LayerGraph, shapes: list[Tensor], nodes: Iterable[int]) -> float:
    """Multiply-adds of nodes; one that only moves bytes counts as the multiply-adds of the same time."""
    total = 0.0
    for at in nodes:
        node, out = graph.nodes[at], shapes[at + 1]
        work = (sum(shapes[v].nbytes for v in node.inputs) + out.nbytes) * _WORK_OF_A_BYTE
        if node.op == "conv":
            work = max(out.numel() * node.layer.weight[0].numel() * (0.5 if out.dtype.itemsize == 2 else 1.0), work)
        total += work
    return total


class _ByteCount:
    """A program's bytes; the caller adds input, output and incoming gradient."""

    def __init__(self, program: Program, shapes: list[Tensor], setting: ChainSetting) -> None:
        self.program, self.shapes, self.setting = program, shapes, setting
        self.nodes, ends = program.graph.nodes, {0, program.graph.out}
        self.extras = 0  # positions in max-pools, and statistics
        for node, out in zip(self.nodes, shapes[1:], strict=True):
            if node.op == "norm":
                self.extras += 8 * int(node.layer.num_features)
            elif node.op == "pool":
                two_bits = has_2_bit_positions(node.layer, shapes[node.inputs[0]].shape)
                self.extras += -(-out.numel() // 4) if two_bits else out.numel()
        self.held = {v: 0 if v in ends else shapes[v].nbytes for v in program.kept}  # from forward to backward
        self.kept = sum(self.held.values()) + self.extras

    def forward(self) -> int:
        """The peak of forward, with the output, without `extras`."""
        return self._peak(self.program.forward, {0: 0}, 0)

    def backward(self, out: int) -> int:
        """The peak of backward, without input and incoming gradient; `out`: the output's bytes, if held only here."""
        return self._peak(self.program.backward, self.held | {self.program.graph.out: out}, self.kept + out)

    def _peak(self, steps: Iterable[Instruction], present: dict[int, int], live: int) -> int:
        """Bytes at most. `present`: of each value that exists before; `live`: of all of them, and of what stays."""
        peak, gradients = live, 0
        # the memory of each value's gradient, which several may share: (the step that took it, bytes)
        areas = {self.program.graph.out: (-1, 0)}
        for step in steps:
            node, workspace, shares = self.nodes[step.at], self._workspace(step), step.inplace
            first = node.inputs[0]
            if step.kind == "compute":
                if shares:
                    present[step.at + 1], present[first] = present[first], 0
                else:
                    present[step.at + 1] = self.shapes[step.at + 1].nbytes
                    live += present[step.at + 1]
                peak = max(peak, live + gradients + workspace)
            else:
                if node.op == "norm" and shares:  # the gradient takes the memory of the input
                    live -= present[first]
                    present[first] = 0
                arrived, passes_on = areas.pop(step.at + 1), node.op == "add" or (node.op == "relu" and shares)
                joins = {v: join for v, join in zip(node.inputs, step.joins, strict=True) if join}
                own = {v: (step.at, self.shapes[v].nbytes) for v in joins}
                new = dict.fromkeys(joins, arrived) if passes_on else own
                live += sum(p.nbytes for p in node.params if p.requires_grad)
                gradients = sum(n for _, n in {arrived, *areas.values(), *new.values()})
                peak = max(peak, live + gradients + workspace)
                areas |= {v: own[v] if join == "fresh" else new[v] for v, join in joins.items()}
                gradients = sum(n for _, n in {*areas.values()})
                peak = max(peak, live + gradients)
            live -= sum(present.pop(v, 0) for v in step.frees)
        return peak

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
        own = weight = int(layer.weight.nbytes)
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
