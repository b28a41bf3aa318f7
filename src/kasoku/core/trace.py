"""Spans of time with a kind and a name. Real and simulated runs emit the same ones; one report draws both."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from kasoku.core.clock import Clock
from kasoku.core.comm import Work


@dataclass(frozen=True)
class Span:
    """One stretch of time. Unit: seconds on the job's clock; `bytes` is what it moved, 0 if nothing."""

    kind: str
    name: str
    start: float
    stop: float
    rank: int = 0
    bytes: int = 0


class Trace:
    """The spans of one rank, the last `keep` of them.

    Attributes: `follower`: called at each change, with the kinds of the open spans (the phase first, the innermost span
        last), and the name and bytes of the span that began, "" and 0 where one ended. `beside`: seconds of work of
        other threads by kind, which no span holds.
    """

    def __init__(self, clock: Clock, *, rank: int = 0, keep: int = 10_000) -> None:
        self.clock = clock
        self.rank = rank
        self.spans: deque[Span] = deque(maxlen=keep)
        self.follower: Callable[[Sequence[str], str, int], None] = lambda *_: None
        self.beside: defaultdict[str, float] = defaultdict(float)
        self._open = [""]
        self._transfers: deque[tuple[str, float, int, Work]] = deque()  # name, start, bytes, work

    def phase(self, kind: str) -> None:
        """Reports the phase that begins (forward, backward, ...) to the follower; it adds no span."""
        self._open[0] = kind
        self.follower(self._open, "", 0)

    @contextmanager
    def span(self, kind: str, name: str = "", *, bytes: int = 0) -> Iterator[None]:
        """Times the body."""
        start = self.clock.now()
        self._open.append(kind)
        self.follower(self._open, name or kind, bytes)
        try:
            yield
        finally:
            self.spans.append(Span(kind, name or kind, start, self.clock.now(), self.rank, bytes))
            self._open.pop()
            self.follower(self._open, "", 0)

    def transfer(self, name: str, x: Tensor, work: Work) -> Work:
        """Notes a transfer of x that was just started, as a span of the kind "transfer"; returns its work.

        On a GPU nothing is noted, since the host does not know when a transfer ends.
        """
        if not (x.is_cuda or work.done()):  # done: there is no other rank
            self._transfers.append((name, self.clock.now(), x.nbytes, work))
        return work

    def poll_transfers(self) -> None:
        """Adds the spans of the transfers that have ended; call it often, since they end with this call.

        Transfers end in the order of their starts, more or less.
        """
        while self._transfers and self._transfers[0][-1].done():
            name, start, size, _ = self._transfers.popleft()
            self.spans.append(Span("transfer", name, start, self.clock.now(), self.rank, size))
