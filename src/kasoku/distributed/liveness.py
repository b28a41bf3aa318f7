"""The failure detector: names a rank that died or hangs, and decides how the other ranks continue.

Note: heartbeats go through a store. A thread of each rank writes them over a connection of its own, so it does not stop
while the training waits in a collective. Rank 0 reads all and writes a fault as the verdict; the other ranks read the
verdict and rank 0's heartbeat. A store that breaks or falls silent is rank 0's death (under torchrun: of the host of
its store). A Detector counts heartbeats and reads no clock, so a rank that was stopped itself finds no other silent. A
message between two ranks whose connection breaks is a death at once. Time-outs of collectives play no part, so they may
be long.

Note: the rank that is named. If one rank dies, the collectives of all ranks fail in turn, and the store ends with rank
0's process. So a collective that failed waits for the verdict, and rank 0 ends last, once all living ranks read it.
"""

import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from kasoku.core import Comm, InputError, summary
from kasoku.distributed.consensus import name_ranks
from kasoku.distributed.counting_comm import BUSY, STALLED, STARTING, Activity, CountingComm, Names, describe_stragglers

LOST_RANK_EXIT_CODE = 4  # of a process that ends because another rank died or hangs
# The first byte of a heartbeat: what the rank does (Activity.state), or its last word.
ENDED, FAILED, INFORMED = b"e", b"f", b"v"  # INFORMED: it has read the verdict
_NO_VERDICT = b"-"
_ADVICE = "start all ranks again with --continue --out DIR (torchrun --max-restarts N does it by itself)"
Fault = tuple[str, list[int]]  # a line, and the ranks without which the others may go on
_CONNECT = timedelta(seconds=30)  # twice that if nobody listens


class LostRankError(RuntimeError):
    """Another rank is gone, so this one cannot go on."""


def is_lost_rank(error: BaseException) -> bool:
    """Whether the error is that of a collective that failed, as when another rank is gone."""
    told = any(words in str(error) for words in ("gloo", "caused pair closure"))  # the latter after `abort`
    return isinstance(error, RuntimeError) and (told or isinstance(error, dist.DistError))


def daemon(name: str, f: Callable[..., object], *arguments: object) -> threading.Thread:
    """A thread that was started and does not keep the process alive."""
    thread = threading.Thread(target=f, args=arguments, name=name, daemon=True)
    thread.start()
    return thread


def open_store(address: tuple[str, int], *, is_master: bool = False) -> Any:
    """A store on this rank for all of them, or a connection to it."""
    client: Any = dist.TCPStore  # type: ignore[attr-defined]
    return client(*address, is_master=is_master, wait_for_workers=False, timeout=_CONNECT)


class Detector:
    """Judges from heartbeats which ranks are dead. It has no thread, clock or connection.

    A rank is dead after `patience` beats without a new heartbeat from it. Once a rank is dead, one that is a beat short
    of that is dead too, so that ranks which die together are named together.
    """

    def __init__(self, ranks: Sequence[int], patience: int) -> None:
        self.ranks, self.patience = [*ranks], patience
        self.last = dict.fromkeys(self.ranks, b"")  # heartbeats
        self.silent = dict.fromkeys(self.ranks, 0)  # beats of our own since a rank's last new heartbeat

    def beat(self, heartbeats: Sequence[bytes]) -> None:
        """Counts a beat of our own, and takes in the heartbeats that the ranks have now."""
        for rank, heartbeat in zip(self.ranks, heartbeats, strict=True):
            self.silent[rank] = self.silent[rank] + 1 if heartbeat == self.last[rank] else 0
            self.last[rank] = heartbeat

    def living(self) -> list[int]:
        """The ranks that have not been silent for too long."""
        return [rank for rank in self.ranks if self.silent[rank] < self.patience - 1]

    def dead(self) -> list[int]:
        """The ranks that fell silent without an announcement of their end."""
        ended = {rank for rank, last in self.last.items() if last[:1] in (ENDED, INFORMED)}
        silent = [rank for rank in self.ranks if rank not in {*self.living(), *ended}]
        return silent if any(self.silent[rank] >= self.patience for rank in silent) else []


def end_process(line: str) -> None:
    """Writes the line to stderr and ends the process, even if its main thread is blocked or holds stdout."""
    os.write(2, f"kasoku: {line}\n".encode())
    daemon("kasoku flush", lambda: (sys.stdout.flush(), sys.stderr.flush())).join(1)
    os._exit(LOST_RANK_EXIT_CODE)


@dataclass(frozen=True)
class Watchdog:
    """Watches over the ranks of a job; all other ranks name a dead one after dead_s and about two beats.

    `hang_timeout_s`: seconds without a step after which a rank hangs; 0: the larger of 60 s and 10 median steps.
    `beat_s`: seconds between heartbeats. `dead_s`: seconds without a heartbeat after which a rank is dead. `on_fault`:
    called with the line that names the fault, on the watching thread; by default it ends the process.
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

    def start(self, comm: Comm, store: tuple[str, int]) -> CountingComm:
        """Starts to watch the collectives of the comm that it returns; collective. One rank alone is not watched.

        `store`: host and port of a `torch.distributed.TCPStore` (MASTER_ADDR, MASTER_PORT).
        """
        activity = Activity(self.hang_timeout_s, comm.clock)
        self.watch(activity, comm, store)
        return CountingComm(comm, activity)

    def watch(self, activity: Activity, comm: Comm, store: tuple[str, int]) -> None:
        """Watches over an activity, as `start` does; collective."""
        activity.heartbeat = None
        if comm.size > 1:
            host, port = store
            try:
                connected = open_store(store)
            except RuntimeError as error:
                advice = "give host and port of rank 0's TCPStore (MASTER_ADDR, MASTER_PORT)"
                line = f"the store at {host}:{port} does not answer ({summary(error)}): {advice}"
                raise InputError(line) from error
            activity.heartbeat = StoreHeartbeat(self, activity, comm, connected, f"{host}:{port}")
            activity.heartbeat.start()


class StoreHeartbeat:
    """One rank's heartbeat in a store, and its watch over the other ranks; constructing it is collective.

    `store`: a `torch.distributed.TCPStore` of all ranks, or its set, multi_get, compare_set; `address`: for messages.
    """

    def __init__(self, settings: Watchdog, activity: Activity, comm: Comm, store: Any, address: str) -> None:
        self.settings, self.activity, self.store, self.address = settings, activity, store, address
        self.rank, self.clock = comm.rank, comm.clock
        name = f"kasoku/{comm.broadcast_object(uuid.uuid4().hex)}"  # a store may outlive a training
        self.keys = [f"{name}/{rank}" for rank in range(comm.size)]
        self.verdict, self.failure = f"{name}/verdict", f"{name}/failure"
        patience = round(settings.dead_s / settings.beat_s)
        self.detector = Detector(range(1, comm.size) if self.rank == 0 else [0], patience)
        self._last_busy = self.clock.now()  # until then a rank was starting or busy, so the others had to wait
        self.written = self.answers = 0  # heartbeats, and requests that the store has answered
        self.failed = ""
        self.fault: Fault = ("", [])  # that was reported
        self.closing, self.over, self.reported = threading.Event(), threading.Event(), threading.Lock()
        self.hurry = threading.Event()  # ends the first pause after it
        if self.rank == 0:
            self.store.set(self.verdict, _NO_VERDICT.decode())
            self.store.set(self.failure, _NO_VERDICT.decode())
        self.write(activity.state())
        # from here on all keys are there
        self.processes = comm.gather_objects(f"host {socket.gethostname()}, pid {os.getpid()}")

    def start(self) -> None:
        """Starts the two threads: one beats and watches, one notices a silent store."""

        def run(pauses_s: Iterator[float], early_end: threading.Event) -> None:
            for pause_s in pauses_s:
                time.sleep(pause_s) if early_end.is_set() else early_end.wait(pause_s)

        daemon("kasoku watch", run, self.watch(), self.hurry)
        daemon("kasoku guard", run, self.guard(), self.over)

    def watch(self) -> Iterator[float]:
        """Beats and watches until the end; yields how many seconds to wait before it is resumed."""
        try:
            yield self.settings.beat_s
            while not self.closing.is_set():
                self.write(self.activity.state())
                if (yield from self.check()):
                    return
                yield self.settings.beat_s
            self.write(FAILED if self.failed else ENDED)
            if self.rank == 0:
                yield from self.wait_for_ranks(self.settings.dead_s + 2 * self.settings.beat_s)
        except RuntimeError:
            self.report(*self._lost_store())
        finally:
            self.over.set()

    def guard(self) -> Iterator[float]:
        """Notices that the store does not answer; yields as `watch` does."""
        last, unanswered = 0, 0
        while not self.over.is_set():
            yield self.settings.beat_s
            unanswered = unanswered + 1 if self.answers == last else 0
            last = self.answers
            if unanswered > self.detector.patience:
                self.report(*self._lost_store())

    def write(self, state: bytes) -> None:
        """Writes this rank's heartbeat."""
        self.written += 1
        document = {"number": self.written, "failed": self.failed, **self.activity.report()}
        self.store.set(self.keys[self.rank], state.decode() + json.dumps(document))

    def check(self) -> Generator[float, None, bool]:
        """Reads the other ranks' heartbeats and the verdict; True if there is nothing more to watch."""
        keys = [self.keys[rank] for rank in self.detector.ranks]
        *heartbeats, verdict = self.store.multi_get([*keys, self.verdict])
        self.answers += 1
        if verdict == _NO_VERDICT and (fault := self.judge(heartbeats)):  # the first verdict counts
            verdict = self.store.compare_set(self.verdict, _NO_VERDICT.decode(), json.dumps(fault))
        if verdict != _NO_VERDICT:
            line, lost = json.loads(verdict)
            with suppress(RuntimeError):  # a store that breaks now changes nothing
                self.write(INFORMED)
                if self.rank == 0:
                    yield from self.wait_for_ranks(3 * self.settings.beat_s, lost)
            self.report(line, lost)
            return True
        if self.rank > 0 and heartbeats[0][:1] == ENDED:
            self.write(ENDED)
            return True
        return False

    def judge(self, heartbeats: Sequence[bytes]) -> Fault | None:
        """The fault that these heartbeats show, if any."""
        detector, now = self.detector, self.clock.now()
        detector.beat(heartbeats)
        if dead := detector.dead():
            return self.death(dead, detector.last[dead[0]], f"no heartbeat for {self.settings.dead_s:g} s")
        states = [self.activity.state(), *(heartbeat[:1] for heartbeat in heartbeats)]
        if {*states} & {STARTING, BUSY}:
            self._last_busy = now
        if self.rank > 0 or STALLED not in states or now - self._last_busy < self.activity.limit_s:
            return None
        reports = [self.activity.report(), *(json.loads(heartbeat[1:]) for heartbeat in heartbeats)]
        at_work = [i for i, report in enumerate(reports) if not report["rests"]]
        if STALLED not in [states[i] for i in at_work]:  # it has come to rest since its state was read
            return None
        idle_s = max(reports[i]["idle_s"] for i in at_work)
        line = f"no step for {idle_s:.0f} s: {describe_stragglers(reports, self.names)}"
        if (file := self.activity.stacks_file) is not None:
            written: list[Path] = []  # by another thread: a disk that hangs must not hold up the verdict
            daemon("kasoku stacks", _write_stacks, file, self.names, reports, written).join(self.settings.beat_s)
            line += f"; all stacks are in {file}" if written else ""
        return line, []

    def death(self, ranks: Sequence[int], last: bytes, why: str) -> Fault:
        """The fault of dead ranks. One that failed by an error ends all: it might meet the others too.

        `last`: the first one's last heartbeat.
        """
        if last[:1] == FAILED:
            return f"{self.names(ranks)} failed: {json.loads(last[1:])['failed']}", []
        return f"{self.names(ranks)} died: {why}", [*ranks]

    def accuse(self, rank: int) -> None:
        """Takes a rank for dead whose connection broke, unless it has ended or there is a verdict already."""
        if not (self.fault[0] or self.closing.is_set()):
            daemon("kasoku accuses", self._accuse, rank)  # a store that does not answer holds up nobody

    def _accuse(self, rank: int) -> None:
        """As `accuse`, on this thread."""
        with suppress(RuntimeError):  # the store is gone too, as the watching thread notices now
            heartbeat = self.store.multi_get([self.keys[rank]])[0]
            if heartbeat[:1] != ENDED:
                fault = self.death([rank], heartbeat, "its connection broke")
                self.store.compare_set(self.verdict, _NO_VERDICT.decode(), json.dumps(fault))
        self.hurry.set()

    def _lost_store(self) -> Fault:
        """The fault of a store that does not answer."""
        if (last := self.detector.last.get(0, b""))[:1] == FAILED:
            return self.death([0], last, "")
        rank = f"{self.names([0])} is gone: " if self.rank > 0 else ""
        return f"{rank}the store at {self.address} does not answer", [0] if self.rank > 0 else []

    def names(self, ranks: Sequence[int]) -> str:
        """Ranks with their hosts and process ids."""
        return name_ranks(ranks, lambda rank: f"{rank} ({self.processes[rank]})")

    def report(self, line: str, lost: list[int]) -> None:
        """Reports a fault, once; nothing if this rank has ended already."""
        if not self.closing.is_set() and self.reported.acquire(blocking=False):
            self.fault = line, lost
            self.settings.on_fault(f"{line}; {_ADVICE}")
        self.over.set()

    def wait_for_ranks(self, limit_s: float, lost: Sequence[int] = ()) -> Iterator[float]:
        """Until all other living ranks have sent their last heartbeat, as their store is in this process; rank 0."""
        until = self.clock.now() + limit_s
        keys = [self.keys[rank] for rank in self.detector.living() if rank not in lost]
        while keys and self.clock.now() < until:
            heartbeats = self.store.multi_get(keys)
            self.answers += 1
            last = (ENDED, FAILED, INFORMED)
            keys = [key for key, heartbeat in zip(keys, heartbeats, strict=True) if heartbeat[:1] not in last]
            if keys:
                yield self.settings.beat_s / 20

    def reports(self, line: str) -> bool:
        """Whether this rank reports its failure; not if another one reports the same. Rank 0 goes first."""
        if self.rank:
            time.sleep(self.settings.beat_s / 2)
        first = f"{self.rank} {line}"
        with suppress(RuntimeError):  # the store is gone
            first = self.store.compare_set(self.failure, _NO_VERDICT.decode(), first).decode()
        rank, _, reported = first.partition(" ")
        return rank == str(self.rank) or not (line.startswith(reported) or reported.startswith(line))

    def end(self, failed: str) -> None:
        """Announces that this rank has ended, or failed."""
        self.failed = " ".join(failed.split())
        self.closing.set()
        self.hurry.set()

    def close(self, failed: str = "") -> None:
        """Announces that this rank has ended, or that it `failed` (a line), which ends the other ranks.

        Rank 0 waits until all other ranks have read it, as its store may end with it. They stop watching then.
        """
        self.end(failed)
        self.over.wait(self.settings.dead_s + 4 * self.settings.beat_s)

    def wait_for_verdict(self) -> None:
        """Waits as long as it may take to name a death."""
        self.over.wait(self.settings.dead_s + 5 * self.settings.beat_s)


def _write_stacks(file: Path, names: Names, reports: Sequence[Mapping[str, Any]], written: list[Path]) -> None:
    """Writes the stacks of all ranks, and adds the file to `written`; does nothing if it cannot be written."""
    lines = []
    for rank, report in enumerate(reports):
        lines.append(f"{names([rank])}, no step for {report['idle_s']} s\n")
        for thread, places in report["stacks"].items():
            lines += [f"  {thread}\n", *(f"    {place}\n" for place in places)]
    with suppress(OSError):
        file.write_text("".join(lines), encoding="utf-8")
        written.append(file)
