"""Large Linears that update their weight in their own backward, so that its gradient is never stored by itself.

SGD with momentum: dy^T x is added to the momentum as it is computed. Ref: [003], fully connected layers: the gradient
of the data first, then the weights' over the area of the weights.

Note: factors instead of gradients. Between ranks the gradient of a Linear would be a bucket of its own. Each rank can
also gather all ranks' x and dy, and compute the mean gradient itself: B * (K + N) elements of each rank instead of
K * N. All ranks add the same rows in rank order, so they get equal bits on equal hardware. The layer holds x and dy
until the turn of its bucket, so that ranks may run backward in different orders. Ranks may have different numbers of
rows, so they then agree on the largest, and the others append zeros. Only this message makes the host wait, and no GPU:
it travels between CPUs. Ref: Xie et al. 2015 (arXiv 1511.05617), sufficient factor broadcasting.
"""

from functools import partial
from types import MethodType
from typing import Any, cast
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

    def __init__(self, layer: nn.Linear, updates: BackwardUpdates) -> None:
        self.layer, self.updates = layer, updates
        self.calls = 0  # forwards since an inspection, which makes 2, began; if more, the plan expects the gradient
        self.rows, self.itemsize = 0.0, 0  # for each image, and of the type it computes in, as of its last forward
        self.passes: WeakSet[Any] = WeakSet()  # forwards without a backward yet; of two, neither has the whole gradient
        self.held: tuple[dict[str, Any], Tensor, Tensor] | None = None  # settings, dy, x until the turn of its bucket

    @property
    def rule(self) -> int | None:
        """The number of the weight's parameter group, the same on all ranks; None unless it is SGD with momentum."""
        job, exchange, weight = self.updates.job, self.updates.exchange, self.layer.weight
        parts = job.accumulate > 1 or getattr(job.plain_loader, "at_once", 0) > 0  # at_once: more on some ranks
        if parts or type(job.optimizer) is not torch.optim.SGD or not self.updates.active():
            return None
        if exchange is not None and exchange.bucket_bytes(weight) > weight.nbytes:
            return None  # shares its bucket
        for i, group in enumerate(job.optimizer.param_groups):
            if any(p is weight for p in group["params"]):
                other = not group["momentum"] or any(group[k] for k in ("nesterov", "dampening", "maximize"))
                return None if other else i
        return None

    @property
    def usable(self) -> bool:
        """Whether there is a rule, and only the job needs the gradient."""
        weight, job = self.layer.weight, self.updates.job
        foreign = any(getattr(hook, "__self__", None) is not job for hook in gradient_hooks(weight))
        ours = vars(self.layer).get("saved_memory") is self and not foreign
        return ours and self.layer.training and weight.requires_grad and self.rule is not None

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

    def use(self, dy_NK: Tensor, x_NC: Tensor) -> None:
        """Updates the weight, on several ranks when the factors of all ranks have arrived."""
        updates, exchange = self.updates, self.updates.exchange
        updates.free_gradient(self.layer.weight)
        settings = updates.settings()[cast(int, self.rule)]
        if exchange is None:
            self.update(settings, dy_NK, x_NC)
        else:
            self.held = settings, dy_NK, x_NC.detach()
            exchange.hold(self.layer.weight)

    def send(self) -> bool:
        """Starts to gather factors if all ranks hold them, and they are fewer bytes than the gradient. Collective."""
        updates, exchange, weight = self.updates, self.updates.exchange, self.layer.weight
        if exchange is None or self.rule is None:
            return False
        held, self.held = self.held, None
        with updates.job.trace.span("wait", "Linear"):
            every = exchange.factors.gather_objects(0 if held is None else len(held[2]))
        if held is None:
            return False
        settings, dy_NK, x_NC = held
        rows, size = max(every), exchange.factors.size
        n = self.bytes_in_flight(rows)
        if not all(every) or not n:
            del updates.placeholders[weight]
            weight.grad = (dy_NK.t() @ x_NC).to(weight.dtype)
            return False
        updates.reserve(n)
        gathered, works = [], []
        for factor in (dy_NK.to(x_NC.dtype), x_NC):
            if len(factor) < rows:
                factor = nn.functional.pad(factor, (0, 0, 0, rows - len(factor)))
            gathered.append(factor.new_empty(size * rows, factor.shape[1]))
            works.append(exchange.factors.all_gather(gathered[-1], factor.contiguous()))
        updates.enqueue(n, works, partial(self.update, settings, *gathered, scale=1 / size))
        return True

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
    for layer in [m for m in job.model.modules() if type(m) is nn.Linear and "forward" not in vars(m)]:
        once = sum(p is layer.weight for p in owned) == 1  # none of a pruned one, whose weight is no parameter
        if once and layer.weight.nbytes >= _LARGE:
            linears.append(LinearInBackward(layer, updates))
            updates.senders[layer.weight] = linears[-1].send
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
    if not own or not x.requires_grad or not owner.usable:
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
        adds = accumulates(ctx.next_functions[1][0])
        uses = adds and not ctx.shared and owner.usable
        if uses:
            owner.use(flat, x_NC)
        dw = None if uses or adds is False else (flat.t() @ x_NC).to(weight.dtype)
        return dx, dw, db, None, None
