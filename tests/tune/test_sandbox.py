"""Copies of a job: what they leave out, what they put back, their parts, and time that is short."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from contracts import Net, assert_same, rule, train, weights
from helpers.planted import Hand, Slow
from helpers.toy_images import image_job
from kasoku.core import Comm, InputError, Job, Solo, Stage, StepDecay, Technique, Threads
from kasoku.core.clock import Stopwatch, Wall
from kasoku.data import Dataset, GrowBatch, LowResolution, digits, folder, loader
from kasoku.device import Compile
from kasoku.distributed import AllReduce, VirtualRanks
from kasoku.optim import EMA, sgd
from kasoku.tune import BatchSizeResult, EpochTimeMinimize, Throughput, TimeToTarget, batch_size, tune_batch_size
from kasoku.tune.measurement import Needs
from kasoku.tune.trial import Sandbox, Trial

pytestmark = pytest.mark.usefixtures("ticking")


def tuned(job: Job, **more: Any) -> BatchSizeResult:
    return tune_batch_size(job, **{"strategy": Throughput(), "most": 32, **more})


# ---- what changes as training goes on


def any_side(technique: Technique, shapes: list[tuple[int, ...]]) -> Job:
    """A network that takes any image, on the digits of 8 x 8 pixels; it tells what it is shown in training."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(4, 10)
    )
    model.register_forward_pre_hook(lambda m, given: shapes.append(tuple(given[0].shape)) if m.training else None)
    return Job(model, sgd, loader=loader(digits(), "train", 100)).apply(technique)


@pytest.mark.parametrize(
    ("technique", "before"),
    [
        (LowResolution(side=6, until=1.5), 3),
        (GrowBatch(StepDecay(milestones=(1,), gamma=2)), 3),
        (GrowBatch(StepDecay(milestones=(1,), gamma=2)), 15),  # it has grown
    ],
)
def test_growing_batches_and_images_are_left_out_and_go_on_as_before(technique, before):
    jobs = []
    for tries in (False, True):
        shapes: list[tuple[int, ...]] = []
        job = any_side(technique, shapes)
        train(job, before)
        if tries:
            shapes.clear()
            found = tuned(job, most=400)
            assert {shape[2:] for shape in shapes} == {(8, 8)}, "whole images"
            assert {s.batch for s in found.samples} <= {shape[0] * job.accumulate for shape in shapes}
        train(job, 20)
        jobs.append(job)
    assert_same(weights(jobs[0]), weights(jobs[1]))


def test_each_size_reads_images_that_the_one_before_did_not():
    job = Job(Net(), rule, loader=loader(digits(), "train", 64))
    sandbox, seen = Sandbox(job), []
    for _ in range(2):
        alone = sandbox.at(64)
        next(iter(alone.loader))
        seen.append(set(alone.plain_loader.index_N.tolist()))
        alone.close()
    assert seen[0] != seen[1]
    assert not len(job.plain_loader.index_N), "the job's own loader was not read"


@dataclass(frozen=True)
class Doubled(Technique):
    """A technique as users write them, for the model."""

    stage: ClassVar[Stage] = Stage.MODEL

    def apply(self, job: Job) -> None:
        own = job.model.forward
        job.patch(job.model, "forward", lambda x_NCHW: 2 * own(x_NCHW))


def test_a_users_own_technique_for_the_model_acts_in_the_copy():
    plain, job = image_job(model=Net(dropout=0)), image_job(Doubled(), model=Net(dropout=0))
    alone = Sandbox(job).at(8)
    x_NCHW = torch.randn(4, 3, 8, 8)
    for model in (plain.model, alone.model):
        model.eval()
    assert torch.equal(alone.model(x_NCHW), 2 * plain.model(x_NCHW))


# ---- loaders


@pytest.fixture
def photos(tmp_path: Path) -> Dataset:
    """48 photos, one of which is none."""
    rng, root = np.random.default_rng(0), tmp_path / "photos"
    for k in range(2):
        for split, count in (("train", 24), ("val", 1)):
            (root / split / f"class{k}").mkdir(parents=True)
            for i in range(count):
                pixels = Image.fromarray(rng.integers(0, 255, (40, 40, 3), np.uint8))
                pixels.save(root / split / f"class{k}" / f"{i}.jpg")
    (root / "train" / "class0" / "0.jpg").write_bytes(b"no photo")
    return folder(str(root), size=32)


def photo_job(dataset: Dataset) -> Job:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))
    return Job(model, rule, loader=loader(dataset, "train", 16))


def decoders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kasoku-decode"]


def test_a_loader_of_files_keeps_no_trace_and_its_threads_end(photos: Dataset):
    job, before = photo_job(photos), len(decoders())
    plain = job.plain_loader
    assert tuned(job).batch <= 32
    assert (plain.skipped.reasons, plain.skipped.met, plain.executor.autotuner) == ({}, set(), None)
    assert len(decoders()) == before
    assert len(list(job.loader)) == 3
    assert len(plain.skipped.reasons) == 1, "it is met again when the job meets it"


# ---- a copy that diverged


def test_a_copy_that_diverged_starts_again_in_the_same_memory():
    job = image_job(EMA(decay=0.8))
    train(job, 2)
    sandbox = Sandbox(job)
    where = [p.data_ptr() for p in sandbox.model.parameters()]
    alone = sandbox.at(8)
    x_NCHW, y_N = next(iter(alone.loader))
    (alone.loss(alone.model(x_NCHW), y_N) * torch.nan).backward()
    alone.optimizer.step()
    alone.close()
    assert not any(p.isfinite().all() for p in sandbox.model.parameters())
    sandbox.renew()
    assert_same(dict(sandbox.model.state_dict()), weights(job))
    assert [p.data_ptr() for p in sandbox.model.parameters()] == where
    params = [p for group in sandbox.optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in params} == {id(p) for p in sandbox.model.parameters()}
    for p, twin in zip(job.model.parameters(), sandbox.model.parameters(), strict=True):
        momentum = sandbox.optimizer.state[twin]["momentum_buffer"]
        assert torch.equal(momentum, job.optimizer.state[p]["momentum_buffer"])
        assert momentum.data_ptr() != job.optimizer.state[p]["momentum_buffer"].data_ptr()


def test_a_size_that_diverged_where_memory_is_short_is_one_that_failed(monkeypatch: pytest.MonkeyPatch):
    def short(self: Sandbox) -> None:
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(Sandbox, "renew", short)
    job = image_job(loss=lambda out, y: out.sum() * (torch.inf if len(y) > 8 else 1))
    found = tuned(job)
    assert found.batch == 8
    assert all(s.failed == "out of memory" for s in found.samples if s.batch > 8)
    assert len(found.samples) > 1


# ---- parts


class Bounded(Net):
    """Has memory for so many images; `shown` has how many it was given."""

    shown: ClassVar[list[int]] = []

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def forward(self, x_NCHW: Tensor) -> Tensor:
        self.shown.append(len(x_NCHW))
        if len(x_NCHW) > self.most:
            raise torch.OutOfMemoryError("planted")
        return super().forward(x_NCHW)


def test_a_copy_takes_a_batch_in_the_parts_of_its_job():
    Bounded.shown.clear()
    found = tuned(image_job(VirtualRanks(norm_batch=8), model=Bounded(16), accumulate=2), least=32, most=32)
    assert found.batch == 32
    assert set(Bounded.shown) == {16}
    with pytest.raises(InputError, match="batch=64: out of memory"):
        tuned(image_job(VirtualRanks(norm_batch=8), model=Bounded(16)), least=64, most=64)


# ---- time


@pytest.mark.parametrize("strategy", [Throughput(), TimeToTarget(), EpochTimeMinimize()])
@pytest.mark.parametrize(
    "budget_s", [100.0, 400.0, *(pytest.param(s, marks=pytest.mark.exhaustive) for s in (30.0, 200.0, 2000.0))]
)
@pytest.mark.parametrize("base_s", [0.0, 10.0])
def test_a_budget_is_kept_but_for_the_first_size(strategy, budget_s, base_s):
    clock = Hand()
    job = image_job(model=Slow(clock, lambda images: base_s + images), comm=Solo(clock))
    found = tuned(job, strategy=strategy, most=64, budget_s=budget_s)
    assert clock.now_s <= budget_s or len(found.samples) == 1
    assert not any("time" in s.failed for s in found.samples)
    if budget_s < 200:
        assert not found.in_time
        assert "time was over" in found.why


# ---- branches


def test_each_branch_begins_at_the_end_of_the_trunk_whatever_was_tried_before():
    job = image_job(EMA(decay=0.8), model=Net(dropout=0))
    train(job, 2)
    trial = Trial(job, Needs(brief=True))
    *_, start = trial.branch(8, 1.0, 64)
    trunk = weights(trial.sandbox)
    assert any(not torch.equal(x, trunk[name]) for name, x in weights(job).items())
    one, still = trial.branch(8, 1.0, 64), trial.branch(16, 0.0, 64)
    assert still == pytest.approx([start] * 4, abs=1e-6)
    assert not trial.branch(16, 1e30, 64)[-1] < 1e6
    trial.run(16, 5, allowed_s=10.0)
    assert trial.branch(8, 1.0, 64) == one
    assert start != one[-1]


def test_the_rate_rises_in_the_trunk_and_stays_in_a_branch():
    seen: list[float] = []

    def loss(outputs: Tensor, y_N: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            seen.append(trial.sandbox.optimizer.param_groups[0]["lr"] / trial.sandbox.rates[0])
        return nn.functional.cross_entropy(outputs, y_N)

    trial = Trial(image_job(loss=loss), Needs(brief=True))
    trial.branch(8, 0.5, 64)
    assert seen == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.5, 0.5, 0.5, 0.5])
    seen.clear()
    trial.branch(16, 2.0, 64)
    assert seen == pytest.approx([2.0] * 4)


def test_the_last_loss_of_a_trunk_is_that_of_its_end():
    trial = Trial(image_job(model=Net(dropout=0)), Needs(brief=True))
    *_, start = trial.branch(8, 1.0, 8 * 7)  # no four quarters
    assert trial.branch(16, 0.0, 64) == pytest.approx([start] * 4, abs=1e-6)


def test_a_rank_trains_a_branch_of_whole_steps_on_its_own():
    def rank(comm: Comm) -> tuple[list[float], int]:
        images: list[int] = []
        job = image_job(AllReduce(), comm=comm, loss=lambda out, y: images.append(len(y)) or out.square().mean())
        losses = Trial(job, Needs(brief=True)).branch(16, 1.0, 64)
        return losses, sum(images)

    (one, images), (other, _) = Threads(2).run(rank)
    assert images == 64 + 4 * 16, "and those that are held"
    assert one != other


# ---- devices


def test_marks_wait_for_an_apple_gpu_and_its_random_state_is_put_back(monkeypatch: pytest.MonkeyPatch):
    waited: list[str] = []
    states = [torch.tensor([1])]
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waited.append("here"))
    watch = Stopwatch(Wall(), torch.device("mps"))
    watch.moment()
    watch.synchronize()
    assert waited == ["here", "here"]
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: states[-1])
    monkeypatch.setattr(torch.mps, "set_rng_state", states.append)
    result = BatchSizeResult(8, (), "", 0.0)
    monkeypatch.setattr(batch_size, "_search", lambda *_: (states.append(torch.tensor([2])), result)[1])
    tuned(image_job())
    assert [int(state) for state in states] == [1, 2, 1]


def test_a_block_is_compiled_for_every_size(monkeypatch: pytest.MonkeyPatch):
    seen: list[int] = []

    def loss(outputs: Tensor, y_N: Tensor) -> Tensor:
        seen.append(torch._dynamo.config.recompile_limit)
        return nn.functional.cross_entropy(outputs, y_N)

    job = image_job(Compile(backend="eager"), loss=loss)
    before = torch._dynamo.config.recompile_limit
    tuned(job)
    assert min(seen) > 1000, "a size beyond the limit would run uncompiled"
    assert torch._dynamo.config.recompile_limit == before
