"""Ranks that tuning has found to differ take shares by their speed, in a training and when it goes on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from contracts import Net
from contracts import one_thread as one_thread
from helpers.toy_images import image_job
from kasoku.config.ranks import shares_of
from kasoku.config.recipe import Recipe, from_document
from kasoku.core import Comm, Solo, Threads
from kasoku.data import Shares
from kasoku.training.auto_batch import shares_row
from kasoku.training.run_folder import shares_in
from kasoku.training.trainer import build
from kasoku.tune import Throughput, tune_batch_size


def recipe(**more: Any) -> Recipe:
    document = {
        "epochs": 1,
        "batch": 64,
        "model": {"use": "kasoku.models.cifarnet", "widths": [8, 16]},
        "data": {"use": "kasoku.data.digits"},
        "optimizer": {"use": "kasoku.optim.sgd", "lr": 0.05},
        "device": {"precision": "fp32", "threads": 1},
    }
    return from_document({**document, **more})


class Napping(Net):
    """A step takes so long for each image."""

    def __init__(self, image_s: float) -> None:
        super().__init__(norm=False, dropout=0)
        self.image_s = image_s

    def forward(self, x_NCHW: Tensor) -> Tensor:
        time.sleep(self.image_s * len(x_NCHW))
        return super().forward(x_NCHW)


@pytest.mark.timing
@pytest.mark.smoke
def test_tuning_tells_the_speed_of_each_rank():
    def rank(comm: Comm) -> Any:
        model = Napping(0.003 if comm.rank else 0.001)
        return tune_batch_size(image_job(model=model, comm=comm), Throughput(), least=16, most=32)

    found, other = Threads(2).run(rank)
    assert found.speeds == other.speeds
    assert 2 < found.speeds[0] / found.speeds[1] < 3.5
    assert found.as_json()["speeds"] == found.speeds


@pytest.mark.parametrize(
    ("kept", "shares"),
    [
        ("[24, 8]", (24, 8)),
        ("[16, 8]", ()),
        ("[32]", ()),
        ("[24.5, 7.5]", ()),
        ("[-8, 40]", ()),
        ('"24"', ()),
        ("", ()),
    ],
)
def test_a_run_goes_on_with_the_shares_it_began_with(kept: str, shares: tuple[int, ...], tmp_path: Path):
    (tmp_path / "shares.json").write_text(kept)
    assert Threads(2).run(lambda comm: shares_in(tmp_path, comm, 32)) == [shares] * 2
    assert shares_in(tmp_path / "none", Solo(), 32) == ()


def test_alone_there_is_no_speed_to_tell():
    found = tune_batch_size(image_job(), Throughput(), least=16, most=16)
    assert found.speeds == ()


@pytest.mark.parametrize(
    ("more", "speeds", "shares"),
    [
        ({}, (100.0, 50.0), (43, 21)),
        ({}, (100.0, 95.0), ()),
        ({}, (100.0,), ()),
        ({}, (), ()),
        ({"accumulate": 2}, (100.0, 50.0), (42, 22)),
        ({"norm_batch": 8}, (100.0, 50.0), ()),
        ({"norm_batch": 8, "accumulate": 1}, (100.0, 50.0), (40, 24)),
        ({"norm_batch": 8, "accumulate": 2}, (100.0, 50.0), (48, 16)),
        ({"norm_batch": 64, "accumulate": 1}, (100.0, 50.0), ()),
        ({"device": {"graphs": True}}, (100.0, 50.0), (43, 21)),
    ],
)
def test_shares_follow_speeds_as_far_as_the_recipe_permits(more: dict, speeds: tuple, shares: tuple):
    assert shares_of(recipe(**more), speeds) == shares


def test_of_unequal_speeds_the_shares_or_the_reason_for_equal_ones_are_told():
    def told(speeds: tuple[float, ...], **more: Any) -> str:
        return shares_row(recipe(**more), speeds)

    assert told((100.0, 50.0)) == '43, 21 images, by the speed of each rank, where batch = "auto"'
    assert told((100.0, 99.0)) == told(()) == ""
    equal = "equal, though the ranks' speeds differ: a share is a multiple of 32 images (norm_batch, parts)"
    assert told((100.0, 50.0), norm_batch=8) == f"{equal}; a smaller accumulate makes them finer"


def test_a_training_of_unequal_shares_is_that_of_one_rank():
    def trained(comm: Comm, shares: tuple[int, ...]) -> dict[str, Tensor]:
        slow = {"use": "kasoku.optim.sgd", "lr": 0.001}  # else what rounding differs by grows with the weights
        job = build(recipe(norm_batch=8, accumulate=1, optimizer=slow), comm, shares=Shares(shares)).job
        for _, (x_NCHW, y_N) in zip(range(5), job.loader, strict=False):
            job.loss(job.model(x_NCHW), y_N).backward()
            job.optimizer.step()
            job.optimizer.zero_grad()
        job.drain()
        return {name: x.clone() for name, x in job.model.state_dict().items()}

    alone = trained(Solo(), ())
    for rank in Threads(2).run(lambda comm: trained(comm, (40, 24))):
        for name, x in alone.items():
            assert torch.allclose(x.float(), rank[name].float(), atol=1e-4), name


def test_ranks_of_unequal_shares_end_with_the_same_statistics():
    def statistics(comm: Comm) -> Tensor:
        job = build(recipe(), comm, shares=Shares((40, 24))).job
        for _, (x_NCHW, y_N) in zip(range(3), job.loader, strict=False):
            job.loss(job.model(x_NCHW), y_N).backward()
            job.optimizer.step()
            job.optimizer.zero_grad()
        job.drain()
        return torch.cat([x.float().flatten() for x in job.model.state_dict().values()])

    one, other = Threads(2).run(statistics)
    assert torch.equal(one, other)
