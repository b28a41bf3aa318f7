"""fp16 loss scaling beside Overlap: updates stay behind the next forward, and an overflow leaves no trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import contracts
from contracts import one_thread as one_thread
from helpers.ranks import on_processes
from kasoku.core import Comm, Job, Linear, Solo, Technique, Threads
from kasoku.device import Autocast, LossScale
from kasoku.distributed import (
    AllReduce,
    Graded,
    Hierarchical,
    LowRank,
    Mean,
    OneBucket,
    Overlap,
    PerLayer,
    Planned,
    Reducer,
    Wire,
)
from kasoku.distributed.counting_comm import Activity, CountingComm
from kasoku.memory import SavedMemory
from kasoku.optim import EMA, Clip, Rate

SCALE = LossScale(1024.0, every=2)
OVERFLOWS = (1, 4, 5)  # steps in which the gradients of the last rank overflow


def overflowing(comm: Comm, *techniques: Technique, accumulate: int = 1, **more: Any) -> Job:
    """A job whose loss on the last rank is infinite in some steps, in the last pass of a step."""
    torch.manual_seed(5)
    job = contracts.make(*techniques, comm=comm, accumulate=accumulate, **more)
    inner, passes = job.loss, [0]

    def loss(outputs: Any, labels: Tensor) -> Tensor:
        value = inner(outputs, labels)
        if outputs.requires_grad:
            passes[0] += 1
            last = passes[0] % accumulate == 0
            if comm.rank == comm.size - 1 and (passes[0] - 1) // accumulate in OVERFLOWS and last:
                return value * torch.inf
        return value

    job.patch(job, "loss", loss)
    return job


def trained(job: Job, steps: int = 8) -> tuple[dict[str, Tensor], Tensor, dict[str, Any]]:
    contracts.train(job, steps)
    return contracts.weights(job), contracts.judged(job), job.state_dict()["kept"]["loss_scale"]


def check_same(ranks: Sequence[Sequence[tuple[dict[str, Tensor], Tensor, dict[str, Any]]]]) -> None:
    for (weights, judged, scale), *others in ranks:
        for other_weights, other_judged, other_scale in others:
            contracts.assert_same(weights, other_weights)
            assert torch.equal(judged, other_judged)
            assert scale == other_scale


def waiting_and_late(comm: Comm, more: tuple[Technique, ...], accumulate: int) -> list[Any]:
    """The step that waits for all gradients and then checks their means, and the updates that wait for nothing."""
    ways: list[Technique] = [AllReduce(), Overlap(PerLayer(0), next_forward=False), Overlap(PerLayer(0))]
    return [trained(overflowing(comm, *more, way, accumulate=accumulate)) for way in ways]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    "more",
    [
        (SCALE,),
        (SCALE, EMA(0.8, every=2)),
        (SCALE, Clip(0.1)),
        (SCALE, Autocast("bf16"), Rate(Linear(epochs=4, warmup=1))),
        (LossScale(1024.0, factor=3.0, every=2),),  # 1 / scale is not exact
    ],
    ids=lambda more: "-".join(type(technique).__name__ for technique in more),
)
def test_late_updates_have_the_bits_of_the_step_that_waits(more: tuple[Technique, ...], accumulate: int) -> None:
    check_same(Threads(2).run(lambda comm: waiting_and_late(comm, more, accumulate)))


@pytest.mark.process
@pytest.mark.smoke
def test_late_updates_have_the_bits_of_the_step_that_waits_on_processes() -> None:
    check_same(on_processes(2, waiting_and_late, (SCALE,), 2))


def test_updates_stay_behind_the_next_forward_and_an_overflow_leaves_no_trace() -> None:
    def values(job: Job) -> list[Tensor]:
        """Parameters and momenta, after all pending updates."""
        job.drain()
        states = [job.optimizer.state[p] for p in job.model.parameters()]
        return [x.detach().clone() for x in (*job.model.parameters(), *(s["momentum_buffer"] for s in states if s))]

    def run(comm: Comm) -> list[tuple[bool, bool]]:
        job = overflowing(comm, SCALE, Overlap(PerLayer(0)))
        engine: Any = job.kept("overlap")
        last, found = [values(job)], []

        def look() -> None:
            late = [bucket.pending for bucket in engine.layout.buckets]
            assert len(set(late)) == 1
            now, before = values(job), last.pop()
            last.append(now)
            found.append((late[0], len(now) == len(before) and all(map(torch.equal, now, before))))

        contracts.train(job, 8, each=look)
        return found

    for found in Threads(2).run(run):
        assert found == [(step not in OVERFLOWS, step in OVERFLOWS) for step in range(8)]


def test_the_decision_waits_for_no_bucket_and_takes_one_collective() -> None:
    def run(comm: Comm) -> tuple[int, int, int]:
        counted = CountingComm(comm, Activity(60.0))
        job = contracts.make(SCALE, Overlap(Graded(first=1, power=1.5, least_bytes=1000)), comm=counted)
        engine: Any = job.kept("overlap")
        own, events = counted.activity.counts[1], list[str]()
        begun = counted.started, own.started
        for bucket in engine.layout.buckets:
            bucket.wait = lambda wait=bucket.wait: (events.append("wait"), wait())
        job.before_step(lambda: events.append("step"))  # before Overlap's
        job.after_step(lambda: events.append("end"))
        contracts.train(job, 4)
        chunks = len(engine.layout.plan.order)
        assert events == (["step", "end"] + ["wait"] * chunks) * 4
        assert chunks > 1
        return counted.started - begun[0], own.started - begun[1], chunks

    for decisions, sent, chunks in Threads(2).run(run):
        assert (decisions, sent) == (4, 4 * chunks)


def test_the_first_steps_are_measured_and_planned_beside_overflows() -> None:
    def run(comm: Comm) -> list[Any]:
        plain = trained(overflowing(comm, SCALE, Overlap(OneBucket())))
        job = overflowing(comm, SCALE, Overlap(Planned(warm=1, measure=1)))
        found = [plain, trained(job)]
        engine: Any = job.kept("overlap")
        assert engine.forecast is not None, "the plan was not made"
        return found

    check_same(Threads(2).run(run))


def test_a_training_goes_on_from_a_checkpoint_bit_for_bit() -> None:
    def run(comm: Comm) -> list[Any]:
        techniques = (SCALE, Overlap(PerLayer(0)))
        net: dict[str, Any] = {"norm": False, "dropout": 0.0}
        whole = contracts.make(*techniques, comm=comm, model=contracts.Net(**net))
        first = contracts.make(*techniques, comm=comm, model=contracts.Net(**net))
        contracts.train(whole, 7)
        contracts.train(first, 3)
        second = contracts.make(*techniques, comm=comm, model=contracts.Net(seed=9, **net))
        contracts.go_on(first, second)
        contracts.train(second, 4)
        return [
            (contracts.weights(job), contracts.judged(job), job.kept("loss_scale").state_dict())
            for job in (whole, second)
        ]

    check_same(Threads(2).run(run))


def test_parameters_without_a_gradient_are_skipped_beside_it() -> None:
    class Sometimes(contracts.Net):
        on = True

        def forward(self, x_NCHW: Tensor) -> Tensor:
            out = super().forward(x_NCHW)
            return out if self.on else out.detach() + self.head.bias

    def run(comm: Comm) -> list[Any]:
        found = []
        for late in (False, True):
            torch.manual_seed(5)
            model = Sometimes(dropout=0)
            job = contracts.make(SCALE, Overlap(PerLayer(0), next_forward=late, unused="skip"), model=model, comm=comm)
            contracts.train(job, 6, each=lambda job=job, model=model: setattr(model, "on", job.steps % 3 != 0))
            found.append(trained(job, 0))
        return found

    check_same(Threads(2).run(run))


@pytest.mark.parametrize(
    ("reducer", "late"),
    [(Mean(), True), (Wire(), True), (Wire("fp16"), True), (LowRank(), False),
     (Hierarchical(node=1, across=Wire()), True), (Hierarchical(node=1, across=LowRank()), False)],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_updates_wait_only_where_a_reducer_may_overflow(
    reducer: Reducer, late: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(comm: Comm) -> tuple[Any, Any]:
        way = Overlap(OneBucket(), reducer=reducer)
        job = overflowing(comm, SCALE, way)
        engine: Any = job.kept("overlap")
        assert engine.late == late
        return trained(job), trained(overflowing(comm, SCALE, Overlap(OneBucket(), False, reducer)))

    check_same(Threads(2).run(run))
    said = "kasoku: Overlap: LowRank may make gradients infinite, which a step must know, so it waits for all of them"
    lines = [line for line in capsys.readouterr().err.splitlines() if "Overlap" in line]
    assert lines == ([] if late else [said.replace("LowRank", type(reducer).__name__)])


@pytest.mark.parametrize(
    "reducer",
    [Mean(), Wire(), Wire("fp16"), Hierarchical(node=2), Hierarchical(node=2, across=Wire("fp16"))],
    ids=lambda value: str(value)[:60],
)
def test_gradients_up_to_the_largest_have_a_finite_mean(reducer: Reducer) -> None:
    def run(comm: Comm) -> bool:
        reduce, largest, finite = reducer.bind(comm), reducer.largest(comm.size), True
        assert largest > 1000
        x = torch.full((1000,), largest) * torch.linspace(0.9, 1.0, 1000)
        for _ in range(4):  # errors that are kept from step to step
            mean = x.clone()
            reduce("x", mean).wait()
            finite &= bool(mean.isfinite().all())
        reduce.settle()
        return finite

    assert Threads(4).run(run) == [True] * 4


def test_a_sum_that_would_overflow_counts_as_an_overflow() -> None:
    """All ranks' gradients are finite, their sum is not; two ranks divide them before they are added."""

    def run(comm: Comm, share: float) -> tuple[bool, float]:
        job = contracts.make(
            LossScale(1.0), Overlap(OneBucket()), comm=comm, model=contracts.Net(norm=False, dropout=0)
        )
        x, y = job.loader.batches[0]
        bias = job.model.head.bias
        bias.register_hook(lambda _: torch.full_like(bias, share * torch.finfo(torch.float32).max))
        job.loss(job.model(x), y).backward()
        job.optimizer.step()
        changed = any(bucket.pending for bucket in job.kept("overlap").layout.buckets)
        return changed, job.kept("loss_scale").scale

    assert Threads(3).run(lambda comm: run(comm, 0.4)) == [(False, 0.5)] * 3
    assert Threads(3).run(lambda comm: run(comm, 0.3)) == [(True, 1.0)] * 3
    assert Threads(2).run(lambda comm: run(comm, 0.9)) == [(True, 1.0)] * 2


def test_nothing_is_updated_in_backward_where_a_step_may_be_vetoed() -> None:
    found = []
    for techniques in ((SCALE,), (SCALE, SavedMemory(factor=1, lossless=True, show=False))):
        job = overflowing(Solo(), *techniques)
        assert job.vetoes_steps
        assert not job.needs_whole_gradients
        found.append(trained(job))
    check_same([found])
