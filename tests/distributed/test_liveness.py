"""A rank that dies or hangs is named on all other ranks, which end."""

import heapq
import itertools
import multiprocessing
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from helpers.ranks import context
from helpers.started import port as free_port
from helpers.virtual_comm import VirtualClock
from kasoku.core import Comm, InputError, Solo, Threads, Work
from kasoku.distributed import TorchComm
from kasoku.distributed.counting_comm import STALLED, Activity, CountingComm
from kasoku.distributed.liveness import LOST_RANK_EXIT_CODE, StoreHeartbeat, Watchdog

PROMISE_S = 15.0
LIMIT_S = 60.0  # of what is not promised
QUICK = Watchdog(beat_s=0.25, dead_s=3.0)
ADVICE = "again with --continue --out DIR (torchrun --max-restarts N does it by itself)"
PLACES = r"distributed/counting_comm\.py:\d+ stacks( < distributed/\w+\.py:\d+ [\w.]+){3}"  # ranks share a thread here
HERE = f"(host {socket.gethostname()}, pid {os.getpid()})"


# ---- on a virtual clock


class DictStore(dict[str, bytes]):
    """A store of three requests; one that is broken refuses them all."""

    broken = False

    def _check(self) -> None:
        if self.broken:
            raise RuntimeError("Connection reset by peer")

    def set(self, key: str, value: str) -> None:
        self._check()
        self[key] = value.encode()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._check()
        return [self[key] for key in keys]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._check()
        if self[key] == expected.encode():
            self[key] = desired.encode()
        return self[key]


class Never(Solo):
    """A collective that is never over: waiting for it ends only the test's own call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def all_reduce(self, x: torch.Tensor, *, op: str = "sum") -> Work:
        self.calls += 1
        return self if self.calls > 6 else super().all_reduce(x, op=op)  # type: ignore[return-value]

    def wait(self) -> None:
        raise NeverError


class NeverError(Exception):
    pass


class Heartbeats:
    """The heartbeats of several ranks on one virtual clock.

    Attributes: `lines`: what each rank said. `stopped`: ranks that do nothing. `silent`: no store answers.
    """

    def __init__(self, size: int, watchdog: Watchdog = QUICK, *, store_elsewhere: bool = False) -> None:
        self.clock, self.store, self.watchdog = VirtualClock(), DictStore(), watchdog
        self.store_elsewhere = store_elsewhere
        self.lines: dict[int, list[str]] = {rank: [] for rank in range(size)}
        self.said_at: dict[int, float] = {}
        self.stopped: set[int] = set()
        self.silent = False
        self.heartbeats = Threads(size, self.clock).run(self._heart)
        self._numbers = itertools.count()
        self._queue: list[tuple[float, int, int, bool, Iterator[float]]] = []
        for rank, heartbeat in enumerate(self.heartbeats):
            self._push(rank / 1000, rank, True, heartbeat.watch())
            self._push(rank / 1000, rank, False, heartbeat.guard())

    def _heart(self, comm: Comm) -> StoreHeartbeat:
        def said(line: str) -> None:
            self.lines[comm.rank].append(line)
            self.said_at[comm.rank] = self.clock.now()

        activity = Activity(self.watchdog.hang_timeout_s, self.clock)
        return StoreHeartbeat(replace(self.watchdog, on_fault=said), activity, comm, self.store, "127.0.0.1:1")

    def _push(self, moment: float, rank: int, asks: bool, tick: Iterator[float]) -> None:
        heapq.heappush(self._queue, (moment, next(self._numbers), rank, asks, tick))

    def run(self, seconds: float) -> None:
        """Lets so much time pass."""
        until = self.clock.now() + seconds
        while self._queue and self._queue[0][0] <= until:
            moment, _, rank, asks, tick = heapq.heappop(self._queue)
            self.clock.until(moment)
            blocked = rank in self.stopped or (asks and self.silent)
            pause_s = self.watchdog.beat_s / 10 if blocked else next(tick, None)
            if pause_s is not None:
                self._push(moment + pause_s, rank, asks, tick)
            if self.heartbeats[0].over.is_set() and not self.store_elsewhere:
                self.store.broken = True  # it ends with the process of rank 0
        self.clock.until(until)

    def step(self, *ranks: int) -> None:
        for rank in ranks or range(len(self.heartbeats)):
            self.heartbeats[rank].activity.step()

    def ended_silently(self) -> bool:
        return all(heartbeat.over.is_set() for heartbeat in self.heartbeats) and not any(self.lines.values())

    def only_line(self, rank: int) -> str:
        (line,) = self.lines[rank]
        assert line.endswith(ADVICE)
        assert "\n" not in line
        return line.removesuffix(f"; start all ranks {ADVICE}")


@pytest.mark.parametrize("watchdog", [QUICK, Watchdog()], ids=["quick", "default"])
@pytest.mark.parametrize("victim", [1, 2])
def test_a_rank_without_heartbeat_is_named_on_all_others(victim: int, watchdog: Watchdog) -> None:
    ranks = Heartbeats(3, watchdog)
    ranks.run(10 * watchdog.beat_s)
    ranks.stopped.add(victim)
    stopped_at = ranks.clock.now()
    ranks.run(PROMISE_S)
    for rank in {0, 1, 2} - {victim}:
        assert ranks.only_line(rank) == f"rank {victim} {HERE} died: no heartbeat for {watchdog.dead_s:g} s"
        assert (
            watchdog.dead_s - watchdog.beat_s < ranks.said_at[rank] - stopped_at < watchdog.dead_s + 2 * watchdog.beat_s
        )


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ("killed", "is gone: the store at 127.0.0.1:1 does not answer"),
        ("stopped", "is gone: the store at 127.0.0.1:1 does not answer"),
        ("store elsewhere", "died: no heartbeat for 3 s"),
    ],
)
def test_the_death_of_rank_0_is_named_on_all_others(how: str, line: str) -> None:
    ranks = Heartbeats(3, store_elsewhere=how == "store elsewhere")
    ranks.run(1)
    ranks.stopped.add(0)
    ranks.store.broken, ranks.silent = how == "killed", how == "stopped"
    ranks.run(PROMISE_S)
    for rank in (1, 2):
        assert ranks.only_line(rank) == f"rank 0 {HERE} {line}"


def test_ranks_that_die_together_are_named_together() -> None:
    ranks = Heartbeats(4)
    ranks.run(1)
    ranks.stopped |= {1, 3}
    ranks.run(PROMISE_S)
    for rank in (0, 2):
        assert ranks.only_line(rank) == f"ranks 1 {HERE} and 3 {HERE} died: no heartbeat for 3 s"


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_whose_connection_broke_is_dead_at_once(victim: int) -> None:
    ranks = Heartbeats(3, store_elsewhere=True)
    ranks.run(1)
    ranks.stopped.add(victim)
    ranks.heartbeats[1]._accuse(victim)
    ranks.run(2 * QUICK.beat_s)
    for rank in {0, 1, 2} - {victim}:
        assert ranks.only_line(rank) == f"rank {victim} {HERE} died: its connection broke"


def test_a_broken_connection_is_no_death_of_a_rank_that_ended_or_failed() -> None:
    ranks = Heartbeats(3)
    ranks.run(1)
    ranks.heartbeats[2].end("the disk is full")
    ranks.run(QUICK.beat_s)
    ranks.heartbeats[1]._accuse(2)
    ranks.run(2 * QUICK.beat_s)
    assert ranks.only_line(0) == f"rank 2 {HERE} failed: the disk is full"
    ended = Heartbeats(2)
    ended.run(1)
    ended.heartbeats[1].end("")
    ended.run(QUICK.beat_s)
    ended.heartbeats[0]._accuse(1)
    ended.heartbeats[0].end("")
    ended.run(LIMIT_S)
    assert ended.ended_silently()


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_that_was_announced_is_reported_to_the_others(failing: int) -> None:
    ranks = Heartbeats(3)
    ranks.run(1)
    ranks.heartbeats[failing].end("the disk\nis full")
    ranks.run(LIMIT_S)
    for rank in {0, 1, 2} - {failing}:
        assert ranks.only_line(rank) == f"rank {failing} {HERE} failed: the disk is full"
    assert not ranks.lines[failing]


@pytest.mark.parametrize("sleeper", [0, 3])
def test_a_rank_that_hangs_is_named_with_the_collective_it_did_not_join(sleeper: int) -> None:
    ranks = Heartbeats(4, Watchdog(hang_timeout_s=2.0, beat_s=0.25, dead_s=10.0))
    comms = [CountingComm(Never(), heartbeat.activity) for heartbeat in ranks.heartbeats]
    for _ in range(3):
        for comm in comms:
            for n in (1000, 7):
                comm.all_reduce(torch.ones(n)).wait()
        ranks.run(0.5)
        ranks.step()
    for comm in comms:
        if comm is not comms[sleeper]:
            works = [comm.all_reduce(torch.ones(n)) for n in (1000, 7)]
            with pytest.raises(NeverError):
                works[0].wait()
    ranks.run(2.0)
    assert not any(ranks.lines.values())
    ranks.run(1.0)
    waiter = 1 if sleeper == 0 else 0
    wanted = f"rank {sleeper} {HERE} has not joined all_reduce #7 of 1000 float32, which rank {waiter} {HERE} waits in"
    for rank in range(4):
        line = rf"no step for [23] s: {re.escape(wanted)}; rank {sleeper} is at {PLACES}"
        assert re.fullmatch(line, ranks.only_line(rank))


@pytest.mark.parametrize("written", [True, False])
def test_the_stacks_of_all_ranks_are_written_once_a_rank_hangs(written: bool, tmp_path: Path) -> None:
    ranks = Heartbeats(2, Watchdog(hang_timeout_s=2.0, beat_s=0.25, dead_s=10.0))
    file = tmp_path / ("hang.txt" if written else "gone/hang.txt")
    ranks.heartbeats[0].activity.stacks_file = file
    ranks.step()
    ranks.run(1.9)
    assert not file.exists()
    ranks.run(1.1)
    for rank in range(2):
        assert ranks.only_line(rank).endswith(f"; all stacks are in {file}") == written
    text = file.read_text() if written else ""
    for rank in range(2 * written):
        assert re.search(rf"rank {rank} {re.escape(HERE)}, no step for 2[.]\d s\n  MainThread\n    \S+:\d+ \S+\n", text)


def test_no_rank_hangs_before_the_first_step_nor_while_one_is_busy() -> None:
    ranks = Heartbeats(2, Watchdog(hang_timeout_s=1.0, beat_s=0.25, dead_s=10.0))
    ranks.step(0)
    ranks.run(3)  # rank 1 compiles
    for _ in range(3):
        ranks.step()
        ranks.run(0.1)
    with ranks.heartbeats[1].activity.busy():
        ranks.run(3)
    ranks.run(0.9)
    assert not any(ranks.lines.values())
    ranks.run(1)
    assert ranks.only_line(0).startswith("no step for ")


@pytest.mark.parametrize("at_rest", [[0, 1], [2, 3]], ids=["first", "last"])
def test_a_rank_that_hangs_is_named_while_others_have_made_all_their_steps(at_rest: list[int]) -> None:
    """Two groups of two ranks: one waits for the other, in which a rank does not join a collective."""
    ranks = Heartbeats(4, Watchdog(hang_timeout_s=2.0, beat_s=0.25, dead_s=10.0))
    groups, rests = [[0, 1], [2, 3]], ExitStack()
    for rank, heartbeat in enumerate(ranks.heartbeats):
        CountingComm(Never(), heartbeat.activity).gather_objects(rank)
        comm = CountingComm(Never(), heartbeat.activity, groups[rank // 2])
        meeting = CountingComm(Never(), heartbeat.activity)
        for _ in range(5 + rank // 2):
            comm.all_reduce(torch.ones(1000)).wait()
        heartbeat.activity.step()
        if rank in at_rest:
            rests.enter_context(heartbeat.activity.rest())
            meeting.gather_objects(rank)
        elif rank % 2:
            comm.all_reduce(torch.ones(7))
    ranks.run(2.0)
    assert not any(ranks.lines.values())
    ranks.run(2.0)
    late, ahead = sorted({0, 1, 2, 3} - {*at_rest})
    label = f"all_reduce #{6 + late // 2} of 7 float32 on channel 1 of ranks {late}, {ahead}"
    wanted = f"rank {late} {HERE} has not joined {label}, which rank {ahead} {HERE} has started"
    for rank in range(4):
        line = rf"no step for [234] s: {re.escape(wanted)}; rank {late} is at {PLACES}"
        assert re.fullmatch(line, ranks.only_line(rank))


@pytest.mark.parametrize("steps", [0, 1])  # members that train apart make none that are watched
def test_no_rank_hangs_while_all_rest_but_one_may_afterwards(steps: int) -> None:
    ranks = Heartbeats(2, Watchdog(hang_timeout_s=1.0, beat_s=0.25, dead_s=10.0))
    for _ in range(steps):
        ranks.step()
    with ExitStack() as rests:
        for heartbeat in ranks.heartbeats:
            rests.enter_context(heartbeat.activity.rest())
        ranks.run(5)
    ranks.run(0.9)
    assert not any(ranks.lines.values())
    ranks.run(2)
    assert ranks.only_line(0).startswith("no step for ")


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_comes_to_rest_while_its_state_is_read_does_not_hang(late: int) -> None:
    ranks = Heartbeats(2, Watchdog(hang_timeout_s=1.0, beat_s=0.25, dead_s=10.0))
    ranks.step()
    with ExitStack() as rests:
        for heartbeat in ranks.heartbeats:
            rests.enter_context(heartbeat.activity.rest())
        ranks.heartbeats[late].activity.state = lambda: STALLED  # type: ignore[method-assign]
        ranks.run(5)
        assert not any(ranks.lines.values())
        ranks.stopped.add(1)
        ranks.run(12)
    assert ranks.only_line(0).startswith("rank 1 "), "the watch goes on"


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_a_normal_end_in_any_order_is_silent(order: tuple[int, ...]) -> None:
    ranks = Heartbeats(3)
    ranks.run(1)
    for rank in order:
        ranks.heartbeats[rank].end("")
        ranks.run(0.7 * QUICK.dead_s)
    ranks.run(LIMIT_S)
    assert ranks.ended_silently()


def test_ranks_that_were_all_stopped_for_a_while_accuse_nobody() -> None:
    ranks = Heartbeats(3)
    ranks.run(1)
    ranks.stopped |= {0, 1, 2}
    ranks.run(QUICK.dead_s + 1)
    ranks.stopped.clear()
    ranks.run(2 * QUICK.dead_s)
    for heartbeat in ranks.heartbeats:
        heartbeat.end("")
    ranks.run(LIMIT_S)
    assert ranks.ended_silently()


def test_of_64_ranks_the_one_that_stops_is_named() -> None:
    ranks = Heartbeats(64, Watchdog())
    ranks.run(3)
    ranks.stopped.add(17)
    ranks.run(PROMISE_S)
    assert {ranks.only_line(rank).partition(" (")[0] for rank in range(64) if rank != 17} == {"rank 17"}


@pytest.mark.timing
def test_64_heartbeats_are_cheap(capsys: pytest.CaptureFixture[str]) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    lines: list[str] = []

    def act(comm: Comm) -> CountingComm:
        return Watchdog(on_fault=lines.append).start(comm, ("127.0.0.1", store.port))

    heartbeats = [watched.activity.heartbeat for watched in Threads(64).run(act)]
    try:
        began, used = time.monotonic(), time.process_time()
        time.sleep(3)
        a_beat = (time.process_time() - used) / (time.monotonic() - began) / 64
        with capsys.disabled():
            print(f"\n64 heartbeats with their store: {a_beat * 1e6:.0f} us of a core a beat and rank")
        assert not lines
        assert a_beat < 0.005
    finally:
        for heartbeat in heartbeats:
            heartbeat.end("")
        for heartbeat in reversed(heartbeats):
            heartbeat.close("")


# ---- between processes


@dataclass
class Ranks:
    """Processes that this test started, and what they write."""

    processes: list[multiprocessing.process.BaseProcess]
    folder: Path

    def wait_until_ready(self) -> None:
        """Until each rank has said so."""
        until = time.monotonic() + LIMIT_S
        while len(list(self.folder.glob("ready-*"))) < len(self.processes):
            assert time.monotonic() < until, [self.said(rank) for rank in range(len(self.processes))]
            time.sleep(0.02)

    def send(self, rank: int, number: int) -> None:
        pid = self.processes[rank].pid
        assert pid
        os.kill(pid, number)

    def said(self, rank: int) -> str:
        return (self.folder / f"stderr-{rank}").read_text()

    def end(self, within_s: float, *, but: tuple[int, ...] = ()) -> dict[int, tuple[int | None, str]]:
        """Exit code and the lines of kasoku, by rank."""
        until = time.monotonic() + within_s
        found = {}
        for rank, process in enumerate(self.processes):
            if rank not in but:
                process.join(max(0.0, until - time.monotonic()))
                lines = [line for line in self.said(rank).splitlines() if line.startswith("kasoku: ")]
                found[rank] = (process.exitcode, "\n".join(lines))
        return found

    def named(self, rank: int) -> str:
        return f"rank {rank} (host {socket.gethostname()}, pid {self.processes[rank].pid})"


Act = Callable[[CountingComm, Callable[[], None]], None]


def _rank_main(rank: int, size: int, port: int, folder: Path, watchdog: Watchdog, act: Act) -> None:
    out = os.open(folder / f"stderr-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(out, 2)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0, timedelta(seconds=LIMIT_S))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(minutes=30))
    comm = watchdog.start(TorchComm(), ("127.0.0.1", port))
    act(comm, lambda: (folder / f"ready-{rank}").touch())
    comm.activity.heartbeat.close()
    dist.destroy_process_group()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Ranks]]:
    """launch(size, act, watchdog): ranks over gloo on loopback, killed at the test's end."""
    processes: list[multiprocessing.process.BaseProcess] = []

    def start(size: int, act: Act, watchdog: Watchdog = QUICK) -> Ranks:
        where = free_port()
        for rank in range(size):
            (tmp_path / f"stderr-{rank}").touch()
            processes.append(context.Process(target=_rank_main, args=(rank, size, where, tmp_path, watchdog, act)))
            processes[-1].start()
        return Ranks(processes, tmp_path)

    yield start
    for process in processes:
        process.kill()
        process.join(LIMIT_S)


def _wait_or_compute(victim: int, comm: CountingComm, ready: Callable[[], None]) -> None:
    """The victim sleeps, the last rank but it computes, the others wait in an all_reduce that nobody finishes."""
    comm.all_reduce(torch.ones(4)).wait()
    comm.activity.step()
    ready()
    if comm.rank == victim:
        time.sleep(2 * LIMIT_S)
    elif comm.rank == 1:
        until = time.monotonic() + LIMIT_S
        while time.monotonic() < until:
            sum(range(1000))
    comm.all_reduce(torch.ones(1000)).wait()
    time.sleep(2 * LIMIT_S)


@pytest.mark.process
@pytest.mark.parametrize(
    ("victim", "number", "verb"),
    [
        pytest.param(2, signal.SIGKILL, "died", marks=pytest.mark.smoke, id="killed"),
        pytest.param(0, signal.SIGKILL, "is gone", marks=pytest.mark.timing, id="rank 0 killed"),
        pytest.param(0, signal.SIGSTOP, "is gone", marks=pytest.mark.timing, id="rank 0 stopped"),
    ],
)
def test_a_death_is_named_while_others_wait_and_compute(
    launch: Callable[..., Ranks], victim: int, number: int, verb: str
) -> None:
    ranks = launch(3, partial(_wait_or_compute, victim))
    ranks.wait_until_ready()
    time.sleep(0.5)
    ranks.send(victim, number)
    for rank, (code, line) in ranks.end(PROMISE_S, but=(victim,)).items():
        assert code == LOST_RANK_EXIT_CODE, (rank, ranks.said(rank))
        assert line.startswith(f"kasoku: {ranks.named(victim)} {verb}: "), line
        assert line.endswith(ADVICE)
        assert line.count("\n") == 0


def _sleep(sleeper: int, comm: CountingComm, ready: Callable[[], None]) -> None:
    for step in range(4):
        if step == 3 and comm.rank == sleeper:
            time.sleep(2 * LIMIT_S)
        works = [comm.all_reduce(torch.ones(n)) for n in (1000, 7)]
        for work in works:
            work.wait()
        comm.activity.step()


@pytest.mark.process
@pytest.mark.timing
def test_a_process_that_hangs_is_named_with_its_collective(launch: Callable[..., Ranks]) -> None:
    ranks = launch(4, partial(_sleep, 3), Watchdog(hang_timeout_s=2.0, beat_s=0.25, dead_s=10.0))
    wanted = f"{ranks.named(3)} has not joined all_reduce #7 of 1000 float32, which {ranks.named(0)} waits in; "
    for rank, (code, line) in ranks.end(LIMIT_S).items():
        assert (code, wanted in line) == (LOST_RANK_EXIT_CODE, True), (rank, line)
        assert re.match(r"kasoku: no step for \d+ s: ", line)


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kasoku.distributed.liveness._CONNECT", timedelta(milliseconds=100))
    with socket.socket() as bound:  # not listening
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(InputError, match="does not answer"):
            Threads(2).run(lambda comm: Watchdog().start(comm, bound.getsockname()))
    for setting in ({"beat_s": 0.0}, {"dead_s": 2.0}, {"hang_timeout_s": -1.0}):
        with pytest.raises(InputError):
            Watchdog(**setting)
