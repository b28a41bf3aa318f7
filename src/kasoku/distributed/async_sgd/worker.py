"""A worker's copy of one group of parameters, divided into pieces, one for each owner."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from kasoku.distributed.async_sgd.quantization import Codec

Reply = Future[Any]  # to a request: the first tensor received
_MOST_LOCAL_STEPS = 16  # between two exchanges, however long an exchange takes


def most_local_steps(max_staleness: int | None) -> int:
    """The most steps between two exchanges if every=0; a bound on staleness may lower it."""
    return _MOST_LOCAL_STEPS if max_staleness is None else min(_MOST_LOCAL_STEPS, max_staleness)


class FlatViews:
    """A flat buffer on a device, with one view into it for each parameter of a group."""

    def __init__(self, params: Sequence[Tensor], device: torch.device | None = None) -> None:
        self.params = params
        sizes = [p.numel() for p in params]
        self.flat = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        parts = zip(torch.split(self.flat, sizes), params, strict=True)
        self.views = [part.as_strided(p.shape, p.stride()) for part, p in parts]

    def load(self) -> Tensor:
        """Copies the parameters into the buffer, and returns it."""
        torch._foreach_copy_(self.views, list(self.params))
        return self.flat

    def store(self) -> None:
        """Copies the buffer into the parameters."""
        torch._foreach_copy_(list(self.params), self.views)


class Prediction(FlatViews):
    """Moves a group's parameters by `ahead` times the other ranks' last movement.

    Parameters contain the prediction from the end of a step to the next optimizer step or sync point. It is removed
    whenever updates are sent or weights are read, as it would otherwise be sent as part of this worker's own update.

    The buffer holds that movement, on the parameters' device; it is empty if `ahead` is 0.
    """

    def __init__(self, params: Sequence[Tensor], ahead: float) -> None:
        super().__init__(params if ahead else (), params[0].device)
        self._ahead = ahead
        self.reset()

    def reset(self) -> None:
        self._factor = self._applied = 0.0
        self._updates, self._exchanges = 0, 0

    def set_factor(self, updates: int) -> None:
        """Sets the multiple of the movement, when the weights contain so many updates by other ranks.

        After a stall the last movement is unusually large. So `ahead` is halved until the movement covers at most twice
        the usual number of updates.
        """
        new: float = updates - self._updates
        usual = max(1.0, self._updates / self._exchanges) if self._exchanges else new
        self._updates, self._exchanges, self._factor = updates, self._exchanges + 1, self._ahead
        while new > max(1.0, 2 * usual):
            new, self._factor = new / 2, self._factor / 2

    def add(self) -> None:
        self._apply(self._factor)

    def remove(self) -> None:
        self._apply(0.0)

    @torch.no_grad()
    def _apply(self, times: float) -> None:
        if times != self._applied:
            for p, movement in zip(self.params, self.views, strict=True):
                p.add_(movement.to(p.device), alpha=times - self._applied)
            self._applied = times


class WorkerGroup:
    """A worker's copy of a group of parameters.

    Args:
        params: the parameters.
        owners: of the pieces.
        codec: of messages.
        blocking: the parameters do not change during an exchange, and equal the weights read after it.
        ahead: of the prediction that the parameters hold between exchanges, so `blocking` is False; 0: none.

    Attributes:
        base: the last known weights, with this worker's own updates.
        request, reply: buffers of messages.
        residual: the rounding error of the last update, which is sent with the next one.
        slots: for each owner, the slice of its piece in `request` and `reply`.
        version_used, version_read: for each owner, the version of the weights that the next update is computed on, and
            of those that were read last.
        sent_at: the worker's step at the last request.
    """

    def __init__(
        self, params: Sequence[Tensor], owners: Sequence[int], codec: Codec, *, blocking: bool, ahead: float = 0.0
    ) -> None:
        self.params, self.owners, self._blocking, self.codec = params, owners, blocking, codec
        self.current, self.base = FlatViews(params), FlatViews(params)
        self.prediction = Prediction(params, ahead)
        n = len(self.base.flat)
        self.residual = torch.zeros(0 if codec.exact else n)
        cuts = [n * i // len(owners) for i in range(len(owners) + 1)]
        pieces = zip(owners, cuts, cuts[1:], strict=False)
        self.pieces = {owner: slice(start, stop) for owner, start, stop in pieces if start < stop}
        if codec.exact:
            self._request, self._reply = (FlatViews(params) for _ in range(2))
            self.request, self.reply, self.slots = self._request.flat, self._reply.flat, self.pieces
        else:
            self.slots, end = {}, 0
            for owner, piece in self.pieces.items():
                start, end = end, end + codec.elements(piece.stop - piece.start)
                self.slots[owner] = slice(start, end)
            self.request, self.reply = (torch.zeros(end, dtype=codec.dtype) for _ in range(2))
        self.pending: dict[int, Reply] = {}

    def begin(self) -> None:
        """Takes the parameters as the last known weights."""
        self.base.flat.copy_(self.current.load())
        self.prediction.reset()
        self.residual.zero_()
        self.sent_at = 0
        self.version_used = dict.fromkeys(self.pieces, 0)
        self.version_read = dict(self.version_used)

    def due(self, step: int, most: int) -> bool:
        """Whether to exchange at this step: the last exchange has finished, or began `most` steps ago."""
        return step - self.sent_at >= most or all(reply.done() for reply in self.pending.values())

    @property
    def _by_parameter(self) -> bool:
        """Whether parameters can be processed one by one, without a flat copy."""
        here = self.params[0].device == self.base.flat.device
        return here and not len(self.residual)

    def contribution(self, rank: int, owned: Tensor | None) -> Tensor:
        """This rank's summand of the weights: the piece that it owns, if any, and a worker's rounding errors."""
        whole = self.current.flat.zero_()
        if rank in self.owners and len(self.residual):
            whole += self.residual
        if owned is not None:
            whole[self.pieces[rank]] += owned
        return whole

    def write_request(self, share: float) -> None:
        """Writes this worker's update into `request`, and adds `share` of it to `base`.

        Inexact codecs send that share.
        """
        if not self._by_parameter:
            self._write_request(share)
            return
        for p, base, request in zip(self.params, self.base.views, self._request.views, strict=True):
            torch.sub(p, base, out=request)
            if not self._blocking:
                p.copy_(base.add_(request, alpha=share))

    def _write_request(self, share: float) -> None:
        """The general case, with flat copies."""
        update = self.current.load().sub_(self.base.flat)
        if not len(self.residual):
            self.request.copy_(update)
        update.mul_(share)
        if len(self.residual):
            self.residual.copy_(update.add_(self.residual))
            for owner, piece in self.pieces.items():
                self.codec.pack(update[piece], self.request[self.slots[owner]])
                self.codec.unpack(self.request[self.slots[owner]], update[piece])
            self.residual.sub_(update)
        self.base.flat.add_(update)
        if not self._blocking:
            self.base.store()

    def read_reply(self) -> None:
        """Applies the replies to the parameters, and notes their movement for the prediction.

        Replies are weights; those of inexact codecs are differences.
        """
        self.prediction.set_factor(sum(self.version_read.values()))
        if not self._by_parameter or self._blocking:
            self._read_reply()
            return
        movements: Sequence[Tensor | None] = self.prediction.views or [None] * len(self.params)
        views = self.base.views, self._reply.views, movements
        for p, base, reply, movement in zip(self.params, *views, strict=True):
            p.sub_(base).add_(reply)
            if movement is not None:
                torch.sub(reply, base, out=movement)
            base.copy_(reply)

    def _read_reply(self) -> None:
        """The general case, with flat copies."""
        base, reply, predicted = self.base.flat, self.reply, self.prediction.flat
        update = None if self._blocking else self.current.load().sub_(base)  # since the last one was sent
        if self.codec.exact:
            if len(predicted):
                predicted.copy_(reply - base)
            base.copy_(reply)
        else:
            whole = torch.empty_like(base) if update is not None else self.current.flat
            if len(predicted):  # on this device it is written in place
                whole = predicted.to(base.device)
            for owner, piece in self.pieces.items():
                self.codec.unpack(reply[self.slots[owner]], whole[piece])
            base.add_(whole)
            if len(predicted):
                predicted.copy_(whole)
        if update is None:
            self.base.store()
        else:
            update.add_(base)
            self.current.store()
