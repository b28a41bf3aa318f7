"""What a rank owns of the shared weights: it alone adds to them, what the others send it.

Note: what staleness is. A worker's update was computed on weights that it read earlier; its staleness is the number of
others' updates that were added to the same shard since. The worker's own are in its weights already.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kasoku.core import InputError
from kasoku.parallel.post import Head
from kasoku.parallel.wires import Code

UPDATE, CLOCK, SHARE = 1, 2, 3  # kinds of questions
RESTS = 2**62  # the clock of a worker that nobody waits for
_STRETCH = 1 << 16  # elements: 256 KiB


@dataclass(frozen=True)
class Remedies:
    """What is done so that updates to weights that have moved on still help.

    Args:
        predict: the gradient is taken where the weights are expected to be when it is added: so many times the others'
            last movement ahead; 0: where they are. Below 0: 2 beside hidden=True, as the weights are that many
            exchanges old by then, else 0 (as measured: RECORDS.md).
        momentum: the optimizers' own while ranks are asynchronous, as several workers act like momentum themselves;
            rates are scaled so that a gradient moves the weights as far as before; below 0: as it is.

    Ref: predict: Sato 2017 (the [001] team). momentum: Mitliagkas et al. 2016 (arXiv 1605.09774).
    """

    predict: float = -1.0
    momentum: float = -1.0

    def __post_init__(self) -> None:
        if self.momentum >= 1:
            raise InputError(f"momentum={self.momentum}: from 0 to below 1, or below 0 to leave it as it is")


class Shard:
    """A stretch of one group of parameters, as its owner has it.

    Args:
        n: elements.
        workers: the ranks that send updates.
        code: in which bits updates come and answers go.
        share: of an update in fp32, that is added; in fewer bits it comes as such a share.

    Attributes: `weights`: the true ones. `staleness`: how many updates had how much of it.
    """

    def __init__(self, n: int, workers: Sequence[int], code: Code, *, share: float = 1.0) -> None:
        self.weights = torch.zeros(n)
        self.staleness: Counter[int] = Counter()
        self.code = code
        self._workers, self._share = workers, share
        self._lock = threading.Lock()
        self._exact = torch.zeros(0 if code.exact else n)  # what came and goes, in the weights' own type

    def begin(self, weights: Tensor) -> None:
        """From here on these are the weights, which all workers have."""
        with self._lock:
            self.weights.copy_(weights)
            self._version, self._own = 0, Counter[int]()
            self._told = {rank: weights.clone() for rank in self._workers} if not self.code.exact else {}

    def take(self, rank: int, update: Tensor, basis: int, out: Tensor) -> int:
        """Adds a worker's update and fills `out` with what that worker reads; returns its new basis.

        It reads the weights, or in fewer bits the way from where it believes them to be.

        Args:
            rank: the worker.
            update: a share of it is added; it has added the same to what it believes. Not what it was afterwards.
            basis: what the worker got when it read the weights that the update was computed on.
            out: the weights, or in fewer bits the difference; it may be the memory of `update`.
        """
        with self._lock:
            others = self._version - self._own[rank]
            self.staleness[others - basis] += 1
            told = self._told.get(rank)
            self._version += 1
            self._own[rank] += 1
            if told is None:  # each stretch is read again while it is in the cache
                parts = (torch.split(x, _STRETCH) for x in (self.weights, update, out))
                for weights, moved, copy in zip(*parts, strict=True):
                    copy.copy_(weights.add_(moved.mul_(self._share)))
                return others
            self.code.unpack(update, self._exact)
            self.weights.add_(self._exact)
            self.code.pack(torch.sub(self.weights, told.add_(self._exact), out=self._exact), out)
            self.code.unpack(out, self._exact)
            told.add_(self._exact)  # what rounding takes is told the next time
            return others


class Owned:
    """All that a rank owns, group by group, and on one rank the workers' clocks: the Desk of asynchronous ranks.

    Args:
        shards: of each group, or None where it owns none.
        workers: the ranks that train.
        ahead: how many steps a worker may be ahead of the slowest one; None: any number.
    """

    def __init__(self, shards: Sequence[Shard | None], workers: Sequence[int], ahead: int | None) -> None:
        self.shards, self._ahead = shards, ahead
        self._lock = threading.Lock()
        self._workers = workers
        self.dealt: tuple[int, int] | None = None  # the next share of the data, and where to end; None: not yet known
        self.reset()

    def reset(self) -> None:
        """All workers are at the same step."""
        self.clocks = dict.fromkeys(self._workers, 0)

    def gone(self, rank: int) -> None:
        """Nobody waits for the clock of a dead worker."""
        if rank in self.clocks:
            self.clocks[rank] = RESTS

    def deal(self, first: int, end: int) -> None:
        """Begins to give away shares of the data, by number."""
        self.dealt = (first, end)

    def staleness(self) -> Counter[int]:
        """Of all updates so far."""
        return sum((shard.staleness for shard in self.shards if shard), Counter[int]())

    def size(self, head: Head) -> tuple[int, torch.dtype]:
        """An update, and as many elements back; nothing with a clock."""
        shard = self.shards[head[1]] if head[0] == UPDATE else None
        return (shard.code.elements(len(shard.weights)), shard.code.dtype) if shard else (0, torch.float32)

    def ready(self, rank: int, head: Head) -> bool:
        """A worker that says its clock waits until the slowest one is near enough."""
        if head[0] == SHARE:
            return self.dealt is not None
        if head[0] != CLOCK or self._ahead is None:
            return True
        self.clocks[rank] = max(self.clocks[rank], head[1])
        return head[1] <= min(self.clocks.values()) + self._ahead or head[1] == RESTS

    def answer(self, rank: int, head: Head, body: Tensor, out: Tensor) -> Head:
        """Takes an update, or gives a share of the data; a clock was taken when it was looked at."""
        if head[0] == SHARE:
            return (self._next(head[1]),)
        shard = self.shards[head[1]] if head[0] == UPDATE else None
        return (shard.take(rank, body, head[2], out),) if shard else (0,)

    def _next(self, wish: int) -> int:
        """The next share, or -1; after a wish all ranks meet as soon as a whole batch is dealt."""
        with self._lock:
            share, end = self.dealt or (0, 0)
            if wish:
                end = min(end, -(-share // len(self._workers)) * len(self._workers))
            self.dealt = (min(end, share + 1), end)
            return share if share < end else -1


class Alone:
    """Of one rank, which shares nothing."""

    def state_dict(self) -> dict[str, Any]:
        return {"staleness": {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """There is nothing to go on from."""
