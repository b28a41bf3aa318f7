"""Muon: orthogonalised momentum for filters, Nesterov SGD for all other parameters.

Note: updates of a part of the model. All state lives in `state[p]`, and each filter is orthogonalised alone. So
`job.update` on some parameters gives the same bits as a whole step.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from kasoku.core import Checked, InputError, Range, checked
from kasoku.core.hardware import computes_bf16
from kasoku.optim.param_groups import NonNegative, Share, split

_QUINTIC = (3.4445, -4.7750, 2.0315)  # steep at 0: small singular values rise fast, all end near 1 (0.7 to 1.2)


@dataclass(frozen=True)
class SGDSettings(Checked):
    """Settings of the Nesterov SGD that updates all parameters but the filters.

    Rates are for the gradient of the mean loss. If a published rate is for a summed loss, multiply it by the batch:
    airbench's .053 and .67 at batch 2,000 become 106 and 1,340.

    Args:
        bias_lr: rate of biases and norm parameters, 0 or more.
        head_lr: rate of the head (the last linear layer's weight), 0 or more.
        momentum: share of the velocity kept at each step, from 0 to below 1.
        weight_decay: torch's weight decay times the rate: the share of a weight that a step subtracts, before momentum,
            from 0 to below 1.
        decay_all: decay biases and norm parameters as well, not the head alone.
        whitening_epochs: epochs, 0 or more, over which the rate of parameters named whiten... falls to 0; 0: they train
            as usual.
    """

    bias_lr: NonNegative = 0.1
    head_lr: NonNegative = 0.1
    momentum: Share = 0.85
    weight_decay: Share = 0.0
    decay_all: bool = False
    whitening_epochs: Annotated[float, Range(at_least=0)] = 0.0


class Muon(torch.optim.Optimizer):
    """Orthogonalised Nesterov momentum for groups with `filters=True`, Nesterov SGD for all other groups.

    Args:
        params: parameter groups; each may set lr, momentum, weight_decay (SGD groups only) and `filters`.
        lr, momentum, steps: as in `muon`, for groups that set none.
    """

    def __init__(
        self, params: Iterable[dict[str, Any]], lr: float = 0.24, *, momentum: float = 0.6, steps: int = 3
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "steps": steps}
        super().__init__(params, {**defaults, "weight_decay": 0.0, "filters": True})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient. Raises InputError for a closure."""
        if closure is not None:
            raise InputError("Muon.step(closure) is not supported: call backward() in the loop, then step()")
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            grads = [p.grad for p in params]
            if group["weight_decay"] and not group["filters"]:
                grads = list(torch._foreach_add(grads, params, alpha=group["weight_decay"]))
            for p, g in zip(params, grads, strict=True):
                if "momentum_buffer" not in self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(g)
            buffers = [self.state[p]["momentum_buffer"] for p in params]
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, grads)
            directions = torch._foreach_add(grads, buffers, alpha=group["momentum"])  # Nesterov's
            if not group["filters"]:
                torch._foreach_add_(params, directions, alpha=-group["lr"])
                continue
            for p, direction in zip(params, directions, strict=True):
                update = orthogonalize(direction.reshape(len(p), -1), group["steps"])
                p.mul_(len(p) ** 0.5 / torch.linalg.vector_norm(p).clamp(min=1e-12))
                p.add_(update.reshape(p.shape), alpha=-group["lr"])


def orthogonalize(x: Tensor, steps: int) -> Tensor:
    """An approximation of the nearest matrix whose singular values are 1, in x's dtype; x is (rows, columns).

    Computed in bfloat16 on GPUs that have it, otherwise in float32 (bfloat16 was not faster on a CPU with AMX).
    Ref: Newton-Schulz with the quintic of Jordan et al. 2024 (kellerjordan.github.io/posts/muon).

    Note: each iteration makes P(y y') y, a polynomial of the first y y' times the first y. So in float32 up to 5
    iterations of a wide matrix work on that small square, and only two products have y's size. In bfloat16, or after
    more iterations, the rounding would add up.
    """
    a, b, c = _QUINTIC
    tall = len(x) > x.shape[1]
    y = x.mT if tall else x
    y = y / torch.linalg.matrix_norm(y.float(), keepdim=True).clamp(min=1e-7)
    y = y.to(torch.bfloat16 if x.is_cuda and computes_bf16(x.device) else torch.float32).contiguous()
    if y.dtype == torch.float32 and 2 * len(y) <= y.shape[1] and 0 < steps <= 5:
        gram, product = y @ y.mT, None
        for i in range(steps):
            factor = torch.addmm(gram, gram, gram, beta=b, alpha=c)
            factor.diagonal().add_(a)
            product = factor if product is None else factor @ product
            gram = factor @ gram @ factor if i + 1 < steps else gram
        y = product @ y
    else:
        for _ in range(steps):
            gram = y @ y.mT
            y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return (y.mT if tall else y).to(x.dtype)


@checked
def muon(
    model: nn.Module,
    lr: NonNegative = 0.24,
    *,
    momentum: Share = 0.6,
    steps: Annotated[int, Range("Newton-Schulz iterations; 3 or 5 are usual", at_least=1, at_most=10)] = 3,
    rest: SGDSettings = SGDSettings(),
) -> Muon:
    """Muon for the filters; Nesterov SGD for biases, norm parameters and the head.

    Args:
        model: its parameters that require a gradient are trained.
        lr: rate of the filters (weights of two dimensions or more, except the head), 0 or more.
        momentum: share of the filters' velocity kept at each step, from 0 to below 1.
        steps: Newton-Schulz iterations, from 1 to 10; 3 for small networks, 5 in general.
        rest: settings for all other parameters.

    Raises InputError for a setting outside its range, or a model without filters.

    Saves: steps: reaches the same accuracy in fewer epochs than SGD.
    Costs: up to 4 * steps matrix products for each filter in each step, whatever the batch.
    Maths: v = momentum * v + g; w = sqrt(output channels) * w / |w| - lr * U V' of the SVD U S V' of g + momentum * v,
        approximately; |w| is the norm of the filter bank.
    Ref: Jordan et al. 2024 (kellerjordan.github.io/posts/muon); airbench94_muon for the normalised form.
    """
    linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
    head = linear[-1].weight if linear else None
    matrices, vectors = split(model)
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    filters = [p for p in matrices if p is not head]
    if not filters:
        raise InputError(f"muon: {type(model).__name__} has no trainable weights beside its head: use sgd or adamw")
    whitening = [p for p in vectors if "whiten" in names[p] and rest.whitening_epochs]
    biases = [p for p in vectors if not ("whiten" in names[p] and rest.whitening_epochs)]

    def sgd_group(params: list[Tensor], lr: float, decay: float) -> dict[str, Any]:
        weight_decay = decay / lr if lr else 0.0
        return {"params": params, "filters": False, "lr": lr, "weight_decay": weight_decay, "momentum": rest.momentum}

    decay = rest.weight_decay if rest.decay_all else 0.0
    groups = [
        {"params": filters, "filters": True},
        sgd_group(biases, rest.bias_lr, decay),
        {**sgd_group(whitening, rest.bias_lr, decay), "until": rest.whitening_epochs},
        sgd_group([p for p in matrices if p is head], rest.head_lr, rest.weight_decay),
    ]
    return Muon([g for g in groups if g["params"]], lr, momentum=momentum, steps=steps)
