"""Records one forward of a network: which layers follow one another, and which bytes plain PyTorch keeps of them.

A model's forward is arbitrary Python, so its graph is recorded by running it: two images of the batch pass through, and
the calls of layers and of torch's functions are noted. Layers with buffers are in eval mode, so that nothing in the
model changes. Then four images pass: of what autograd keeps, the copies of weights (autocast's) do not double.

Note: the forward runs in every step. The first layer of a segment computes all of it. For the other layers the forward
gets tensors without values (`Within`), which only the next layer, sum or ReLU of the record may take. Anything else
raises: code that reads one, and a forward that takes another path, as with stochastic depth.
"""

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MethodType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from kasoku.core import InputError, Job
from kasoku.core.blocks import steering
from kasoku.core.job_state import Patches
from kasoku.core.torch_internals import module_hooks
from kasoku.memory.graph import GraphNode, op_of
from kasoku.memory.segment import Segment

_FUNCTIONS = {"add": "add", "add_": "add", "relu": "relu", "relu_": "relu"}
# they read no value, and may return their input as it is: a dropout of nothing
_WITHOUT_VALUES = ("__get__", "size", "dim", "numel", "__len__", "is_floating_point", "dropout", "dropout2d")


class BoundToModel:
    """Belongs to the modules of one model: a deep copy of the model shares it, and it cannot be pickled."""

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self

    def __reduce__(self) -> Any:
        raise InputError("SavedMemory: a model with it in place cannot be pickled: save its state_dict(), or close()")


class RunningForward(BoundToModel):
    """The forward of a model: it is recorded, or runs by segments, whose calls must be those of the record."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names: dict[Any, str] = {}  # of the layers that can be planned
        self.segments: dict[Any, tuple[Segment, Sequence[Call]]] = {}  # by their first layer
        self.log: CallLog | None = None  # notes the calls during an inspection
        self.calls: Sequence[Call] = ()  # of the segment that ran last
        self.done = 0  # of these calls
        self.x: Tensor | None = None  # the input of this segment, until its last call
        self.out: Any = None  # the output of this segment, until its last call
        self.within: list[weakref.ref[Within]] = []

    def start(self, layer: nn.Module, x: Tensor) -> None:
        """Runs the segment that begins with a layer."""
        segment, calls = self.segments[layer]
        self.out, self.x, self.calls, self.done = segment(x), x, [*calls], 0

    def call(self, what: nn.Module | str, inputs: Sequence[Any]) -> Any:
        """The result of the next call in a segment that has run. Raises InputError if the record has another one."""
        if self.x is None:
            raise self.read_elsewhere()
        call, first = self.calls[self.done], self.calls[0].node.inputs[0]
        within = [x.value if isinstance(x, Within) and x.calls is self.calls else -1 for x in inputs]
        reads = tuple(first if x is self.x else value for x, value in zip(inputs, within, strict=True))
        if (call.layer or call.op) != what or reads != call.node.inputs:
            both = " and ".join(self.names.get(c.layer, c.op) for c in (self.calls[self.done - 1], call))
            why = "a network whose forward decides (stochastic depth) cannot be planned: leave it out"
            raise InputError(f"SavedMemory: {both} follow one another in one forward and not in the next: {why}")
        self.done += 1
        out = self.out
        if self.done == len(self.calls):
            self.x = self.out = None
            return out
        if call.in_place:
            out = inputs[0]
        else:
            if call.like.device != out.device or call.like.shape[0] != out.shape[0]:
                call.like = out.new_empty((), dtype=call.like.dtype).expand(out.shape[0], *call.like.shape[1:])
            out = call.like.as_subclass(Within)
            out.running, out.calls = self, self.calls
            self.within.append(weakref.ref(out))
        out.value = first + self.done
        return out

    def read_elsewhere(self) -> InputError:
        """The error if other code than the next call has a tensor within a segment."""
        reads = f"the forward of {type(self.model).__name__} reads a tensor between two of its layers"
        return InputError(f"SavedMemory: {reads}, and did not when it was recorded: leave it out")


class Within(Tensor):
    """Stands for a value within a segment that has run: it has a shape and a type, and no values."""

    running: RunningForward
    calls: "Sequence[Call]"  # of the segment
    value: int  # its number in the chain

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in _WITHOUT_VALUES:
            result = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
            if result is args[0] or not isinstance(result, Tensor):
                return result
        op = _op_of_function(func, args, kwargs)
        running = next(x for x in (args if op else tree_leaves((args, kwargs))) if isinstance(x, Within)).running
        if not op:
            raise running.read_elsewhere()
        return running.call(op, args)


def _op_of_function(func: Any, args: Sequence[Any], kwargs: dict[str, Any] | None) -> str:
    """The operation of one of torch's functions of tensors; "" if it is not supported."""
    op = _FUNCTIONS.get(func.__name__, "")
    plain = len(args) == (2 if op == "add" else 1) and set(kwargs or ()) <= {"inplace"}
    return op if plain and all(isinstance(x, Tensor) for x in args) else ""


def reads_values(module: nn.Module) -> bool:
    """Whether a hook of a module may read or change its inputs or outputs."""
    return not all(getattr(hook, "ignores_values", False) for hook in module_hooks(module))


# ---- the record


@dataclass(eq=False)
class Call:
    """A call of a layer or a function in a forward."""

    op: str  # as in `GraphNode`; "" if it is not supported
    inputs: Sequence[Tensor]
    layer: nn.Module | None = None  # None for a function
    out: Any = None
    half: torch.dtype | None = None  # in which autocast computed convolutions; None where it was off
    in_place: bool = False  # its output is its first input
    kept: int = 0  # bytes that autograd keeps of it, beside `copies`
    copies: int = 0  # bytes that are the same for any batch
    node: Any = None  # in a chain
    like: Any = None  # a tensor without values like its output, of the last number of images


class CallLog(TorchFunctionMode):
    """The calls of one forward in order, and the bytes that autograd keeps for backward."""

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        super().__init__()
        self.others = Call("", ())  # has the bytes of all calls that are not supported
        self.calls: list[Call] = []
        self.now: Call | None = None  # the supported call that runs
        self.counted = {memory_of(t) for t in (x, *model.parameters(), *model.buffers())}  # or need not be
        self.alive: list[Tensor] = []  # tensors whose addresses must not be used again

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        compute = functools.partial(func, *args, **(kwargs or {}))
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if self.now:
            return compute()
        out = self.run(Call(_op_of_function(func, args, kwargs), inputs), compute)
        if func.__name__ in _WITHOUT_VALUES and any(out is x for x in inputs):
            self.calls.pop()
        return out

    def run(self, call: Call, compute: Callable[[], Any]) -> Any:
        """Runs a call, and notes it if it returns tensors. What is written in place is returned as a new object."""
        self.now = call if call.op else None
        out = compute()
        if call.op:
            call.half, call.in_place = autocast_type(out), out is call.inputs[0]
            out = out.view_as(out) if call.in_place else out
        self.now = None
        if any(isinstance(x, Tensor) for x in tree_leaves(out)):
            call.out = out
            self.calls.append(call)
        return out

    def note_hooked(self, module: nn.Module, args: Any, out: Any) -> None:
        """Called after each module: notes that the hooks of a module read its inputs and outputs."""
        if reads_values(module):
            self.calls.append(Call("", [x for x in tree_leaves((args, out)) if isinstance(x, Tensor)]))

    def keep(self, x: Tensor) -> Tensor:
        """Counts a tensor that autograd keeps."""
        key = memory_of(x)
        if key not in self.counted:
            self.counted.add(key)
            self.alive.append(x.detach())
            (self.now or self.others).kept += x.nbytes
        return torch.empty(0)  # no backward runs here

    def clear(self) -> None:
        """Frees the tensors: autograd's graph holds `keep`, so a log that holds outputs would never be freed."""
        for call in self.calls:
            call.inputs, call.out = (), None
        self.alive.clear()


def memory_of(x: Tensor) -> int:
    """The address of its storage, which its views share."""
    return x.untyped_storage().data_ptr()


def install(job: Job) -> RunningForward:
    """Replaces the forward of every layer that can be planned, until the job is closed."""
    running = RunningForward(job.model)
    left = {m for module in job.model.modules() if _has_no_layers(module) for m in module.modules()}
    for name, module in job.model.named_modules():
        altered = "forward" in vars(module) and "steer" not in vars(module)
        if op_of(module) and not altered and module not in left:
            running.names[module] = name
            job.patch(module, "saved_memory", running)
            job.patch(module, "forward", MethodType(_forward, module))
    return running


def _has_no_layers(module: nn.Module) -> bool:
    """Whether a module that is not torch's has no convolution, but other layers: Compile can take it whole."""
    inside, own = [*module.modules()], not type(module).__module__.startswith("torch.")
    supported = all(op_of(m) or type(m) is nn.Identity or [*m.children()] for m in inside)
    return own and not supported and not any(isinstance(m, nn.Conv2d) for m in inside)


def _forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs the segment that begins with this layer, passes on a value of one that has run, or runs the layer."""
    running: RunningForward = module.saved_memory
    x = args[0] if len(args) == 1 and not kwargs and isinstance(args[0], Tensor) else None
    planned = x is not None and module in running.names  # not of a deep copy
    if planned and running.log is None:
        if isinstance(x, Within) or (x is running.x and running.calls[running.done].layer is module):
            return running.call(module, args)
        if module in running.segments and running.model.training and torch.is_grad_enabled():
            running.start(module, args[0])
            return running.call(module, args)
    steer = steering(module)
    forward = functools.partial(type(module).forward, module) if steer is None else steer.forward
    plain = functools.partial(forward, *args, **kwargs)
    if planned and running.log is not None:
        return running.log.run(Call(op_of(module), args, module), plain)
    return plain()


def autocast_type(x: Tensor) -> torch.dtype | None:
    """The type in which autocast now computes convolutions of x, None where it is off."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def record_forward(running: RunningForward, x: Tensor) -> CallLog:
    """Runs the model on x, and on twice the images. Raises InputError if it returns no tensor."""
    log = _recorded(running, x)
    twice = _recorded(running, torch.cat([x, x]).detach().requires_grad_(x.requires_grad))
    twice.clear()
    for call, again in zip([log.others, *log.calls], [twice.others, *twice.calls], strict=False):
        call.copies = 2 * call.kept - again.kept
        call.kept -= call.copies
    return log


def _recorded(running: RunningForward, x: Tensor) -> CallLog:
    """The log of one forward, with gradients on. Modes and random state are restored."""
    model, log = running.model, CallLog(running.model, x)
    random = torch.random.fork_rng([x.device] if x.is_cuda else [])
    hooks = torch.autograd.graph.saved_tensors_hooks(log.keep, lambda kept: kept)
    noting = register_module_forward_hook(log.note_hooked)
    with Patches() as changes, random, torch.enable_grad(), hooks, noting, log:
        for module in model.modules():
            if any(True for _ in module.buffers(recurse=False)):
                changes.set(module, "training", False)
        changes.set(running, "log", log)
        outputs = model.forward(x)
    if not any(isinstance(t, Tensor) for t in tree_leaves(outputs)):
        log.clear()
        got = f"{type(model).__name__} returns {type(outputs).__name__}, without a known tensor"
        raise InputError(f"SavedMemory: {got}: let it return tensors, or a tuple, list or dict of them")
    return log


def chains_of(calls: Sequence[Call]) -> list[list[list[Call]]]:
    """Runs of calls with a convolution, of which nothing else reads a value but the last; each in units.

    A unit is a part that the solver does not divide. It begins with a convolution, and reads one value from before it.
    """
    count = Counter(call.layer for call in calls)
    last_read = {id(x): i for i, call in enumerate(calls) for x in call.inputs}
    chains, start = [], 0
    while start < len(calls):
        first, values = calls[start], {id(x): 0 for x in calls[start].inputs}  # of tensors
        shapes = [torch.empty_like(x, device="meta") for x in first.inputs]  # of values
        begins, end = [start], start  # of units; of the chain
        for i, call in enumerate(calls[start:], start):
            reads = tuple(values.get(id(x), -1) for x in call.inputs)
            node = GraphNode(call.op, reads, call.layer)
            repeated = count[call.layer] > 1 and (call is first or call.op in ("conv", "norm"))
            if repeated or call.half is not first.half or not _fits(call, reads, {begin - start for begin in begins}):
                break
            out = node.result(shapes, call.half)
            if (out.shape, out.dtype) != (call.out.shape, call.out.dtype):
                break
            if call.op == "conv" and end == i > start:
                begins.append(i)
            begins = [begin for begin in begins if begin - start <= min(reads)]
            call.node, call.like = node, out
            if call.in_place:  # whatever name it is read by
                values.update({x: len(shapes) for x, value in values.items() if value == reads[0]})
            values[id(call.out)] = len(shapes)
            shapes.append(out)
            if all(last_read.get(x, len(calls)) <= i for x, value in values.items() if value and x != id(call.out)):
                end = i + 1
        if any(call.op == "conv" for call in calls[start:end]):
            chains.append([[*calls[a:b]] for a, b in pairwise([*(i for i in begins if i < end), end])])
        start = max(end, start + 1)
    return chains


def _fits(call: Call, reads: Sequence[int], real: set[int]) -> bool:
    """Whether a call can be in a chain. `real`: the values that are real tensors if a segment begins with them."""
    if not call.op or -1 in reads or len({x.shape for x in call.inputs}) > 1 or (call.in_place and reads[0] in real):
        return False
    return call.layer is not None or not real.issuperset(reads)
