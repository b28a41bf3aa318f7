"""BatchNorm over groups of images, on one device or across ranks, with a callback for the statistics.

Note: patching. `steered` replaces the `forward` of a BatchNorm module and reads its settings from the attribute `steer`
of the module: the size of a group, the ranks, and a callback for each group's statistics. A deep copy of the module
sees that its `steer` belongs to another module, and runs torch's own forward.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from kasoku.core import Comm, InputError, Trace

Take = Callable[[Tensor, Tensor, int], None]  # (mean_C, variance_C (biased), values a channel) of one group


@dataclass(frozen=True)
class Steer:
    """How a BatchNorm module groups images in training.

    Attributes:
        images: number that share statistics; 0: all of one forward; if more than those, a group spans several ranks.
        take: called with each group's statistics, in float32 or the buffers' type.
        alone: groups stay within one forward of one rank, and may be smaller.
        trace: records the time spent waiting for other ranks.
    """

    norm: nn.Module
    images: int
    comm: Comm
    take: Take
    alone: bool = False
    trace: Trace | None = None

    def install(self, patch: Callable[[nn.Module, str, object], object]) -> None:
        """Steers the module, by a function that sets an attribute."""
        patch(self.norm, "steer", self)
        patch(self.norm, "forward", MethodType(steered, self.norm))

    def __deepcopy__(self, memo: dict[int, object]) -> Steer:
        return self


def norms(model: nn.Module) -> list[_BatchNorm]:
    """The model's BatchNorm modules that keep running statistics, in order of definition."""
    return [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]


def steered(norm: Any, x: Tensor) -> Tensor:
    """The forward of a steered BatchNorm module; its running statistics do not change."""
    steer: Steer = norm.steer
    if not norm.training or steer.norm is not norm:
        return cast(Tensor, type(norm).forward(norm, x))
    images = steer.images or len(x)
    if steer.alone:
        images = min(images, len(x))
    if images > len(x):
        size, (ranks, left) = steer.comm.size, divmod(images, len(x))
        given = f"norm_batch={images}: a forward has {len(x)} images"
        if size == 1:
            raise InputError(f"{given}, and a group cannot span several of them: lower norm_batch or accumulate")
        if left or size % ranks:
            raise InputError(f"{given} on each of {size} ranks: a group is part of it, or it times a divisor of {size}")
        out, mean_C, variance_C = _Across.apply(  # type: ignore[no-untyped-call]
            x, norm.weight, norm.bias, (norm.eps, steer.comm, ranks, steer.trace)
        )
        steer.take(mean_C, variance_C, images * (x.numel() // (x.shape[0] * x.shape[1])))
        return cast(Tensor, out)
    if images == len(x):
        return _group(norm, x, steer.take)
    sizes = [images] * (len(x) // images)
    left = len(x) % images
    if left and not steer.alone:
        raise InputError(f"norm_batch={images}: a forward has {len(x)} images, not a multiple of norm_batch")
    if left == 1:  # one image alone may have no variance
        sizes[-1] += 1
    elif left:
        sizes.append(left)
    return torch.cat([_group(norm, part, steer.take) for part in torch.split(x, sizes)])


def _group(norm: Any, x: Tensor, take: Take) -> Tensor:
    n = x.numel() // x.shape[1]
    if n < 2:
        raise InputError("BatchNorm of one image of one pixel has no variance: at least 2 images must share statistics")
    mean_C, variance_C = (torch.zeros_like(norm.running_mean) for _ in range(2))
    out = functional.batch_norm(x, mean_C, variance_C, norm.weight, norm.bias, True, 1.0, norm.eps)
    take(mean_C, variance_C * ((n - 1) / n), n)  # torch's running variance is the unbiased one
    return out


class _Across(torch.autograd.Function):
    """BatchNorm of a group on `ranks` neighbouring ranks, each with the same number of images."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, how: tuple[float, Comm, int, Trace | None]
    ) -> tuple[Tensor, Tensor, Tensor]:
        eps, comm, ranks, trace = how
        dims = [0, *range(2, x.ndim)]
        variance_C, mean_C = torch.var_mean(x.float(), dim=dims, correction=0)
        both_R2C = _of_group(torch.stack([mean_C, variance_C]), comm, ranks, trace)
        mean_C = both_R2C[:, 0].mean(0)
        variance_C = both_R2C[:, 1].mean(0) + both_R2C[:, 0].var(0, correction=0)
        scale_C = (variance_C + eps).rsqrt()
        normal = (x.float() - _wide(mean_C, x)) * _wide(scale_C, x)
        ctx.save_for_backward(x, weight, mean_C, scale_C)
        ctx.comm, ctx.ranks, ctx.trace = comm, ranks, trace
        ctx.mark_non_differentiable(mean_C, variance_C)
        if weight is not None:
            normal = normal * _wide(weight, x)
        if bias is not None:
            normal = normal + _wide(bias, x)
        return normal.to(x.dtype), mean_C, variance_C

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x, weight, mean_C, scale_C = ctx.saved_tensors
        dy = grads[0].float()
        dims = [0, *range(2, x.ndim)]
        normal = (x.float() - _wide(mean_C, x)) * _wide(scale_C, x)
        sums_2C = torch.stack([dy.sum(dims), (dy * normal).sum(dims)])
        n = x.numel() // x.shape[1] * ctx.ranks
        all_2C = _of_group(sums_2C, ctx.comm, ctx.ranks, ctx.trace).sum(0) / n
        dx = (dy - _wide(all_2C[0], x) - normal * _wide(all_2C[1], x)) * _wide(scale_C, x)
        if weight is None:
            return dx.to(x.dtype), None, None, None
        dx = dx * _wide(weight, x)
        return dx.to(x.dtype), sums_2C[1].to(weight.dtype), sums_2C[0].to(weight.dtype), None


def _of_group(x: Tensor, comm: Comm, ranks: int, trace: Trace | None) -> Tensor:
    """Gathers x from the ranks of this rank's group, in rank order along a new first dimension."""
    every = x.new_empty((comm.size, *x.shape))
    work = comm.all_gather(every, x.contiguous())
    with trace.span("wait", "BatchNorm", bytes=every.nbytes) if trace else nullcontext():
        work.wait()
    first = comm.rank // ranks * ranks
    return every[first : first + ranks]


def _wide(x_C: Tensor, like: Tensor) -> Tensor:
    return x_C.view(1, -1, *[1] * (like.ndim - 2))
