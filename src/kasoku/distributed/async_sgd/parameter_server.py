"""The shared weights: a worker's copy, its shards as an owner, and the server that adds all updates to them.

Note: staleness. A worker computes an update on weights that it read earlier. The update's staleness is the number of
updates by other workers that were added to the same shard since. The worker's own updates are in its copy already.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kasoku.core import Comm, Trace
from kasoku.distributed.async_sgd.worker import Codec, WorkerGroup, answered

Head = Sequence[int]  # of a request or a reply: a request's kind, and up to three more numbers
UPDATE, CLOCK, SHARE = 1, 2, 3  # kinds of requests
RESTS = 2**62  # the clock of a worker that has ended: no bound waits for it
_STRETCH = 1 << 16  # elements: 256 KiB


class ParameterShard:
    """The owned part, of n elements, of one group of parameters; `workers` send updates, of which it adds `share`."""

    def __init__(self, n: int, workers: Sequence[int], codec: Codec, share: float) -> None:
        self.weights = torch.zeros(n)  # the authoritative values
        self.codec = codec
        self._workers, self._share = workers, share
        self._lock = threading.Lock()
        self._decoded = torch.zeros(0 if codec.exact else n)  # an update, then the reply

    def begin(self, weights: Tensor) -> None:
        """Starts from weights that all workers have."""
        with self._lock:
            self.weights.copy_(weights)
            self.staleness, self._updates = Counter[int](), Counter[int]()  # updates from now on
            self._copies = {rank: weights.clone() for rank in self._workers} if not self.codec.exact else {}

    def take(self, rank: int, update: Tensor, version: int) -> int:
        """Adds a worker's update, writes the reply in its place and returns the version of the weights in it.

        The reply is the weights in fp32; with other codecs it is their difference from the worker's copy. A version is
        the number of updates by other workers in the weights; `version`: of those that the update was computed on. The
        share of an fp32 update is taken here; other updates were scaled before rounding.
        """
        with self._lock:
            new_version = self._updates.total() - self._updates[rank]
            self.staleness[new_version - version] += 1
            worker_copy = self._copies.get(rank)
            self._updates[rank] += 1
            if worker_copy is None:  # each stretch is read again while it is in the cache
                for weights, part in zip(*(torch.split(x, _STRETCH) for x in (self.weights, update)), strict=True):
                    part.copy_(weights.add_(part.mul_(self._share)))
                return new_version
            self.codec.unpack(update, self._decoded)
            self.weights.add_(self._decoded)
            self.codec.pack(torch.sub(self.weights, worker_copy.add_(self._decoded), out=self._decoded), update)
            self.codec.unpack(update, self._decoded)
            worker_copy.add_(self._decoded)  # the rounding error goes out with the next reply
            return new_version


class ParameterServer:
    """Answers the requests of all ranks: has the owned shards and, on the first owner, the clocks and data shares.

    `shards`: one for each group, or None where this rank owns nothing of it. `leaders`: the worker of each
    rank. `ahead`: how many steps a worker may be ahead of the slowest one; None: any number. `shares`: of a batch.

    Note: shares. The ranks of a node look ahead for shares by different numbers of batches. So each asks by number for
    the next share of its node; the first one that asks has it dealt, the others get the same.
    """

    def __init__(
        self, shards: Sequence[ParameterShard | None], leaders: Sequence[int], ahead: int | None, shares: int
    ) -> None:
        self.shards, self.leaders, self._ahead, self.shares = shards, leaders, ahead, shares
        self._lock = threading.Lock()
        self.dealt: tuple[int, int] | None = None  # the next share of the data, and the end; None: not set yet
        self.clocks = dict.fromkeys(leaders, 0)
        self._shares: dict[int, list[int]] = {}  # by worker

    def deal(self, first: int, end: int) -> None:
        """Starts to deal these batches, in shares, unless it has begun."""
        if self.dealt is None:
            self._shares = {worker: [] for worker in self.clocks}
            self.dealt = (first * self.shares, end * self.shares)

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

    def answer(self, rank: int, head: Head, body: Tensor) -> Head:
        """The reply's header; the reply takes the place of the request in `body`."""
        if head[0] == UPDATE and (shard := self.shards[head[1]]):
            return (shard.take(rank, body, head[2]),)
        if head[0] == CLOCK:  # `ready` has noted it
            return (0,)
        with self._lock:  # a share, or -1 at the sync point
            (share, end), shares = self.dealt or (0, 0), self._shares[self.leaders[rank]]
            if head[1]:  # the shares end with the current batch
                end = min(end, -(-share // self.shares) * self.shares)
            if head[2] == len(shares):
                shares.append(share if share < end else -1)
                share = min(end, share + 1)
            self.dealt = (min(end, share), end)
            return (shares[head[2]] if head[2] >= 0 else -1,)


@dataclass(eq=False)
class SharedWeights:
    """One division of the weights among the workers. `server`: of the shards that this rank owns.

    The ranks of a node have equal weights, groups and predictions: each computes the update, the worker alone sends it,
    and all read its replies.
    """

    groups: Sequence[WorkerGroup]  # this rank's copies
    leaders: Sequence[int]  # the worker of each rank: the first one of its node
    rank: int
    node: Comm  # the ranks of this one's node
    max_staleness: int | None  # how many steps a worker may be ahead of the slowest one; None: any number
    shares: int  # in how many parts the workers take a batch, and the divisor of their updates

    def __post_init__(self) -> None:
        self.workers = sorted({*self.leaders})
        self._share = share = 1 / self.shares  # of each worker's update that is added
        codec = self.groups[0].codec
        owned = [group.pieces.get(self.rank) for group in self.groups]
        shards = [ParameterShard(x.stop - x.start, self.workers, codec, share) if x else None for x in owned]
        self.server = ParameterServer(shards, self.leaders, self.max_staleness, self.shares)
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """Takes the parameters, equal on all ranks, as the weights."""
        for group, shard in zip(self.groups, self.server.shards, strict=True):
            group.begin()
            if shard:
                shard.begin(group.base.flat[group.pieces[self.rank]])
        self.server.clocks = dict.fromkeys(self.workers, 0)

    def remove_predictions(self) -> None:
        """Leaves the weights alone in the parameters of all groups."""
        for group in self.groups:
            group.prediction.move(ahead=False)

    @property
    def unchanged(self) -> bool:
        """Whether the parameters are the last known weights, bit for bit: NaN is not equal to itself."""
        pairs = ((group.current.load(), group.base.flat) for group in self.groups)
        return all(torch.equal(now.view(torch.int32), base.view(torch.int32)) for now, base in pairs)

    def due(self, step: int, most: int) -> list[int]:
        """The groups to exchange now, by `WorkerGroup.due` of the worker; the same on all ranks of its node."""
        flags = [self.rank in self.workers and group.due(step, most) for group in self.groups]
        return [g for g, due in enumerate(_copy_from_first(self.node, torch.tensor(flags)).tolist()) if due]

    def send(self, g: int, step: int, transport: Any) -> None:
        """Sends this rank's update of group g to the owners."""
        group = self.groups[g]
        group.sent_at = step
        group.write_request(self._share)
        for owner, slot in group.slots.items():
            head, asks = (UPDATE, g, group.version_used[owner]), self.rank in self.workers
            group.pending[owner] = transport.ask(owner, head, group.message[slot]) if asks else answered([0])
        group.version_used.update(group.version_read)

    def receive(self, group: WorkerGroup, trace: Trace) -> None:
        """Reads the pending replies of a group into the parameters."""
        if not group.pending:
            return
        with trace.span("wait", "fresh weights", bytes=group.message.nbytes):
            read = [int(reply.result()[0]) for reply in group.pending.values()]
            versions = _copy_from_first(self.node, torch.tensor(read))
            _copy_from_first(self.node, group.message)
        group.version_read.update(zip(group.pending, versions.tolist(), strict=True))
        group.pending.clear()
        group.read_reply()

    def gather(self, comm: Comm, step: int) -> tuple[Counter[int], int, float]:
        """Gives all ranks of the comm the whole weights; collective. `step`: this rank's steps since the last time.

        Returns the numbers of updates by staleness, of batches dealt, and of a worker's steps, all since then.
        """
        server = self.server
        for group, shard in zip(self.groups, server.shards, strict=True):
            comm.all_reduce(group.contribution(self.rank, shard.weights if shard else None)).wait()
            group.current.store()
        own = sum((shard.staleness for shard in server.shards if shard), Counter[int]())
        dealt = server.dealt[0] // self.shares if server.dealt else 0  # on the first owner, which deals
        updates, dealt_by, steps = zip(*comm.gather_objects((own, dealt, step)), strict=True)
        first, mean_steps = self.workers[0], sum(steps[worker] for worker in self.workers) / len(self.workers)
        return sum(updates, Counter[int]()), dealt_by[first], mean_steps


def means_over(tensors: Iterable[Tensor], comm: Comm, held: Sequence[object] = ()) -> list[Tensor]:
    """Each floating-point tensor's mean over the ranks; of other tensors the largest values. Collective.

    `held`: for each rank, whether its tensors count; empty: all do.
    """
    mine_count, n = not held or bool(held[comm.rank]), sum(map(bool, held)) or comm.size
    means = []
    for x in tensors:
        floating = x.is_floating_point()
        mine = x.detach().to("cpu", torch.float32 if floating else torch.int64, copy=True).reshape(-1) * mine_count
        comm.all_reduce(mine, op="sum" if floating else "max").wait()
        means.append((mine / n if floating else mine).view_as(x))
    return means


def _copy_from_first(node: Comm, x: Tensor) -> Tensor:
    """Copies x from the node's first rank to the others, bit for bit: a sum of integers and zeros."""
    if node.size > 1:
        bits = x.view(torch.int32 if x.itemsize == 4 else torch.uint8)
        node.all_reduce(bits.zero_() if node.rank else bits).wait()
    return x
