"""Which ranks are alive, and waits and sums that end when one of them dies.

Note: why a wait has a thread of its own. A wait of gloo for a rank that stands still would end only by a time-out, and
that breaks the connections to all other ranks too. So what waits for one rank is a daemon thread, which is left behind
when that rank dies; who asked it to wait is told.

Note: how all come to know the same. A heartbeat carries who its sender takes for dead, and what any rank says of the
dead all believe. Ranks meet by attempts: one begins when all that live have said the same dead, its messages have tags
of their own, and it counts when all that live have said that they have it whole; a death before that begins another.
A rank that was given up and wakes up reads so in the others' heartbeats, and ends. What counts is how often a rank
beat without hearing another, not what a clock says: one that was stopped itself accuses nobody.
"""

from __future__ import annotations

import queue
import threading
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kasoku.core import Comm, InputError, Work

BEAT_S, DEAD_S = 1.0, 5.0
_SLOWEST_S = 10.0  # the pause between beats of many ranks; three of them in silence are a death
BEAT, MEET = 1, 8  # tags; of a meeting one for each number of dead
_LONG, _SHORT = 0, 1  # lanes; from there on one for each attempt of a meeting
_MOST = 1 << 12  # attempts of one meeting
Pause = Callable[[threading.Event, float], bool]


class LostError(RuntimeError):
    """What was asked of a rank will not come: it is dead."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} is dead")
        self.rank = rank


class Pending:
    """What goes to or comes from one rank."""

    def __init__(self, rank: int, works: Sequence[Work]) -> None:
        self.rank, self.works, self.whole = rank, works, False
        self.over = threading.Event()

    def wait(self) -> None:
        """Until it is there; raises LostError where it never will be."""
        self.over.wait()
        if not self.whole:
            raise LostError(self.rank)


class Life:
    """One rank's view of who is alive, between `start()` and `stop()`.

    Args:
        comm: sends the heartbeats, on channels of its own.
        on_death: called once for each dead rank.
        pause: waits for an event or a number of seconds, as `threading.Event.wait` does; a test gives time of its own.

    Attributes: `dead`: why, by rank. `small`: a channel for short messages, which
        wait for no long one. `meeting`: the ranks of this attempt; one that dies later is among them until the next.
    """

    def __init__(self, comm: Comm, on_death: Callable[[int], object], pause: Pause = threading.Event.wait) -> None:
        self.comm, self.on_death, self._pause = comm, on_death, pause
        self.small = comm.channel(patient=True)
        self.dead: dict[int, str] = {}
        self.changed = threading.Condition(threading.RLock())
        self._lines: dict[tuple[int, int], queue.SimpleQueue[Pending | None]] = {}
        self._pending: dict[int, list[Pending]] = {}
        self._waiting: dict[tuple[int, int], threading.Thread] = {}
        self._hearing: dict[int, threading.Thread] = {}
        self._silent: dict[int, int] = {}  # beats of ours since we heard of a rank
        self._told: dict[int, list[int]] = {}  # by each rank: attempt, bye, and who is dead
        self._attempt, self._number, self._met = 0, 0, 0
        self.meeting: list[int] = []
        self._attempted: list[Pending] = []  # of this attempt
        self._out = self._said_bye = False
        self._beat_s = min(_SLOWEST_S, BEAT_S * max(1.0, comm.size / 8))  # as each beats to all
        self._ending = threading.Event()

    @property
    def living(self) -> list[int]:
        """All ranks but the dead, in order."""
        return [rank for rank in range(self.comm.size) if rank not in self.dead]

    def start(self) -> None:
        """Begins to beat and to listen."""
        self._ending.clear()
        self._said_bye = False
        self._number += _MOST  # of the meeting to come
        self._lines.clear()
        for rank in self._others():
            self._pending[rank], self._silent[rank], self._told[rank] = [], 0, [0] * (2 + self.comm.size)
            self._line(rank, _LONG)
        for rank in self._others():
            thread = threading.Thread(target=self._listen, args=(rank,), name=f"kasoku hears {rank}", daemon=True)
            self._hearing[rank] = thread
            thread.start()
        self._heart = threading.Thread(target=self._beat_on, name="kasoku beats", daemon=True)
        self._heart.start()

    def stop(self) -> None:
        """Ends all threads, when all that live do; those that wait for the dead are left behind."""
        self._beat(bye=1)
        for rank, thread in self._hearing.items():
            self.join(rank, thread)
        for (rank, lane), thread in self._waiting.items():
            self._lines[rank, lane].put(None)
            if lane <= _SHORT or lane == self._lane:  # in an attempt that failed, a message may never have been sent
                self.join(rank, thread)
        self._ending.set()
        self._heart.join()
        self._hearing.clear()
        self._waiting.clear()

    def join(self, rank: int, thread: threading.Thread, or_else: Callable[[], bool] = lambda: False) -> None:
        """Waits for the end of a thread that waits for a rank, or for the death of that, of this one, or `or_else`."""
        while rank not in self.dead and not self._out and thread.is_alive() and not or_else():
            thread.join(0.05)

    # ---- waits

    def pending(self, rank: int, works: Sequence[Work], *, small: bool = False, meets: bool = False) -> Pending:
        """Waits for these in a thread, in order.

        Args:
            rank: the rank at the other end.
            works: what is sent to it and received from it.
            small: they do not wait for longer messages.
            meets: they belong to this attempt of a meeting, and are lost with any rank that dies.
        """
        found = Pending(rank, works)
        with self.changed:
            self.check()
            if rank in self.dead or (meets and len(self.dead) > self._met):
                found.over.set()
            else:
                self._pending[rank].append(found)
                if meets:
                    self._attempted.append(found)
                self._line(rank, self._lane if meets else _SHORT if small else _LONG).put(found)
        return found

    @property
    def _lane(self) -> int:
        """Of this attempt's messages: a failed attempt's may never come, and must not hold up the next."""
        return _SHORT + 1 + self._met

    def _line(self, rank: int, lane: int) -> queue.SimpleQueue[Pending | None]:
        """What is waited for of a rank, one after the other; its thread begins with it."""
        if (rank, lane) not in self._lines:
            line = self._lines[rank, lane] = queue.SimpleQueue()
            name = f"kasoku waits for {rank}"
            thread = threading.Thread(target=self._wait, args=(rank, line), name=name, daemon=True)
            self._waiting[rank, lane] = thread
            thread.start()
        return self._lines[rank, lane]

    def _wait(self, rank: int, line: queue.SimpleQueue[Pending | None]) -> None:
        """The main function of a thread."""
        while (found := line.get()) is not None:
            try:
                for work in found.works:
                    work.wait()
            except RuntimeError:
                return self.lose(rank, "its connection broke")
            with self.changed:
                if rank in self.dead:
                    return None
                found.whole = True
                self._pending[rank].remove(found)
            found.over.set()
        return None

    def lose(self, rank: int, why: str) -> None:
        """Takes a rank for dead."""
        with self.changed:
            if rank in self.dead or self._out or rank == self.comm.rank or self._told[rank][1]:
                return
            self.dead[rank] = why
            for found in [*self._pending.get(rank, ()), *self._attempted]:
                found.over.set()
            self.changed.notify_all()
        self._beat(also=rank)
        self.on_death(rank)
        warnings.warn(f"rank {rank} died: {why}; the other ranks go on without it", RuntimeWarning, stacklevel=2)

    # ---- heartbeats

    def _beat(self, *, bye: int = 0, also: int = -1) -> None:
        """Tells all that live, and `also` one that was given up, whether it hears it or not."""
        with self.changed:
            if self._said_bye:
                return
            self._said_bye = bool(bye)
            flags = [int(rank in self.dead) for rank in range(self.comm.size)]
            told = torch.tensor([self._attempt, bye, *flags], dtype=torch.int64)
            for rank in {*self.living, also} - {self.comm.rank, -1}:
                try:
                    work = self.small.send(told, to=rank, tag=BEAT)
                except RuntimeError:
                    continue  # whoever hears it will say so
                held = Pending(rank, [work, Held(told)])
                self._pending[rank].append(held)  # kept for ever where nobody reads it yet
                if rank not in self.dead:
                    self._line(rank, _LONG).put(held)

    def _beat_on(self) -> None:
        """The main function of a thread."""
        while not self._pause(self._ending, self._beat_s):
            self._beat()
            with self.changed:
                for rank in self.living:
                    self._silent[rank] = self._silent.get(rank, 0) + 1
                late = [r for r in self.living if r in self._told and self._silent[r] * self._beat_s > self._patience]
            for rank in late:
                self.lose(rank, f"no heartbeat for {self._patience:g} s")

    @property
    def _patience(self) -> float:
        return max(DEAD_S, 3 * self._beat_s)

    def _listen(self, rank: int) -> None:
        """The main function of a thread."""
        told = torch.zeros(2 + self.comm.size, dtype=torch.int64)
        while True:
            try:
                self.small.receive(told, source=rank, tag=BEAT).wait()
            except RuntimeError:
                return self.lose(rank, "its connection broke")
            with self.changed:
                self._silent[rank], self._told[rank] = 0, told.tolist()
                self.changed.notify_all()
            _, bye, *flags = self._told[rank]
            if flags[self.comm.rank]:
                return self._given_up()
            for other in (r for r, dead in enumerate(flags) if dead):
                self.lose(other, f"rank {rank} says so")
            if bye:
                return None

    def _given_up(self) -> None:
        """The others take this rank for dead: nothing that it waits for will come."""
        with self.changed:
            self._out = True
        self.end()

    def end(self) -> None:
        """Nothing is waited for any more, and no heart beats: the others give this rank up, if it does not end."""
        self._ending.set()
        with self.changed:
            for found in (p for some in self._pending.values() for p in some):
                found.over.set()
            self.changed.notify_all()

    # ---- meetings

    def attempt(self) -> None:
        """Waits until all that live take the same ranks for dead."""

        def same() -> bool:
            self._met, self.meeting = len(self.dead), self.living
            self._attempted.clear()
            return all(self._told[rank][2:] == self._flags() for rank in self._others())

        self._until(same)

    def agreed(self) -> bool:
        """After an attempt that came to its end here: whether it did so on all that live."""
        self._attempt = self._number + self._met

        def done() -> bool:
            return all(self._told[rank][0] >= self._attempt for rank in self._others())

        def failed() -> bool:
            told = [self._told[rank] for rank in self._others()]
            return any(attempt < self._attempt and sum(dead) > self._met for attempt, _, *dead in told)

        self._until(lambda: done() or failed())
        return done()

    def _until(self, ready: Callable[[], bool]) -> None:
        self._beat()
        with self.changed:
            self.changed.wait_for(lambda: self._out or ready())
        self.check()

    def check(self) -> None:
        """Raises InputError where the others have given this rank up."""
        if self._out:
            raise InputError(f"rank {self.comm.rank} was given up by the others, which go on without it")

    @property
    def tag(self) -> int:
        """Of this attempt's messages."""
        return MEET + self._met

    def _others(self) -> list[int]:
        return [rank for rank in self.living if rank != self.comm.rank]

    def _flags(self) -> list[int]:
        return [int(rank in self.dead) for rank in range(self.comm.size)]


class Held:
    """Keeps a tensor alive while it is sent."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def wait(self) -> None:
        pass

    def done(self) -> bool:
        return True
