"""A rank that dies or hangs is named on all others, which end; ranks that hold different things do not begin."""

import multiprocessing
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import context, on_processes

from kasoku.core import Comm, InputError, Solo, Threads
from kasoku.parallel import TorchComm
from kasoku.parallel.agree import agree, facts_of_model, version_facts
from kasoku.parallel.faults import EXIT_CODE, Watchdog
from kasoku.parallel.watched import Watched, behind

PROMISE_S = 15.0
LIMIT_S = 60.0  # of what is not promised
QUICK = Watchdog(beat_s=0.25, dead_s=3.0)


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


Act = Callable[[Watched, Callable[[], None]], None]


def _rank_main(rank: int, size: int, port: int, hosted: bool, folder: Path, dog: Watchdog, act: Act) -> None:
    out = os.open(folder / f"stderr-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(out, 2)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0 and not hosted, timedelta(seconds=LIMIT_S))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(minutes=30))
    comm = dog.start(TorchComm(), ("127.0.0.1", port))
    act(comm, lambda: (folder / f"ready-{rank}").touch())
    comm.pulse.close()
    dist.destroy_process_group()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Ranks]]:
    """launch(size, act, watchdog, store_here=False): ranks over gloo on loopback, killed at the test's end."""
    processes: list[multiprocessing.process.BaseProcess] = []
    stores = []

    def start(size: int, act: Act, dog: Watchdog = QUICK, *, store_here: bool = False) -> Ranks:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        if store_here:
            stores.append(dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False))
        for rank in range(size):
            args = (rank, size, port, store_here, tmp_path, dog, act)
            (tmp_path / f"stderr-{rank}").touch()
            processes.append(context.Process(target=_rank_main, args=args))
            processes[-1].start()
        return Ranks(processes, tmp_path)

    yield start
    for process in processes:
        process.kill()
        process.join(LIMIT_S)


def _wait_for(victim: int, comm: Watched, ready: Callable[[], None]) -> None:
    comm.all_reduce(torch.ones(4)).wait()
    comm.pulse.step()
    ready()
    if comm.rank != victim:
        comm.all_reduce(torch.ones(1000)).wait()
    time.sleep(2 * LIMIT_S)


def all_wait_for(victim: int) -> Act:
    """All but the victim wait in an all_reduce, which it never joins."""
    return partial(_wait_for, victim)


def pid_of(ranks: Ranks, rank: int) -> str:
    return f"rank {rank} (host {socket.gethostname()}, pid {ranks.processes[rank].pid})"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_death_is_named_on_all_others_while_they_wait_for_it(
    launch: Callable[..., Ranks], victim: int, number: int
) -> None:
    dog = Watchdog() if (victim, number) == (2, signal.SIGKILL) else QUICK
    ranks = launch(3, all_wait_for(victim), dog)
    ranks.wait_until_ready()
    time.sleep(0.5)
    ranks.send(victim, number)
    for rank, (code, line) in ranks.end(PROMISE_S, but=(victim,)).items():
        assert code == EXIT_CODE, (rank, ranks.said(rank))
        verb = "died" if victim else "is gone"
        assert line.startswith(f"kasoku: {pid_of(ranks, victim)} {verb}: "), line
        assert line.endswith("again with --continue --out DIR (torchrun --max-restarts N does it by itself)")
        assert line.count("\n") == 0


def _compute(comm: Watched, ready: Callable[[], None]) -> None:
    ready()
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        sum(range(1000))


def test_a_death_is_named_while_the_others_compute(launch: Callable[..., Ranks]) -> None:
    ranks = launch(3, _compute)
    ranks.wait_until_ready()
    ranks.send(1, signal.SIGKILL)
    for code, line in ranks.end(PROMISE_S, but=(1,)).values():
        assert (code, f"{pid_of(ranks, 1)} died" in line) == (EXIT_CODE, True), line


def test_ranks_that_die_together_are_named_together(launch: Callable[..., Ranks]) -> None:
    ranks = launch(4, all_wait_for(3))
    ranks.wait_until_ready()
    for victim in (1, 3):
        ranks.send(victim, signal.SIGSTOP)  # their connections stay open, as those of a host without power
    for code, line in ranks.end(PROMISE_S, but=(1, 3)).values():
        assert code == EXIT_CODE
        assert re.search(r"ranks 1 \(.*\) and 3 \(.*\) died", line), line


def test_where_the_store_outlives_rank_0_its_death_is_seen_by_its_heartbeat(launch: Callable[..., Ranks]) -> None:
    ranks = launch(3, all_wait_for(0), store_here=True)
    ranks.wait_until_ready()
    ranks.send(0, signal.SIGKILL)
    for code, line in ranks.end(PROMISE_S, but=(0,)).values():
        assert (code, f"{pid_of(ranks, 0)} died" in line) == (EXIT_CODE, True), line


def _fail(failing: int, comm: Watched, ready: Callable[[], None]) -> None:
    if comm.rank == failing:
        comm.pulse.close(failed="the disk is full")
        os._exit(1)
    comm.all_reduce(torch.ones(4)).wait()


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_that_was_announced_is_told_on_the_others(launch: Callable[..., Ranks], failing: int) -> None:
    ranks = launch(3, partial(_fail, failing))
    for code, line in ranks.end(LIMIT_S, but=(failing,)).values():
        assert (code, f"{pid_of(ranks, failing)} failed: the disk is full" in line) == (EXIT_CODE, True), line


def _sleep(sleeper: int, comm: Watched, ready: Callable[[], None]) -> None:
    for step in range(4):
        if step == 3 and comm.rank == sleeper:
            time.sleep(2 * LIMIT_S)
        works = [comm.all_reduce(torch.ones(n)) for n in (1000, 7)]
        for work in works:
            work.wait()
        comm.pulse.step()


@pytest.mark.parametrize("sleeper", [0, 3])
def test_a_rank_that_hangs_is_named_with_the_collective_it_did_not_join(
    launch: Callable[..., Ranks], sleeper: int
) -> None:
    ranks = launch(4, partial(_sleep, sleeper), Watchdog(hang_timeout_s=2.0, beat_s=0.25, dead_s=10.0))
    waiter = pid_of(ranks, 1 if sleeper == 0 else 0)
    wanted = f"{pid_of(ranks, sleeper)} has not joined all_reduce #7 of 1000 float32, which {waiter} waits in; "
    for rank, (code, line) in ranks.end(LIMIT_S).items():
        assert (code, wanted in line) == (EXIT_CODE, True), (rank, line)
        assert re.match(r"kasoku: no step for \d+ s: ", line)


def _busy(comm: Watched, ready: Callable[[], None]) -> None:
    if comm.rank == 1:
        time.sleep(3)  # compiles
    for _ in range(3):
        comm.all_reduce(torch.ones(4)).wait()
        comm.pulse.step()
    if comm.rank == 1:
        with comm.pulse.busy("evaluation"):
            time.sleep(3)
    comm.all_reduce(torch.ones(4)).wait()
    comm.pulse.step()


def test_no_rank_hangs_before_the_first_step_nor_while_one_is_busy(launch: Callable[..., Ranks]) -> None:
    ranks = launch(2, _busy, Watchdog(hang_timeout_s=1.0, beat_s=0.25, dead_s=10.0))
    assert ranks.end(LIMIT_S) == {0: (0, ""), 1: (0, "")}


def _end(order: tuple[int, ...], comm: Watched, ready: Callable[[], None]) -> None:
    comm.all_reduce(torch.ones(4)).wait()
    comm.pulse.step()
    time.sleep(0.7 * QUICK.dead_s * order.index(comm.rank))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_a_normal_end_in_any_order_is_silent(launch: Callable[..., Ranks], order: tuple[int, ...]) -> None:
    ranks = launch(3, partial(_end, order))
    assert ranks.end(LIMIT_S) == dict.fromkeys(range(3), (0, ""))


def _rest(comm: Watched, ready: Callable[[], None]) -> None:
    ready()
    time.sleep(2 * QUICK.dead_s)
    comm.all_reduce(torch.ones(4)).wait()


def test_ranks_that_were_all_stopped_for_a_while_accuse_nobody(launch: Callable[..., Ranks]) -> None:
    ranks = launch(3, _rest)
    ranks.wait_until_ready()
    for number, then_s in ((signal.SIGSTOP, QUICK.dead_s + 1), (signal.SIGCONT, 0.0)):
        for rank in range(3):
            ranks.send(rank, number)
        time.sleep(then_s)
    assert ranks.end(LIMIT_S) == dict.fromkeys(range(3), (0, ""))


def test_64_hearts_beat_cheaply_and_name_the_one_that_stops(capsys: pytest.CaptureFixture[str]) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    lines: list[str] = []
    all_told = threading.Event()

    def tell(line: str) -> None:
        lines.append(line)
        if len(lines) == 63:
            all_told.set()

    def act(comm: Comm) -> Watched:
        return Watchdog(on_fault=tell).start(comm, ("127.0.0.1", store.port))

    hearts = [watched.pulse.heart for watched in Threads(64).run(act)]
    try:
        began, used = time.monotonic(), time.process_time()
        time.sleep(3)
        a_beat = (time.process_time() - used) / (time.monotonic() - began) / 64
        with capsys.disabled():
            print(f"\n64 hearts with their store: {a_beat * 1e6:.0f} us of a core a beat and rank")
        assert not lines
        assert a_beat < 0.005
        hearts[17].beat = lambda state: None
        assert all_told.wait(LIMIT_S)
        assert {line.partition(" (")[0] for line in lines} == {"rank 17"}
    finally:
        for heart in reversed(hearts):
            heart.close("")


def test_collectives_pass_through_unchanged_and_are_counted() -> None:
    def act(inner: Comm) -> list[float]:
        comm = Watched(inner, Watchdog().start(Solo(), ("", 0)).pulse)
        x, out = torch.arange(4.0) + comm.rank, torch.empty(2)
        comm.all_reduce(x, op="max").wait()
        comm.reduce_scatter(out, x).wait()
        comm.all_gather(x, out).wait()
        assert comm.broadcast_object("a" if comm.rank == 0 else "b") == "a"
        assert comm.gather_objects(comm.rank) == [0, 1]
        if comm.rank == 0:
            comm.send(x, to=1).wait()
        else:
            comm.receive(x, source=0).wait()
        channel = comm.channel()
        channel.all_reduce(x).wait()
        main, other = (count.told(labels=True) for count in comm.pulse.counts[1:])
        assert (main["started"], main["finished"], main["waits"]) == (6, 6, "")
        assert main["labels"]["1"] == "all_reduce #1 of 4 float32"
        assert main["labels"]["4"] == "broadcast_object #4"
        assert (other["started"], [count.name for count in comm.pulse.counts[2:]]) == (1, [" on channel 2"])
        return x.tolist()

    assert Threads(2).run(act) == [[4.0, 8.0, 12.0, 16.0]] * 2


def _told(started: int, waits: str = "", labels: dict[str, str] | None = None) -> dict[str, object]:
    return {"counts": {"": {"started": started, "finished": 0, "waits": waits, "labels": labels or {}}}}


@pytest.mark.parametrize(
    ("told", "line"),
    [
        (
            [_told(7, "b #6", {"6": "b #6"}), _told(5), _told(5)],
            "[1, 2] have not joined b #6, which [0] waits in",
        ),
        ([_told(5), _told(7, "", {"6": "b #6", "7": "c #7"})], "[0] has not joined b #6, which [1] has started"),
        ([_told(5), _told(90)], "[0] has not joined collective #6, which [1] has started"),
        ([_told(5), _told(5, "receive from rank 0")], "[0] has made none, and [1] waits in receive from rank 0"),
        (
            [_told(5, "b #5"), _told(5, "b #5")],
            "all wait, [0] in b #5 (the network? or ranks that wait for each other)",
        ),
        ([_told(5), _told(5)], "[0, 1] have made none, and none waits for another (data? the device?)"),
    ],
)
def test_who_is_behind(told: list[dict[str, object]], line: str) -> None:
    assert behind(told, str) == line


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kasoku.parallel.faults._CONNECT", timedelta(seconds=1))
    with socket.socket() as bound:  # not listening
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(InputError, match="does not answer"):
            Threads(2).run(lambda comm: Watchdog().start(comm, bound.getsockname()))
    for setting in ({"beat_s": 0.0}, {"dead_s": 2.0}, {"hang_timeout_s": -1.0}):
        with pytest.raises(InputError):
            Watchdog(**setting)


RECIPE = "batch = 128\nepochs = 2\n[rate]\nbase = 0.1\n"


def _agreed(comm: Comm, facts: list[dict[str, object]]) -> str:
    try:
        agree(comm, facts[comm.rank])
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("there", "line"),
    [
        ({"recipe": RECIPE.replace("128", "64")}, "another recipe: batch = 64 there, 128 on rank 0"),
        ({"recipe": RECIPE + "x = 1"}, "another recipe: line 5 is 'x = 1' there, '' on rank 0"),
        ({"recipe": RECIPE.strip()}, "another recipe: line 5 is nothing there, '' on rank 0"),
        ({"data": "beef"}, "another data: beef there, cafe on rank 0"),
        ({"data": None}, "another data: nothing there, cafe on rank 0"),
        ({"more": "1"}, "another more: 1 there, nothing on rank 0"),
        ({"model": {"a": "1"}}, "another model: b = nothing there, 2 on rank 0"),
        ({"model": {"a": "1", "b": "3"}}, "another model: b = 3 there, 2 on rank 0"),
        ({"model": {"b": "2", "a": "1"}}, "another model: b comes where a comes on rank 0"),
        (
            {"model": {"a": "9", "b": "2"}, "data": "beef"},
            "another data: beef there, cafe on rank 0 (also another model)",
        ),
    ],
)
def test_what_differs_is_named_on_all_ranks(there: dict[str, object], line: str) -> None:
    facts = {"recipe": RECIPE, "data": "cafe", "model": {"a": "1", "b": "2"}}
    other = {name: fact for name, fact in {**facts, **there}.items() if fact is not None}
    said = Threads(3).run(lambda comm: _agreed(comm, [facts, other, facts]))
    assert said == [f"rank 1 has {line}: start all ranks with the same"] * 3
    said = Threads(7).run(lambda comm: _agreed(comm, [facts, *[other] * 5, facts]))
    assert said == [f"ranks 1, 2, 3 and 2 more have {line}: start all ranks with the same"] * 7


def test_differences_of_several_kinds_are_each_told() -> None:
    facts: list[dict[str, object]] = [{"data": text} for text in ("a", "b", "a", "c")]
    said = Threads(4).run(lambda comm: _agreed(comm, facts))
    wanted = "rank 1 has another data: b there, a on rank 0; rank 3 has another data: c there, a on rank 0"
    assert said == [f"{wanted}: start all ranks with the same"] * 4


def _same_facts(comm: Comm) -> None:
    torch.manual_seed(comm.rank)
    agree(comm, {"recipe": RECIPE, **version_facts(), "model": facts_of_model(torch.nn.Linear(3, 2))})


def test_ranks_that_hold_the_same_begin() -> None:
    assert on_processes(2, _same_facts) == [None, None]
    agree(Solo(), {})


def test_facts_tell_shape_type_and_frozen() -> None:
    model = torch.nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    assert facts_of_model(model) == {"weight": "float32 (2, 3)", "bias": "float32 (2,) frozen"}
    assert version_facts()["torch"] == torch.__version__
    assert len(version_facts()["source"]) == 16
