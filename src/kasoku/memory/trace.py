"""The graph of a layer or block, traced from its forward, and the settings it was traced under.

Note: one trace tells not all. A forward may decide by what its modules hold: plain settings (numbers, flags, names, and
lists of them) are noted, and it is traced again when they change. Where it throws dice or writes down what it did there
is no graph, and what it wrote is put back. What it decides by beside that, a global or a closure, is not seen.
"""

from __future__ import annotations

import operator
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, fx, nn

from kasoku.memory.graph import Graph, Node, op_of

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
_OWN = frozenset(vars(nn.Module()))  # what every module has
_MOST = 64  # settings in a list
Settings = list[tuple[Any, ...]]


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


def deciding(module: nn.Module) -> tuple[nn.Module, ...]:
    """The modules within whose forward is not torch's."""
    return tuple(m for m in module.modules() if not type(m).__module__.startswith("torch."))


def settings_of(modules: Iterable[nn.Module]) -> Settings:
    """What their forwards may decide by: the plain values that they hold, and the modules."""
    found: Settings = []
    for m in modules:
        plain = [(name, _plain(value)) for name, value in vars(m).items() if name not in _OWN]
        found.append((tuple(m._modules.values()), [one for one in plain if one[1] is not ...]))
    return found


def _plain(value: object, depth: int = 3) -> object:
    """A value that cannot change by itself, of lists what they hold; ... for what is none."""
    numpy = sys.modules.get("numpy")
    numbers = () if numpy is None else (numpy.generic,)
    if value is None or isinstance(value, (bool, int, float, str, Enum, torch.dtype, *numbers)):
        return value
    if depth and isinstance(value, list | tuple | set | frozenset | dict) and len(value) <= _MOST:
        inner = value.items() if isinstance(value, dict) else value
        return tuple(_plain(one, depth - 1) for one in inner)
    return ...


class _Before:
    """What the forward of a module may change, as it is before it."""

    def __init__(self, module: nn.Module) -> None:
        self.modules = [(m, dict(vars(m))) for m in module.modules()]
        held = [v for _, own in self.modules for v in own.values()]
        self.inner = [(v, _copy(v)) for v in held if isinstance(v, list | dict | set)]
        self.buffers = [(t, t._version, t.detach().clone()) for t in module.buffers()]
        self.dice = _dice()

    @property
    def same(self) -> bool:
        """Nothing has changed but modes."""
        modules = all(_same(own, {**vars(m), "training": own["training"]}) for m, own in self.modules)
        inner = all(_same(old, _copy(v)) for v, old in self.inner)
        buffers = all(t._version == version for t, version, _ in self.buffers)
        return modules and inner and buffers and all(map(_equal, self.dice, _dice()))

    def put_back(self) -> None:
        """All is as it was."""
        for m, own in self.modules:
            vars(m).clear()
            vars(m).update(own)
        for v, old in self.inner:
            if _same(old, _copy(v)):
                continue
            v.clear()
            if isinstance(v, list):
                v.extend(old.values())
            else:
                v.update(old)
        for t, version, values in self.buffers:
            if t._version != version:
                t.copy_(values)
        _throw_again(self.dice)


def _traced(module: nn.Module, *, training: bool) -> Graph | None:
    """The graph in a mode; None too where the forward throws dice or writes down what it did."""
    if any(_is_dice(value) for m in module.modules() for value in _values(vars(m))):
        return None
    before = _Before(module)
    try:
        for m, _ in before.modules:
            m.training = training
        steps = list(_Tracer().trace(module).nodes)
        return _from_fx(module, steps) if before.same else None
    except Exception:  # whatever a user's forward does with what is not a tensor
        return None
    finally:
        before.put_back()


def _values(own: dict[str, Any]) -> Iterator[object]:
    """What a module holds, and what lies in its lists."""
    for value in own.values():
        yield value
        if isinstance(value, list | tuple | set | dict):
            yield from value.values() if isinstance(value, dict) else value


def _is_dice(value: object) -> bool:
    """A generator of random numbers of somebody's own."""
    return isinstance(value, torch.Generator | random.Random) or type(value).__module__.startswith("numpy.random")


def _dice() -> list[Any]:
    """The state of all that are everybody's: of torch (CPU, then the GPU), of Python, of numpy where it is loaded."""
    found: list[Any] = [torch.get_rng_state(), None, random.getstate(), None]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found[1] = torch.cuda.get_rng_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        found[3] = (kind, keys.tolist(), *rest)
    return found


def _throw_again(dice: Sequence[Any]) -> None:
    torch.set_rng_state(dice[0])
    if dice[1] is not None:
        torch.cuda.set_rng_state(dice[1])
    random.setstate(dice[2])
    numpy = sys.modules.get("numpy")
    if numpy is not None and dice[3] is not None:
        numpy.random.set_state(dice[3])


def _equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)


def _copy(held: list[Any] | dict[Any, Any] | set[Any]) -> dict[Any, Any]:
    """What lies in it, by place or key."""
    if isinstance(held, dict):
        return dict(held)
    return dict(enumerate(held)) if isinstance(held, list) else dict.fromkeys(held)


def _same(a: dict[Any, Any], b: dict[Any, Any]) -> bool:
    return a.keys() == b.keys() and all(a[name] is b[name] for name in a)


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
