"""In how many bits the updates of asynchronous ranks, and what they read, are sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_BLOCK = 256  # elements that share a power of two
_STRETCH = 256  # blocks: 256 KiB of fp32
_DIGITS = 6  # of 2^7 levels: the largest element of a block is worth 64 to 127 of them


class Code(Protocol):
    """How fp32 elements are written."""

    @property
    def dtype(self) -> torch.dtype:
        """Of what is sent."""
        ...

    @property
    def exact(self) -> bool:
        """Whether that is fp32 itself, so that nothing need be written."""
        ...

    def elements(self, n: int) -> int:
        """Of `dtype`, that n elements take."""
        ...

    def pack(self, x: Tensor, out: Tensor) -> None:
        """Writes x (fp32) into out."""
        ...

    def unpack(self, written: Tensor, out: Tensor) -> None:
        """Reads it into out (fp32)."""
        ...


@dataclass(frozen=True)
class Floats:
    """In a floating-point type."""

    dtype: torch.dtype

    @property
    def exact(self) -> bool:
        return self.dtype == torch.float32

    def elements(self, n: int) -> int:
        return n

    def pack(self, x: Tensor, out: Tensor) -> None:
        """Rounds to the nearest."""
        out.copy_(x)

    def unpack(self, written: Tensor, out: Tensor) -> None:
        """The same values; copied, as arithmetic on two types at once is slow."""
        out.copy_(written)


@dataclass(frozen=True)
class Bytes:
    """In 8 bits: of each block a power of two, and how many times that each element is, -127 to 127.

    Note: why powers of two. What is read is then exactly x less what rounding took, in fp32 too, so error feedback
    loses nothing. A byte has the exponent bits of fp32; all ones (of a block with inf or NaN) read as inf or NaN.
    """

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8

    @property
    def exact(self) -> bool:
        return False

    def elements(self, n: int) -> int:
        """One each, and one for each block."""
        return n + -(-n // _BLOCK)

    def pack(self, x: Tensor, out: Tensor) -> None:
        """Rounds to the nearest, and the outermost towards zero."""
        for part, levels, power in _blocks(x, out):
            exponent = part.abs().amax(1).view(torch.int32).bitwise_right_shift_(23)
            finite = exponent < 255
            exponent.sub_(_DIGITS).clamp_(1)
            inverse = (254 - exponent).bitwise_left_shift_(23).view(torch.float32)
            power.copy_(exponent.masked_fill_(~finite, 255))
            levels.copy_((part * inverse[:, None]).round_().clamp_(-127, 127).nan_to_num_(0.0))

    def unpack(self, written: Tensor, out: Tensor) -> None:
        """Exact; where a block had inf or NaN, all of it is inf or NaN."""
        for part, levels, power in _blocks(out, written):
            scale = power.to(torch.int32).bitwise_left_shift_(23).view(torch.float32)
            part.copy_(levels).mul_(scale[:, None])


def _blocks(x: Tensor, written: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Elements, levels and powers: blocks in stretches that stay in the cache, then what is left over as one block."""
    n = len(x)
    levels, powers = written[:n].view(torch.int8), written[n:]
    cut = n // _BLOCK * _BLOCK
    if cut:
        yield from zip(
            torch.split(x[:cut].view(-1, _BLOCK), _STRETCH),
            torch.split(levels[:cut].view(-1, _BLOCK), _STRETCH),
            torch.split(powers[: n // _BLOCK], _STRETCH),
            strict=True,
        )
    if cut < n:
        yield x[cut:][None], levels[cut:][None], powers[n // _BLOCK :]


WIRES: dict[str, Code] = {"fp32": Floats(torch.float32), "bf16": Floats(torch.bfloat16), "int8": Bytes()}
