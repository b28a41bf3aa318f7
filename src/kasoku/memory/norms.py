"""BatchNorm in a segment: its output, its output again, and its gradients, for each group of images that share
statistics. All images of a forward are one group, unless another technique steers the module (`VirtualRanks`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional

from kasoku.core.blocks import steering, values_of_group
from kasoku.core.torch_internals import batch_norm, batch_norm_backward
from kasoku.memory.graph import GraphNode

IN_PLACE_PARTS = 16  # in which a gradient is written over its input


class NormStatistics(NamedTuple):
    """The results of a group's forward that its backward reads."""

    images: int
    mean: Tensor  # empty where running statistics were used
    scale: Tensor  # 1 / sqrt(variance + eps); empty where running statistics were used
    reserve: Tensor
    kernel: int
    of_batch: bool
    across: Any = None  # the `Steer` of a group that spans ranks


def group_sizes(layer: Any, images: int) -> list[int]:
    """The images of each group that shares statistics in a forward; empty if a group spans ranks."""
    steer = steering(layer)
    return [images] if steer is None else cast(list[int], steer.sizes(images))


def compute(node: GraphNode, x: Tensor) -> tuple[Tensor, list[NormStatistics]]:
    """The output, and the statistics of each group."""
    layer, steer, groups = node.layer, steering(node.layer), list[NormStatistics]()
    sizes = group_sizes(layer, len(x))
    if not sizes:
        out, mean, scale = steer.across(x)
        return out, [NormStatistics(len(x), mean, scale, mean.new_empty(0), 0, True, steer)]
    of_batch, momentum = node.uses_batch_statistics, 0.0 if layer.momentum is None else layer.momentum
    running = (layer.running_mean, layer.running_var)
    if steer is None and layer.training and layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if layer.momentum is None:
            momentum = 1.0 / float(layer.num_batches_tracked)

    def group(part: Tensor, _: int) -> Tensor:
        n = values_of_group(part) if of_batch else 0
        own = running if steer is None else tuple(torch.zeros_like(t) for t in running)
        settings = (of_batch, momentum if steer is None else 1.0, layer.eps, torch.backends.cudnn.enabled)
        out, mean, scale, reserve, kernel = batch_norm(part, layer.weight, layer.bias, *own, *settings)
        if steer is not None:
            steer.take(own[0], own[1] * ((n - 1) / n), n)  # torch's running variance is the unbiased one
        groups.append(NormStatistics(len(part), mean, scale, reserve, kernel, of_batch))
        return cast(Tensor, out)

    return _by_group(group, sizes, x), groups


def recompute(node: GraphNode, x: Tensor, groups: list[NormStatistics], *, exact: bool) -> Tensor:
    """The output once more; `exact`: by the same kernel."""
    layer = node.layer

    def group(part: Tensor, i: int) -> Tensor:
        statistics = groups[i]
        if statistics.across is not None:
            return cast(Tensor, statistics.across.affine(part, statistics.mean, statistics.scale))
        if statistics.of_batch and exact:
            settings = (None, None, True, 0.0, layer.eps, torch.backends.cudnn.enabled)
            return cast(Tensor, batch_norm(part, layer.weight, layer.bias, *settings)[0])
        mean, variance = layer.running_mean, layer.running_var
        if statistics.of_batch:
            mean, variance = statistics.mean, statistics.scale.pow(-2).sub_(layer.eps)
        return functional.batch_norm(part, mean, variance, layer.weight, layer.bias, False, 0.0, layer.eps)

    return _by_group(group, [statistics.images for statistics in groups], x)


def gradients(
    node: GraphNode, dy: Tensor, x: Tensor, groups: list[NormStatistics], *, inplace: bool = False
) -> tuple[Tensor, list[Tensor | None]]:
    """Gradients of the input (`inplace`: written over it, unless groups span ranks), and of the weights that learn."""
    of_weights: list[Tensor | None] = [None] * len(node.params)
    if len(groups) == 1:
        return _gradients(node, dy, x, groups[0], inplace=inplace)
    dx, end = x if inplace else torch.empty_like(x), len(x)
    for statistics in reversed(groups):  # in the order in which autograd adds them up
        part = slice(end - statistics.images, end)
        part_dx, new = _gradients(node, dy[part], x[part], statistics, inplace=inplace)
        if not inplace:
            dx[part].copy_(part_dx)
        of_weights = [b if a is None or b is None else a.add_(b) for a, b in zip(of_weights, new, strict=True)]
        end = part.start
    return dx, of_weights


def _by_group(f: Callable[[Tensor, int], Tensor], sizes: list[int], x: Tensor) -> Tensor:
    """f(images, number) of each group, in one tensor."""
    if len(sizes) == 1:
        return f(x, 0)
    out, start = torch.empty_like(x), 0
    for i, size in enumerate(sizes):
        out[start : start + size].copy_(f(x[start : start + size], i))
        start += size
    return out


def _gradients(
    node: GraphNode, dy: Tensor, x: Tensor, statistics: NormStatistics, *, inplace: bool
) -> tuple[Tensor, list[Tensor | None]]:
    """Of one group."""
    layer = node.layer
    wanted = [*(p.requires_grad for p in node.params), False, False][:2]
    if statistics.across is not None:
        dx, dw, db = statistics.across.gradients(dy, x, statistics.mean, statistics.scale)
    else:
        mask = [not inplace, *(want or (inplace and statistics.of_batch) for want in wanted)]
        kernel = 0 if inplace else statistics.kernel  # 0: torch's own, which leaves out what the mask does not request
        weight = layer.weight
        if weight is None and mask[1]:
            weight = torch.ones_like(statistics.scale)  # or CUDA sums nothing
        of_norm = (layer.running_mean, layer.running_var, statistics.mean, statistics.scale, statistics.of_batch)
        dx, dw, db = batch_norm_backward(kernel, x, dy, weight, *of_norm, layer.eps, mask, statistics.reserve)
        if inplace:
            dx = _gradient_in_place(layer, dy, x, statistics, (dw, db))
    return dx, [g if p.requires_grad else None for p, g in zip(node.params, (dw, db), strict=False)]


def _gradient_in_place(
    layer: Any, dy: Tensor, x: Tensor, statistics: NormStatistics, sums: tuple[Tensor, Tensor]
) -> Tensor:
    """A BatchNorm's gradient over its input: scale * (dy - mean of dy - y * mean of dy * y), y being x normed.

    `sums`: of dy * y and of dy, over all but channels; not read with running statistics, which depend on no input.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    scale = statistics.scale if statistics.of_batch else (layer.running_var + layer.eps).rsqrt_()
    scale_C11 = (scale if layer.weight is None else scale * layer.weight).to(wide)[:, None, None]
    parts = zip(x.chunk(IN_PLACE_PARTS), dy.chunk(IN_PLACE_PARTS), strict=True)
    if not statistics.of_batch:
        for x_part, dy_part in parts:
            torch.mul(dy_part, scale_C11, out=x_part)
        return x
    count = x.numel() // x.shape[1]
    sums = (sums[0] * statistics.scale, sums[1])
    slope_C11, shift_C11 = (-scale_C11 / count * s.to(wide)[:, None, None] for s in sums)
    mean_C11 = statistics.mean.to(wide)[:, None, None]
    for x_part, dy_part in parts:
        dx_part = x_part.to(wide)
        torch.addcmul(shift_C11, dx_part.sub_(mean_C11), slope_C11, out=dx_part).addcmul_(dy_part, scale_C11)
        if dx_part.dtype is not x_part.dtype:
            x_part.copy_(dx_part)
    return x
