"""Records one forward of a network: which layers follow one another, and which bytes plain PyTorch keeps of them.

A model's forward is arbitrary Python, so its graph is recorded by running it: two images of the batch pass through, and
the inputs and outputs of all layers are noted. Layers with buffers are in eval mode, so that nothing in the model
changes.

Note: outputs that are read elsewhere. A tensor between two layers may also be read by the model's own Python, which the
record does not show. So the network runs once more with the planned segments and NaN in place of every output within
them; the model's outputs must not change.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kasoku.core import InputError, Job
from kasoku.core.torch_internals import module_hooks
from kasoku.memory.fx_trace import attributes_of, changed, decides, graph_of, with_own_forward
from kasoku.memory.graph import LayerGraph, ValueShape
from kasoku.memory.segment import Segment


class BoundToModel:
    """Belongs to the modules of one model: a deep copy of the model shares it, and it cannot be pickled."""

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self

    def __reduce__(self) -> Any:
        raise InputError("SavedMemory: a model with it in place cannot be pickled: save its state_dict(), or close()")


class LayerProxy(BoundToModel):
    """Runs in place of the forward of one layer or block.

    Attributes:
        segment: the segment that begins with this layer, in training.
        length: the number of layers in that segment.
        calls: the number of these layers that the present forward has called; 0: the segment has not run in it.
        leader: the proxy whose segment contains this layer, if it is not the first.
        position: of this layer in the leader's segment.
        log: notes the calls during an inspection.
        checking: the segment runs in eval mode too, and returns NaN until its last layer.
    """

    def __init__(self, name: str, model: nn.Module, module: nn.Module, graph: LayerGraph) -> None:
        self.name, self.model, self.module, self.graph = name, model, module, graph
        self.submodules, self.own_forwards = tuple(module.modules()), with_own_forward(module)
        self.attributes = attributes_of(self.own_forwards)
        self.log: CallLog | None = None
        self.checking = False
        self.reset()

    def reset(self) -> None:
        self.segment: Segment | None = None
        self.leader: LayerProxy | None = None
        self.position, self.length, self.calls = 0, 1, 0
        self.output_ref: weakref.ref[Tensor] | None = None
        self.real_output: Tensor | None = None  # while NaN is passed on

    def check_forward(self) -> None:
        """Raises InputError if its forward no longer computes the traced graph, since an attribute has changed."""
        attributes = attributes_of(self.own_forwards)
        names = changed(self.attributes, attributes)
        if not names:
            return
        if graph_of(self.module) != self.graph:
            raise decides(f"{type(self.module).__name__} ({self.name}) depends on self.{names[0]}, which has changed")
        self.attributes = attributes

    @property
    def hooked(self) -> bool:
        """Whether a hook may read or change the inputs or outputs of its layers."""
        return not all(getattr(hook, "ignores_values", False) for m in self.submodules for hook in module_hooks(m))

    def run_segment(self, segment: Segment, x: Tensor) -> Tensor:
        """Runs all layers of the segment; the following layers then pass its output on."""
        out = segment(x)
        if self.checking and self.length > 1:
            self.real_output, out = out, torch.full_like(out, float("nan"))
        self.calls, self.output_ref = 1, weakref.ref(out)
        return out

    def pass_on(self, leader: LayerProxy, x: Tensor | None) -> Tensor:
        """The output of a layer whose segment has run, which is its input. Raises InputError for another input."""
        expected = leader.output_ref() if leader.output_ref is not None else None
        if x is None or expected is not x or leader.calls != self.position:
            raise order_changed(leader)
        leader.calls += 1
        if leader.calls == leader.length and leader.real_output is not None:
            x, leader.real_output = leader.real_output, None
        return x


def order_changed(leader: LayerProxy) -> InputError:
    """The error if the layers of a segment that has run were not called one after another."""
    name = leader.segment.name if leader.segment is not None else leader.name
    return InputError(
        f"SavedMemory: {name} follow one another in one forward and not in the next: a network whose forward decides "
        "(stochastic depth) cannot be planned: leave it out"
    )


class Call(NamedTuple):
    """A call of a layer; `half`: the type in which autocast computed convolutions, None where it was off."""

    proxy: LayerProxy
    x: Tensor
    out: Tensor
    half: torch.dtype | None


@dataclass
class CallLog:
    """The calls of one forward, and the bytes that autograd keeps for backward.

    Attributes:
        calls: in order.
        kept_bytes: bytes kept by the calls of each layer; None: outside layers.
        copy_bytes: bytes kept of tensors computed from weights alone, such as autocast's copies: they do not grow with
            the batch.
        running: the layer whose forward runs.
        counted: the memory that is counted already, or need not be.
        keepers: the layers that keep each memory.
        outputs: the memory of the model's outputs.
        weights: the memory of weights, buffers and tensors computed from these alone.
        alive: tensors whose addresses must not be used again.
    """

    calls: list[Call] = field(default_factory=list)
    kept_bytes: dict[LayerProxy | None, int] = field(default_factory=dict)
    copy_bytes: dict[LayerProxy | None, int] = field(default_factory=dict)
    running: LayerProxy | None = None
    counted: set[int] = field(default_factory=set)
    keepers: dict[int, set[LayerProxy | None]] = field(default_factory=dict)
    outputs: set[int] = field(default_factory=set)
    weights: set[int] = field(default_factory=set)
    alive: list[Tensor] = field(default_factory=list)

    def keep(self, x: Tensor) -> Tensor:
        """Counts a tensor that autograd keeps."""
        key = memory_of(x)
        self.keepers.setdefault(key, set()).add(self.running)
        if key not in self.counted:
            self.counted.add(key)
            self.alive.append(x.detach())
            counts = self.copy_bytes if key in self.weights else self.kept_bytes
            counts[self.running] = counts.get(self.running, 0) + x.nbytes
        return torch.empty(0)  # no backward runs here

    def is_kept_outside(self, x: Tensor, planned: Set[LayerProxy]) -> bool:
        """Whether x is kept by other layers than the planned ones, or is an output of the model."""
        return memory_of(x) in self.outputs or not self.keepers.get(memory_of(x), set()) <= planned

    def output_of(self, proxy: LayerProxy) -> Tensor:
        return next(call.out for call in self.calls if call.proxy is proxy)

    def clear(self) -> None:
        """Frees the tensors: autograd's graph holds `keep`, so a log that holds outputs would never be freed."""
        self.calls.clear()
        self.alive.clear()


class _WeightCopies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the tensors computed from weights and buffers alone, unless they are larger (repeated for each image)."""

    def __init__(self, log: CallLog) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if inputs and all(memory_of(t) in self.log.weights for t in inputs):
            most = max(t.untyped_storage().nbytes() // t.itemsize for t in inputs)  # a view may repeat them
            for t in tree_leaves(result):
                if isinstance(t, Tensor) and t.numel() <= most:
                    self.log.weights.add(memory_of(t))
                    self.log.alive.append(t.detach())
        return result


def memory_of(x: Tensor) -> int:
    """The address of its storage, which its views share."""
    return x.untyped_storage().data_ptr()


def install(job: Job) -> list[LayerProxy]:
    """Replaces the forward of every layer and block that can be planned, until the job is closed."""
    proxies = []
    for name, module, graph in _plannable("", job.model):
        proxy = LayerProxy(name, job.model, module, graph)
        job.patch(module, "saved_memory", proxy)
        job.patch(module, "forward", MethodType(_forward, module))
        proxies.append(proxy)
    return proxies


def _plannable(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module, LayerGraph]]:
    altered = any("forward" in vars(m) or module_hooks(m) for m in module.modules())
    graph = None if altered else graph_of(module)
    if graph is not None and graph.nodes:
        yield name, module, graph
        return
    for child_name, child in module.named_children():
        yield from _plannable(f"{name}.{child_name}".lstrip("."), child)


def _forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    proxy: LayerProxy = module.saved_memory
    plain = functools.partial(type(module).forward, module, *args, **kwargs)
    if proxy.module is not module:
        return plain()  # of a deep copy
    if proxy.log is not None:
        return _log_call(proxy, proxy.log, args, plain)
    x = args[0] if len(args) == 1 and not kwargs else None
    if proxy.leader is not None and proxy.leader.calls:
        return proxy.pass_on(proxy.leader, x)
    active = (proxy.model.training or proxy.checking) and torch.is_grad_enabled()
    if proxy.segment is None or not active or not isinstance(x, Tensor):
        proxy.calls = 0
        return plain()
    return proxy.run_segment(proxy.segment, x)


def _log_call(proxy: LayerProxy, log: CallLog, args: tuple[Any, ...], plain: Any) -> Any:
    log.running = proxy
    out = plain()
    log.running = None
    x = args[0] if len(args) == 1 and isinstance(args[0], Tensor) else None
    if x is not None and isinstance(out, Tensor):
        log.calls.append(Call(proxy, x, out, autocast_type(x)))
    return out


def autocast_type(x: Tensor) -> torch.dtype | None:
    """The type in which autocast now computes convolutions of x, None where it is off."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


@contextmanager
def without_side_effects(model: nn.Module, x: Tensor) -> Iterator[None]:
    """Puts modules with buffers in eval mode, with gradients on; restores modes and random state afterwards."""
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


def record_forward(model: nn.Module, proxies: Sequence[LayerProxy], x: Tensor) -> tuple[CallLog, Any]:
    """Runs the model on x: the calls and the kept bytes, and the outputs."""
    log = CallLog()
    log.weights = {memory_of(p) for p in [*model.parameters(), *model.buffers()]}
    log.counted = {*log.weights, memory_of(x)}
    for proxy in proxies:
        proxy.log = log
    try:
        hooks = torch.autograd.graph.saved_tensors_hooks(log.keep, lambda kept: kept)
        with without_side_effects(model, x), hooks, _WeightCopies(log):
            outputs = model.forward(x)
        log.outputs = {memory_of(t) for t in tree_leaves(outputs) if isinstance(t, Tensor)}
    finally:
        for proxy in proxies:
            proxy.log = None
    return log, outputs


def chains_of(log: CallLog) -> list[tuple[list[LayerProxy], Call]]:
    """Runs of layers, each called once and on the output of the layer before it, with the call of the first one."""
    count: dict[LayerProxy, int] = {}
    for call in log.calls:
        count[call.proxy] = count.get(call.proxy, 0) + 1
    chains: list[tuple[list[LayerProxy], Call]] = []
    last: Call | None = None
    for call in log.calls:
        if count[call.proxy] > 1 or call.proxy.hooked or not _matches_graph(call):
            last = None
            continue
        if last is None or last.out is not call.x or last.half is not call.half:
            chains.append(([], call))
        chains[-1][0].append(call.proxy)
        last = call
    return [(chain, call) for chain, call in chains if any(_has_convolution(proxy) for proxy in chain)]


def _matches_graph(call: Call) -> bool:
    """Whether the output has the shape that the graph predicts; False where a sum broadcasts."""
    graph = call.proxy.graph
    shapes = graph.shapes(ValueShape(tuple(call.x.shape), call.x.dtype), call.half)
    adds = (node.inputs for node in graph.nodes if node.op == "add")
    same = all(shapes[a].shape == shapes[b].shape for a, b in adds)
    return same and shapes[-1] == ValueShape(tuple(call.out.shape), call.out.dtype)


def _has_convolution(proxy: LayerProxy) -> bool:
    return any(node.op == "conv" for node in proxy.graph.nodes)


def units_of(chain: Sequence[LayerProxy]) -> list[list[LayerProxy]]:
    """A chain cut before every layer with a convolution."""
    units: list[list[LayerProxy]] = []
    for proxy in chain:
        if not units or _has_convolution(proxy):
            units.append([])
        units[-1].append(proxy)
    return units
