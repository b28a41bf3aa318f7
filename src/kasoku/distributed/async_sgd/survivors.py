"""Sums over the ranks that live, by messages between each two of them: no collective waits for a dead one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from kasoku.core import Comm
from kasoku.distributed.async_sgd.liveness import Life, LostError

T = TypeVar("T")


class Table(Protocol):
    """Who meets, and what they can do together."""

    ranks: list[int]

    def all_reduce(self, x: Tensor, *, op: str = "sum") -> None:
        """Every rank's flat x becomes the sum or "max" of all."""
        ...

    def gather(self, thing: Any) -> list[Any]:
        """What each has, in the order of ranks; of what JSON can say."""
        ...


class Everybody:
    """All ranks of a Comm, by its collectives."""

    def __init__(self, comm: Comm) -> None:
        self._comm, self.ranks = comm, list(range(comm.size))

    def all_reduce(self, x: Tensor, *, op: str = "sum") -> None:
        self._comm.all_reduce(x, op=op).wait()

    def gather(self, thing: Any) -> list[Any]:
        return self._comm.gather_objects(thing)


class Survivors:
    """The ranks that live as an attempt to meet begins; LostError where one of them dies meanwhile."""

    def __init__(self, comm: Comm, life: Life) -> None:
        self._comm, self._life, self.ranks, self._tag = comm, life, life.meeting, life.tag

    def swap(self, sent: Mapping[int, Tensor], come: Mapping[int, Tensor]) -> None:
        """Sends to each and receives from each, and waits for both; nothing to or from this rank itself."""
        pending = []
        for rank in self.ranks:
            if rank != self._comm.rank:
                try:
                    works = [self._comm.send(sent[rank], to=rank, tag=self._tag)] if len(sent[rank]) else []
                    works += [self._comm.receive(come[rank], source=rank, tag=self._tag)] if len(come[rank]) else []
                except RuntimeError as error:
                    self._life.lose(rank, "its connection broke")
                    raise LostError(rank) from error
                pending.append(self._life.pending(rank, works, meets=True))
        for one in pending:
            one.wait()

    def all_reduce(self, x: Tensor, *, op: str = "sum") -> None:
        """Each sums a part, in the order of ranks, and gives it to all."""
        cuts = [len(x) * i // len(self.ranks) for i in range(len(self.ranks) + 1)]
        parts = {rank: x[a:b] for rank, a, b in zip(self.ranks, cuts, cuts[1:], strict=False)}
        mine = parts[self._comm.rank]
        come = {rank: torch.empty_like(mine) for rank in self.ranks}
        self.swap(parts, come)
        come[self._comm.rank].copy_(mine)
        mine.zero_() if op == "sum" else mine.copy_(come[self.ranks[0]])
        for rank in self.ranks:
            mine.add_(come[rank]) if op == "sum" else torch.maximum(mine, come[rank], out=mine)
        self.swap(dict.fromkeys(self.ranks, mine.clone()), parts)

    def gather(self, thing: Any) -> list[Any]:
        """First how long, then what."""
        text = torch.frombuffer(bytearray(json.dumps(thing).encode()), dtype=torch.uint8)
        sizes = {rank: torch.tensor([len(text)]) for rank in self.ranks}
        mine = sizes[self._comm.rank].clone()
        self.swap(dict.fromkeys(self.ranks, mine), sizes)
        come = {rank: torch.zeros(int(size), dtype=torch.uint8) for rank, size in sizes.items()}
        come[self._comm.rank] = text
        self.swap(dict.fromkeys(self.ranks, text), come)
        return [json.loads(bytes(come[rank].tolist())) for rank in self.ranks]


def mean_buffers(model: nn.Module, table: Table, *, trains: bool, workers: int) -> list[Tensor]:
    """Floating-point buffers become their means over the workers, others the largest."""
    found = []
    for x in model.buffers():
        exact = x.is_floating_point()
        mine = x.detach().to("cpu", torch.float32 if exact else torch.int64, copy=True).reshape(-1)
        table.all_reduce(mine if trains else mine.zero_(), op="sum" if exact else "max")
        found.append((mine / max(1, workers) if exact else mine).view_as(x))
    return found


def met(comm: Comm, life: Life, f: Callable[[Table], T]) -> tuple[T, list[int]]:
    """What f makes of the survivors, who are told too; f is called again after each death, so it must only read."""
    while True:
        life.attempt()
        table = Survivors(comm, life)
        try:
            found = f(table)
        except LostError:
            continue
        if life.agreed():
            return found, table.ranks
