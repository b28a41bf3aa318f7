"""A group of parameters as a worker of an asynchronous training has it, cut in pieces for their owners.

Note: where the prediction is. In the parameters from the end of a step to the next step of the optimizer, or to a
meeting; never while a group reads or writes them, as it would be sent like something that this worker moved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from kasoku.parallel.post import Question
from kasoku.parallel.wires import Code

_ALONE = 16  # steps at most between two exchanges, however long one takes


def most_alone(max_staleness: int | None) -> int:
    """Steps at most between two exchanges, where a rank makes as many as one lasts; no more than a bound allows."""
    return _ALONE if max_staleness is None else min(_ALONE, max_staleness)


class Views:
    """A flat stretch of memory, made by `zeros(elements, dtype=)`, and in it the places of a group's parameters."""

    def __init__(self, params: Sequence[Tensor], zeros: Callable[..., Tensor] = torch.zeros) -> None:
        self.flat = zeros(sum(p.numel() for p in params), dtype=torch.float32)
        self.places, start = [], self.flat.storage_offset()  # it may be a part of a larger memory
        for p in params:
            self.places.append(torch.as_strided(self.flat, p.shape, p.stride(), start))
            start += p.numel()


@torch.no_grad()
def predict(groups: Sequence[Group], *, ahead: bool) -> None:
    """Brings the parameters to where they are expected to be, or back to what they are."""
    for group in groups:
        times = group.reach if ahead else 0.0
        if times != group.within:
            for p, way in zip(group.params, group.ways.places, strict=True):
                p.add_(way.to(p.device), alpha=times - group.within)
            group.within = times


class Group:
    """A group of parameters on a worker.

    Attributes:
        base: the weights as far as it knows them, its own updates included.
        sent, come: what is under way to the owners, and from them, as `code` writes it; both are `base` where that
            suffices, as an owner answers a piece when it has it whole. An owner may work in either until it answers.
        way: what others moved last, where the parameters are. `reach` times this is the prediction; `within` times
            are in the parameters now.
        left: what rounding took from the last update.
        written: of each owner, where its piece lies in `sent` and `come`.
        lost: pieces whose owner is dead: this worker moves its own copy of them, until ranks meet.
        basis, read: of each piece: when what the next update is computed on was read, and what was read last.
        clock: the worker's, when an update was sent last.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        owners: Sequence[int],
        code: Code,
        *,
        still: bool,
        predicts: bool = False,
        zeros: Callable[..., Tensor] = torch.zeros,
    ) -> None:
        """Args beside the attributes.

        still: the parameters do not move while an exchange is under way, and are what was read after it.
        predicts: they are then taken ahead of that, so they are not still.
        zeros: makes the memory of what is sent and comes.
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
        self.under_way: dict[int, Question] = {}
        self.lost: list[slice] = []
        self.clock = 0

    def begin(self) -> None:
        """The parameters as they are become the weights that it knows."""
        self.base.flat.copy_(self.gather())
        self.reach = self.within = 0.0
        self.left.zero_()
        self.clock = 0
        self.basis = dict.fromkeys(self.pieces, 0)
        self.read = dict(self.basis)
        self._passed, self._times = 0, 0

    def gather(self) -> Tensor:
        """The parameters as they are, flat."""
        torch._foreach_copy_(self.now.places, list(self.params))
        return self.now.flat

    def scatter(self, views: Views) -> None:
        """Sets the parameters."""
        torch._foreach_copy_(list(self.params), views.places)

    def due(self, clock: int, most: int) -> bool:
        """Whether it is exchanged again at this step: the last exchange is over, or was `most` steps ago."""
        return clock - self.clock >= most or all(question.done for question in self.under_way.values())

    @property
    def quick(self) -> bool:
        """Each parameter can be taken by itself, in one go."""
        here = self.params[0].device == self.base.flat.device
        return here and not (len(self.left) or self.lost)

    def own(self) -> Tensor:
        """What this worker moved since an update was taken."""
        return self.gather().sub_(self.base.flat)

    def lose(self, owner: int) -> None:
        """Goes on without a piece's owner, which may yet write into what it was sent and asked to fill."""
        piece = self.pieces.pop(owner)
        self.written.pop(owner, None)  # with fp32 it is `pieces`
        base = Views(self.params)
        base.flat.copy_(self.base.flat)
        if self.come is self.base.flat:  # half an answer may be in it
            base.flat[piece] = self.gather()[piece]
            self.sent = self.come = base.flat
        else:
            self.come = self.come.clone()
        self.base = base
        self.lost.append(piece)

    def part(self, owned: Mapping[int, Tensor], living: Sequence[int], workers: int) -> Tensor:
        """This rank's part of the weights: what it owns, what rounding kept back, its part of what the dead had.

        What a dead rank owned becomes the mean of the workers' copies, each of which it has moved on by itself.

        Args:
            owned: the piece of this rank, by its number; empty where it has none.
            living: the ranks that meet.
            workers: how many of them train; 0 where this one does not.
        """
        for owner in [rank for rank in self.pieces if rank not in living]:
            self.lose(owner)
        self.now = Views(self.params)  # what comes late for a meeting that a death ended is written to the old one
        whole = self.now.flat
        if workers and len(self.left):
            whole += self.left
        for piece in self.lost if workers else ():
            whole[piece] = (whole[piece] + self.base.flat[piece]) / workers
        for rank, weights in owned.items():
            whole[self.pieces[rank]] += weights
        return whole

    def take_update(self, share: float, factors: Sequence[float] | None) -> None:
        """Fills `sent` with what this worker moved (in fewer bits: a share of it), a share of which counts as added."""
        if self.quick and not factors:
            for p, base, sent in zip(self.params, self.base.places, self._goes.places, strict=True):
                torch.sub(p, base, out=sent)
                if not self.still:
                    p.copy_(base.add_(sent, alpha=share))
        else:
            self._take_all(share, factors)

    def _take_all(self, share: float, factors: Sequence[float] | None) -> None:
        """The same with flat copies of all parameters."""
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
        """How many times what others moved now is gone ahead: after a halt that is long, and what follows is not.

        So it is halved until it is of no more than twice the updates that came in between before, on average.
        """
        passed: float = sum(self.read.values()) - self._passed
        usual = max(1.0, self._passed / self._times) if self._times else passed
        self._passed, self._times = sum(self.read.values()), self._times + 1
        while passed > max(1.0, 2 * usual):
            passed, ahead = passed / 2, ahead / 2
        return ahead

    def take_answer(self, ahead: float) -> None:
        """Adds what came; the prediction is so many times as far ahead, or less after a halt."""
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
        """The same where the others' way came, in fewer bits."""
        own = torch.zeros(0) if self.still else self.own()
        here = self.base.flat.device  # a way that is here is written in place
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
