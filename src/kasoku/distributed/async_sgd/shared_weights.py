"""The shared weights as one rank sees them: its copy as a worker, and its shards as an owner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from kasoku.distributed.async_sgd.exchange_settings import ExchangeSettings
from kasoku.distributed.async_sgd.parameter_server import ParameterServer, ParameterShard
from kasoku.distributed.async_sgd.survivors import Table, mean_buffers
from kasoku.distributed.async_sgd.transport import Roles
from kasoku.distributed.async_sgd.worker import WorkerGroup


class SharedWeights:
    """One division of the weights among owners.

    Args:
        groups: of parameters, equal on all ranks.
        roles: the workers and the owners.
        rank: this rank.
        settings: of the exchange.
        zeros: allocates the buffers of requests and replies.

    Attributes: `groups`: this rank's copies. `server`: of the shards that this rank owns. `share`: the part of each
        worker's update that is added.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Tensor]],
        roles: Roles,
        rank: int,
        settings: ExchangeSettings,
        zeros: Callable[..., Tensor],
    ) -> None:
        self.roles, self._rank = roles, rank
        self.workers, self.owners = roles
        self.share = 1 / max(1, len(self.workers))
        code, blocking, predicts = settings.code, settings.blocking, settings.predicts
        self.groups = [
            WorkerGroup(params, self.owners, code, blocking=blocking, predicts=predicts, zeros=zeros)
            for params in groups
        ]
        owned = [group.pieces.get(rank) for group in self.groups]
        share = self.share if code.exact else 1.0  # workers scale before they round
        shards = [ParameterShard(x.stop - x.start, self.workers, code, share=share) if x else None for x in owned]
        self.server = ParameterServer(shards, self.workers, settings.max_staleness)
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """Takes the parameters, equal on all ranks, as the weights."""
        for group, shard in zip(self.groups, self.server.shards, strict=True):
            group.begin()
            if shard:
                shard.begin(group.base.flat[group.pieces[self._rank]])
        self.server.reset()

    @property
    def unchanged(self) -> bool:
        """Whether the parameters are those of `begin()`."""
        bits = torch.int32  # NaN is not equal to itself
        return all(torch.equal(group.current.load().view(bits), group.base.flat.view(bits)) for group in self.groups)

    def roles_among(self, living: Sequence[int]) -> Roles:
        """The roles of the next division, without the dead; if all owners are dead, the workers own the weights."""
        workers = [rank for rank in self.workers if rank in living]
        return workers, [rank for rank in self.owners if rank in living] or workers

    def sums(self, table: Table, model: nn.Module) -> tuple[Counter[int], int, list[Tensor]]:
        """The number of updates by staleness, the shares of data dealt, and the means of the model's buffers.

        The sums of the weights remain in each group's `current`. Collective over the ranks of the table.
        """
        trains = self._rank in self.workers
        workers = sum(rank in table.ranks for rank in self.workers)
        for group, shard in zip(self.groups, self.server.shards, strict=True):
            owned = {self._rank: shard.weights} if shard else {}
            table.all_reduce(group.contribution(owned, table.ranks, workers if trains else 0))
        staleness = {str(steps): n for steps, n in self.server.staleness().items()}
        dealt = self.server.dealt[0] if self.server.dealt and self._rank == self.owners[0] else 0
        reports = table.gather((staleness, dealt))
        counts = (Counter({int(steps): n for steps, n in counts.items()}) for counts, _ in reports)
        buffers = mean_buffers(model, table, trains=trains, workers=workers)
        return sum(counts, Counter[int]()), max(dealt for _, dealt in reports), buffers

    def store(self) -> None:
        for group in self.groups:
            group.current.store()
