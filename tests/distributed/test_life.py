"""The failure detector on a clock that the test advances: silence, broken connections, hearsay, sums of survivors."""

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
from kasoku.distributed.async_sgd import liveness as life
from kasoku.distributed.async_sgd.liveness import Life, LostError
from kasoku.distributed.async_sgd.survivors import Table, met

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
        found = self.box.get()
        if found is None:
            self.box.put(None)
            raise RuntimeError("connection reset")
        self.x.copy_(found)


class Posted:
    """What Life and Survivors use of a Comm, over Mail."""

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

    def pause(self, rank: int) -> life.Pause:
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
def cluster(size: int) -> Iterator[tuple[list[Life], Mail, Time, list[list[int]]]]:
    mail, time, gone = Mail(), Time(size), [[] for _ in range(size)]
    comms: list[Any] = [Posted(mail, rank, size) for rank in range(size)]
    lives = [Life(comm, gone[comm.rank].append, time.pause(comm.rank)) for comm in comms]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for one in lives:
            one.start()
        yield lives, mail, time, gone
        for one in lives:
            one._given_up()
        for rank in range(size):
            mail.breaks(rank)


def until(ready: Any) -> None:
    ending = threading.Event()
    for _ in range(int(WAIT_S / 0.002)):
        if ready():
            return
        ending.wait(0.002)
    raise AssertionError("it did not come to that")


def heard(lives: list[Life], by: int, *ranks: int) -> None:
    until(lambda: all(lives[by]._silent[rank] <= 1 for rank in ranks))


def test_a_silent_rank_is_dead_after_its_time_and_not_before():
    with cluster(3) as (lives, mail, time, gone):
        beats = int(life.DEAD_S / life.BEAT_S)
        mail.cut.add(1)
        for _ in range(beats):
            time.beat(0, 2)
            heard(lives, 0, 2)
            heard(lives, 2, 0)
        assert lives[0].dead == lives[2].dead == {}
        time.beat(0, 2)
        until(lambda: 1 in lives[0].dead and 1 in lives[2].dead)
        assert f"no heartbeat for {life.DEAD_S:g} s" in (lives[0].dead[1], lives[2].dead[1])
        until(lambda: gone[0] == gone[2] == [1])
        assert lives[0].living == [0, 2]


def test_a_rank_that_was_stopped_itself_accuses_nobody():
    with cluster(2) as (lives, _, time, gone):
        for _ in range(4):  # rank 1 beats on, however long rank 0 takes for its next beat
            time.beat(1)
        time.beat(0)
        heard(lives, 0, 1)
        assert lives[0].dead == {}
        assert gone[0] == []


def test_a_broken_connection_is_a_death_at_once_and_all_hear_of_it():
    with cluster(3) as (lives, mail, _, gone):
        with mail.lock:
            box = mail.boxes[2, 0, 1, life.BEAT]
        box.put(None)  # only rank 0 sees it
        until(lambda: 2 in lives[0].dead and 2 in lives[1].dead)
        assert lives[0].dead[2] == "its connection broke"
        assert lives[1].dead[2] == "rank 0 says so"
        until(lambda: gone[1] == [2])


def test_a_rank_that_was_given_up_ends_and_nothing_it_waits_for_comes():
    with cluster(3) as (lives, _, _, _):
        waits = lives[2].pending(0, [Comes(torch.zeros(1), queue.SimpleQueue())])
        lives[0].lose(2, "a test says so")
        until(lambda: lives[2]._out)
        with pytest.raises(LostError, match="rank 0 is dead"):
            waits.wait()
        with pytest.raises(InputError, match="rank 2 was given up by the others, which go on without it"):
            lives[2].check()


def test_what_is_waited_for_of_a_dead_rank_is_lost():
    with cluster(2) as (lives, _, _, _):
        waits = lives[0].pending(1, [Comes(torch.zeros(1), queue.SimpleQueue())])
        assert not waits.over.is_set()
        lives[0].lose(1, "a test says so")
        with pytest.raises(LostError, match="rank 1 is dead"):
            waits.wait()
        with pytest.raises(LostError):
            lives[0].pending(1, []).wait()


def _sums(one: Life, begun: threading.Event, *, when: str) -> Any:
    def f(table: Table) -> Any:
        begun.set()
        if when == "meanwhile" and len(table.ranks) == 4:
            one.lose(3, "a test says so")  # which took no part
        x = torch.full((7,), 10.0**one.comm.rank)
        table.all_reduce(x)
        return x.tolist(), table.gather(one.comm.rank)

    return f


@pytest.mark.parametrize("when", ["before", "between", "meanwhile", "early"])
def test_survivors_meet_without_the_dead(when: str, monkeypatch: pytest.MonkeyPatch):
    found: dict[int, Any] = {}
    attempt = Life.attempt

    def attempted(self: Life) -> None:
        attempt(self)
        if when == "between" and self.comm.rank == 1 and len(self.living) == 4:
            self.lose(3, "a test says so")

    monkeypatch.setattr(Life, "attempt", attempted)
    begun = threading.Event()

    with cluster(4) as (lives, _, _, _):
        if when == "before":
            lives[0].lose(3, "a test says so")

        def meets(rank: int) -> None:
            comm: Any = lives[rank].comm
            if when == "early" and rank == 0:  # rank 1 waits for rank 0, which hears of the death before it meets
                assert begun.wait(WAIT_S)
                lives[0].lose(3, "a test says so")
            found[rank] = met(comm, lives[rank], _sums(lives[rank], begun, when=when))

        threads = [threading.Thread(target=meets, args=(rank,), daemon=True) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert found == {rank: (([111.0] * 7, [0, 1, 2]), [0, 1, 2]) for rank in range(3)}
