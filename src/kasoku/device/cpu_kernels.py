"""Operations in bfloat16 that C code computes faster than torch on some processors."""

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from kasoku.core import Job, Stage, Technique, say
from kasoku.core.blocks import stays_in_place

_CAN, _PAYS = 1, 2  # what kasoku_conv_speed returns
_FEW, _SMALL = 64, 16  # channels on one side, or pixels along a side: with more of both oneDNN is as fast
_LAST = torch.channels_last


@functools.cache
def library() -> Any:
    """The C code; None where it was not built, or cannot run on this processor."""
    try:
        built = ctypes.CDLL(str(Path(__file__).with_name("_native.so")))  # see setup.py
        return built if built.kasoku_conv_speed() >= _CAN else None
    except (OSError, AttributeError):  # not built, or for another machine, or from other sources
        return None


def pays() -> bool:
    """Whether the C code is faster than torch's here: AVX-512 bf16, and no AMX."""
    return library() is not None and library().kasoku_conv_speed() >= _PAYS


@dataclass(frozen=True)
class CpuKernels(Technique, stage=Stage.COMPILE):
    """Computes weight gradients of convolutions, GELU and 2x2 max-pools by C code, on CPUs with AVX-512 bf16.

    Only in training, in bfloat16 (`Autocast`) with `ChannelsLast`, and not on processors with AMX, where oneDNN is
    faster. Layers stay torch's whose map is large and has many channels, those with groups or dilation, all whose
    gradients SavedMemory computes, and all beside Compile. Elsewhere it changes nothing.

    Saves: time.
    Costs: rounding differs from torch's: a weight gradient is a float32 sum of exact products, GELU is within 1e-6.
    """

    def apply(self, job: Job) -> None:
        """Replaces the forward of layers, until the job is closed."""
        if pays() and any(technique.compiles_model for technique in job.applied):
            say("CpuKernels: the kernels of compiled blocks are the compiler's: it does nothing")
            return
        for layer in job.model.modules() if pays() else ():
            forward = _FORWARDS.get(type(layer))
            if forward and not stays_in_place(layer) and "forward" not in vars(layer):
                job.patch(layer, "forward", MethodType(forward, layer))


def _trains_in_bf16(x: Tensor) -> bool:
    """Whether x is a bfloat16 map with channels last in the CPU's memory, and is part of a training step."""
    here = x.is_cpu and x.dtype is torch.bfloat16 and x.ndim == 4 and x.numel() > 0
    return here and torch.is_grad_enabled() and x.is_contiguous(memory_format=_LAST)


def _pointers(*tensors: Tensor) -> tuple[ctypes.c_void_p, ...]:
    return tuple(ctypes.c_void_p(x.data_ptr()) for x in tensors)


# ---- convolutions


def weight_gradient(x_NCHW: Tensor, dy_NCHW: Tensor, layer: nn.Conv2d) -> Tensor:
    """The gradient of a convolution's weight in float32, of its input and its output's gradient in bfloat16.

    The number of threads changes no bit. Raises MemoryError.
    """
    x_NCHW, dy_NCHW = (t.contiguous(memory_format=_LAST) for t in (x_NCHW, dy_NCHW))
    (n, channels_in, *size_in), (_, channels, *size) = x_NCHW.shape, dy_NCHW.shape
    window = (*layer.kernel_size, *layer.stride, *layer.padding)
    shape = (ctypes.c_int64 * 13)(n, *size_in, channels_in, *size, channels, *map(int, window))
    dw_OHWI = torch.empty(channels, *layer.kernel_size, channels_in)
    data = _pointers(x_NCHW, dy_NCHW, dw_OHWI)
    if not library().kasoku_conv_weight_gradient(shape, *data, torch.get_num_threads()):
        raise MemoryError("no memory for the weight gradient of a convolution")
    return dw_OHWI.permute(0, 3, 1, 2)


def suits(layer: nn.Conv2d, x_NCHW: Tensor) -> bool:
    """Whether the C code can compute a layer's weight gradient, and is faster."""
    plain = layer.groups == 1 and layer.dilation == (1, 1) and layer.padding_mode == "zeros"
    small = min(layer.in_channels, layer.out_channels) <= _FEW or x_NCHW.shape[3] <= _SMALL
    return plain and small and layer.kernel_size != (1, 1) and not isinstance(layer.padding, str)


def _conv(layer: nn.Conv2d, x_NCHW: Tensor) -> Tensor:
    weight = layer.weight
    half = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.bfloat16
    learns = weight.requires_grad and weight.dtype is torch.float32
    if half and learns and suits(layer, x_NCHW) and _trains_in_bf16(x_NCHW):
        out: Tensor = _Conv.apply(x_NCHW, weight, layer.bias, layer)  # type: ignore[no-untyped-call]
        return out
    return nn.Conv2d.forward(layer, x_NCHW)


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NCHW: Tensor, weight: Tensor, bias: Tensor | None, layer: nn.Conv2d) -> Tensor:
        half = weight.bfloat16()
        ctx.save_for_backward(x_NCHW, half)
        ctx.layer = layer
        return torch.conv2d(x_NCHW, half, None if bias is None else bias.bfloat16(), layer.stride, layer.padding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NCHW: Tensor) -> tuple[Tensor | None, ...]:
        (x_NCHW, weight), layer, dx, db = ctx.saved_tensors, ctx.layer, None, None
        if ctx.needs_input_grad[0]:
            window = layer.stride, layer.padding, layer.dilation
            mask = [True, False, False]
            dx, _, _ = torch.ops.aten.convolution_backward(
                dy_NCHW, x_NCHW, weight, None, *window, False, (0, 0), 1, mask
            )
        if ctx.needs_input_grad[2]:
            db = dy_NCHW.sum((0, 2, 3), dtype=torch.float32)
        return dx, weight_gradient(x_NCHW, dy_NCHW, layer), db, None


# ---- GELU


def _gelu(layer: nn.GELU, x: Tensor) -> Tensor:
    if layer.approximate == "none" and x.requires_grad and _trains_in_bf16(x):
        out: Tensor = _Gelu.apply(x)  # type: ignore[no-untyped-call]
        return out
    return nn.GELU.forward(layer, x)


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        out = torch.empty_like(x)
        library().kasoku_gelu(*_pointers(x), None, *_pointers(out), ctypes.c_int64(x.numel()), torch.get_num_threads())
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        dy = dy.contiguous(memory_format=_LAST)
        dx = torch.empty_like(x)
        library().kasoku_gelu(*_pointers(x, dy, dx), ctypes.c_int64(x.numel()), torch.get_num_threads())
        return dx


# ---- 2x2 max-pools


def _pool(layer: nn.MaxPool2d, x_NCHW: Tensor) -> Tensor:
    sizes = [value if isinstance(value, tuple) else (value, value) for value in (layer.kernel_size, layer.stride)]
    plain = sizes == [(2, 2), (2, 2)] and layer.padding in (0, (0, 0)) and layer.dilation in (1, (1, 1))
    whole = not layer.ceil_mode and not layer.return_indices and min(x_NCHW.shape[2:]) > 1
    if plain and whole and x_NCHW.requires_grad and _trains_in_bf16(x_NCHW):
        out: Tensor = _Pool.apply(x_NCHW)  # type: ignore[no-untyped-call]
        return out
    return nn.MaxPool2d.forward(layer, x_NCHW)  # type: ignore[no-any-return]


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
        _run_pool(dx_NCHW, dy_NCHW.contiguous(memory_format=_LAST), *ctx.saved_tensors, backward=True)
        return dx_NCHW


def _run_pool(big_NCHW: Tensor, small_NCHW: Tensor, places_NCHW: Tensor, *, backward: bool) -> None:
    n, channels, rows, columns = big_NCHW.shape
    shape = (ctypes.c_int64 * 4)(n, rows, columns, channels)
    maps = _pointers(big_NCHW, small_NCHW, places_NCHW)
    library().kasoku_pool(*maps, shape, int(backward), torch.get_num_threads())


_FORWARDS: dict[type[nn.Module], Any] = {nn.Conv2d: _conv, nn.GELU: _gelu, nn.MaxPool2d: _pool}
