"""The shared weights as one rank sees them: its copy as a worker, and its shards as an owner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kasoku.core import Trace
from kasoku.distributed.async_sgd.parameter_server import UPDATE, ParameterServer, ParameterShard
from kasoku.distributed.async_sgd.survivors import Table, mean_buffers
from kasoku.distributed.async_sgd.sync_phases import Momentum
from kasoku.distributed.async_sgd.worker import WorkerGroup


class SharedWeights:
    """One division of the weights among owners.

    Args:
        groups: this rank's copies.
        workers: the ranks that train.
        owners: the ranks that own the weights.
        rank: this rank.
        max_staleness: how many steps a worker may be ahead of the slowest one; None: any number.

    Attributes: `server`: of the shards that this rank owns.
    """

    def __init__(
        self,
        groups: Sequence[WorkerGroup],
        workers: Sequence[int],
        owners: Sequence[int],
        rank: int,
        max_staleness: int | None,
    ) -> None:
        self.groups, self.workers, self.owners, self._rank = groups, workers, owners, rank
        self._share = 1 / max(1, len(workers))  # of each worker's update that is added
        codec = groups[0].codec
        share = self._share if codec.exact else 1.0  # workers scale before they round
        owned = [group.pieces.get(rank) for group in groups]
        shards = [ParameterShard(x.stop - x.start, workers, codec, share=share) if x else None for x in owned]
        self.server = ParameterServer(shards, workers, max_staleness)
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """Takes the parameters, equal on all ranks, as the weights."""
        for group, shard in zip(self.groups, self.server.shards, strict=True):
            group.begin()
            if shard:
                shard.begin(group.base.flat[group.pieces[self._rank]])
        self.server.clocks = dict.fromkeys(self.workers, 0)

    def send(self, g: int, step: int, transport: Any, momentum: Momentum | None) -> None:
        """Sends this rank's update of group g to the owners."""
        transport.check()
        group = self.groups[g]
        group.sent_at = step
        group.write_request(self._share, momentum.factors(group.params) if momentum else None)
        for owner, slot in group.slots.items():
            head = (UPDATE, g, group.version_used[owner])
            group.pending[owner] = transport.ask(owner, head, group.request[slot], group.reply[slot])
        group.version_used.update(group.version_read)

    def receive(self, group: WorkerGroup, ahead: float, trace: Trace) -> None:
        """Reads the pending replies of a group into the parameters, and predicts `ahead` times their movement."""
        if not group.pending:
            return
        lost = []
        with trace.span("wait", "fresh weights", bytes=group.reply.nbytes):
            for owner, reply in group.pending.items():
                if reply.exception():
                    lost.append(owner)
                else:
                    group.version_read[owner] = reply.result()[0]
        for owner in lost:  # after all other owners have replied
            group.drop_owner(owner)
        group.pending.clear()
        group.read_reply(ahead)

    def sums(self, table: Table, model: nn.Module) -> tuple[Counter[int], int, list[Tensor]]:
        """The number of updates by staleness, the shares of data dealt, and the means of the model's buffers.

        The sums of the weights remain in each group's `current`. Collective over the ranks of the table.
        """
        trains, server = self._rank in self.workers, self.server
        workers = sum(rank in table.ranks for rank in self.workers)
        for group, shard in zip(self.groups, server.shards, strict=True):
            owned = {self._rank: shard.weights} if shard else {}
            table.all_reduce(group.contribution(owned, table.ranks, workers if trains else 0))
        staleness = sum((shard.staleness for shard in server.shards if shard), Counter[int]())
        dealt = server.dealt[0] if server.dealt and self._rank == self.owners[0] else 0
        reports = table.gather(([*staleness.items()], dealt))
        total: Counter[int] = Counter()
        for counts, _ in reports:
            total.update(dict(counts))
        buffers = mean_buffers(model, table, trains=trains, workers=workers)
        return total, max(dealt for _, dealt in reports), buffers
