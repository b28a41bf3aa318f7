"""Codecs of asynchronous updates and replies.

A codec is `exact` if it is fp32 itself, so that no copy is needed. n fp32 elements become `elements(n)` of its `dtype`:
`pack(x, out)` encodes x, and `unpack(packed, out)` decodes it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

_BLOCK = 256  # elements that share a scale, a power of two
_STRETCH = 256  # blocks: 256 KiB of fp32
_DIGITS = 6  # the largest element of a block becomes a level of 64 to 127


@dataclass(frozen=True)
class FloatCodec:
    """Casts to a floating-point type, rounding to the nearest."""

    dtype: torch.dtype

    @property
    def exact(self) -> bool:
        return self.dtype == torch.float32

    def elements(self, n: int) -> int:
        return n

    def pack(self, x: Tensor, out: Tensor) -> None:
        out.copy_(x)

    def unpack(self, packed: Tensor, out: Tensor) -> None:
        out.copy_(packed)  # arithmetic on mixed types would be slower


@dataclass(frozen=True)
class Int8Codec:
    """8 bits an element: each block has a scale, and each element is a level from -127 to 127 times it.

    Note: powers of two. With them as scales, the decoded value plus the rounding error is exactly x in fp32, so error
    feedback loses nothing. A scale is a byte with the exponent bits of fp32; all ones mark a block with inf or NaN.
    """

    dtype: ClassVar[torch.dtype] = torch.uint8
    exact: ClassVar[bool] = False

    def elements(self, n: int) -> int:
        return n + -(-n // _BLOCK)  # the levels, then the scales

    def pack(self, x: Tensor, out: Tensor) -> None:
        """Rounds to the nearest level, at most 127."""
        for part, levels, power in _blocks(x, out):
            exponent = part.abs().amax(1).view(torch.int32).bitwise_right_shift_(23)
            finite = exponent < 255
            exponent.sub_(_DIGITS).clamp_(1)
            inverse = (254 - exponent).bitwise_left_shift_(23).view(torch.float32)
            power.copy_(exponent.masked_fill_(~finite, 255))
            levels.copy_((part * inverse[:, None]).round_().clamp_(-127, 127).nan_to_num_(0.0))

    def unpack(self, packed: Tensor, out: Tensor) -> None:
        """Exact; a block that had inf or NaN is all inf or NaN."""
        for part, levels, power in _blocks(out, packed):
            scale = power.to(torch.int32).bitwise_left_shift_(23).view(torch.float32)
            part.copy_(levels).mul_(scale[:, None])


def _blocks(x: Tensor, packed: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Elements, levels and scales: many blocks at a time that fit in the cache, then the remainder as one block."""
    n = len(x)
    levels, powers = packed[:n].view(torch.int8), packed[n:]
    cut = n // _BLOCK * _BLOCK
    for start in range(0, cut, _STRETCH * _BLOCK):
        stop = min(cut, start + _STRETCH * _BLOCK)
        part, levels_part = (each[start:stop].view(-1, _BLOCK) for each in (x, levels))
        yield part, levels_part, powers[start // _BLOCK : stop // _BLOCK]
    if cut < n:
        yield x[cut:][None], levels[cut:][None], powers[n // _BLOCK :]


Codec = FloatCodec | Int8Codec
CODECS: dict[str, Codec] = {"fp32": FloatCodec(torch.float32), "bf16": FloatCodec(torch.bfloat16), "int8": Int8Codec()}
