"""What optimizers share: which parameters decay, and the ranges of their settings."""

from math import inf
from typing import Annotated, Any

from torch import Tensor, nn

from kasoku.core import InputError, Range

NonNegative = Annotated[float, Range(at_least=0, below=inf)]
Share = Annotated[float, Range(at_least=0, below=1)]


def split(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """The trainable parameters as (decayed, undecayed); biases and norm parameters (one dimension) do not decay.

    Nor do those that the model's own `no_weight_decay()` names, as timm's position embeddings.

    Raises InputError for a model without a trainable parameter.

    Ref: Goyal et al. 2017 (arXiv 1706.02677), 5.1: no weight decay on the parameters of BatchNorm.
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise InputError(f"{type(model).__name__} has no parameter with requires_grad=True: there is nothing to train")
    named: Any = getattr(model, "no_weight_decay", set)()
    decayed: list[Tensor] = [p for name, p in trainable.items() if p.ndim > 1 and name not in named]
    undecayed: list[Tensor] = [p for name, p in trainable.items() if p.ndim <= 1 or name in named]
    return decayed, undecayed


def refuse_nesterov(nesterov: bool, momentum: float) -> None:
    """Raises InputError for Nesterov's look-ahead without momentum."""
    if nesterov and momentum == 0:
        raise InputError("nesterov=true with momentum=0: set momentum above 0, such as 0.9, or nesterov=false")
