"""How good a model is: top-1, top-5 and loss over a loader, with test-time averaging where it is asked for."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from kasoku.core import Batch

Views = Literal["plain", "mirror", "crops"]


@dataclass(frozen=True)
class Scores:
    """Fractions from 0 to 1, the mean cross-entropy, and the number of images they are of."""

    top1: float
    top5: float
    loss: float
    images: int


def evaluate(model: Callable[[Tensor], Tensor], loader: Iterable[Batch], views: Views = "plain") -> Scores:
    """Scores of a model that is in eval mode already (`with job.evaluation() as model`).

    Args:
        model: x_NCHW -> logits_NK.
        loader: one pass over the test images.
        views: see `averaged`.
    """
    totals: Tensor | None = None
    images = 0
    for x_NCHW, y_N in loader:
        part = tally(averaged(model, x_NCHW, views), y_N)
        totals = part if totals is None else totals + part
        images += len(y_N)
    if totals is None:
        return Scores(0.0, 0.0, float("nan"), 0)
    top1, top5, loss = (totals / images).tolist()  # the one time the host waits for the device
    return Scores(top1, top5, loss, images)


def tally(logits_NK: Tensor, y_N: Tensor) -> Tensor:
    """Sums over a batch, on the device: right at first guess, among the first five, cross-entropy."""
    best_N5 = logits_NK.topk(min(5, logits_NK.shape[1]), dim=1).indices
    hits_N5 = best_N5 == y_N[:, None]
    loss = nn.functional.cross_entropy(logits_NK.float(), y_N, reduction="sum")
    exact = torch.float32 if loss.device.type == "mps" else torch.float64  # MPS has no float64
    return torch.stack([hits_N5[:, 0].sum().to(exact), hits_N5.sum().to(exact), loss.to(exact)])


def averaged(model: Callable[[Tensor], Tensor], x_NCHW: Tensor, views: Views) -> Tensor:
    """Logits averaged over views of the same images.

    plain: as they are. mirror: and mirrored. crops: and shifted by one pixel both ways along the diagonal, each also
    mirrored; the shifted ones together weigh as much as the unshifted (6 passes). Ref: Jordan 2024 (arXiv 2404.00498).
    """
    return torch.stack([model(view).float() * weight for weight, view in _views(x_NCHW, views)]).sum(0)


def _views(x_NCHW: Tensor, views: Views) -> Iterator[tuple[float, Tensor]]:
    if views == "plain":
        yield 1.0, x_NCHW
        return
    whole = 0.5 if views == "crops" else 1.0
    shifted = []
    if views == "crops":
        height, width = x_NCHW.shape[2:]
        padded = nn.functional.pad(x_NCHW, (1, 1, 1, 1), mode="reflect")
        shifted = [padded[:, :, :height, :width], padded[:, :, 2:, 2:]]
    weights = [whole] + [(1 - whole) / 2] * len(shifted)
    for weight, view in zip(weights, [x_NCHW, *shifted], strict=True):
        yield weight / 2, view
        yield weight / 2, view.flip(3)
