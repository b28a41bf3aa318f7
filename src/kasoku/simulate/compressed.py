"""The time of averaging by each reducer of `Overlap`: the collectives it uses, and their bytes.

Note: two kinds of 16-bit sums. Wire's sums="wire" is one all-reduce of half of the bytes. Its default, sums="fp32",
sends every rank its part of all gradients by an all-to-all, and the means by an all-gather. On nodes of several GPUs
nearly all bytes of an all-to-all leave the node, while a ring leaves it once: there it may be slower than Mean.

Note: LowRank. Its two all-reduces come one after the other, and so do its passes over the gradients, which take the
GPU's memory bandwidth. They are counted as a part of the chunk's transfer. The latency of its QR is not.

Note: sizes. `Overlap` plans its buckets by the bytes of gradients in memory (fp32), whatever the reducer sends, and so
does the simulation. So the links of this file take the bytes of fp32 gradients, and their rates account for the
compression, everywhere or only between nodes.
"""

from dataclasses import dataclass
from functools import lru_cache

from kasoku.core import InputError
from kasoku.distributed import Hierarchical, LowRank, Mean, Reducer, Wire
from kasoku.simulate import collectives
from kasoku.simulate.cluster import Cluster, Gpu
from kasoku.simulate.collectives import ALONE, Fastest

_EXCHANGED = "all-to-all and all-gather"
_FP32 = 4  # bytes of an element
_PASSES = 12  # over a chunk: LowRank adds it to the error, multiplies that twice, subtracts, cleans, writes the product


@dataclass(frozen=True, kw_only=True)
class LowRankLink(Fastest):
    """The mean of a chunk by LowRank: its collectives, and its passes on a GPU.

    Attributes: `inside`: reduce-scatter and all-gather within nodes of `node` ranks, between which LowRank averages.
    """

    reducer: LowRank
    gpu: Gpu
    inside: Fastest
    node: int

    def sent(self, size: float) -> list[int]:
        """Bytes of each all-reduce of a rank's part of `size` bytes."""
        elements = -(-round(size / _FP32) // self.node)
        shape = self.reducer.shape(elements)
        return [_FP32 * self.reducer.rank * side for side in shape] if any(shape) else [_FP32 * elements]

    def seconds(self, size: float) -> float:
        messages = self.sent(size)
        link_s = self.inside.seconds(size) + sum(Fastest.seconds(self, self.node * n) for n in messages)
        part = size / self.node if len(messages) > 1 else 0.0  # bytes
        products_s = 8 * self.reducer.rank * part / _FP32 / (1e12 * self.gpu.tflops)
        return link_s + max(products_s, _PASSES * part / (1e9 * self.gpu.memory_gb_s))

    def choice(self, size: float) -> str:
        return f"low rank, {super().choice(self.node * max(self.sent(size)))}"


def flat(reducer: Reducer) -> Reducer:
    """The reducer between all ranks, or between nodes. Raises InputError if it is not simulated."""
    alike = reducer.across if type(reducer) is Hierarchical else reducer
    if type(alike) not in (Mean, Wire, LowRank):  # a subclass may send anything
        name = ("" if alike is reducer else "Hierarchical across=") + type(alike).__name__
        allowed = "Mean, Wire, LowRank, and Hierarchical across one of them"
        raise InputError(f"reducer {name}: what it sends is not known: {allowed} are simulated; take one of these")
    return alike


@lru_cache(maxsize=1024)
def link(cluster: Cluster, gpus: int, reducer: Reducer) -> Fastest:
    """The time of a mean of gradients on the first GPUs of a cluster, by their bytes in fp32.

    `reducer`: Mean, Wire, LowRank, or Hierarchical of one of these.
    Raises InputError for a reducer that is not simulated, or one whose nodes the GPUs do not fill.
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
    exchanged = isinstance(alike, Wire) and alike.sums == "fp32"  # by an all-to-all and an all-gather
    share = 0.5 if isinstance(alike, Wire) else 1.0  # of the bytes of fp32 gradients
    inside = ALONE
    if 1 < node < gpus:
        once = collectives.gather(cluster, gpus, node)
        row = once + once  # a reduce-scatter and an all-gather
        name = "hierarchical" if node == cluster.node.gpus else f"hierarchical in rows of {node}"
        name += f", {_EXCHANGED} across" if exchanged else ""
        shapes = collectives.columns(cluster, gpus, node, exchanged=exchanged)
        if isinstance(alike, LowRank):
            inside = collectives.fastest(cluster, [(name, row)])
        else:
            shapes = [row + shape.of(share) for shape in shapes]
        between = collectives.fastest(cluster, [(name, shape) for shape in shapes])
    elif exchanged:
        shape = collectives.exchange(cluster, gpus) + collectives.gather(cluster, gpus)
        between = collectives.fastest(cluster, [(_EXCHANGED, shape.of(share))])
    else:
        node, between = 1, collectives.link(cluster, gpus, share)
    if not isinstance(alike, LowRank):
        return between
    return LowRankLink(**vars(between), reducer=alike, gpu=cluster.device, inside=inside, node=node)
