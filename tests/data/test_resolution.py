"""LowResolution shrinks what the loop gets, for its epochs, and nothing else."""

import tomllib
from dataclasses import dataclass

import pytest
import tomli_w
import torch
from torch import nn

from contracts import assert_same, go_on, train, weights
from contracts import one_thread as one_thread
from kasoku.config.toml import parse, table
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


def job_on_digits(*techniques) -> Job:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(4, 10))
    return Job(model, sgd, loader=loader(digits(), "train", 100)).apply(*techniques)


def test_images_are_small_until_the_epoch_and_whole_after_it():
    job = job_on_digits(LowResolution(side=6, until=1.5))
    per_epoch = len(job.loader)
    seen = sizes(job, 2)
    assert seen == [6] * -(-3 * per_epoch // 2) + [8] * (per_epoch // 2)


def test_it_neither_enlarges_nor_stays_after_close():
    plain = next(iter(loader(digits(), "train", 100)))[0]
    for settings in ({"side": 8, "until": 9.0}, {"side": 300, "until": 9.0}):
        job = job_on_digits(LowResolution(**settings))
        assert next(iter(job.loader))[0].equal(plain)
        job.close()
        assert sizes(job, 1) == [8] * 13  # one batch was taken above
    assert LowResolution(28, until=1.0).size(0, (32, 24)) == (28, 24)
    half = LowResolution(28, until=0.5)
    assert [half.over(4).size(epoch, (32, 32))[0] for epoch in (1.9, 2)] == [28, 32]
    with pytest.raises(InputError, match="LowResolution without epochs"):
        half.size(0, (32, 32))


def test_shrinking_is_antialiased():
    stripes = torch.zeros(2, 1, 8, 8)
    stripes[..., ::4] = 1  # between them two samples would see nothing
    job = Job(nn.Flatten(), sgd, loader=[(stripes, torch.zeros(2).long())]).apply(LowResolution(side=2, until=1.0))
    x, _ = next(iter(job.loader))
    assert 0.15 < x.min() <= x.max() < 0.35


def test_stopped_and_resumed_is_never_stopped():
    whole, first, second = (job_on_digits(LowResolution(6, until=1.2)) for _ in range(3))
    train(whole, 30)
    train(first, 11)
    go_on(first, second)
    train(second, 19)
    assert_same(weights(whole), weights(second))


def test_until_the_start_is_the_identity():
    plain, neutral = job_on_digits(), job_on_digits(LowResolution(6, until=0))
    for job in (plain, neutral):
        train(job, 20)
    assert_same(weights(plain), weights(neutral))


@dataclass(frozen=True)
class Document:
    technique: LowResolution


def test_recipe_round_trip():
    technique = LowResolution(96, until=10.0)
    written = tomli_w.dumps(table(Document(technique)))
    assert parse(Document, tomllib.loads(written)) == Document(technique)


def test_impossible_settings_are_refused():
    with pytest.raises(InputError, match="side=0"):
        LowResolution(side=0, until=1.0)
    with pytest.raises(InputError, match=r"until=-1\.0: at least 0; a share of the training, or an epoch"):
        LowResolution(side=96, until=-1.0)
    with pytest.raises(InputError, match=r"technique\.until: missing"):
        parse(Document, tomllib.loads("technique = {side = 96}"))
    with pytest.raises(InputError, match=r"technique\.until = .*a number is wanted"):
        parse(Document, tomllib.loads('technique = {side = 96, until = "later"}'))


def test_cifarnet_takes_both_sizes():
    model = cifarnet()
    assert model(torch.rand(2, 3, 24, 24)).shape == model(torch.rand(2, 3, 32, 32)).shape
