"""Spans of time with a kind and a name. Real and simulated runs emit the same ones; one report draws both."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kasoku.core.clock import Clock

Follower = Callable[[Sequence[str], str, int], None]


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

    Attributes: `follower`: called at each change, with the kinds of what is done now (the phase, then the spans within
        it, the innermost last), and the name and bytes of the span that began, "" and 0 where one ended.
    """

    def __init__(self, clock: Clock, *, rank: int = 0, keep: int = 10_000) -> None:
        self.clock = clock
        self.rank = rank
        self.spans: deque[Span] = deque(maxlen=keep)
        self.follower: Follower = lambda *_: None
        self._doing = [""]

    def add(self, kind: str, name: str, *, start: float, stop: float, bytes: int = 0) -> None:
        """Takes a span that was timed elsewhere."""
        self.spans.append(Span(kind, name, start, stop, self.rank, bytes))

    def phase(self, kind: str) -> None:
        """Says what is done from here on, outside of spans: forward, backward, ...; only the follower hears it."""
        self._doing[0] = kind
        self.follower(self._doing, "", 0)

    @contextmanager
    def span(self, kind: str, name: str = "", *, bytes: int = 0) -> Iterator[None]:
        """Times the body."""
        start = self.clock.now()
        self._doing.append(kind)
        self.follower(self._doing, name or kind, bytes)
        try:
            yield
        finally:
            stop = self.clock.now()
            self.add(kind, name or kind, start=start, stop=stop, bytes=bytes)
            self._doing.pop()
            self.follower(self._doing, "", 0)
