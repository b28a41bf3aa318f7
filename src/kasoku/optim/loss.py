"""The loss of a classifier."""

from torch import Tensor
from torch.nn import functional

from kasoku.optim.param_groups import refuse_outside


def cross_entropy(outputs_NK: Tensor, labels_N: Tensor, *, smoothing: float = 0.0) -> Tensor:
    """Mean cross-entropy of logits, in float32, with label smoothing.

    Args:
        outputs_NK: logits.
        labels_N: class indices, or probabilities (N, K) where images were mixed.
        smoothing: share of the label spread evenly over all classes, from 0 to below 1.

    Raises:
        InputError: for a smoothing outside 0 to below 1.

    Ref: Szegedy et al. 2016 (arXiv 1512.00567), 7.
    """
    refuse_outside(smoothing=(smoothing, 0, 1))
    return functional.cross_entropy(outputs_NK.float(), labels_N, label_smoothing=smoothing)
