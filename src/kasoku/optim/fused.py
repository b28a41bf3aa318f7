"""SGD with momentum and AdamW, in torch's fused form where the device has it."""

from typing import Annotated, Any

import torch
from torch import nn

from kasoku.core import Range, checked
from kasoku.optim.param_groups import NonNegative, Share, refuse_nesterov, split


@checked
def sgd(
    model: nn.Module,
    lr: NonNegative = 0.1,
    *,
    momentum: Share = 0.9,
    nesterov: bool = False,
    weight_decay: NonNegative = 0.0,
) -> torch.optim.SGD:
    """SGD with (Nesterov) momentum, without weight decay on biases and norm parameters.

    Args:
        model: its parameters that require a gradient are trained.
        lr: learning rate for the mean gradient, 0 or more; a `Rate` technique multiplies it by its schedule.
        momentum: share of the velocity kept at each step, from 0 to below 1.
        nesterov: look one step ahead along the velocity, which needs momentum.
        weight_decay: added to the gradient as weight_decay * w, 0 or more.

    Saves: time: one kernel for all tensors where torch has it.
    Maths: v = momentum * v + g + weight_decay * w; w -= lr * v (Nesterov: lr * (g + weight_decay * w + momentum * v)).
    Ref: Sutskever et al. 2013; torch.optim.SGD.
    """
    refuse_nesterov(nesterov, momentum)
    groups = _decay_groups(model, weight_decay)
    return torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=nesterov, fused=_has_fused(model))


@checked
def adamw(
    model: nn.Module,
    lr: NonNegative = 1e-3,
    *,
    betas: Annotated[tuple[float, float], Range(at_least=0, below=1)] = (0.9, 0.999),
    weight_decay: NonNegative = 0.01,
) -> torch.optim.AdamW:
    """AdamW without weight decay on biases and norm parameters.

    Args:
        model: its parameters that require a gradient are trained.
        lr: learning rate, 0 or more; a `Rate` technique multiplies it by its schedule.
        betas: shares that a step keeps of the running means of the gradient and of its square, from 0 to below 1.
        weight_decay: decoupled: w shrinks by lr * weight_decay * w; 0 or more.

    Saves: time: one kernel for all tensors where torch has it.
    Costs: two state tensors for each parameter, where SGD has one.
    Ref: Loshchilov and Hutter 2019 (arXiv 1711.05101); torch.optim.AdamW.
    """
    groups = _decay_groups(model, weight_decay)
    return torch.optim.AdamW(groups, lr=lr, betas=(betas[0], betas[1]), fused=_has_fused(model))


def _decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups for a torch optimizer: the decayed ones first; one group if none decays."""
    decayed, undecayed = split(model)
    if weight_decay == 0:
        decayed, undecayed = [p for p in model.parameters() if p.requires_grad], []
    groups = ({"params": decayed, "weight_decay": weight_decay}, {"params": undecayed, "weight_decay": 0.0})
    return [group for group in groups if group["params"]]


def _has_fused(model: nn.Module) -> bool:
    trainable = [p for p in model.parameters() if p.requires_grad]
    return all(p.device.type in ("cpu", "cuda", "mps") and p.is_floating_point() for p in trainable)
