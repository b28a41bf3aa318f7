"""The simulated step is the real engine's: its groups, their order, its time."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from helpers.grids import covering
from helpers.virtual_comm import Emulate, SimComm
from kasoku.core import InputError, Job
from kasoku.distributed import Fixed, Graded, Hierarchical, OneBucket, Overlap, PerLayer, Planned, Policy
from kasoku.distributed.batchnorm.grouped import norms
from kasoku.models import cifar_resnet18, resnet50
from kasoku.optim import sgd
from kasoku.simulate import ModelCosts, Sharing, Simulator, load, model_costs
from kasoku.simulate import collectives as allreduce
from kasoku.simulate.cluster import ClusterNode
from kasoku.simulate.compute_model import MeasuredTimes
from kasoku.simulate.step import SimulatedStep


@cache
def resnet() -> ModelCosts:
    with torch.device("meta"):
        return model_costs("resnet50", resnet50(), (3, 224, 224))


@cache
def small() -> ModelCosts:
    with torch.device("meta"):
        return model_costs("cifar_resnet18", cifar_resnet18(), (3, 32, 32))


def slow_network() -> Any:
    cluster = load("dgx-a100")
    return replace(cluster, node=ClusterNode(8, 5.0, 1, 0.5))  # communicating takes about as long as computing


@pytest.mark.parametrize(
    ("policy", "next_forward"),
    covering([OneBucket(), Graded(), Fixed(2**20, 2**18), PerLayer()], [True, False], together=1),
)
def test_the_engine_sends_the_same_groups_at_the_same_moments(policy: Policy, next_forward: bool) -> None:
    sharing = Sharing(policy, next_forward)
    step = Simulator(slow_network(), small(), sharing).step(64, 64 * 200)
    with torch.device("meta"):
        model = cifar_resnet18()
    comm = SimComm(64, step.inputs.link)
    job = Job(model, lambda m: sgd(m, lr=0.1), comm=comm, loss=lambda out, y: out.sum())
    job.apply(Emulate(tuple(step.inputs.units)), Overlap(policy, next_forward=next_forward))
    engine: Any = job.kept("overlap")
    begins, sent_before = [], 0
    for _ in range(4):
        begins.append(job.clock.now())
        sent_before = len(engine.comm.sent)
        out = job.model(torch.zeros((1, 3, 32, 32), device="meta", requires_grad=True))
        job.loss(out, torch.zeros(1)).backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
    ours = [span for span in step.inputs.forecast(timeline=True).spans if span.kind == "transfer"]
    theirs = engine.comm.sent[sent_before:]
    assert [size for _, size, _, _ in theirs] == [span.bytes for span in ours]
    first, zero = theirs[0][2], ours[0].start
    if (
        policy != OneBucket()
    ):  # one group is planned in forward order where the shortcuts run late: nothing to tell apart
        assert [start - first for _, _, start, _ in theirs] == pytest.approx([s.start - zero for s in ours], abs=1e-9)
    periods = [b - a for a, b in itertools.pairwise(begins)][1:]
    assert sum(periods) / len(periods) == pytest.approx(step.step_s, rel=1e-9)
    assert step.exposed_s > 0


@pytest.mark.parametrize(
    ("policy", "next_forward"), covering([OneBucket(), Graded(), Fixed(), PerLayer()], [True, False], together=1)
)
def test_the_timeline_ends_when_the_recursion_does(policy: Policy, next_forward: bool) -> None:
    for cluster in (load("dgx-a100"), slow_network()):
        step = Simulator(cluster, resnet(), Sharing(policy, next_forward)).step(512, 512 * 50)
        drawn = step.inputs.forecast(timeline=True).spans
        assert max(span.stop for span in drawn) == pytest.approx(step.step_s, rel=1e-9)
        waited, computed = (
            sum(span.stop - span.start for span in drawn if (span.kind == "exposed") == exposed and span.kind in shown)
            for exposed, shown in ((True, ("exposed",)), (False, ("forward", "backward", "update")))
        )
        slowed = computed - step.compute_s - step.straggler_s  # by transfers beside it
        assert waited + slowed == pytest.approx(step.exposed_s, rel=1e-9, abs=1e-12)
        assert (slowed > 1e-9) == (policy != OneBucket())
        assert sum(s.stop - s.start for s in drawn if s.kind == "transfer") == pytest.approx(step.link_s, rel=1e-9)


def test_items_of_a_step_are_all_of_it_and_follow_what_changes() -> None:
    simulator = Simulator(load("abci"), resnet(), Sharing(reducer=Hierarchical()))
    step = simulator.step(2048, 86016)
    alone = simulator.step(1, 42)
    assert (alone.exposed_s, alone.straggler_s) == pytest.approx((0.0, 0.0), abs=1e-12)  # it waits for nobody
    gpu = load("abci").device
    assert alone.compute_s == pytest.approx(1e-3 * (gpu.alpha_ms + 42 * gpu.beta_ms), rel=1e-9)
    assert step.compute_s == pytest.approx(alone.compute_s, rel=1e-9)
    assert step.step_s > step.compute_s + step.straggler_s > alone.step_s
    faster = Simulator(load("abci", ["node.nic_gb_s=24", "latency=0.5"]), resnet(), simulator.sharing).step(2048, 86016)
    assert faster.exposed_s < step.exposed_s
    assert faster.compute_s == step.compute_s
    assert step.link_s > faster.link_s


def test_without_differences_between_ranks_nothing_is_waited_for() -> None:
    plain = Simulator(load("dgx-a100"), resnet(), spread=0.0).step(64, 64 * 100)
    assert plain.straggler_s == pytest.approx(0.0, abs=1e-12)


def test_the_network_is_known_by_its_layers_work() -> None:
    net = resnet()
    assert sum(layer.products for layer in net.layers) == pytest.approx(4.089e9, rel=1e-3)
    assert sum(t.elements for t in net.tensors) == 25_557_032
    assert len(net.tensors) == 161
    late = sum(layer.products for layer in net.layers if layer.name.startswith(("layer4", "fc")))
    assert late / sum(layer.products for layer in net.layers) == pytest.approx(0.198, abs=0.002)


@pytest.mark.parametrize(("gpus", "batch", "said"), [(64, 63, "at least 64; raise"), (5000, 9000, "are available")])
def test_what_cannot_be_shared_is_one_clear_line(gpus: int, batch: int, said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        Simulator(load("dgx-a100"), resnet()).step(gpus, batch)
    assert "\n" not in str(caught.value)


def test_a_share_in_parts_hides_communication_behind_the_last_part() -> None:
    simulator = Simulator(slow_network(), resnet(), spread=0.0)
    whole, part = simulator.step(64, 64 * 40, parts=4), simulator.step(64, 64 * 10)
    assert whole.compute_s == pytest.approx(4 * part.compute_s)
    assert whole.exposed_s == pytest.approx(part.exposed_s)


def profile(blocks: dict[str, tuple[float, float]], **more: float) -> MeasuredTimes:
    """Of steps of 8 images."""
    return MeasuredTimes((8,), {name: ((0, f / 8), (0, b / 8)) for name, (f, b) in blocks.items()}, **more)


def test_what_a_block_without_parameters_takes_is_the_layers_beside_it() -> None:
    bare = {layer.name: (1e-3, 2e-3) for layer in small().layers}
    conv, *others = bare.items()
    blocks = {"pad": (0.5, 0.25), conv[0]: conv[1], "relu": (1.0, 3.0), "pool": (0.25, 0.5), **dict(others)}
    simulator = Simulator(load("dgx-a100"), small(), profile=profile(blocks))
    first, *units = simulator.units(16)
    assert (first.forward_s, first.backward_s) == pytest.approx((2 * 1.751, 2 * 3.752))
    assert [u.forward_s for u in units] == pytest.approx([2e-3] * len(units))
    assert [u.backward_s for u in units] == pytest.approx([4e-3] * len(units))


def test_a_share_in_parts_is_updated_once() -> None:
    times = {layer.name: (1e-3, 2e-3) for layer in small().layers}
    cluster = load("dgx-a100")
    step = Simulator(cluster, small(), spread=0.0, profile=profile(times, update_s=0.5)).step(8, 8 * 32, parts=4)
    assert step.compute_s == pytest.approx(4 * 3e-3 * len(times) + 0.5)
    assert step.straggler_s == pytest.approx(0.0, abs=1e-12)


def test_batch_norms_over_ranks_wait_both_ways_in_each_part() -> None:
    simulator = Simulator(load("dgx-a100"), small(), Sharing(OneBucket()), 0.0, norm_batch=8)
    own, across = simulator.step(64, 64 * 16, parts=2), replace(simulator, norm_batch=16).step(64, 64 * 16, parts=2)
    gather = allreduce.fastest(simulator.cluster, [("all-gather", allreduce.gather(simulator.cluster, 64))])
    channels = [module.num_features for module in norms(cifar_resnet18())]
    assert own.norms_s == 0
    assert across.norms_s == pytest.approx(2 * 2 * sum(gather.seconds(64 * 2 * 4 * c) for c in channels))
    assert across.exposed_s - own.exposed_s == pytest.approx(across.norms_s)
    assert (across.compute_s, across.straggler_s) == (own.compute_s, own.straggler_s)
    assert replace(simulator, norm_batch=16).step(1, 16, parts=2).norms_s == 0


def test_a_network_of_as_much_work_by_another_name_takes_the_measured_time() -> None:
    simulator = Simulator(load("dgx1-v100"), resnet(), spread=0.0)
    other = replace(simulator, net=replace(resnet(), name="mine"))
    assert other.step(1, 64).compute_s == pytest.approx(simulator.step(1, 64).compute_s)
    doubled = tuple(replace(one, products=2 * one.products, outputs=2 * one.outputs) for one in resnet().layers)
    heavier = replace(simulator, net=replace(resnet(), layers=doubled)).step(1, 64).compute_s  # the name is the same
    gpu = simulator.cluster.device
    assert heavier == pytest.approx(1e-3 * (gpu.alpha_ms + 2 * 64 * gpu.beta_ms))


def test_a_searched_plan_is_never_slower_than_the_one_it_replaces() -> None:
    planned = Simulator(slow_network(), small(), Sharing(Planned(), next_forward=True)).step(64, 96_000)
    graded = Simulator(slow_network(), small(), Sharing(Graded())).step(64, 96_000)
    assert planned.step_s < graded.step_s
    drawn = planned.inputs.forecast(timeline=True).spans
    assert max(span.stop for span in drawn) == pytest.approx(planned.step_s, rel=1e-9)


def test_a_search_is_the_same_however_slow_the_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def steps() -> SimulatedStep:
        return Simulator(slow_network(), small(), Sharing(Planned(), next_forward=True)).step(64, 64 * 200)

    fast = steps()
    monkeypatch.setattr("time.monotonic", itertools.count(0.0, 100.0).__next__)
    assert steps().inputs.plan == fast.inputs.plan
