"""The layers of a network as a graph of a few kinds of operation, each with a known derivative.

A `LayerGraph` has one input (value 0) and one output, the last value; node i computes value i + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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
        return tuple(self.layer.parameters(recurse=False)) if self.layer is not None else ()

    @property
    def learns(self) -> bool:
        return any(p.requires_grad for p in self.params)

    @property
    def uses_batch_statistics(self) -> bool:
        """Whether it is a BatchNorm that takes the statistics of its batch."""
        return self.op == "norm" and (self.layer.training or self.layer.running_mean is None)


class ValueShape(NamedTuple):
    """A value's shape (images first) and type."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class LayerGraph:
    """Nodes in an order in which they can be computed."""

    nodes: tuple[GraphNode, ...]

    @property
    def out(self) -> int:
        """The number of its output value."""
        return len(self.nodes)

    def then(self, following: LayerGraph) -> LayerGraph:
        """This graph and then the following one, which reads this one's output."""
        n = len(self.nodes)
        shifted = (replace(node, inputs=tuple(v + n for v in node.inputs)) for node in following.nodes)
        return LayerGraph((*self.nodes, *shifted))

    def readers(self, value: int) -> list[int]:
        return [i for i, node in enumerate(self.nodes) if value in node.inputs]

    def pooled_first(self) -> LayerGraph:
        """The same function with each max-pool before its ReLU: they commute bit for bit, and ReLU has less to do."""
        nodes = list(self.nodes)
        for i in range(len(nodes) - 1):
            relu, pool = nodes[i], nodes[i + 1]
            if (relu.op, pool.op) == ("relu", "pool") and pool.inputs == (i + 1,) and self.readers(i + 1) == [i + 1]:
                nodes[i], nodes[i + 1] = replace(pool, inputs=relu.inputs), replace(relu, inputs=(i + 1,))
        return LayerGraph(tuple(nodes))

    def shapes(self, x: ValueShape, half: torch.dtype | None) -> list[ValueShape]:
        """The shapes of all values, the input first; `half`: the type in which autocast computes convolutions."""
        shapes = [x]
        for node in self.nodes:
            source = shapes[node.inputs[0]]
            dtype = half if half is not None and node.op == "conv" else source.dtype
            if node.op == "add":
                dtype = torch.promote_types(source.dtype, shapes[node.inputs[1]].dtype)
            shapes.append(ValueShape(_output_shape(node, source), dtype))
        return shapes


def _output_shape(node: GraphNode, x: ValueShape) -> tuple[int, ...]:
    layer = node.layer
    if node.op == "conv":
        meta = torch.empty(x.shape, device="meta", dtype=layer.weight.dtype)
        weight = torch.empty_like(layer.weight, device="meta")
        settings = (layer.stride, layer.padding, layer.dilation, layer.groups)
        return tuple(nn.functional.conv2d(meta, weight, None, *settings).shape)
    if node.op in ("pool", "other"):
        return tuple(type(layer).forward(layer, torch.empty(x.shape, device="meta")).shape)
    return x.shape


def op_of(layer: nn.Module) -> str:
    """The operation of one of torch's layers; "" if it is not supported."""
    kind = type(layer)
    if kind is nn.Conv2d:
        return "conv" if layer.padding_mode == "zeros" and not isinstance(layer.padding, str) else ""
    if kind is nn.BatchNorm2d:
        return "norm"
    if kind is nn.ReLU:
        return "relu"
    if kind is nn.MaxPool2d:
        rows, columns = pair(layer.kernel_size)
        simple = layer.dilation in (1, (1, 1)) and not layer.return_indices
        return "pool" if simple and rows * columns <= WINDOW_POSITIONS else ""
    if kind is nn.Identity:
        return "identity"
    return "other" if kind in OTHER else ""


def weights_of(nodes: Sequence[GraphNode]) -> list[Tensor]:
    """The weights of nodes, each once."""
    return list(dict.fromkeys(p for node in nodes for p in node.params))
