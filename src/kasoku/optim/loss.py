"""The loss of a classifier."""

from typing import Any

from torch import Tensor
from torch.nn import functional

from kasoku.core import InputError, checked
from kasoku.optim.param_groups import Share


def logits_of(outputs_NK: Any) -> Tensor:
    """A network's outputs in float32. Raises InputError unless they are one tensor (N, K)."""
    if not isinstance(outputs_NK, Tensor) or outputs_NK.ndim != 2:
        got = f"{list(outputs_NK.shape)}" if isinstance(outputs_NK, Tensor) else f"a {type(outputs_NK).__name__}"
        raise InputError(f"the model returns {got}: one tensor of logits, (N, K), is wanted")
    return outputs_NK.float()


@checked
def cross_entropy(outputs_NK: Tensor, labels_N: Tensor, *, smoothing: Share = 0.0) -> Tensor:
    """Mean cross-entropy of logits, in float32, with label smoothing.

    Args:
        outputs_NK: logits.
        labels_N: class indices, or probabilities (N, K).
        smoothing: share of the label spread evenly over all classes, from 0 to below 1.

    Ref: Szegedy et al. 2016 (arXiv 1512.00567), 7.
    """
    return functional.cross_entropy(logits_of(outputs_NK), labels_N, label_smoothing=smoothing)
