"""A large Linear whose weight moves in its own backward: as plain SGD moves it, or left to plain PyTorch."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from contracts import go_on
from helpers.nets import images
from kasoku.core import InputError, Job
from kasoku.memory import SavedMemory
from kasoku.memory.large_linear import LinearInBackward
from kasoku.optim import EMA, sgd

SAVED = SavedMemory(factor=1, show=False)


def large() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(2048, 256), nn.Linear(256, 4)
    )


def a_job(*techniques, model: nn.Module | None = None) -> Job:
    return Job(model or large(), lambda m: sgd(m, 0.05, weight_decay=1e-2)).apply(*techniques)


def loss_of(job: Job, seed: int) -> Tensor:
    x, y = images(seed=seed)
    return job.loss(job.model(x), y)


def step(job: Job, seed: int = 0):
    loss_of(job, seed).backward()
    job.optimizer.step()
    job.optimizer.zero_grad()


def assert_near(a: nn.Module, b: nn.Module):
    for (name, x), y in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6, msg=name)


@pytest.fixture
def moved(monkeypatch) -> list[LinearInBackward]:
    """Who has moved a weight in backward."""
    found, update = [], LinearInBackward.update

    def noted(self, *gradients):
        found.append(self)
        update(self, *gradients)

    monkeypatch.setattr(LinearInBackward, "update", noted)
    return found


# ---- as plain SGD


def test_stopped_and_resumed_is_never_stopped_bit_for_bit(moved):
    whole, first, second = a_job(SAVED), a_job(SAVED), a_job(SAVED)
    for i in range(4):
        step(whole, i)
    for i in range(2):
        step(first, i)
    go_on(first, second)
    for i in (2, 3):
        step(second, i)
    assert len(moved) == 8
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True))


def test_a_scheduler_stepped_every_step_sets_its_rate(moved):
    jobs = a_job(), a_job(SAVED)
    for job in jobs:
        scheduler = torch.optim.lr_scheduler.LambdaLR(job.optimizer, lambda i: 1 / (1 + i))
        for i in range(3):
            step(job, i)
            scheduler.step()
    assert len(moved) == 3
    assert_near(jobs[0].model, jobs[1].model)


def test_averages_see_it_move(moved):
    averages = []
    for beside in ([], [SAVED]):
        job = a_job(EMA(0.5), *beside)
        for i in range(3):
            step(job, i)
        with job.evaluation() as judge:
            averages.append(copy.deepcopy(judge))
    assert len(moved) == 3
    assert_near(*averages)


# ---- when the job is closed


@pytest.mark.parametrize("steps", [0, 2])
def test_plain_steps_follow_when_it_is_closed_after(steps):
    plain, ours = a_job(), a_job(SAVED)
    for i in range(steps):
        step(plain, i)
        step(ours, i)
    loss_of(ours, 9)  # which plans, and no more
    ours.close()
    for i in range(2):
        step(plain, i)
        step(ours, i)
    assert_near(plain.model, ours.model)


def test_a_backward_after_it_was_closed_gives_gradients(moved):
    plain, ours = a_job(), a_job(SAVED)
    losses = [loss_of(job, 0) for job in (plain, ours)]
    ours.close()
    for job, loss in zip((plain, ours), losses, strict=True):
        loss.backward()
        job.optimizer.step()
    assert not moved
    assert_near(plain.model, ours.model)


# ---- left to plain PyTorch


@pytest.mark.parametrize("when", ["before", "planned", "on its way"])
def test_a_hook_on_its_weight_is_called(when, moved):
    models = large(), large()

    def hook(model):
        model[3].weight.register_hook(lambda g: 0.1 * g)

    jobs = []
    for model, techniques in zip(models, ([], [SAVED]), strict=True):
        if when == "before":
            hook(model)
        jobs.append(a_job(*techniques, model=model))
        if when == "planned":
            step(jobs[-1], 1)
            hook(model)
        loss = loss_of(jobs[-1], 0)
        if when == "on its way":
            hook(model)
        loss.backward()
        jobs[-1].optimizer.step()
    assert len(moved) == (when == "planned")
    assert_near(*models)


def test_a_hook_for_its_whole_gradient_sees_it(moved):
    model, seen = large(), []
    model[3].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    step(a_job(SAVED, model=model))
    assert not moved
    assert len(seen) == 1
    assert seen[0].isfinite().all()


def test_a_pruned_layer_is_trained_as_ever():
    jobs = []
    for techniques in ([], [SAVED]):
        model = large()
        prune.l1_unstructured(model[3], "weight", 0.5)
        jobs.append(a_job(*techniques, model=model))
        step(jobs[-1])
    assert_near(jobs[0].model, jobs[1].model)


def test_two_forwards_and_one_backward_take_one_step(moved):
    jobs = a_job(), a_job(SAVED)
    for job in jobs:
        (loss_of(job, 0) + loss_of(job, 1)).backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
        assert not moved
        step(job, 2)
    assert len(moved) == 1
    assert_near(jobs[0].model, jobs[1].model)


def test_a_forward_that_was_dropped_does_not_stand_in_the_way(moved):
    job = a_job(SAVED)
    loss_of(job, 0)
    step(job, 1)
    assert len(moved) == 1


def test_a_second_backward_through_it_is_told_as_such():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Flatten(), nn.Linear(2048, 256))
    loss = a_job(SAVED, model=model).model(images()[0]).square().mean()
    loss.backward(retain_graph=True)
    with pytest.raises(InputError, match="a second backward through a Linear"):
        loss.backward()
