"""SGD with momentum, in torch's fused form where the device has it."""

import torch
from torch import nn

from kasoku.optim.param_groups import decay_groups, has_fused, refuse_momentum_sgd


def sgd(
    model: nn.Module,
    lr: float = 0.1,
    *,
    momentum: float = 0.9,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    decay_all: bool = False,
) -> torch.optim.SGD:
    """SGD with (Nesterov) momentum, without weight decay on biases and norm parameters.

    Args:
        model: its parameters that require a gradient are trained.
        lr: learning rate for the mean gradient; a `Rate` technique multiplies it by its schedule.
        momentum: share of the velocity kept at each step.
        nesterov: look one step ahead along the velocity.
        weight_decay: added to the gradient as weight_decay * w.
        decay_all: decay biases and norm parameters as well.

    Raises:
        InputError: for a setting outside its range.

    Saves: time: one kernel for all tensors where torch has it.
    Maths: v = momentum * v + g + weight_decay * w; w -= lr * v (Nesterov: lr * (g + weight_decay * w + momentum * v)).
    Ref: Sutskever et al. 2013; torch.optim.SGD.
    """
    refuse_momentum_sgd(lr, momentum, nesterov=nesterov, weight_decay=weight_decay)
    groups = decay_groups(model, weight_decay, decay_all=decay_all)
    return torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=nesterov, fused=has_fused(model))
