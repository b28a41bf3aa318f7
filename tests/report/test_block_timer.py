"""On several ranks the ledger knows what each block takes by itself, and the verdict names the one that is slow."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from helpers.shown import FACTS, step
from helpers.virtual_comm import SimComm, VirtualClock
from kasoku.core import Job
from kasoku.distributed.ddp.cost_model import LinkModel
from kasoku.optim import sgd
from kasoku.report import Timed
from kasoku.report.bottleneck import find_bottlenecks


class Ticking(nn.Linear):
    """A layer whose forward and backward take their time on a virtual clock, and that may wait for others."""

    def __init__(self, clock: VirtualClock, forward_s: float, backward_s: float) -> None:
        super().__init__(4, 4)
        self.clock, self.forward_s = clock, forward_s
        self.trace, self.wait_s = None, 0.0
        self.weight.register_hook(lambda _: clock.advance(backward_s))

    def forward(self, x_NF: Tensor) -> Tensor:
        self.clock.advance(self.forward_s)
        if self.trace is not None:
            with self.trace.span("wait"):
                self.clock.advance(self.wait_s)
        self.clock.advance(self.forward_s)
        return super().forward(x_NF)


def job_of(ranks: int) -> tuple[Job, VirtualClock]:
    clock = VirtualClock()
    model = nn.Sequential(Ticking(clock, 0.5, 4.0), nn.ReLU(inplace=True), Ticking(clock, 1.0, 8.0))
    batches = [(torch.ones(2, 4), torch.zeros(2, dtype=torch.long))] * 8
    job = Job(model, lambda m: sgd(m, lr=0.1), loader=batches, comm=SimComm(ranks, LinkModel(1e-3, 1e9), clock))
    job.apply(Timed())
    model[2].trace, model[2].wait_s = job.trace, 100.0
    return job, clock


def run(job: Job, clock: VirtualClock) -> None:
    for x, y in job.loader:
        job.loss(job.model(x), y).backward()
        clock.advance(64.0)  # between backward and the step: nobody's
        job.optimizer.step()
        job.optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:nothing averages")
def test_each_block_has_its_own_forward_and_backward_without_waits():
    job, clock = job_of(ranks=2)
    run(job, clock)
    steps = job.trace.follower
    assert len(steps.blocks) == 2, "one step of four"
    found = steps.block_s()
    assert found["2"] == pytest.approx(2 * 1.0 + 8.0)
    assert found["0"] == pytest.approx(2 * 0.5 + 4.0 + 64.0), "the first block ends with the step"
    assert steps.step_s()["exposed"] == pytest.approx(100.0)


def test_one_rank_alone_is_not_followed_and_evaluation_never():
    job, clock = job_of(ranks=1)
    run(job, clock)
    assert job.trace.follower.block_s() == {}
    job, clock = job_of(ranks=2)
    for _ in range(8):
        with job.evaluation() as model:
            model(torch.ones(2, 4))
    assert job.trace.follower.block_s() == {}


def test_close_takes_the_hooks_off():
    job, _ = job_of(ranks=2)
    job.close()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in job.model.modules())


def test_the_verdict_names_the_block_in_which_a_rank_is_late():
    steps = [step(exposed=25), step(exposed=24), step(backward=36, exposed=0.5)]
    usual = {"stem": 0.004, "stage": 0.013}
    (cause,) = find_bottlenecks(steps, FACTS, blocks=[usual, usual, {"stem": 0.0045, "stage": 0.0365}])
    assert "rank 2 takes 24 ms longer" in cause.line
    assert "of all blocks most in stage (23.5 ms); they wait" in cause.line


def test_where_all_blocks_are_late_alike_none_is_blamed():
    steps = [step(exposed=25), step(backward=36, exposed=0.5)]
    usual = dict.fromkeys("abcd", 0.005)
    (cause,) = find_bottlenecks(steps, FACTS, blocks=[usual, {**dict.fromkeys("abc", 0.011), "d": 0.0112}])
    assert "most in d (6.2 ms), no block has half of it" in cause.line


def test_a_rank_that_is_late_with_its_input_has_no_slow_block():
    steps = [step(exposed=31), step(input=31, exposed=0.1)]
    found = find_bottlenecks(steps, FACTS, blocks=[{"a": 0.01, "b": 0.005}, {"a": 0.0105, "b": 0.005}])
    (cause,) = [one for one in found if one.cause == "straggler"]
    assert "most of it in input" in cause.line
    assert "block" not in cause.line
