"""BatchNorm over groups of images, on one device or across ranks, with a callback for the statistics.

Note: patching. `steered` replaces the `forward` of a BatchNorm module and reads its settings from the attribute `steer`
of the module: the size of a group, the ranks, and a callback for each group's statistics. A deep copy of the module
sees that its `steer` belongs to another module, and runs torch's own forward. `SavedMemory`, which runs the layers of a
segment itself, keeps its own `forward` in place and obeys `steer`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from kasoku.core import Comm, InputError, Trace
from kasoku.core.blocks import stays_in_place, steering, values_of_group

Take = Callable[[Tensor, Tensor, int], None]  # (mean_C, variance_C (biased), values a channel) of one group


@dataclass(frozen=True)
class Steer:
    """How a BatchNorm module groups images in training."""

    norm: Any
    images: int  # that share statistics; 0: all of one forward; if more than those, a group spans several ranks
    comm: Comm
    take: Take  # called with a group's statistics, in float32 or the buffers' type, and this rank's values a channel
    trace: Trace  # records the time spent waiting for other ranks
    alone: bool = False  # groups stay within one forward of one rank, and may be smaller

    def install(self, patch: Callable[[nn.Module, str, object], object]) -> None:
        """Steers the module, by a function that sets an attribute."""
        patch(self.norm, "steer", self)
        if not stays_in_place(self.norm):
            # torch.compile does not see a mode that is set around what it compiles
            forward = steered if _is_torchs(self.norm) else torch.compiler.disable(steered)  # type: ignore[no-untyped-call]
            patch(self.norm, "forward", MethodType(forward, self.norm))

    def __deepcopy__(self, memo: dict[int, object]) -> "Steer":
        return self

    def forward(self, x: Tensor) -> Tensor:
        """The module's output; its running statistics do not change."""
        norm, sizes = self.norm, self.sizes(len(x))
        if not sizes:
            return cast(Tensor, _Across.apply(x, norm.weight, norm.bias, self))  # type: ignore[no-untyped-call]
        groups = [_group(norm, part, self.take) for part in torch.split(x, sizes)]
        return torch.cat(groups) if len(groups) > 1 else groups[0]

    def sizes(self, images: int) -> list[int]:
        """The images of each group of a forward, in order; empty if a group spans ranks."""
        group = min(self.images or images, images) if self.alone else self.images or images
        if group > images:
            self._ranks(images)  # refuses
            return []
        sizes, left = [group] * (images // group), images % group
        if left and not self.alone:
            raise InputError(f"norm_batch={group}: a forward has {images} images, not a multiple of norm_batch")
        if left == 1:  # one image alone may have no variance
            sizes[-1] += 1
        elif left:
            sizes.append(left)
        return sizes

    def _ranks(self, images: int) -> int:
        """The number of ranks that a group spans."""
        size, (ranks, left) = self.comm.size, divmod(self.images, images)
        given = f"norm_batch={self.images}: a forward has {images} images"
        if size == 1:
            raise InputError(f"{given}, and a group cannot span several of them: lower norm_batch or accumulate")
        if left or size % ranks:
            raise InputError(f"{given} on each of {size} ranks: a group is part of it, or it times a divisor of {size}")
        return ranks

    def across(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The output, the mean and 1 / sqrt(variance + eps) of a group that spans ranks. Collective."""
        exact = torch.promote_types(x.dtype, torch.float32)
        variance_C, mean_C = torch.var_mean(x.to(exact), dim=_but_channels(x), correction=0)
        both_R2C = self._of_group(torch.stack([mean_C, variance_C]), len(x))
        mean_C = both_R2C[:, 0].mean(0)
        variance_C = both_R2C[:, 1].mean(0) + both_R2C[:, 0].var(0, correction=0)
        self.take(mean_C, variance_C, x.numel() // x.shape[1])  # of this rank: the others count their own
        scale_C = (variance_C + self.norm.eps).rsqrt()
        return self.affine(x, mean_C, scale_C), mean_C, scale_C

    def affine(self, x: Tensor, mean_C: Tensor, scale_C: Tensor) -> Tensor:
        """The output of `across` again."""
        normal = (x - _wide(mean_C, x)).mul_(_wide(scale_C, x))
        if self.norm.weight is not None:
            normal.mul_(_wide(self.norm.weight, x))
        if self.norm.bias is not None:
            normal.add_(_wide(self.norm.bias, x))
        return normal.to(x.dtype)

    def gradients(self, dy: Tensor, x: Tensor, mean_C: Tensor, scale_C: Tensor) -> tuple[Tensor, Any, Any]:
        """The gradients of the input, weight and bias of `across`. Collective."""
        dy, weight = dy.to(scale_C.dtype), self.norm.weight
        normal = (x - _wide(mean_C, x)).mul_(_wide(scale_C, x))
        sums_2C = torch.stack([dy.sum(_but_channels(x)), (dy * normal).sum(_but_channels(x))])
        n = x.numel() // x.shape[1] * self._ranks(len(x))
        all_2C = self._of_group(sums_2C, len(x)).sum(0) / n
        dx = (dy - _wide(all_2C[0], x)).sub_(normal.mul_(_wide(all_2C[1], x))).mul_(_wide(scale_C, x))
        db_C = None if self.norm.bias is None else sums_2C[0].to(self.norm.bias.dtype)
        if weight is None:
            return dx.to(x.dtype), None, db_C
        return dx.mul_(_wide(weight, x)).to(x.dtype), sums_2C[1].to(weight.dtype), db_C

    def _of_group(self, x: Tensor, images: int) -> Tensor:
        """Gathers x from the ranks of this rank's group, in rank order along a new first dimension."""
        comm, ranks = self.comm, self._ranks(images)
        every = x.new_empty((comm.size, *x.shape))
        work = comm.all_gather(every, x.contiguous())
        with self.trace.span("wait", "BatchNorm", bytes=every.nbytes):
            work.wait()
        first = comm.rank // ranks * ranks
        return every[first : first + ranks]


def norms(model: nn.Module) -> list[_BatchNorm]:
    """The model's BatchNorm modules that keep running statistics, in order of definition."""
    return [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]


def steered(norm: Any, x: Tensor) -> Tensor:
    """The forward of a steered BatchNorm module."""
    steer = steering(norm)
    if steer is None or _is_torchs(norm):
        return cast(Tensor, type(norm).forward(norm, x) if steer is None else steer.forward(x))
    with _InOwnForward(steer) as grouped:
        out = type(norm).forward(norm, x)
    if not grouped.called:
        wanted = "a BatchNorm whose forward calls torch's batch_norm is wanted"
        raise InputError(f"norm_batch, or several ranks: {type(norm).__name__} cannot group images: {wanted}")
    return cast(Tensor, out)


def _is_torchs(norm: nn.Module) -> bool:
    """Whether its forward is torch's, and does no more than to normalise."""
    return str(type(norm).forward.__module__).startswith("torch.")


class _InOwnForward(TorchFunctionMode):
    """Groups the images of a BatchNorm whose own forward does more than torch's: that of timm activates too."""

    def __init__(self, steer: Steer) -> None:
        super().__init__()
        self.steer, self.called = steer, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.batch_norm:
            self.called = True
            return self.steer.forward(args[0])
        if func is Tensor.add_ and args[0] is self.steer.norm.num_batches_tracked:
            return args[0]  # the technique that steers it counts
        return func(*args, **(kwargs or {}))


def _group(norm: Any, x: Tensor, take: Take) -> Tensor:
    n = values_of_group(x)
    mean_C, variance_C = (torch.zeros_like(norm.running_mean) for _ in range(2))
    out = functional.batch_norm(x, mean_C, variance_C, norm.weight, norm.bias, True, 1.0, norm.eps)
    take(mean_C, variance_C * ((n - 1) / n), n)  # torch's running variance is the unbiased one
    return out


class _Across(torch.autograd.Function):
    """BatchNorm of a group on neighbouring ranks, each with the same number of images."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, steer: Steer) -> Tensor:
        out, mean_C, scale_C = steer.across(x)
        ctx.save_for_backward(x, weight, mean_C, scale_C)
        ctx.steer = steer
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, _, mean_C, scale_C = ctx.saved_tensors
        return (*ctx.steer.gradients(dy, x, mean_C, scale_C), None)


def _but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.ndim)]


def _wide(x_C: Tensor, like: Tensor) -> Tensor:
    return x_C.view(1, -1, *[1] * (like.ndim - 2))
