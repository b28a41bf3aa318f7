"""Max-pooling that remembers the place of each maximum in 2 bits (windows of 2x2), or in a byte."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

PLACES = 256  # of a window, that a byte tells apart


class MaxPlaces(NamedTuple):
    """Where in its window each maximum was; `inner` and `inner_stride` are of what was pooled."""

    packed: Tensor
    inner: tuple[int, ...]
    inner_stride: tuple[int, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def pair(n: Any) -> tuple[int, int]:
    """A size as layers of torch give it, for rows and columns."""
    return (n, n) if isinstance(n, int) else (n[0], n[1])


def is_quarter(layer: Any, inner: tuple[int, ...]) -> bool:
    """Windows of 2x2 side by side, of which every one is whole or left out."""
    sizes = (pair(layer.kernel_size), pair(layer.stride), pair(layer.padding))
    return sizes == ((2, 2), (2, 2), (0, 0)) and (not layer.ceil_mode or not (inner[2] % 2 or inner[3] % 2))


def code_bytes(layer: Any, inner: tuple[int, ...], pooled: int) -> int:
    """Bytes of the code of so many maxima."""
    return -(-pooled // 4) if is_quarter(layer, inner) else pooled


def pool(layer: Any, x_NCHW: Tensor) -> tuple[Tensor, MaxPlaces]:
    """What the layer gives, and the code."""
    inner = tuple(x_NCHW.shape)
    if is_quarter(layer, inner):
        out, code = _pool_quarter(x_NCHW)
        packed = _pack(code)
    else:
        out, index = functional.max_pool2d(
            x_NCHW, layer.kernel_size, layer.stride, layer.padding, 1, layer.ceil_mode, return_indices=True
        )
        code = _place(layer, index, inner[3])
        packed = code.as_strided((code.numel(),), (1,))
    return out, MaxPlaces(packed, inner, x_NCHW.stride(), tuple(code.shape), code.stride())


def unpool(layer: Any, dy_NCHW: Tensor, code: MaxPlaces) -> Tensor:
    """The gradient of what was pooled; sums where windows overlap are taken in torch's order."""
    quarter = is_quarter(layer, code.inner)
    place = (_unpack(code) if quarter else code.packed).as_strided(code.shape, code.stride)
    dx = torch.empty_strided(code.inner, code.inner_stride, dtype=dy_NCHW.dtype, device=dy_NCHW.device)
    if not quarter or code.inner[2] % 2 or code.inner[3] % 2:
        dx.zero_()
    zero = dy_NCHW.new_zeros(())
    (rows, columns), (down, right), (top, left) = (pair(n) for n in (layer.kernel_size, layer.stride, layer.padding))
    for k in reversed(range(rows * columns)):
        (outer_h, inner_h), (outer_w, inner_w) = (
            _reach(code.shape[2], code.inner[2], k // columns - top, down),
            _reach(code.shape[3], code.inner[3], k % columns - left, right),
        )
        here = dx[:, :, inner_h, inner_w]
        mine = torch.where(place[:, :, outer_h, outer_w] == k, dy_NCHW[:, :, outer_h, outer_w], zero)
        if quarter:
            here.copy_(mine)
        else:
            here.add_(mine)
    return dx


def _pool_quarter(x_NCHW: Tensor) -> tuple[Tensor, Tensor]:
    h, w = x_NCHW.shape[2] // 2 * 2, x_NCHW.shape[3] // 2 * 2
    a, b, c, d = (x_NCHW[:, :, i:h:2, j:w:2] for i in (0, 1) for j in (0, 1))
    upper, lower = torch.maximum(a, b), torch.maximum(c, d)
    right_above, right_below = (b > a).view(torch.uint8), (d > c).view(torch.uint8)
    below = lower > upper
    return torch.maximum(upper, lower, out=upper), torch.where(below, right_below.bitwise_or_(2), right_above)


def _place(layer: Any, index: Tensor, width: int) -> Tensor:
    """The place within each window, of an index into the image."""
    index32 = index.int()
    row = torch.div(index32, width, rounding_mode="floor")
    column = index32 - row * width
    down, right = pair(layer.stride)
    top, left = pair(layer.padding)
    row -= _starts(index.shape[2], down, top, index.device)[:, None]
    column -= _starts(index.shape[3], right, left, index.device)
    return (row * pair(layer.kernel_size)[1] + column).to(torch.uint8)


def _starts(n: int, stride: int, padding: int, device: torch.device) -> Tensor:
    return torch.arange(n, dtype=torch.int32, device=device) * stride - padding


def _reach(outer: int, inner: int, offset: int, stride: int) -> tuple[slice, slice]:
    """Of the windows 0 to `outer` those whose place at `offset` lies within, and those places."""
    first = max(0, -(offset // stride))
    last = min(outer - 1, (inner - 1 - offset) // stride)
    if last < first:
        return slice(0, 0), slice(0, 0)
    return slice(first, last + 1), slice(first * stride + offset, last * stride + offset + 1, stride)


def _pack(code: Tensor) -> Tensor:
    """Four of them a byte: the quarters of the array over one another."""
    flat = code.as_strided((code.numel(),), (1,))
    if flat.numel() % 4:
        flat = functional.pad(flat, (0, -flat.numel() % 4))
    n = flat.numel() // 4
    packed = flat[:n].clone()
    for k in (1, 2, 3):
        packed |= flat[k * n : (k + 1) * n] << (2 * k)
    return packed


def _unpack(code: MaxPlaces) -> Tensor:
    n = code.packed.numel()
    flat = torch.empty(4 * n, dtype=torch.uint8, device=code.packed.device)
    for k in range(4):
        torch.bitwise_and(code.packed >> (2 * k), 3, out=flat[k * n : (k + 1) * n])
    return flat
