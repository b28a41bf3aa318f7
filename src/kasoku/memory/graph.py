"""The layers of a network as a graph of a few kinds of operation, each with a known derivative; torch.fx traces it.

A `LayerGraph` has one input (value 0) and one output, the last value; node i computes value i + 1.

Note: a trace records one run. A forward that draws random numbers, or writes to its module, may take another path next
time, so it is refused. A forward may also read attributes that the caller sets later (a depth, a flag): when attributes
have changed, it is traced again, and refused unless the graph is the same. Globals and closures are not watched.
"""

from __future__ import annotations

import copy
import operator
import pickle
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from kasoku.core import InputError

WINDOW_POSITIONS = 256  # of a max-pool's window: a position must fit in a byte
# Layers without weights and without randomness, differentiated by torch from their input alone.
OTHER = (nn.GELU, nn.SiLU, nn.LeakyReLU, nn.ELU, nn.Hardswish, nn.Tanh, nn.Sigmoid, nn.AvgPool2d)
_FUNCTIONS: dict[Any, str] = {
    **dict.fromkeys((operator.add, operator.iadd, torch.add, "add", "add_"), "add"),
    **dict.fromkeys((torch.relu, nn.functional.relu, "relu", "relu_"), "relu"),
}
_IN_PLACE = ("relu_", "add_", operator.iadd)
_MODULE = frozenset(vars(nn.Module())) - {"_modules"}  # attributes that every module has
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_DEPTH = 3  # of nested lists whose items are compared


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
    def uses_batch_statistics(self) -> bool:
        """Whether it is a BatchNorm that takes the statistics of its batch."""
        return self.op == "norm" and (self.layer.training or self.layer.running_mean is None)


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

    def pooled_first(self) -> LayerGraph:
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
            layer, value = node.layer, values[node.inputs[0]]
            if node.op == "conv":
                value = value.to(half or value.dtype)
                weight = torch.empty_like(layer.weight, dtype=value.dtype, device="meta")
                settings = (layer.stride, layer.padding, layer.dilation, layer.groups)
                value = nn.functional.conv2d(value, weight, None, *settings)
            elif node.op in ("pool", "other"):
                value = type(layer).forward(layer, value)
            elif node.op == "add":
                value = value + values[node.inputs[1]]
            values.append(value)
        return values


class Instruction(NamedTuple):
    """One step: "compute" a node's value, or take the "grad" of a node.

    Args:
        inplace: the result takes the memory of the first input (compute), of the incoming gradient (grad of a ReLU) or
            of the input (grad of a norm).
        joins: for "grad", how the gradient of each input is added to the gradient of the same value from another
            reader: "set" (there is none yet), "into" (the other is added to it), "fresh" (a new tensor, as it shares
            its memory), or "" if the input needs no gradient.
        frees: the values freed after it.
    """

    kind: str
    at: int
    inplace: bool = False
    joins: tuple[str, ...] = ()
    frees: tuple[int, ...] = ()


def op_of(layer: nn.Module) -> str:
    """The operation of one of torch's layers; "" if it is not supported."""
    kind = type(layer)
    if kind is nn.Conv2d:
        return "conv" if layer.padding_mode == "zeros" and not isinstance(layer.padding, str) else ""
    if kind is nn.MaxPool2d:
        rows, columns = pair(layer.kernel_size)
        simple = layer.dilation in (1, (1, 1)) and not layer.return_indices
        return "pool" if simple and rows * columns <= WINDOW_POSITIONS else ""
    names: dict[type, str] = {nn.BatchNorm2d: "norm", nn.ReLU: "relu", nn.Identity: "identity"}
    return names.get(kind, "other" if kind in OTHER else "")


def weights_of(nodes: Sequence[GraphNode]) -> list[Tensor]:
    """The weights of nodes, each once."""
    return list(dict.fromkeys(p for node in nodes for p in node.params))


# ---- traces


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True  # so that no buffer is written while we trace

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return bool(op_of(m)) or super().is_leaf_module(m, module_qualified_name)


def graph_of(module: nn.Module) -> LayerGraph | None:
    """The graph of a layer, or of a block of layers and sums; None if it contains anything else.

    Raises:
        InputError: if the forward draws random numbers or writes to its module.
    """
    op = op_of(module)
    if op:
        return LayerGraph(() if op == "identity" else (GraphNode(op, (0,), module),))
    if not list(module.children()) or isinstance(module, nn.Sequential | nn.ModuleList):
        return None
    training, evaluating = (_traced(module, training=training) for training in (True, False))
    return training if training == evaluating else None


def attributes_of(module: nn.Module) -> dict[tuple[int, str], Any]:
    """What forwards in a module, torch's left out, can read: attributes and submodules, with the items of lists."""
    own = [m for m in module.modules() if not type(m).__module__.startswith("torch.")]
    return {(i, k): _items(v) for i, m in enumerate(own) for k, v in vars(m).items() if k not in _MODULE}


def _items(value: Any, depth: int = _DEPTH) -> Any:
    """A list, tuple, set or dict as a tuple of its items; anything else as it is."""
    if not depth or not isinstance(value, list | tuple | set | frozenset | dict):
        return value
    return tuple(_items(item, depth - 1) for item in (value.items() if isinstance(value, dict) else value))


def changed_attribute(before: dict[tuple[int, str], Any], now: dict[tuple[int, str], Any]) -> str:
    """The name of the first attribute that differs; empty if none does."""
    for key in {**before, **now}:
        a, b = before.get(key, ...), now.get(key, ...)
        try:
            same = a is b or bool(a == b)
        except (RuntimeError, ValueError):  # tensors and arrays
            same = False
        if not same:
            return key[1]
    return ""


def _traced(module: nn.Module, *, training: bool) -> LayerGraph | None:
    """The graph in one mode. The trace runs on a copy of the module that shares its tensors."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    try:
        with torch.random.fork_rng(gpus):
            before = _random_states()
            twin = copy.deepcopy(module, {id(t): t for t in (*module.parameters(), *module.buffers())})
            for m in twin.modules():
                m.training = training
            attributes = attributes_of(twin)
            graph = _from_fx(module, list(_Tracer().trace(twin).nodes))
            after = _random_states()
    except Exception:  # a user's forward may do anything with what is not a tensor
        return None
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
    if graph is None:
        return None
    written = changed_attribute(attributes, attributes_of(twin))
    own = [k for (_, k), v in attributes.items() if any(isinstance(item, _GENERATORS) for item in tree_leaves(v))]
    reason = "draws random numbers" if before != after else f"writes self.{written}" if written else ""
    reason = reason or (f"can draw random numbers of self.{own[0]}" if own else "")
    if reason:
        raise decides(f"{type(module).__name__} {reason}")
    return graph


def decides(what: str) -> InputError:
    """The error for a forward that may take another path next time."""
    reason = "so it may compute something else at the next step (stochastic depth), and a plan cannot hold"
    advice = "leave SavedMemory out, or make this forward a fixed sequence of layers"
    return InputError(f"SavedMemory: the forward of {what}, {reason}: {advice}")


def _random_states() -> bytes:
    """The random states of torch (CPU and the current GPU), of Python and of numpy."""
    cuda = torch.cuda.get_rng_state().numpy() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    return pickle.dumps((torch.get_rng_state().numpy(), cuda, random.getstate(), np.random.get_state()))


def _from_fx(module: nn.Module, steps: Sequence[fx.Node]) -> LayerGraph | None:
    """The graph of a trace; None if it has other steps than known layers and functions of the values before them."""
    value_of: dict[fx.Node, int] = {}
    nodes: list[GraphNode] = []
    for step in steps:
        if step.op == "placeholder":
            if value_of:
                return None
            value_of[step] = 0
            continue
        if step.op == "output":
            result = step.args[0]
            whole = isinstance(result, fx.Node) and value_of[result] == len(nodes) and bool(nodes)
            return LayerGraph(tuple(nodes)) if whole else None
        layer = module.get_submodule(str(step.target)) if step.op == "call_module" else None
        op = op_of(layer) if layer is not None else _FUNCTIONS.get(step.target, "")
        if not op or not all(isinstance(a, fx.Node) for a in step.args) or not set(step.kwargs) <= {"inplace"}:
            return None
        inputs = tuple(value_of[a] for a in step.args if isinstance(a, fx.Node))
        again = layer is not None and any(node.layer is layer for node in nodes) and tuple(layer.parameters())
        if len(inputs) != (2 if op == "add" else 1) or again:
            return None
        if op == "identity":
            value_of[step] = inputs[0]
            continue
        nodes.append(GraphNode(op, inputs, layer))
        value_of[step] = len(nodes)
        if step.target in _IN_PLACE or step.kwargs.get("inplace") or getattr(layer, "inplace", False):
            value_of.update({node: len(nodes) for node, value in value_of.items() if value == inputs[0]})
    return None
