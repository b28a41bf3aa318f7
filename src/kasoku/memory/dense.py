"""The gradient of a large linear layer added straight to its momentum: it never lies anywhere by itself.

Ref: [003], fully connected layers: the data's error first, then the weights' over the area of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MethodType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from kasoku.core import InputError, Job
from kasoku.memory.bound import Bound
from kasoku.memory.instep import InStep

_LARGE = 2**20  # bytes of weights from which on it is worth it


class Pass:
    """A forward whose backward may come; `shared`: there was another one then, so neither alone has the gradient."""

    shared = False


class Straight(Bound):
    """What hangs on a linear layer whose weight moves in its own backward.

    Attributes:
        once: the look saw it called once in a forward.
        calls: since the last look began.
        waiting: forwards whose backward has not come; one that is dropped leaves by itself.
        room: zeros that the first step takes as its momentum, and their version.
        closed: the job is: what is still on its way goes as in plain PyTorch.
    """

    def __init__(self, layer: nn.Linear, in_step: InStep) -> None:
        self.layer, self.in_step = layer, in_step
        self.once, self.calls, self.closed = False, 0, False
        self.waiting: WeakSet[Pass] = WeakSet()
        self.room: tuple[Tensor, int] | None = None

    def look(self) -> None:
        """A look begins: it runs as torch's own, and is counted."""
        self.once, self.calls = False, 0

    @property
    def active(self) -> bool:
        """Whether this backward is the step."""
        return self.once and self.fits

    @property
    def fits(self) -> bool:
        """Whether it may be: of plain SGD with momentum, and alone."""
        job = self.in_step.job
        return (
            self.in_step.active
            and job.accumulate == 1
            and self.layer.weight.requires_grad
            and self.layer.training
            and torch.is_grad_enabled()
            and not self.watched
        )

    @property
    def watched(self) -> bool:
        """Somebody else waits for the weight's gradient, or the rule makes more of it."""
        job, weight = self.in_step.job, self.layer.weight
        whole: Any = getattr(weight, "_post_accumulate_grad_hooks", None) or {}
        hooks = (*(weight._backward_hooks or {}).values(), *whole.values())
        return any(getattr(f, "__self__", None) is not job for f in hooks) or _group(job, weight) is None

    def ready(self) -> None:
        """Takes the room for the momentum: zeros, which the first step would leave as it is."""
        state = self.in_step.job.optimizer.state
        weight = self.layer.weight
        if "momentum_buffer" not in state[weight]:
            zeros = torch.zeros_like(weight, memory_format=torch.preserve_format)
            state[weight]["momentum_buffer"], self.room = zeros, (zeros, zeros._version)

    def begin(self) -> Pass:
        """A forward begins."""
        mine = Pass()
        self.waiting.add(mine)
        if len(self.waiting) > 1:
            for one in self.waiting:
                one.shared = True
        return mine

    def close(self) -> None:
        """The room goes where no step has been: torch wants the momentum of all weights or of none."""
        self.closed = True
        job, weight = self.in_step.job, self.layer.weight
        held = job.state_of(weight)
        if self.room is not None and held.get("momentum_buffer") is self.room[0]:
            zeros, version = self.room
            if zeros._version == version:
                del held["momentum_buffer"]
            if not held:
                del job.optimizer.state[weight]

    @torch.no_grad()
    def update(self, dy_NK: Tensor, x_NC: Tensor) -> None:
        """The step of SGD, with the gradient dy^T x added to the momentum as it is computed."""
        job, weight = self.in_step.job, self.layer.weight
        group = _group(job, weight)
        if group is None:
            return
        self.ready()
        momentum = job.optimizer.state[weight]["momentum_buffer"].mul_(group["momentum"])
        if group["weight_decay"]:
            momentum.add_(weight, alpha=group["weight_decay"])
        momentum.addmm_(dy_NK.to(weight.dtype).t(), x_NC.to(weight.dtype))
        weight.add_(momentum, alpha=-float(group["lr"]))
        self.in_step.take(weight)
        job._updated([weight])


def install(job: Job, in_step: InStep) -> list[Straight]:
    """Stands in for the forward of every large linear layer, until the job is closed."""
    found = []
    for layer in _linear(job.model):
        straight = Straight(layer, in_step)
        job.patch(layer, "saved_memory", straight)
        job.patch(layer, "forward", MethodType(_forward, layer))
        job.undo(straight.close)
        found.append(straight)
    return found


def _linear(model: nn.Module) -> Iterator[nn.Linear]:
    """Layers with a large weight of their own."""
    owners: dict[Tensor, int] = {}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            owners[p] = owners.get(p, 0) + 1
    for module in model.modules():
        if not isinstance(module, nn.Linear) or type(module) is not nn.Linear or "forward" in vars(module):
            continue
        if module.weight.nbytes >= _LARGE and owners.get(module.weight) == 1:  # pruned ones are no parameters
            yield module


def _group(job: Job, weight: Tensor) -> dict[str, Any] | None:
    """The weight's parameter group where the rule is SGD with momentum as torch has it; else None."""
    if type(job.optimizer) is not torch.optim.SGD:
        return None
    for group in job.optimizer.param_groups:
        if any(p is weight for p in group["params"]):
            plain = not (group["nesterov"] or group["dampening"] or group["maximize"])
            return group if plain and group["momentum"] else None
    return None


def _forward(layer: Any, x: Tensor) -> Tensor:
    straight: Straight = layer.saved_memory
    if straight.layer is layer:
        straight.calls += 1
    if straight.layer is not layer or not x.requires_grad or not straight.active:
        plain: Tensor = type(layer).forward(layer, x)
        return plain
    half = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else None
    out: Tensor = _Linear.apply(x, layer.weight, layer.bias, straight, half)  # type: ignore[no-untyped-call]
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, straight: Straight, half: torch.dtype | None
    ) -> Tensor:
        ctx.straight, ctx.half, ctx.version, ctx.own = straight, half, weight._version, straight.begin()
        ctx.save_for_backward(x if half is None else x.to(half))
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        straight: Straight = ctx.straight
        layer = straight.layer
        straight.waiting.discard(ctx.own)
        if layer.weight in straight.in_step.taken:
            raise InputError(
                "SavedMemory: a second backward through a Linear whose weight has moved in the first one: say "
                "in_backward = false"
            )
        if layer.weight._version != ctx.version:
            raise InputError("SavedMemory: the weight of a Linear was written over between forward and backward")
        weight = layer.weight if ctx.half is None else layer.weight.to(ctx.half)
        flat = dy.reshape(-1, dy.shape[-1])
        dx = dy @ weight if ctx.needs_input_grad[0] else None
        del weight
        db = None
        if layer.bias is not None and layer.bias.requires_grad:
            db = flat.sum(0).to(layer.bias.dtype)
        x_NC, dw = x.reshape(-1, x.shape[-1]), None
        if _asked(ctx.next_functions[1][0]) or ctx.own.shared or straight.closed or straight.watched:
            dw = (flat.t() @ x_NC).to(layer.weight.dtype)
        elif _reached(ctx.next_functions[1][0]):
            straight.update(flat, x_NC)
        return dx, dw, db, None, None


def _reached(node: Any) -> bool:
    """This backward adds to the gradient that the node stands for; torch.autograd.grad of others does not."""
    return bool(torch._C._will_engine_execute_node(node))


def _asked(node: Any) -> bool:
    """This backward was asked for that gradient itself, by torch.autograd.grad: it goes to the caller."""
    try:
        _reached(node)
    except RuntimeError:
        return True
    return False
