"""Heartbeats between asynchronous ranks, and waits that end when the rank at the other end dies.

Note: threads. A gloo wait for a stopped rank would end only by a time-out, which breaks the connections to all other
ranks too. So each wait for a rank runs in a daemon thread, which is abandoned when that rank dies; the caller gets
LostError.

Note: one view of the dead. A heartbeat carries the ranks that its sender takes for dead, and every receiver believes
it. A rank that was removed and wakes up reads so in their heartbeats, and ends.
"""

from __future__ import annotations

import math
import queue
import threading
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kasoku.core import Comm, InputError, Work
from kasoku.distributed.counting_comm import Activity
from kasoku.distributed.liveness import ENDED, Detector, LostRankError

BEAT_S, DEAD_S = 1.0, 5.0
_SLOWEST_S = 10.0  # the pause between beats of many ranks; three of them in silence are a death
BEAT, SYNC = 1, 8  # tags; a sync point has one for each number of deaths
_LONG, _SHORT = 0, 1  # lanes; the higher ones belong to one attempt of a sync point each
_ATTEMPTS = 1 << 12  # at most, of one sync point
Pause = Callable[[threading.Event, float], bool]


class LostError(RuntimeError):
    """The expected message will not come: its sender is dead."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} is dead")
        self.rank = rank


class Pending:
    """A wait for messages to or from one rank.

    Args:
        rank: the rank at the other end.
        works: the messages, which keep their tensors alive.
        reply: the header of a reply, which is one of the messages.
        arrived: whether they have arrived already.
    """

    def __init__(self, rank: int, works: Sequence[Work], reply: Tensor | None = None, *, arrived: bool = False) -> None:
        self.rank, self.works, self.arrived, self._reply = rank, works, arrived, reply
        self.over = threading.Event()
        if arrived:
            self.over.set()

    @property
    def done(self) -> bool:
        """Whether `wait()` would return, or raise, at once."""
        return self.over.is_set()

    def wait(self) -> list[int]:
        """The reply's header. Raises LostError if the messages will not arrive."""
        self.over.wait()
        if not self.arrived:
            raise LostError(self.rank)
        header: list[int] = [] if self._reply is None else self._reply.tolist()
        return header


class WaitThreads:
    """One thread for each rank and lane, which waits for the messages of that lane in order.

    Attributes: `pending`: the unfinished waits by rank.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self.pending: dict[int, list[Pending]] = {}
        self._lanes: dict[tuple[int, int], tuple[queue.SimpleQueue[Pending | None], threading.Thread]] = {}

    def start(self, ranks: Sequence[int]) -> None:
        """Begins anew with these ranks."""
        self._lanes.clear()
        self.pending.update({rank: [] for rank in ranks})

    def add(self, pending: Pending, lane: int) -> None:
        """Waits behind all other waits of the lane; a dead rank's messages are only kept, as nobody may read them."""
        rank = pending.rank
        self.pending[rank].append(pending)
        if rank in self._peers.dead:
            return
        if (rank, lane) not in self._lanes:
            line: queue.SimpleQueue[Pending | None] = queue.SimpleQueue()
            name = f"kasoku waits for {rank}"
            thread = threading.Thread(target=self._wait, args=(rank, line), name=name, daemon=True)
            self._lanes[rank, lane] = line, thread
            thread.start()
        self._lanes[rank, lane][0].put(pending)

    def stop(self, lanes: Sequence[int]) -> None:
        """Ends all threads, and waits for the end of those of these lanes."""
        for (rank, lane), (line, thread) in self._lanes.items():
            line.put(None)
            if lane in lanes:
                self._peers.join(rank, thread)

    def _wait(self, rank: int, line: queue.SimpleQueue[Pending | None]) -> None:
        """The main function of a thread."""
        peers = self._peers
        while (pending := line.get()) is not None:
            try:
                for work in pending.works:
                    work.wait()
            except RuntimeError:
                return peers.lose(rank, "its connection broke")
            with peers.changed:
                if rank in peers.dead:
                    return None
                pending.arrived = True
                self.pending[rank].remove(pending)
            pending.over.set()
        return None


class Peers:
    """One rank's view of the other ranks, between `start()` and `stop()`.

    Args:
        comm: sends the heartbeats, on channels of its own. Its policy (liveness.py) decides what a death does.
        on_death: called once for each dead rank that is removed.
        pause: waits for an event or a number of seconds, as `threading.Event.wait` does; tests advance it themselves.

    Attributes: `dead`: the reason by rank. `small`: a channel for short messages, which do not wait for long ones.
        `reports`: from each rank's heartbeat: its attempt, whether it ended, and a flag for each dead rank.
    """

    def __init__(self, comm: Comm, on_death: Callable[[int], object], pause: Pause = threading.Event.wait) -> None:
        self.comm, self.on_death, self._pause = comm, on_death, pause
        self.small = comm.channel(patient=True)
        self.dead: dict[int, str] = {}
        self.changed = threading.Condition(threading.RLock())
        self.reports: dict[int, list[int]] = {}
        # Of the current attempt of a sync point (survivors.py): its number, its ranks, and the deaths before it.
        self.attempt, self.attempt_ranks, self.attempt_deaths = 0, list[int](), 0
        self.first_attempt = 0
        activity: Activity | None = comm.activity
        self._watched = activity if activity is not None and activity.heartbeat is not None else None
        self._beat_s = min(_SLOWEST_S, BEAT_S * max(1.0, comm.size / 8))  # as each rank sends to all the rest
        self._dead_s = max(DEAD_S, 3 * self._beat_s)
        self._detector = Detector([], 1)
        self._waits = WaitThreads(self)
        self._attempted: list[Pending] = []
        self._listening: dict[int, threading.Thread] = {}
        self._failure: Exception | None = None
        self._suspects: set[int] = set()  # taken for dead; `dead` are those that this rank goes on without
        self._ended = False
        self._ending = threading.Event()

    @property
    def living(self) -> list[int]:
        """All ranks but the dead, in order."""
        return [rank for rank in range(self.comm.size) if rank not in self.dead]

    @property
    def living_peers(self) -> list[int]:
        """The living ranks but this one."""
        return [rank for rank in self.living if rank != self.comm.rank]

    @property
    def flags(self) -> list[int]:
        """For each rank, whether it is dead."""
        return [int(rank in self.dead) for rank in range(self.comm.size)]

    def start(self) -> None:
        """Starts to beat and to listen."""
        self._ending.clear()
        self._ended = False
        self.first_attempt += _ATTEMPTS
        self._waits.start(self.living_peers)
        self._detector = Detector(self.living_peers, math.floor(self._dead_s / self._beat_s) + 1)
        for rank in self.living_peers:
            self.reports[rank] = [0] * (2 + self.comm.size)
        for rank in self.living_peers:
            thread = threading.Thread(target=self._listen, args=(rank,), name=f"kasoku hears {rank}", daemon=True)
            self._listening[rank] = thread
            thread.start()
        self._heartbeat = threading.Thread(target=self._keep_beating, name="kasoku beats", daemon=True)
        self._heartbeat.start()

    def stop(self) -> None:
        """Ends all threads once all living ranks do; threads that wait for dead ranks are abandoned."""
        self.beat(ended=True)
        for rank, thread in self._listening.items():
            self.join(rank, thread)
        self._waits.stop([_LONG, _SHORT, self._lane])  # in an attempt that failed, a message may never have been sent
        self._ending.set()
        self._heartbeat.join()
        self._listening.clear()

    def join(self, rank: int, thread: threading.Thread, until: Callable[[], bool] = lambda: False) -> None:
        """Waits for a thread that waits for a rank, but not after that rank's death, a failure here or `until`."""
        while rank not in self.dead and not self._failure and thread.is_alive() and not until():
            thread.join(0.05)

    @property
    def failed(self) -> bool:
        """Whether `check` raises."""
        return self._failure is not None

    def check(self) -> None:
        """Raises the error that has ended this rank's part."""
        if self._failure:
            raise self._failure

    # ---- waits

    def wait_for(self, pending: Pending, *, small: bool = False, syncs: bool = False) -> Pending:
        """Starts to wait in a thread for the messages, in order.

        Args:
            pending: the messages.
            small: do not wait for longer messages first.
            syncs: they belong to this attempt of a sync point, and are lost with any rank that dies.
        """
        with self.changed:
            self.check()
            if pending.rank in self.dead or (syncs and len(self.dead) > self.attempt_deaths):
                pending.over.set()
            else:
                if syncs:
                    self._attempted.append(pending)
                self._waits.add(pending, self._lane if syncs else _SHORT if small else _LONG)
        return pending

    def begin_attempt(self) -> None:
        """Makes the living ranks those of a new attempt of a sync point."""
        self.attempt_deaths, self.attempt_ranks = len(self.dead), self.living
        self._attempted.clear()

    @property
    def _lane(self) -> int:
        """Of this attempt's messages: those of a failed attempt may never come, and must not hold up the next."""
        return _SHORT + 1 + self.attempt_deaths

    # ---- deaths

    def lose(self, rank: int, why: str) -> None:
        """Takes a rank for dead, unless it ended before: goes on without it, or ends where a Watchdog watches."""
        with self.changed:
            ended = rank == self.comm.rank or self.reports[rank][1]
            if rank in self._suspects or self._failure or ended:
                return
            self._suspects.add(rank)

        def wait_for_verdict(watched: Activity) -> None:
            watched.wait_for_verdict()  # usually it ends the process; nothing recovers meanwhile
            self.fail(LostRankError(f"rank {rank} died: {why}"))

        if self._watched is None:
            self._remove(rank, why)
        else:
            name = "kasoku waits for the verdict"
            threading.Thread(target=wait_for_verdict, args=(self._watched,), name=name, daemon=True).start()

    def _remove(self, rank: int, why: str) -> None:
        """Goes on without a rank: ends the waits for it and informs the other ranks."""
        with self.changed:
            self.dead[rank] = why
            for pending in [*self._waits.pending.get(rank, ()), *self._attempted]:
                pending.over.set()
            self.changed.notify_all()
        self.beat(also=rank)
        self.on_death(rank)
        warnings.warn(f"rank {rank} died: {why}; the other ranks go on without it", RuntimeWarning, stacklevel=2)

    def fail(self, error: Exception) -> None:
        """Ends all waits; from then on `check` raises the error."""
        with self.changed:
            self._failure = self._failure or error
        self.end()

    def end(self) -> None:
        """Ends all waits and the heartbeat, so that the other ranks take this one for dead."""
        self._ending.set()
        with self.changed:
            for pending in (p for waits in self._waits.pending.values() for p in waits):
                pending.over.set()
            self.changed.notify_all()

    # ---- heartbeats

    def beat(self, *, ended: bool = False, also: int = -1) -> None:
        """Sends a heartbeat to all living ranks, and to `also`, which was removed and may be alive."""
        with self.changed:
            if self._ended:
                return
            self._ended = ended
            report = torch.tensor([self.attempt, ended, *self.flags], dtype=torch.int64)
            for rank in {*self.living, also} - {self.comm.rank, -1}:
                try:
                    work = self.small.send(report, to=rank, tag=BEAT)
                except RuntimeError:
                    continue  # the thread that listens to it will notice
                self._waits.add(Pending(rank, [work]), _LONG)  # a dead rank's is kept for ever

    def _keep_beating(self) -> None:
        """The main function of a thread."""
        while not self._pause(self._ending, self._beat_s):
            self.beat()
            with self.changed:
                self._detector.beat()
                silent = [rank for rank in self._detector.dead() if rank not in self._suspects]
            for rank in silent:
                self.lose(rank, f"no heartbeat for {self._dead_s:g} s")

    def _listen(self, rank: int) -> None:
        """The main function of a thread."""
        report = torch.zeros(2 + self.comm.size, dtype=torch.int64)
        while True:
            try:
                self.small.receive(report, source=rank, tag=BEAT).wait()
            except RuntimeError:
                return self.lose(rank, "its connection broke")
            _, ended, *flags = numbers = report.tolist()
            with self.changed:
                self.reports[rank] = numbers
                self._detector.heard(rank, ENDED if ended else b"")
                self.changed.notify_all()
            if flags[self.comm.rank]:
                line = f"rank {self.comm.rank} was given up by the others, which go on without it"
                return self.fail(InputError(line))
            for dead in (r for r, flag in enumerate(flags) if flag):
                self.lose(dead, f"rank {rank} says so")
            if ended:
                return None
