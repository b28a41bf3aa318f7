"""The gradient noise scale: the number of images in a gradient beyond which more images add little."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor


@dataclass(frozen=True)
class NoiseEstimate:
    """An estimate of the gradient of all images, from gradients of parts of a batch.

    Args:
        signal: estimate of |G|^2, the squared length of the whole gradient; may fall below 0 by chance.
        trace: estimate of tr(Sigma), the variance of one image's gradient, summed over all parameters.

    Maths: a mean over B images has E|G_B|^2 = |G|^2 + tr(Sigma) / B. Two sizes, small s and big b, give
        |G|^2 = (b |G_b|^2 - s |G_s|^2) / (b - s) and tr(Sigma) = (|G_s|^2 - |G_b|^2) / (1/s - 1/b), both
        unbiased. Their ratio is not, so each is averaged on its own first.
    Ref: McCandlish et al. 2018 (arXiv 1812.06162), appendix A.1.
    """

    signal: float
    trace: float

    @property
    def scale(self) -> float:
        """tr(Sigma) / |G|^2, in images; infinite if noise hides the signal."""
        return max(0.0, self.trace) / self.signal if self.signal > 0 else math.inf


def mean(noises: Sequence[NoiseEstimate | None]) -> NoiseEstimate | None:
    """The mean of the finite estimates; None if there is none."""
    finite = [n for n in noises if n and math.isfinite(n.signal + n.trace)]
    return NoiseEstimate(fmean(n.signal for n in finite), fmean(n.trace for n in finite)) if finite else None


def noise_of_parts(params: Sequence[Tensor], backwards: Iterable[int]) -> NoiseEstimate | None:
    """The estimate from the gradients of equal parts of a batch; None with fewer than two parts.

    Args:
        params: the parameters; their gradients are cleared after each part.
        backwards: makes the gradients of a part, each of the mean loss of its images, and yields how many they are.

    Costs: a copy of the gradients.
    """
    sums: dict[Tensor, Tensor] = {}
    squared: list[Tensor] = []  # length of each part's gradient
    small = 0  # images of a part
    for images in backwards:
        small = images
        grads = {p: p.grad.detach() for p in params if p.grad is not None}
        for p, grad in grads.items():
            sums[p] = sums[p].add_(grad) if p in sums else grad.clone()
            p.grad = None
        if grads:
            squared.append(_squared_length(grads.values()))
    count = len(squared)
    if count < 2:
        return None
    big = small * count
    small_squared = torch.stack(squared).mean().item()
    big_squared = _squared_length(sums.values()).item() / count**2
    signal = (big * big_squared - small * small_squared) / (big - small)
    return NoiseEstimate(signal, (small_squared - big_squared) / (1 / small - 1 / big))


def _squared_length(grads: Iterable[Tensor]) -> Tensor:
    return torch.stack([grad.float().square().sum() for grad in grads]).sum()
