"""How each kind of operation is computed and differentiated, one at a time.

Note: the same kernels. Forward and backward of an operation are the calls that torch's own autograd makes, so the bits
are the same; what differs is when they are called and what is held meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kasoku.memory.graph import GraphNode, ValueShape
from kasoku.memory.pool import MaxPlaces, pair, pool, unpool

_aten = torch.ops.aten
_PARTS = 16  # in which a gradient is written over its input


@dataclass(frozen=True)
class Numerics:
    """What holds for all operations of a segment.

    Args:
        half: autocast computes convolutions in this type; None: no autocast.
        exact: what is computed again is computed by the same kernel, not by a faster one that rounds otherwise.
        bf16: what is held between forward and backward is held in bf16.
    """

    half: torch.dtype | None = None
    exact: bool = False
    bf16: bool = False


class NormStatistics(NamedTuple):
    """What a BatchNorm leaves for its backward."""

    mean: Tensor
    scale: Tensor  # 1 / sqrt(variance + eps); both empty where running statistics were used
    reserve: Tensor
    kernel: int
    steers: bool  # they are of the batch


def make(node: GraphNode, inputs: list[Tensor], *, how: Numerics, inplace: bool = False) -> tuple[Tensor, Any]:
    """The node's value for the first time, and what its backward needs beside values: statistics, or a code."""
    x = inputs[0]
    if node.op == "norm":
        return _norm(node.layer, x)
    if node.op == "pool":
        return pool(node.layer, x)
    return again(node, inputs, None, how=how, inplace=inplace), None


def again(node: GraphNode, inputs: list[Tensor], side: Any, *, how: Numerics, inplace: bool = False) -> Tensor:
    """The node's value once more; nothing in its layer changes."""
    x, layer = inputs[0], node.layer
    if node.op == "conv":
        weight, bias = _cast(layer.weight, how.half), layer.bias
        bias = bias if bias is None else _cast(bias, how.half)
        return functional.conv2d(
            _cast(x, how.half), weight, bias, layer.stride, layer.padding, layer.dilation, layer.groups
        )
    if node.op == "norm":
        return _norm_again(node, x, side, how.exact)
    if node.op == "relu":
        return x.relu_() if inplace else x.relu()
    if node.op == "add":
        inplace = inplace and torch.promote_types(x.dtype, inputs[1].dtype) is x.dtype
        return x.add_(inputs[1]) if inplace else x + inputs[1]
    if node.op == "pool":
        return functional.max_pool2d(x, layer.kernel_size, layer.stride, layer.padding, 1, layer.ceil_mode)
    return _other(layer, x)


def conv_gradients(
    node: GraphNode, dy: Tensor, x: Tensor, *, how: Numerics, data: bool
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Of a convolution: of its input where `data` says so, and of its weight and bias where they learn."""
    layer = node.layer
    learns = [p.requires_grad for p in node.params]
    bias = None if layer.bias is None else [layer.out_channels]
    stride, padding, dilation = (list(pair(n)) for n in (layer.stride, layer.padding, layer.dilation))
    dx, dw, db = _aten.convolution_backward(
        dy,
        _cast(x, how.half),
        _cast(layer.weight, how.half),
        bias,
        stride,
        padding,
        dilation,
        False,
        [0, 0],
        layer.groups,
        [data, learns[0], bias is not None and learns[-1]],
    )
    found = [dw, db][: len(learns)]
    return dx, [None if g is None else _cast(g, p.dtype) for g, p in zip(found, node.params, strict=True)]


def norm_gradients(
    node: GraphNode, dy: Tensor, x: Tensor, side: NormStatistics, *, inplace: bool = False
) -> tuple[Tensor, list[Tensor | None]]:
    """Of a BatchNorm: of its input (`inplace`: written over it), and of its weight and bias where they learn."""
    layer = node.layer
    learns = [p.requires_grad for p in node.params]
    wanted = [bool(learns) and learns[0], bool(learns) and learns[-1]]
    mask = [not inplace, *(one or (inplace and side.steers) for one in wanted)]
    dx, dw, db = _aten._batch_norm_impl_index_backward(
        0 if inplace else side.kernel,  # 0: torch's own, which leaves out what is not asked for
        x,
        dy,
        torch.ones_like(side.scale) if layer.weight is None and mask[1] else layer.weight,  # or CUDA gives no sums
        layer.running_mean,
        layer.running_var,
        side.mean,
        side.scale,
        side.steers,
        layer.eps,
        mask,
        side.reserve,
    )
    if inplace:
        dx = _norm_over(layer, dy, x, side, (dw, db))
    found = [g if one else None for g, one in zip((dw, db), wanted, strict=True)]
    return dx, found[: len(learns)]


def relu_gradient(dy: Tensor, out: Tensor, *, inplace: bool) -> Tensor:
    """Dy where the ReLU's output is above 0; not over dy where torch might lay it out otherwise (maps of one pixel)."""
    if inplace and dy.stride() == out.stride():
        grown: Tensor = _aten.threshold_backward.grad_input(dy, out, 0, grad_input=dy)
        return grown
    return _aten.threshold_backward(dy, out, 0)  # type: ignore[no-any-return]


def pool_gradient(node: GraphNode, dy: Tensor, code: MaxPlaces) -> Tensor:
    """The gradient of what was pooled."""
    return unpool(node.layer, dy, code)


def other_gradient(node: GraphNode, dy: Tensor, x: Tensor) -> Tensor:
    """By torch's autograd, of the layer alone."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        out = _other(node.layer, leaf)
    return torch.autograd.grad(out, leaf, dy)[0]


def wide_bytes(x: ValueShape) -> int:
    """What a gradient over a norm's input takes beside it: parts of both in fp32, if they are of fewer bits."""
    return 0 if x.dtype.itemsize >= 4 else 8 * -(-x.shape[0] // _PARTS) * torch.Size(x.shape[1:]).numel()


def _norm_over(layer: Any, dy: Tensor, x: Tensor, side: NormStatistics, sums: tuple[Tensor, Tensor]) -> Tensor:
    """A BatchNorm's gradient over its input: scale * (dy - mean of dy - y * mean of dy * y), y being x normed.

    Args:
        layer: the BatchNorm.
        dy: incoming gradient.
        x: what it read.
        side: its statistics.
        sums: of dy * y and of dy, over all but channels; not read with running statistics, of which dy knows nothing.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    one = side.scale if side.steers else (layer.running_var + layer.eps).rsqrt_()
    scale_C11 = (one if layer.weight is None else one * layer.weight).to(wide)[:, None, None]
    if not side.steers:
        for part, grown in zip(x.chunk(_PARTS), dy.chunk(_PARTS), strict=True):
            torch.mul(grown, scale_C11, out=part)
        return x
    count = x.numel() // x.shape[1]
    slope_C11, shift_C11 = (-scale_C11 / count * g.to(wide)[:, None, None] for g in (sums[0] * side.scale, sums[1]))
    mean_C11 = side.mean.to(wide)[:, None, None]
    for part, grown in zip(x.chunk(_PARTS), dy.chunk(_PARTS), strict=True):
        made = part.to(wide)
        torch.addcmul(shift_C11, made.sub_(mean_C11), slope_C11, out=made).addcmul_(grown, scale_C11)
        if made.dtype is not part.dtype:
            part.copy_(made)
    return x


def _other(layer: Any, x: Tensor) -> Tensor:
    """The layer itself, not what stands in for it; one that writes over its input gets a copy, and gives its bits."""
    made: Tensor = type(layer).forward(layer, x.clone() if getattr(layer, "inplace", False) else x)
    return made


def _cast(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x if dtype is None or x.dtype is dtype else x.to(dtype)


def _norm(layer: Any, x: Tensor) -> tuple[Tensor, NormStatistics]:
    steers = layer.training or layer.running_mean is None
    share = 0.0 if layer.momentum is None else layer.momentum
    if layer.training and layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if layer.momentum is None:
            share = 1.0 / float(layer.num_batches_tracked)
    settings = (steers, share, layer.eps, torch.backends.cudnn.enabled)
    out, mean, scale, reserve, kernel = _aten._batch_norm_impl_index(
        x, layer.weight, layer.bias, layer.running_mean, layer.running_var, *settings
    )
    return out, NormStatistics(mean, scale, reserve, kernel, steers)


def _norm_again(node: GraphNode, x: Tensor, side: NormStatistics, exact: bool) -> Tensor:
    layer = node.layer
    if not side.steers:
        mean, variance = layer.running_mean, layer.running_var
    elif exact:
        out: Tensor = _aten._batch_norm_impl_index(
            x, layer.weight, layer.bias, None, None, True, 0.0, layer.eps, torch.backends.cudnn.enabled
        )[0]
        return out
    else:
        mean, variance = side.mean, side.scale.pow(-2).sub_(layer.eps)
    return functional.batch_norm(x, mean, variance, layer.weight, layer.bias, False, 0.0, layer.eps)
