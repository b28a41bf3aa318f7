"""What slows a step besides links: each cause against its closed form."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from statistics import NormalDist

import pytest
import torch

from kasoku.distributed import Asynchronous, Fixed, Graded, OneBucket, PerLayer
from kasoku.models import alexnet, cifar_resnet18
from kasoku.simulate import Cluster, ModelCosts, Sharing, Simulator, load, model_costs
from kasoku.simulate.cluster import ClusterNode, Gpu, Protocol
from kasoku.simulate.collectives import exchange, link
from kasoku.simulate.from_recipe import spaced, sweep
from kasoku.simulate.step import extremes, slowest

GPU = Gpu("g", 1.0, 1.0, 1, 1000, tflops=10.0, memory_gb_s=1000)


@cache
def small() -> ModelCosts:
    with torch.device("meta"):
        return model_costs("cifar_resnet18", cifar_resnet18(), (3, 32, 32))


def ideal(gpu: Gpu = GPU, *, nodes: int = 8, node: ClusterNode | None = None, cycle_ms: float = 0.0) -> Cluster:
    """Nodes of one GPU whose messages have no latency."""
    plain = Protocol("plain", 0.0, (0.0, 0.0), (0.0, 0.0))
    return Cluster("c", nodes, node or ClusterNode(1, 0.0, 1, 10.0), own_gpu=gpu, own_protocol=plain, cycle_ms=cycle_ms)


def test_a_hidden_transfer_costs_the_computing_that_it_slows() -> None:
    free, step = (
        Simulator(ideal(replace(GPU, compute_share=share)), small(), Sharing(PerLayer())).step(8, 8 * 800)
        for share in (1.0, 0.75)
    )
    hidden_s = step.link_s - free.exposed_s  # all but the last group
    assert 0 < free.exposed_s < 0.1 * step.link_s
    assert step.exposed_s == pytest.approx(free.exposed_s + 0.25 * hidden_s, rel=1e-9)
    assert step.compute_s == free.compute_s


def test_a_transfer_after_backward_slows_nothing() -> None:
    one = [Simulator(ideal(replace(GPU, compute_share=s)), small(), Sharing(OneBucket())) for s in (1.0, 0.5)]
    assert one[0].step(8, 800).step_s == pytest.approx(one[1].step(8, 800).step_s, rel=1e-12)


@pytest.mark.parametrize("ranks", [2, 64, 2048])
def test_jitter_adds_to_the_spread_as_independent_numbers_do(ranks: int) -> None:
    cluster = ideal(replace(GPU, spread=0.03, jitter=0.04), nodes=ranks)
    step = Simulator(cluster, small()).step(ranks, ranks * 100)
    assert step.straggler_s == pytest.approx((slowest(0.05, ranks) - 1) * step.compute_s, rel=1e-9)


def test_ranks_with_a_bound_wait_for_slow_gpus_but_not_for_slow_steps() -> None:
    cluster = ideal(replace(GPU, spread=0.03, jitter=0.04))
    bound = Simulator(cluster, small(), Sharing(asynchronous=Asynchronous(every=1, max_staleness=4))).step(8, 800)
    assert bound.straggler_s == pytest.approx((slowest(0.03, 8) - 1) * bound.compute_s, rel=1e-9)


@pytest.mark.parametrize("ranks", [2, 8, 1024])
def test_all_wait_for_the_last_rank_that_looks_for_gradients(ranks: int) -> None:
    plain, polled = (
        Simulator(ideal(nodes=ranks, cycle_ms=ms), small(), Sharing(Graded()), 0.0).step(ranks, ranks * 100)
        for ms in (0.0, 0.2)
    )
    assert polled.exposed_s - plain.exposed_s == pytest.approx(0.2e-3 * ranks / (ranks + 1), rel=1e-9)
    generator = torch.Generator().manual_seed(0)
    drawn = 0.2e-3 * torch.rand(4000, ranks, generator=generator, dtype=torch.float64).amax(1).mean()
    assert polled.exposed_s - plain.exposed_s == pytest.approx(float(drawn), rel=0.01)


def test_the_next_forward_hides_the_polling_and_one_gpu_polls_nobody() -> None:
    late = [Simulator(ideal(cycle_ms=ms), small(), Sharing(PerLayer(), True), 0.0).step(8, 6400) for ms in (0.0, 0.2)]
    assert late[0].step_s == late[1].step_s
    assert Simulator(ideal(cycle_ms=0.2), small(), spread=0.0).step(1, 100).exposed_s == pytest.approx(0.0, abs=1e-12)


def test_two_gpus_share_the_pcie_link_to_their_adapter() -> None:
    wide = ClusterNode(4, 1000.0, 2, 12.0)
    for reducer_gpus in (8, 32):
        free, shared, slow = (
            link(ideal(node=node), reducer_gpus).seconds(1e9)
            for node in (wide, replace(wide, pcie_gb_s=6.0), replace(wide, nic_gb_s=6.0))
        )
        assert shared == pytest.approx(slow, rel=1e-12)
        assert shared == pytest.approx(2 * free, rel=1e-9)
    sent = [exchange(ideal(node=node), 32).byte_s for node in (wide, replace(wide, pcie_gb_s=6.0))]
    assert sent[1] == pytest.approx(2 * sent[0], rel=1e-9)
    assert load("abci").node.pcie_gb_s == 12.0


@pytest.mark.parametrize("ranks", [1, 8, 512])
@pytest.mark.parametrize("chance", [0.1, 0.9])
def test_no_rank_is_slower_than_a_chance_allows(ranks: int, chance: float) -> None:
    factor = slowest(0.04, ranks, chance)
    assert NormalDist().cdf(math.log(factor) / 0.04) ** ranks == pytest.approx(chance, rel=1e-9)


def test_one_rank_waits_for_nobody() -> None:
    assert slowest(0.05, 1) == 1.0


@pytest.mark.parametrize(("name", "gpus"), [("abci", 2048), ("dgx-a100", 64), ("mn1", 1024), ("tsubame25", 3)])
def test_a_step_lies_between_its_fast_and_its_slow_case(name: str, gpus: int) -> None:
    simulator = Simulator(load(name), small(), Sharing(Graded()))
    fast, slow = (case.step(gpus, gpus * 64).step_s for case in extremes(simulator))
    assert fast < simulator.step(gpus, gpus * 64).step_s < slow


def test_the_range_has_the_jitter_of_both_releases_and_nothing_slowed_in_its_fast_case() -> None:
    gpu = load("abci").device
    fast, slow = (case.cluster.device for case in extremes(Simulator(load("abci"), small())))
    assert fast.jitter < gpu.jitter < slow.jitter
    assert fast.compute_share == 1.0 > gpu.compute_share > slow.compute_share
    assert slow.alpha_ms / fast.alpha_ms == pytest.approx(slow.beta_ms / fast.beta_ms)
    assert fast.alpha_ms < gpu.alpha_ms < slow.alpha_ms


def test_weights_of_other_networks_pass_through_memory_in_each_step() -> None:
    with torch.device("meta"):
        net = model_costs("alexnet", alexnet(), (3, 224, 224))
    cluster = load("tsubame25")
    seconds = [Simulator(cluster, net).step(1, images).compute_s for images in (1, 256)]
    image_s = (seconds[1] - seconds[0]) / 255
    elements = sum(t.elements for t in net.tensors)
    assert seconds[0] - image_s == pytest.approx(32 * elements / (1e9 * cluster.device.memory_gb_s), rel=1e-6)
    measured = replace(net, name="resnet50", layers=tuple(replace(x, products=0, outputs=1) for x in net.layers))
    assert not measured.measured(cluster.device)  # the name alone does not make a network the measured one


def test_a_sweep_varies_one_thing_and_holds_the_others() -> None:
    ways = {
        "own": Simulator(ideal(), small(), Sharing(Graded()), 0.0),
        "DDP": Simulator(ideal(), small(), Sharing(Fixed())),
    }
    varied = {axis: sweep(ways, axis, [2, 4], gpus=8, batch=800)["own"] for axis in ("gpus", "strong", "images")}
    at = {axis: [(step.gpus, step.images) for _, step in line] for axis, line in varied.items()}
    assert at == {"gpus": [(2, 200), (4, 400)], "strong": [(2, 800), (4, 800)], "images": [(8, 16), (8, 32)]}
    sizes = sweep(ways, "bucket_mib", [1, 8], gpus=8, batch=800)
    groups = {name: [len(step.inputs.plan.buckets) for _, step in line] for name, line in sizes.items()}
    assert groups["own"][0] == groups["own"][1]
    assert groups["DDP"][0] > groups["DDP"][1] > 1
    batch = sweep(ways, "batch", [80, 160], gpus=8, batch=800)["own"]
    assert [(step.gpus, step.images) for _, step in batch] == [(8, 80), (8, 160)]


def test_spaced_numbers_have_both_ends_and_are_enough_or_all() -> None:
    assert spaced(range(1, 6)) == [1, 2, 3, 4, 5]
    found = spaced(range(16, 100_001))
    assert 60 <= len(found) <= 121
    assert (found[0], found[-1]) == (16, 100_000)
