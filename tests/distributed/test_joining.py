"""Another rank joins asynchronous ones, beside them or in a dead one's place, while the others pause briefly."""

import os
import signal
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from helpers.ranks import context
from helpers.started import port
from helpers.survival import LIMIT_S, PROMISE_S, Counting, N, wait_for
from kasoku.core import Comm, Job
from kasoku.distributed import Asynchronous, TorchComm
from kasoku.distributed.async_sgd import peers

NEW = 7  # steps of each rank after the other has joined


def _connected(rank: int, size: int, port: int) -> Comm:
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size, timeout=timedelta(minutes=10))
    return TorchComm()


def _job(model: nn.Module, comm: Comm, technique: Asynchronous) -> Job:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    return Job(model, optimizer, comm=comm).apply(technique)


def _main(name: int, old: int, ports: list[int], folder: Path, technique: Asynchronous) -> None:
    """`name`: 0 to old - 1 are there from the start, the next one joins."""
    torch.set_num_threads(1)
    peers.BEAT_S, peers.DEAD_S = 0.15, 2.0
    warnings.simplefilter("ignore", RuntimeWarning)
    torch.save(_trained(name, old, ports, folder, technique), folder / f"part-{name}")
    (folder / f"part-{name}").rename(folder / f"result-{name}")
    wait_for(folder / "end")
    os._exit(0)


def _trained(name: int, old: int, ports: list[int], folder: Path, technique: Asynchronous) -> dict[str, Any]:
    model = Counting()

    def step(job: Job) -> None:
        model(torch.full((N,), 12.0)).backward()
        job.optimizer.step()
        job.optimizer.zero_grad()

    state, found = None, {"steps": 0, "pause_s": 0.0}
    if name < old:
        job = _job(model, _connected(name, old, ports[0]), technique)
        step(job)
        (folder / f"ready-{name}").touch()
        while not (folder / "go").exists():
            step(job)
            time.sleep(0.002)
        job.drain()
        began = time.monotonic()
        living = [rank for rank in range(old) if rank not in job.kept("asynchronous").dead]
        found["steps"], state = job.steps, job.state_dict()
        job.close()
        dist.destroy_process_group()
    else:
        wait_for(folder / "go")
        living = [int(rank) for rank in (folder / "go").read_text().split()]
        began = time.monotonic()
    size = len(living) + 1
    comm = _connected(living.index(name) if name < old else size - 1, size, ports[1])
    state = comm.broadcast_object(state)
    before = model.w.detach().clone()
    job = _job(model, comm, technique)
    if name == old:
        before = model.w.detach().clone()
    job.load_state_dict(state)
    found["before updates"] = sum(job.kept("asynchronous").staleness.values())
    found["pause_s"], found["before"], found["went on"] = time.monotonic() - began, before, job.steps
    for _ in range(NEW):
        step(job)
    job.drain()
    found["weights"], found["updates"] = model.w.detach().clone(), sum(job.kept("asynchronous").staleness.values())
    job.close()
    return found


DEFAULT, BF16 = Asynchronous(), Asynchronous(hidden=False, wire="bf16")


@pytest.mark.process
@pytest.mark.parametrize(
    ("old", "victim", "technique"),
    [
        (2, None, DEFAULT),
        pytest.param(3, 1, BF16, marks=pytest.mark.smoke),
        (3, 0, DEFAULT),
        pytest.param(2, None, BF16, marks=pytest.mark.exhaustive),
        pytest.param(3, 1, DEFAULT, marks=pytest.mark.exhaustive),
        pytest.param(3, 0, BF16, marks=pytest.mark.exhaustive),
    ],
    ids=["beside", "replaces, bf16", "replaces the first", "beside, bf16", "replaces", "replaces the first, bf16"],
)
def test_another_rank_joins(old: int, victim: int | None, technique: Asynchronous, tmp_path: Path):
    ports = [port(), port()]
    ranks = [context.Process(target=_main, args=(r, old, ports, tmp_path, technique)) for r in range(old + 1)]
    for rank in ranks:
        rank.start()
    there = [rank for rank in range(old) if rank != victim]
    try:
        for rank in range(old):
            wait_for(tmp_path / f"ready-{rank}")
        if victim is not None:
            os.kill(ranks[victim].pid or 0, signal.SIGKILL)
        (tmp_path / "part").write_text(" ".join(str(rank) for rank in there))
        (tmp_path / "part").rename(tmp_path / "go")
        for rank in (*there, old):
            wait_for(tmp_path / f"result-{rank}")
        found = [torch.load(tmp_path / f"result-{rank}", weights_only=True) for rank in (*there, old)]
    finally:
        (tmp_path / "end").touch()
        for process in ranks:
            process.join(1)
            process.kill()
    first = found[0]
    for one in found:
        assert one["pause_s"] < PROMISE_S < LIMIT_S
        assert torch.equal(one["before"], first["before"])  # the new one has their weights
        assert torch.equal(one["weights"], first["weights"])
        assert one["went on"] == first["steps"] > 0
        assert one["updates"] == first["updates"] > first["before updates"] > 0
    moved = first["before"] - first["weights"]
    least, most = 12.0 * (2 * NEW - 2), 12.0 * (2 * NEW + 1)  # of all three; momentum 0.5, as it was before or anew
    assert bool((moved > least).all())
    assert bool((moved < most).all())
