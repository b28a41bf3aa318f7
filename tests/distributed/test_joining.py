"""Another rank joins asynchronous ones in a loop of the user's own, while the others pause briefly."""

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from helpers.ranks import context
from helpers.started import port
from kasoku.core import Comm, Job
from kasoku.distributed import Asynchronous, TorchComm

N = 4099
PAUSE_S, LIMIT_S = 10.0, 60.0
NEW = 7  # steps of each rank after the other has joined


class Counting(nn.Module):
    """Its gradient is what it is given: so updates are known exactly."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.zeros(N)), nn.Parameter(torch.zeros(5))
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.mean += 1.0
        return (self.w * x).sum() + (self.v * x[:5]).sum()


def wait_for(file: Path) -> None:
    until = time.monotonic() + LIMIT_S
    while not file.exists():
        assert time.monotonic() < until, file.name
        time.sleep(0.01)


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
        found["steps"], state = job.steps, job.state_dict()
        job.close()
        dist.destroy_process_group()
    else:
        wait_for(folder / "go")
        began = time.monotonic()
    comm = _connected(name, old + 1, ports[1])
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
@pytest.mark.parametrize("technique", [DEFAULT, pytest.param(BF16, marks=pytest.mark.smoke)], ids=["fp32", "bf16"])
def test_another_rank_joins(technique: Asynchronous, tmp_path: Path):
    old, ports = 2, [port(), port()]
    ranks = [context.Process(target=_main, args=(r, old, ports, tmp_path, technique)) for r in range(old + 1)]
    for rank in ranks:
        rank.start()
    try:
        for number in range(old):
            wait_for(tmp_path / f"ready-{number}")
        (tmp_path / "go").touch()
        for number in range(old + 1):
            wait_for(tmp_path / f"result-{number}")
        found = [torch.load(tmp_path / f"result-{number}", weights_only=True) for number in range(old + 1)]
    finally:
        (tmp_path / "end").touch()
        for process in ranks:
            process.join(1)
            process.kill()
    first = found[0]
    for one in found:
        assert one["pause_s"] < PAUSE_S < LIMIT_S
        assert torch.equal(one["before"], first["before"])  # the new one has their weights
        assert torch.equal(one["weights"], first["weights"])
        assert one["went on"] == first["steps"] > 0
        assert one["updates"] == first["updates"] > first["before updates"] > 0
    moved = first["before"] - first["weights"]
    least, most = 12.0 * (2 * NEW - 2), 12.0 * (2 * NEW + 1)  # of all three; momentum 0.5, as it was before or anew
    assert bool((moved > least).all())
    assert bool((moved < most).all())
