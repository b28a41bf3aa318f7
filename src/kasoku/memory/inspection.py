"""A look at a network: which of its layers follow one another, and what plain PyTorch keeps of them.

Note: why by running it. What a model's forward does with its layers is Python; what it does is seen by what goes into
each layer and what comes out, on two images of the batch, with layers that have buffers in eval mode, so that nothing
in the model moves. What lies between two layers that follow one another may still be read by somebody else: so the
network is run once more with the segments in place and NaN between their layers, and must give the same.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kasoku.core import InputError, Job
from kasoku.core.torch_internals import module_hooks
from kasoku.memory.bound import Bound
from kasoku.memory.fx_trace import attributes_of, changed, decides, graph_of, with_own_forward
from kasoku.memory.graph import LayerGraph, ValueShape
from kasoku.memory.segment import Segment

_OURS = ("kasoku.distributed.", "kasoku.report.")  # hooks that read neither inputs nor outputs, and may be called twice


class Hook(Bound):
    """What hangs on a layer or block whose forward we stand in for.

    Attributes:
        segment: it begins this one, in training.
        before: it lies within the segment that this item begins.
        place: its place there, from 0.
        length: items of the segment that it begins.
        passed: how many of them this forward has come to; 0: the segment has not run in it.
        log: calls are noted here while the network is looked at.
        forced: the segment runs in eval mode too, and gives NaN until its last item.
    """

    def __init__(self, name: str, model: nn.Module, module: nn.Module, graph: LayerGraph) -> None:
        self.name, self.model, self.module, self.graph = name, model, module, graph
        self.inside, self.deciding = tuple(module.modules()), with_own_forward(module)
        self.attributes = attributes_of(self.deciding)
        self.segment: Segment | None = None
        self.before: Hook | None = None
        self.log: CallLog | None = None
        self.forced = False
        self.place, self.length, self.passed = 0, 1, 0
        self.made: weakref.ref[Tensor] | None = None
        self.whole: Tensor | None = None  # what the last item gives while NaN goes round

    def plain(self) -> None:
        """Nothing is planned for it."""
        self.segment, self.before, self.made, self.whole = None, None, None, None
        self.place, self.length, self.passed = 0, 1, 0

    def check_forward(self) -> None:
        """Raises InputError if its forward no longer computes what was traced, since an attribute has changed."""
        attributes = attributes_of(self.deciding)
        names = changed(self.attributes, attributes)
        if not names:
            return
        if graph_of(self.module) != self.graph:
            raise decides(f"{type(self.module).__name__} ({self.name}) depends on self.{names[0]}, which has changed")
        self.attributes = attributes

    @property
    def hooked(self) -> bool:
        """Somebody waits for what goes in or out of its layers."""
        found = (hook for m in self.inside for hook in module_hooks(m))
        return any(not str(getattr(hook, "__module__", "")).startswith(_OURS) for hook in found)

    def begin(self, segment: Segment, x: Tensor) -> Tensor:
        """Runs the segment: what its first item gives."""
        out = segment(x)
        if self.forced and self.length > 1:
            self.whole, out = out, torch.full_like(out, float("nan"))
        self.passed, self.made = 1, weakref.ref(out)
        return out

    def follow(self, first: Hook, x: Tensor | None) -> Tensor:
        """What an item inside a segment gives that has run: x. Raises InputError where it is called on another."""
        if x is None or first.made is None or first.made() is not x or first.passed != self.place:
            raise another_way(first)
        first.passed += 1
        if first.passed == first.length and first.whole is not None:
            x, first.whole = first.whole, None
        return x


def another_way(first: Hook) -> InputError:
    """The layers of a segment that has run were not called one after another."""
    name = first.segment.name if first.segment is not None else first.name
    return InputError(
        f"SavedMemory: {name} follow one another in one forward and not in the next: a network whose forward decides "
        "(stochastic depth) cannot be planned: leave it out"
    )


class Call(NamedTuple):
    """A call of an item; `half`: what autocast computed convolutions in, None where it was off."""

    item: Hook
    x: Tensor
    out: Tensor
    half: torch.dtype | None


@dataclass
class CallLog:
    """The calls of one forward, and the bytes that autograd keeps for backward.

    Attributes:
        calls: in order.
        inside: bytes kept by calls of each item, None: elsewhere.
        copies: the same of what is computed of weights alone, such as autocast's copies: it grows with no batch.
        seen: where what is counted lies, or need not be.
        holders: who keeps what lies there.
        given: where the model's outputs lie.
        weights: where weights, buffers and what is computed of them alone lie.
    """

    calls: list[Call] = field(default_factory=list)
    inside: dict[Hook | None, int] = field(default_factory=dict)
    copies: dict[Hook | None, int] = field(default_factory=dict)
    now: Hook | None = None
    seen: set[int] = field(default_factory=set)
    holders: dict[int, set[Hook | None]] = field(default_factory=dict)
    given: set[int] = field(default_factory=set)
    weights: set[int] = field(default_factory=set)
    held: list[Tensor] = field(default_factory=list)

    def keep(self, x: Tensor) -> Tensor:
        """Autograd keeps x."""
        key = place_of(x)
        self.holders.setdefault(key, set()).add(self.now)
        if key not in self.seen:
            self.seen.add(key)
            self.held.append(x.detach())  # or its address would be used again
            whose = self.copies if key in self.weights else self.inside
            whose[self.now] = whose.get(self.now, 0) + x.nbytes
        return torch.empty(0)  # nothing runs backward here

    def is_held(self, x: Tensor, planned: Set[Hook]) -> bool:
        """Somebody but these items keeps x, or has it as the model's output."""
        return place_of(x) in self.given or not self.holders.get(place_of(x), set()) <= planned

    def out_of(self, item: Hook) -> Tensor:
        """What an item gave that was called once."""
        return next(call.out for call in self.calls if call.item is item)

    def clear(self) -> None:
        """Lets go of the tensors: autograd's graph holds `keep`, so a log that holds outputs would live for ever."""
        self.calls.clear()
        self.held.clear()


class _OfWeights(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what is computed of weights and buffers alone, unless it is larger than they are (repeated images)."""

    def __init__(self, log: CallLog) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if given and all(place_of(t) in self.log.weights for t in given):
            most = max(t.untyped_storage().nbytes() // t.itemsize for t in given)  # a view may repeat them
            for t in tree_leaves(made):
                if isinstance(t, Tensor) and t.numel() <= most:
                    self.log.weights.add(place_of(t))
                    self.log.held.append(t.detach())
        return made


def place_of(x: Tensor) -> int:
    """Where its memory is; that of its views too."""
    return x.untyped_storage().data_ptr()


def install(job: Job) -> list[Hook]:
    """Stands in for the forward of every layer and block that we know, until the job is closed."""
    items = []
    for name, module, graph in _known("", job.model):
        item = Hook(name, job.model, module, graph)
        job.patch(module, "saved_memory", item)
        job.patch(module, "forward", MethodType(_forward, module))
        items.append(item)
    return items


def _known(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module, LayerGraph]]:
    graph = None if any(_is_touched(m) for m in module.modules()) else graph_of(module)
    if graph is not None and graph.nodes:
        yield name, module, graph
        return
    for child_name, child in module.named_children():
        yield from _known(f"{name}.{child_name}".lstrip("."), child)


def _is_touched(module: nn.Module) -> bool:
    """Somebody hooked it, or put a forward of their own there."""
    return "forward" in vars(module) or bool(module_hooks(module))


def _forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a layer with an item."""
    item: Hook = module.saved_memory
    plain = functools.partial(type(module).forward, module, *args, **kwargs)
    if item.module is not module:
        return plain()  # of a deep copy
    if item.log is not None:
        return _noted(item, item.log, args, plain)
    x = args[0] if len(args) == 1 and not kwargs else None
    if item.before is not None and item.before.passed:
        return item.follow(item.before, x)  # what the segment made is this layer's output already
    active = (item.model.training or item.forced) and torch.is_grad_enabled()
    if item.segment is None or not active or not isinstance(x, Tensor):
        item.passed = 0
        return plain()
    return item.begin(item.segment, x)


def _noted(item: Hook, log: CallLog, args: tuple[Any, ...], plain: Any) -> Any:
    log.now = item
    out = plain()
    log.now = None
    x = args[0] if len(args) == 1 and isinstance(args[0], Tensor) else None
    if x is not None and isinstance(out, Tensor):
        log.calls.append(Call(item, x, out, half_of(x)))
    return out


def half_of(x: Tensor) -> torch.dtype | None:
    """What autocast computes convolutions of x in now, None where it is off."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


@contextmanager
def undisturbed(model: nn.Module, x: Tensor) -> Iterator[None]:
    """Modules with buffers in eval mode, with gradients on; modes and random state are put back."""
    modes = [(m, m.training) for m in model.modules()]
    try:
        with torch.random.fork_rng([x.device] if x.is_cuda else []), torch.enable_grad():
            for module, _ in modes:
                if any(True for _ in module.buffers(recurse=False)):
                    module.training = False
            yield
    finally:
        for module, training in modes:
            module.training = training


def watch(model: nn.Module, items: Sequence[Hook], x: Tensor) -> tuple[CallLog, Any]:
    """Runs the model on x: what was called and kept, and the outputs."""
    log = CallLog()
    log.weights = {place_of(p) for p in [*model.parameters(), *model.buffers()]}
    log.seen = {*log.weights, place_of(x)}
    for item in items:
        item.log = log
    try:
        hooks = torch.autograd.graph.saved_tensors_hooks(log.keep, lambda kept: kept)
        with undisturbed(model, x), hooks, _OfWeights(log):
            outputs = model.forward(x)
        log.given = {place_of(t) for t in tree_leaves(outputs) if isinstance(t, Tensor)}
    finally:
        for item in items:
            item.log = None
    return log, outputs


def chains(log: CallLog) -> list[tuple[list[Hook], Call]]:
    """Stretches of items each of which is called once, on what the one before it gave, with the first call."""
    count: dict[Hook, int] = {}
    for call in log.calls:
        count[call.item] = count.get(call.item, 0) + 1
    found: list[tuple[list[Hook], Call]] = []
    last: Call | None = None
    for call in log.calls:
        if count[call.item] > 1 or call.item.hooked or not _as_foreseen(call):
            last = None
            continue
        if last is None or last.out is not call.x or last.half is not call.half:
            found.append(([], call))
        found[-1][0].append(call.item)
        last = call
    return [(chain, x) for chain, x in found if any(node.op == "conv" for item in chain for node in item.graph.nodes)]


def _as_foreseen(call: Call) -> bool:
    """It gave what its graph says; not where a sum broadcasts."""
    graph = call.item.graph
    shapes = graph.shapes(ValueShape(tuple(call.x.shape), call.x.dtype), call.half)
    adds = (node.inputs for node in graph.nodes if node.op == "add")
    same = all(shapes[a].shape == shapes[b].shape for a, b in adds)
    return same and shapes[-1] == ValueShape(tuple(call.out.shape), call.out.dtype)


def units(chain: Sequence[Hook]) -> list[list[Hook]]:
    """A chain cut before every item with a convolution."""
    found: list[list[Hook]] = []
    for item in chain:
        if not found or any(node.op == "conv" for node in item.graph.nodes):
            found.append([])
        found[-1].append(item)
    return found
