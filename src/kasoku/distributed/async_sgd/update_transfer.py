"""Sends updates and reads the replies, group by group."""

from __future__ import annotations

from typing import Any

from kasoku.core import Trace
from kasoku.distributed.async_sgd.exchange_settings import ExchangeSettings
from kasoku.distributed.async_sgd.parameter_server import UPDATE
from kasoku.distributed.async_sgd.peers import LostError
from kasoku.distributed.async_sgd.shared_weights import SharedWeights
from kasoku.distributed.async_sgd.sync_phases import Momentum
from kasoku.distributed.async_sgd.worker import WorkerGroup, most_local_steps


class UpdateTransfer:
    """The exchanges of a worker's groups with their owners.

    Args:
        transport: of the requests.
        settings: which groups are exchanged when, and whether a step waits for the replies.
        momentum: scales the updates; None: as they are.
        trace: notes the waits.
    """

    def __init__(self, transport: Any, settings: ExchangeSettings, momentum: Momentum | None, trace: Trace) -> None:
        self._transport, self._settings, self._momentum, self._trace = transport, settings, momentum, trace
        self._turn = 0  # the group that is next with `stream`

    def exchange_due(self, weights: SharedWeights, step: int) -> None:
        """Reads the last reply and sends the next update of each group that is due at this step."""
        settings, groups = self._settings, weights.groups
        candidates = [self._turn] if settings.stream else list(range(len(groups)))
        most = most_local_steps(settings.max_staleness) * (len(groups) if settings.stream else 1)
        due = [g for g in candidates if settings.every or groups[g].due(step, most)]
        for g in due:
            self._turn = (g + 1) % len(groups)
            self._receive(groups[g])
            self._send(weights, g, step)
        for g in due if not settings.hidden else ():
            self._receive(groups[g])
            groups[g].version_used.update(groups[g].version_read)

    def finish(self, weights: SharedWeights, step: int) -> None:
        """Reads all replies, sends what is left, and waits for the replies to that."""
        for g, group in enumerate(weights.groups):
            self._receive(group)
            if step > group.sent_at:
                self._send(weights, g, step)
                self._receive(group)

    def _send(self, weights: SharedWeights, g: int, step: int) -> None:
        self._transport.check()
        group = weights.groups[g]
        group.sent_at = step
        group.write_request(weights.share, self._momentum.factors(group.params) if self._momentum else None)
        for owner, slot in group.slots.items():
            head = (UPDATE, g, group.version_used[owner])
            group.pending[owner] = self._transport.ask(owner, head, group.request[slot], group.reply[slot])
        group.version_used.update(group.version_read)

    def _receive(self, group: WorkerGroup) -> None:
        """Reads the pending replies of a group into the parameters."""
        if not group.pending:
            return
        lost = []
        with self._trace.span("wait", "fresh weights", bytes=group.reply.nbytes):
            for owner, reply in group.pending.items():
                try:
                    group.version_read[owner] = reply.wait()[0]
                except LostError:
                    lost.append(owner)
        for owner in lost:  # after all other owners have replied
            group.drop_owner(owner)
        group.pending.clear()
        group.read_reply(self._settings.ahead)
