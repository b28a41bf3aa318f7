"""The parameter server of a rank: it owns a part of the shared weights and adds all ranks' updates to them.

Note: staleness. A worker computes an update on weights that it read earlier. The update's staleness is the number of
updates by other workers that were added to the same shard since. The worker's own updates are in its copy already.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from kasoku.distributed.async_sgd.quantization import Codec

Head = Sequence[int]  # of a request or a reply: a request's kind, and up to three more numbers
UPDATE, CLOCK, SHARE = 1, 2, 3  # kinds of requests
RESTS = 2**62  # the clock of a worker that has ended or died: no bound waits for it
_STRETCH = 1 << 16  # elements: 256 KiB


class ParameterShard:
    """The owned part of one group of parameters.

    Args:
        n: elements.
        workers: the ranks that send updates.
        codec: the codec of updates and replies.
        share: the factor of each fp32 update; workers scale updates of other codecs before rounding.

    Attributes: `weights`: the authoritative values. `staleness`: the number of updates since `begin` by staleness.
    """

    def __init__(self, n: int, workers: Sequence[int], codec: Codec, *, share: float = 1.0) -> None:
        self.weights = torch.zeros(n)
        self.codec = codec
        self._workers, self._share = workers, share
        self._lock = threading.Lock()
        self._decoded = torch.zeros(0 if codec.exact else n)  # an update, then the reply

    def begin(self, weights: Tensor) -> None:
        """Starts from weights that all workers have."""
        with self._lock:
            self.weights.copy_(weights)
            self.staleness, self._updates, self._own = Counter[int](), 0, Counter[int]()
            self._copies = {rank: weights.clone() for rank in self._workers} if not self.codec.exact else {}

    def take(self, rank: int, update: Tensor, version: int, out: Tensor) -> int:
        """Adds a worker's update, writes the reply into `out` and returns the version of the weights in it.

        The reply is the weights in fp32; with other codecs it is their difference from the worker's copy. A version is
        the number of updates by other workers in the weights.

        Args:
            rank: the worker.
            update: `share` of it is added, as the worker has done in its copy; its memory is overwritten.
            version: of the weights that the update was computed on.
            out: it may share memory with `update`.
        """
        with self._lock:
            new_version = self._updates - self._own[rank]
            self.staleness[new_version - version] += 1
            worker_copy = self._copies.get(rank)
            self._updates += 1
            self._own[rank] += 1
            if worker_copy is None:  # each stretch is read again while it is in the cache
                parts = (torch.split(x, _STRETCH) for x in (self.weights, update, out))
                for weights, part, reply in zip(*parts, strict=True):
                    reply.copy_(weights.add_(part.mul_(self._share)))
                return new_version
            self.codec.unpack(update, self._decoded)
            self.weights.add_(self._decoded)
            self.codec.pack(torch.sub(self.weights, worker_copy.add_(self._decoded), out=self._decoded), out)
            self.codec.unpack(out, self._decoded)
            worker_copy.add_(self._decoded)  # the rounding error goes out with the next reply
            return new_version


class ParameterServer:
    """Answers the requests of all ranks: has the owned shards and, on the first owner, the clocks and data shares.

    Args:
        shards: one for each group, or None where this rank owns nothing of the group.
        workers: the ranks that train.
        ahead: how many steps a worker may be ahead of the slowest one; None: any number.
    """

    def __init__(self, shards: Sequence[ParameterShard | None], workers: Sequence[int], ahead: int | None) -> None:
        self.shards, self._ahead = shards, ahead
        self._lock = threading.Lock()
        self._workers = workers
        self.dealt: tuple[int, int] | None = None  # the next share of the data, and the end; None: not set yet
        self.clocks = dict.fromkeys(workers, 0)

    def rank_died(self, rank: int) -> None:
        """Takes a dead worker out of the bound on clocks."""
        if rank in self.clocks:
            self.clocks[rank] = RESTS

    def size(self, head: Head) -> tuple[int, torch.dtype]:
        """Elements and type of an update, which are the reply's too; requests of other kinds have no body."""
        shard = self.shards[head[1]] if head[0] == UPDATE else None
        return (shard.codec.elements(len(shard.weights)), shard.codec.dtype) if shard else (0, torch.float32)

    def ready(self, rank: int, head: Head) -> bool:
        """Holds a worker's clock request until the slowest worker is within the bound."""
        if head[0] == SHARE:
            return self.dealt is not None
        if head[0] != CLOCK or self._ahead is None:
            return True
        self.clocks[rank] = max(self.clocks[rank], head[1])
        return head[1] <= min(self.clocks.values()) + self._ahead or head[1] == RESTS

    def answer(self, rank: int, head: Head, body: Tensor, out: Tensor) -> Head:
        """The reply's header; reads `body` and fills `out`, which may share memory with `body`."""
        shard = self.shards[head[1]] if head[0] == UPDATE else None
        if shard:
            return (shard.take(rank, body, head[2], out),)
        if head[0] == CLOCK:  # `ready` has noted it
            return (0,)
        with self._lock:  # the next share, or -1 at the sync point
            share, end = self.dealt or (0, 0)
            if head[1]:  # the shares end with the current batch
                end = min(end, -(-share // len(self._workers)) * len(self._workers))
            self.dealt = (min(end, share + 1), end)
            return (share if share < end else -1,)
