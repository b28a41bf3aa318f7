"""Heartbeats between asynchronous ranks, and waits that end when the rank at the other end dies.

Note: threads. A gloo wait for a stopped rank would end only by a time-out, which breaks the connections to all other
ranks too. So each wait for a rank runs in a daemon thread, which is abandoned when that rank dies; its future raises
LostError. (A ThreadPoolExecutor would join that thread when the process ends.)

Note: one view of the dead. A heartbeat carries the ranks that its sender takes for dead, and every receiver believes
it. A removed rank that wakes up reads in the others' heartbeats that it counts as dead, and ends.
"""

from __future__ import annotations

import math
import queue
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from kasoku.core import Comm, Work
from kasoku.distributed.liveness import ENDED, Detector, LostRankError, daemon

BEAT_S, DEAD_S = 1.0, 5.0
_SLOWEST_S = 10.0  # the pause between beats of many ranks; three of them in silence are a death
BEAT, ASK, REPLY = 1, 2, 3  # tags of messages
_LONG, _SHORT = 0, 1  # lanes of messages
_SYNC = 8  # base of the tag and the lane of a sync point; the number of deaths is added
Pause = Callable[[threading.Event, float], bool]
Tensors = Sequence[Tensor]
Reply = Future[Any]  # the first tensor received


def answered(result: Any) -> Reply:
    """A reply that is there already, or an error in its place."""
    reply: Reply = Future()
    reply.set_exception(result) if isinstance(result, BaseException) else reply.set_result(result)
    return reply


class LostError(RuntimeError):
    """The expected message will not come: its sender is dead."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} is dead")
        self.rank = rank


class WaitThreads:
    """One thread for each rank and lane, which waits for the messages of that lane in order.

    Attributes: `unfinished`: the waits by rank, with their lanes and their messages, which keep the tensors alive.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self.unfinished: dict[int, dict[Reply, tuple[int, Sequence[Work]]]] = {}
        self._lanes: dict[tuple[int, int], tuple[queue.SimpleQueue[Any], threading.Thread]] = {}

    def start(self, ranks: Sequence[int]) -> None:
        """Begins anew with these ranks."""
        self._lanes.clear()
        self.unfinished.update({rank: {} for rank in ranks})

    def add(self, rank: int, works: Sequence[Work], lane: int, result: Tensor | None = None) -> Reply:
        """Waits behind all other waits of the lane; a dead rank's messages are only kept, as nobody may read them."""
        reply: Reply = Future()
        self.unfinished[rank][reply] = lane, works
        if rank not in self._peers.dead:
            if (rank, lane) not in self._lanes:
                line: queue.SimpleQueue[Any] = queue.SimpleQueue()
                self._lanes[rank, lane] = line, daemon(f"kasoku waits for {rank}", self._wait, rank, line)
            self._lanes[rank, lane][0].put((reply, works, result))
        return reply

    def lose(self, rank: int | None = None) -> None:
        """Ends all waits for `rank` and all waits of sync points; without `rank`, every wait."""
        for source, waits in self.unfinished.items():
            for reply, (lane, _) in waits.items():
                if not reply.done() and (rank in (None, source) or lane >= _SYNC):
                    reply.set_exception(LostError(source))

    def stop(self) -> None:
        """Ends all threads, and waits for their end, but not in an attempt that failed: its messages may never come."""
        last = max((lane for _, lane in self._lanes), default=0)
        for (rank, lane), (line, thread) in self._lanes.items():
            line.put(None)
            if lane in (_LONG, _SHORT, last):
                self._peers.join(rank, thread)

    def _wait(self, rank: int, line: queue.SimpleQueue[Any]) -> None:
        peers = self._peers
        while item := line.get():
            reply, works, result = item
            try:
                for work in works:
                    work.wait()
            except RuntimeError:
                return peers.lose(rank, "its connection broke")
            with peers.changed:
                if rank in peers.dead:
                    return None
                self.unfinished[rank].pop(reply, None)
                if not reply.done():
                    reply.set_result(result)
        return None


class Peers:
    """One rank's view of the other ranks, between `start()` and `stop()`.

    Args:
        comm: sends the heartbeats, on channels of its own. Its policy (liveness.py) decides what a death does.
        leaders: for each rank, the first rank of its node: ranks of one node step together, and die together.
        on_death: called once for each dead rank that is removed.
        pause: waits for an event or a number of seconds, as `threading.Event.wait` does; tests advance it themselves.

    Attributes: `dead`: the reason by rank. `small`: a channel for short messages, which do not wait for long ones.
        `reports`: from each rank's heartbeat: its attempt, whether it ended, and a flag for each dead rank.
    """

    def __init__(
        self, comm: Comm, leaders: Sequence[int], on_death: Callable[[int], object], pause: Pause = threading.Event.wait
    ) -> None:
        self.comm, self.leaders, self.on_death, self._pause = comm, leaders, on_death, pause
        self.small = comm.channel(patient=True)
        self.dead: dict[int, str] = {}
        self.changed = threading.Condition(threading.RLock())
        self.reports: dict[int, list[int]] = {}
        self.attempt = 0  # number of the last complete attempt of a sync point (survivors.py); 0: none yet
        activity = comm.activity
        self._watched: Any = activity if activity is not None and activity.heartbeat is not None else None
        self._beat_s = min(_SLOWEST_S, BEAT_S * max(1.0, comm.size / 8))  # as each rank sends to all the rest
        self._dead_s = max(DEAD_S, 3 * self._beat_s)
        self._waits = WaitThreads(self)
        self._listening: dict[int, threading.Thread] = {}
        self._failure: BaseException | None = None
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
        self._ended, self.attempt = False, 0
        self._waits.start(self.living_peers)
        if self._watched is not None and self._watched.steps_on:
            self._dead_s = max(self._watched.membership.watchdog.dead_s, 3 * self._beat_s)
        self._detector = Detector(self.living_peers, math.floor(self._dead_s / self._beat_s) + 1)
        self.reports.update({rank: [0] * (2 + self.comm.size) for rank in self.living_peers})
        self._listening = {rank: daemon(f"kasoku hears {rank}", self._listen, rank) for rank in self.living_peers}
        self._heartbeat = daemon("kasoku beats", self._keep_beating)

    def stop(self) -> None:
        """Ends all threads once all living ranks do; threads that wait for dead ranks are abandoned."""
        self.send_heartbeat(ended=True)
        for rank, thread in self._listening.items():
            self.join(rank, thread)
        self._waits.stop()
        self._ending.set()
        self._heartbeat.join()
        self._listening.clear()

    def join(self, rank: int, thread: threading.Thread) -> None:
        """Waits for a thread that waits for a rank, but not after that rank's death or a failure here."""
        while rank not in self.dead and not self._failure and thread.is_alive():
            thread.join(0.05)

    def check(self) -> None:
        """Raises the error that has ended this rank's part."""
        if self._failure:
            raise self._failure

    # ---- waits

    def exchange(
        self, rank: int, channel: Comm, sends: Tensors, receives: Tensors = (), deaths: int | None = None
    ) -> Reply:
        """Starts to send a request to a rank and to receive its reply; the latter raises LostError if the rank dies.

        Empty tensors are left out. `deaths`: the messages are of an attempt of a sync point after so many deaths, and
        lost with the next one.
        """
        lane, sent, received = _SHORT if channel is self.small else _LONG, ASK, REPLY
        if deaths is not None:
            lane = sent = received = _SYNC + deaths
        works: list[Work] = []
        try:
            if rank not in self.dead:
                works = [channel.send(x, to=rank, tag=sent) for x in sends if len(x)]
                works += [channel.receive(x, source=rank, tag=received) for x in receives if len(x)]
        except RuntimeError:
            self.lose(rank, "its connection broke")
        with self.changed:
            self.check()
            if rank not in self.dead and deaths in (None, len(self.dead)):
                return self._waits.add(rank, works, lane, receives[0] if receives else None)
        return answered(LostError(rank))

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Waits for something that a heartbeat, an answer or a death may change; raises as `check` does."""
        with self.changed:
            self.changed.wait_for(lambda: self._failure or ready())
        self.check()

    # ---- deaths

    def lose(self, rank: int, why: str) -> None:
        """Takes a rank for dead, unless it ended before: goes on without it, or ends as a Watchdog says."""
        with self.changed:
            ended = rank == self.comm.rank or self.reports[rank][1]
            if rank in self._suspects or self._failure or ended:
                return
            self._suspects.add(rank)

        if self._watched is not None and not self._watched.steps_on:
            daemon("kasoku waits for the verdict", self._end_by_verdict, self._watched, rank, why)
            return
        with self.changed:
            self.dead[rank] = why
            self._waits.lose(rank)
            self.on_death(rank)
            self.changed.notify_all()
        self.send_heartbeat(also=rank)
        if self.leaders[rank] == self.leaders[self.comm.rank]:
            self.fail(LostRankError(f"rank {rank}, which steps together with this one, died: {why}"))
            return
        warnings.warn(f"rank {rank} died: {why}; the other ranks go on without it", RuntimeWarning, stacklevel=2)
        for other, leader in enumerate(self.leaders):
            if leader == self.leaders[rank]:
                self.lose(other, f"rank {rank} of its node died")

    def _end_by_verdict(self, watched: Any, rank: int, why: str) -> None:
        watched.wait_for_verdict()  # usually it ends the process; nothing recovers meanwhile
        self.fail(LostRankError(f"rank {rank} died: {why}"))

    def fail(self, error: BaseException) -> None:
        """Ends all waits and the heartbeat, so the other ranks take this one for dead; `check` raises the error."""
        self._ending.set()
        with self.changed:
            self._failure = self._failure or error
            self._waits.lose()
            self.changed.notify_all()

    # ---- heartbeats

    def send_heartbeat(self, *, ended: bool = False, also: int = -1) -> None:
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
                self._waits.add(rank, [work], _LONG)  # a dead rank's is kept for ever

    def _keep_beating(self) -> None:
        while not self._pause(self._ending, self._beat_s):
            self.send_heartbeat()
            with self.changed:
                self._detector.count_beat()
                silent = [rank for rank in self._detector.dead() if rank not in self._suspects]
            for rank in silent:
                self.lose(rank, f"no heartbeat for {self._dead_s:g} s")

    def _listen(self, rank: int) -> None:
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
                return self.fail(LostRankError(line))
            for dead in (r for r, flag in enumerate(flags) if flag):
                self.lose(dead, f"rank {rank} says so")
            if ended:
                return None
