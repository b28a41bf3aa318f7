"""Easy images left out of epochs: which, how many, on ranks that agree, resumed to the same bits."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from contracts import assert_same, go_on, train, weights
from contracts import one_thread as one_thread
from kasoku.config import recipe as recipes
from kasoku.config.updates import updates
from kasoku.core import Comm, InputError, Job, Linear, Threads
from kasoku.data import Mix, Shares, SkipEasy, digits, loader
from kasoku.distributed import AllReduce, Asynchronous
from kasoku.models import cifarnet
from kasoku.optim import Rate, sgd

SKIP = SkipEasy(0.4, start=1, until=3, easy=1.5)  # 1,437 images: 14 updates of 100, then twice 8 of 862, then 14
SEED = 2


def job_on(skip: SkipEasy = SKIP, comm: Comm | None = None, shares: tuple[int, ...] = (), **settings: Any) -> Job:
    torch.manual_seed(0)
    batches = loader(digits(), "train", 100, seed=SEED, comm=comm, **settings)
    net = cifarnet(in_channels=1, widths=(8, 8), norm_momentum=0.1)
    job = Job(net, sgd, loader=batches, comm=comm, accumulate=batches.parts)
    others = [AllReduce()] if comm else []
    others += [Shares(shares)] if shares else []
    return job.apply(skip, Rate(Linear(epochs=4)), *others)


def losses_of(job: Job) -> torch.Tensor:
    return job.state_dict()["kept"]["skip_easy"]["loss_N"].clone()


@pytest.mark.parametrize("parts", [1, 2])
def test_later_epochs_take_fewer_images_and_still_count_as_one(parts: int):
    job = job_on(parts=parts)
    seen = []
    train(job, 14 + 8 + 8 + 5, each=lambda: seen.append((round(job.progress, 6), len(job.plain_loader))))
    assert [length // parts for _, length in seen] == [14] * 14 + [8] * 16 + [14] * 5
    assert [seen[i][0] for i in (13, 21, 29)] == [1.0, 2.0, 3.0]
    assert job.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * (1 - job.progress / 4))


def test_images_are_left_out_by_chance_among_those_with_the_smallest_losses():
    job = job_on(fill=True)
    train(job, 15)
    assert losses_of(job).isfinite().all()  # each image was trained on
    chosen = []
    for _ in range(2):
        before, rows = losses_of(job), []
        train(job, 9, each=lambda rows=rows: rows.append(job.plain_loader.index_N))
        epoch = torch.cat(rows)
        left_out = torch.ones(1437, dtype=torch.bool)
        left_out[epoch] = False
        assert left_out.sum() == 1437 - 862
        assert left_out.sum() <= (before <= before[left_out].max()).sum() <= round(1.5 * 575)
        chosen.append(left_out)
    assert not torch.equal(*chosen)


def test_the_easiest_are_left_out_where_there_is_no_chance():
    job = job_on(SkipEasy(0.4, start=1, until=3, easy=1))
    train(job, 14)
    before = losses_of(job)
    train(job, 1)
    left_out = job.plain_loader.pipeline.left_out
    assert before[left_out].max() <= before[~left_out].min()


def test_the_losses_are_those_of_the_network():
    job = job_on(SKIP)
    x, y = next(iter(job.loader))
    with torch.no_grad():
        expected = nn.functional.cross_entropy(job.model(x), y, reduction="none")
    rows = job.plain_loader.index_N
    job.backward(job.loss(job.model(x), y))
    job.optimizer.step()
    known = losses_of(job)
    torch.testing.assert_close(known[rows], expected)
    assert known.isinf().sum() == 1437 - 100


@pytest.mark.parametrize("stop", [5, 14, 17, 22])
def test_stopped_and_resumed_is_never_stopped(stop: int):
    whole, first, second = job_on(), job_on(), job_on()
    train(whole, 30)
    train(first, stop)
    go_on(first, second)
    train(second, 30 - stop)
    assert_same(weights(whole), weights(second))
    assert whole.progress == second.progress


@pytest.mark.parametrize("shares", [(), (70, 30)])
def test_ranks_leave_out_the_same_images(shares: tuple[int, ...]):
    def on_rank(comm: Comm):
        job, rows = job_on(comm=comm, shares=shares), []
        train(job, 14)
        train(job, 8, each=lambda: rows.append(job.plain_loader.index_N))
        return torch.cat(rows), job.plain_loader.pipeline.left_out, losses_of(job)

    (rows, left_out, losses), (other_rows, *others) = Threads(2).run(on_rank)
    assert_same([left_out, losses], others)
    taken = torch.cat([rows, other_rows])
    assert len(taken.unique()) == len(taken) == 800
    assert not left_out[taken].any()


def test_close_gives_the_loader_back():
    job = job_on()
    train(job, 16)
    job.close()
    assert job.plain_loader.pipeline.left_out is None
    assert len(job.loader) == 14


def test_a_training_counts_the_updates_of_what_it_takes():
    skip = "techniques=[{use='kasoku.data.SkipEasy', share=0.4, start=0.25}]"
    recipe = recipes.load("recipes/digits_cnn_98.toml", [skip, "epochs=5", "batch=100", "last_batch='drop'"])
    assert updates(recipe, 1437) == 14 + 14 + 8 + 8 + 14


def test_what_does_not_fit_is_refused():
    for other in (Mix(), Asynchronous()):
        with pytest.raises(InputError, match="leave one of them out"):
            job_on().apply(other)
    with pytest.raises(InputError, match=r"give the job a kasoku\.data\.loader"):
        Job(cifarnet(in_channels=1, widths=(8, 8)), sgd, loader=[]).apply(SKIP)
    with pytest.raises(InputError, match="batch=100: more than the 72 images of epoch 1"):
        train(job_on(SkipEasy(0.95, start=1, until=3)), 15)
    in_order = Job(cifarnet(in_channels=1), sgd, loader=loader(digits(), "train", 100, shuffled=False))
    with pytest.raises(InputError, match="a loader in order"):
        in_order.apply(SKIP)
    with pytest.raises(InputError, match="of a training on 3 images, here are 1437"):
        job_on().kept("skip_easy").load_state_dict({"loss_N": torch.zeros(3), "left_out": None})
    with pytest.raises(InputError, match="without epochs"):
        train(job_on(SkipEasy(0.4, start=0.5, until=3)), 1)


def test_a_loss_that_is_only_looked_at_is_not_noted():
    job = job_on()
    for x, y in itertools.islice(job.loader, 1):
        with torch.no_grad():
            job.loss(job.model(x), y)
    assert not job.kept("skip_easy").noted


def test_a_loop_must_take_the_loss_of_the_images_as_they_come():
    job = job_on()
    for x, y in itertools.islice(job.loader, 1):
        nn.functional.cross_entropy(job.model(x), y).backward()
        with pytest.raises(InputError, match=r"train on job\.loss"):
            job.optimizer.step()
