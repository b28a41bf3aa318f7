"""LowResolution shrinks what the loop gets, for its epochs, and nothing else."""

import tomllib
from dataclasses import dataclass

import pytest
import tomli_w
import torch
from torch import nn

from contracts import assert_same, through_a_file, train, weights
from contracts import one_thread as one_thread
from kasoku.config.toml import parse, table
from kasoku.core import Constant, InputError, Job, Linear, StepDecay
from kasoku.data import LowResolution, digits, loader
from kasoku.models import cifarnet
from kasoku.optim import sgd

GROWING = LowResolution(Constant(warmup=2, start=0.5), multiple=2)


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


def test_images_grow_by_the_schedule_in_multiples():
    job = job_on_digits(GROWING)
    seen = sizes(job, 3)
    assert seen == sorted(seen)
    assert seen[0] == 4
    assert set(seen) == {4, 6, 8}
    assert seen[:7] == [4] * 7  # below 5/8 of the side until half an epoch
    assert set(seen[2 * len(job.loader) :]) == {8}


def test_a_share_is_of_each_side_and_never_less_than_one_multiple():
    grown = LowResolution(Linear(epochs=10, end=0.0))
    assert grown.size(0, (224, 320)) == (224, 320)
    assert grown.size(5, (224, 320)) == (128, 160)  # 112 and 160
    assert grown.size(9, (224, 320)) == (32, 32)
    assert grown.size(20, (224, 320)) == (32, 32)
    assert grown.size(20, (24, 24)) == (24, 24)


def test_it_neither_enlarges_nor_stays_after_close():
    plain = next(iter(loader(digits(), "train", 100)))[0]
    for settings in ({"side": 8, "until": 9.0}, {"side": 300, "until": 9.0}, {"side": StepDecay(warmup=1, start=2.0)}):
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


@pytest.mark.parametrize("technique", [LowResolution(6, until=1.2), GROWING], ids=["one side", "growing"])
def test_stopped_and_resumed_is_never_stopped(technique: LowResolution):
    whole, first, second = (job_on_digits(technique) for _ in range(3))
    train(whole, 30)
    train(first, 11)
    saved = through_a_file({"model": first.model.state_dict(), "job": first.state_dict()})
    second.model.load_state_dict(saved["model"])
    second.load_state_dict(saved["job"])
    train(second, 19)
    assert_same(weights(whole), weights(second))


def test_a_schedule_of_ones_is_the_identity():
    plain, neutral = job_on_digits(), job_on_digits(LowResolution(Constant()))
    for job in (plain, neutral):
        train(job, 20)
    assert_same(weights(plain), weights(neutral))


@dataclass(frozen=True)
class Document:
    technique: LowResolution


@pytest.mark.parametrize("technique", [LowResolution(96, until=10.0), GROWING], ids=["one side", "growing"])
def test_recipe_round_trip(technique: LowResolution):
    written = tomli_w.dumps(table(Document(technique)))
    assert parse(Document, tomllib.loads(written)) == Document(technique)


def test_impossible_settings_are_refused():
    with pytest.raises(InputError, match="side=0"):
        LowResolution(side=0, until=1.0)
    with pytest.raises(InputError, match="side=96: until when"):
        LowResolution(side=96)
    with pytest.raises(InputError, match=r"until=3\.0: only for a side in pixels"):
        LowResolution(Constant(), until=3.0)
    with pytest.raises(InputError, match="multiple=0: at least 1; pixels"):
        LowResolution(Constant(), multiple=0)
    with pytest.raises(InputError, match=r"technique\.until = .*a number is wanted"):
        parse(Document, tomllib.loads('technique = {side = 96, until = "later"}'))


def test_cifarnet_takes_both_sizes():
    model = cifarnet()
    assert model(torch.rand(2, 3, 24, 24)).shape == model(torch.rand(2, 3, 32, 32)).shape
