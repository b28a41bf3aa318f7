"""Memory that ranks of one host have in common: who has it, what is sent in its place, and when it goes."""

import contextlib
import errno
import gc
import os
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from helpers.ranks import on_processes
from kasoku.core import Comm, InputError, Job, Threads, Work
from kasoku.distributed import Asynchronous
from kasoku.distributed.async_sgd import parameter_server as shards
from kasoku.distributed.async_sgd import peers
from kasoku.distributed.async_sgd import shared_memory as segments
from kasoku.distributed.async_sgd.peers import ASK, REPLY
from kasoku.distributed.async_sgd.shared_memory import PLACE, Segments
from kasoku.distributed.torch_comm import TorchComm

SIZE = 3
process = pytest.mark.process
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(os, "memfd_create"), reason="this system has no memory to give to others"
)


def _memory_files() -> int:
    """Open descriptors of memory."""
    gc.collect()
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sum("memfd:kasoku" in file for file in found)


def _near(comm: Comm) -> tuple[set[int], list[int], list[int], int]:
    """Who is near; what this rank reads at the next one; what it has when the one before wrote there; what is open."""
    ours = Segments(comm)
    ours.open(2, 60)
    ours.zeros(3, torch.int32)
    mine = ours.zeros(10, torch.int32)
    assert not mine.any()
    assert not ours.place(ours.zeros(100, torch.int32))  # more than there is
    mine.copy_(torch.arange(10) + 100 * comm.rank)
    at = comm.gather_objects(ours.place(mine[4:]))[(comm.rank + 1) % comm.size]
    theirs = ours.at(at, 3, torch.int32)
    read = theirs.tolist()
    comm.gather_objects(None)
    theirs.fill_(-comm.rank - 1)
    comm.gather_objects(None)
    wrote = mine.tolist()
    before = _memory_files()
    del mine, theirs
    ours.open(0, 0)
    ours.forget()
    return set(ours.near), read, wrote, before - _memory_files()


@process
@pytest.mark.smoke
def test_ranks_of_one_host_read_and_write_each_others_memory():
    for rank, (near, read, wrote, closed) in enumerate(on_processes(SIZE, _near)):
        assert near == set(range(SIZE)) - {rank}
        assert read == [100 * ((rank + 1) % SIZE) + k for k in (4, 5, 6)]
        behind = -((rank - 1) % SIZE) - 1
        assert wrote == [*range(100 * rank, 100 * rank + 4), *[behind] * 3, *range(100 * rank + 7, 100 * rank + 10)]
        assert closed == 3  # ours, and what mmap holds of it and of theirs


def _far(comm: Comm, which: int) -> tuple[int, bool]:
    """How many are near where one rank has a host of its own, and whether what is made then has a place."""
    if comm.rank == which:
        segments._system = lambda: ("another",)
    ours = Segments(comm)
    ours.open(1, 20)
    return len(ours.near), bool(ours.place(ours.zeros(5, torch.float32)))


@process
def test_a_rank_of_another_host_is_not_near():
    assert on_processes(SIZE, _far, 1) == [(1, True), (0, False), (1, True)]


def _none(comm: Comm) -> tuple[int, bool]:
    """The same where Python has no memfd_create, which some are built without."""
    if comm.rank == 0:
        del os.memfd_create
    ours = Segments(comm)
    ours.open(1, 20)
    return len(ours.near), bool(ours.place(ours.zeros(5, torch.float32)))


@process
def test_a_system_without_such_memory_sends_bytes():
    assert on_processes(SIZE, _none) == [(0, False), (1, True), (1, True)]


def _hidden(comm: Comm) -> int:
    """How many are near where rank 0 cannot open what the others made."""
    if comm.rank == 0:

        def closed(*_: object) -> int:
            raise PermissionError(13, "Permission denied")

        os.open = closed  # type: ignore[assignment]
    return len(Segments(comm).near)


@process
def test_a_rank_that_cannot_open_the_others_memory_is_not_near():
    assert on_processes(SIZE, _hidden) == [0, 1, 1]


def test_ranks_of_one_process_need_none():
    ours = Threads(2).run(Segments)
    assert [one.near for one in ours] == [frozenset()] * 2
    ours[0].open(1, 16)
    assert not ours[0].place(ours[0].zeros(4, torch.float32))


def test_a_place_that_is_another_file_by_now_is_refused(tmp_path):
    alone = Segments(Threads(1).run(lambda comm: comm)[0])
    alone._device = os.stat(tmp_path).st_dev
    with open(tmp_path / "other", "w+b") as other:
        other.write(bytes(64))
        other.flush()
        place = [os.getpid(), other.fileno(), os.fstat(other.fileno()).st_ino, 0]
        assert len(place) == PLACE
        assert alone.at(place, 4, torch.float32).tolist() == [0.0] * 4
        with pytest.raises(ProcessLookupError, match="another file by now"):
            alone.at([*place[:2], place[2] + 1, 0], 4, torch.float32)
    with pytest.raises(OSError, match="No such file"):
        alone.at([2**22 + 1, 5, 5, 0], 4, torch.float32)


def _steps(job: Job, number: int) -> None:
    """So many, of a gradient of ones for each of 1,000 weights."""
    for _ in range(number):
        job.model(torch.ones(1000)).sum().backward()
        job.optimizer.step()
        job.optimizer.zero_grad()


def _sent(comm: Comm, technique: Asynchronous, hosts: int) -> tuple[int, int]:
    """Elements sent with questions and answers, of 12 updates of 1,000 weights, and descriptors that meetings left."""
    if hosts > 1:
        segments._system = tuple
    model = torch.nn.Linear(1000, 1, bias=False)
    job = Job(model, torch.optim.SGD(model.parameters(), lr=0.1), comm=comm).apply(technique)
    sent, real, opened = [], TorchComm.send, []

    def send(self: TorchComm, x: torch.Tensor, *, to: int, tag: int = 0) -> Work:
        sent.append(x.numel() * (tag in (ASK, REPLY)))
        return real(self, x, to=to, tag=tag)

    TorchComm.send = send  # type: ignore[method-assign]
    for _ in range(3):
        _steps(job, 4)
        job.drain()
        opened.append(_memory_files())
    job.close()
    return sum(sent), opened[-1] - opened[0]


@process
@pytest.mark.parametrize(
    "technique",
    [
        Asynchronous(every=1),
        pytest.param(Asynchronous(every=1, hidden=False, wire="int8"), marks=pytest.mark.smoke),
    ],
)
def test_only_heads_are_sent_to_ranks_that_are_near(technique: Asynchronous):
    near, far = (on_processes(2, _sent, technique, hosts) for hosts in (1, 2))
    assert all(sent < 2000 and grown <= 0 for sent, grown in near)
    assert all(sent > 11_000 for sent, _ in far)


def _with_few_files(comm: Comm) -> tuple[list[float], dict[int, str], int]:
    """Weights, who died, and how many are near, where no more files can be opened once the ranks know each other."""
    model = torch.nn.Linear(1000, 1, bias=False)
    job = Job(model, torch.optim.SGD(model.parameters(), lr=1.0), comm=comm)
    real = Segments.open

    def opened(self: Segments, pieces: int, size: int) -> None:
        free = os.dup(0)
        os.close(free)
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, most))
        real(self, pieces, size)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    Segments.open = opened  # type: ignore[method-assign]
    with torch.no_grad():
        model.weight.zero_()
    job.apply(Asynchronous())
    _steps(job, 4)
    job.drain()
    found = model.weight.unique().tolist(), job.kept("asynchronous").dead, len(job.kept("asynchronous").segments.near)
    job.close()
    return found


@process
def test_where_no_more_files_can_be_opened_bytes_are_sent():
    assert on_processes(2, _with_few_files) == [([-4.0], {}, 1)] * 2


class _Broken(shards.ParameterServer):
    """A handler that cannot take what another rank sends."""

    mine = 0

    def answer(self, rank, head, body, out):  # type: ignore[no-untyped-def]
        if rank != self.mine and head[0] == shards.UPDATE:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().answer(rank, head, body, out)


def _fails(comm: Comm, technique: Asynchronous, which: Sequence[int]) -> str:
    """What each rank ends with where these cannot answer the others."""
    if comm.rank in which:
        _Broken.mine = comm.rank
        shards.ParameterServer = _Broken  # type: ignore[misc]
    peers.BEAT_S, peers.DEAD_S = 0.15, 2.0
    model = torch.nn.Linear(1000, 1, bias=False)
    job = Job(model, torch.optim.SGD(model.parameters(), lr=0.1), comm=comm).apply(technique)
    try:
        _steps(job, 40)
        job.drain()
    except OSError as error:
        return error.strerror or ""
    return "went on"


@process
@pytest.mark.parametrize(
    ("technique", "which"),
    [
        pytest.param(Asynchronous(every=1), [0], marks=pytest.mark.smoke),
        (Asynchronous(every=1), [0, 1, 2]),
        (Asynchronous(hidden=False, max_staleness=1), [1]),
        (Asynchronous(hidden=False, max_staleness=1), [0, 2]),
    ],
)
def test_ranks_that_cannot_answer_end_and_none_hangs(technique: Asynchronous, which: Sequence[int]):
    found = on_processes(SIZE, _fails, technique, which)
    failed = [rank for rank in which if found[rank] == "Too many open files"]
    assert failed == [*which] or (len(which) == SIZE and len(failed) == SIZE - 1)  # the last one hears nobody
    assert all(found[rank] == "went on" for rank in range(SIZE) if rank not in which)


def _left(comm: Comm, knows: Path) -> dict[int, str]:
    """Who is dead where rank 1's memory is not to be opened any more, as while it ends."""
    peers.BEAT_S, peers.DEAD_S = 0.15, 2.0
    model = torch.nn.Linear(1000, 1, bias=False)
    job = Job(model, torch.optim.SGD(model.parameters(), lr=0.1), comm=comm).apply(Asynchronous(every=1))
    if comm.rank != 1:
        real, theirs = os.open, comm.gather_objects(os.getpid())[1]

        def opened(path: str, *how: int) -> int:
            if path.startswith(f"/proc/{theirs}/"):
                raise PermissionError(errno.EACCES, "Permission denied")
            return real(path, *how)

        os.open = opened  # type: ignore[assignment]
    else:
        comm.gather_objects(os.getpid())
    try:
        _steps(job, 40)
        job.drain()
    except InputError:
        knows.touch()
        return {1: "itself"}
    until = time.monotonic() + 20
    while not knows.exists() and time.monotonic() < until:  # else it may take the end of this process for a death
        time.sleep(0.01)
    return job.kept("asynchronous").dead


@process
def test_a_rank_whose_memory_cannot_be_opened_any_more_is_dead(tmp_path):
    assert [list(dead) for dead in on_processes(SIZE, _left, tmp_path / "knows")] == [[1]] * SIZE
