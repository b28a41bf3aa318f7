"""What a training tells of itself while it runs: its steps, and the collectives it starts, counted.

Note: who is behind. All ranks start the same collectives in the same order, so of ranks that stand still, those that
started the fewest are who the others wait for. Messages between two ranks are not counted: only two have part in them.
"""

from __future__ import annotations

import math
import statistics
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from torch import Tensor

from kasoku.core import Clock, Comm, Wall, Work

T = TypeVar("T")
Label = tuple[str, int, object]  # what, elements (-1: not told), their type
Names = Callable[[Sequence[int]], str]  # of ranks
# What a rank is doing.
BEGINS, STEPS, BUSY, STILL = b"n", b"r", b"b", b"s"
_KEPT = 64  # labels of the last collectives


class Heart(Protocol):
    """Who tells the others."""

    def close(self, failed: str) -> None:
        """The end on this rank, or its failure."""
        ...

    def hear_out(self) -> None:
        """Waits a while for a fault to be named."""
        ...


class Pulse:
    """What the training tells, as plain assignments that another thread reads.

    Args:
        hang_timeout_s: without a step for so long a rank hangs; 0: the larger of 60 s and 10 median steps.
        clock: the real one by default.
    """

    def __init__(self, hang_timeout_s: float, clock: Clock | None = None) -> None:
        self.hang_timeout_s = hang_timeout_s
        self._clock = clock or Wall()
        self.steps = 0
        self.counts: list[_Count] = []
        self.spans: list[str] = []  # of busy, the innermost last
        self.heart: Heart | None = None
        self._moved, self._until = self._clock.now(), math.inf
        self._took_s: deque[float] = deque(maxlen=64)

    def step(self) -> None:
        """To be called after each optimizer step."""
        now = self._clock.now()
        self._took_s.append(now - self._moved)
        self._moved = now
        self.steps += 1

    @contextmanager
    def busy(self, what: str, most_s: float = math.inf) -> Iterator[None]:
        """Evaluation, saving, compilation: while one rank is in it, for at most so long, no rank is said to hang."""
        self.spans.append(what)
        self._until = self._clock.now() + most_s
        try:
            yield
        finally:
            self._moved, self._until = self._clock.now(), math.inf
            self.spans.pop()

    def close(self, failed: str = "") -> None:
        """The end on this rank, or with `failed` (a line) its failure, which ends the others.

        Rank 0 waits until all others have read it; they watch no longer then, as its store may go with it.
        """
        if self.heart is not None:
            self.heart.close(failed)

    def hear_out(self) -> None:
        """Waits a while for a fault to be named, which mostly ends the process."""
        if self.heart is not None:
            self.heart.hear_out()

    @property
    def limit_s(self) -> float:
        """Without a step for so long this rank hangs."""
        return self.hang_timeout_s or max(60.0, 10 * statistics.median(self._took_s or [0.0]))

    @property
    def still_s(self) -> float:
        """How long ago the last step was made, or the last busy span ended."""
        return self._clock.now() - self._moved

    def state(self) -> bytes:
        """What this rank is doing."""
        if self.spans and self._clock.now() < self._until:
            return BUSY
        if not self.steps:
            return BEGINS
        return STILL if self.still_s > self.limit_s else STEPS

    def told(self) -> dict[str, Any]:
        """For the heartbeat."""
        still_s, limit_s = self.still_s, self.limit_s
        counts = {count.name: count.told(labels=still_s > limit_s / 2) for count in [*self.counts]}
        return {"step": self.steps, "busy": [*self.spans], "still_s": round(still_s, 1), "counts": counts}


class _Count:
    """The collectives of one channel, counted."""

    __slots__ = ("finished", "labels", "name", "pulse", "started", "waiting")

    def __init__(self, pulse: Pulse) -> None:
        self.pulse = pulse
        self.name = f" on channel {len(pulse.counts)}" if pulse.counts else ""
        self.started = self.finished = 0
        self.labels: list[Label] = [("", -1, None)] * _KEPT  # by number, modulo
        self.waiting: _Watched | None = None
        pulse.counts.append(self)

    def start(self, what: str, x: Tensor | None = None) -> int:
        """Counts a collective; its number."""
        number = self.started + 1
        self.labels[number % _KEPT] = (what, -1, None) if x is None else (what, x.numel(), x.dtype)
        self.started = number
        return number

    def told(self, *, labels: bool) -> dict[str, Any]:
        """What the heartbeat says of it."""
        waiting, low = self.waiting, max(1, self.started - _KEPT + 1)
        known = [*range(low, self.started + 1)] if labels else [n for n in (self.started, self.finished) if n >= low]
        return {
            "started": self.started,
            "finished": self.finished,
            "waits": _said(waiting.label or self.labels[waiting.number % _KEPT], waiting.number) if waiting else "",
            "labels": {str(n): _said(self.labels[n % _KEPT], n) for n in known},
        }


def _said(label: Label, number: int) -> str:
    what, elements, kind = label
    size = f" of {elements} {str(kind).removeprefix('torch.')}" if elements >= 0 else ""
    return f"{what} #{number}{size}" if number else f"{what}{size}"


class _Watched:
    """A collective under way. One that fails hears the heart out first: mostly another rank is the cause."""

    __slots__ = ("count", "inner", "label", "number")

    def __init__(self, inner: Work, count: _Count, number: int, label: Label | None = None) -> None:
        self.inner, self.count, self.number, self.label = inner, count, number, label

    def done(self) -> bool:
        return self.inner.done()

    def wait(self) -> None:
        count = self.count
        noted = self.number > 0 or threading.current_thread() is threading.main_thread()  # what serves always waits
        if noted:
            count.waiting = self
        try:
            self.inner.wait()
        except RuntimeError:
            count.pulse.hear_out()
            raise
        if noted:
            count.waiting = None
        if self.number > count.finished:
            count.finished = self.number


class _Call:
    """A call that waits by itself, as a Work."""

    def __init__(self, f: Callable[[], object]) -> None:
        self.f = f

    def done(self) -> bool:
        return False

    def wait(self) -> None:
        self.f()


class Watched:
    """A Comm whose collectives are counted, for the line that says who is behind; `pulse` takes the steps."""

    def __init__(self, inner: Comm, pulse: Pulse) -> None:
        self.inner, self.pulse = inner, pulse
        self.rank, self.size, self.clock, self.own_threads = inner.rank, inner.size, inner.clock, inner.own_threads
        self._count = _Count(pulse)

    def _begin(self, f: Callable[[], Work], number: int, label: Label | None = None) -> Work:
        try:
            return _Watched(f(), self._count, number, label)
        except RuntimeError:
            self.pulse.hear_out()
            raise

    def all_reduce(self, x: Tensor, *, op: str = "sum") -> Work:
        """The inner one's, counted."""
        return self._begin(lambda: self.inner.all_reduce(x, op=op), self._count.start("all_reduce", x))

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Work:
        """The inner one's, counted."""
        return self._begin(lambda: self.inner.reduce_scatter(out, x), self._count.start("reduce_scatter", x))

    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        """The inner one's, counted."""
        return self._begin(lambda: self.inner.all_gather(out, x), self._count.start("all_gather", out))

    def all_to_all(self, out: Tensor, x: Tensor) -> Work:
        """The inner one's, counted."""
        return self._begin(lambda: self.inner.all_to_all(out, x), self._count.start("all_to_all", x))

    def send(self, x: Tensor, *, to: int, tag: int = 0) -> Work:
        """The inner one's; not counted, as only two ranks have part in it."""
        return self._begin(lambda: self.inner.send(x, to=to, tag=tag), 0, (f"send to rank {to}", x.numel(), x.dtype))

    def receive(self, x: Tensor, *, source: int, tag: int = 0) -> Work:
        """The inner one's; not counted, as only two ranks have part in it."""
        label = (f"receive from rank {source}", x.numel(), x.dtype)
        return self._begin(lambda: self.inner.receive(x, source=source, tag=tag), 0, label)

    def broadcast_object(self, thing: T, *, root: int = 0) -> T:
        """The inner one's, counted."""
        return self._waited("broadcast_object", lambda: self.inner.broadcast_object(thing, root=root))

    def gather_objects(self, thing: T) -> list[T]:
        """The inner one's, counted."""
        return self._waited("gather_objects", lambda: self.inner.gather_objects(thing))

    def _waited(self, what: str, f: Callable[[], T]) -> T:
        found: list[T] = []
        _Watched(_Call(lambda: found.append(f())), self._count, self._count.start(what)).wait()
        return found[0]

    def sub(self, groups: Sequence[Sequence[int]]) -> Comm:
        """The inner one's; not counted, as only some ranks have part in it."""
        return self._waited("sub", lambda: self.inner.sub(groups))

    def warm(self, *args: Any, **settings: Any) -> None:
        """The inner one's; counted."""
        warm: Any = getattr(self.inner, "warm", None)
        if warm is not None:
            self._waited("warm", lambda: warm(*args, **settings))

    def channel(self, *, patient: bool = False) -> Watched:
        """The inner one's; counted by itself."""
        return Watched(self._waited("channel", lambda: self.inner.channel(patient=patient)), self.pulse)


_ABSENT: dict[str, Any] = {"started": 0, "finished": 0, "waits": "", "labels": {}}


def behind(told: Sequence[Mapping[str, Any]], names: Names) -> str:
    """Who the others wait for, and in what, from what each rank told."""
    found = []
    for channel in max((rank["counts"] for rank in told), key=len):
        counts = [rank["counts"].get(channel, _ABSENT) for rank in told]
        low = min(count["started"] for count in counts)
        late = [rank for rank, count in enumerate(counts) if count["started"] == low]
        ahead = [rank for rank, count in enumerate(counts) if count["started"] > low]
        if ahead:
            labels = [counts[rank]["labels"].get(str(low + 1)) for rank in ahead]
            label = next((label for label in labels if label), f"collective #{low + 1}")
            waiting = [rank for rank in ahead if counts[rank]["waits"] == label]
            does = f"{names([waiting[0]])} waits in" if waiting else f"{names([ahead[0]])} has started"
            found.append((not waiting, f"{names(late)} {_have(late)} not joined {label}{channel}, which {does}"))
    return min(found)[1] if found else _nobody_behind(told, names)


def _nobody_behind(told: Sequence[Mapping[str, Any]], names: Names) -> str:
    """The same where all ranks have started the same collectives."""
    waits: dict[int, str] = {}
    for rank, tells in enumerate(told):
        for channel, count in tells["counts"].items():
            if count["waits"]:
                waits.setdefault(rank, f"{count['waits']}{channel}")
    idle = [rank for rank in range(len(told)) if rank not in waits]
    if not waits:
        return f"{names(idle)} {_have(idle)} made none, and none waits for another (data? the device?)"
    rank = min(waits)
    if not idle:
        return f"all wait, {names([rank])} in {waits[rank]} (the network? or ranks that wait for each other)"
    return f"{names(idle)} {_have(idle)} made none, and {names([rank])} waits in {waits[rank]}"


def _have(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"
