"""A cause is planted in a real loop; the verdict names it, and no other first."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from contracts import Batches, rule, train
from contracts import one_thread as one_thread
from helpers.ranks import on_processes
from kasoku.core import Comm, Job
from kasoku.core.hardware import cores
from kasoku.distributed import AllReduce, Graded, Overlap
from kasoku.report import Ledger, Timed, facts_of

NAP_S = 0.03
LATE_S = 0.1  # far above what gloo takes for this network's gradients, 25 ms with AllReduce on 2 quiet cores
STEPS = 12


def network(width: int = 8) -> nn.Sequential:
    """Four blocks and a head, for images of 3x8x8."""
    layers: list[nn.Module] = []
    for channels in (3, *[width] * 3):
        layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, 4))


class SlowInput(Batches):
    """Each batch takes its time."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in super().__iter__():
            time.sleep(NAP_S)
            yield batch


class SlowUpdate(torch.optim.SGD):
    """A rule that takes its time."""

    def step(self, closure=None):
        time.sleep(NAP_S)
        return super().step(closure)


def verdict_of(job: Job, batch: int, *, steps: int = STEPS) -> list[dict]:
    """What holds up so many steps of a job, after a few that warm up."""
    train(job, 3)
    ledger = Ledger(job.trace, started=job.clock.now())
    train(job, steps)
    facts = facts_of(job, batch, starved=ledger.starved())
    document, _ = ledger.document(job.comm, facts)
    return document["verdict"]


@pytest.mark.timing
@pytest.mark.smoke
def test_planted_slow_input_is_named():
    job = Job(network(), rule, loader=SlowInput(batch=64)).apply(Timed())
    first = verdict_of(job, 64)[0]
    assert first["cause"] == "input-bound"
    assert first["share"] > 0.5


@pytest.mark.timing
def test_planted_slow_update_is_named():
    job = Job(network(), lambda m: SlowUpdate(m.parameters(), lr=0.1), loader=Batches(batch=64)).apply(Timed())
    first = verdict_of(job, 64)[0]
    assert first["cause"] == "update-bound"
    assert first["share"] > 0.5


@pytest.mark.timing
def test_planted_tiny_batch_is_named():
    job = Job(network(), rule, loader=Batches(batch=2)).apply(Timed())
    causes = verdict_of(job, 2, steps=100)
    assert causes[0]["cause"] == "small batch", causes


def slow_rank(comm: Comm, overlapped: bool) -> list[dict]:
    """Rank 1 naps in the backward of its last layer, and nowhere else."""
    share = Overlap(Graded(first=1, power=1.5, least_bytes=1000)) if overlapped else AllReduce()
    loader = Batches(rank=comm.rank, size=comm.size, batch=128)
    job = Job(network(), rule, loader=loader, comm=comm).apply(share, Timed())
    if comm.rank == 1:
        job.model[-1].weight.register_hook(lambda _: time.sleep(LATE_S))
    return verdict_of(job, 64)


def assert_rank_1_is_named(causes: list[dict]) -> None:
    assert causes[0]["cause"] == "straggler", causes
    assert causes[0]["line"].startswith("rank 1 takes ")
    assert "most of it in backward" in causes[0]["line"]
    assert causes[0]["share"] > 0.3
    assert re.search(r", and it was the last in (9\d|100)% of the latest$", causes[0]["line"])


@pytest.mark.process
@pytest.mark.timing
@pytest.mark.parametrize("overlapped", [False, True])
def test_planted_slow_rank_is_named_by_processes(overlapped: bool):
    for causes in on_processes(2, slow_rank, overlapped):
        assert_rank_1_is_named(causes)


@pytest.mark.timing
def test_oversubscribed_threads_are_named():
    torch.set_num_threads(8 * cores())  # the fixture puts it back
    job = Job(network(width=32), rule, loader=Batches(batch=64)).apply(Timed())
    causes = verdict_of(job, 64)
    assert causes[0]["cause"] == "oversubscribed", causes
    assert f"{8 * cores()} threads compute on {cores()} cores" in causes[0]["line"]


@pytest.mark.timing
def test_a_loop_without_a_plant_has_none_of_these_causes():
    job = Job(network(width=32), rule, loader=Batches(batch=256)).apply(Timed())
    found = {cause["cause"] for cause in verdict_of(job, 256)}
    assert not found & {"input-bound", "update-bound", "small batch", "straggler", "communication-bound"}
    assert "oversubscribed" not in found
