"""Operations in bfloat16 that C code computes faster than torch on some processors."""

import ctypes
import functools
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from kasoku.core import Job, Stage, Technique, say
from kasoku.core.blocks import stays_in_place

_FEW, _SMALL = 64, 16  # channels, pixels along a side: see `CpuKernels`
_MANY, _TILES, _FULL = 24, 128, 0.6  # channels, tiles, share of a tile: with less, Winograd's algorithm is no faster
_THREADS = 8  # at most; of 15 images or more, a weight gradient is at least 8 units of work
_NAMES = ("has_amx", "threads", "conv_weight_gradient", "conv3x3", "gelu", "pool")
_LAST = torch.channels_last
_uses_torch = threading.local()  # has `now` within `torch_kernels`


@functools.cache
def library() -> Any:
    """The C code; None where it was not built, or cannot run on this processor."""
    with suppress(OSError, AttributeError):  # not built, or for another machine, or from other sources
        built = ctypes.CDLL(str(Path(__file__).with_name("_native.so")))  # see setup.py
        return built if all(hasattr(built, f"kasoku_{name}") for name in _NAMES) and built.kasoku_can_run() else None
    return None


def pays(threads: int) -> bool:
    """Whether the C code is faster than torch's here: AVX-512 bf16, no AMX, and not more threads than it is for."""
    built = library()
    if built is None or built.kasoku_has_amx() or threads > _THREADS:
        return False
    return threads == 1 or built.kasoku_threads(2) == 2


@contextmanager
def torch_kernels() -> Iterator[None]:
    """Meanwhile forwards of this thread use torch's kernels, whose operators torch can count."""
    _uses_torch.now = True
    try:
        yield
    finally:
        _uses_torch.now = False


@dataclass(frozen=True)
class CpuKernels(Technique, stage=Stage.COMPILE):
    """Computes convolutions, GELU and 2x2 max-pools by C code, on CPUs with AVX-512 bf16.

    Only in training, in bfloat16 (`Autocast`) with `ChannelsLast`. It changes nothing on processors with AMX, where
    oneDNN is faster, beside Compile, in layers whose gradients SavedMemory computes, and with more than 8 threads.
    Convolutions of 3x3 with stride 1, at least 24 channels on both sides, and at least 512 outputs of a channel in a
    batch get outputs and input gradients by Winograd's algorithm F(2x2, 3x3). Weight gradients are computed in C if the
    input is at most 16 pixels wide, or has or gives at most 64 channels. Windows of 1x1, groups, dilation, a padding
    that is a word or not of zeros, and frozen weights stay torch's.

    Saves: time.
    Costs: other rounding than torch's: a weight gradient is a float32 sum of exact products; Winograd's algorithm
        rounds sums of four inputs, so maps far from zero lose more digits, and an infinity becomes NaN; GELU is within
        1e-6 before it is rounded. A layer takes up to two dozen megabytes of sums (more for large weights or windows),
        copies of some images for each thread, and 32 bytes for each 3x3 window. No second derivatives.
    """

    def apply(self, job: Job) -> None:
        """Replaces the forward of layers, until the job is closed."""
        if library() is None or not pays(torch.get_num_threads()):
            return
        if any(technique.compiles_model for technique in job.applied):
            say("CpuKernels: the kernels of compiled blocks are the compiler's: it does nothing", job.comm.rank)
            return
        for layer in job.model.modules():
            forward = _FORWARDS.get(type(layer))
            if forward and not stays_in_place(layer) and "forward" not in vars(layer):
                job.patch(layer, "forward", MethodType(forward, layer))


def _trains_in_bf16(x: Tensor) -> bool:
    """Whether x is a bfloat16 map with channels last in the CPU's memory, and is part of a training step."""
    plain = type(x) is Tensor and x.is_cpu and x.dtype is torch.bfloat16 and x.ndim == 4 and x.numel() > 0
    traced = torch.compiler.is_compiling() or getattr(_uses_torch, "now", False)
    return plain and not traced and torch.is_grad_enabled() and x.is_contiguous(memory_format=_LAST)


def _pointers(*tensors: Tensor | None) -> tuple[ctypes.c_void_p, ...]:
    return tuple(ctypes.c_void_p(None if x is None else x.data_ptr()) for x in tensors)


def weight_gradient(x_NCHW: Tensor, dy_NCHW: Tensor, layer: nn.Conv2d) -> Tensor:
    """The gradient of a convolution's weight in float32, of its input and its output's gradient in bfloat16.

    The number of threads changes no bit. Raises MemoryError.
    """
    x_NCHW, dy_NCHW = (t.contiguous(memory_format=_LAST) for t in (x_NCHW, dy_NCHW))
    (n, channels_in, *size_in), (_, channels, *size) = x_NCHW.shape, dy_NCHW.shape
    kernel = layer.weight.shape[2:]
    sizes = (n, *size_in, channels_in, *size, channels, *kernel, *layer.stride, *map(int, layer.padding))
    shape = (ctypes.c_int64 * 13)(*sizes)
    dw_OHWI = torch.empty(channels, *kernel, channels_in)
    if not library().kasoku_conv_weight_gradient(shape, *_pointers(x_NCHW, dy_NCHW, dw_OHWI), torch.get_num_threads()):
        raise MemoryError("no memory for the weight gradient of a convolution")
    return dw_OHWI.permute(0, 3, 1, 2)


def is_plain(layer: nn.Conv2d) -> bool:
    """Whether a layer has no groups, no dilation, no padding but zeros, and no window of 1x1."""
    plain = layer.groups == 1 and layer.dilation == (1, 1) and layer.padding_mode == "zeros"
    return plain and layer.weight.shape[2:] != (1, 1) and not isinstance(layer.padding, str)


def suits_dw(layer: nn.Conv2d, x_NCHW: Tensor) -> bool:
    """Whether the weight gradient of a plain layer is faster in C."""
    return min(layer.weight.shape[:2]) <= _FEW or x_NCHW.shape[3] <= _SMALL


def suits_winograd(layer: nn.Conv2d, x_NCHW: Tensor) -> bool:
    """Whether Winograd's F(2x2, 3x3) is faster for a plain layer: its tiles of 2x2 outputs are many and full."""
    plain = layer.weight.shape[2:] == (3, 3) and layer.stride == (1, 1) and layer.padding in ((0, 0), (1, 1), (2, 2))
    if not plain or min(layer.weight.shape[:2]) < _MANY:
        return False
    sides = [side + 2 * int(layer.padding[0]) - 2 for side in x_NCHW.shape[2:]]
    tiles = [(side + 1) // 2 for side in sides]
    return len(x_NCHW) * math.prod(tiles) >= _TILES and math.prod(sides) > _FULL * 4 * math.prod(tiles)


def winograd(x_NCHW: Tensor, weight: Tensor, bias: Tensor | None, pad: int, *, dx: bool = False) -> Tensor:
    """A convolution of 3x3 with stride 1 in bfloat16; `dx`: its input's gradient, where x is its output's gradient.

    The error is about 4e-3 of the norm of y (torch's: 2e-3), and more for maps far from zero. The number of threads
    changes no bit. Raises MemoryError.
    """
    x_NCHW, weight = (t.contiguous(memory_format=_LAST) for t in (x_NCHW, weight))
    bias = None if bias is None else bias.float().contiguous()
    (n, channels_in, *size_in), pad = x_NCHW.shape, 2 - pad if dx else pad
    channels, size = weight.shape[1 if dx else 0], [side + 2 * pad - 2 for side in size_in]
    y_NCHW = torch.empty(n, channels, *size, dtype=torch.bfloat16, memory_format=_LAST)
    shape = (ctypes.c_int64 * 8)(n, *size_in, channels_in, *size, channels, pad)
    pointers = _pointers(x_NCHW, weight, bias, y_NCHW)
    if not library().kasoku_conv3x3(shape, *pointers, int(dx), torch.get_num_threads()):
        raise MemoryError("no memory for a convolution")
    return y_NCHW


def _conv(layer: nn.Conv2d, input: Tensor) -> Tensor:
    weight = layer.weight
    autocast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.bfloat16
    learns = torch.is_grad_enabled() and weight.requires_grad and weight.dtype is torch.float32
    faster = is_plain(layer) and input.ndim == 4 and (suits_dw(layer, input) or suits_winograd(layer, input))
    if autocast and learns and input.is_cpu and faster:
        half = input.bfloat16()  # as autocast would
        if _trains_in_bf16(half):
            return cast(Tensor, _Conv.apply(half, weight, layer.bias, layer))  # type: ignore[no-untyped-call]
    return nn.Conv2d.forward(layer, input)


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NCHW: Tensor, weight: Tensor, bias: Tensor | None, layer: nn.Conv2d) -> Tensor:
        half = weight.bfloat16()
        ctx.save_for_backward(x_NCHW, half)
        ctx.layer, ctx.by_winograd, ctx.c_dw = layer, suits_winograd(layer, x_NCHW), suits_dw(layer, x_NCHW)
        if ctx.by_winograd:
            return winograd(x_NCHW, half, bias, int(layer.padding[0]))
        return torch.conv2d(x_NCHW, half, None if bias is None else bias.bfloat16(), layer.stride, layer.padding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NCHW: Tensor) -> tuple[Tensor | None, ...]:
        (x_NCHW, weight), layer, (wants_dx, wants_dw, wants_db, _) = ctx.saved_tensors, ctx.layer, ctx.needs_input_grad
        dx = dw = db = None
        if any(mask := [wants_dx and not ctx.by_winograd, wants_dw and not ctx.c_dw, False]):
            window = layer.stride, layer.padding, layer.dilation, False, (0, 0), 1
            dx, dw, _ = torch.ops.aten.convolution_backward(dy_NCHW, x_NCHW, weight, None, *window, mask)
        if wants_dx and ctx.by_winograd:
            dx = winograd(dy_NCHW, weight, None, int(layer.padding[0]), dx=True)
        if wants_dw and ctx.c_dw:
            dw = weight_gradient(x_NCHW, dy_NCHW, layer)
        if wants_db:
            db = dy_NCHW.sum((0, 2, 3), dtype=torch.float32)
        return dx, dw, db, None


def _gelu(layer: nn.GELU, input: Tensor) -> Tensor:
    if layer.approximate == "none" and input.requires_grad and _trains_in_bf16(input):
        return cast(Tensor, _Gelu.apply(input))  # type: ignore[no-untyped-call]
    return nn.GELU.forward(layer, input)


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        out = torch.empty_like(x)
        library().kasoku_gelu(*_pointers(x, None, out), ctypes.c_int64(x.numel()), torch.get_num_threads())
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        x, dy = (t.contiguous(memory_format=_LAST) for t in (*ctx.saved_tensors, dy))
        dx = torch.empty_like(x)
        library().kasoku_gelu(*_pointers(x, dy, dx), ctypes.c_int64(x.numel()), torch.get_num_threads())
        return dx


def _pool(layer: nn.MaxPool2d, input: Tensor) -> Tensor:
    sizes = [value if isinstance(value, tuple) else (value, value) for value in (layer.kernel_size, layer.stride)]
    plain = sizes == [(2, 2), (2, 2)] and layer.padding in (0, (0, 0)) and layer.dilation in (1, (1, 1))
    whole = not layer.ceil_mode and not layer.return_indices and min(input.shape[-2:]) > 1
    if plain and whole and input.requires_grad and _trains_in_bf16(input):
        return cast(Tensor, _Pool.apply(input))  # type: ignore[no-untyped-call]
    return nn.MaxPool2d.forward(layer, input)  # type: ignore[no-any-return]


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NCHW: Tensor) -> Tensor:
        n, channels, rows, columns = x_NCHW.shape
        out = torch.empty(n, channels, rows // 2, columns // 2, dtype=x_NCHW.dtype, memory_format=_LAST)
        places = torch.empty_like(out, dtype=torch.uint8)
        _run_pool(x_NCHW, out, places, backward=False)
        ctx.save_for_backward(places)
        ctx.shape = x_NCHW.shape
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NCHW: Tensor) -> Tensor:
        dx_NCHW = torch.empty(ctx.shape, dtype=torch.bfloat16, memory_format=_LAST)
        small = (t.contiguous(memory_format=_LAST) for t in (dy_NCHW, *ctx.saved_tensors))
        _run_pool(dx_NCHW, *small, backward=True)
        return dx_NCHW


def _run_pool(big_NCHW: Tensor, small_NCHW: Tensor, places_NCHW: Tensor, *, backward: bool) -> None:
    n, channels, rows, columns = big_NCHW.shape
    shape = (ctypes.c_int64 * 4)(n, rows, columns, channels)
    library().kasoku_pool(*_pointers(big_NCHW, small_NCHW, places_NCHW), shape, int(backward), torch.get_num_threads())


_FORWARDS: dict[type[nn.Module], Any] = {nn.Conv2d: _conv, nn.GELU: _gelu, nn.MaxPool2d: _pool}
for _forward in _FORWARDS.values():
    _forward.__name__ = "forward"  # by which a pickled model finds torch's own again
