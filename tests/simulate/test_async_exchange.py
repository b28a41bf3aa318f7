"""Exchanges of ranks at their own pace: closed forms, full links, the engine's groups."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from helpers.fair_share import seconds
from helpers.grids import covering
from kasoku.core import Comm, InputError, Job, Threads
from kasoku.distributed import Asynchronous, Fixed, Graded, PerLayer, Planned, Policy
from kasoku.models import cifar_resnet18, cifarnet
from kasoku.optim import sgd
from kasoku.simulate import ModelCosts, Sharing, Simulator, model_costs
from kasoku.simulate import collectives as allreduce
from kasoku.simulate.cluster import Cluster, ClusterNode, Gpu, Protocol, Racks
from kasoku.simulate.step import SimulatedStep

START, A, A_IN = 2e-6, 5e-6, 1e-6  # what a message waits, and takes between nodes and within one
B, B_IN = 5e9, 100e9  # of a NIC and of a GPU's port, in one direction
GPU = Gpu("any", 5.0, 0.3, 1, 512, 300, 2000)


def ideal(nodes: int, gpus: int = 1, nics: int = 1, racks: Racks | None = None, slower: float = 1) -> Cluster:
    plain = Protocol("plain", 1e6 * START, (1e6 * A_IN, 1e6 * A), (0.0, 0.0))
    node = ClusterNode(gpus, B_IN / 1e9, nics, B / 1e9 / slower)
    return Cluster("ideal", nodes, node, own_gpu=GPU, own_protocol=plain, racks=racks)


@cache
def small() -> ModelCosts:
    with torch.device("meta"):
        return model_costs("cifar_resnet18", cifar_resnet18(), (3, 32, 32))


def stepped(pace: Asynchronous, cluster: Cluster | None = None, spread: float = 0.0) -> SimulatedStep:
    return Simulator(cluster or ideal(8), small(), Sharing(asynchronous=pace), spread).step(8, 800)


@pytest.mark.parametrize("p", [2, 3, 48])
def test_an_exchange_between_nodes_takes_its_closed_form(p: int) -> None:
    n = 51e6
    assert allreduce.exchange_link(ideal(p), p).seconds(n) == pytest.approx(
        2 * (START + A) + 2 * (p - 1) / p * n / B, rel=1e-12
    )


@pytest.mark.parametrize("g", [2, 8])
def test_an_exchange_within_a_node_takes_its_closed_form(g: int) -> None:
    n = 51e6
    expected = 2 * (START + A_IN) + 2 * (g - 1) / g * n / B_IN
    assert allreduce.exchange_link(ideal(2, g), g).seconds(n) == pytest.approx(expected, rel=1e-12)


def test_one_gpu_exchanges_nothing() -> None:
    assert allreduce.exchange_link(ideal(2), 1).seconds(1e9) == 0


@pytest.mark.parametrize(
    ("nodes", "nics", "racks"),
    [
        (1, 1, None),
        (2, 1, None),
        (2, 4, None),
        (4, 1, None),
        (4, 2, None),
        (4, 1, Racks(2, 8.0)),
        (4, 1, Racks(2, 80.0)),  # the NICs are slower
        (4, 2, Racks(3, 8.0)),  # the second one not full
        (8, 1, Racks(3, 4.0)),
    ],
)
def test_the_busiest_link_is_full_until_the_last_of_all_flows_has_arrived(
    nodes: int, nics: int, racks: Racks | None
) -> None:
    cluster = ideal(nodes, 8 // nodes, nics, racks)
    pairs = [(a, b) for a in range(8) for b in range(8) if a != b]
    n = 51e6
    took = 2 * allreduce.exchange(cluster, 8).byte_s * n
    assert took == pytest.approx(seconds(cluster, [(a, b, 2 * n / 8) for a, b in pairs]), rel=1e-9)
    busy_s: Counter[tuple[str, int]] = Counter()
    for a, b in pairs:
        for kind, number, rate in cluster.route(a, b):
            busy_s[kind, number] += 2 * n / 8 / rate
    assert max(busy_s.values()) == pytest.approx(took, rel=1e-9)


@pytest.mark.parametrize(("hidden", "every", "wire"), covering([True, False], [1, 2, 3], ["fp32", "bf16"]))
def test_what_of_an_exchange_shows_is_its_closed_form(hidden: bool, every: int, wire: Any) -> None:
    step = stepped(Asynchronous(hidden=hidden, every=every, wire=wire))
    groups = len(step.inputs.plan.buckets)
    elements = sum(t.elements for t in small().tensors)
    assert elements == sum(p.stop - p.start for p in step.inputs.plan.order)
    exchange = groups * 2 * (START + A) + 2 * 7 / 8 * elements * (4 if wire == "fp32" else 2) / B
    shown = max(0.0, exchange - every * step.compute_s) / every if hidden else exchange / every
    assert step.exposed_s == pytest.approx(shown, rel=1e-12, abs=1e-12)
    assert step.link_s == pytest.approx(exchange / every, rel=1e-12)
    assert step.step_s == pytest.approx(step.compute_s + shown, rel=1e-12)
    assert step.images_per_s == pytest.approx(800 / step.step_s, rel=1e-12)


def test_some_exchanges_show_and_some_are_hidden_altogether() -> None:
    once, seldom = stepped(Asynchronous(every=1)), stepped(Asynchronous(every=3))
    assert once.exposed_s > 0 == seldom.exposed_s
    assert stepped(Asynchronous(every=1, hidden=False)).exposed_s > once.exposed_s


@pytest.mark.parametrize("slower", [1, 4, 20, 1000])
def test_a_rank_makes_as_many_steps_as_an_exchange_lasts(slower: int) -> None:
    cluster = ideal(8, slower=slower)
    pace = Asynchronous(buckets=Fixed(2**23))
    once = stepped(replace(pace, every=1), cluster)
    exchange_s = once.link_s / once.compute_s
    steps = min(16, max(1, math.ceil(exchange_s)))
    found = stepped(pace, cluster)
    assert found.step_s == pytest.approx(stepped(replace(pace, every=steps), cluster).step_s, rel=1e-12)
    assert (found.exposed_s == 0) == (exchange_s <= 16)
    assert stepped(replace(pace, hidden=False), cluster).link_s == pytest.approx(once.link_s, rel=1e-12)


def test_nobody_waits_for_the_slowest_unless_there_is_a_bound() -> None:
    free, bound = (stepped(Asynchronous(every=1, max_staleness=ahead), spread=0.05) for ahead in (None, 4))
    together = Simulator(ideal(8), small(), spread=0.05).step(8, 800)
    assert free.straggler_s == 0
    assert bound.straggler_s == pytest.approx(together.straggler_s, rel=1e-12)
    assert bound.straggler_s > 0
    assert free.compute_s == bound.compute_s
    assert bound.exposed_s < free.exposed_s  # slower steps hide more


@pytest.mark.parametrize("policy", [Graded(least_bytes=2**14), PerLayer(), Planned()])
@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_the_groups_are_those_of_the_engine(policy: Policy, wire: Any) -> None:
    pace = Asynchronous(buckets=policy, wire=wire)

    def built() -> torch.nn.Module:
        return cifarnet(widths=(32, 64))

    def rank(comm: Comm) -> list[int]:
        job = Job(built(), lambda m: sgd(m, lr=0.1), comm=comm).apply(pace)
        sizes = [group.message.nbytes for group in job.kept("asynchronous").weights.groups]
        job.close()
        return sizes

    theirs, others = Threads(2).run(rank)
    with torch.device("meta"):
        net = model_costs("cifarnet", built(), (3, 32, 32))
    step = Simulator(ideal(2), net, Sharing(asynchronous=pace)).step(2, 64)
    assert step.inputs.sizes() == theirs == others


def test_a_faster_network_shows_less_of_an_exchange() -> None:
    slow, fast = (stepped(Asynchronous(every=1), ideal(8, slower=slower)) for slower in (2, 1))
    assert slow.exposed_s > fast.exposed_s > 0


@pytest.mark.parametrize("hidden", [True, False])
def test_an_exchange_overlaps_all_parts_of_a_share(hidden: bool) -> None:
    simulator = Simulator(ideal(8), small(), Sharing(asynchronous=Asynchronous(every=1, hidden=hidden)), spread=0.0)
    whole, parts = simulator.step(8, 800), simulator.step(8, 1600, parts=2)
    assert parts.compute_s == pytest.approx(2 * whole.compute_s, rel=1e-12)
    assert parts.link_s == whole.link_s
    shown = parts.link_s - parts.compute_s if hidden else parts.link_s
    assert parts.exposed_s == pytest.approx(max(0.0, shown), rel=1e-9)


def test_what_is_no_exchange_among_equals_is_one_clear_line() -> None:
    simulator = Simulator(ideal(8), small(), Sharing(asynchronous=Asynchronous(max_staleness=0)))
    with pytest.raises(InputError, match="asynchronous ranks are simulated") as caught:
        simulator.step(8, 800)
    assert "\n" not in str(caught.value)
    assert replace(simulator, sharing=Sharing(asynchronous=Asynchronous())).step(8, 800).step_s > 0
