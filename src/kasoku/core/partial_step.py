"""The step of an optimizer on some of its parameters."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from kasoku.core.errors import InputError
from kasoku.core.torch_internals import remove_step_hooks

_SET_BY_TORCH = ("_need_device_dtype_check_for_fused",)  # by torch's own step() on itself; no state of the rule
Hyper = list[dict[str, Any]]


def partial_step(optimizer: Optimizer, params: Collection[Tensor], hyper: Hyper | None = None) -> list[Tensor]:
    """The optimizer's own step on `params`, without its step hooks; returns these parameters in its order.

    A twin of the optimizer, which shares its state, steps on parameter groups that hold these parameters only.

    Args:
        optimizer: keeps its state in `state[p]`.
        params: parameters with their gradients in `p.grad`.
        hyper: the settings of each parameter group; None: as they are now.

    Raises:
        InputError: for a rule with state outside `state[p]`, which a partial step would change for all parameters.
    """
    twin = object.__new__(type(optimizer))
    twin.__dict__.update({k: v for k, v in optimizer.__dict__.items() if k != "step"})
    remove_step_hooks(twin)
    twin.param_groups = [
        {**(group if hyper is None else hyper[i]), "params": [p for p in group["params"] if p in params]}
        for i, group in enumerate(optimizer.param_groups)
    ]
    before = {k: v for k, v in twin.__dict__.items() if k not in ("state", "param_groups")}
    type(optimizer).step(twin)
    changed = [k for k, v in twin.__dict__.items() if k in before and before[k] is not v and k not in _SET_BY_TORCH]
    groups = zip(twin.param_groups, optimizer.param_groups if hyper is None else hyper, strict=True)
    changed += [f"param_groups[{k!r}]" for g, h in groups for k in g if k != "params" and g[k] is not h[k]]
    if changed or not all(isinstance(key, Tensor) for key in optimizer.state):
        what = f"self.{changed[0]}" if changed else "state of its own"
        raise InputError(
            f"optimizer {type(optimizer).__name__} keeps {what} outside state[p], so a part of the model cannot be "
            "updated alone: use a rule that keeps its state per parameter, or leave the technique out"
        )
    return [p for group in optimizer.param_groups for p in group["params"] if p in params]
