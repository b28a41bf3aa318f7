"""Records one forward of a network: which layers follow one another, and which bytes plain PyTorch keeps of them.

A model's forward is arbitrary Python, so its graph is recorded by running it: two images of the batch pass through, and
the inputs and outputs of all layers are noted. Layers with buffers are in eval mode, so that nothing in the model
changes. Then four images pass: of what autograd keeps, the copies of weights (autocast's) do not double.

Note: outputs that are read elsewhere. A tensor between two layers may also be read by the model's own Python, which the
record does not show. So the layers of a segment pass on tensors without values (`Within`), and any other code that
reads one raises.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from types import MethodType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from kasoku.core import InputError, Job
from kasoku.core.blocks import steering
from kasoku.core.job_state import Patches
from kasoku.core.torch_internals import module_hooks, version
from kasoku.memory.graph import LayerGraph, attributes_of, changed_attribute, decides, graph_of
from kasoku.memory.segment import Segment

_WITHOUT_VALUES = ("__get__", "size", "dim", "numel", "__len__", "is_floating_point")


class BoundToModel:
    """Belongs to the modules of one model: a deep copy of the model shares it, and it cannot be pickled."""

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self

    def __reduce__(self) -> Any:
        raise InputError("SavedMemory: a model with it in place cannot be pickled: save its state_dict(), or close()")


class LayerProxy(BoundToModel):
    """Runs in place of the forward of one layer or block."""

    def __init__(self, name: str, model: nn.Module, module: nn.Module, graph: LayerGraph) -> None:
        self.name, self.model, self.module, self.graph = name, model, module, graph
        self.submodules, self.attributes = tuple(module.modules()), attributes_of(module)
        self.log: CallLog | None = None  # notes the calls during an inspection
        self.like = torch.empty(0, device="meta")  # its output in the inspection
        self.segment: Segment | None = None  # that begins with this layer, in training
        self.following: list[LayerProxy] = []  # the later layers of the segment that contains this one
        self.within: weakref.ref[Within] | None = None  # its last output, if that lies within a segment

    def check_forward(self) -> None:
        """Raises InputError if its forward no longer computes the traced graph, since an attribute has changed."""
        attributes = attributes_of(self.module)
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

    def output(self, out: Tensor) -> Tensor:
        """Its output, if the segment that contains it has run and returned `out`."""
        if not self.following:
            return out
        empty = out.new_empty((), dtype=self.like.dtype).expand(len(out), *self.like.shape[1:])
        within = empty.as_subclass(Within)
        within.layer, within.out, within.plain = self, out, (empty, self.like)
        self.within = weakref.ref(within)
        return within

    def read_elsewhere(self) -> InputError:
        """The error if its output, which lies within a segment, is not for the next layer alone."""
        reads = f"the forward of {type(self.model).__name__} reads a tensor between two of its layers"
        return InputError(f"SavedMemory: {reads}: put these layers into a block of their own, or leave it out")


class Within(Tensor):
    """Stands for the output of a layer within a segment, which has run: it has a shape and a type, and no values.

    A function that returns it as it is, such as a dropout of nothing, may take it; one that reads its values raises.
    """

    layer: LayerProxy
    out: Tensor  # of the segment
    plain: tuple[Tensor, Tensor]  # tensors of its shape on its device, and of its strides

    def passed_to(self, layer: LayerProxy) -> Tensor:
        """The output of the next layer. Raises InputError if this is another one."""
        expected = self.layer.following[0]
        if layer is not expected:
            both = f"{self.layer.name} and {expected.name} follow one another in one forward and not in the next"
            why = "a network whose forward decides (stochastic depth) cannot be planned: leave it out"
            raise InputError(f"SavedMemory: {both}: {why}")
        return layer.output(self.out)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        within = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, Within))
        for plain in within.plain if args and args[0] is within else ():
            before = version(plain)
            with suppress(RuntimeError):  # none of its elements can be written to
                result = func(plain, *args[1:], **(kwargs or {}))
                if result is plain and version(plain) == before:
                    return within
                if func.__name__ in _WITHOUT_VALUES and not isinstance(result, Tensor):
                    return result
        raise within.layer.read_elsewhere()


class Call(NamedTuple):
    """A call of a layer; `half`: the type in which autocast computed convolutions, None where it was off."""

    proxy: LayerProxy
    x: Tensor
    out: Tensor
    half: torch.dtype | None


class CallLog:
    """The calls of one forward in order, and the bytes that autograd keeps for backward."""

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        self.calls: list[Call] = []
        self.running: LayerProxy | None = None  # whose forward runs
        # bytes by layer, and those that are the same for any batch; None: outside layers
        self.kept_bytes: Counter[LayerProxy | None] = Counter()
        self.copy_bytes: Counter[LayerProxy | None] = Counter()
        # memory that is counted already, or need not be
        self.counted = {memory_of(t) for t in (x, *model.parameters(), *model.buffers())}
        self.alive: list[Tensor] = []  # tensors whose addresses must not be used again

    def keep(self, x: Tensor) -> Tensor:
        """Counts a tensor that autograd keeps."""
        key = memory_of(x)
        if key not in self.counted:
            self.counted.add(key)
            self.alive.append(x.detach())
            self.kept_bytes[self.running] += x.nbytes
        return torch.empty(0)  # no backward runs here

    def clear(self) -> None:
        """Frees the tensors: autograd's graph holds `keep`, so a log that holds outputs would never be freed."""
        self.calls.clear()
        self.alive.clear()


def memory_of(x: Tensor) -> int:
    """The address of its storage, which its views share."""
    return x.untyped_storage().data_ptr()


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
            proxy.like = torch.empty_like(result, device="meta")
        return result
    if isinstance(x, Within):
        return x.passed_to(proxy)
    if proxy.segment is None or x is None or not (proxy.model.training and torch.is_grad_enabled()):
        return plain()
    return proxy.output(proxy.segment(x))


def autocast_type(x: Tensor) -> torch.dtype | None:
    """The type in which autocast now computes convolutions of x, None where it is off."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def record_forward(model: nn.Module, proxies: Sequence[LayerProxy], x: Tensor) -> CallLog:
    """Runs the model on x, and on twice the images. Raises InputError if it returns no tensor."""
    log = _recorded(model, proxies, x)
    twice = _recorded(model, proxies, torch.cat([x, x]).detach().requires_grad_(x.requires_grad))
    twice.clear()
    for proxy, n in log.kept_bytes.items():
        log.copy_bytes[proxy] = 2 * n - twice.kept_bytes[proxy]
    log.kept_bytes -= log.copy_bytes
    return log


def _recorded(model: nn.Module, proxies: Sequence[LayerProxy], x: Tensor) -> CallLog:
    """The log of one forward, with gradients on. Modes and random state are restored."""
    log = CallLog(model, x)
    random = torch.random.fork_rng([x.device] if x.is_cuda else [])
    hooks = torch.autograd.graph.saved_tensors_hooks(log.keep, lambda kept: kept)
    with Patches() as changes, random, torch.enable_grad(), hooks:
        for module in model.modules():
            if any(True for _ in module.buffers(recurse=False)):
                changes.set(module, "training", False)
        for proxy in proxies:
            changes.set(proxy, "log", log)
        outputs = model.forward(x)
    if not any(isinstance(t, Tensor) for t in tree_leaves(outputs)):
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
