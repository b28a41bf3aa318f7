"""Half precision where it is safe: torch.autocast around the model's forward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kasoku.core import InputError, Job, Stage, Technique

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Autocast(Technique):
    """Computes convolutions and matrix products in half precision; weights, sums and outputs stay float32.

    Args:
        dtype: "bf16"; or "fp16" where the device has no bf16 (V100, T4), together with LossScale.

    Saves: time and memory: twice or more the arithmetic, half the bytes of activations.
    Costs: rounding to 8 (bf16) or 11 (fp16) bits inside a layer.
    Ref: Micikevicius et al. 2018 (arXiv 1710.03740); torch.autocast.
    """

    stage: ClassVar[Stage] = Stage.COMPILE

    dtype: Literal["bf16", "fp16"] = "bf16"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InputError(f'dtype="{self.dtype}": "bf16" or "fp16"')

    def apply(self, job: Job) -> None:
        kind = next((p.device.type for p in job.model.parameters()), "cpu")
        # A partial of the bound method, no closure: a deep copy of the model then runs its own weights.
        forward = functools.partial(_half, job.model.forward, kind, DTYPES[self.dtype])
        job.patch(job.model, "forward", forward)


def _half(forward: Callable[..., Any], kind: str, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
    with torch.autocast(kind, dtype=dtype):
        return _float(forward(*args, **kwargs))


def _float(outputs: Any) -> Any:
    if isinstance(outputs, Tensor):
        return outputs.float() if outputs.is_floating_point() else outputs
    if isinstance(outputs, dict):
        return {name: _float(x) for name, x in outputs.items()}
    if isinstance(outputs, list | tuple) and not hasattr(outputs, "_fields"):
        return type(outputs)(_float(x) for x in outputs)
    return outputs
