"""A look at a network: which of its layers follow one another, and what plain PyTorch keeps of them.

Note: why by running it. What a model's forward does with its layers is Python; what it does is seen by what goes into
each layer and what comes out, on two images of the batch, in eval mode, so that nothing in the model moves. What lies
between two layers that follow one another may still be read by somebody else: so the network is run once more with
the segments in place, and must give the same.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from kasoku.core import Job
from kasoku.memory.graph import Graph, graph_of
from kasoku.memory.segment import Segment

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_parametrizations")


class Item:
    """What hangs on a layer or block whose forward we stand in for.

    Attributes:
        segment: it begins this one, in training.
        before: it lies within the segment that this item begins.
        log: calls are noted here while the network is looked at.
        forced: the segment runs in eval mode too.
    """

    def __init__(self, name: str, graph: Graph) -> None:
        self.name, self.graph = name, graph
        self.segment: Segment | None = None
        self.before: Item | None = None
        self.log: Log | None = None
        self.forced = False
        self.made: weakref.ref[Tensor] | None = None

    def plain(self) -> None:
        """Nothing is planned for it."""
        self.segment, self.before, self.made = None, None, None


@dataclass
class Log:
    """The calls of one forward, and the bytes that autograd keeps for backward.

    Attributes:
        calls: (item, input, output) in order.
        inside: bytes kept by calls of each item.
        outside: bytes kept elsewhere.
        half: what autocast computed convolutions in, None where it was off.
    """

    calls: list[tuple[Item, Tensor, Tensor]] = field(default_factory=list)
    inside: dict[Item, int] = field(default_factory=dict)
    outside: int = 0
    half: torch.dtype | None = None
    now: Item | None = None
    seen: set[int] = field(default_factory=set)
    held: list[Tensor] = field(default_factory=list)

    def keep(self, x: Tensor) -> Tensor:
        """Autograd keeps x."""
        key = x.untyped_storage().data_ptr()
        if key not in self.seen:
            self.seen.add(key)
            self.held.append(x.detach())  # or its address would be used again
            if self.now is not None:
                self.inside[self.now] = self.inside.get(self.now, 0) + x.nbytes
            else:
                self.outside += x.nbytes
        return torch.empty(0)  # nothing runs backward here

    def clear(self) -> None:
        """Lets go of the tensors: autograd's graph holds `keep`, so a log that holds outputs would live for ever."""
        self.calls.clear()
        self.held.clear()


def install(job: Job) -> list[Item]:
    """Stands in for the forward of every layer and block that we know, until the job is closed."""
    items = []
    for name, module, graph in _known("", job.model):
        item = Item(name, graph)
        job.patch(module, "saved_memory", item)
        job.patch(module, "forward", MethodType(_forward, module))
        items.append(item)
    return items


def _known(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module, Graph]]:
    graph = None if _is_touched(module) else graph_of(module)
    if graph is not None and graph.nodes and not any(_is_touched(node.layer) for node in graph.nodes if node.layer):
        yield name, module, graph
        return
    for child_name, child in module.named_children():
        yield from _known(f"{name}.{child_name}".lstrip("."), child)


def _is_touched(module: nn.Module) -> bool:
    """Somebody hooked it, or put a forward of their own there."""
    return "forward" in vars(module) or any(getattr(module, name, None) for name in _HOOKS)


def _forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a layer with an item."""
    item: Item = module.saved_memory
    plain = functools.partial(type(module).forward, module, *args, **kwargs)
    if item.log is not None:
        return _noted(item, item.log, args, plain)
    x = args[0] if len(args) == 1 and not kwargs else None
    if item.before is not None and item.before.made is not None and item.before.made() is x:
        return x  # what the segment made is this layer's output already
    active = (module.training or item.forced) and torch.is_grad_enabled()
    if item.segment is None or not active or not isinstance(x, Tensor):
        item.made = None
        return plain()
    out = item.segment(x)
    item.made = weakref.ref(out)
    return out


def _noted(item: Item, log: Log, args: tuple[Any, ...], plain: Any) -> Any:
    log.now = item
    out = plain()
    log.now = None
    x = args[0] if len(args) == 1 and isinstance(args[0], Tensor) else None
    if x is not None and isinstance(out, Tensor):
        kind = x.device.type
        log.half = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        log.calls.append((item, x, out))
    return out


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """The model in eval mode, with gradients on; modes and random state are put back."""
    modes = [(m, m.training) for m in model.modules()]
    try:
        with torch.random.fork_rng(), torch.enable_grad():
            model.eval()
            yield
    finally:
        for module, training in modes:
            module.training = training


def watch(model: nn.Module, items: Sequence[Item], x: Tensor) -> tuple[Log, Any]:
    """Runs the model on x: what was called and kept, and the outputs."""
    log = Log()
    log.seen = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers(), x]}
    for item in items:
        item.log = log
    try:
        with undisturbed(model), torch.autograd.graph.saved_tensors_hooks(log.keep, lambda kept: kept):
            outputs = model.forward(x)
    finally:
        for item in items:
            item.log = None
    return log, outputs


def chains(log: Log) -> list[tuple[list[Item], Tensor]]:
    """Stretches of items each of which is called once, on what the one before it gave; with the first one's input."""
    count: dict[Item, int] = {}
    for item, _, _ in log.calls:
        count[item] = count.get(item, 0) + 1
    found: list[tuple[list[Item], Tensor]] = []
    last: Tensor | None = None
    for item, x, out in log.calls:
        if count[item] > 1:
            last = None
            continue
        if last is not x:
            found.append(([], x))
        found[-1][0].append(item)
        last = out
    return [(chain, x) for chain, x in found if any(node.op == "conv" for item in chain for node in item.graph.nodes)]


def units(chain: Sequence[Item]) -> list[list[Item]]:
    """A chain cut before every item with a convolution."""
    found: list[list[Item]] = []
    for item in chain:
        if not found or any(node.op == "conv" for node in item.graph.nodes):
            found.append([])
        found[-1].append(item)
    return found
