"""Updates in backward: each gradient is used as it arrives and freed, so that there is no buffer of gradients.

Note: code that reads a freed gradient notices it. A stand-in of one element, NaN, expanded to the parameter's shape,
takes its place: a norm of it is NaN, and writing to it (clipping by hand, a second backward) raises.

Note: SGD with momentum for a large Linear. Its own backward adds dy^T x to the momentum as it is computed, so that this
gradient is never stored by itself. Ref: [003], fully connected layers: the gradient of the data first, then the
weights' over the area of the weights.
"""

from types import MethodType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from kasoku.core import InputError, Job
from kasoku.core.torch_internals import accumulates, gradient_hooks, version
from kasoku.memory.inspection import BoundToModel, autocast_type

_LARGE = 2**20  # bytes of weights; smaller ones are not worth it


class StepInBackward:
    """Updates the parameters of a job in backward, if nothing needs them all or may veto the step, on one rank."""

    def __init__(self, job: Job, *, enabled: bool, show: bool) -> None:
        self.job, self.enabled, self.show = job, enabled, show
        self.stand_ins: dict[Tensor, Tensor] = {}  # of the gradients of all parameters that were updated
        self.settings: list[dict[str, Any]] = []  # of the optimizer during these updates
        self.by_parameter: bool | None = None  # whether the optimizer can update a part of the model; None: unknown yet
        if enabled:
            job.gradient_ready(self.update)
            job.before_step(self.before_step)
            job.on_close(self.clear)

    @property
    def active(self) -> bool:
        """Whether gradients are used as they arrive; known after all techniques are applied."""
        job = self.job
        if not self.enabled or job.needs_whole_gradients or job.vetoes_steps or job.comm.size > 1:
            return False
        if self.by_parameter is None:
            rule = type(job.optimizer)
            module: str = rule.step.__module__
            self.by_parameter = module.startswith(("torch.optim.", "kasoku.optim."))
            if not self.by_parameter and self.show:
                print(f"kasoku: SavedMemory: {rule.__name__} has its own step(), so gradients are kept until that step")
        return self.by_parameter

    def update(self, p: Tensor) -> None:
        """Updates a parameter whose gradient is complete, unless its layer's backward has done so."""
        if self.active and p.grad is not None and p not in self.stand_ins:
            self.job.update([p])
            self.free_gradient(p)

    def free_gradient(self, p: Tensor) -> None:
        """Puts a stand-in in place of the gradient of an updated parameter."""
        if not self.stand_ins:
            self.settings = _optimizer_settings(self.job)
        p.grad = self.stand_ins[p] = p.new_full((), float("nan")).expand(p.shape)

    def before_forward(self) -> None:
        """Raises InputError if the optimizer's step after the last backward is missing."""
        if self.stand_ins:
            got = "a second forward before optimizer.step(), after gradients were used as they arrived"
            advice = "say accumulate=k to Job for k backwards a step, or set in_backward = false"
            raise InputError(f"SavedMemory: {got}: {advice}")

    def before_step(self) -> None:
        """Lets the optimizer skip updated parameters. Raises InputError if they would be updated otherwise now."""
        changed = ""
        if any(p.grad is not None and p.grad is not stand_in for p, stand_in in self.stand_ins.items()):
            changed = "a gradient was replaced"
        elif self.stand_ins and self.settings != _optimizer_settings(self.job):
            changed = "a rate, or another setting of the optimizer, was changed"
        if changed:
            when = "between backward and optimizer.step(), after parameters were updated in backward"
            raise InputError(f"SavedMemory: {changed} {when}: do it before the forward, or set in_backward = false")
        self.clear()

    def clear(self) -> None:
        for p, stand_in in self.stand_ins.items():
            if p.grad is stand_in:
                p.grad = None
        self.stand_ins.clear()


def _optimizer_settings(job: Job) -> list[dict[str, Any]]:
    return [{k: v.tolist() if isinstance(v, Tensor) else v for k, v in group.items()} for group in job.hyper()]


# ---- large Linears


class LinearInBackward(BoundToModel):
    """Updates one Linear in its backward, if nothing else needs its gradient."""

    def __init__(self, layer: nn.Linear, stepper: StepInBackward) -> None:
        self.layer, self.stepper = layer, stepper
        self.calls = 0  # forwards since the inspection began; only if 1 does the plan expect no gradient of the weight
        self.passes: WeakSet[Any] = WeakSet()  # forwards without a backward yet; of two, neither has the whole gradient

    @property
    def group(self) -> dict[str, Any] | None:
        """The weight's parameter group; None unless the rule is SGD with momentum and only the job needs gradients."""
        stepper, layer = self.stepper, self.layer
        job = stepper.job
        foreign = any(getattr(hook, "__self__", None) is not job for hook in gradient_hooks(layer.weight))
        ours = vars(layer).get("saved_memory") is self and not foreign
        alone = ours and stepper.active and job.accumulate == 1 and layer.training and layer.weight.requires_grad
        if not alone or type(job.optimizer) is not torch.optim.SGD:
            return None
        group = next((g for g in job.optimizer.param_groups if any(p is layer.weight for p in g["params"])), None)
        if group is None or not group["momentum"] or any(group[k] for k in ("nesterov", "dampening", "maximize")):
            return None
        return group

    @torch.no_grad()
    def update(self, group: dict[str, Any], dy_NK: Tensor, x_NC: Tensor) -> None:
        """The step of SGD; the gradient dy^T x is added to the momentum as it is computed."""
        job, weight = self.stepper.job, self.layer.weight
        state = job.optimizer.state[weight]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight, memory_format=torch.preserve_format)
        momentum = state["momentum_buffer"].mul_(group["momentum"])
        if group["weight_decay"]:
            momentum.add_(weight, alpha=group["weight_decay"])
        momentum.addmm_(dy_NK.to(weight.dtype).t(), x_NC.to(weight.dtype))
        weight.add_(momentum, alpha=-float(group["lr"]))
        self.stepper.free_gradient(weight)
        job.run_after_update([weight])


def install_linears(job: Job, stepper: StepInBackward) -> list[LinearInBackward]:
    """Replaces the forward of every large Linear that owns its weight, until the job is closed."""
    linears = []
    owned = [p for _, p in job.model.named_parameters(remove_duplicate=False)]
    for layer in [m for m in job.model.modules() if type(m) is nn.Linear and "forward" not in vars(m)]:
        once = sum(p is layer.weight for p in owned) == 1  # none of a pruned one, whose weight is no parameter
        if once and layer.weight.nbytes >= _LARGE:
            linears.append(LinearInBackward(layer, stepper))
            job.patch(layer, "saved_memory", linears[-1])
            job.patch(layer, "forward", MethodType(_forward, layer))
    return linears


def _forward(layer: Any, x: Tensor) -> Tensor:
    owner: LinearInBackward = layer.saved_memory
    owner.calls += owner.layer is layer
    if owner.layer is not layer or not x.requires_grad or owner.group is None:  # another layer: a deep copy
        return nn.Linear.forward(layer, x)
    out: Tensor = _Linear.apply(x, layer.weight, layer.bias, owner, autocast_type(x))  # type: ignore[no-untyped-call]
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Any, owner: LinearInBackward, half: Any) -> Tensor:
        ctx.owner, ctx.half, ctx.version = owner, half, version(weight)
        owner.passes.add(ctx)
        for each in owner.passes:
            each.shared = len(owner.passes) > 1 or getattr(each, "shared", False)
        ctx.save_for_backward(x if half is None else x.to(half))
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        owner: LinearInBackward = ctx.owner
        weight, bias = owner.layer.weight, owner.layer.bias
        owner.passes.discard(ctx)
        if weight in owner.stepper.stand_ins:
            again = "a second backward through a Linear whose weight the first one has updated"
            raise InputError(f"SavedMemory: {again}: set in_backward = false")
        if version(weight) != ctx.version:
            raise InputError("SavedMemory: the weight of a Linear was written between forward and backward")
        flat, x_NC = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
        dx = dy @ (weight if ctx.half is None else weight.to(ctx.half)) if ctx.needs_input_grad[0] else None
        db = flat.sum(0).to(bias.dtype) if bias is not None and bias.requires_grad else None
        adds, group = accumulates(ctx.next_functions[1][0]), owner.group
        if adds is None or ctx.shared or group is None:
            return dx, (flat.t() @ x_NC).to(weight.dtype), db, None, None
        if adds:
            owner.update(group, flat, x_NC)
        return dx, None, db, None, None
