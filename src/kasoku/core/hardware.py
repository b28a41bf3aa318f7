"""What hardware and kernels want, where more than one room asks."""

from typing import Any

import torch
from torch import Tensor


def computes_bf16(device: torch.device) -> bool:
    """True where the hardware computes bfloat16: CUDA from 8.0, x86 with avx512_bf16 or AMX."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type == "cpu":
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return False


def laid_out_like(p: Tensor, x: Any) -> Any:
    """The tensor x with the strides of p, when it has p's shape; anything else as it is.

    torch's fused optimizers on CPU read parameter, gradient and state as flat memory without a look at their strides.
    """
    if not isinstance(x, Tensor) or x.shape != p.shape or x.stride() == p.stride():
        return x
    return torch.empty_strided(p.shape, p.stride(), dtype=x.dtype, device=x.device).copy_(x)
