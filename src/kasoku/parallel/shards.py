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
_KEPT = 0.95  # of the mean square of updates, at each one


@dataclass(frozen=True)
class Remedies:
    """What is done so that updates to weights that have moved on still help.

    Args:
        damp: an update staler than usual (one from each other worker) counts for less: by workers / (1 + staleness).
        compensate: what the weights' way since then changes in the gradient, to first order with the squared gradient
            in the Hessian's place; the factor is relative (2.0 in the paper), 0: none.
        predict: the gradient is taken where the weights are expected to be when it is added: so many times the others'
            last movement ahead; 0: where they are. Below 0: 2 beside hidden=True, as the weights are that many
            exchanges old by then, else 0 (as measured: RECORDS.md).
        momentum: the optimizers' own while ranks are asynchronous, as several workers act like momentum themselves;
            rates are scaled so that a gradient moves the weights as far as before; below 0: as it is.

    Ref: damp: Zhang et al. 2016 (arXiv 1511.05950). compensate: Zheng et al. 2017 (DC-ASGD, arXiv 1609.08326). predict:
        Sato 2017 (the [001] team). momentum: Mitliagkas et al. 2016 (arXiv 1605.09774).
    """

    damp: bool = False
    compensate: float = 0.0
    predict: float = -1.0
    momentum: float = -1.0

    def __post_init__(self) -> None:
        if self.compensate < 0:
            raise InputError(f"compensate={self.compensate}: 0 or more")
        if self.momentum >= 1:
            raise InputError(f"momentum={self.momentum}: from 0 to below 1, or below 0 to leave it as it is")


class Shard:
    """A stretch of one group of parameters, as its owner has it.

    Args:
        n: elements.
        workers: the ranks that send updates.
        remedies: against stale ones.
        code: in which bits updates come and answers go.
        share: of an update, that is added.

    Attributes: `weights`: the true ones. `staleness`: how many updates had how much of it.
    """

    def __init__(self, n: int, workers: Sequence[int], remedies: Remedies, code: Code, *, share: float = 1.0) -> None:
        self.weights = torch.zeros(n)
        self.staleness: Counter[int] = Counter()
        self.code = code
        self._workers, self._remedies, self._share = workers, remedies, share
        self._keeps = remedies.compensate > 0 or not code.exact  # what each worker was told
        self._lock = threading.Lock()
        self._squares: Tensor | None = None
        self._exact = torch.zeros(n if self._keeps else 0)  # what came and goes, in the weights' own type

    def begin(self, weights: Tensor) -> None:
        """From here on these are the weights, which all workers have."""
        with self._lock:
            self.weights.copy_(weights)
            self._version, self._own = 0, Counter[int]()
            self._told = {rank: weights.clone() for rank in self._workers} if self._keeps else {}

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
            if told is None:  # each stretch is read again while it is in the cache
                damped = self._damped(others - basis)
                parts = (torch.split(x, _STRETCH) for x in (self.weights, update, out))
                for weights, moved, copy in zip(*parts, strict=True):
                    copy.copy_(weights.add_(moved.mul_(self._share), alpha=damped))
                self._version += 1
                self._own[rank] += 1
                return others
            self.code.unpack(update, self._exact)
            update = self._exact
            if self._share != 1:
                update.mul_(self._share)
            self._add(update, others - basis, told)
            self._version += 1
            self._own[rank] += 1
            if self.code.exact:
                told.copy_(out.copy_(self.weights))
            else:
                self.code.pack(torch.sub(self.weights, told.add_(update), out=self._exact), out)
                self.code.unpack(out, self._exact)
                told.add_(self._exact)  # what rounding takes is told the next time
            return others

    def _damped(self, staleness: int) -> float:
        return min(1.0, len(self._workers) / (1 + staleness)) if self._remedies.damp else 1.0

    def _add(self, update: Tensor, staleness: int, told: Tensor) -> None:
        remedies, damped = self._remedies, self._damped(staleness)
        if remedies.compensate:
            if self._squares is None:
                self._squares = update * update
            else:
                self._squares.mul_(_KEPT).addcmul_(update, update, value=1 - _KEPT)
            curved = update * update / self._squares.sqrt().clamp(min=torch.finfo(update.dtype).tiny)
            self.weights.addcmul_(curved, self.weights - told, value=-damped * remedies.compensate)
        self.weights.add_(update, alpha=damped)


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
        """No update was stale."""
        return {"staleness": {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """There is nothing to go on from."""
