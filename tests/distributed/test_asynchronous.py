"""Ranks that do not wait: nothing is lost, the bound holds, 0 is Overlap, and all have the same weights in the end."""

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from contracts import Net, assert_same, make, train, weights
from helpers.ranks import on_processes
from helpers.timed import compute, timed
from kasoku.core import Comm, InputError, Job, Technique, Threads
from kasoku.distributed import Asynchronous, Graded, OneBucket, Overlap, PerLayer
from kasoku.distributed.async_sgd.worker import CODECS, WorkerGroup

SIZE = 3
GROUPS = PerLayer(least_bytes=0)


def by_turns(f: Callable[..., Any], *args: Any) -> list[Any]:
    return Threads(SIZE).run(lambda comm: f(comm, *args))


def by_processes(f: Callable[..., Any], *args: Any) -> list[Any]:
    return on_processes(SIZE, f, *args)


process = pytest.mark.process
both = pytest.mark.parametrize("on_ranks", [by_turns, pytest.param(by_processes, marks=process)])


def trained(comm: Comm, technique: Technique, epochs: int = 3, **net: Any) -> tuple[dict[str, Tensor], Counter[int]]:
    """Weights and staleness after epochs of four steps each, with a drain in the midst."""
    torch.set_num_threads(1)
    job = make(technique, model=Net(seed=comm.rank, **net), comm=comm)
    for epoch in range(epochs):
        for x_NCHW, y_N in job.loader:
            job.loss(job.model(x_NCHW), y_N).backward()
            job.optimizer.step()
            job.optimizer.zero_grad()
        if epoch == 1:
            job.drain()
    job.drain()
    found = weights(job), Counter(job.kept("asynchronous").staleness) if not isinstance(technique, Overlap) else None
    job.close()
    return found


@both
@pytest.mark.parametrize(
    "technique",
    [
        Asynchronous(buckets=GROUPS),
        Asynchronous(buckets=GROUPS, hidden=False, wire="bf16"),
        Asynchronous(buckets=GROUPS, wire="int8"),
        Asynchronous(buckets=GROUPS, every=3, max_staleness=1, hidden=False, predict=1.0),
    ],
    ids=["default", "bf16", "int8", "predicted"],
)
def test_all_ranks_end_with_the_same_weights(on_ranks, technique: Asynchronous):
    ranks = on_ranks(trained, technique)
    for other, _ in ranks[1:]:
        assert_same(ranks[0][0], other)
    assert not torch.equal(ranks[0][0]["head.weight"], Net().head.weight)


@both
def test_every_update_is_counted_with_its_staleness(on_ranks):
    pieces = 5 * SIZE  # five layers with parameters, a piece for each owner
    for _, staleness in on_ranks(trained, Asynchronous(buckets=GROUPS, every=1)):
        assert sum(staleness.values()) == 12 * SIZE * pieces
        assert max(staleness) > 0


@pytest.mark.parametrize(
    "technique",
    [
        pytest.param(Asynchronous(buckets=GROUPS, every=1), marks=pytest.mark.smoke),
        Asynchronous(buckets=GROUPS, hidden=False),
        Asynchronous(buckets=GROUPS, hidden=False, predict=1.0),
        Asynchronous(buckets=GROUPS, wire="bf16", every=1),
        Asynchronous(buckets=GROUPS, hidden=False, wire="int8"),
    ],
    ids=["default", "in place", "predicting", "bf16", "int8"],
)
@process
def test_one_rank_that_steps_comes_to_the_same_bits_by_whatever_way(technique: Asynchronous):
    turns, near = Threads(2).run(lambda comm: _not_random(comm, technique)), on_processes(2, _not_random, technique)
    for a, b in zip(turns, near, strict=True):
        assert_same(a, b)


def _not_random(comm: Comm, technique: Technique) -> dict[str, Tensor]:
    """The last rank alone steps; the others own parts of the weights."""
    torch.set_num_threads(1)
    job = make(technique, model=Net(seed=comm.rank, dropout=0), comm=comm)
    train(job, 8 * (comm.rank == comm.size - 1))
    return weights(job)


def _synchronous(comm: Comm, technique: Technique, **net: Any) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    job = make(technique, model=Net(seed=comm.rank, dropout=0, **net), comm=comm)
    train(job, 6)
    return weights(job)


@both
def test_bound_zero_is_overlap_bit_for_bit(on_ranks):
    groups = Graded(first=1, power=1.5, least_bytes=1000)
    ours = on_ranks(_synchronous, Asynchronous(max_staleness=0, buckets=groups))
    theirs = on_ranks(_synchronous, Overlap(groups))
    for a, b in zip(ours, theirs, strict=True):
        assert_same(a, b)


class Counting(nn.Module):
    """Its gradient is what it is given: so updates are known exactly."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(n))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).sum()


class Halves(nn.Module):
    """Two layers of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Counting(4), Counting(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x[:4]) + self.second(x[4:])


def counted(comm: Comm, technique: Technique, *, steps: int = 8, pace: float = 0.0) -> tuple[Tensor, Tensor, Any]:
    """What was moved in all, what should have been, and the engine; rank r moves by whole numbers, by SGD of rate 1."""
    model = Halves()
    job = Job(model, torch.optim.SGD(model.parameters(), lr=1.0), comm=comm).apply(technique)
    wanted = torch.zeros(7)
    generator = torch.Generator().manual_seed(comm.rank)
    for _ in range(steps):
        x = torch.randint(-60, 60, (7,), generator=generator).float() * comm.size
        model(x).backward()
        if pace:
            compute(comm, pace)
        job.optimizer.step()
        job.optimizer.zero_grad()
        wanted -= x / comm.size
    job.drain()
    comm.all_reduce(wanted).wait()
    found = torch.cat([p.detach() for p in model.parameters()]), wanted, job.kept("asynchronous").staleness
    job.close()
    return found


@both
@pytest.mark.parametrize("hidden", [True, False])
@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("every", [0, 1, 3])
def test_the_sum_of_the_updates_applied_is_that_of_those_sent(on_ranks, hidden: bool, wire: str, every: int):
    for moved, wanted, _ in on_ranks(counted, Asynchronous(hidden=hidden, wire=wire, every=every)):
        assert torch.equal(moved, wanted)


@both
@pytest.mark.parametrize("every", [0, 1])
def test_nothing_is_lost_of_many_groups(on_ranks, every: int):
    for moved, wanted, _ in on_ranks(counted, Asynchronous(buckets=GROUPS, every=every)):
        assert torch.equal(moved, wanted)


@pytest.mark.parametrize(("over", "sent"), [(True, 40), (False, 4)])  # steps 1, 17, 33, and the rest in the end
def test_a_rank_waits_for_no_exchange_until_it_was_alone_for_16_steps(monkeypatch, over: bool, sent: int):
    monkeypatch.setattr(Future, "done", lambda _: over)
    for moved, wanted, staleness in Threads(2).run(lambda comm: counted(comm, Asynchronous(), steps=40)):
        assert torch.equal(moved, wanted)
        assert sum(staleness.values()) == sent * 2 * 2  # of two workers to two owners


def _seldom(comm: Comm) -> bool:
    """Steps that are much further apart than gloo's time-out for a group."""
    dist.distributed_c10d.default_pg_timeout = timedelta(seconds=1)
    model = Counting(7)
    job = Job(model, torch.optim.SGD(model.parameters(), lr=1.0), comm=comm).apply(Asynchronous())
    for _ in range(2):
        model(torch.ones(7)).backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
        time.sleep(1.5)
    job.drain()
    found = bool((model.w == -2.0).all())
    job.close()
    return found


@process
@pytest.mark.timing
@pytest.mark.smoke
def test_ranks_that_meet_seldom_live_on():
    assert on_processes(SIZE, _seldom) == [True] * SIZE


@pytest.mark.parametrize("hidden", [True, False])
@pytest.mark.parametrize(  # bf16 sends 1, and int8 100 and 0
    ("wire", "x", "apart"), [("bf16", [1.0 + 2.0**-10, 0.0], 1e-4), ("int8", [100.0, 0.28125], 0.02)]
)
def test_what_fewer_bits_take_away_is_sent_later(wire: Any, x: list[float], apart: float, hidden: bool):
    def rank(comm: Comm) -> list[float]:
        model = Counting(4)  # half of it for each owner
        job = Job(model, torch.optim.SGD(model.parameters(), lr=1.0), comm=comm)
        job.apply(Asynchronous(wire=wire, hidden=hidden, buckets=OneBucket(), every=1))
        for _ in range(300 if comm.rank else 0):
            model(torch.tensor(x + x)).backward()
            job.optimizer.step()
            job.optimizer.zero_grad()
        group = job.kept("asynchronous").weights.groups[0]
        found = (group.base.flat / -150).tolist()  # what the owners know before the sync point, of half of each update
        job.drain()
        assert (model.w / -150).tolist() == pytest.approx(x + x, rel=1e-6)
        return found

    assert Threads(2).run(rank)[1] == pytest.approx(x + x, rel=apart)


@settings(max_examples=25, deadline=None)
@given(
    paces=st.lists(st.floats(0.1, 5.0), min_size=2, max_size=5),
    bound=st.integers(1, 3),
    every=st.integers(1, 2),
    hidden=st.booleans(),
)
def test_no_rank_is_ever_further_ahead_than_the_bound(paces: list[float], bound: int, every: int, hidden: bool):
    done = [0] * len(paces)
    seen = []

    def rank(comm: Comm) -> Counter[int]:
        model = Counting(5)
        job = Job(model, torch.optim.SGD(model.parameters(), lr=0.1), comm=comm)
        job.apply(Asynchronous(max_staleness=bound, every=every, hidden=hidden))
        for _ in range(6):
            out = model(torch.ones(5))
            seen.append(done[comm.rank] - min(done))
            compute(comm, paces[comm.rank])
            out.backward()
            done[comm.rank] += 1
            job.optimizer.step()
            job.optimizer.zero_grad()
        job.drain()
        return job.kept("asynchronous").staleness

    staleness = timed(len(paces), rank)[0]
    assert max(seen) <= bound
    # a step from now the others are `bound` behind to `bound` ahead; what is hidden is read a step later
    assert max(staleness) <= (len(paces) - 1) * (2 * bound + 1 + (hidden or every > 1) * 2)


def _when_done(paces: list[float], technique: Asynchronous, steps: int) -> list[float]:
    def rank(comm: Comm) -> float:
        model = Counting(5)
        job = Job(model, torch.optim.SGD(model.parameters(), lr=0.1), comm=comm).apply(technique)
        for _ in range(steps):
            model(torch.ones(5)).backward()
            compute(comm, paces[comm.rank])
            job.optimizer.step()
            job.optimizer.zero_grad()
        seconds = comm.clock.now()
        job.drain()
        return seconds

    return timed(len(paces), rank)


def test_a_slow_rank_slows_nobody_unless_a_bound_says_so():
    paces = [1.0, 1.0, 1.0, 5.0]
    assert _when_done(paces, Asynchronous(), 4) == pytest.approx([4.0, 4.0, 4.0, 20.0])
    assert _when_done(paces, Asynchronous(max_staleness=1), 4) == pytest.approx([11.0, 11.0, 11.0, 20.0])
    assert _when_done(paces, Asynchronous(max_staleness=4), 4) == pytest.approx([4.0, 4.0, 4.0, 20.0])


@pytest.mark.parametrize("size", [2, 4])
def test_equal_ranks_are_as_stale_as_there_are_others(size: int):
    found = timed(size, lambda comm: counted(comm, Asynchronous(hidden=False), steps=20, pace=1.0))
    staleness = found[0][2]
    common = max(staleness, key=lambda steps: staleness[steps])
    assert common == size - 1


def _steps(comm: Comm, technique: Asynchronous, steps: int) -> Counter[int]:
    model = Counting(7)
    job = Job(model, torch.optim.SGD(model.parameters(), lr=1.0), comm=comm).apply(technique)
    for _ in range(steps):
        model(torch.ones(7)).backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
    job.drain()
    return job.kept("asynchronous").staleness


def test_a_worker_alone_is_never_stale():
    one, other = Threads(2).run(lambda comm: _steps(comm, Asynchronous(), 20 * comm.rank))
    assert one == other == {0: 40}  # a piece for each owner


def test_a_warmup_without_end_is_the_synchronous_step_bit_for_bit():
    ours = Threads(2).run(lambda comm: _synchronous(comm, Asynchronous(warmup=100.0, buckets=GROUPS), norm=False))
    theirs = Threads(2).run(lambda comm: _synchronous(comm, Overlap(GROUPS, next_forward=False), norm=False))
    for a, b in zip(ours, theirs, strict=True):
        assert_same(a, b)


@both
def test_ranks_step_together_at_first_and_in_the_end(on_ranks):
    ranks = on_ranks(_phases)
    for step, every in enumerate(zip(*ranks, strict=True)):
        together = step < 4 or step >= 8
        assert all(torch.equal(every[0], x) for x in every[1:]) == together, step


def _phases(comm: Comm) -> list[Tensor]:
    torch.set_num_threads(1)
    technique = Asynchronous(warmup=1.0, finish=2.0, hidden=False)
    job = make(technique, model=Net(norm=False), comm=comm)  # epochs of four steps
    seen: list[Tensor] = []
    train(job, 12, each=lambda: seen.append(job.model.head.weight.detach().clone()))
    job.close()
    return seen


@pytest.mark.parametrize(
    ("technique", "first"),
    [
        (Asynchronous(hidden=False, predict=1.0), -5.0),  # two own, two of the other, one ahead
        (Asynchronous(every=1), -5.0),  # two own, one of the other, which is known late, and two ahead
    ],
    ids=["read at once", "default"],
)
def test_prediction_takes_the_gradient_where_the_others_go(technique: Asynchronous, first: float):
    places: dict[int, list[float]] = {0: [], 1: []}

    def rank(comm: Comm) -> float:
        model = Counting(1)
        job = Job(model, torch.optim.SGD(model.parameters(), lr=1.0), comm=comm)
        job.apply(technique)
        for _ in range(6):
            places[comm.rank].append(model.w.item())
            model(torch.tensor([2.0])).backward()
            compute(comm, 1.0)
            job.optimizer.step()
            job.optimizer.zero_grad()
        job.drain()
        return model.w.item()

    assert timed(2, rank) == [-12.0, -12.0]  # what is predicted is never added
    steps = [round(b - a, 6) for a, b in zip(places[1][2:], places[1][3:], strict=False)]
    assert steps == [-2.0] * 3  # constant speed: ahead by a constant
    assert places[1][2] == first


class Seeing(torch.optim.SGD):
    """Keeps what it finds the first parameter to be."""

    def __init__(self, params: Any, found: list[float]) -> None:
        super().__init__(params, lr=1.0)
        self.found = found

    def step(self, closure: Any = None) -> Any:
        self.found.append(self.param_groups[0]["params"][0].item())
        return super().step(closure)


@pytest.mark.parametrize("technique", [Asynchronous(every=1), Asynchronous(hidden=False, predict=1.0)], ids=["2", "1"])
def test_an_optimizer_steps_from_the_weights_not_from_the_prediction(technique: Asynchronous):
    def rank(comm: Comm) -> list[float]:
        model, at_forward, at_step = Counting(1), [], []
        job = Job(model, Seeing(model.parameters(), at_step), comm=comm).apply(technique)
        for _ in range(6):
            at_forward.append(model.w.item())
            model(torch.tensor([2.0])).backward()
            compute(comm, 1.0)
            job.optimizer.step()
            job.optimizer.zero_grad()
        job.close()
        return [round(a - b, 6) for a, b in zip(at_forward, at_step, strict=True)]

    assert [ahead[3:] for ahead in timed(2, rank)] == [[-technique.ahead] * 3] * 2  # the other moves by -1 a step


@pytest.mark.parametrize("ahead", [2.0, 0.0])
@pytest.mark.parametrize(("wire", "more"), [("fp32", 0), ("bf16", 6), ("int8", 5)])
def test_a_rank_keeps_the_bytes_a_parameter_that_the_reference_gives(wire: str, more: int, ahead: float):
    n = 25_600
    group = WorkerGroup([torch.zeros(n)], [0, 1], CODECS[wire], blocking=False, ahead=ahead)
    buffers = (group.current.flat, group.base.flat, group.prediction.flat, group.residual, group.message)
    kept = {x.data_ptr(): x.nbytes for x in buffers if x.nbytes}
    assert sum(kept.values()) / n == pytest.approx((12 if ahead else 8) + more, abs=0.01)  # int8 has scales too


def test_after_a_halt_it_is_not_gone_ahead_as_far_as_others_went_meanwhile():
    p = nn.Parameter(torch.zeros(1))
    group, found = WorkerGroup([p.data], [0], CODECS["fp32"], blocking=False, ahead=2.0), []
    group.begin()
    for others in (2, 4, 6, 46, 48):  # updates by others so far, of -1 each
        group.write_request(1.0)
        group.message.fill_(-others)
        group.version_read[0] = others
        group.read_reply()
        for ahead in (True, True, False, False):  # where it is, it stays
            group.prediction.move(ahead=ahead)
            found.append(p.item() + others)
    places = [-4.0, -4.0, -4.0, -5.0, -4.0]  # 40 of a movement that is 2 as a rule: an eighth of 2
    assert found == [x for place in places for x in (place, place, 0.0, 0.0)]


def test_resumed_ranks_go_on_from_the_same_weights():
    def rank(comm: Comm) -> tuple[dict[str, Tensor], ...]:
        job = make(Asynchronous(), comm=comm)
        train(job, 3)
        state = job.state_dict()
        kept = weights(job)
        other = make(Asynchronous(), model=Net(seed=7), comm=comm)
        other.model.load_state_dict(kept)
        other.load_state_dict(state)
        assert other.steps == 3
        train(other, 3)
        return kept, weights(other)

    ranks = Threads(2).run(rank)
    assert_same(ranks[0][0], ranks[1][0])
    assert_same(ranks[0][1], ranks[1][1])
    assert not torch.equal(ranks[0][0]["head.weight"], ranks[0][1]["head.weight"])


def test_ranks_that_have_not_met_load_nothing():
    def rank(comm: Comm) -> bool:
        job = make(Asynchronous(), comm=comm)
        state = job.state_dict()
        x_NCHW, y_N = next(iter(job.loader))
        job.loss(job.model(x_NCHW), y_N).backward()
        job.optimizer.step()
        with pytest.raises(InputError, match=r"1 steps since the last sync point: call job\.drain"):
            job.load_state_dict(state)
        job.drain()
        job.load_state_dict(state)
        return True

    assert Threads(2).run(rank) == [True, True]


def test_staleness_before_a_resumption_is_counted_too():
    def rank(comm: Comm) -> tuple[int, int, int]:
        job = make(Asynchronous(), comm=comm)
        train(job, 3)
        state = job.state_dict()
        other = make(Asynchronous(), comm=comm)
        other.model.load_state_dict(weights(job))
        other.load_state_dict(state)
        loaded = sum(other.kept("asynchronous").staleness.values())
        train(other, 3)
        other.drain()
        first, both = job.kept("asynchronous").staleness, other.kept("asynchronous").staleness
        return sum(first.values()), loaded, sum(both.values())

    (first, loaded, both), _ = Threads(2).run(rank)
    assert first == loaded > 0
    assert both == 2 * first


def test_weights_that_are_not_finite_meet_and_go_on():
    def rank(comm: Comm) -> bool:
        model = Counting(3)
        job = Job(model, torch.optim.SGD(model.parameters(), lr=1.0), comm=comm).apply(Asynchronous())
        for x in (float("nan"), 1.0):
            model(torch.full((3,), x)).backward()
            job.optimizer.step()
            job.optimizer.zero_grad()
            job.drain()
        return bool(model.w.isnan().all())

    assert Threads(2).run(rank) == [True, True]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: Asynchronous(max_staleness=-1), "max_staleness=-1: at least 0; None for any number of steps"),
        (lambda: Asynchronous(every=-1), "every=-1: at least 0"),
        (lambda: Asynchronous(wire="fp8"), 'wire="fp8": "fp32", "bf16" or "int8"'),
    ],
)
def test_wrong_settings_are_refused(wrong: Callable[[], object], words: str):
    with pytest.raises(InputError, match=words):
        wrong()


def test_weights_loaded_behind_its_back_are_refused():
    def rank(comm: Comm) -> None:
        job = make(Asynchronous(), comm=comm)
        job.model.load_state_dict(Net(seed=5).state_dict())
        train(job, 1)

    with pytest.raises(InputError, match="the weights were changed since the last sync point"):
        Threads(2).run(rank)


def test_weights_loaded_behind_its_back_are_not_dropped_in_a_meeting():
    def rank(comm: Comm) -> None:
        job = make(Asynchronous(), comm=comm)
        job.model.load_state_dict(Net(seed=5).state_dict())
        job.drain()

    with pytest.raises(InputError, match="the weights were changed since the last sync point"):
        Threads(2).run(rank)
