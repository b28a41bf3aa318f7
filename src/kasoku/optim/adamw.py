"""AdamW, in torch's fused form where the device has it."""

import torch
from torch import nn

from kasoku.optim.param_groups import decay_groups, has_fused, refuse_outside


def adamw(
    model: nn.Module,
    lr: float = 1e-3,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.01,
    decay_all: bool = False,
) -> torch.optim.AdamW:
    """AdamW without weight decay on biases and norm parameters.

    Args:
        model: its parameters that require a gradient are trained.
        lr: learning rate; a `Rate` technique multiplies it by its schedule.
        betas: shares that a step keeps of the running means of the gradient and of its square.
        weight_decay: decoupled: w shrinks by lr * weight_decay * w.
        decay_all: decay biases and norm parameters as well.

    Raises:
        InputError: for a setting outside its range.

    Saves: time: one kernel for all tensors where torch has it.
    Costs: two state tensors for each parameter, where SGD has one.
    Ref: Loshchilov and Hutter 2019 (arXiv 1711.05101); torch.optim.AdamW.
    """
    inf = float("inf")
    refuse_outside(lr=(lr, 0, inf), weight_decay=(weight_decay, 0, inf))
    refuse_outside(**{f"betas[{i}]": (beta, 0.0, 1.0) for i, beta in enumerate(betas)})
    groups = decay_groups(model, weight_decay, decay_all=decay_all)
    return torch.optim.AdamW(groups, lr=lr, betas=(betas[0], betas[1]), fused=has_fused(model))
