"""CUDA graphs on a CPU, by a stand-in that records and replays operators as torch's capture does kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import contracts
from helpers.graphs import Counts, captured_on_cpu
from kasoku.core import InputError, Technique
from kasoku.device import Autocast, Graphs, LossScale
from kasoku.optim import EMA, Clip
from kasoku.testing import Row, TechniqueContracts


@pytest.fixture(autouse=True)
def counts() -> Iterator[Counts]:
    with captured_on_cpu() as found:
        yield found


class TestGraphs(TechniqueContracts):
    rows = (Row(Graphs(), neutral=Graphs(), compiles=False),)


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
