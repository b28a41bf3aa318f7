"""What is under way between ranks, noted for the timeline of a step."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from torch import Tensor

from kasoku.core import Trace, Work


class _Sent(NamedTuple):
    name: str
    start: float
    bytes: int
    work: Work


class UnderWay:
    """Notes transfers as spans of the kind "transfer", from when they were sent until one was seen to have arrived.

    They arrive in the order in which they were sent, more or less; `look` is called as often as there is time for it,
    and so exact are their ends. On a GPU nothing is noted: the host does not know when they arrive.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._sent: deque[_Sent] = deque()

    def add(self, name: str, x: Tensor, work: Work) -> Work:
        """Takes a transfer of x that was just begun; gives its work."""
        if not (x.is_cuda or work.done()):  # done: there is no other rank
            self._sent.append(_Sent(name, self._trace.clock.now(), x.nbytes, work))
        return work

    def look(self) -> None:
        """Notes what has arrived since."""
        while self._sent and self._sent[0].work.done():
            sent = self._sent.popleft()
            self._trace.add("transfer", sent.name, start=sent.start, stop=self._trace.clock.now(), bytes=sent.bytes)
