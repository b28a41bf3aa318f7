"""What optimizers share: which parameters decay, and checks of their settings."""

from math import inf
from typing import Any

from torch import Tensor, nn

from kasoku.core import InputError


def split(model: nn.Module, *, decay_all: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    """The trainable parameters as (decayed, undecayed); biases and norm parameters (one dimension) do not decay.

    Nor do those that the model's own `no_weight_decay()` names, as timm's position embeddings.

    Raises:
        InputError: for a model without a trainable parameter.

    Ref: Goyal et al. 2017 (arXiv 1706.02677), 5.1: no weight decay on the parameters of BatchNorm.
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise InputError(f"{type(model).__name__} has no parameter with requires_grad=True: there is nothing to train")
    named: Any = getattr(model, "no_weight_decay", set)()
    decayed: list[Tensor] = [p for name, p in trainable.items() if decay_all or (p.ndim > 1 and name not in named)]
    undecayed: list[Tensor] = [p for name, p in trainable.items() if not decay_all and (p.ndim <= 1 or name in named)]
    return decayed, undecayed


def refuse_momentum_sgd(lr: float, momentum: float, *, nesterov: bool, weight_decay: float) -> None:
    """Raises InputError for settings that optimizers with momentum SGD cannot take."""
    refuse_outside(lr=(lr, 0, inf), momentum=(momentum, 0, 1), weight_decay=(weight_decay, 0, inf))
    if nesterov and momentum == 0:
        raise InputError("nesterov=true with momentum=0: set momentum above 0, such as 0.9, or nesterov=false")


def refuse_outside(**ranges: tuple[float, float, float]) -> None:
    """Raises InputError for the first setting outside its range: name=(value, minimum, exclusive maximum)."""
    for name, (value, low, high) in ranges.items():
        if not low <= value < high:
            limit = "" if high == inf else f" and below {high:g}"
            raise InputError(f"{name}={value:g}: must be at least {low:g}{limit}")
