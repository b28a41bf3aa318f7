"""A worker's copy of one group of parameters, divided into pieces, one for each owner.

Note: the prediction. Parameters hold it from the end of a step to the next optimizer step or sync point. It is removed
whenever updates are sent or weights are read, as it would otherwise be sent as part of this worker's own update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from kasoku.distributed.async_sgd.quantization import Codec
from kasoku.distributed.async_sgd.transport import PendingReply

_ALONE = 16  # the most steps between two exchanges, however long an exchange takes


def most_alone(max_staleness: int | None) -> int:
    """The most steps between two exchanges if every=0; a bound on staleness may lower it."""
    return _ALONE if max_staleness is None else min(_ALONE, max_staleness)


class Views:
    """A flat buffer, allocated by `zeros(elements, dtype=)`, with one view into it for each parameter of a group."""

    def __init__(self, params: Sequence[Tensor], zeros: Callable[..., Tensor] = torch.zeros) -> None:
        self.flat = zeros(sum(p.numel() for p in params), dtype=torch.float32)
        self.places, start = [], self.flat.storage_offset()  # the buffer may be a part of a larger one
        for p in params:
            self.places.append(torch.as_strided(self.flat, p.shape, p.stride(), start))
            start += p.numel()


@torch.no_grad()
def predict(groups: Sequence[WorkerGroup], *, ahead: bool) -> None:
    """Adds the prediction to the parameters, or removes it."""
    for group in groups:
        times = group.reach if ahead else 0.0
        if times != group.within:
            for p, way in zip(group.params, group.ways.places, strict=True):
                p.add_(way.to(p.device), alpha=times - group.within)
            group.within = times


class WorkerGroup:
    """A worker's copy of a group of parameters.

    Attributes:
        base: the last known weights, with this worker's own updates.
        sent, come: buffers of requests and replies, in the format of `code`. Both are `base` if the exchange can be
            done in place, as an owner replies to a piece only after it has read all of it. Until then the owner may
            write to either.
        way: the other ranks' last movement, on the parameters' device. The prediction is `reach` times this; the
            parameters contain `within` times this now.
        left: the rounding error of the last update, which is sent with the next one.
        written: for each owner, the slice of its piece in `sent` and `come`.
        lost: pieces whose owner is dead; this worker updates its own copy of them until the next sync point.
        basis, read: for each piece, the version of the weights that the next update is computed on, and the last read.
        clock: the worker's step at the last update sent.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        owners: Sequence[int],
        code: Codec,
        *,
        still: bool,
        predicts: bool = False,
        zeros: Callable[..., Tensor] = torch.zeros,
    ) -> None:
        """Arguments that are not attributes.

        still: the parameters do not change during an exchange, and equal the weights read after it.
        predicts: the parameters hold a prediction between exchanges, so `still` is False.
        zeros: allocates the buffers of requests and replies.
        """
        self.params, self.still, self.code = params, still, code
        in_place = still and code.exact
        self.now, self.base = Views(params), Views(params, zeros if in_place else torch.zeros)
        n = len(self.base.flat)
        self.ways = Views(params if predicts else (), partial(torch.zeros, device=params[0].device))
        self.way, self.reach, self.within = self.ways.flat, 0.0, 0.0
        self.left = torch.zeros(0 if code.exact else n)
        cuts = [n * i // len(owners) for i in range(len(owners) + 1)]
        self.pieces = {
            owner: slice(*cut) for owner, *cut in zip(owners, cuts, cuts[1:], strict=False) if cut[0] < cut[1]
        }
        self._goes, self._comes = (
            self.base if in_place else Views(params if code.exact else (), zeros) for _ in range(2)
        )
        self.sent, self.come, self.written = self._goes.flat, self._comes.flat, self.pieces
        if not code.exact:
            self.written, end = {}, 0
            for owner, piece in self.pieces.items():
                start, end = end, end + code.elements(piece.stop - piece.start)
                self.written[owner] = slice(start, end)
            self.sent, self.come = (zeros(end, dtype=code.dtype) for _ in range(2))
        self.basis = dict.fromkeys(self.pieces, 0)
        self.read = dict(self.basis)
        self._passed, self._times = 0, 0
        self.under_way: dict[int, PendingReply] = {}
        self.lost: list[slice] = []
        self.clock = 0

    def begin(self) -> None:
        """Takes the parameters as the last known weights."""
        self.base.flat.copy_(self.gather())
        self.reach = self.within = 0.0
        self.left.zero_()
        self.clock = 0
        self.basis = dict.fromkeys(self.pieces, 0)
        self.read = dict(self.basis)
        self._passed, self._times = 0, 0

    def gather(self) -> Tensor:
        """The parameters in one flat tensor."""
        torch._foreach_copy_(self.now.places, list(self.params))
        return self.now.flat

    def scatter(self, views: Views) -> None:
        """Copies the views into the parameters."""
        torch._foreach_copy_(list(self.params), views.places)

    def due(self, clock: int, most: int) -> bool:
        """Whether to exchange at this step: the last exchange has finished, or began `most` steps ago."""
        return clock - self.clock >= most or all(reply.done for reply in self.under_way.values())

    @property
    def quick(self) -> bool:
        """Whether parameters can be processed one by one, without a flat copy."""
        here = self.params[0].device == self.base.flat.device
        return here and not (len(self.left) or self.lost)

    def own(self) -> Tensor:
        """This worker's update since the last one was sent."""
        return self.gather().sub_(self.base.flat)

    def lose(self, owner: int) -> None:
        """Goes on without a dead owner, which may still write to the buffers of its last request and reply."""
        piece = self.pieces.pop(owner)
        self.written.pop(owner, None)  # with fp32 it is `pieces`
        base = Views(self.params)
        base.flat.copy_(self.base.flat)
        if self.come is self.base.flat:  # it may contain half a reply
            base.flat[piece] = self.gather()[piece]
            self.sent = self.come = base.flat
        else:
            self.come = self.come.clone()
        self.base = base
        self.lost.append(piece)

    def part(self, owned: Mapping[int, Tensor], living: Sequence[int], workers: int) -> Tensor:
        """This rank's summand of the weights: its owned piece, its rounding errors and its share of the dead's pieces.

        A dead rank's piece becomes the mean of the workers' copies, as each worker has updated its own.

        Args:
            owned: this rank's piece, by its rank; empty if it owns none.
            living: the ranks at the sync point.
            workers: how many of them train; 0 if this rank does not train.
        """
        for owner in [rank for rank in self.pieces if rank not in living]:
            self.lose(owner)
        self.now = Views(self.params)  # late messages of a failed attempt are written to the old one
        whole = self.now.flat
        if workers and len(self.left):
            whole += self.left
        for piece in self.lost if workers else ():
            whole[piece] = (whole[piece] + self.base.flat[piece]) / workers
        for rank, weights in owned.items():
            whole[self.pieces[rank]] += weights
        return whole

    def take_update(self, share: float, factors: Sequence[float] | None) -> None:
        """Writes this worker's update into `sent`, and adds `share` of it to `base`; inexact codecs send that share."""
        if self.quick and not factors:
            for p, base, sent in zip(self.params, self.base.places, self._goes.places, strict=True):
                torch.sub(p, base, out=sent)
                if not self.still:
                    p.copy_(base.add_(sent, alpha=share))
        else:
            self._take_all(share, factors)

    def _take_all(self, share: float, factors: Sequence[float] | None) -> None:
        """The general case of `take_update`, with flat copies."""
        update = self.own()
        if factors:
            torch._foreach_mul_(self.now.places, list(factors))
        if self.sent is self.base.flat:
            for piece in self.lost:
                update[piece] += self.base.flat[piece]
            self.sent.copy_(update)
            return
        if not len(self.left):
            self.sent.copy_(update)
        update.mul_(share)
        for piece in self.lost:
            update[piece] /= share
        if len(self.left):
            self.left.copy_(update.add_(self.left))
            for owner, piece in self.pieces.items():
                self.code.pack(update[piece], self.sent[self.written[owner]])
                self.code.unpack(self.sent[self.written[owner]], update[piece])
            self.left.sub_(update)
        self.base.flat.add_(update)
        if not self.still:
            self.scatter(self.base)

    def _limited(self, ahead: float) -> float:
        """Caps the extrapolation: after a stall the last movement is unusually large.

        It is halved until it covers at most twice the usual number of updates.
        """
        passed: float = sum(self.read.values()) - self._passed
        usual = max(1.0, self._passed / self._times) if self._times else passed
        self._passed, self._times = sum(self.read.values()), self._times + 1
        while passed > max(1.0, 2 * usual):
            passed, ahead = passed / 2, ahead / 2
        return ahead

    def take_answer(self, ahead: float) -> None:
        """Applies the replies to the parameters; predicts `ahead` times their movement, or less after a stall."""
        self.reach = self._limited(ahead)
        if len(self.left):
            return self._take_way()
        for piece in self.lost:
            self.come[piece] = self.base.flat[piece]
        if self.still:
            self.scatter(self.base)
            return None
        if self.quick:
            ways: Sequence[Tensor | None] = self.ways.places or [None] * len(self.params)
            for p, base, come, way in zip(self.params, self.base.places, self._comes.places, ways, strict=True):
                p.sub_(base).add_(come)
                if way is not None:
                    torch.sub(come, base, out=way)
                base.copy_(come)
            return None
        own = self.own()
        if len(self.way):
            self.way.copy_(self.come - self.base.flat)
        own.add_(self.base.flat.copy_(self.come))
        return self.scatter(self.now)

    def _take_way(self) -> None:
        """The same for inexact codecs, whose replies are differences."""
        own = torch.zeros(0) if self.still else self.own()
        here = self.base.flat.device  # a movement on this device is written in place
        way = self.now.flat if self.still else self.way.to(here) if len(self.way) else torch.empty_like(self.base.flat)
        for piece in self.lost:
            way[piece] = 0.0
        for owner, piece in self.pieces.items():
            self.code.unpack(self.come[self.written[owner]], way[piece])
        self.base.flat.add_(way)
        if self.still:
            return self.scatter(self.base)
        own.add_(self.base.flat)
        if len(self.way):
            self.way.copy_(way)
        return self.scatter(self.now)
