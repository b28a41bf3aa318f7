"""CUDA graphs on a CPU, by a stand-in that records and replays operators as torch's capture does kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import contracts
from helpers.graphs import Counts, captured_on_cpu
from kasoku.config.recipe import from_document
from kasoku.core import Comm, InputError, Technique, Threads
from kasoku.data import Shares
from kasoku.device import Autocast, Graphs, LossScale
from kasoku.distributed import Graded, Overlap, Planned
from kasoku.distributed.counting_comm import Activity, CountingComm
from kasoku.optim import EMA, Clip
from kasoku.testing import Row, TechniqueContracts
from kasoku.training.trainer import build


@pytest.fixture(autouse=True)
def counts() -> Iterator[Counts]:
    with captured_on_cpu() as found:
        yield found


class TestGraphs(TechniqueContracts):
    rows = (Row(Graphs(), neutral=Graphs()),)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    "more", [(), (Autocast("bf16"),), (LossScale(1024.0), Clip(0.5)), (EMA(0.8),)], ids=lambda more: f"{len(more)}"
)
def test_a_replay_has_the_bits_of_the_plain_step(more: tuple[Technique, ...], accumulate: int, counts: Counts) -> None:
    found = []
    for techniques in (more, (*more, Graphs())):
        torch.manual_seed(5)
        job = contracts.make(*techniques, accumulate=accumulate)
        contracts.train(job, 6)
        found.append((contracts.weights(job), contracts.judged(job)))
    contracts.assert_same(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert counts == Counts(captured=1, forwards=6 * accumulate, backwards=6 * accumulate)


def test_autocast_around_the_graph_is_captured_too(counts: Counts) -> None:
    found = []
    for techniques in ((Autocast("bf16"),), (Graphs(), Autocast("bf16"))):
        torch.manual_seed(5)
        job = contracts.make(*techniques)
        contracts.train(job, 3)
        found.append(contracts.weights(job))
    contracts.assert_same(*found)
    assert counts.captured == 1


def test_no_python_of_a_layer_runs_in_a_replay(counts: Counts) -> None:
    job, calls = contracts.make(Graphs()), []
    job.model.head.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    contracts.train(job, 1)
    captured = len(calls)
    contracts.train(job, 5)
    assert len(calls) == captured
    contracts.judged(job)
    assert calls[captured:] == [False], "evaluation runs as usual"
    assert counts.forwards == 6


def test_a_capture_leaves_buffers_and_random_state(counts: Counts) -> None:
    job = contracts.make(Graphs())
    before, random = contracts.weights(job), torch.get_rng_state()
    forward = job.model.forward
    forward._capture(job.loader.batches[0][0])
    contracts.assert_same(before, contracts.weights(job))
    assert torch.equal(random, torch.get_rng_state())
    assert counts == Counts(captured=1)


def test_a_shape_is_captured_when_it_comes_twice_in_a_row(counts: Counts) -> None:
    job, plain = contracts.make(Graphs(), model=contracts.Net(dropout=0)), contracts.Net(dropout=0)
    x, _ = job.loader.batches[0]
    replayed = []
    for images in (16, 8, 16, 8, 8, 8, 16):
        before = counts.forwards
        assert torch.equal(job.model(x[:images]), plain(x[:images]))
        replayed.append(counts.forwards - before)
    assert replayed == [1, 0, 1, 0, 1, 1, 0]
    assert counts.captured == 2


def test_gradients_that_a_replay_would_overwrite_are_refused() -> None:
    job = contracts.make(Graphs())
    x, y = job.loader.batches[0]
    job.loss(job.model(x), y).backward()
    with pytest.raises(InputError, match=r"second backward has overwritten.*zero_grad.*accumulate=k"):
        job.loss(job.model(x), y).backward()


def test_frozen_parameters_get_no_gradient() -> None:
    model = contracts.Net()
    model.stage[0].requires_grad_(False)
    job = contracts.make(Graphs(), model=model)
    contracts.train(job, 2)
    assert torch.equal(model.stage[0].conv.weight, contracts.Net().stage[0].conv.weight)
    assert not torch.equal(model.head.weight, contracts.Net().head.weight)


# ---- on ranks


def on_two_ranks(*techniques: Technique, accumulate: int = 1, steps: int = 6) -> list[Any]:
    """Weights, evaluated outputs, collectives a step on each communicator, and the engine's layout of each rank."""

    def rank(comm: Comm) -> Any:
        torch.manual_seed(5)
        counted = CountingComm(comm, Activity(60.0))
        job = contracts.make(*techniques, comm=counted, accumulate=accumulate)
        begun = [each.started for each in counted.activity.counts]
        contracts.train(job, steps)
        sent = [each.started - begin for each, begin in zip(counted.activity.counts, begun, strict=True)]
        return contracts.weights(job), contracts.judged(job), [n / steps for n in sent], job.kept("overlap")

    return Threads(2).run(rank)


BUCKETS = Graded(first=2, power=1.5, least_bytes=100)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("more", [(), (LossScale(2.0**127, every=3),), (EMA(0.8), Autocast("bf16"))])
def test_a_graph_on_ranks_has_the_bits_of_eager_ranks(more: tuple[Technique, ...], accumulate: int) -> None:
    eager, waits, late = (
        on_two_ranks(*more, *own, accumulate=accumulate)
        for own in ([Overlap(BUCKETS)], [Graphs(), Overlap(BUCKETS, next_forward=False)], [Graphs(), Overlap(BUCKETS)])
    )
    for (plain, *_), (waiting, waiting_out, *_), (found, out, *_) in zip(eager, waits, late, strict=True):
        contracts.assert_same(waiting, found)
        assert torch.equal(waiting_out, out)
        contracts.assert_same(*({n: x for n, x in each.items() if "running" not in n} for each in (plain, found)))
    statistics = [{n: x for n, x in ranks[0].items() if "running" in n} for ranks in late]
    contracts.assert_same(*statistics)
    means = {n: (eager[0][0][n] + eager[1][0][n]) / 2 for n in statistics[0]}
    for name, mean in means.items():
        torch.testing.assert_close(statistics[0][name], mean)


def test_gradients_of_a_graph_travel_in_buckets() -> None:
    for _, _, (own, sent), engine in on_two_ranks(Graphs(), Overlap(BUCKETS)):
        assert len(engine.layout.plan.buckets) == 3
        assert sent == 3
        assert own == 1, "the mean of BatchNorm's statistics"


def test_late_updates_are_finished_before_the_replay(counts: Counts) -> None:
    def rank(comm: Comm) -> list[str]:
        job = contracts.make(Graphs(), Overlap(BUCKETS), comm=comm)
        engine, events, forward = job.kept("overlap"), list[str](), job.model.forward
        job.after_update(lambda params: events.append("update"))

        def replayed(x: Tensor) -> Any:
            events.append("pending" if any(bucket.pending for bucket in engine.layout.buckets) else "forward")
            return forward(x)

        job.patch(job.model, "forward", replayed)
        job.after_step(lambda: events.append("step"))
        contracts.train(job, 3)
        return events

    wanted = ["forward", "step", *["update"] * 3] * 3
    assert Threads(2).run(rank) == [wanted] * 2
    assert counts == Counts(captured=2, forwards=6, backwards=6)


def test_of_a_graph_the_first_steps_plan_one_bucket() -> None:
    (one, _, _, engine), (other, *_) = on_two_ranks(Graphs(), Overlap(Planned(warm=1, measure=2)), steps=8)
    assert engine.profiler is None
    assert engine.forecast is not None
    assert [len(bucket) for bucket in engine.layout.plan.buckets] == [len(list(contracts.Net().parameters()))]
    contracts.assert_same(one, other)


def test_a_recipe_with_graphs_trains_on_ranks_of_unequal_shares() -> None:
    settings = {"epochs": 1, "batch": 64, "model": {"use": "kasoku.models.cifarnet", "widths": [8, 16]}}
    settings |= {"data": {"use": "kasoku.data.digits"}, "optimizer": {"use": "kasoku.optim.sgd", "lr": 0.001}}

    def trained(comm: Comm, graphs: bool, shares: tuple[int, ...]) -> tuple[list[str], dict[str, Tensor]]:
        document = settings | {"device": {"precision": "fp32", "threads": 1, "graphs": graphs}}
        job = build(from_document(document), comm, shares=Shares(shares)).job
        for _, (x_NCHW, y_N) in zip(range(4), job.loader, strict=False):
            job.loss(job.model(x_NCHW), y_N).backward()
            job.optimizer.step()
            job.optimizer.zero_grad()
        job.drain()
        return [type(technique).__name__ for technique in job.applied], contracts.weights(job)

    eager = Threads(2).run(lambda comm: trained(comm, False, (40, 24)))
    graphed = Threads(2).run(lambda comm: trained(comm, True, (40, 24)))
    assert "Overlap" in graphed[0][0]
    assert "VirtualRanks" not in graphed[0][0]
    contracts.assert_same(graphed[0][1], graphed[1][1])
    for name, x in eager[0][1].items():
        if "running" not in name:
            torch.testing.assert_close(graphed[0][1][name], x, msg=name)
