"""A rank that is killed or stands still is named; the others go on without it, and stop with equal weights."""

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from helpers.ranks import context
from helpers.started import port
from helpers.survival import LIMIT_S, PROMISE_S, Counting, N, wait_for
from kasoku.core import Job
from kasoku.distributed import AllReduce, Asynchronous, TorchComm
from kasoku.distributed.async_sgd import parameter_server as shards
from kasoku.distributed.async_sgd import peers
from kasoku.distributed.liveness import LostRankError

SIZE = 4
pytestmark = pytest.mark.process


def _main(rank: int, port: int, folder: Path, technique: Asynchronous, f: Callable[..., dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    peers.BEAT_S, peers.DEAD_S = 0.15, 2.0
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=SIZE, timeout=timedelta(minutes=10))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = f(rank, folder, technique)
    found["said"] = [str(warning.message) for warning in said]
    torch.save(found, folder / f"part-{rank}")
    (folder / f"part-{rank}").rename(folder / f"result-{rank}")
    wait_for(folder / "end")
    os._exit(0)


def _trained(rank: int, folder: Path, technique: Asynchronous) -> dict[str, Any]:
    model = Counting()
    inside = [AllReduce()] * bool(technique.node)
    job = Job(model, torch.optim.SGD(model.parameters(), lr=1.0), comm=TorchComm()).apply(technique, *inside)
    x = torch.full((N,), 12.0 * (rank + 1))

    def step() -> None:
        model(x).backward()
        job.optimizer.step()
        job.optimizer.zero_grad()

    try:
        for _ in range(3):
            step()
        job.drain()
        (folder / f"ready-{rank}").touch()
        until = time.monotonic() + LIMIT_S
        while not job.step_comm.broadcast_object((folder / "go").exists()) and time.monotonic() < until:
            step()
            time.sleep(0.002)
        job.drain()
        first = model.w.detach().clone()
        for _ in range(3):
            step()
        job.drain()
        exchange = job.kept("asynchronous")
        moved, dead, stale = model.w.detach() - first, dict(exchange.dead), sum(exchange.staleness.values())
        weights = {"w": model.w.detach().clone(), "v": model.v.detach().clone(), "mean": model.mean.clone()}
        job.close()
        return {"weights": weights, "moved": moved, "dead": dead, "updates": stale}
    except LostRankError as error:
        return {"error": str(error)}


KILLED, STOPPED = signal.SIGKILL, signal.SIGSTOP
CASES = {
    "killed": (2, KILLED, Asynchronous()),
    "first killed": (0, KILLED, Asynchronous(hidden=False, max_staleness=2)),
    "stopped": (1, STOPPED, Asynchronous(hidden=False)),
    "stopped, bounded": (3, STOPPED, Asynchronous(wire="bf16", max_staleness=1)),
    "killed, int8": (1, KILLED, Asynchronous(wire="int8")),
    "killed, bf16": (1, KILLED, Asynchronous(hidden=False, wire="bf16")),
    "second of a node killed": (3, KILLED, Asynchronous(node=2)),
    "first of a node killed": (0, KILLED, Asynchronous(node=2, hidden=False)),
}


def _cases() -> Iterator[Any]:
    for name, case in CASES.items():
        yield pytest.param(*case, marks=[pytest.mark.smoke] * (name == "killed"), id=name)


@pytest.mark.parametrize(("victim", "number", "technique"), [*_cases()])
def test_the_others_go_on_and_end_with_equal_weights(victim: int, number: int, technique: Asynchronous, tmp_path: Path):
    where = port()
    ranks = [context.Process(target=_main, args=(r, where, tmp_path, technique, _trained)) for r in range(SIZE)]
    for rank in ranks:
        rank.start()
    node = max(1, technique.node)  # its ranks die together
    lost = [rank for rank in range(SIZE) if rank // node == victim // node]
    others = [rank for rank in range(SIZE) if rank not in lost]
    try:
        for rank in range(SIZE):
            wait_for(tmp_path / f"ready-{rank}")
        time.sleep(0.05)
        os.kill(ranks[victim].pid or 0, number)
        (tmp_path / "go").touch()
        asked = time.monotonic()
        for rank in others:
            wait_for(tmp_path / f"result-{rank}")
        assert time.monotonic() - asked < PROMISE_S
        found = [torch.load(tmp_path / f"result-{rank}", weights_only=True) for rank in others]
        if number == signal.SIGSTOP:
            os.kill(ranks[victim].pid or 0, signal.SIGCONT)
            wait_for(tmp_path / f"result-{victim}")
            late = torch.load(tmp_path / f"result-{victim}", weights_only=True)
            assert late.get("error") == f"rank {victim} was given up by the others, which go on without it"
    finally:
        (tmp_path / "end").touch()
        for rank in ranks:
            rank.join(1)
            rank.kill()
    moved = -3 * 12.0 * sum(rank + 1 for rank in others) / len(others)
    for one in found:
        assert "error" not in one, one
        assert sorted(one["dead"]) == lost
        assert any(line.startswith(f"rank {victim} died: ") for line in one["said"]), one["said"]
        for name, x in found[0]["weights"].items():
            assert torch.equal(x, one["weights"][name])
        torch.testing.assert_close(one["moved"], torch.full((N,), moved), rtol=1e-3, atol=0.0)
        assert one["updates"] >= 6 * len(others)
    w = found[0]["weights"]["w"]
    assert w.isfinite().all()
    assert float(w.max()) < moved  # all of it was moved, also what the dead one owned


def _while_one_sleeps(rank: int, folder: Path, technique: Asynchronous) -> dict[str, Any]:
    """Rank 1 is stopped in an answer that it has begun to write, and goes on writing when the others know it dead."""
    real, first = shards.ParameterShard.take, True

    def take(self: shards.ParameterShard, asks: int, update: Tensor, version: int, out: Tensor) -> int:
        nonlocal first
        if first and asks != rank and (folder / "go").exists():
            first = False
            found = real(self, asks, update, version, out)
            out.view(torch.uint8)[: len(out) // 2].fill_(0xF8)  # -4e34 in fp32, -2e37 in 8 bits
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # this thread stops first
            for x in (update, out):
                x.view(torch.uint8).fill_(0xF8)
            (folder / "wrote").touch()
            return found
        return real(self, asks, update, version, out)

    if rank == 1:
        shards.ParameterShard.take = take  # type: ignore[method-assign]
    model = Counting()
    job = Job(model, torch.optim.SGD(model.parameters(), lr=1.0), comm=TorchComm()).apply(technique)
    x = torch.full((N,), 12.0)
    try:
        (folder / f"ready-{rank}").touch()
        until, steps = time.monotonic() + LIMIT_S, 0
        while not (folder / "wrote").exists() and time.monotonic() < until:
            model(x).backward()
            job.optimizer.step()
            job.optimizer.zero_grad()
            steps += 1
            if rank != 1 and job.kept("asynchronous").dead:
                (folder / f"knows-{rank}").touch()
            time.sleep(0.002)
        job.drain()
        weights = model.w.detach().clone()
        job.close()
        return {"weights": weights, "steps": steps}
    except LostRankError as error:
        return {"error": str(error)}


@pytest.mark.parametrize(
    "technique",
    [
        pytest.param(Asynchronous(), marks=pytest.mark.smoke),
        Asynchronous(hidden=False),
        Asynchronous(hidden=False, wire="int8"),
    ],
    ids=["default", "in place", "int8"],
)
def test_an_owner_that_wakes_up_in_an_answer_harms_nobody(technique: Asynchronous, tmp_path: Path):
    where, others = port(), [0, 2, 3]
    ranks = [
        context.Process(target=_main, args=(r, where, tmp_path, technique, _while_one_sleeps)) for r in range(SIZE)
    ]
    for rank in ranks:
        rank.start()
    try:
        for rank in range(SIZE):
            wait_for(tmp_path / f"ready-{rank}")
        (tmp_path / "go").touch()
        for rank in others:
            wait_for(tmp_path / f"knows-{rank}")
        os.kill(ranks[1].pid or 0, signal.SIGCONT)
        for rank in others:
            wait_for(tmp_path / f"result-{rank}")
        found = [torch.load(tmp_path / f"result-{rank}", weights_only=True) for rank in others]
    finally:
        (tmp_path / "end").touch()
        for rank in ranks:
            rank.join(1)
            rank.kill()
    for one in found:
        assert "error" not in one, one
        assert torch.equal(one["weights"], found[0]["weights"])
        assert one["weights"].abs().max() <= 12.0 * (sum(one["steps"] for one in found) + 10_000)
