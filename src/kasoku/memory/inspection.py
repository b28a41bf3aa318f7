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
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kasoku.core import InputError, Job
from kasoku.core.blocks import stays_in_place, steering
from kasoku.core.job_state import Patches
from kasoku.core.torch_internals import module_hooks
from kasoku.memory.graph import LayerGraph, attributes_of, changed_attribute, decides, graph_of, with_own_forward
from kasoku.memory.segment import Segment


class BoundToModel:
    """Belongs to the modules of one model: a deep copy of the model shares it, and it cannot be pickled."""

    inspected = False  # while its layers run for the plan alone

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self

    def __reduce__(self) -> Any:
        raise InputError("SavedMemory: a model with it in place cannot be pickled: save its state_dict(), or close()")


class LayerProxy(BoundToModel):
    """Runs in place of the forward of one layer or block."""

    def __init__(self, name: str, model: nn.Module, module: nn.Module, graph: LayerGraph) -> None:
        self.name, self.model, self.module, self.graph = name, model, module, graph
        self.submodules, self.own_forwards = tuple(module.modules()), with_own_forward(module)
        self.attributes = attributes_of(self.own_forwards)
        self.log: CallLog | None = None  # notes the calls during an inspection
        self.checking = False  # the segment runs in eval mode too, and returns NaN until its last layer
        self.reset()

    def reset(self) -> None:
        self.segment: Segment | None = None  # that begins with this layer, in training
        self.leader: LayerProxy | None = None  # whose segment contains this layer, if it is not the first
        self.following: list[LayerProxy] = []  # the other layers of the segment
        self.waiting: list[LayerProxy] = []  # those that the present forward has still to call: the segment has run
        self.output_ref: weakref.ref[Tensor] | None = None
        self.real_output: Tensor | None = None  # while NaN is passed on

    def check_forward(self) -> None:
        """Raises InputError if its forward no longer computes the traced graph, since an attribute has changed."""
        attributes = attributes_of(self.own_forwards)
        name = changed_attribute(self.attributes, attributes)
        if name and graph_of(self.module) != self.graph:
            raise decides(f"{type(self.module).__name__} ({self.name}) depends on self.{name}, which has changed")
        self.attributes = attributes

    @property
    def hooked(self) -> bool:
        """Whether a hook may read or change the inputs or outputs of its layers."""
        return not all(getattr(hook, "ignores_values", False) for m in self.submodules for hook in module_hooks(m))

    @property
    def convolves(self) -> bool:
        return any(node.op == "conv" for node in self.graph.nodes)

    def order_changed(self) -> InputError:
        """The error if the layers of its segment, which has run, were not called one after another."""
        name = self.segment.name if self.segment is not None else self.name
        why = "a network whose forward decides (stochastic depth) cannot be planned: leave it out"
        return InputError(f"SavedMemory: {name} follow one another in one forward and not in the next: {why}")


class Call(NamedTuple):
    """A call of a layer; `half`: the type in which autocast computed convolutions, None where it was off."""

    proxy: LayerProxy
    x: Tensor
    out: Tensor
    half: torch.dtype | None


class CallLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The calls of one forward in order, the model's outputs, and the bytes that autograd keeps for backward."""

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.running: LayerProxy | None = None  # whose forward runs
        # bytes by layer, without those of copy_bytes; None: outside layers
        self.kept_bytes: Counter[LayerProxy | None] = Counter()
        # the same of copies that are computed from weights alone (autocast's), whatever the batch
        self.copy_bytes: Counter[LayerProxy | None] = Counter()
        # the memory of weights, buffers and tensors computed from these alone
        self.weights = {memory_of(p) for p in [*model.parameters(), *model.buffers()]}
        self.counted = {*self.weights, memory_of(x)}  # memory that is counted already, or need not be
        self.keepers: defaultdict[int, set[LayerProxy | None]] = defaultdict(set)  # the layers that keep each memory
        self.alive: list[Tensor] = []  # tensors whose addresses must not be used again
        self.outputs: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Notes the tensors computed from weights and buffers alone, unless they are larger (repeated for images)."""
        result = func(*args, **(kwargs or {}))
        inputs = tensors_in((args, kwargs))
        if inputs and all(memory_of(t) in self.weights for t in inputs):
            most = max(t.untyped_storage().nbytes() // t.itemsize for t in inputs)  # a view may repeat them
            for t in tensors_in(result):
                if t.numel() <= most:
                    self.weights.add(memory_of(t))
                    self.alive.append(t)
        return result

    def keep(self, x: Tensor) -> Tensor:
        """Counts a tensor that autograd keeps."""
        key = memory_of(x)
        self.keepers[key].add(self.running)
        if key not in self.counted:
            self.counted.add(key)
            self.alive.append(x.detach())
            (self.copy_bytes if key in self.weights else self.kept_bytes)[self.running] += x.nbytes
        return torch.empty(0)  # no backward runs here

    def is_kept_outside(self, x: Tensor, planned: Set[LayerProxy]) -> bool:
        """Whether x is kept by other layers than the planned ones, or is an output of the model."""
        key = memory_of(x)
        return any(memory_of(out) == key for out in self.outputs) or not self.keepers[key] <= planned

    def clear(self) -> None:
        """Frees the tensors: autograd's graph holds `keep`, so a log that holds outputs would never be freed."""
        self.calls.clear()
        self.alive.clear()


def memory_of(x: Tensor) -> int:
    """The address of its storage, which its views share."""
    return x.untyped_storage().data_ptr()


def tensors_in(values: object) -> list[Tensor]:
    """The tensors in nested lists, tuples and dicts, detached."""
    return [t.detach() for t in tree_leaves(values) if isinstance(t, Tensor)]


def install(job: Job) -> list[LayerProxy]:
    """Replaces the forward of every layer and block that can be planned, until the job is closed."""
    proxies = []
    candidates = [("", job.model)]
    while candidates:
        name, module = candidates.pop()
        altered = any(("forward" in vars(m) and "steer" not in vars(m)) or module_hooks(m) for m in module.modules())
        graph = None if altered else graph_of(module)
        if graph is None or not graph.nodes:
            own_forward = not type(module).__module__.startswith("torch.")
            if own_forward and not any(isinstance(m, nn.Conv2d) for m in module.modules()):
                continue  # nothing here can be planned, and Compile can take it whole
            children = [(f"{name}.{child}".lstrip("."), m) for child, m in module.named_children()]
            candidates += reversed(children)
            continue
        proxies.append(LayerProxy(name, job.model, module, graph))
        job.patch(module, "saved_memory", proxies[-1])
        job.patch(module, "forward", MethodType(_forward, module))
    return proxies


def _forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs the segment that begins with this layer, passes on the output of one that has run, or runs the layer."""
    proxy: LayerProxy = module.saved_memory
    steer = steering(module)
    forward = functools.partial(type(module).forward, module) if steer is None else steer.forward
    plain = functools.partial(forward, *args, **kwargs)
    if proxy.module is not module:
        return plain()  # of a deep copy
    x = args[0] if len(args) == 1 and not kwargs and isinstance(args[0], Tensor) else None
    if proxy.log is not None:
        proxy.log.running = proxy
        result = plain()
        proxy.log.running = None
        if x is not None and isinstance(result, Tensor):
            proxy.log.calls.append(Call(proxy, x, result, autocast_type(x)))
        return result
    leader = proxy.leader
    if leader is not None and leader.waiting:
        expected = leader.output_ref() if leader.output_ref is not None else None
        if x is None or expected is not x or leader.waiting.pop(0) is not proxy:
            raise leader.order_changed()
        if not leader.waiting and leader.real_output is not None:
            x, leader.real_output = leader.real_output, None
        return x
    proxy.waiting = []
    active = (proxy.model.training or proxy.checking) and torch.is_grad_enabled()
    if proxy.segment is None or x is None or not active:
        return plain()
    out = proxy.segment(x)
    if proxy.checking and proxy.following:
        proxy.real_output, out = out, torch.full_like(out, float("nan"))
    proxy.waiting, proxy.output_ref = [*proxy.following], weakref.ref(out)
    return out


def autocast_type(x: Tensor) -> torch.dtype | None:
    """The type in which autocast now computes convolutions of x, None where it is off."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


@contextmanager
def without_side_effects(model: nn.Module, x: Tensor) -> Iterator[None]:
    """Puts modules with buffers in eval mode, with gradients on; restores modes and random state afterwards."""
    with Patches() as changes, torch.random.fork_rng([x.device] if x.is_cuda else []), torch.enable_grad():
        for module in model.modules():
            if any(True for _ in module.buffers(recurse=False)):
                changes.set(module, "training", False)
            if stays_in_place(module):
                changes.set(module.saved_memory, "inspected", True)
        yield


def record_forward(model: nn.Module, proxies: Sequence[LayerProxy], x: Tensor) -> CallLog:
    """Runs the model on x. Raises InputError if it returns no tensor."""
    log = CallLog(model, x)
    hooks = torch.autograd.graph.saved_tensors_hooks(log.keep, lambda kept: kept)
    with Patches() as changes, without_side_effects(model, x), hooks, log:
        for proxy in proxies:
            changes.set(proxy, "log", log)
        outputs = model.forward(x)
    log.outputs = tensors_in(outputs)
    if not log.outputs:
        log.clear()
        got = f"{type(model).__name__} returns {type(outputs).__name__}, without a known tensor"
        raise InputError(f"SavedMemory: {got}: let it return tensors, or a tuple, list or dict of them")
    return log


def chains_of(log: CallLog) -> list[list[Call]]:
    """The calls of runs of layers with a convolution, each called once and on the output of the layer before it."""
    count = Counter(call.proxy for call in log.calls)
    chains: list[list[Call]] = []
    last: Call | None = None
    for call in log.calls:
        graph = call.proxy.graph
        shapes = graph.shapes(call.x, call.half)
        adds = [node.inputs for node in graph.nodes if node.op == "add"]
        broadcasts = any(shapes[a].shape != shapes[b].shape for a, b in adds)
        foreseen = shapes[-1].shape == call.out.shape and shapes[-1].dtype is call.out.dtype
        if count[call.proxy] > 1 or call.proxy.hooked or broadcasts or not foreseen:
            last = None
            continue
        if last is None or last.out is not call.x or last.half is not call.half:
            chains.append([])
        chains[-1].append(call)
        last = call
    return [chain for chain in chains if any(call.proxy.convolves for call in chain)]
