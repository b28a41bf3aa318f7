"""Buckets are planned again when steps take another time: on the virtual clock, by injected times, on two processes."""

from __future__ import annotations

import random
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import contracts
from contracts import assert_same, through_a_file, weights
from helpers.ranks import on_processes
from helpers.virtual_comm import Emulate, SimComm, VirtualClock
from kasoku.core import Comm, InputError, Job, Threads
from kasoku.device import Seeded
from kasoku.distributed import OneBucket, Overlap, PerLayer, Planned
from kasoku.distributed.ddp.cost_model import BucketPlan, LinkModel, UnitTimes
from kasoku.distributed.ddp.layer_index import LayerIndex
from kasoku.distributed.ddp.step_profiler import StepProfiler
from kasoku.optim import sgd

FAST = Planned(warm=0, measure=1)


def training(share: float, *, retune: bool = True) -> Job:
    """Six equal layers on the virtual clock: computing takes 36 ms, and sending `share` times as long."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(100, 100, bias=False) for _ in range(6)))
    units = [UnitTimes(name, 2e-3, 4e-3) for name, _ in LayerIndex(model).modules]
    job = Job(model, lambda m: sgd(m, lr=0.1), comm=SimComm(2, link(share)), loss=lambda out, y: out.sum())
    return job.apply(Emulate(tuple(units)), Overlap(FAST, retune=retune))


def link(share: float) -> LinkModel:
    return LinkModel(50e-6, 6 * 40_000 / (share * 0.036))


def becomes(job: Job, share: float) -> None:
    """Another link takes the place of the present one."""
    job.kept("overlap").comm.link = link(share)


def run(job: Job, steps: int, stretch: Any = lambda: 0.0) -> list[float]:
    """Seconds of each step."""
    seconds = []
    for _ in range(steps):
        began = job.clock.now()
        job.loss(job.model(torch.zeros((1, 100), device="meta", requires_grad=True)), torch.zeros(1)).backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
        job.clock.advance(stretch())
        seconds.append(job.clock.now() - began)
    return seconds


def test_a_slower_link_gets_buckets_of_its_own_within_100_steps(capsys: pytest.CaptureFixture[str]) -> None:
    job, tuned, fixed = training(0.2), training(1.2, retune=False), training(0.2, retune=False)
    for each in (job, fixed):
        run(each, 50)
        becomes(each, 1.2)
    steps_s, best_s, worst_s = run(job, 130), run(tuned, 12)[-1], run(fixed, 5)[-1]
    assert max(steps_s[100:]) <= 1.001 * best_s < 0.97 * worst_s
    assert [change["kept"] for change in job.documents["buckets.json"]()["retuned"]] == [True]
    said = capsys.readouterr().err
    assert "(an all-reduce moves 6 MB/s)" in said
    assert "with the new buckets" in said
    assert said.endswith("they stay\n")
    becomes(job, 0.2)
    assert run(job, 90)[-1] <= 1.001 * run(training(0.2, retune=False), 12)[-1]


def test_steps_that_take_longer_for_another_reason_keep_their_buckets() -> None:
    job = training(1.0)
    run(job, 50)
    plan = job.kept("overlap").layout.plan
    run(job, 60, stretch=lambda: 0.1)  # between steps
    assert job.kept("overlap").layout.plan == plan
    assert not job.documents["buckets.json"]()["retuned"]


def test_a_plan_that_brings_nothing_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    job = training(0.2)
    run(job, 50)
    plan = job.kept("overlap").layout.plan
    becomes(job, 1.2)
    monkeypatch.setattr("statistics.median", lambda values: 0.2)  # of steps, whatever the buckets are
    run(job, 110)
    assert job.kept("overlap").layout.plan == plan
    assert [change["kept"] for change in job.documents["buckets.json"]()["retuned"]] == [False]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in (1, 2))])
def test_noise_changes_nothing(seed: int) -> None:
    rng = random.Random(seed)
    job = training(1.0)
    run(job, 200, stretch=lambda: abs(rng.gauss(0, 0.01)))
    assert not job.documents["buckets.json"]()["retuned"]


def made(comm: Comm) -> Job:
    torch.manual_seed(5)
    return contracts.make(Overlap(FAST, retune=True), Seeded(3), comm=comm)


def trained(comm: Comm, stop: int, new_s: float) -> tuple[dict[str, Any], list[dict[str, Any]], BucketPlan]:
    """Weights, changes and the plan after 110 steps; resumed after `stop`. A step takes 0.1 s, from the 50th on 0.2.

    The first plan has a bucket for each layer; the second one has a single bucket. From step 96 on, when that one is
    in place, a step takes `new_s`.
    """
    comm.clock = clock = VirtualClock()

    job = made(comm)
    for step in range(110):
        clock.seconds += 0.1 if step < 50 else 0.2 if step < 96 else new_s
        contracts.train(job, 1)
        if step == stop:
            state = through_a_file({"model": job.model.state_dict(), "job": job.state_dict()})
            job = made(comm)
            job.model.load_state_dict(state["model"])
            job.load_state_dict(state["job"])
    job.drain()
    engine = job.kept("overlap")
    return weights(job), engine.replanning.changes, engine.layout.plan


def found(self: StepProfiler, *, next_forward: bool, now_late: bool | None = None) -> Any:
    """What a search finds: first a bucket for each layer, then one for all."""
    policy = PerLayer(0) if now_late is None else OneBucket()
    return policy.plan(self.layers.tensors), None, next_forward, LinkModel(1e-3, 1e9)


def trained_in_a_process(comm: Comm, stop: int, new_s: float) -> Any:
    with mock.patch.object(StepProfiler, "search_plan", found):
        return trained(comm, stop, new_s)


@pytest.mark.parametrize("new_s", [0.15, pytest.param(0.2, marks=pytest.mark.exhaustive)])
@mock.patch.object(StepProfiler, "search_plan", found)  # once for both ranks, which are threads
def test_resumed_at_any_step_it_decides_as_it_would_have(new_s: float) -> None:
    whole = Threads(2).run(partial(trained, stop=-1, new_s=new_s))
    (_, changes, plan), other = whole
    assert len(plan.buckets) == 1 if new_s < 0.2 else len(plan.buckets) > 1
    assert [change["kept"] for change in changes] == [new_s < 0.2]
    for stop in (57, 76):  # at 76 it measures
        for (mine, own, its), (theirs, same, ends) in zip(
            Threads(2).run(partial(trained, stop=stop, new_s=new_s)), whole, strict=True
        ):
            assert_same(mine, theirs)
            assert (own, its) == (same, ends), stop
    assert (changes, plan) == other[1:], "all ranks decide alike"


@pytest.mark.process
def test_two_processes_decide_alike() -> None:
    (mine, changes, plan), (theirs, *other) = on_processes(2, partial(trained_in_a_process, stop=57, new_s=0.15))
    assert_same(*({name: x for name, x in each.items() if "running" not in name} for each in (mine, theirs)))
    assert [changes, plan] == other
    assert [change["kept"] for change in changes] == [True]


@pytest.mark.parametrize(
    ("technique", "line"),
    [
        (
            Overlap(OneBucket(), retune=True),
            "cannot be planned again: take buckets = Planned in place of OneBucket",
        ),
        (Overlap(retune=True, shard=True), "buckets cannot be planned again: leave shard out"),
        (Overlap(Planned(shards=True), retune=True), "leave shard out, and shards of Planned"),
    ],
)
def test_where_there_is_no_plan_to_renew_it_says_so(technique: Overlap, line: str) -> None:
    def apply(comm: Comm) -> None:
        with pytest.raises(InputError, match=line):
            contracts.make(technique, comm=comm)

    Threads(2).run(apply)
