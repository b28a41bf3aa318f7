"""The layers of a network as a graph of a few kinds of operation, each with a known derivative.

A `LayerGraph` has one input (value 0) and one output, the last value; node i computes value i + 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

WINDOW_POSITIONS = 256  # of a max-pool's window: a position must fit in a byte
# Layers without weights and without randomness, differentiated by torch from their input alone.
OTHER = (nn.GELU, nn.SiLU, nn.LeakyReLU, nn.ELU, nn.Hardswish, nn.Tanh, nn.Sigmoid, nn.AvgPool2d)


def pair(n: Any) -> tuple[int, int]:
    """A size of torch's layers, which may be one number, for rows and columns."""
    return (n, n) if isinstance(n, int) else (n[0], n[1])


@dataclass(frozen=True)
class GraphNode:
    """One operation: "conv", "norm", "relu", "pool", "add" or "other", the values it reads, its layer if it has one."""

    op: str
    inputs: tuple[int, ...]
    layer: Any = None

    @property
    def cheap(self) -> bool:
        """Whether it takes a pass over memory and no more."""
        return self.op in ("norm", "relu", "add", "other")

    @property
    def params(self) -> tuple[nn.Parameter, ...]:
        """Its weights, frozen or not."""
        weights = (self.layer.weight, self.layer.bias) if self.op in ("conv", "norm") else ()
        return tuple(p for p in weights if p is not None)

    @property
    def uses_batch_statistics(self) -> bool:
        """Whether it is a BatchNorm that takes the statistics of its batch."""
        return self.op == "norm" and (self.layer.training or self.layer.running_mean is None)

    def result(self, values: Sequence[Tensor], half: torch.dtype | None) -> Tensor:
        """Its value, of meta tensors; `half`: the type in which autocast computes convolutions."""
        layer, value = self.layer, values[self.inputs[0]]
        if self.op == "conv":
            value = value.to(half or value.dtype)
            weight = torch.empty_like(layer.weight, dtype=value.dtype, device="meta")
            return nn.functional.conv2d(value, weight, None, layer.stride, layer.padding, layer.dilation, layer.groups)
        if self.op in ("pool", "other"):
            return cast(Tensor, type(layer).forward(layer, value))
        return value + values[self.inputs[1]] if self.op == "add" else value


@dataclass(frozen=True)
class LayerGraph:
    """Nodes in an order in which they can be computed."""

    nodes: tuple[GraphNode, ...]

    @property
    def out(self) -> int:
        """The number of its output value."""
        return len(self.nodes)

    def then(self, following: Sequence[GraphNode]) -> "LayerGraph":
        """This graph and then more nodes, of which the first reads this graph's output."""
        shift = self.out - following[0].inputs[0]
        shifted = (replace(node, inputs=tuple(v + shift for v in node.inputs)) for node in following)
        return LayerGraph((*self.nodes, *shifted))

    def pooled_first(self) -> "LayerGraph":
        """The same function with each max-pool before its ReLU: they commute bit for bit, and ReLU has less to do."""
        nodes = list(self.nodes)
        for i in range(len(nodes) - 1):
            relu, pool = nodes[i], nodes[i + 1]
            readers = [node for node in self.nodes if i + 1 in node.inputs]
            if (relu.op, pool.op) == ("relu", "pool") and readers == [pool]:
                nodes[i], nodes[i + 1] = replace(pool, inputs=relu.inputs), replace(relu, inputs=(i + 1,))
        return LayerGraph(tuple(nodes))

    def shapes(self, x: Tensor, half: torch.dtype | None) -> list[Tensor]:
        """All values as meta tensors, the input first; `half`: the type in which autocast computes convolutions."""
        values = [torch.empty(x.shape, dtype=x.dtype, device="meta")]
        for node in self.nodes:
            values.append(node.result(values, half))
        return values


class Instruction(NamedTuple):
    """One step: "compute" a node's value, or take the "grad" of a node."""

    kind: str
    at: int
    # the result takes the memory of the first input (compute), of the incoming gradient (grad of a ReLU), or of the
    # input (grad of a norm)
    inplace: bool = False
    # for "grad", how the gradient of each input is added to the gradient of the same value from another reader: "set"
    # (there is none yet), "into" (the other is added to it), "fresh" (a new tensor, as it shares its memory), or "" if
    # the input needs no gradient
    joins: tuple[str, ...] = ()
    frees: tuple[int, ...] = ()  # the values freed after it


def op_of(layer: nn.Module) -> str:
    """The operation of one of torch's layers; "" if it is not supported."""
    kind = type(layer)
    if kind is nn.Conv2d:
        return "conv" if layer.padding_mode == "zeros" and not isinstance(layer.padding, str) else ""
    if kind is nn.MaxPool2d:
        rows, columns = pair(layer.kernel_size)
        simple = layer.dilation in (1, (1, 1)) and not layer.return_indices
        return "pool" if simple and rows * columns <= WINDOW_POSITIONS else ""
    if kind is nn.BatchNorm2d:
        return "norm" if layer.weight is not None or layer.bias is None else ""
    return "relu" if kind is nn.ReLU else "other" if kind in OTHER else ""
