"""The time of averaging gradients on a cluster: the messages of each algorithm on its links, and their latencies.

Note: latency and bandwidth are separate. A message takes a number of hops, each with a latency from the library's
table. Its bytes take the time of the busiest link (`contended_s`), which is linear in the bytes. So each algorithm in
each protocol is a `LinkModel`, and a collective of n bytes uses the fastest of them.
On a network without contention these are the closed forms (tests/simulate/test_collectives.py):
ring 2(p-1)a + 2(p-1)/p n/B; double binary tree 2 log2(p) a + 2 n/B;
hierarchical and 2-D torus: a reduce-scatter along rows, an all-reduce of each part along columns, an all-gather.

Note: sizes. `Overlap` plans its buckets by the bytes of gradients in memory (fp32), whatever the reducer sends, and so
does the simulation. So the links of this file take the bytes of fp32 gradients, and their rates account for the
compression, everywhere or only between nodes.
Ref: Thakur et al. 2005; Sanders et al. 2009 (two trees); Mikami et al. 2018 (2-D torus, arXiv 1811.05233).
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import lru_cache

from kasoku.core import InputError
from kasoku.distributed import Hierarchical, Mean, Reducer, Wire
from kasoku.distributed.ddp.cost_model import LinkModel
from kasoku.simulate.cluster import Cluster, Protocol

Flow = tuple[int, int, float]  # from, to, bytes for each byte that is reduced
_EXCHANGED = "all-to-all and all-gather"
_MEAN = Mean()


@dataclass(frozen=True)
class AlgorithmCost:
    """The costs of an algorithm: hops of rings and of trees, within and between nodes, and seconds for each byte."""

    rings_within: int = 0
    rings_between: int = 0
    trees_within: int = 0
    trees_between: int = 0
    byte_s: float = 0.0
    starts: int = 1
    trees: int = 0  # of the starts

    def __add__(self, other: "AlgorithmCost") -> "AlgorithmCost":
        return AlgorithmCost(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def twice(self) -> "AlgorithmCost":
        """The algorithm forth and back, started once."""
        return replace(self + self, starts=self.starts, trees=self.trees)

    def of(self, share: float) -> "AlgorithmCost":
        """The same pattern if only a share of each byte is sent."""
        return replace(self, byte_s=share * self.byte_s)

    def link(self, protocol: Protocol, slower: float = 1.0) -> LinkModel:
        """Latency and bandwidth in a protocol; its latencies are times `slower`."""
        hops = zip(astuple(self)[:4], (*protocol.ring_us, *protocol.tree_us), strict=True)
        starts_us = self.starts * protocol.start_us + self.trees * protocol.tree_more_us
        latency_us = starts_us + sum(n * us for n, us in hops)
        return LinkModel(1e-6 * slower * latency_us, protocol.share / self.byte_s if self.byte_s else math.inf)


@dataclass(frozen=True)
class Fastest(LinkModel):
    """The fastest of several algorithms of a collective, which depends on the number of bytes; it has no one rate."""

    choices: tuple[tuple[str, LinkModel], ...] = ()

    def seconds(self, size: float) -> float:
        return min(link.seconds(size) for _, link in self.choices)

    def choice(self, size: float) -> str:
        """The algorithm and protocol used for `size` bytes."""
        return min(self.choices, key=lambda named: named[1].seconds(size))[0]


ALONE = Fastest(0.0, math.inf, choices=(("none", LinkModel(0.0, math.inf)),))  # one GPU has nothing to send


def flat(reducer: Reducer) -> Reducer:
    """The reducer between all ranks, or between nodes. Raises InputError if it is not simulated."""
    alike = reducer.across if type(reducer) is Hierarchical else reducer
    if type(alike) not in (Mean, Wire):  # a subclass may send anything
        name = ("" if alike is reducer else "Hierarchical across=") + type(alike).__name__
        allowed = "Mean, Wire, and Hierarchical across one of them"
        raise InputError(f"reducer {name}: its time is not known: {allowed} are simulated; take one of these")
    return alike


@lru_cache(maxsize=1024)
def link(cluster: Cluster, gpus: int, reducer: Reducer = _MEAN) -> Fastest:
    """The time of a mean of gradients on the first GPUs of a cluster, by their bytes in fp32.

    `reducer`: Mean (by a ring or, between nodes, by two trees, whichever is faster, as NCCL chooses), Wire, or
    Hierarchical of one of them. Raises InputError for a reducer that is not simulated, and for GPUs that do not fill
    their nodes.
    """
    nodes, wire, row = cluster.nodes_for(gpus), isinstance(flat(reducer), Wire), 1
    if gpus == 1:
        return ALONE
    if isinstance(reducer, Hierarchical):  # as its `bind` does
        row = reducer.node or min(gpus, cluster.node.gpus)
        if gpus % row:
            raise InputError(f"Hierarchical: {gpus} GPUs in nodes of {row}: the nodes must be equal in size")
        wire = wire and row < gpus  # within one node Hierarchical is Mean
    if 1 < row < gpus:
        name = "hierarchical" if row == cluster.node.gpus else f"hierarchical in rows of {row}"
        name += f", {_EXCHANGED} across" if wire else ""
        within = gather(cluster, gpus, row) + gather(cluster, gpus, row)  # a reduce-scatter and an all-gather
        across = columns(cluster, gpus, row, exchanged=wire)
        shapes = [(name, within + (shape.of(0.5) if wire else shape)) for shape in across]
    elif wire:
        shapes = [(_EXCHANGED, (exchange(cluster, gpus) + gather(cluster, gpus)).of(0.5))]
    else:
        # a ring for each NIC with its part of the bytes; each ring enters and leaves a node once
        shapes = [("ring", gather(cluster, gpus).twice())]
        shapes += [("tree", tree(cluster, gpus))] if nodes > 1 else []
    return fastest(cluster, shapes)


@lru_cache(maxsize=1024)
def exchange_link(cluster: Cluster, gpus: int) -> Fastest:
    """The time of an exchange by the bytes of a rank's update, which are sent both ways, with requests and replies."""
    once = exchange(cluster, gpus)
    return fastest(cluster, [("exchange", once + once)]) if gpus > 1 else ALONE


def fastest(cluster: Cluster, shapes: Sequence[tuple[str, AlgorithmCost]]) -> Fastest:
    """The fastest of several named algorithms, each in every protocol of the cluster."""
    choices = tuple((f"{name}, {p.name}", way.link(p, cluster.latency)) for name, way in shapes for p in cluster.table)
    return Fastest(0.0, math.inf, compute_share=cluster.device.compute_share, choices=choices)


def contended_s(cluster: Cluster, flows: Iterable[Flow]) -> float:
    """Seconds of simultaneous flows, for each byte that is reduced: those of the busiest link.

    Note: max-min fairness. Fair queueing and congestion control give the flows of a full link equal shares. All flows
    through links of a kind (of GPUs, NICs, racks) have equal bytes here, so none ends after those of the busiest link.
    """
    busy_s: defaultdict[tuple[str, int], float] = defaultdict(float)
    for start, stop, size in flows:
        for kind, number, rate in cluster.route(start, stop):
            busy_s[kind, number] += size / rate
    return max(busy_s.values())


@lru_cache(maxsize=1024)
def gather(cluster: Cluster, gpus: int, width: int = 0) -> AlgorithmCost:
    """An all-gather (or a reduce-scatter) along rows of `width` GPUs, 0: of all: half of their all-reduce by rings."""
    width, each = width or gpus, cluster.node.gpus
    nodes = width // each if width % each == 0 else 1  # whole ones of a row
    channels, part = cluster.node.nics if nodes > 1 else 1, width // nodes  # a ring for each NIC of whole nodes
    flows: list[Flow] = []
    for first, channel in itertools.product(range(0, gpus, width), range(channels)):
        last = channel * each // channels  # the GPU nearest to the NIC sends it out
        ranks = [first + node * part + (last + 1 + i) % part for node in range(nodes) for i in range(part)]
        flows += _circle(ranks, 1 / (width * channels))
    rounds, between = width - 1, -(-width // each) - 1
    return AlgorithmCost(rounds - between, between, byte_s=rounds * contended_s(cluster, flows))


def _circle(ranks: Sequence[int], size: float) -> list[Flow]:
    """Messages from each of the ranks to the next one."""
    return [(a, b, size) for a, b in itertools.pairwise([*ranks, ranks[0]])]


def exchange(cluster: Cluster, gpus: int, width: int = 1) -> AlgorithmCost:
    """An all-to-all: each rank sends an equal part of its bytes to every other rank, all at once.

    `width`: the length of a row of ranks; only ranks at the same place of their rows exchange. The busiest link takes
    as long as in `contended_s`: a node or a rack receives as much as it sends; its NICs carry equal parts of that.
    """
    nodes, node, racks = cluster.nodes_for(gpus), cluster.node, cluster.racks
    each, high = gpus // nodes, gpus // width

    def outgoing(size: int) -> float:
        """The bytes that a group of `size` consecutive GPUs sends to others, for each byte of a rank."""
        rows, more = divmod(min(size, gpus), width)  # a smaller group at the end sends at most as many
        return (more * (rows + 1) * (high - rows - 1) + (width - more) * rows * (high - rows)) / high

    busiest_s = [(-(-each // width) - 1) / high / (1e9 * node.port_gb_s) if each > 1 else 0.0]
    if nodes > 1:
        busiest_s.append(outgoing(each) / node.nics / (1e9 * min(node.nic_gb_s, node.pcie_gb_s or math.inf)))
    if racks and racks.uplink_gb_s:  # the last rack may not be full
        busiest_s.append(outgoing(each * racks.nodes) / (1e9 * racks.uplink_gb_s))
    return AlgorithmCost(int(nodes == 1), int(nodes > 1), byte_s=max(busiest_s))


def tree(cluster: Cluster, gpus: int) -> AlgorithmCost:
    """Two binary trees over several nodes, each with half of the bytes both ways; a chain within each node."""
    nodes, each, channels = cluster.nodes_for(gpus), cluster.node.gpus, cluster.node.nics
    flows: list[Flow] = []
    for channel in range(channels):
        first = channel * each // channels
        for node in range(nodes):
            chain = [node * each + (first + i) % each for i in range(each)]
            for a, b in itertools.pairwise(chain):
                flows += [(a, b, 1 / channels), (b, a, 1 / channels)]
        flows += two_trees(range(first, gpus, each), 0.5 / channels)
    byte_s, depth = contended_s(cluster, flows), nodes.bit_length() - 1  # the edges from a root to its last leaf
    return AlgorithmCost(trees_within=2 * (each - 1), trees_between=2 * depth, byte_s=byte_s, trees=1)


def columns(cluster: Cluster, gpus: int, width: int, *, exchanged: bool = False) -> list[AlgorithmCost]:
    """The all-reduce of each part of a row by the GPUs at its place of all rows, for each byte of the whole.

    By rings, and by trees; `exchanged`: by an all-to-all and an all-gather.
    """
    high = gpus // width
    along = [range(first, gpus, width) for first in range(width)]
    flows = [flow for column in along for flow in _circle(column, 1 / gpus)]
    once = AlgorithmCost(rings_between=high - 1, byte_s=(high - 1) * contended_s(cluster, flows))
    if exchanged:
        return [exchange(cluster, gpus, width).of(1 / width) + once]
    flows = [flow for column in along for flow in two_trees(column, 0.5 / width)]
    byte_s, depth = contended_s(cluster, flows), high.bit_length() - 1
    return [once.twice(), AlgorithmCost(trees_between=2 * depth, byte_s=byte_s, trees=1)]


def two_trees(ranks: Sequence[int], size: float) -> Iterator[Flow]:
    """Messages up and down two binary trees over the ranks, in order, whose leaves are the even or the odd ones.

    With an even number of ranks, an inner node of one is a leaf of the other.
    """
    n = len(ranks)
    for child in range(1, n + 1):  # counted from 1, the lowest bit is twice that of the children
        bit = child & -child
        above = child ^ bit
        parent = above | 2 * bit if above | 2 * bit <= n else above
        for shift in (0, 1) if parent else ():
            a, b = ranks[(child - 1 + shift) % n], ranks[(parent - 1 + shift) % n]
            yield from ((a, b, size), (b, a, size))
