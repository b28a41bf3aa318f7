"""Replay finds flipped bits before the optimizer uses them, and accuses no training that is whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from contracts import Batches, Net, assert_same, make, rule, train, weights
from contracts import one_thread as one_thread
from kasoku.core import Comm, CorruptionError, InputError, Job, Threads, Wall
from kasoku.device import LossScale, Seeded
from kasoku.distributed import AllReduce, Asynchronous, Overlap, PerLayer, Planned, Replay, VirtualRanks

SEEDED = Seeded(seed=3)


class Uncopied(Wall):
    def __deepcopy__(self, memo: object) -> Uncopied:
        raise AssertionError


def flip(x: Tensor, bit: int = 0, at: int = 0) -> None:
    """Flips a bit of an element, as a defective memory would: no version counter notices."""
    x.detach().view(-1).view(torch.int32).data[at] ^= 1 << bit


def at_gradient(job: Job, step: int, name: str, bit: int = 0) -> None:
    """Flips a bit of a gradient as backward computes it; in the loop's pass alone."""

    def damaged(gradient: Tensor) -> Tensor | None:
        if job.steps != step or job.rehearses:
            return None
        gradient = gradient.clone()
        flip(gradient, bit)
        return gradient

    dict(job.model.named_parameters())[name].register_hook(damaged)


def between(job: Job, step: int, f: Callable[[], object]) -> None:
    """Calls f between the forward and the backward of a step."""
    job.model.register_forward_hook(lambda *_: f() if job.steps == step and not job.rehearses else None)


def after(job: Job, step: int, f: Callable[[], object]) -> None:
    """Calls f when so many steps have been made."""
    job.after_step(lambda: f() if job.steps == step else None)


def weight(job: Job, name: str = "head.weight") -> Tensor:
    return dict(job.model.named_parameters())[name]


def momentum(job: Job, name: str = "head.weight") -> Tensor:
    return job.state_of(weight(job, name))["momentum_buffer"]


@pytest.mark.parametrize("name", ["stage.0.conv.weight", "head.bias"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("bit", [0, 31])
def test_a_flipped_bit_of_a_gradient_is_named_before_its_update(name: str, accumulate: int, bit: int) -> None:
    job = make(SEEDED, Replay(every=3), accumulate=accumulate)
    at_gradient(job, 3, name, bit)
    train(job, 3)
    before = weights(job)
    with pytest.raises(
        CorruptionError, match=rf"at step 3, rank 0 \(host .*the gradient of {name} differs between two passes"
    ) as caught:
        train(job, 1)
    assert job.steps == caught.value.trusted == 3
    for name, p in job.model.named_parameters():
        assert torch.equal(p, before[name])


def test_a_gradient_of_a_step_that_is_not_checked_is_not_seen() -> None:
    job = make(SEEDED, Replay(every=3))
    at_gradient(job, 4, "head.bias")
    train(job, 8)


@pytest.mark.parametrize(("of", "name"), [(weight, "head.weight"), (momentum, "momentum_buffer of head.weight")])
def test_a_bit_that_flips_within_a_checked_step_is_named(of: Callable[[Job], Tensor], name: str) -> None:
    job = make(SEEDED, Replay(every=3))
    between(job, 3, lambda: flip(of(job)))
    with pytest.raises(CorruptionError, match=f"step 3, rank 0 .* {name} changed between forward and update"):
        train(job, 8)


def test_a_deep_copy_of_the_model_has_nothing_of_the_job() -> None:
    job = make(SEEDED, Replay(every=1))
    job.comm.clock = Uncopied()  # type: ignore[assignment]
    twin = copy.deepcopy(job.model)
    train(job, 2)
    twin(Batches().batches[0][0]).sum().backward()


EXCHANGES = [AllReduce(), Overlap(PerLayer(least_bytes=0)), Overlap(Planned(warm=1, measure=1))]


@pytest.mark.parametrize("exchange", EXCHANGES, ids=["AllReduce", "Overlap", "Overlap, planned"])
@pytest.mark.parametrize("of", [weight, momentum])
def test_weights_that_differ_between_ranks_are_named(exchange: Any, of: Callable[[Job], Tensor]) -> None:
    def act(comm: Comm) -> str:
        job = make(SEEDED, exchange, Replay(every=4), comm=comm, model=Net(dropout=0.2))
        if comm.rank == 1:
            between(job, 5, lambda: flip(of(job), bit=20))
        with pytest.raises(CorruptionError) as caught:
            train(job, 9)
        assert (job.steps, caught.value.trusted) == (8, 4)
        return str(caught.value)

    one, other = Threads(2).run(act)
    assert one == other
    assert "silent corruption at step 8, ranks 0 (host " in one
    assert "other bits of " in one
    assert "than the other ranks" in one


def test_among_three_ranks_the_odd_one_is_named() -> None:
    def act(comm: Comm) -> str:
        job = make(AllReduce(), Replay(every=4), comm=comm, model=Net(dropout=0))
        if comm.rank == 1:
            after(job, 3, lambda: flip(momentum(job), bit=20))
        with pytest.raises(CorruptionError) as caught:
            train(job, 9)
        return str(caught.value)

    assert all("step 4, rank 1 (host " in line and "than most ranks" in line for line in Threads(3).run(act))


@pytest.mark.parametrize("exchange", EXCHANGES, ids=["AllReduce", "Overlap", "Overlap, planned"])
def test_all_ranks_end_when_one_of_them_computed_a_wrong_gradient(exchange: Any) -> None:
    def act(comm: Comm) -> str:
        job = make(SEEDED, exchange, Replay(every=2), comm=comm)
        if comm.rank == 1:
            at_gradient(job, 4, "head.bias", bit=7)
        train(job, 4)
        before = weights(job)
        with pytest.raises(CorruptionError) as caught:
            train(job, 1)
        assert_same({n: before[n] for n, _ in job.model.named_parameters()}, dict(job.model.named_parameters()))
        job.close()  # makes no update that was left for later
        assert_same({n: before[n] for n, _ in job.model.named_parameters()}, dict(job.model.named_parameters()))
        return str(caught.value)

    one, other = Threads(2).run(act)
    assert one == other
    assert "step 4, rank 1 (host " in one


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("beside", [[], [LossScale(start=2.0**140)], [VirtualRanks(norm_batch=4, average=0.5)]])
@pytest.mark.parametrize("exchange", EXCHANGES, ids=["AllReduce", "Overlap", "Overlap, planned"])
def test_the_bits_of_a_training_do_not_change(every: int, beside: list[Any], exchange: Any) -> None:
    def act(comm: Comm, *check: Replay) -> dict[str, Tensor]:
        job = make(SEEDED, exchange, *beside, *check, comm=comm, model=Net(dropout=0.2))
        train(job, 9)
        return weights(job)

    plain, checked = (Threads(2).run(lambda comm, c=check: act(comm, *c)) for check in ([], [Replay(every=every)]))
    if not isinstance(getattr(exchange, "buckets", None), Planned):  # a plan may change the order of sums
        for one, other in zip(plain, checked, strict=True):
            assert_same(one, other)


def test_a_forward_that_does_not_repeat_is_found_in_the_first_step() -> None:
    job = make(Replay(every=1000))
    calls: list[float] = []
    job.patch(job, "loss", lambda out, y_N: (calls.append(1), out.logsumexp(1).mean() * len(calls))[1])
    with pytest.raises(CorruptionError, match=r"at step 0, .* or the forward draws numbers that are not torch's"):
        train(job, 8)


def test_a_step_without_the_batch_of_the_loader_is_refused() -> None:
    job = make(Replay(every=2))
    x_NCHW, y_N = Batches().batches[0]
    with pytest.raises(InputError, match=r"is not one of job.loader: iterate over job.loader"):
        job.backward(job.loss(job.model(x_NCHW), y_N))


def test_it_is_refused_where_bits_do_not_repeat() -> None:
    with pytest.raises(InputError, match=r"does not repeat its bits: set device\.deterministic"):
        make(Replay(), model=Net().to("meta"), optimizer=lambda m: rule(m))
    with pytest.raises(InputError, match="use Overlap instead"):
        make(Replay(), Asynchronous())
