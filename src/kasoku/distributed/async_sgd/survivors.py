"""Sums over the living ranks, by messages between each two of them, as a collective would wait for the dead.

Note: attempts. The living ranks reach a sync point by attempts. One begins when all of them report the same dead ranks.
Its messages have tags of their own, and it counts when all living ranks report that it is complete. A death before that
begins another.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import TypeVar

import torch
from torch import Tensor, nn

from kasoku.core import Comm
from kasoku.distributed.async_sgd.peers import LostError, Peers

T = TypeVar("T")


class Table:
    """The ranks of a sync point and their collective; here all ranks of a Comm."""

    def __init__(self, comm: Comm) -> None:
        self.comm, self.ranks = comm, list(range(comm.size))

    def all_reduce(self, x: Tensor, *, op: str = "sum") -> None:
        """Every rank's flat x becomes the sum or "max" over the ranks."""
        self.comm.all_reduce(x, op=op).wait()


class Survivors(Table):
    """The ranks of one attempt; raises LostError if one of them dies meanwhile."""

    def __init__(self, comm: Comm, peers: Peers, ranks: list[int]) -> None:
        self.comm, self._peers, self.ranks = comm, peers, ranks
        self._deaths = comm.size - len(ranks)

    def swap(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> None:
        """Sends to each other rank and receives from it, and waits for all."""
        replies = {
            rank: self._peers.exchange(rank, self.comm, [outgoing[rank]], [incoming[rank]], deaths=self._deaths)
            for rank in self.ranks
            if rank != self.comm.rank
        }
        for rank, reply in replies.items():
            if reply.exception():  # raised itself, it would keep the tensors of these frames alive
                raise LostError(rank)

    def all_reduce(self, x: Tensor, *, op: str = "sum") -> None:
        """Each rank sums one part, in the order of ranks, and sends the sum to all."""
        parts = dict(zip(self.ranks, torch.tensor_split(x, len(self.ranks)), strict=True))
        mine = parts[self.comm.rank]
        incoming = {rank: torch.empty_like(mine) for rank in self.ranks}
        self.swap(parts, incoming)
        incoming[self.comm.rank].copy_(mine)
        combine = torch.add if op == "sum" else torch.maximum
        mine.copy_(reduce(combine, (incoming[rank] for rank in self.ranks)))
        self.swap(dict.fromkeys(self.ranks, mine.clone()), parts)


def mean_buffers(model: nn.Module, table: Table) -> list[Tensor]:
    """Each floating-point buffer's mean over the ranks; of other buffers the largest. Collective."""
    means = []
    for x in model.buffers():
        exact = x.is_floating_point()
        mine = x.detach().to("cpu", torch.float32 if exact else torch.int64, copy=True).reshape(-1)
        table.all_reduce(mine, op="sum" if exact else "max")
        means.append((mine / len(table.ranks) if exact else mine).view_as(x))
    return means


def copy_buffers(model: nn.Module, values: Sequence[Tensor]) -> None:
    """Gives the model's buffers these values."""
    for x, value in zip(model.buffers(), values, strict=True):
        x.copy_(value)


def on_survivors(comm: Comm, peers: Peers, f: Callable[[Table], T]) -> T:
    """The result of f over the living ranks. Collective.

    f is called again after each death, so it must only read.
    """
    ranks = peers.living

    def same() -> bool:
        """Whether all living ranks report the same dead ranks."""
        nonlocal ranks
        ranks = peers.living
        return all(peers.reports[rank][2:] == peers.flags for rank in peers.living_peers)

    def done() -> bool:
        return all(peers.reports[rank][0] >= peers.attempt for rank in peers.living_peers)

    def failed() -> bool:
        reports, deaths = [peers.reports[rank] for rank in peers.living_peers], comm.size - len(ranks)
        return any(attempt < peers.attempt and sum(dead) > deaths for attempt, _, *dead in reports)

    while True:
        peers.send_heartbeat()
        peers.wait_until(same)
        try:
            result = f(Survivors(comm, peers, ranks))
        except LostError:
            continue
        peers.attempt = 1 + comm.size - len(ranks)  # it is complete here
        peers.send_heartbeat()
        peers.wait_until(lambda: done() or failed())
        if done():
            return result
