"""A batch that grows: every image once an epoch, progress in epochs, resumed to the same bits."""

from dataclasses import replace

import pytest
import torch

from contracts import assert_same, go_on, train, weights
from contracts import one_thread as one_thread
from kasoku.core import InputError, Job, Linear, StepDecay
from kasoku.data import GrowBatch, digits, loader
from kasoku.models import cifarnet
from kasoku.optim import Rate, sgd

GROWTH = GrowBatch(StepDecay(milestones=(1, 2), gamma=2))  # 100, 200, 400 of 1,437 images: 14, 7, 3 updates


def job_on(parts: int = 1, growth: GrowBatch = GROWTH) -> Job:
    torch.manual_seed(0)
    batches = loader(digits(), "train", 100, seed=2, parts=parts)
    job = Job(cifarnet(in_channels=1, widths=(8, 8)), sgd, loader=batches, accumulate=parts)
    return job.apply(growth, Rate(Linear(epochs=4)))


@pytest.mark.parametrize("parts", [1, 2])
def test_the_batch_follows_the_schedule_and_the_progress_the_epochs(parts: int):
    job = job_on(parts)
    seen = []
    train(
        job, 14 + 7 + 3 + 2, each=lambda: seen.append((job.plain_loader.batch, job.accumulate, round(job.progress, 6)))
    )
    assert [s[0] for s in seen] == [100] * 14 + [200] * 7 + [400] * 5
    assert {s[0] // s[1] for s in seen} == {100 // parts}  # what a device takes at once
    assert [seen[i][2] for i in (13, 20, 23)] == [1.0, 2.0, 3.0]
    assert seen[24][2] == pytest.approx(3 + 1 / 3)
    assert job.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * (1 - job.progress / 4))


def test_a_part_grows_as_far_as_it_may():
    job = job_on(2, replace(GROWTH, at_once=100))  # of 50 images at first
    seen = []
    train(job, 22, each=lambda: seen.append((job.plain_loader.batch, job.plain_loader.parts, job.accumulate)))
    assert seen == [(100, 2, 2)] * 14 + [(200, 2, 2)] * 7 + [(400, 4, 4)]


@pytest.mark.parametrize("stop", [5, 14, 17, 24])
def test_stopped_and_resumed_is_never_stopped(stop: int):
    whole, first, second = job_on(), job_on(), job_on()
    train(whole, 26)
    train(first, stop)
    go_on(first, second)
    train(second, 26 - stop)
    assert_same(weights(whole), weights(second))
    assert whole.progress == second.progress


def test_close_gives_the_loader_back():
    job = job_on()
    train(job, 20)
    job.close()
    assert (job.loader.batch, job.loader.parts, job.accumulate) == (100, 1, 1)


def test_other_loaders_and_too_large_batches_are_refused():
    with pytest.raises(InputError, match=r"give the job a kasoku\.data\.loader\(\.\.\.\), this is a list"):
        Job(cifarnet(in_channels=1, widths=(8, 8)), sgd, loader=[]).apply(GROWTH)
    job = Job(cifarnet(in_channels=1, widths=(8, 8)), sgd, loader=loader(digits(), "train", 1000))
    job.apply(GROWTH)
    with pytest.raises(InputError, match="batch 2000 at epoch 1, but only 1437 images"):
        train(job, 3)
