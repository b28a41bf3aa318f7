"""What a reducer makes of an all-reduce: groups as the real engine has them, bytes as they are sent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers.grids import covering
from helpers.virtual_comm import Emulate, SimComm
from kasoku.core import InputError, Job
from kasoku.distributed import (
    Fixed,
    Graded,
    Hierarchical,
    LowRank,
    Mean,
    OneBucket,
    Overlap,
    PerLayer,
    Planned,
    Policy,
    Reducer,
    Wire,
)
from kasoku.distributed.ddp.bucket_plan import search
from kasoku.distributed.ddp.cost_model import LinkModel
from kasoku.models import cifar_resnet18
from kasoku.optim import sgd
from kasoku.simulate import Cluster, ModelCosts, Sharing, Simulator, load, model_costs
from kasoku.simulate import collectives as allreduce
from kasoku.simulate.cluster import ClusterNode, Gpu, Protocol

MIB = 2**20
GPUS = 64
N_BYTES = 51e6


@pytest.fixture(scope="module")
def net() -> ModelCosts:
    with torch.device("meta"):
        return model_costs("cifar_resnet18", cifar_resnet18(), (3, 32, 32))


class Own(Mean):
    """A user's own way, which may send anything."""


def slow() -> Cluster:
    return replace(load("dgx-a100"), node=ClusterNode(8, 5.0, 1, 0.5))  # communicating takes about as long as computing


def ideal(nodes: int, gpus: int, nics: int = 0) -> Cluster:
    """Nodes of 100 GB/s within, and so many NICs of 10 GB/s, 0: one a GPU."""
    plain = Protocol("plain", 0.0, (1.0, 5.0), (1.0, 5.0))
    gpu = Gpu("any", 5.0, 0.3, 1, 512, 300, 2000)
    return Cluster("ideal", nodes, ClusterNode(gpus, 100.0, nics or gpus, 10.0), own_gpu=gpu, own_protocol=plain)


def engine_of(comm: SimComm, units: Any, overlap: Overlap) -> tuple[Job, Any]:
    with torch.device("meta"):
        model = cifar_resnet18()
    job = Job(model, lambda m: sgd(m, lr=0.1), comm=comm, loss=lambda out, y: out.sum())
    job.apply(Emulate(tuple(units)), overlap)
    return job, job.kept("overlap")


@pytest.mark.parametrize(
    ("policy", "reducer"),
    covering(
        [OneBucket(), Graded(), Fixed(MIB, MIB // 4), Fixed(), PerLayer()],
        [Mean(), Wire(), Hierarchical(8), Hierarchical(8, Wire())],
        together=1,
    ),
)
def test_the_simulated_groups_are_those_of_the_engine(policy: Policy, reducer: Reducer, net: ModelCosts) -> None:
    step = Simulator(slow(), net, Sharing(policy, reducer=reducer)).step(GPUS, GPUS * 200)
    _, engine = engine_of(SimComm(GPUS, LinkModel(1e-5, 1e9)), step.inputs.units, Overlap(policy, reducer=reducer))
    assert (step.inputs.plan.buckets, step.inputs.plan.order) == (engine.layout.plan.buckets, engine.layout.plan.order)
    assert step.inputs.sizes() == [4 * (piece.stop - piece.start) for piece in engine.layout.plan.order]


def test_groups_planned_by_what_is_sent_would_be_others(net: ModelCosts) -> None:
    for policy in (Graded(least_bytes=4 * MIB), Fixed(MIB, MIB // 4), Fixed()):
        simulators = [Simulator(slow(), sized, Sharing(policy)) for sized in (net, net.with_gradients(2))]
        own, sent = (simulator.step(GPUS, GPUS * 200).inputs for simulator in simulators)
        assert own.plan.buckets != sent.plan.buckets
        assert sum(own.sizes()) == 2 * sum(sent.sizes())


def test_a_search_is_that_of_fp32_gradients_over_the_link_of_wire(net: ModelCosts) -> None:
    linear = replace(slow(), protocols=("Simple",), node=ClusterNode(GPUS, 0.5, 1, 0.5))  # in a node, only rings
    sharing = Sharing(Planned(), next_forward=True, reducer=Wire())
    course = Simulator(linear, net, sharing).step(GPUS, GPUS * 200).inputs
    ((_, half),) = allreduce.link(linear, GPUS, Wire()).choices
    plan, seen, late = search(course.units, net.tensors, half, next_forward=True)
    assert (course.plan.buckets, course.plan.order, course.late) == (plan.buckets, plan.order, late)
    assert course.forecast().step_s == pytest.approx(seen.step_s, rel=1e-9)


@pytest.mark.parametrize("node", [4, 0])
def test_between_nodes_a_mean_takes_rings_of_its_parts(node: int) -> None:
    nodes, g = 8, 4
    seen = allreduce.link(ideal(nodes, g), nodes * g, Hierarchical(node))
    inside = (g - 1) * 1e-6 + (g - 1) / g * N_BYTES / 100e9
    ring = 2 * (nodes - 1) * 5e-6 + 2 * (nodes - 1) / nodes * N_BYTES / g / 10e9
    assert seen.choices[0][1].seconds(N_BYTES) == pytest.approx(2 * inside + ring, rel=1e-12)
    assert seen.choice(N_BYTES).startswith("hierarchical, ")


@pytest.mark.parametrize(("nodes", "g", "nics"), [(8, 1, 1), (8, 4, 4), (4, 8, 2), (4, 8, 8)])
def test_sums_in_fp32_take_an_all_to_all_and_an_all_gather(nodes: int, g: int, nics: int) -> None:
    """Of n bytes in 16 bits a node sends g (p - g) / p n by the one, and (p - 1) / p n by the other."""
    cluster, p, half = ideal(nodes, g, nics), nodes * g, N_BYTES / 2
    seen = allreduce.link(cluster, p, Wire())
    to_all = 5e-6 + g * (p - g) / p * half / nics / 10e9
    gather = (nodes - 1) * 5e-6 + (p - nodes) * 1e-6 + (p - 1) / p * half / nics / 10e9
    assert seen.seconds(N_BYTES) == pytest.approx(to_all + gather, rel=1e-12)
    assert seen.choice(N_BYTES) == "all-to-all and all-gather, plain"
    assert len(seen.choices) == 1  # there is no tree of them
    plain = allreduce.link(cluster, p)
    assert (g == 1) == (seen.seconds(1e12) == pytest.approx(plain.seconds(0.5e12), rel=1e-3))  # as many bytes a link


def test_within_a_node_sums_in_fp32_move_as_many_bytes_as_a_ring() -> None:
    seen = allreduce.link(ideal(2, 4), 4, Wire()).seconds(N_BYTES)
    assert seen == pytest.approx((1 + 3) * 1e-6 + 2 * 3 / 4 * N_BYTES / 2 / 100e9, rel=1e-12)


def test_sums_in_fp32_may_take_longer_than_no_compression() -> None:
    cluster = load("dgx-a100")
    fp32, plain = (allreduce.link(cluster, 512, reducer).seconds(1e9) for reducer in (Wire(), Mean()))
    assert fp32 > plain


@pytest.mark.parametrize(("node", "nics"), [(4, 4), (4, 2), (0, 4)])
def test_between_nodes_sums_in_fp32_are_those_of_columns(node: int, nics: int) -> None:
    nodes, g = 8, 4
    seen = allreduce.link(ideal(nodes, g, nics), nodes * g, Hierarchical(node, Wire()))
    inside = (g - 1) * 1e-6 + (g - 1) / g * N_BYTES / 100e9
    across = 2 * (nodes - 1) / nodes * N_BYTES / 2 / nics / 10e9  # of g parts of a g-th, over so many NICs
    hops = (1 + nodes - 1) * 5e-6
    assert seen.seconds(N_BYTES) == pytest.approx(2 * inside + hops + across, rel=1e-12)
    assert seen.choice(N_BYTES) == "hierarchical, all-to-all and all-gather across, plain"


def test_nodes_of_several_machines_make_a_torus() -> None:
    cluster = ideal(16, 1)
    seen = allreduce.link(cluster, 16, Hierarchical(4))
    row = 3 * 5e-6 + 3 / 4 * N_BYTES / 10e9
    column = 2 * 3 * 5e-6 + 2 * 3 / 4 * N_BYTES / 4 / 10e9
    assert seen.choices[0][1].seconds(N_BYTES) == pytest.approx(2 * row + column, rel=1e-12)
    assert seen.choice(N_BYTES).startswith("hierarchical in rows of 4")


def test_nodes_of_one_rank_or_of_all_ranks_are_no_hierarchy() -> None:
    one = ideal(8, 4)
    assert allreduce.link(one, 4, Hierarchical(0, Wire())) == allreduce.link(one, 4, Mean())
    assert allreduce.link(one, 8, Hierarchical(8, Wire())) == allreduce.link(one, 8, Mean())
    assert allreduce.link(one, 8, Hierarchical(1, Wire())) == allreduce.link(one, 8, Wire())
    assert allreduce.link(one, 1, Hierarchical(4)).seconds(N_BYTES) == 0


def test_an_unknown_reducer_or_unequal_nodes_are_one_clear_line() -> None:
    for reducer, said in (
        (Hierarchical(4, Hierarchical(2)), "reducer Hierarchical across=Hierarchical: its time is not known"),
        (Own(), "reducer Own: its time is not known: Mean, Wire, and Hierarchical"),
        (LowRank(), "reducer LowRank: its time"),
        (Hierarchical(4, LowRank()), "reducer Hierarchical across=LowRank: its time"),
        (Hierarchical(4, Own()), "reducer Hierarchical across=Own: its time"),
        (Hierarchical(3), "equal"),
    ):
        with pytest.raises(InputError, match=said) as caught:
            allreduce.link(ideal(8, 4), 8, reducer)
        assert "\n" not in str(caught.value)
