"""The time of averaging by each reducer of `Overlap`: the collectives it uses, and their bytes.

Note: two kinds of 16-bit sums. Wire's sums="wire" is one all-reduce of half of the bytes. Its default, sums="fp32",
sends every rank its part of all gradients by an all-to-all, and the means by an all-gather. On nodes of several GPUs
nearly all bytes of an all-to-all leave the node, while a ring leaves it once: there it may be slower than Mean.

Note: sizes. `Overlap` plans its buckets by the bytes of gradients in memory (fp32), whatever the reducer sends, and so
does the simulation. So the links of this file take the bytes of fp32 gradients, and their rates account for the
compression, everywhere or only between nodes.
"""

from functools import lru_cache

from kasoku.core import InputError
from kasoku.distributed import Hierarchical, Mean, Reducer, Wire
from kasoku.simulate import collectives
from kasoku.simulate.cluster import Cluster
from kasoku.simulate.collectives import ALONE, Fastest

_EXCHANGED = "all-to-all and all-gather"


def flat(reducer: Reducer) -> Reducer:
    """The reducer between all ranks, or between nodes. Raises InputError if it is not simulated."""
    alike = reducer.across if type(reducer) is Hierarchical else reducer
    if type(alike) not in (Mean, Wire):  # a subclass may send anything
        name = ("" if alike is reducer else "Hierarchical across=") + type(alike).__name__
        raise InputError(f"reducer {name}: only Mean, Wire, and Hierarchical across=Mean or Wire are simulated")
    return alike


def exchanges(reducer: Reducer) -> bool:
    """Whether a flat reducer averages by an all-to-all and an all-gather."""
    return isinstance(reducer, Wire) and reducer.sums == "fp32"


@lru_cache(maxsize=1024)
def link(cluster: Cluster, gpus: int, reducer: Reducer, algorithm: str = "auto") -> Fastest:
    """The time of a mean of gradients on the first GPUs of a cluster, by their bytes in fp32.

    `reducer`: Mean, Wire, or Hierarchical of one of these; `algorithm`: of the all-reduce, if it uses one. Raises
    InputError for a reducer that is not simulated, or one whose nodes the GPUs do not fill.
    """
    cluster.nodes_for(gpus)
    alike, node = flat(reducer), 1
    if gpus == 1:
        return ALONE
    if isinstance(reducer, Hierarchical):  # as its `bind` does
        node = reducer.node or min(gpus, cluster.node.gpus)
        if gpus % node:
            raise InputError(f"Hierarchical: {gpus} GPUs in nodes of {node}: the nodes must be equal in size")
        alike = Mean() if node == gpus else alike
    exchanged, share = exchanges(alike), 0.5 if isinstance(alike, Wire) else 1.0  # of the bytes of fp32 gradients
    if 1 < node < gpus:
        name = "hierarchical" if node == cluster.node.gpus else f"hierarchical in rows of {node}"
        name += f", {_EXCHANGED} across" if exchanged else ""
        shapes = collectives.torus(cluster, gpus, node, trees=True, across=share, exchanged=exchanged)
        return collectives.fastest(cluster, [(name, shape) for shape in shapes])
    if exchanged:
        shape = collectives.exchange(cluster, gpus) + collectives.gather(cluster, gpus)
        return collectives.fastest(cluster, [(_EXCHANGED, shape.of(share))])
    return collectives.link(cluster, gpus, algorithm, share)
