"""Large Linears that update their weight in their own backward, so that its gradient is never stored by itself.

SGD with momentum: dy^T x is added to the momentum as it is computed. Ref: [003], fully connected layers: the gradient
of the data first, then the weights' over the area of the weights.

Note: factors instead of gradients. Between ranks the gradient of a Linear would be a bucket of its own. Each rank can
also gather all ranks' x and dy, and compute the mean gradient itself: B * (K + N) elements of each rank instead of
K * N. All ranks add the same rows in rank order, so they get equal bits on equal hardware. Ranks may have different
numbers of rows, so they agree on the largest in backward, and the others append zeros. Only this message makes the host
wait, and no GPU: it travels between CPUs. Ref: Xie et al. 2015 (arXiv 1511.05617), sufficient factor broadcasting.
"""

from functools import partial
from types import MethodType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from kasoku.core import InputError, Job
from kasoku.core.backward_updates import BackwardUpdates
from kasoku.core.torch_internals import accumulates, gradient_hooks, version
from kasoku.memory.inspection import BoundToModel, autocast_type

_LARGE = 2**20  # bytes of weights; smaller ones are not worth it


class LinearInBackward(BoundToModel):
    """Updates one Linear in its backward, if nothing else needs its gradient."""

    def __init__(self, name: str, layer: nn.Linear, updates: BackwardUpdates) -> None:
        self.name, self.layer, self.updates = name, layer, updates
        self.calls = 0  # forwards since the inspection began; only if 1 does the plan expect no gradient of the weight
        self.rows, self.itemsize = 0.0, 0  # for each image, and of the type it computes in, as of its last forward
        self.passes: WeakSet[Any] = WeakSet()  # forwards without a backward yet; of two, neither has the whole gradient

    @property
    def group(self) -> dict[str, Any] | None:
        """The weight's parameter group; None unless the rule is SGD with momentum and only the job needs gradients."""
        updates, layer = self.updates, self.layer
        job, exchange = updates.job, updates.exchange
        foreign = any(getattr(hook, "__self__", None) is not job for hook in gradient_hooks(layer.weight))
        ours = vars(layer).get("saved_memory") is self and not foreign
        alone = ours and updates.active() and job.accumulate == 1 and layer.training and layer.weight.requires_grad
        if not alone or type(job.optimizer) is not torch.optim.SGD:
            return None
        if exchange is not None and exchange.bucket_bytes(layer.weight) > layer.weight.nbytes:
            return None  # shares its bucket
        group = next((g for g in job.optimizer.param_groups if any(p is layer.weight for p in g["params"])), None)
        if group is None or not group["momentum"] or any(group[k] for k in ("nesterov", "dampening", "maximize")):
            return None
        return group

    def bytes_in_flight(self, rows: float) -> int:
        """Bytes while factors of so many rows are gathered; 0 on one rank, or if a ring all-reduce sends fewer bytes.

        Gloo copies what it sends and what it receives.
        """
        weight, exchange = self.layer.weight, self.updates.exchange
        ranks: int = 1 if exchange is None else exchange.factors.size
        own = rows * sum(weight.shape) * self.itemsize
        if ranks == 1 or own * ranks >= 2 * weight.nbytes:
            return 0
        return round(own * (ranks if weight.is_cuda else 2 * ranks + 1))

    def agree(self, rows: int) -> int:
        """The largest number of rows of a rank; 0: send the gradient, as a rank has rows = 0 or it is fewer bytes."""
        with self.updates.job.trace.span("wait", "Linear"):
            names, every = zip(*self.updates.job.step_comm.gather_objects((self.name, rows)), strict=True)
        if len(set(names)) > 1:  # all ranks raise
            order = f"ranks run the backward of large Linears in different orders ({', '.join(sorted(set(names)))})"
            raise InputError(f"SavedMemory: {order}: set lossless = true, which allows any order")
        return max(every) if all(every) and self.bytes_in_flight(max(every)) else 0

    def use(self, group: dict[str, Any], dy_NK: Tensor, x_NC: Tensor, rows: int) -> None:
        """Updates the weight, on several ranks when the factors of all ranks have arrived."""
        updates, exchange, weight = self.updates, self.updates.exchange, self.layer.weight
        groups = zip(updates.settings(), updates.job.optimizer.param_groups, strict=True)
        settings = next(own for own, now in groups if now is group)
        if exchange is None:
            self.update(settings, dy_NK, x_NC)
            updates.free_gradient(weight)
            return
        size = exchange.factors.size
        n = self.bytes_in_flight(rows)
        updates.reserve(n)
        gathered, works = [], []
        for factor in (dy_NK.to(x_NC.dtype), x_NC):
            if len(factor) < rows:
                factor = nn.functional.pad(factor, (0, 0, 0, rows - len(factor)))
            gathered.append(factor.new_empty(size * rows, factor.shape[1]))
            works.append(exchange.factors.all_gather(gathered[-1], factor.contiguous()))
        updates.free_gradient(weight)
        exchange.skip(weight)
        updates.enqueue(n, works, partial(self.update, settings, *gathered, scale=1 / size))

    @torch.no_grad()
    def update(self, settings: dict[str, Any], dy_NK: Tensor, x_NC: Tensor, *, scale: float = 1.0) -> None:
        """The step of SGD; the gradient, scale * dy^T x, is added to the momentum as it is computed."""
        job, weight = self.updates.job, self.layer.weight
        state = job.optimizer.state[weight]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight, memory_format=torch.preserve_format)
        momentum = state["momentum_buffer"].mul_(settings["momentum"])
        if settings["weight_decay"]:
            momentum.add_(weight, alpha=settings["weight_decay"])
        momentum.addmm_(dy_NK.to(weight.dtype).t(), x_NC.to(weight.dtype), alpha=scale)
        weight.add_(momentum, alpha=-float(settings["lr"]))
        job.run_after_update([weight])


def install_linears(job: Job, updates: BackwardUpdates) -> list[LinearInBackward]:
    """Replaces the forward of every large Linear that owns its weight, until the job is closed."""
    linears = []
    owned = [p for _, p in job.model.named_parameters(remove_duplicate=False)]
    linear = [(n, m) for n, m in job.model.named_modules() if type(m) is nn.Linear and "forward" not in vars(m)]
    for name, layer in linear:
        once = sum(p is layer.weight for p in owned) == 1  # none of a pruned one, whose weight is no parameter
        if once and layer.weight.nbytes >= _LARGE:
            linears.append(LinearInBackward(name, layer, updates))
            job.patch(layer, "saved_memory", linears[-1])
            job.patch(layer, "forward", MethodType(_forward, layer))
    return linears


def _forward(layer: Any, x: Tensor) -> Tensor:
    owner: LinearInBackward = layer.saved_memory
    own = owner.layer is layer  # not a deep copy's
    if own:
        owner.calls += 1
        owner.rows = x.numel() / max(1, x.shape[-1] * len(x))
        owner.itemsize = (autocast_type(x) or x.dtype).itemsize
    if not own or not x.requires_grad or owner.group is None:
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
        if weight in owner.updates.placeholders:
            again = "a second backward through a Linear whose weight the first one has updated"
            raise InputError(f"SavedMemory: {again}: set in_backward = false")
        if version(weight) != ctx.version:
            raise InputError("SavedMemory: the weight of a Linear was written between forward and backward")
        flat, x_NC = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
        dx = dy @ (weight if ctx.half is None else weight.to(ctx.half)) if ctx.needs_input_grad[0] else None
        db = flat.sum(0).to(bias.dtype) if bias is not None and bias.requires_grad else None
        adds, group = accumulates(ctx.next_functions[1][0]), owner.group
        rows = len(x_NC) if adds and not ctx.shared and group is not None else 0
        if adds and owner.updates.exchange is not None:
            rows = owner.agree(rows)
        if rows and group is not None:
            owner.use(group, flat, x_NC, rows)
        dw = None if rows or adds is False else (flat.t() @ x_NC).to(weight.dtype)
        return dx, dw, db, None, None
