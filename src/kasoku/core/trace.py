"""Spans of time with a kind and a name. Real and simulated runs emit the same ones; one report draws both."""

from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kasoku.core.clock import Clock


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
    """The spans of one rank: totals by kind for ever, the spans themselves for the last `keep` of them."""

    def __init__(self, clock: Clock, *, rank: int = 0, keep: int = 10_000) -> None:
        self.clock = clock
        self.rank = rank
        self.spans: deque[Span] = deque(maxlen=keep)
        self.total_s: defaultdict[str, float] = defaultdict(float)
        self._children_s = [0.0]

    def add(self, kind: str, name: str, *, start: float, stop: float, bytes: int = 0) -> None:
        """Takes a span that was timed elsewhere."""
        self.spans.append(Span(kind, name, start, stop, self.rank, bytes))
        self.total_s[kind] += stop - start

    @contextmanager
    def span(self, kind: str, name: str = "", *, bytes: int = 0) -> Iterator[None]:
        """Times the body. A span inside another is taken off the outer one's total, so totals never count twice."""
        start = self.clock.now()
        self._children_s.append(0.0)
        try:
            yield
        finally:
            stop = self.clock.now()
            self.add(kind, name or kind, start=start, stop=stop, bytes=bytes)
            self.total_s[kind] -= self._children_s.pop()
            self._children_s[-1] += stop - start
