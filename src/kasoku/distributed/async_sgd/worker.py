"""A worker's copy of one group of parameters, in pieces, one for each owner; the codecs of updates and replies.

A codec is `exact` if it is fp32 itself, so that no copy is needed. n fp32 elements become `elements(n)` of its `dtype`:
`pack(x, out)` encodes x, and `unpack(packed, out)` decodes it.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

Reply = Future[Any]  # to a request: the first tensor received
_MOST_LOCAL_STEPS = 16  # between two exchanges, however long an exchange takes
_BLOCK = 256  # elements that share a scale, a power of two
_STRETCH = 256  # blocks: 256 KiB of fp32
_DIGITS = 6  # the largest element of a block becomes a level of 64 to 127


def answered(result: Any) -> Reply:
    """A reply that is there already."""
    reply: Reply = Future()
    reply.set_result(result)
    return reply


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


def most_local_steps(max_staleness: int | None) -> int:
    """The most steps between two exchanges if every=0; a bound on staleness may lower it."""
    return _MOST_LOCAL_STEPS if max_staleness is None else min(_MOST_LOCAL_STEPS, max_staleness)


class FlatViews:
    """A flat buffer on a device, with one view into it for each parameter of a group."""

    def __init__(self, params: Sequence[Tensor], device: torch.device | None = None) -> None:
        self.params = params
        sizes = [p.numel() for p in params]
        self.flat = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        parts = zip(torch.split(self.flat, sizes), params, strict=True)
        self.views = [part.as_strided(p.shape, p.stride()) for part, p in parts]

    def load(self) -> Tensor:
        """Copies the parameters into the buffer, and returns it."""
        torch._foreach_copy_(self.views, list(self.params))
        return self.flat

    def store(self) -> None:
        """Copies the buffer into the parameters."""
        torch._foreach_copy_(list(self.params), self.views)


class Prediction(FlatViews):
    """Moves a group's parameters by `ahead` times the other ranks' last movement (the buffer; empty if `ahead` is 0).

    Parameters contain the prediction from the end of a step to the next optimizer step or sync point. It is removed
    whenever updates are sent or weights are read, as it would otherwise be sent as part of this worker's own update.
    """

    def __init__(self, params: Sequence[Tensor], ahead: float) -> None:
        super().__init__(params if ahead else (), params[0].device)
        self._ahead = ahead
        self.reset()

    def reset(self) -> None:
        self._factor = self._applied = 0.0
        self._updates, self._exchanges = 0, 0

    def set_factor(self, updates: int) -> None:
        """Sets the multiple of the movement, when the weights contain so many updates by other ranks.

        After a stall the last movement is unusually large. So `ahead` is halved until the movement covers at most twice
        the usual number of updates.
        """
        new: float = updates - self._updates
        usual = max(1.0, self._updates / self._exchanges) if self._exchanges else new
        self._updates, self._exchanges, self._factor = updates, self._exchanges + 1, self._ahead
        while new > max(1.0, 2 * usual):
            new, self._factor = new / 2, self._factor / 2

    @torch.no_grad()
    def move(self, *, ahead: bool) -> None:
        """Moves the parameters ahead, or back to the weights alone; where they are already, they stay."""
        times = self._factor if ahead else 0.0
        if times != self._applied:
            for p, movement in zip(self.params, self.views, strict=True):
                p.add_(movement, alpha=times - self._applied)
            self._applied = times


class WorkerGroup:
    """A worker's copy of a group of parameters, in pieces for their `owners`; `codec` encodes messages.

    `blocking`: the parameters do not change during an exchange, and equal the weights read after it. `ahead`: how far
    the prediction that the parameters hold between exchanges looks ahead, so `blocking` is False; 0: no prediction.
    """

    def __init__(
        self, params: Sequence[Tensor], owners: Sequence[int], codec: Codec, *, blocking: bool, ahead: float = 0.0
    ) -> None:
        self.params, self.owners, self._blocking, self.codec = params, owners, blocking, codec
        # base: the last known weights, with this worker's own updates
        self.current, self.base = FlatViews(params), FlatViews(params)
        self.prediction = Prediction(params, ahead)
        n = len(self.base.flat)
        self.residual = torch.zeros(0 if codec.exact else n)  # the last update's rounding error, sent with the next one
        cuts = [n * i // len(owners) for i in range(len(owners) + 1)]
        pieces = zip(owners, cuts, cuts[1:], strict=False)
        self.pieces = {owner: slice(start, stop) for owner, start, stop in pieces if start < stop}
        self.slots: dict[int, slice] = {}  # of each owner's piece in the message
        end = 0
        for owner, piece in self.pieces.items():
            start, end = end, end + codec.elements(piece.stop - piece.start)
            self.slots[owner] = slice(start, end)
        # the update, until the replies have taken its place
        self.message = self.current.flat if codec.exact else torch.zeros(end, dtype=codec.dtype)
        self.pending: dict[int, Reply] = {}

    def begin(self) -> None:
        """Takes the parameters as the last known weights."""
        self.base.flat.copy_(self.current.load())
        self.prediction.reset()
        self.residual.zero_()
        self.sent_at = 0  # the worker's step at the last request
        self.version_used = dict.fromkeys(self.pieces, 0)  # by owner: of the weights that the next update starts from
        self.version_read = dict(self.version_used)  # of those that were read last

    def due(self, step: int, most: int) -> bool:
        """Whether to exchange at this step: the last exchange has finished, or began `most` steps ago."""
        return step - self.sent_at >= most or all(reply.done() for reply in self.pending.values())

    def contribution(self, rank: int, owned: Tensor | None) -> Tensor:
        """This rank's summand of the weights: the piece that it owns, if any, and a worker's rounding errors."""
        whole = self.current.flat.zero_()
        if rank in self.owners and len(self.residual):
            whole += self.residual
        if owned is not None:
            whole[self.pieces[rank]] += owned
        return whole

    def write_request(self, share: float) -> None:
        """Writes this worker's update (inexact codecs: `share` of it) into `message`; adds `share` of it to `base`."""
        exact = self.codec.exact
        for p, base, update in zip(self.params, self.base.views, self.current.views, strict=True):
            torch.sub(p.to(base.device), base, out=update)
            if exact and not self._blocking:  # else the reply replaces the weights
                p.copy_(base.add_(update, alpha=share))
        if exact:
            return
        update = self.current.flat.mul_(share)
        self.residual.copy_(update.add_(self.residual))
        for owner, piece in self.pieces.items():
            self.codec.pack(update[piece], self.message[self.slots[owner]])
            self.codec.unpack(self.message[self.slots[owner]], update[piece])
        self.residual.sub_(update)
        self.base.flat.add_(update)
        if not self._blocking:
            self.base.store()

    def read_reply(self) -> None:
        """Applies the replies to the parameters, and notes their movement for the prediction.

        Replies are weights; those of inexact codecs are differences.
        """
        self.prediction.set_factor(sum(self.version_read.values()))
        if not self.codec.exact:
            for owner, piece in self.pieces.items():
                self.codec.unpack(self.message[self.slots[owner]], self.current.flat[piece])
            self.current.flat.add_(self.base.flat)
        movements: Sequence[Tensor | None] = self.prediction.views or [None] * len(self.params)
        for p, base, new, movement in zip(self.params, self.base.views, self.current.views, movements, strict=True):
            old_p, new_p = base.to(p.device), new.to(p.device)  # themselves on a CPU
            if movement is not None:
                torch.sub(new_p, old_p, out=movement)
            if self._blocking:
                p.copy_(new_p)
            else:
                p.sub_(old_p).add_(new_p)
            base.copy_(new)
