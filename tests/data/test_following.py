"""Shares that follow the ranks: by injected times, on two ranks in threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from contracts import assert_same, rule, through_a_file, weights
from contracts import one_thread as one_thread
from helpers.virtual_comm import VirtualClock
from kasoku.core import Comm, InputError, Job, Threads
from kasoku.data import Shares, digits, loader
from kasoku.distributed import AllReduce, Asynchronous

BATCH = 32  # of 1,437 images: 44 steps an epoch
Speed = Callable[[int, int], float]  # (rank, step) -> milliseconds of an image


class Ended(NamedTuple):
    """What came of one rank."""

    weights: dict[str, Tensor]
    images: list[int]  # of this rank in each step
    seen: list[list[int]]  # the numbers of the images of each step
    changes: list[dict[str, Any]]


def made(comm: Comm, follow: bool = True) -> Job:
    torch.manual_seed(0)
    batches = loader(digits(), "train", BATCH, comm=comm)
    job = Job(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), rule, loader=batches, comm=comm)
    return job.apply(Shares(follow=follow), AllReduce())


def trained(
    comm: Comm, speed: Speed, steps: int, stop: int = -1, evaluation_s: tuple[float, float] = (0.0, 0.0)
) -> Ended:
    """Trains with injected times: the step ends for all when the slowest rank has computed. Resumed after `stop`.

    `evaluation_s`: by rank, of an evaluation after each step, in which the faster one waits.
    """
    comm.clock = clock = VirtualClock()
    job, ended = made(comm), Ended({}, [], [], [])
    while job.steps < steps:
        resumes = False
        for x_NCHW, y_N in job.loader:
            step = job.steps
            own_s = speed(comm.rank, step) * len(y_N) / 1000
            clock.seconds += own_s
            job.loss(job.model(x_NCHW), y_N).backward()
            with job.trace.span("wait"):
                clock.seconds += max(comm.gather_objects(own_s)) - own_s
            ended.images.append(len(y_N))
            ended.seen.append(job.plain_loader.index_N.tolist())
            job.optimizer.step()
            job.optimizer.zero_grad()
            with job.trace.span("evaluate"):
                clock.seconds += evaluation_s[comm.rank]
                with job.trace.span("wait"):
                    clock.seconds += max(evaluation_s) - evaluation_s[comm.rank]
            resumes = step == stop
            if resumes or job.steps == steps:
                break
        if resumes:
            saved = through_a_file({"model": job.model.state_dict(), "job": job.state_dict()})
            job.close()
            job = made(comm)
            job.model.load_state_dict(saved["model"])
            job.load_state_dict(saved["job"])
    following: Any = job.kept("shares")
    return ended._replace(weights=weights(job), changes=following.changes)


def run(speed: Speed, steps: int, stop: int = -1) -> list[Ended]:
    return Threads(2).run(lambda comm: trained(comm, speed, steps, stop))


def slower_for_a_while(rank: int, step: int) -> float:
    """Rank 1 takes three times as long from step 60 to step 150."""
    return 3.0 if rank and 60 <= step < 150 else 1.0


def test_shares_follow_a_rank_that_slows_down_and_recovers() -> None:
    one, other = run(slower_for_a_while, 300)
    assert one.images[:80] == [16] * 80
    assert (one.images[130], other.images[130]) == (24, 8)
    assert one.images[-1] == other.images[-1] == 16
    assert [change["kept"] for change in one.changes] == [True, True]
    assert one.changes == other.changes
    assert all(a + b == BATCH for a, b in zip(one.images, other.images, strict=True))


def test_each_image_is_used_once_an_epoch() -> None:
    one, other = run(slower_for_a_while, 132)  # three epochs; shares change in the second or third
    assert len({*one.images}) > 1
    for epoch in range(3):
        steps = slice(44 * epoch, 44 * (epoch + 1))
        used = [i for each in (*one.seen[steps], *other.seen[steps]) for i in each]
        assert len({*used}) == len(used) == 44 * BATCH


def test_equal_ranks_keep_equal_shares_whatever_the_time() -> None:
    one, _ = run(lambda rank, step: 1.0 if step < 60 else 2.0, 160)
    assert {*one.images} == {16}
    assert not one.changes


@pytest.mark.parametrize("evaluation_s", [(0.5, 0.1), (0.1, 0.5)])
def test_evaluation_between_steps_is_no_computing(evaluation_s: tuple[float, float]) -> None:
    plain = run(slower_for_a_while, 130)
    with_it = Threads(2).run(lambda comm: trained(comm, slower_for_a_while, 130, evaluation_s=evaluation_s))
    assert [rank.images for rank in with_it] == [rank.images for rank in plain]
    equal = Threads(2).run(lambda comm: trained(comm, lambda rank, step: 1.0, 130, evaluation_s=evaluation_s))
    assert not equal[0].changes


def test_shares_that_bring_nothing_are_taken_back() -> None:
    def stubborn(rank: int, step: int) -> float:
        return 1.0 if step < 60 else (3.0 if rank else 1.0) if step < 95 else 6.0

    one, _ = run(stubborn, 130)
    assert [change["kept"] for change in one.changes] == [False]
    assert one.images[100] == 24
    assert one.images[-1] == 16


@pytest.mark.parametrize("stop", [10, 70, 91, 104, 119])
def test_resumed_it_trains_to_the_same_bits(stop: int) -> None:
    whole, again = run(slower_for_a_while, 140), run(slower_for_a_while, 140, stop)
    for rank, other in zip(whole, again, strict=True):
        assert rank.images == other.images
        assert_same(rank.weights, other.weights)
        assert [c["kept"] for c in rank.changes] == [c["kept"] for c in other.changes]


def test_where_it_cannot_follow_it_says_so() -> None:
    def apply(comm: Comm) -> None:
        batches = loader(digits(), "train", BATCH, comm=comm, parts=2)
        shares = Shares((16, 16), 8, follow=True)
        for technique, more in ((shares, AllReduce()), (Shares(follow=True), Asynchronous())):
            job = Job(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), rule, loader=batches, comm=comm)
            with pytest.raises(InputError, match="not with at_once, Asynchronous"):
                job.apply(technique, more)

    Threads(2).run(apply)
