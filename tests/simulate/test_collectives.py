"""On networks without contention the simulator takes the closed forms; with it no link carries more than its rate."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from helpers.fair_share import rates, routed_s, seconds
from kasoku.core import InputError
from kasoku.distributed import Hierarchical
from kasoku.simulate import collectives as allreduce
from kasoku.simulate.cluster import Cluster, ClusterNode, Gpu, Protocol, Racks, load
from kasoku.simulate.collectives import AlgorithmCost, link

A, B = 5e-6, 10e9  # latency of a message, bandwidth of a NIC in one direction
A_IN, B_IN = 1e-6, 100e9  # the same within a node
N_BYTES = 51e6
GPU = Gpu("any", 5.0, 0.3, 1, 512, 300, 2000)


def ideal(nodes: int, gpus: int = 1, nics: int = 1, **more: object) -> Cluster:
    plain = Protocol("plain", 0.0, (1e6 * A_IN, 1e6 * A), (1e6 * A_IN, 1e6 * A))
    node = ClusterNode(gpus, B_IN / 1e9, nics, B / 1e9)
    made = Cluster("ideal", nodes, node, own_gpu=GPU, own_protocol=plain)
    return replace(made, **more)  # type: ignore[arg-type]


def by_grid(cluster: Cluster, gpus: int, width: int) -> AlgorithmCost:
    """A 2-D torus: along rows, and along columns by rings."""
    once = allreduce.gather(cluster, gpus, width)
    return once + once + allreduce.columns(cluster, gpus, width)[0]


@pytest.mark.parametrize("p", [2, 3, 7, 16, 48])
def test_a_ring_takes_its_closed_form(p: int) -> None:
    seen = allreduce.fastest(ideal(p), [("ring", allreduce.gather(ideal(p), p).twice())])
    assert seen.seconds(N_BYTES) == pytest.approx(2 * (p - 1) * A + 2 * (p - 1) / p * N_BYTES / B, rel=1e-12)


@pytest.mark.parametrize("p", [4, 8, 16, 64, 512])
def test_two_trees_take_their_closed_form(p: int) -> None:
    seen = allreduce.fastest(ideal(p), [("tree", allreduce.tree(ideal(p), p))])
    assert seen.seconds(N_BYTES) == pytest.approx(2 * math.log2(p) * A + 2 * N_BYTES / B, rel=1e-12)


@pytest.mark.parametrize("p", [6, 10, 100])
def test_who_passes_on_in_one_tree_is_a_leaf_of_the_other(p: int) -> None:
    up = [(child, parent) for child, parent, _ in allreduce.two_trees(range(p), 1.0)][::2]
    first, second = dict(up[::2]), dict(up[1::2])
    assert not {*first.values()} & {*second.values()}
    assert len(first) == len(second) == p - 1  # all but the root have a parent


@pytest.mark.parametrize(("nodes", "g"), [(2, 4), (8, 4), (5, 8)])
def test_hierarchical_takes_its_closed_form(nodes: int, g: int) -> None:
    seen = link(ideal(nodes, g, nics=g), nodes * g, Hierarchical())
    inside = (g - 1) * A_IN + (g - 1) / g * N_BYTES / B_IN
    # each GPU has a NIC of its own, and n / g bytes to move between nodes
    ring = 2 * (nodes - 1) * A + 2 * (nodes - 1) / nodes * N_BYTES / g / B
    assert len(seen.choices) == 2  # by a ring, by trees
    assert seen.choices[0][1].seconds(N_BYTES) == pytest.approx(2 * inside + ring, rel=1e-12)


@pytest.mark.parametrize(("high", "width"), [(4, 4), (3, 5)])
def test_a_torus_takes_its_closed_form(high: int, width: int) -> None:
    cluster = ideal(high * width)
    shape = by_grid(cluster, high * width, width)
    row = (width - 1) * A + (width - 1) / width * N_BYTES / B
    column = 2 * (high - 1) * A + 2 * (high - 1) / high * N_BYTES / width / B
    assert shape.link(cluster.table[0]).seconds(N_BYTES) == pytest.approx(2 * row + column, rel=1e-12)


@pytest.mark.parametrize("nics", [1, 2, 4])
def test_rows_of_several_nodes_use_all_their_nics(nics: int) -> None:
    nodes, g, width = 8, 4, 8
    cluster, p = ideal(nodes, g, nics), nodes * g
    shape = by_grid(cluster, p, width)
    row = 6 * A_IN + A + (width - 1) / width * N_BYTES / nics / B  # a ring a NIC, which crosses each once a round
    column = 2 * 3 * A + 2 * 3 * g / p * N_BYTES / nics / B  # of 4 members, g columns a node
    assert shape.link(cluster.table[0]).seconds(N_BYTES) == pytest.approx(2 * row + column, rel=1e-12)


@pytest.mark.parametrize(
    ("nodes", "nics", "racks", "width"),
    [
        (1, 1, None, 4),
        (4, 1, None, 2),  # machines of 4, in rows of 2: columns have 2 in each
        (4, 4, None, 4),
        (4, 2, None, 4),
        (4, 4, None, 8),
        (8, 2, Racks(3, 8.0), 2),  # the last one not full
        (8, 2, Racks(2, 0.5), 4),
    ],
)
def test_an_all_to_all_along_columns_fills_its_busiest_link(
    nodes: int, nics: int, racks: Racks | None, width: int
) -> None:
    gpus = 16
    cluster = ideal(nodes, gpus // nodes, nics, racks=racks)
    pairs = [(a, b) for a in range(gpus) for b in range(gpus) if a != b and a % width == b % width]
    expected = seconds(cluster, [(a, b, N_BYTES / (gpus // width)) for a, b in pairs])
    assert allreduce.exchange(cluster, gpus, width).byte_s * N_BYTES == pytest.approx(expected, rel=1e-9)


def test_two_nics_carry_a_ring_twice_as_fast() -> None:
    one, two = (allreduce.gather(ideal(8, 4, nics=nics), 32).twice().byte_s for nics in (1, 2))
    assert one == pytest.approx(2 * two, rel=1e-12)
    assert one == pytest.approx(2 * 31 / 32 / B, rel=1e-12)


def test_racks_slow_what_crosses_them_and_nothing_else() -> None:
    racked = ideal(64, racks=Racks(8, B / 1e9))  # 8 nodes of 10 GB/s behind 10 GB/s
    assert allreduce.gather(racked, 64).byte_s == allreduce.gather(ideal(64), 64).byte_s  # one flow leaves each rack
    seen = [allreduce.exchange(cluster, 64).byte_s for cluster in (racked, ideal(64))]
    assert seen == pytest.approx([8 * 56 / 64 / B, 63 / 64 / B], rel=1e-12)  # 8 nodes send to the 56 of other racks


@pytest.mark.parametrize("seed", range(6))
def test_no_link_carries_more_than_its_rate_and_no_flow_could_have_more(seed: int) -> None:
    rng = random.Random(seed)
    capacity = np.array([rng.uniform(1, 10) for _ in range(12)])
    routes = [rng.sample(range(12), rng.randrange(1, 5)) for _ in range(40)]
    rate = rates(np.array([route + [-1] * (4 - len(route)) for route in routes]), capacity)
    carried = np.zeros(12)
    for route, mine in zip(routes, rate, strict=True):
        carried[route] += mine
    assert (carried <= capacity * (1 + 1e-9)).all()
    for route, mine in zip(routes, rate, strict=True):
        full = [k for k in route if carried[k] >= capacity[k] * (1 - 1e-9)]
        on = {k: max(r for row, r in zip(routes, rate, strict=True) if k in row) for k in full}
        assert any(mine >= most * (1 - 1e-9) for most in on.values()), "a flow could have more, and took it from none"


def test_bytes_are_conserved_over_a_whole_transfer() -> None:
    # two flows share a link of 1 GB/s; when the short one has ended, the other has it alone
    capacity = np.array([1e9, 1e9])
    assert routed_s([[0], [0, 1]], [1e9, 3e9], capacity) == pytest.approx(4.0, rel=1e-12)
    assert routed_s([[0], [1]], [1e9, 3e9], capacity) == pytest.approx(3.0, rel=1e-12)


def test_protocols_are_chosen_by_what_a_message_takes() -> None:
    fast = Cluster("c", 64, ClusterNode(8, 240.0, 8, 24.0), own_gpu=GPU)
    seen = allreduce.link(fast, 512)
    small, large = seen.choice(1e3), seen.choice(1e9)
    assert small == "tree, LL"
    assert large in ("ring, Simple", "tree, Simple")
    assert seen.seconds(1e3) == min(link.seconds(1e3) for _, link in seen.choices)


@pytest.mark.parametrize(("gpus", "said"), [(40, "1 to 32 are available"), (10, "a multiple of 4")])
def test_what_there_is_not_is_one_clear_line(gpus: int, said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        allreduce.link(ideal(8, 4), gpus)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("racks", [None, Racks(3, 8.0), Racks(2, 0.5)])
@pytest.mark.parametrize(("nodes", "g", "nics"), [(8, 1, 1), (8, 4, 1), (6, 4, 2), (4, 8, 8)])
def test_fair_flows_end_with_those_of_the_busiest_link(
    nodes: int, g: int, nics: int, racks: Racks | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, p = ideal(nodes, g, nics, racks=racks), nodes * g
    by_busiest, checked = allreduce.contended_s, []

    def compared(cluster: Cluster, flows: list[allreduce.Flow]) -> float:
        took = by_busiest(cluster, flows)
        assert took == pytest.approx(seconds(cluster, flows), rel=1e-9)
        checked.append(took)
        return took

    monkeypatch.setattr(allreduce, "contended_s", compared)
    whole, row = allreduce.gather.__wrapped__, g if g > 1 else 2
    whole(cluster, p)
    whole(cluster, p, row)
    allreduce.tree(cluster, p)
    allreduce.columns(cluster, p, row)
    assert len(checked) == 5
    assert min(checked) > 0


def test_a_tree_in_low_latency_begins_later_than_a_ring() -> None:
    low = replace(load("dgx-a100"), protocols=("LL",))
    shapes = [("ring", allreduce.gather(low, 16).twice()), ("tree", allreduce.tree(low, 16))]
    ring, tree = (allreduce.fastest(low, [shape]).seconds(0) for shape in shapes)
    assert ring == pytest.approx(1e-6 * (6.6 + 28 * 0.6 + 2 * 2.7))
    assert tree == pytest.approx(1e-6 * (6.8 + 14 * 0.6 + 2 * 5.0))
