"""The rate range test finds where a planted problem diverges, and leaves no trace."""

import copy
import itertools
import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kasoku import data, device, models, optim
from kasoku import distributed as parallel
from kasoku.core import InputError, Job, Linear, Threads
from kasoku.tune.lr_range_test import range_test, try_alone

CURVATURE = 10.0  # gradient descent diverges above a rate of 2 / CURVATURE


class Point(nn.Module):
    """A point that is drawn to the images, which lie around 0."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((8,), 3.0))

    def forward(self, x_ND: Tensor) -> Tensor:
        return self.w - x_ND


def bowl(outputs_ND: Tensor, y_N: Tensor) -> Tensor:
    return 0.5 * CURVATURE * outputs_ND.square().mean(0).sum()


def noisy(seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(0.5 * torch.randn(16, 8, generator=generator), torch.zeros(16)) for _ in range(7)]


def planted(rate: float = 1.0, **more: object) -> Job:
    model = Point()
    given: dict[str, object] = {"loader": noisy(), "loss": bowl, **more}
    return Job(model, torch.optim.SGD(model.parameters(), lr=rate), **given)


def test_it_finds_where_a_planted_problem_diverges_and_suggests_less():
    found = range_test(planted(), low=1e-4, high=100.0)
    limit = 2 / CURVATURE
    assert limit < found.diverged < 10 * limit
    assert 1e-3 < found.steepest < limit
    assert found.suggested == min(found.steepest, found.diverged / 10) < limit
    assert found.in_time
    factors = [sample.factor for sample in found.samples]
    ratios = [b / a for a, b in itertools.pairwise(factors)]
    assert ratios == pytest.approx([ratios[0]] * len(ratios))
    assert factors[-1] == found.diverged  # the steps after it are not made


def test_factors_multiply_the_rates_whatever_they_are():
    at_one = range_test(planted(1.0), low=1e-4, high=100.0)
    at_tenth = range_test(planted(0.1), low=1e-3, high=1000.0)
    given = range_test(planted(0.5), low=1e-3, high=1000.0, rates=[0.1])  # as a schedule multiplies them
    assert at_tenth.diverged == pytest.approx(10 * at_one.diverged)
    assert at_tenth.suggested == pytest.approx(10 * at_one.suggested)
    assert given.diverged == pytest.approx(at_tenth.diverged)


def test_a_loss_that_does_not_diverge_or_fall_gets_no_such_rate():
    below = range_test(planted(), low=1e-4, high=1e-2)
    assert below.diverged is None
    assert below.suggested == below.steepest
    job = planted(loss=lambda outputs_ND, y_N: 0 * outputs_ND.sum() + 1)
    flat = range_test(job)
    assert (flat.diverged, flat.steepest, flat.suggested) == (None, None, None)


def test_a_loss_that_is_not_finite_ends_it():
    def sudden(outputs_ND: Tensor, y_N: Tensor) -> Tensor:
        return bowl(outputs_ND, y_N) + (torch.inf if outputs_ND.mean() < 2 else 0)

    found = range_test(planted(loss=sudden), low=1e-4, high=100.0)
    assert found.diverged == found.samples[-1].factor
    assert found.steepest is not None
    everywhere = range_test(planted(loss=lambda outputs_ND, y_N: torch.nan * outputs_ND.sum()))
    assert everywhere.diverged == everywhere.samples[0].factor
    assert everywhere.steepest is None


def test_a_budget_that_is_over_ends_it_and_says_so():
    found = range_test(planted(), low=1e-4, high=1e-2, budget_s=0.0)
    assert not found.in_time
    assert 2 <= len(found.samples) < 10


def digits_job() -> Job:
    torch.manual_seed(0)
    model = models.cifarnet(in_channels=1, widths=(8, 16))
    digits = data.digits()
    model.prepare(data.sample(digits, 500))
    net = nn.Sequential(model, nn.Dropout(0.1))
    rule = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    job = Job(net, rule, loader=data.loader(digits, "train", 64), accumulate=2)
    rate = optim.Rate(Linear(epochs=3, warmup=1))
    return job.apply(device.Seeded(0), data.Augment(translate=1), rate, optim.EMA(decay=0.9))


def train(job: Job, steps: int) -> None:
    end = job.steps + steps
    while job.steps < end:
        for x_NCHW, y_N in job.loader:
            (job.loss(job.model(x_NCHW), y_N) / 2).backward()
            if job.plain_loader.position % 2:
                continue  # half of a step
            job.optimizer.step()
            job.optimizer.zero_grad()
            if job.steps == end:
                break


def same(a: object, b: object) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


@pytest.mark.parametrize("steps", [0, 3])
def test_it_leaves_no_trace_in_weights_states_data_order_or_random_numbers(steps):
    plain, tried = digits_job(), digits_job()
    for job in (plain, tried):
        train(job, steps)
    model, state = copy.deepcopy(tried.model.state_dict()), copy.deepcopy(tried.state_dict())
    numbers = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    found = range_test(tried, rates=[0.05], high=1e4, steps=25)
    assert len(found.samples) >= 2
    assert same(tried.model.state_dict(), model)
    assert same(tried.state_dict(), state)
    assert same((torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()), numbers)
    for job in (plain, tried):
        train(job, 4)
    assert same(tried.model.state_dict(), plain.model.state_dict())
    assert same(tried.state_dict(), plain.state_dict())
    assert all(p.grad is None for p in tried.model.parameters())


def test_gradients_that_wait_for_their_step_are_kept():
    job = planted()
    x_ND, y_N = noisy()[0]
    bowl(job.model(x_ND), y_N).backward()
    (before,) = (p.grad.clone() for p in job.model.parameters())
    range_test(job, low=1e-4, high=100.0)
    (after,) = (p.grad for p in job.model.parameters())
    assert torch.equal(before, after)


@pytest.mark.filterwarnings("ignore:nothing averages")
def test_all_ranks_get_the_same_and_stop_together():
    def rank_main(comm):
        found = range_test(planted(loader=noisy(comm.rank), comm=comm), low=1e-4, high=100.0)
        return found.samples, found.diverged

    first, second = Threads(2).run(rank_main)
    assert first == second
    assert first[1] is not None


def test_what_one_rank_cannot_do_is_found_alone_while_none_waits_for_it():
    told: list[str] = []

    def rank_main(comm):
        def loss(outputs_ND: Tensor, y_N: Tensor) -> Tensor:
            if comm.rank == 1:
                raise ValueError("planted")
            return bowl(outputs_ND, y_N)

        job = planted(loader=noisy(comm.rank), comm=comm, loss=loss).apply(parallel.AllReduce())
        before = copy.deepcopy(job.state_dict())
        try:
            try_alone(job)
        except ValueError as error:
            told.append(f"rank {comm.rank}: {error}")
        assert same(job.state_dict(), before)
        assert all(torch.equal(p, torch.full((8,), 3.0)) for p in job.model.parameters())
        return comm.gather_objects(comm.rank)  # all come here

    assert Threads(2).run(rank_main) == [[0, 1], [0, 1]]
    assert told == ["rank 1: planted"]


@pytest.mark.parametrize(
    ("given", "pattern"),
    [
        ({"low": 1.0, "high": 1.0}, "rates x 1 to 1: an empty range"),
        ({"low": 0.0}, "an empty range"),
        ({"steps": 9}, "steps=9: at least 10"),
        ({"rates": [0.0]}, "all rates are 0"),
        ({"rates": [0.1, 0.2]}, "rates: 2 for 1 parameter groups"),
        ({"rates": []}, "rates: 0 for 1 parameter groups"),
    ],
)
def test_what_makes_no_test_is_refused(given, pattern):
    with pytest.raises(InputError, match=pattern):
        range_test(planted(), **given)


def test_a_loader_without_batches_is_refused():
    with pytest.raises(InputError, match="no batch in it"):
        range_test(planted(loader=[]))
