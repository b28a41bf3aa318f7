"""Heartbeats between ranks, by beats that the test advances: silence, broken connections, reports; survivors' sums."""

import queue
import threading
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from kasoku.core import InputError
from kasoku.distributed.async_sgd import peers as peers_module
from kasoku.distributed.async_sgd import survivors
from kasoku.distributed.async_sgd.peers import LostError, Peers
from kasoku.distributed.async_sgd.survivors import Survivors, Table, on_survivors
from kasoku.distributed.counting_comm import Activity
from kasoku.distributed.liveness import LostRankError

WAIT_S = 20.0  # a thread that takes longer hangs


class Mail:
    """Messages between ranks of one process; nothing arrives from `cut` ranks, `broken` ones have no connections."""

    def __init__(self) -> None:
        self.boxes: dict[tuple[int, ...], queue.SimpleQueue[Tensor | None]] = defaultdict(queue.SimpleQueue)
        self.cut: set[int] = set()
        self.broken: set[int] = set()
        self.lock = threading.Lock()

    def box(self, *key: int) -> "queue.SimpleQueue[Tensor | None]":
        with self.lock:
            return self.boxes[key]

    def breaks(self, rank: int) -> None:
        self.broken.add(rank)
        with self.lock:
            for (source, *_), box in self.boxes.items():
                if source == rank:
                    box.put(None)


class Sent:
    def wait(self) -> None:
        pass

    def done(self) -> bool:
        return True


class Comes(Sent):
    def __init__(self, x: Tensor, box: "queue.SimpleQueue[Tensor | None]") -> None:
        self.x, self.box = x, box

    def wait(self) -> None:
        results = self.box.get()
        if results is None:
            self.box.put(None)
            raise RuntimeError("connection reset")
        self.x.copy_(results)


class Posted:
    """What Peers and Survivors use of a Comm, over Mail."""

    activity: Any = None

    def __init__(self, mail: Mail, rank: int, size: int, channel: int = 0) -> None:
        self.mail, self.rank, self.size, self.number = mail, rank, size, channel

    def channel(self, *, patient: bool = False) -> "Posted":
        return Posted(self.mail, self.rank, self.size, self.number + 1)

    def send(self, x: Tensor, *, to: int, tag: int = 0) -> Sent:
        if to in self.mail.broken:
            raise RuntimeError("connection reset")
        if self.rank not in self.mail.cut:
            self.mail.box(self.rank, to, self.number, tag).put(x.clone())
        return Sent()

    def receive(self, x: Tensor, *, source: int, tag: int = 0) -> Sent:
        return Comes(x, self.mail.box(source, self.rank, self.number, tag))


class Time:
    """Advances all ranks' pauses by one beat at a time."""

    def __init__(self, size: int) -> None:
        self.ranks = range(size)
        self.go = [threading.Semaphore(0) for _ in self.ranks]
        self.there = [threading.Semaphore(0) for _ in self.ranks]

    def pause(self, rank: int) -> peers_module.Pause:
        def waits(ending: threading.Event, _: float) -> bool:
            self.there[rank].release()
            while not self.go[rank].acquire(timeout=0.005):
                if ending.is_set():
                    return True
            return ending.is_set()

        return waits

    def beat(self, *ranks: int) -> None:
        for rank in ranks:
            assert self.there[rank].acquire(timeout=WAIT_S)
        for rank in ranks:
            self.go[rank].release()


@contextmanager
def cluster(size: int) -> Iterator[tuple[list[Peers], Mail, Time, list[list[int]]]]:
    mail, time, gone = Mail(), Time(size), [[] for _ in range(size)]
    comms: list[Any] = [Posted(mail, rank, size) for rank in range(size)]
    ranks = [Peers(comm, range(comm.size), gone[comm.rank].append, time.pause(comm.rank)) for comm in comms]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for rank in ranks:
            rank.start()
        yield ranks, mail, time, gone
        for rank in ranks:
            rank.fail(InputError("the test is over"))
        for number in range(size):
            mail.breaks(number)


def until(ready: Any) -> None:
    ending = threading.Event()
    for _ in range(int(WAIT_S / 0.002)):
        if ready():
            return
        ending.wait(0.002)
    raise AssertionError("it did not come to that")


def heard(ranks: list[Peers], by: int, *others: int) -> None:
    until(lambda: all(ranks[by]._detector.silent[rank] <= 1 for rank in others))


def test_a_silent_rank_is_dead_after_its_time_and_not_before():
    with cluster(3) as (ranks, mail, time, gone):
        beats = int(peers_module.DEAD_S / peers_module.BEAT_S)
        mail.cut.add(1)
        for _ in range(beats):
            time.beat(0, 2)
            heard(ranks, 0, 2)
            heard(ranks, 2, 0)
        assert ranks[0].dead == ranks[2].dead == {}
        time.beat(0, 2)
        until(lambda: 1 in ranks[0].dead and 1 in ranks[2].dead)
        assert f"no heartbeat for {peers_module.DEAD_S:g} s" in (ranks[0].dead[1], ranks[2].dead[1])
        until(lambda: gone[0] == gone[2] == [1])
        assert ranks[0].living == [0, 2]


def test_a_rank_that_was_stopped_itself_accuses_nobody():
    with cluster(2) as (ranks, _, time, gone):
        for _ in range(4):  # rank 1 beats on, however long rank 0 takes for its next beat
            time.beat(1)
        time.beat(0)
        heard(ranks, 0, 1)
        assert ranks[0].dead == {}
        assert gone[0] == []


def test_a_broken_connection_is_a_death_at_once_and_all_hear_of_it():
    with cluster(3) as (ranks, mail, _, gone):
        with mail.lock:
            box = mail.boxes[2, 0, 1, peers_module.BEAT]
        box.put(None)  # only rank 0 sees it
        until(lambda: 2 in ranks[0].dead and 2 in ranks[1].dead)
        assert ranks[0].dead[2] == "its connection broke"
        assert ranks[1].dead[2] == "rank 0 says so"
        until(lambda: gone[1] == [2])


def test_a_rank_that_was_given_up_ends_and_nothing_it_waits_for_comes():
    with cluster(3) as (ranks, _, _, _):
        waits = ranks[2].exchange(0, ranks[2].comm, [], [torch.zeros(1)])
        ranks[0].lose(2, "a test says so")
        until(lambda: ranks[2]._failure)
        with pytest.raises(LostError, match="rank 0 is dead"):
            waits.result()
        with pytest.raises(LostRankError, match="rank 2 was given up by the others, which go on without it"):
            ranks[2].check()


def test_what_is_waited_for_of_a_dead_rank_is_lost():
    with cluster(2) as (ranks, _, _, _):
        waits = ranks[0].exchange(1, ranks[0].comm, [], [torch.zeros(1)])
        assert not waits.done()
        ranks[0].lose(1, "a test says so")
        with pytest.raises(LostError, match="rank 1 is dead"):
            waits.result()
        with pytest.raises(LostError):
            ranks[0].exchange(1, ranks[0].comm, []).result()


def _sums(peers: Peers, begun: threading.Event, *, when: str) -> Any:
    def f(table: Table) -> Any:
        begun.set()
        if when == "meanwhile" and len(table.ranks) == 4:
            peers.lose(3, "a test says so")  # which took no part
        x = torch.full((7,), 10.0**peers.comm.rank)
        table.all_reduce(x)
        return x.tolist(), table.ranks

    return f


@pytest.mark.parametrize("when", ["before", "between", "meanwhile", "early"])
def test_survivors_meet_without_the_dead(when: str, monkeypatch: pytest.MonkeyPatch):
    results: dict[int, Any] = {}

    class Between(Survivors):
        def __init__(self, comm: Any, peers: Peers, ranks: list[int]) -> None:
            super().__init__(comm, peers, ranks)
            if when == "between" and comm.rank == 1 and len(peers.living) == 4:
                peers.lose(3, "a test says so")

    monkeypatch.setattr(survivors, "Survivors", Between)
    begun = threading.Event()

    with cluster(4) as (ranks, _, _, _):
        if when == "before":
            ranks[0].lose(3, "a test says so")

        def meets(rank: int) -> None:
            comm: Any = ranks[rank].comm
            if when == "early" and rank == 0:  # rank 1 waits for rank 0, which hears of the death before it meets
                assert begun.wait(WAIT_S)
                ranks[0].lose(3, "a test says so")
            results[rank] = on_survivors(comm, ranks[rank], _sums(ranks[rank], begun, when=when))

        threads = [threading.Thread(target=meets, args=(rank,), daemon=True) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert results == {rank: ([111.0] * 7, [0, 1, 2]) for rank in range(3)}


class Verdict:
    """The heartbeat of a watchdog whose verdict comes when the test says so."""

    def __init__(self) -> None:
        self.waiting, self.over = threading.Event(), threading.Event()

    def close(self, failed: str) -> None:
        pass

    def wait_for_verdict(self) -> None:
        self.waiting.set()
        self.over.wait(WAIT_S)


def test_ranks_that_a_watchdog_watches_never_go_on_without_a_dead_one():
    mail, verdict = Mail(), Verdict()
    comms: list[Any] = [Posted(mail, rank, 3) for rank in range(3)]
    for comm in comms:
        comm.activity = Activity(0.0)
        comm.activity.heartbeat = verdict
    time, gone = Time(3), list[int]()
    ranks = [Peers(comm, range(comm.size), gone.append, time.pause(comm.rank)) for comm in comms]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rank in ranks:
            rank.start()
        waits = ranks[0].exchange(1, ranks[0].comm, [], [torch.zeros(1)])
        mail.cut.add(1)
        for _ in range(int(peers_module.DEAD_S / peers_module.BEAT_S) + 1):
            time.beat(0, 2)
            heard(ranks, 0, 2)
            heard(ranks, 2, 0)
        assert verdict.waiting.wait(WAIT_S)
        assert not waits.done()
        ranks[0].check()
        verdict.over.set()  # in real life the verdict ends the process
        with pytest.raises(LostError):
            waits.result()
        with pytest.raises(LostRankError, match=r"rank 1 died: no heartbeat for 5 s"):
            ranks[0].check()
    assert (gone, [rank.dead for rank in ranks]) == ([], [{}, {}, {}])
    for rank in ranks:
        rank.fail(InputError("the test is over"))
        mail.breaks(rank.comm.rank)
