"""Tensors that lie in host memory from forward to backward, brought back ahead of their use.

Note: one stream, and the host never waits. All copies go through one stream of their own, in the order in which they
are asked for: a copy back begins after the copy out of the same tensor, and a buffer may be taken again as soon as its
copy back was asked for. What is copied out is held until the computing stream has to wait for that copy: at the next
one, or at the end of the next segment. What comes back lies in memory of the computing stream. So the bytes on the
device follow from the order of the calls, not from the speed of the link.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from kasoku.core import InputError

_TRIED = 2**26  # bytes that cross to measure the link
_TIMES = 3


def reaches(device: torch.device) -> bool:
    """Host memory is another one than this device's."""
    return device.type == "cuda"


class Ticket:
    """A tensor that lies in host memory.

    Attributes:
        like: its shape, type and strides, without memory.
        buffer: where it lies; None when nobody will read it again.
        readers: who will read it.
        here: it on the device, from when it is asked for until it is taken, or until all who share it have taken it.
        arrived: the event of the copy back that nobody has waited for yet.
    """

    def __init__(self, host: Host, x: Tensor, buffer: Tensor) -> None:
        self.host, self.device, self.like = host, x.device, torch.empty_like(x, device="meta")
        self.buffer: Tensor | None = buffer
        self.readers = 1
        self.here: Tensor | None = None
        self.arrived: Any = None

    def __del__(self) -> None:
        if self.arrived is not None:
            self.arrived.synchronize()  # or its memory would be used again while the copy writes to it
        self.host._give_back(self)


class _Leaving(NamedTuple):
    """What is being copied out, its version when that began, and the event of its end."""

    x: Tensor
    version: int
    gone: Any


class Host:
    """Takes tensors out and brings them back; on CUDA beside the computation, elsewhere at once.

    Attributes:
        free: pinned buffers by their bytes, kept from step to step.
        leaving: what was copied out last, until the computing stream waits for it.
        latest: what the segment holds that ran forward last, a weak reference.
    """

    def __init__(self) -> None:
        self.free: dict[int, list[Tensor]] = {}
        self.leaving: _Leaving | None = None
        self.latest: ref[Any] | None = None
        self.stream: Any = None
        self.closed = False
        self.byte_s = 0.0

    def put(self, x: Tensor) -> Ticket:
        """Copies x out; its memory stays until `settle`, at the latest in the next call."""
        self.settle()
        ticket = Ticket(self, x, self._buffer(x))
        self.leaving = _Leaving(x.detach(), x._version, self._copy(_view(ticket), x, x.device))
        return ticket

    def settle(self) -> None:
        """The computing stream waits for what was copied out last. Raises InputError where it was written meanwhile."""
        left, self.leaving = self.leaving, None
        if left is None:
            return
        _wait(left.gone, left.x.device)
        if left.x._version != left.version:
            raise InputError(
                "SavedMemory: what enters a layer was written while it was copied to host memory: leave host=True out"
            )

    def ahead(self, ticket: Ticket) -> None:
        """Begins to bring it back, if nobody has yet."""
        if ticket.here is None and ticket.buffer is not None:
            ticket.here = torch.empty_like(ticket.like, device=ticket.device)
            ticket.arrived = self._copy(ticket.here, _view(ticket), ticket.device)

    def get(self, ticket: Ticket, *, last: bool) -> Tensor:
        """It, on the device; `last`: this reader will not ask again."""
        self.ahead(ticket)
        here = ticket.here
        if here is None:
            raise InputError("SavedMemory: a value in host memory was let go before its last use")
        _wait(ticket.arrived, ticket.device)
        ticket.arrived = None
        ticket.readers -= last
        if not last or not ticket.readers:
            ticket.here = None
        if not ticket.readers:
            self._give_back(ticket)
        return here

    def begin(self) -> None:
        """A forward of the model begins; one that an exception ended may have left something."""
        if self.leaving is not None:
            _wait(self.leaving.gone, self.leaving.x.device)
        self.leaving = self.latest = None

    def clear(self) -> None:
        """Lets go of the buffers that are free."""
        self.free.clear()

    def close(self) -> None:
        """Buffers still in use go when their tensors do."""
        self.begin()
        self.clear()
        self.closed = True

    def seconds_a_byte(self, device: torch.device) -> float:
        """Of the link, the mean of out and back; measured once."""
        if not self.byte_s:
            x = torch.empty(_TRIED, dtype=torch.uint8, device=device)
            for _ in range(2):  # the buffer is pinned in the first round
                started = now(device)
                for _ in range(_TIMES):
                    ticket = self.put(x)
                    self.settle()
                    self.get(ticket, last=True)
                self.byte_s = (now(device) - started) / (2 * _TIMES * _TRIED)
            self.clear()
        return self.byte_s

    def _buffer(self, x: Tensor) -> Tensor:
        fits = [size for size, buffers in list(self.free.items()) if size >= x.nbytes and buffers]
        if fits:
            return self.free[min(fits)].pop()
        return torch.empty(x.nbytes, dtype=torch.uint8, pin_memory=x.device.type == "cuda")

    def _give_back(self, ticket: Ticket) -> None:
        buffer, ticket.buffer = ticket.buffer, None
        if buffer is not None and not self.closed:
            self.free.setdefault(buffer.numel(), []).append(buffer)

    def _copy(self, into: Tensor, x: Tensor, device: torch.device) -> Any:
        """After all that the computing stream was given so far; the event of its end, None where it is over."""
        if device.type != "cuda":
            into.copy_(x)
            return None
        if self.stream is None:
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self.stream):
            into.copy_(x, non_blocking=True)
            return self.stream.record_event()


def _view(ticket: Ticket) -> Tensor:
    """Its buffer, as it is laid out."""
    if ticket.buffer is None:
        raise InputError("SavedMemory: a value in host memory was let go before its last use")
    like = ticket.like
    return ticket.buffer[: like.nbytes].view(like.dtype).as_strided(like.shape, like.stride())


def _wait(event: Any, device: torch.device) -> None:
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)


def now(device: torch.device) -> float:
    """When all that the device was given is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
