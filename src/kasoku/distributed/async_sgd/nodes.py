"""Nodes: ranks that step together, while the nodes exchange asynchronously."""

import socket
from collections import defaultdict

import torch
from torch import Tensor

from kasoku.core import Comm, InputError, Solo, say


def ranks_of_node(comm: Comm, size: int, beside: str) -> Comm:
    """The ranks of this one's node: `size` consecutive ones, or with 0 those of its host. Collective.

    Raises InputError for nodes of unequal size. `beside`: the technique that averages gradients in a node.
    """
    if comm.size % max(1, size):
        raise InputError(f"node={size}: {comm.size} ranks cannot be divided into such nodes; give a divisor of them")
    nodes: defaultdict[object, list[int]] = defaultdict(list)
    for rank, host in enumerate(comm.gather_objects(socket.gethostname())):
        nodes[rank // size if size else host].append(rank)
    if len({*map(len, nodes.values())}) > 1:
        got = f"Asynchronous beside {beside}: hosts of {[*map(len, nodes.values())]} ranks"
        raise InputError(f"{got}; start as many on each, or give node, a divisor of all these numbers")
    if len(nodes) > 1:
        own = comm.sub([*nodes.values()])
        return own if own.size > 1 else Solo(comm.clock)
    if comm.rank == 0:
        say(f"Asynchronous: all ranks share a host, so that {beside} has them all step together; node=... divides them")
    return comm


def copy_from_first(node: Comm, x: Tensor) -> Tensor:
    """Copies x from the node's first rank to the others, bit for bit: a sum of integers and zeros."""
    if node.size > 1:
        bits = x.view(torch.int32 if x.itemsize == 4 else torch.uint8)
        node.all_reduce(bits.zero_() if node.rank else bits).wait()
    return x
