"""How each kind of operation is computed and differentiated, one at a time.

Note: the same kernels. Forward and backward of an operation are the calls that torch's own autograd makes, so the bits
are the same; only the time of the calls and the tensors held between them differ.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional

from kasoku.core.blocks import steering, values_of_group
from kasoku.core.torch_internals import batch_norm, batch_norm_backward
from kasoku.memory.graph import GraphNode, Instruction, pair

IN_PLACE_PARTS = 16  # in which the gradient of a norm is written over its input
_aten = torch.ops.aten


@dataclass(frozen=True)
class Numerics:
    """The precision of all operations of a segment."""

    half: torch.dtype | None = None  # the type in which autocast computes convolutions; None: no autocast
    exact: bool = False  # recomputation uses the same kernel as forward, not a faster one with another rounding


class MaxPositions(NamedTuple):
    """The position of each maximum in its window: 2 bits each for windows of 2x2, else a byte."""

    packed: Tensor
    inner: Tensor  # the max-pool's input as a meta tensor
    stride: tuple[int, ...]  # of the positions


def compute(node: GraphNode, inputs: list[Tensor], extra: Any, *, how: Numerics, inplace: bool) -> tuple[Tensor, Any]:
    """The node's value, and what its backward needs besides values: statistics of its groups, MaxPositions or None.

    `extra`: of an earlier time. The value is then computed once more, and the layer does not change.
    """
    x, layer = inputs[0], node.layer
    if node.op == "pool":
        return pool(layer, x) if extra is None else (_run_layer(layer, x), extra)
    if node.op == "norm":
        return compute_norm(node, x) if extra is None else (recompute_norm(node, x, extra, exact=how.exact), extra)
    if node.op == "conv":
        x, weight, bias = (_cast(t, how.half) for t in (x, layer.weight, layer.bias))
        out = functional.conv2d(x, weight, bias, layer.stride, layer.padding, layer.dilation, layer.groups)
    elif node.op == "relu":
        out = x.relu_() if inplace else x.relu()
    elif node.op == "add":
        inplace = inplace and torch.promote_types(x.dtype, inputs[1].dtype) is x.dtype
        out = x.add_(inputs[1]) if inplace else x + inputs[1]
    else:
        out = _run_layer(layer, x)
    return out, None


def gradients(
    node: GraphNode, step: Instruction, dy: Tensor, value: Tensor | None, extra: Any, how: Numerics
) -> tuple[list[Any], list[Tensor | None]]:
    """Gradients of a node's inputs, and of its weights that learn.

    `step` says whether the first input needs a gradient, and whether it is written over another tensor; `value`: that
    the node's backward reads; `extra`: from `compute`.
    """
    layer = node.layer
    if node.op == "add":
        return [dy, dy], []
    if node.op == "pool":
        return [unpool(layer, dy, extra)], []
    x = cast(Tensor, value)
    if node.op == "relu":  # x is its output; not over dy if torch may choose another layout (maps of one pixel)
        if step.inplace and dy.stride() == x.stride():
            return [_aten.threshold_backward.grad_input(dy, x, 0, grad_input=dy)], []
        return [_aten.threshold_backward(dy, x, 0)], []
    if node.op == "other":
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            out = _run_layer(layer, leaf)
        return [torch.autograd.grad(out, leaf, dy)[0]], []
    if node.op == "norm":
        dx, of_weights = norm_gradients(node, dy, x, extra, inplace=step.inplace)
        return [dx], of_weights
    learns = [p.requires_grad for p in node.params]
    bias = None if layer.bias is None else [layer.out_channels]
    mask = [bool(step.joins[0]), learns[0], bias is not None and learns[-1]]
    window = (list(pair(n)) for n in (layer.stride, layer.padding, layer.dilation))
    x, weight = _cast(x, how.half), _cast(layer.weight, how.half)
    dx, dw, db = _aten.convolution_backward(dy, x, weight, bias, *window, False, [0, 0], layer.groups, mask)
    of_weights = [dw, db][: len(learns)]
    return [dx], [_cast(g, p.dtype) for g, p in zip(of_weights, node.params, strict=True)]


def _run_layer(layer: Any, x: Tensor) -> Tensor:
    """The layer's own forward; one that works in place gets a copy, with the same bits."""
    return cast(Tensor, type(layer).forward(layer, x.clone() if getattr(layer, "inplace", False) else x))


def _cast(x: Any, dtype: torch.dtype | None) -> Any:
    return x if x is None or dtype is None or x.dtype is dtype else x.to(dtype)


# ---- max-pools


def has_2_bit_positions(layer: Any, inner: tuple[int, ...]) -> bool:
    """Whether the windows are 2x2, side by side, and each is whole or left out."""
    sizes = (pair(layer.kernel_size), pair(layer.stride), pair(layer.padding))
    return sizes == ((2, 2), (2, 2), (0, 0)) and (not layer.ceil_mode or not (inner[2] % 2 or inner[3] % 2))


def pool(layer: Any, x_NCHW: Tensor) -> tuple[Tensor, MaxPositions]:
    """The max-pool's output, and the position of each maximum."""
    if has_2_bit_positions(layer, x_NCHW.shape):
        out, positions = _pool_2x2(x_NCHW)
        flat = positions.as_strided((positions.numel(),), (1,))
        if flat.numel() % 4:
            flat = functional.pad(flat, (0, -flat.numel() % 4))
        n = flat.numel() // 4
        packed = flat[:n].clone()
        for k in (1, 2, 3):  # four positions a byte: the quarters of the array, each shifted by two bits more
            packed |= flat[k * n : (k + 1) * n] << (2 * k)
    else:
        out, index = functional.max_pool2d(
            x_NCHW, layer.kernel_size, layer.stride, layer.padding, 1, layer.ceil_mode, return_indices=True
        )
        index32 = index.int()
        row = index32.div(x_NCHW.shape[3], rounding_mode="floor")
        column = index32.sub_(row * x_NCHW.shape[3])
        first_row, first_column = _first_pixels(layer, out, torch.int32)
        row.sub_(first_row).mul_(pair(layer.kernel_size)[1]).add_(column.sub_(first_column))
        positions = row.to(torch.uint8)
        packed = positions.as_strided((positions.numel(),), (1,))
    return out, MaxPositions(packed, torch.empty_like(x_NCHW, device="meta"), positions.stride())


def unpool(layer: Any, dy_NCHW: Tensor, positions: MaxPositions) -> Tensor:
    """The gradient of a max-pool's input, by torch's kernel, which reads the place of each maximum in its image."""
    inner, packed = positions.inner, positions.packed
    if has_2_bit_positions(layer, inner.shape):
        packed = torch.cat([(packed >> shift).bitwise_and_(3) for shift in (0, 2, 4, 6)])
    position_NCHW, columns = packed.as_strided(dy_NCHW.shape, positions.stride), pair(layer.kernel_size)[1]
    first_row, first_column = _first_pixels(layer, dy_NCHW, torch.int64)
    index = torch.div(position_NCHW, columns, rounding_mode="floor") + first_row
    index.mul_(inner.shape[3]).add_(position_NCHW.remainder(columns)).add_(first_column)
    dx = torch.empty_like(inner, dtype=dy_NCHW.dtype, device=dy_NCHW.device)
    windows = (pair(n) for n in (layer.kernel_size, layer.stride, layer.padding, layer.dilation))
    backward = _aten.max_pool2d_with_indices_backward.grad_input  # reads no values of its second argument, the input
    return cast(Tensor, backward(dy_NCHW, dx, *windows, layer.ceil_mode, index, grad_input=dx))


def _first_pixels(layer: Any, out_NCHW: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The row and the column in the image at which each window begins."""
    (down, right), (top, left) = pair(layer.stride), pair(layer.padding)
    rows, columns = (torch.arange(n, dtype=dtype, device=out_NCHW.device) for n in out_NCHW.shape[2:])
    return (rows * down - top)[:, None], columns * right - left


def _pool_2x2(x_NCHW: Tensor) -> tuple[Tensor, Tensor]:
    h, w = x_NCHW.shape[2] // 2 * 2, x_NCHW.shape[3] // 2 * 2
    a, b, c, d = (x_NCHW[:, :, i:h:2, j:w:2] for i in (0, 1) for j in (0, 1))
    upper, lower = torch.maximum(a, b), torch.maximum(c, d)
    right_above, right_below = (b > a).view(torch.uint8), (d > c).view(torch.uint8)
    below = lower > upper
    return torch.maximum(upper, lower, out=upper), torch.where(below, right_below.bitwise_or_(2), right_above)


# ---- BatchNorm, for each group of images that share statistics: all of a forward, unless `VirtualRanks` steers it


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


def compute_norm(node: GraphNode, x: Tensor) -> tuple[Tensor, list[NormStatistics]]:
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


def recompute_norm(node: GraphNode, x: Tensor, groups: list[NormStatistics], *, exact: bool) -> Tensor:
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


def norm_gradients(
    node: GraphNode, dy: Tensor, x: Tensor, groups: list[NormStatistics], *, inplace: bool = False
) -> tuple[Tensor, list[Tensor | None]]:
    """Gradients of the input (`inplace`: written over it, unless groups span ranks), and of the weights that learn."""
    of_weights: list[Tensor | None] = [None] * len(node.params)
    if len(groups) == 1:
        return _group_gradients(node, dy, x, groups[0], inplace=inplace)
    dx, end = x if inplace else torch.empty_like(x), len(x)
    for statistics in reversed(groups):  # in the order in which autograd adds them up
        part = slice(end - statistics.images, end)
        part_dx, new = _group_gradients(node, dy[part], x[part], statistics, inplace=inplace)
        if not inplace:
            dx[part].copy_(part_dx)
        of_weights = [b if a is None or b is None else a.add_(b) for a, b in zip(of_weights, new, strict=True)]
        end = part.start
    return dx, of_weights


def _by_group(f: Callable[[Tensor, int], Tensor], sizes: list[int], x: Tensor) -> Tensor:
    """f(images, number) of each group, in one tensor."""
    if len(sizes) == 1:
        return f(x, 0)
    out = torch.empty_like(x)
    for i, (out_part, x_part) in enumerate(zip(torch.split(out, sizes), torch.split(x, sizes), strict=True)):
        out_part.copy_(f(x_part, i))
    return out


def _group_gradients(
    node: GraphNode, dy: Tensor, x: Tensor, statistics: NormStatistics, *, inplace: bool
) -> tuple[Tensor, list[Tensor | None]]:
    layer = node.layer
    wanted = [*(p.requires_grad for p in node.params), False, False][:2]
    if statistics.across is not None:
        dx, dw, db = statistics.across.gradients(dy, x, statistics.mean, statistics.scale)
    else:
        mask = [not inplace, *(want or (inplace and statistics.of_batch) for want in wanted)]
        kernel = 0 if inplace else statistics.kernel  # 0: torch's own, which leaves out what the mask does not request
        ones = layer.weight is None and mask[1]  # or CUDA sums nothing
        weight = torch.ones_like(statistics.scale) if ones else layer.weight
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
