"""What averaging takes by each reducer of the engine: which collectives it makes, and of which bytes.

Note: two ways of 16 bits. Wire's sums="wire" is one all-reduce of half of the bytes. Its default, sums="fp32", sends
every rank its part of all gradients by an all-to-all, and has the means by an all-gather. On nodes of several GPUs
nearly all bytes of an all-to-all leave the node, where a ring leaves it once: it may take longer than Mean there.

Note: the gradients' own bytes. `Overlap` plans its groups by what gradients are in memory (fp32), whatever a reducer
makes of them, and so does a simulation of it. So a link is asked here for the seconds of so many bytes of gradients;
that half of them are under way, everywhere or only between nodes, the link knows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from kasoku.core import InputError
from kasoku.distributed import Hierarchical, Mean, Reducer, Wire
from kasoku.simulate import collectives as allreduce
from kasoku.simulate.cluster import Cluster
from kasoku.simulate.collectives import ALONE, Fastest

_EXCHANGED = "all-to-all and all-gather"


def flat(reducer: Reducer) -> Reducer:
    """How a reducer averages between all ranks, or between nodes. Raises InputError for what is not simulated."""
    alike = reducer.across if type(reducer) is Hierarchical else reducer
    if type(alike) not in (Mean, Wire):  # a class made of one of these may send anything
        name = ("" if alike is reducer else "Hierarchical across=") + type(alike).__name__
        raise InputError(
            f"reducer {name}: only Mean, Wire, and Hierarchical across=Mean or Wire are simulated: take one of these"
        )
    return alike


def exchanges(reducer: Reducer) -> bool:
    """Whether it averages, between all ranks or between nodes, by an all-to-all and an all-gather."""
    alike = flat(reducer)
    return isinstance(alike, Wire) and alike.sums == "fp32"


def fills(reducer: Reducer | None, gpus: int) -> bool:
    """Whether so many GPUs make whole nodes, as Hierarchical counts them."""
    return gpus == 1 or not isinstance(reducer, Hierarchical) or not reducer.node or gpus % reducer.node == 0


@lru_cache(maxsize=1024)
def link(cluster: Cluster, gpus: int, reducer: Reducer, algorithm: str = "auto") -> Fastest:
    """What the mean of so many bytes of fp32 gradients takes.

    Args:
        cluster: whose first nodes the GPUs are.
        gpus: how many; they fill their nodes.
        reducer: Mean, Wire, or Hierarchical of one of these.
        algorithm: of those that average by one all-reduce; the others have their own.

    Raises:
        InputError: for a reducer that is not simulated, or one whose nodes so many GPUs do not fill.
    """
    cluster.nodes_for(gpus)
    alike = flat(reducer)
    if gpus == 1:
        return ALONE
    if isinstance(reducer, Hierarchical):  # as its `bind` does
        node = reducer.node or min(gpus, cluster.node.gpus)
        if gpus % node:
            raise InputError(f"Hierarchical: {gpus} GPUs in nodes of {node}: the nodes must be equal in size")
        if 1 < node < gpus:
            name = "hierarchical" if node == cluster.node.gpus else f"hierarchical in rows of {node}"
            own, share = exchanges(alike), _share(alike)
            shapes = allreduce.torus(cluster, gpus, node, trees=True, across=share, exchanged=own)
            name += f", {_EXCHANGED} across" if own else ""
            return allreduce.fastest(cluster, [(name, shape) for shape in shapes])
        alike = Mean() if node == gpus else alike
    if exchanges(alike):
        shape = allreduce.exchange(cluster, gpus) + allreduce.gather(cluster, gpus)
        return allreduce.fastest(cluster, [(_EXCHANGED, shape.of(_share(alike)))])
    return _narrowed(allreduce.link(cluster, gpus, algorithm), _share(alike))


def _share(reducer: Reducer) -> float:
    """Of the bytes of fp32 gradients those that are under way."""
    return 0.5 if isinstance(reducer, Wire) else 1.0


def _narrowed(link: Fastest, share: float) -> Fastest:
    """The link for bytes of which a share is sent."""
    choices = tuple((name, replace(each, bytes_per_s=each.bytes_per_s / share)) for name, each in link.choices)
    return Fastest(link.latency_s, link.bytes_per_s / share, choices=choices)
