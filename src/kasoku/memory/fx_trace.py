"""The graph of a layer or block, traced by torch.fx from its forward.

Note: a trace records one run. A forward that draws random numbers, or writes to its module, may take another path next
time, so it is refused. A forward may also read attributes that the caller sets later (a depth, a flag): when attributes
have changed, it is traced again, and refused unless the graph is the same. Globals and closures are not watched.
"""

from __future__ import annotations

import copy
import operator
import pickle
import random
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from kasoku.core import InputError
from kasoku.memory.graph import GraphNode, LayerGraph, op_of

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
_MODULE = frozenset(vars(nn.Module())) - {"_modules"}  # attributes that every module has
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_DEPTH = 3  # of nested lists whose items are compared


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
        return LayerGraph(()) if op == "identity" else LayerGraph((GraphNode(op, (0,), module),))
    if not list(module.children()) or isinstance(module, nn.Sequential | nn.ModuleList):
        return None
    training, evaluating = (_traced(module, training=training) for training in (True, False))
    return training if training == evaluating else None


def with_own_forward(module: nn.Module) -> tuple[nn.Module, ...]:
    """The modules in it, itself included, that do not have a forward of torch."""
    return tuple(m for m in module.modules() if not type(m).__module__.startswith("torch."))


def attributes_of(modules: Iterable[nn.Module]) -> list[dict[str, Any]]:
    """What the forwards of modules can read: their attributes and submodules, with the items of lists."""
    return [{k: _items(v) for k, v in vars(m).items() if k not in _MODULE} for m in modules]


def changed(before: Sequence[dict[str, Any]], now: Sequence[dict[str, Any]]) -> list[str]:
    """The names of the attributes that differ."""
    both = zip(before, now, strict=False)
    names = [k for a, b in both for k in {**a, **b} if not _same(a.get(k, ...), b.get(k, ...))]
    return names if len(before) == len(now) else [*names, "modules"]


def _items(value: Any, depth: int = _DEPTH) -> Any:
    """A list, tuple, set or dict as a tuple of its items; anything else as it is."""
    if not depth or not isinstance(value, list | tuple | set | frozenset | dict):
        return value
    return tuple(_items(item, depth - 1) for item in (value.items() if isinstance(value, dict) else value))


def _same(a: Any, b: Any) -> bool:
    try:
        return a is b or bool(a == b)
    except (RuntimeError, ValueError):  # tensors and arrays
        return False


def _traced(module: nn.Module, *, training: bool) -> LayerGraph | None:
    """The graph in one mode. The trace runs on a copy of the module that shares its tensors."""
    random_states = _random_states()
    before = pickle.dumps(random_states)
    try:
        twin = copy.deepcopy(module, {id(t): t for t in (*module.parameters(), *module.buffers())})
        for m in twin.modules():
            m.training = training
        modules = with_own_forward(twin)
        attributes = attributes_of(modules)
        graph = _from_fx(module, list(_Tracer().trace(twin).nodes))
    except Exception:  # a user's forward may do anything with what is not a tensor
        return None
    finally:
        after = pickle.dumps(_random_states())
        _set_random_states(random_states)
    if graph is None:
        return None
    written = changed(attributes, attributes_of(modules))
    own = [k for m in modules for k, v in vars(m).items() if any(isinstance(i, _GENERATORS) for i in _listed(v))]
    reason = "draws random numbers" if before != after else f"writes self.{written[0]}" if written else ""
    reason = reason or (f"can draw random numbers of self.{own[0]}" if own else "")
    if reason:
        raise decides(f"{type(module).__name__} {reason}")
    return graph


def decides(what: str) -> InputError:
    """The error for a forward that may take another path next time."""
    return InputError(
        f"SavedMemory: the forward of {what}, so it may compute something else at the next step (stochastic depth), "
        "and a plan cannot hold: leave SavedMemory out, or make this forward a fixed sequence of layers"
    )


def _listed(value: Any) -> tuple[Any, ...]:
    if isinstance(value, dict):
        return tuple(value.values())
    return tuple(value) if isinstance(value, list | tuple | set) else (value,)


def _random_states() -> tuple[Any, ...]:
    """The random states of torch (CPU and the current GPU), of Python and of numpy."""
    cuda = torch.cuda.get_rng_state().numpy() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    return torch.get_rng_state().numpy(), cuda, random.getstate(), np.random.get_state()


def _set_random_states(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(torch.from_numpy(states[0]))
    if states[1] is not None:
        torch.cuda.set_rng_state(torch.from_numpy(states[1]))
    random.setstate(states[2])
    np.random.set_state(states[3])


def _from_fx(module: nn.Module, steps: Sequence[fx.Node]) -> LayerGraph | None:
    value_of: dict[fx.Node, int] = {}
    nodes: list[GraphNode] = []
    seen: set[nn.Module] = set()
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
        if len(inputs) != (2 if op == "add" else 1) or (layer in seen and tuple(layer.parameters())):
            return None
        if op == "identity":
            value_of[step] = inputs[0]
            continue
        if layer is not None:
            seen.add(layer)
        nodes.append(GraphNode(op, inputs, layer))
        value_of[step] = len(nodes)
        if _writes_over(step, layer):
            value_of.update({node: len(nodes) for node, value in value_of.items() if value == inputs[0]})
    return None


def _writes_over(step: fx.Node, layer: Any) -> bool:
    """Whether its result takes the memory of its first input."""
    names = ("relu_", "add_", operator.iadd)
    return bool(step.target in names or step.kwargs.get("inplace") or getattr(layer, "inplace", False))
