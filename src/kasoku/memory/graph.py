"""The layers of a network as a graph of a few kinds of operation, each of which we know how to differentiate.

A `Graph` has one input (value 0) and one output, the last value; node i makes value i + 1.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

# Layers without weights and without randomness, differentiated by torch from their input alone.
OTHER = (nn.GELU, nn.SiLU, nn.LeakyReLU, nn.ELU, nn.Hardswish, nn.Tanh, nn.Sigmoid, nn.AvgPool2d)
_FUNCTIONS: dict[Any, str] = {
    operator.add: "add",
    operator.iadd: "add",
    torch.add: "add",
    torch.relu: "relu",
    nn.functional.relu: "relu",
    "relu": "relu",
    "relu_": "relu",
    "add": "add",
    "add_": "add",
}


@dataclass(frozen=True)
class Node:
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


class Shape(NamedTuple):
    """What a value takes: its shape (N images first) and type."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Graph:
    """Nodes in an order in which they can be computed."""

    nodes: tuple[Node, ...]

    @property
    def out(self) -> int:
        """The value that leaves it."""
        return len(self.nodes)

    def then(self, other: Graph) -> Graph:
        """This graph, its output into the other's input."""
        n = len(self.nodes)
        return Graph(self.nodes + tuple(replace(m, inputs=tuple(v + n for v in m.inputs)) for m in other.nodes))

    def readers(self, value: int) -> list[int]:
        """The nodes that read a value."""
        return [i for i, node in enumerate(self.nodes) if value in node.inputs]

    def pooled_first(self) -> Graph:
        """The same function, every max-pool ahead of its ReLU: they commute, bit for bit, and ReLU has less to do."""
        nodes = list(self.nodes)
        for i in range(len(nodes) - 1):
            relu, pool = nodes[i], nodes[i + 1]
            if (relu.op, pool.op) == ("relu", "pool") and pool.inputs == (i + 1,) and self.readers(i + 1) == [i + 1]:
                nodes[i], nodes[i + 1] = replace(pool, inputs=relu.inputs), replace(relu, inputs=(i + 1,))
        return Graph(tuple(nodes))

    def shapes(self, x: Shape, half: torch.dtype | None) -> list[Shape]:
        """What every value takes for an input, the input first; `half`: what autocast computes convolutions in."""
        found = [x]
        for node in self.nodes:
            like = found[node.inputs[0]]
            dtype = half if half is not None and node.op == "conv" else like.dtype
            if node.op == "add":
                dtype = torch.promote_types(like.dtype, found[node.inputs[1]].dtype)
            found.append(Shape(_shape(node, like), dtype))
        return found


def _shape(node: Node, x: Shape) -> tuple[int, ...]:
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
        return "pool" if layer.dilation in (1, (1, 1)) and not layer.return_indices else ""
    if kind is nn.Identity:
        return "identity"
    return "other" if kind in OTHER else ""


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return bool(op_of(m)) or super().is_leaf_module(m, module_qualified_name)


def graph_of(module: nn.Module) -> Graph | None:
    """The graph of a layer, or of a block of layers and sums; None where something in it is unknown to us."""
    op = op_of(module)
    if op:
        return Graph(()) if op == "identity" else Graph((Node(op, (0,), module),))
    if not list(module.children()) or isinstance(module, nn.Sequential | nn.ModuleList):
        return None
    found = [_traced(module, training=training) for training in (True, False)]
    return found[0] if found[0] == found[1] else None


def _traced(module: nn.Module, *, training: bool) -> Graph | None:
    """The graph in a mode; None too where the forward throws dice or writes down what it did: one trace tells not all.

    What it wrote is put back.
    """
    before = [(m, dict(vars(m)), _insides(m)) for m in module.modules()]
    versions = [(t, t._version, t.detach().clone()) for t in module.buffers()]
    dice = (torch.get_rng_state(), random.getstate())
    try:
        for m, _, _ in before:
            m.training = training
        steps = list(_Tracer().trace(module).nodes)
        still = [(m, {**vars(m), "training": old["training"]}, _insides(m)) for m, old, _ in before]
        same = all(_same(a, b) for (_, a, _), (_, b, _) in zip(before, still, strict=True))
        same &= [inner for _, _, inner in before] == [inner for _, _, inner in still]
        same &= all(t._version == version for t, version, _ in versions)
        same &= torch.equal(dice[0], torch.get_rng_state()) and dice[1] == random.getstate()
        return _from_fx(module, steps) if same else None
    except Exception:  # whatever a user's forward does with what is not a tensor
        return None
    finally:
        for m, old, _ in before:
            vars(m).clear()
            vars(m).update(old)
        for t, version, values in versions:
            if t._version != version:
                t.copy_(values)
        torch.set_rng_state(dice[0])
        random.setstate(dice[1])


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(a[name] is b[name] for name in a)


def _insides(module: nn.Module) -> list[list[int]]:
    """What lies in the module's lists and dictionaries."""
    found = [
        list(v.values() if isinstance(v, dict) else v) for v in vars(module).values() if isinstance(v, dict | list)
    ]
    return [[id(one) for one in inner] for inner in found]


def _from_fx(module: nn.Module, steps: Sequence[fx.Node]) -> Graph | None:
    place: dict[fx.Node, int] = {}
    nodes: list[Node] = []
    seen: set[nn.Module] = set()
    for step in steps:
        if step.op == "placeholder":
            if place:
                return None
            place[step] = 0
            continue
        if step.op == "output":
            result = step.args[0]
            whole = isinstance(result, fx.Node) and place[result] == len(nodes) and bool(nodes)
            return Graph(tuple(nodes)) if whole else None
        layer = module.get_submodule(str(step.target)) if step.op == "call_module" else None
        op = op_of(layer) if layer is not None else _FUNCTIONS.get(step.target, "")
        if not op or not all(isinstance(a, fx.Node) for a in step.args) or not set(step.kwargs) <= {"inplace"}:
            return None
        inputs = tuple(place[a] for a in step.args if isinstance(a, fx.Node))
        if len(inputs) != (2 if op == "add" else 1) or (layer in seen and tuple(layer.parameters())):
            return None
        if op == "identity":
            place[step] = inputs[0]
            continue
        if layer is not None:
            seen.add(layer)
        nodes.append(Node(op, inputs, layer))
        place[step] = len(nodes)
        if _writes_over(step, layer):
            place.update({other: len(nodes) for other, value in place.items() if value == inputs[0]})
    return None


def _writes_over(step: fx.Node, layer: Any) -> bool:
    """Its result takes the place of its first input."""
    names = ("relu_", "add_", operator.iadd)
    return bool(step.target in names or step.kwargs.get("inplace") or getattr(layer, "inplace", False))


def tensors(nodes: Sequence[Node]) -> list[Tensor]:
    """The weights of nodes, each once."""
    return list(dict.fromkeys(p for node in nodes for p in node.params))
