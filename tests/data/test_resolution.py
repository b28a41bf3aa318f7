"""LowResolution shrinks what the loop gets, until its epoch, and nothing else."""

import pytest
import torch
from torch import nn

from kasoku.core import InputError, Job
from kasoku.data import LowResolution, digits, loader
from kasoku.models import cifarnet
from kasoku.optim import sgd


def sizes(job: Job, epochs: int) -> list[int]:
    seen = []
    for _ in range(epochs):
        for x, y in job.loader:
            seen.append(x.shape[2])
            job.loss(job.model(x), y).backward()
            job.optimizer.step()
            job.optimizer.zero_grad()
    return seen


def job_on_digits() -> Job:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(4, 10))
    return Job(model, sgd, loader=loader(digits(), "train", 100))


def test_images_are_small_until_the_epoch_and_whole_after_it():
    job = job_on_digits().apply(LowResolution(side=6, until=1.5))
    per_epoch = len(job.loader)
    seen = sizes(job, 2)
    assert seen == [6] * -(-3 * per_epoch // 2) + [8] * (per_epoch // 2)


def test_it_neither_enlarges_nor_stays_after_close():
    plain = next(iter(loader(digits(), "train", 100)))[0]
    job = job_on_digits().apply(LowResolution(side=8, until=9.0))
    assert next(iter(job.loader))[0].equal(plain)
    job.close()
    assert sizes(job, 1) == [8] * 13  # one batch was taken above


def test_shrinking_is_antialiased():
    stripes = torch.zeros(2, 1, 8, 8)
    stripes[..., ::2] = 1
    job = Job(nn.Flatten(), sgd, loader=[(stripes, torch.zeros(2).long())]).apply(LowResolution(side=4, until=1.0))
    x, _ = next(iter(job.loader))
    assert 0.25 < x.min() <= x.max() < 0.75


def test_impossible_settings_are_refused():
    with pytest.raises(InputError, match="side=0"):
        LowResolution(side=0, until=1.0)


def test_cifarnet_takes_both_sizes():
    model = cifarnet()
    assert model(torch.rand(2, 3, 24, 24)).shape == model(torch.rand(2, 3, 32, 32)).shape
