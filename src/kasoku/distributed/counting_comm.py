"""The state of a training while it runs: its steps, and counts of the collectives that it starts.

Note: stragglers. All ranks start the same collectives in the same order. So among ranks that are stalled, the other
ranks wait for those that started the fewest. Messages between two ranks are not counted, as only two take part in them.

Note: stacks. The heartbeat's thread reads those of all threads, so a rank whose main thread hangs still says where. It
opens no source file, as a disk may be what hangs.
"""

import math
import statistics
import sys
import threading
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from kasoku.core import Clock, Comm, Wall, Work

T = TypeVar("T")
Names = Callable[[Sequence[int]], str]  # of ranks
# What a rank does, as the first byte of its heartbeat.
STARTING, STEPPING, BUSY, STALLED, RESTING = b"n", b"r", b"b", b"s", b"w"
_KEPT = 64  # labels of the last collectives
_FRAMES, _SHOWN = 24, 4  # of a stack, the innermost: in a report, in a line


class Activity:
    """What the training does, written by plain assignments, as another thread reads it.

    `hang_timeout_s`: seconds without a step after which a rank hangs; 0: the larger of 60 s and 10 median steps.
    """

    def __init__(self, hang_timeout_s: float, clock: Clock | None = None) -> None:
        self.hang_timeout_s = hang_timeout_s
        self._clock = clock or Wall()
        self.counts: list[CountingComm] = []
        self.heartbeat: Any = None  # a StoreHeartbeat, which reports this to the other ranks
        self.membership: Any = None  # a Membership, where lost ranks need not end the training
        self.stacks_file: Path | None = None  # where rank 0 writes the stacks of all ranks when one hangs
        self._last_step, self._busy_until = self._clock.now(), -math.inf
        self._rests = False
        self._durations_s: deque[float] = deque(maxlen=64)

    def forget(self) -> None:
        """Forgets the steps and the collectives so far: the training starts again with other ranks."""
        self.counts.clear()
        self._durations_s.clear()
        self._last_step, self._busy_until, self._rests = self._clock.now(), -math.inf, False

    def step(self) -> None:
        """Must be called after each optimizer step."""
        now = self._clock.now()
        self._durations_s.append(now - self._last_step)
        self._last_step = now

    @contextmanager
    def rest(self) -> Iterator[None]:
        """Marks that this rank has made its steps and waits for the others; a hang of those is still noticed."""
        self._rests = True
        try:
            yield
        finally:
            self._durations_s.append(0.0)  # a rank that made no step is no longer starting either
            self._last_step, self._rests = self._clock.now(), False

    @contextmanager
    def busy(self, limit_s: float = math.inf) -> Iterator[None]:
        """Marks an evaluation, a save or a compilation; until it or `limit_s` is over, no rank counts as hung."""
        outer, self._busy_until = self._busy_until, self._clock.now() + limit_s
        try:
            yield
        finally:
            self._last_step, self._busy_until = self._clock.now(), outer

    def wait_for_verdict(self) -> None:
        """Waits as long as it may take to name a death."""
        if self.heartbeat is not None:
            self.heartbeat.wait_for_verdict()

    @property
    def limit_s(self) -> float:
        """Seconds without a step after which this rank hangs."""
        return self.hang_timeout_s or max(60.0, 10 * statistics.median(self._durations_s or [0.0]))

    @property
    def idle_s(self) -> float:
        """Seconds since the last step, or since the end of the last busy span."""
        return self._clock.now() - self._last_step

    def state(self) -> bytes:
        """What this rank does: STARTING, STEPPING, BUSY, STALLED or RESTING."""
        if self._rests:
            return RESTING
        if self._clock.now() < self._busy_until:
            return BUSY
        if not self._durations_s:
            return STARTING
        return STALLED if self.idle_s > self.limit_s else STEPPING

    def report(self) -> dict[str, Any]:
        """The content of a heartbeat."""
        idle_s, stuck = self.idle_s, self.idle_s > self.limit_s / 2
        counts = {count.name: count.report(labels=stuck) for count in [*self.counts]}
        places = stacks() if stuck and self.state() in (STEPPING, STALLED) else {}
        return {"idle_s": round(idle_s, 1), "counts": counts, "rests": self._rests, "stacks": places}


def stacks() -> dict[str, list[str]]:
    """Where each thread of this process is in the source, the innermost place first; the main thread comes first."""
    frames, places = sys._current_frames(), defaultdict[str, list[str]](list)
    for thread in sorted(threading.enumerate(), key=lambda thread: thread is not threading.main_thread()):
        if own := frames.get(thread.ident or 0):  # a thread that has just begun has none
            for frame, line in islice(traceback.walk_stack(own), _FRAMES):
                file = "/".join(Path(frame.f_code.co_filename).parts[-2:])
                places[thread.name].append(f"{file}:{line} {frame.f_code.co_qualname}")
    return dict(places)


class CountingComm(Comm):
    """A Comm that counts its collectives, each channel by itself; `activity` takes the steps.

    `ranks`: the numbers of its ranks among all ranks; empty: it has all.
    """

    def __init__(self, inner: Comm, activity: Activity, ranks: Sequence[int] = ()) -> None:
        self.activity, self.ranks = activity, ranks
        self._take(inner)

    def replace(self, inner: Comm) -> None:
        """Goes on with the ranks of another comm: for code that holds this one. Forgets the channels so far."""
        self.activity.forget()
        self._take(inner)

    def _take(self, inner: Comm) -> None:
        activity, ranks = self.activity, self.ranks
        self.inner, self.rank, self.size = inner, inner.rank, inner.size
        self.clock, self.thread_safe, self._heartbeat = inner.clock, inner.thread_safe, activity.heartbeat
        self.name = f" on channel {len(activity.counts)}" if activity.counts else ""
        self.name += f" of ranks {', '.join(map(str, ranks))}" if ranks else ""
        self.started = 0
        self._labels = [""] * _KEPT  # by number, modulo
        self._waits = ""  # for this collective or message
        activity.counts.append(self)

    def report(self, *, labels: bool) -> dict[str, Any]:
        """The count, what this rank waits for, and the last collective by its number; with `labels` the last 64."""
        started = self.started
        known = range(max(1, started - _KEPT + 1 if labels else started), started + 1)
        return {
            "started": started,
            "waits": self._waits,
            "labels": {str(number): self._labels[number % _KEPT] for number in known},
            "ranks": list(self.ranks),
        }

    def _count(self, name: str, x: Tensor | None = None) -> str:
        """Counts a collective, and returns its label."""
        number = self.started + 1
        self._labels[number % _KEPT] = label = f"{name} #{number}{_size(x)}"
        self.started = number
        return label

    def _start(self, label: str, f: Callable[[], Work], *, peer: int | None = None) -> Work:
        try:
            return _CountedWork(f(), self, label, peer)
        except RuntimeError:
            self._find_cause(peer)
            raise

    @contextmanager
    def waiting(self, label: str, *, peer: int | None = None) -> Iterator[None]:
        """Notes that this rank waits, with `peer` for a message. If the wait fails, waits for the verdict."""
        noted = peer is None or threading.current_thread() is threading.main_thread()  # server threads always wait
        if noted:
            self._waits = label
        try:
            yield
        except RuntimeError:
            self._find_cause(peer)
            raise
        if noted:
            self._waits = ""

    def _find_cause(self, peer: int | None) -> None:
        """After a failure: accuses the peer of a message, then waits for the verdict of this comm's group."""
        if self._heartbeat is not None:
            if peer is not None:
                self._heartbeat.accuse(self.ranks[peer] if self.ranks else peer)
            self._heartbeat.wait_for_verdict()

    def all_reduce(self, x: Tensor, *, op: str = "sum") -> Work:
        return self._start(self._count("all_reduce", x), lambda: self.inner.all_reduce(x, op=op))

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Work:
        return self._start(self._count("reduce_scatter", x), lambda: self.inner.reduce_scatter(out, x))

    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        return self._start(self._count("all_gather", out), lambda: self.inner.all_gather(out, x))

    def all_to_all(self, out: Tensor, x: Tensor) -> Work:
        return self._start(self._count("all_to_all", x), lambda: self.inner.all_to_all(out, x))

    def send(self, x: Tensor, *, to: int, tag: int = 0) -> Work:
        label = f"send to rank {to}{_size(x)}"
        return self._start(label, lambda: self.inner.send(x, to=to, tag=tag), peer=to)

    def receive(self, x: Tensor, *, source: int, tag: int = 0) -> Work:
        label = f"receive from rank {source}{_size(x)}"
        return self._start(label, lambda: self.inner.receive(x, source=source, tag=tag), peer=source)

    def broadcast_object(self, thing: T, *, root: int = 0) -> T:
        with self.waiting(self._count("broadcast_object")):
            return self.inner.broadcast_object(thing, root=root)

    def gather_objects(self, thing: T) -> list[T]:
        with self.waiting(self._count("gather_objects")):
            return self.inner.gather_objects(thing)

    def sub(self, groups: Sequence[Sequence[int]]) -> "CountingComm":
        own = next(ranks for ranks in groups if self.rank in ranks)
        with self.waiting(self._count("sub")):
            ranks = [self.ranks[rank] for rank in own] if self.ranks else own
            return CountingComm(self.inner.sub(groups), self.activity, ranks)

    def warm(self, device: torch.device, *, channels: int = 0) -> None:
        with self.waiting(self._count("warm")):
            self.inner.warm(device, channels=channels)

    def channel(self, *, patient: bool = False) -> "CountingComm":
        with self.waiting(self._count("channel")):
            return CountingComm(self.inner.channel(patient=patient), self.activity, self.ranks)


@dataclass(slots=True)
class _CountedWork:
    """A collective or a message under way."""

    inner: Work
    comm: CountingComm
    label: str
    peer: int | None  # of a message

    def done(self) -> bool:
        return self.inner.done()

    def wait(self) -> None:
        with self.comm.waiting(self.label, peer=self.peer):
            self.inner.wait()


def _size(x: Tensor | None) -> str:
    return "" if x is None else f" of {x.numel()} {str(x.dtype).removeprefix('torch.')}"


_ABSENT: dict[str, Any] = {"started": 0, "waits": "", "labels": {}}


def describe_stragglers(reports: Sequence[Mapping[str, Any]], names: Names) -> str:
    """Names the ranks that hold up the rest, and the collective they have not joined, from the reports of all ranks."""
    candidates, at_work = [], [rank for rank, report in enumerate(reports) if not report["rests"]]
    channels = {c: count.get("ranks") for rank in at_work for c, count in reports[rank]["counts"].items()}
    for channel, ranks in channels.items():
        counts = {rank: reports[rank]["counts"].get(channel, _ABSENT) for rank in at_work if not ranks or rank in ranks}
        low = min(count["started"] for count in counts.values())
        late = [rank for rank, count in counts.items() if count["started"] == low]
        if ahead := [rank for rank, count in counts.items() if count["started"] > low]:
            labels = [counts[rank]["labels"].get(str(low + 1)) for rank in ahead]
            label = next((label for label in labels if label), f"collective #{low + 1}")
            waiting = [rank for rank in ahead if counts[rank]["waits"] == label]
            does = f"{names([waiting[0]])} waits in" if waiting else f"{names([ahead[0]])} has started"
            line = f"{names(late)} {_have(late)} not joined {label}{channel}, which {does}{_place(reports, late)}"
            candidates.append((not waiting, line))
    if candidates:
        return min(candidates)[1]
    waits: dict[int, str] = {}  # all ranks have started the same collectives
    for rank in at_work:
        for channel, count in reports[rank]["counts"].items():
            if count["waits"]:
                waits.setdefault(rank, f"{count['waits']}{channel}")
    idle = [rank for rank in at_work if rank not in waits]
    if not waits:
        nothing = "made none, and none waits for another (data? the device?)"
        return f"{names(idle)} {_have(idle)} {nothing}{_place(reports, idle)}"
    rank = min(waits)
    if not idle:
        return f"all wait, {names([rank])} in {waits[rank]} (the network? or ranks that wait for each other)"
    return f"{names(idle)} {_have(idle)} made none, and {names([rank])} waits in {waits[rank]}{_place(reports, idle)}"


def _place(reports: Sequence[Mapping[str, Any]], ranks: Sequence[int]) -> str:
    """Where the first of these ranks is that sent its stacks: a clause, the innermost place first."""
    known = ((rank, places) for rank in ranks for places in [*reports[rank].get("stacks", {}).values()][:1])
    return next((f"; rank {rank} is at {' < '.join(places[:_SHOWN])}" for rank, places in known), "")


def _have(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"
