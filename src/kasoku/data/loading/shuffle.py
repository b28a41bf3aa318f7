"""The order of images and the draws for each: pure functions of (seed, epoch, sample index).

Note: counters, not generators
A sample's draws come from hashing (seed, epoch, index, stream), so they do not depend on the batch the sample is in,
on the rank or the thread that makes it, or on what was drawn before; a resumed run needs no generator state.
The hash is the finaliser of splitmix64 (Steele, Lea, Flood 2014) in wrapping int64 arithmetic, alike on every device.
"""

import torch

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_WORD = (1 << 64) - 1


def order(n: int, seed: int, epoch: int) -> torch.Tensor:
    """Permutation of range(n) (int64, on the CPU) for one epoch."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed_of(seed, epoch)))


def seed_of(*numbers: int) -> int:
    """A seed for a generator, below 2^63, that depends on all the numbers and on their order."""
    return _key(*numbers) & (_WORD >> 1)


def order_of(split: object, images: int, seed: int, epoch: int) -> torch.Tensor:
    """The order of a split's first images for one epoch: random, or its own (`epoch_order`) where it has one."""
    own = getattr(split, "epoch_order", None)
    order_N: torch.Tensor = own(seed, epoch) if own else order(images, seed, epoch)
    return order_N[order_N < images]


def draws(seed: int, epoch: int, index_N: torch.Tensor, stream: int | torch.Tensor) -> torch.Tensor:
    """Uniform float32 numbers in [0, 1) for samples index_N (int64), one for each.

    `stream` separates independent draws of one sample; an int64 tensor of streams broadcasts against index_N.
    Values are multiples of 2**-24. Never waits for the device.
    """
    word_N = _mix(index_N * _signed(_GOLDEN) + _signed(_key(seed, epoch)))
    word_N = _mix(word_N + (torch.as_tensor(stream) + 1) * _signed(_GOLDEN))
    return _shifted(word_N, 40).to(torch.float32) * 2.0**-24


def whole(u: torch.Tensor, count: int) -> torch.Tensor:
    """Uniform integers in range(count) (int64) from draws u."""
    return (u * count).long().clamp_(max=count - 1)


def _key(*numbers: int) -> int:
    word = 0
    for number in numbers:
        word = (word + number + 1) * _GOLDEN & _WORD
        word = (word ^ word >> 30) * _FIRST & _WORD
        word = (word ^ word >> 27) * _SECOND & _WORD
        word ^= word >> 31
    return word


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _shifted(word_N: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift to the right: >> of int64 copies the sign, the mask takes the copies away."""
    return (word_N >> bits) & (_WORD >> bits)


def _mix(word_N: torch.Tensor) -> torch.Tensor:
    word_N = (word_N ^ _shifted(word_N, 30)) * _signed(_FIRST)
    word_N = (word_N ^ _shifted(word_N, 27)) * _signed(_SECOND)
    return word_N ^ _shifted(word_N, 31)
