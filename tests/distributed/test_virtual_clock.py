"""On the virtual clock the order of what is sent and the time that shows are exact."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.virtual_comm import Emulate, SimComm
from kasoku.core import Job
from kasoku.core.blocks import blocks
from kasoku.distributed import Fixed, Graded, OneBucket, Overlap, PerLayer, Planned, Policy
from kasoku.distributed.ddp.bucket_plan import search
from kasoku.distributed.ddp.cost_model import BucketPlan, Chunk, LinkModel, Sized, UnitTimes, forecast
from kasoku.distributed.ddp.layer_index import LayerIndex
from kasoku.distributed.ddp.step_profiler import shares
from kasoku.models import cifar_resnet18, resnet50
from kasoku.optim import sgd

LINK = LinkModel(latency_s=1e-3, bytes_per_s=1e9)


class Chain(nn.Module):
    """Linear layers of several sizes, one after the other."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(sizes)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def units_of(model: nn.Module, forward_s: list[float], backward_s: list[float]) -> list[UnitTimes]:
    names = [name for name, _ in LayerIndex(model).modules]
    times = zip(names, forward_s, backward_s, strict=True)
    return [UnitTimes(n, f, b, update_s=1e-4 * (i + 1)) for i, (n, f, b) in enumerate(times)]


def job_of(
    model: nn.Module, units: list[UnitTimes], policy: Policy, *, next_forward: bool = True, link: LinkModel = LINK
) -> Job:
    comm = SimComm(2, link)
    job = Job(model, lambda m: sgd(m, lr=0.1), comm=comm, loss=lambda out, y: out.sum())
    return job.apply(Emulate(tuple(units)), Overlap(policy, next_forward=next_forward))


def run(job: Job, shape: tuple[int, ...], steps: int) -> list[float]:
    """Moments at which each forward begins."""
    begins = []
    for _ in range(steps):
        begins.append(job.clock.now())
        job.loss(job.model(torch.zeros(shape, device="meta", requires_grad=True)), torch.zeros(1)).backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
    return begins


def by_recursion(units: list[UnitTimes], policy: Policy, tensors: list[Sized], next_forward: bool) -> float:
    """The closed form of the steady state, written down for a link that moves one group after the other."""
    plan = policy.plan(tensors)
    ready, passed = {}, 0.0
    for i in reversed(range(len(units))):
        passed += units[i].backward_s
        ready[i] = passed
    end, arrived = 0.0, {}
    for piece in plan.order:
        size = sum(tensors[i].size for i in plan.buckets[piece.bucket])
        end = max(end, ready[min(tensors[i].unit for i in plan.buckets[piece.bucket])]) + LINK.seconds(size)
        arrived[piece.bucket] = end
    now, done = passed if next_forward else max(passed, end), set()
    for i, unit in enumerate(units):
        wanted = [g for g in arrived if not next_forward or i in {tensors[t].unit for t in plan.buckets[g]}]
        for g in sorted(wanted, key=lambda g: arrived[g]):
            if g not in done:
                done.add(g)
                now = max(now, arrived[g]) + sum(units[tensors[t].unit].update_s for t in plan.buckets[g])
        now += unit.forward_s
    return now


@pytest.mark.parametrize("policy", [OneBucket(), PerLayer(0), Fixed(200_000, 50_000), Graded(first=1, power=1.5)])
@pytest.mark.parametrize("next_forward", [True, False])
def test_the_real_overlap_takes_the_time_of_the_closed_recursion(policy: Policy, next_forward: bool) -> None:
    torch.manual_seed(0)
    model = Chain([100, 300, 50, 400, 700, 20]).to("meta")
    rng = random.Random(1)
    units = units_of(model, [rng.uniform(0, 2e-3) for _ in range(5)], [rng.uniform(0, 4e-3) for _ in range(5)])
    begins = run(job_of(model, units, policy, next_forward=next_forward), (4, 100), 6)
    tensors = LayerIndex(model).tensors
    expected = by_recursion(units, policy, tensors, next_forward)
    steps = [b - a for a, b in itertools.pairwise(begins)]
    # the period of the steady state: from the start of one backward to the next
    forward = sum(u.forward_s for u in units)
    assert sum(steps[1:]) / len(steps[1:]) == pytest.approx(expected, rel=1e-12), (forward, steps)
    seen = forecast(units, tensors, policy.plan(tensors), LINK, next_forward=next_forward)
    assert seen.step_s == pytest.approx(expected, rel=1e-12)


def test_pieces_are_sent_in_the_order_of_the_plan_whatever_arrives_first() -> None:
    class Backwards(Policy):
        def plan(self, tensors: list[Sized]) -> BucketPlan:
            """The input's gradients first, in halves: so nothing is sent before the end of backward."""
            groups = tuple((i,) for i in range(len(tensors)))
            halves = [
                (i, k * t.elements // 2, (k + 1) * t.elements // 2) for i, t in enumerate(tensors) for k in (0, 1)
            ]
            return BucketPlan(groups, tuple(Chunk(*half) for half in halves))

    model = Chain([100, 300, 50, 400]).to("meta")
    units = units_of(model, [1e-3] * 3, [2e-3] * 3)
    job = job_of(model, units, Backwards())
    run(job, (4, 100), 1)
    engine: Any = job.kept("overlap")
    sent = engine.comm.sent
    sizes = [4 * 15000, 4 * 15000, 4 * 7500, 4 * 7500, 4 * 10000, 4 * 10000]
    assert [size for _, size, _, _ in sent] == sizes
    assert sent[0][2] == pytest.approx(3e-3 + 6e-3)  # forward, then all of backward
    for (_, size, start, stop), (_, _, following, _) in itertools.pairwise(sent):
        assert stop - start == pytest.approx(LINK.seconds(size))
        assert following == pytest.approx(stop)


def test_waiting_is_what_communication_shows() -> None:
    model = Chain([100, 300, 50, 400]).to("meta")
    units = units_of(model, [1e-3] * 3, [2e-3] * 3)
    job = job_of(model, units, PerLayer(0))
    begins = run(job, (4, 100), 5)
    job.drain()
    compute = sum(u.forward_s + u.backward_s + u.update_s for u in units)
    waited = [span for span in job.trace.spans if span.kind == "wait"]
    assert sum(s.stop - s.start for s in waited) == pytest.approx(job.clock.now() - 5 * compute)
    assert begins[-1] - begins[0] > 4 * compute


def brute_force(units: list[UnitTimes], tensors: list[Sized], link: LinkModel) -> float:
    """The best order of whole layers, of all there are."""
    groups = tuple((i,) for i in range(len(tensors)))
    orders = itertools.permutations(Chunk(i, 0, t.elements) for i, t in enumerate(tensors))
    return min(forecast(units, tensors, BucketPlan(groups, order), link).step_s for order in orders)


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(4, 12))]
)
def test_no_order_of_whole_layers_beats_the_search(seed: int) -> None:
    rng = random.Random(seed)
    n = 6
    units = [UnitTimes(f"u{i}", rng.uniform(1, 10) * 1e-3, rng.uniform(2, 20) * 1e-3) for i in range(n)]
    tensors = [Sized(i, e := rng.randrange(1000, 6_000_000), 4 * e) for i in range(n)]
    compute = sum(u.forward_s + u.backward_s for u in units)
    link = LinkModel(0.2e-3, sum(t.size for t in tensors) / compute / rng.uniform(0.5, 2.5))
    _, seen, _ = search(units, tensors, link)
    assert seen.step_s <= brute_force(units, tensors, link) * 1.01
    assert seen.step_s >= max(seen.compute_s, seen.link_s) * 0.99


def test_the_graded_groups_of_resnet50_are_those_of_the_record() -> None:
    with torch.device("meta"):
        model = resnet50()
    plan = Graded().plan(LayerIndex(model).tensors)
    assert [len(group) for group in plan.buckets] == [3, 21, 57, 80]
    assert sorted(i for group in plan.buckets for i in group) == list(range(161))
    slow = Graded(first=1, power=0.5).plan(LayerIndex(model).tensors)
    assert sorted(i for group in slow.buckets for i in group) == list(range(161))


def convolutions(model: nn.Module) -> tuple[list[UnitTimes], LinkModel]:
    """Every convolution takes as long as any other, norms a twentieth; communicating takes as long as computing."""
    big = {name: any(p.ndim > 1 for p in module.parameters()) for name, module in LayerIndex(model).modules}
    units = [UnitTimes(name, 2e-3, 4e-3) if big[name] else UnitTimes(name, 1e-4, 2e-4) for name in big]
    compute = sum(u.forward_s + u.backward_s for u in units)
    return units, LinkModel(50e-6, 4 * sum(p.numel() for p in model.parameters()) / compute)


@pytest.mark.parametrize("barrier", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_planned_groups_hide_what_the_other_policies_show(barrier: bool) -> None:
    with torch.device("meta"):
        model = cifar_resnet18()
    units, link = convolutions(model)
    compute = sum(u.forward_s + u.backward_s for u in units)

    def period(policy: Policy, next_forward: bool = True, steps: int = 3) -> float:
        job = job_of(model, units, policy, next_forward=next_forward, link=link)
        begins = run(job, (1, 3, 32, 32), steps)
        seen.append((job.kept("overlap"), begins))
        job.close()
        return begins[-1] - begins[-2]

    seen: list[tuple[Any, list[float]]] = []
    planned = period(Planned(warm=1, measure=1), steps=7)
    others = {policy: period(policy, not barrier) for policy in (OneBucket(), Graded(), Fixed())}
    assert planned < 0.85 * min(others.values())
    assert planned < 1.12 * compute
    engine, begins = seen[0]
    assert planned == pytest.approx(engine.forecast.step_s, rel=0.01)
    assert engine.link.latency_s == pytest.approx(link.latency_s, rel=1e-3)
    assert engine.link.bytes_per_s == pytest.approx(link.bytes_per_s, rel=1e-3)
    assert (engine.link.compute_share, engine.link.link_share) == pytest.approx((1.0, 1.0), rel=0.01)
    first, last = begins[3], begins[3] + compute
    beside = [max(0.0, min(stop, last) - max(start, first)) for _, _, start, stop in engine.comm.sent]
    assert sum(beside) > 0.95 * compute, "the link was idle while computing was measured beside transfers"


@pytest.mark.parametrize("evaluates", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_the_probe_finds_the_time_of_each_layer(evaluates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = cifar_resnet18()  # its shortcuts come first in forward, and are defined last
    names = [name for name, _ in LayerIndex(model).modules]
    units = [UnitTimes(name, 1e-3 * (1 + i / 50), 2e-3 * (1 + i / 30)) for i, name in enumerate(names)]
    seen: list[Any] = []

    def noted(found: list[UnitTimes], *given: Any, **named: Any) -> Any:
        seen.append(found)
        return search(found, *given, **named)

    monkeypatch.setattr("kasoku.distributed.ddp.step_profiler.search", noted)
    job = job_of(model, units, Planned(warm=1, measure=2), link=LinkModel(50e-6, 1e9))
    for _ in range(6):
        if evaluates:
            job.model.eval()
            job.model(torch.zeros((1, 3, 32, 32), device="meta"))
            job.model.train()
        run(job, (1, 3, 32, 32), 1)
    found = {u.name: (u.forward_s, u.backward_s) for u in seen[0]}
    assert found.pop("") == pytest.approx((0, 0), abs=1e-9)
    assert found == {u.name: pytest.approx((u.forward_s, u.backward_s)) for u in units}


@pytest.mark.parametrize(("share", "worth"), [(0.03, False), (0.5, True)])
def test_few_groups_it_is_where_little_is_to_be_hidden(share: float, worth: bool) -> None:
    units = [UnitTimes(f"u{i}", 2e-3, 4e-3) for i in range(12)]
    tensors = [Sized(i, 10**6, 4 * 10**6) for i in range(12)]
    link = LinkModel(1e-6, sum(t.size for t in tensors) / (share * 12 * 6e-3))
    plan, seen, late = search(units, tensors, link)
    assert (plan.policy != "planned: graded") == late == worth
    assert len(plan.buckets) == 2 or worth
    assert seen.step_s < 12 * 6e-3 * (1 + share) * 1.001


def test_groups_of_layers_hide_more_than_groups_of_blocks() -> None:
    with torch.device("meta"):
        model = cifar_resnet18()
    layers, link = convolutions(model)
    tensors = LayerIndex(model).tensors
    names = [name for name, block in blocks(model) if any(True for _ in block.parameters())]
    home = [next(i for i, name in enumerate(names) if f"{u.name}.".startswith(f"{name}.")) for u in layers]
    inside = [[u for u, h in zip(layers, home, strict=True) if h == i] for i in range(len(names))]
    coarse = [
        UnitTimes(name, sum(u.forward_s for u in some), sum(u.backward_s for u in some))
        for name, some in zip(names, inside, strict=True)
    ]
    _, by_layer, _ = search(layers, tensors, link)
    _, by_block, _ = search(coarse, [replace(t, unit=home[t.unit]) for t in tensors], link)
    assert by_layer.compute_s == pytest.approx(by_block.compute_s)
    assert by_layer.step_s < 0.97 * by_block.step_s


@pytest.mark.parametrize(
    ("alone_s", "beside_s", "rest_s", "sent_s", "kept"),
    [
        (1.0, 1 / 0.9, 1.25 - 0.8 / 0.9, 1.25, (0.9, 0.8)),  # under way all the time
        (1.0, 1.05, 0.0, 0.1, (0.5, 1.0)),  # over long before computing was
        (1.0, 0.98, 0.27, 1.25, (1.0, 1.0)),  # no loss at all
        (1.0, 1.5, 0.0, 0.1, (0.3, 1.0)),  # noise
    ],
)
def test_what_both_keep_of_their_speeds_is_that_of_the_model(
    alone_s: float, beside_s: float, rest_s: float, sent_s: float, kept: tuple[float, float]
) -> None:
    assert shares(alone_s, beside_s, rest_s, sent_s) == pytest.approx(kept)


def test_shares_are_those_by_which_the_forecast_slows_down() -> None:
    link = LinkModel(0.0, 1e6, compute_share=0.9, link_share=0.8)
    units, tensors = (
        [UnitTimes("a", 0.0, 1.0), UnitTimes("b", 0.0, 0.0)],
        [Sized(0, 1, 1), Sized(1, 1_250_000, 1_250_000)],
    )
    plan = BucketPlan(((1,), (0,)), (Chunk(0, 0, 1_250_000), Chunk(1, 0, 1)))
    seen = forecast(units, tensors, plan, link, next_forward=False, timeline=True)
    stop_s = {span.name: span.stop for span in seen.spans if span.kind in ("backward", "transfer")}
    assert shares(1.0, stop_s["a"], stop_s["bucket 0"] - stop_s["a"], 1.25) == pytest.approx((0.9, 0.8))
