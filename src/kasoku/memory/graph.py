"""The layers of a network as a graph of a few kinds of operation, each of which we know how to differentiate.

A `LayerGraph` has one input (value 0) and one output, the last value; node i makes value i + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kasoku.memory.pool import PLACES, pair

# Layers without weights and without randomness, differentiated by torch from their input alone.
OTHER = (nn.GELU, nn.SiLU, nn.LeakyReLU, nn.ELU, nn.Hardswish, nn.Tanh, nn.Sigmoid, nn.AvgPool2d)


@dataclass(frozen=True)
class GraphNode:
    """One operation: "conv", "norm", "relu", "pool", "add" or "other", the values it reads, its layer if it has one."""

    op: str
    inputs: tuple[int, ...]
    layer: Any = None

    @property
    def cheap(self) -> bool:
        """It takes a pass over memory, no more."""
        return self.op in ("norm", "relu", "add", "other")

    @property
    def params(self) -> tuple[nn.Parameter, ...]:
        """Its weights, frozen or not."""
        return tuple(self.layer.parameters(recurse=False)) if self.layer is not None else ()

    @property
    def learns(self) -> bool:
        """A weight of it requires a gradient."""
        return any(p.requires_grad for p in self.params)

    @property
    def steers(self) -> bool:
        """It is a BatchNorm that takes the statistics of the batch it sees."""
        return self.op == "norm" and (self.layer.training or self.layer.running_mean is None)


class ValueShape(NamedTuple):
    """What a value takes: its shape (N images first) and type."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class LayerGraph:
    """Nodes in an order in which they can be computed."""

    nodes: tuple[GraphNode, ...]

    @property
    def out(self) -> int:
        """The value that leaves it."""
        return len(self.nodes)

    def then(self, other: LayerGraph) -> LayerGraph:
        """This graph, its output into the other's input."""
        n = len(self.nodes)
        return LayerGraph(self.nodes + tuple(replace(m, inputs=tuple(v + n for v in m.inputs)) for m in other.nodes))

    def readers(self, value: int) -> list[int]:
        """The nodes that read a value."""
        return [i for i, node in enumerate(self.nodes) if value in node.inputs]

    def pooled_first(self) -> LayerGraph:
        """The same function, every max-pool ahead of its ReLU: they commute, bit for bit, and ReLU has less to do."""
        nodes = list(self.nodes)
        for i in range(len(nodes) - 1):
            relu, pool = nodes[i], nodes[i + 1]
            if (relu.op, pool.op) == ("relu", "pool") and pool.inputs == (i + 1,) and self.readers(i + 1) == [i + 1]:
                nodes[i], nodes[i + 1] = replace(pool, inputs=relu.inputs), replace(relu, inputs=(i + 1,))
        return LayerGraph(tuple(nodes))

    def shapes(self, x: ValueShape, half: torch.dtype | None) -> list[ValueShape]:
        """What every value takes for an input, the input first; `half`: what autocast computes convolutions in."""
        found = [x]
        for node in self.nodes:
            like = found[node.inputs[0]]
            dtype = half if half is not None and node.op == "conv" else like.dtype
            if node.op == "add":
                dtype = torch.promote_types(like.dtype, found[node.inputs[1]].dtype)
            found.append(ValueShape(_shape(node, like), dtype))
        return found


def _shape(node: GraphNode, x: ValueShape) -> tuple[int, ...]:
    layer = node.layer
    if node.op == "conv":
        meta = torch.empty(x.shape, device="meta", dtype=layer.weight.dtype)
        weight = torch.empty_like(layer.weight, device="meta")
        made = nn.functional.conv2d(meta, weight, None, layer.stride, layer.padding, layer.dilation, layer.groups)
        return tuple(made.shape)
    if node.op in ("pool", "other"):
        return tuple(type(layer).forward(layer, torch.empty(x.shape, device="meta")).shape)
    return x.shape


def op_of(layer: nn.Module) -> str:
    """The operation of a layer as torch has it; "" where we do not know it."""
    kind = type(layer)
    if kind is nn.Conv2d:
        return "conv" if layer.padding_mode == "zeros" and not isinstance(layer.padding, str) else ""
    if kind is nn.BatchNorm2d:
        return "norm"
    if kind is nn.ReLU:
        return "relu"
    if kind is nn.MaxPool2d:
        rows, columns = pair(layer.kernel_size)
        plain = layer.dilation in (1, (1, 1)) and not layer.return_indices
        return "pool" if plain and rows * columns <= PLACES else ""
    if kind is nn.Identity:
        return "identity"
    return "other" if kind in OTHER else ""


def tensors(nodes: Sequence[GraphNode]) -> list[Tensor]:
    """The weights of nodes, each once."""
    return list(dict.fromkeys(p for node in nodes for p in node.params))
