"""What goes wrong among ranks is named on all others, which then end: a rank that died, one that hangs.

Note: who watches whom. A thread of each rank writes a heartbeat under the rank's own key of a store, over a connection
of its own, so it beats on while the training waits in a collective. Rank 0 reads all keys at once and writes what it
finds as a verdict, which all others read, beside rank 0's key: two requests a rank and beat. What counts is how often
a reader found the same heartbeat, not what a clock says, so a rank that was stopped itself accuses nobody. A store that
breaks or falls silent is rank 0's death (under torchrun: of the host of its store). No time-out of a collective has
part in it: they may be long.

Note: who is named. Where one rank dies, the collectives of others fail in turn, and rank 0 takes its store along when
it ends. So a collective that failed waits for the verdict, and rank 0 ends last, when all that live have read it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from kasoku.core import Comm, InputError
from kasoku.distributed.counting_comm import BEGINS, BUSY, STILL, Pulse, Watched, behind

EXIT_CODE = 4  # of a process that ends because another rank died or hangs
_ADVICE = "start all ranks again with --continue --out DIR (torchrun --max-restarts N does it by itself)"
_NONE = b"-"  # no verdict yet
_ENDED, _FAILED, _TOLD = b"e", b"f", b"v"  # what a rank says last; the others are Pulse.state()
_SHOWN = 3  # ranks named one by one
_CONNECT = timedelta(seconds=30)  # twice that where nobody listens


def end_process(line: str) -> None:
    """Writes the line to stderr and ends the process, also where its main thread is blocked or holds stdout."""
    os.write(2, f"kasoku: {line}\n".encode())
    flush = threading.Thread(target=lambda: (sys.stdout.flush(), sys.stderr.flush()), daemon=True)
    flush.start()
    flush.join(1)
    os._exit(EXIT_CODE)


@dataclass(frozen=True)
class Watchdog:
    """Watches over the ranks of a job; a death is named on all others after dead_s and about two beats.

    Args:
        hang_timeout_s: without a step for so long a rank hangs; 0: the larger of 60 s and 10 median steps.
        beat_s: between heartbeats.
        dead_s: without a heartbeat for so long a rank is dead.
        on_fault: gets the line that names the fault, on the watching thread; by default it ends the process.
    """

    hang_timeout_s: float = 0.0
    beat_s: float = 1.0
    dead_s: float = 6.0
    on_fault: Callable[[str], None] = end_process

    def __post_init__(self) -> None:
        if self.hang_timeout_s < 0:
            raise InputError(f"hang_timeout_s={self.hang_timeout_s}: seconds above 0, or 0 to choose them by the steps")
        if self.beat_s <= 0 or self.dead_s < 3 * self.beat_s:
            raise InputError(f"beat_s={self.beat_s}, dead_s={self.dead_s}: beat_s above 0, dead_s at least 3 beats")

    def start(self, comm: Comm, store: tuple[str, int]) -> Watched:
        """Begins to watch; called by all ranks together. One rank alone is not watched.

        Args:
            comm: of the ranks; what is to be watched goes through the one returned.
            store: host and port of a `torch.distributed.TCPStore` (MASTER_ADDR, MASTER_PORT).
        """
        pulse = Pulse(self.hang_timeout_s, comm.clock)
        if comm.size > 1:
            heart = _Heart(self, pulse, comm, _connected(store), "{}:{}".format(*store))
            heart.start()
            pulse.heart = heart
        return Watched(comm, pulse)


class Store(Protocol):
    """The three requests of a `torch.distributed.TCPStore` that the heartbeats need."""

    def set(self, key: str, value: str) -> None:
        """Stores a value."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of several keys."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Stores `desired` where `expected` was stored; the value afterwards."""


class Detector:
    """Who is dead and whether the ranks hang, from the heartbeats that were read and a time.

    Args:
        ranks: that are watched.
        patience: so often the same heartbeat is a death.
        now: the time.
    """

    def __init__(self, ranks: Sequence[int], patience: int, now: float) -> None:
        self.ranks, self.patience = [*ranks], patience
        self.last = dict.fromkeys(self.ranks, b"")  # heartbeats
        self.same = dict.fromkeys(self.ranks, 0)  # how often each was found again
        self.calm = now  # when a rank was busy last, so that the others rightly waited

    def read(self, found: Sequence[bytes]) -> None:
        """Takes in one reading, a heartbeat a rank."""
        for rank, heartbeat in zip(self.ranks, found, strict=True):
            self.same[rank] = self.same[rank] + 1 if heartbeat == self.last[rank] else 0
            self.last[rank] = heartbeat

    def living(self) -> list[int]:
        """The ranks that do not seem to have fallen silent."""
        return [rank for rank in self.ranks if self.same[rank] < self.patience - 1]

    def dead(self) -> list[int]:
        """The ranks whose heartbeat stands still, and those that fell silent along with them, a reading later."""
        ended = {rank for rank, last in self.last.items() if last[:1] in (_ENDED, _TOLD)}
        silent = [rank for rank in self.ranks if rank not in {*self.living(), *ended}]
        return silent if any(self.same[rank] >= self.patience for rank in silent) else []

    def hangs(self, own: bytes, now: float, limit_s: float) -> bool:
        """Whether a rank makes no step, and none was busy for so long; `own`: the state of the rank that watches."""
        states = {own, *(heartbeat[:1] for heartbeat in self.last.values())}
        if states & {BEGINS, BUSY}:
            self.calm = now
        return STILL in states and now - self.calm >= limit_s


class _Heart:
    """One rank's heartbeat and its watch over the others.

    Args:
        setting: of the watch.
        pulse: what this rank tells.
        comm: of the ranks; its clock tells the time.
        store: the ranks' common store: set, multi_get and compare_set as a TCPStore has them.
        where: of the store, for messages.
    """

    def __init__(self, setting: Watchdog, pulse: Pulse, comm: Comm, store: Store, where: str) -> None:
        self.setting, self.pulse, self.rank, self.store, self.where = setting, pulse, comm.rank, store, where
        self.clock = comm.clock
        name = f"kasoku/{comm.broadcast_object(uuid.uuid4().hex)}"  # a store may outlive a training
        self.keys = [f"{name}/{rank}" for rank in range(comm.size)]
        self.verdict = f"{name}/verdict"
        self.who = f"host {socket.gethostname()}, pid {os.getpid()}"
        patience = round(setting.dead_s / setting.beat_s)  # so often the same heartbeat is a death
        self.detector = Detector(range(1, comm.size) if comm.rank == 0 else [0], patience, self.clock.now())
        self.beats = self.answers = 0
        self.failed = ""
        self.closing, self.over, self.told = threading.Event(), threading.Event(), threading.Lock()
        if comm.rank == 0:
            self.store.set(self.verdict, _NONE.decode())
        self.beat(pulse.state())
        self.whos = comm.gather_objects(self.who)  # from here on all keys are there

    def start(self) -> None:
        """Starts the two threads: one beats and watches, one notices when the store falls silent."""
        for f in (self._live, self._guard):
            threading.Thread(target=f, name=f"kasoku {f.__name__.strip('_')}", daemon=True).start()

    def _live(self) -> None:
        for pause_s in self.watch():
            time.sleep(pause_s) if self.closing.is_set() else self.closing.wait(pause_s)

    def _guard(self) -> None:
        for pause_s in self.guard():
            self.over.wait(pause_s)

    def watch(self) -> Iterator[float]:
        """Beats and watches until the end; yields how many seconds to wait before it is resumed."""
        try:
            yield self.setting.beat_s
            while not self.closing.is_set():
                self.beat(self.pulse.state())
                if (yield from self.look()):
                    return
                yield self.setting.beat_s
            self.beat(_FAILED if self.failed else _ENDED)
            if self.rank == 0:
                yield from self.wait_for_others(self.setting.dead_s + 2 * self.setting.beat_s)
        except RuntimeError:
            self.fault(self.gone())
        finally:
            self.over.set()

    def guard(self) -> Iterator[float]:
        """Notices when the store does not answer; yields as `watch` does."""
        seen, same = 0, 0
        while not self.over.is_set():
            yield self.setting.beat_s
            same = same + 1 if self.answers == seen else 0
            seen = self.answers
            if same > self.detector.patience:
                return self.fault(self.gone())
        return None

    def beat(self, state: bytes) -> None:
        """Writes this rank's heartbeat."""
        self.beats += 1
        told = {"beat": self.beats, "who": self.who, "failed": self.failed, **self.pulse.told()}
        self.store.set(self.keys[self.rank], state.decode() + json.dumps(told))

    def look(self) -> Generator[float, None, bool]:
        """Reads the others' heartbeats and the verdict; True when there is nothing more to watch."""
        *found, verdict = self.store.multi_get([self.keys[rank] for rank in self.detector.ranks] + [self.verdict])
        self.answers += 1
        line = self.judge(found) if verdict == _NONE else ""
        if line:
            verdict = self.store.compare_set(self.verdict, _NONE.decode(), line)  # the first one said
        if verdict != _NONE:
            with suppress(RuntimeError):  # a store that breaks now changes nothing
                self.beat(_TOLD)
                if self.rank == 0:
                    yield from self.wait_for_others(3 * self.setting.beat_s)
            self.fault(verdict.decode())
            return True
        if self.rank > 0 and found[0][:1] == _ENDED:
            self.beat(_ENDED)
            return True
        return False

    def judge(self, found: Sequence[bytes]) -> str:
        """The fault that these heartbeats show, or nothing."""
        self.detector.read(found)
        if dead := self.detector.dead():
            return self.dead(dead, self.detector.last[dead[0]])
        if self.rank > 0 or not self.detector.hangs(self.pulse.state(), self.clock.now(), self.pulse.limit_s):
            return ""
        told = [self.pulse.told(), *(json.loads(heartbeat[1:]) for heartbeat in found)]
        still_s = max(rank["still_s"] for rank in told)
        return f"no step for {still_s:.0f} s: {behind(told, self.names)}"

    def dead(self, ranks: Sequence[int], last: bytes) -> str:
        """The line for ranks whose heartbeats stand still."""
        if last[:1] == _FAILED:
            return f"{self.names(ranks)} failed: {json.loads(last[1:])['failed']}"
        return f"{self.names(ranks)} died: no heartbeat for {self.setting.dead_s:g} s"

    def gone(self) -> str:
        """The line for a store that does not answer."""
        last = self.detector.last.get(0, b"")
        if last[:1] == _FAILED:
            return self.dead([0], last)
        rank = f"{self.names([0])} is gone: " if self.rank > 0 else ""
        return f"{rank}the store at {self.where} does not answer"

    def names(self, ranks: Sequence[int]) -> str:
        """Ranks as a line names them."""
        shown = [f"{rank} ({self.whos[rank]})" for rank in ranks[:_SHOWN]]
        more = [f"{len(ranks) - _SHOWN} more"] if len(ranks) > _SHOWN else []
        *most, final = shown + more
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(most)}{' and ' if most else ''}{final}"

    def fault(self, line: str) -> None:
        """Says it, once; nothing where this rank has come to its end."""
        if not self.closing.is_set() and self.told.acquire(blocking=False):
            self.setting.on_fault(f"{line}; {_ADVICE}")
        self.over.set()

    def wait_for_others(self, most_s: float) -> Iterator[float]:
        """Until all others that live have said their last, for they need the store of this process; rank 0 only."""
        until = self.clock.now() + most_s
        keys = [self.keys[rank] for rank in self.detector.living()]
        while keys and self.clock.now() < until:
            found = self.store.multi_get(keys)
            self.answers += 1
            keys = [key for key, last in zip(keys, found, strict=True) if last[:1] not in (_ENDED, _FAILED, _TOLD)]
            if keys:
                yield self.setting.beat_s / 20

    def end(self, failed: str) -> None:
        """Says that this rank has come to its end, or failed."""
        self.failed = " ".join(failed.split())
        self.closing.set()

    def close(self, failed: str) -> None:
        """The same, and waits until the others may end too."""
        self.end(failed)
        self.over.wait(self.setting.dead_s + 4 * self.setting.beat_s)

    def hear_out(self) -> None:
        """Waits for a fault to be named, as long as a death takes."""
        self.over.wait(self.setting.dead_s + 5 * self.setting.beat_s)


def _connected(address: tuple[str, int]) -> Any:  # a Store
    try:
        host, port = address
        client = dist.TCPStore  # type: ignore[attr-defined]
        return client(host, port, is_master=False, wait_for_workers=False, timeout=_CONNECT)
    except RuntimeError as error:
        line = " ".join(str(error).split())[:200]
        raise InputError(
            f"the store at {address[0]}:{address[1]} does not answer ({line}): give host and port of rank 0's TCPStore "
            "(MASTER_ADDR, MASTER_PORT)"
        ) from error
