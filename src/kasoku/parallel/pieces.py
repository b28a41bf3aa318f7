"""A group of parameters as a worker of an asynchronous training has it, cut in pieces for their owners."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kasoku.parallel.post import Question

WIRES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Views:
    """A flat stretch of memory and, in it, the places of a group's parameters."""

    def __init__(self, params: Sequence[Tensor], dtype: torch.dtype = torch.float32) -> None:
        self.flat = torch.zeros(sum(p.numel() for p in params), dtype=dtype)
        self.places, start = [], 0
        for p in params:
            self.places.append(torch.as_strided(self.flat, p.shape, p.stride(), start))
            start += p.numel()


class Group:
    """A group of parameters on a worker.

    Attributes:
        base: the weights as far as it knows them, its own updates included.
        sent, come: what is under way to the owners, and from them.
        aside: what of the parameters is no update: the prediction.
        left: what rounding took from the last update.
        lost: pieces whose owner is dead: this worker moves its own copy of them, until ranks meet.
        basis, read: of each piece: when what the next update is computed on was read, and what was read last.
    """

    def __init__(self, params: Sequence[Tensor], owners: Sequence[int], wire: torch.dtype, *, still: bool) -> None:
        """`still`: the parameters do not move while an exchange is under way, and are what was read after it."""
        self.params, self.still = params, still
        self.now, self.base = Views(params), Views(params)
        self.aside = torch.zeros(0 if still else len(self.base.flat))
        n, exact = len(self.base.flat), wire == torch.float32
        self.leaving = Views(params, wire)
        self.sent = self.leaving.flat
        self.come = self.base.flat if still and exact else torch.zeros(n, dtype=wire)
        self.left = torch.zeros(0 if exact else n)
        cuts = [n * i // len(owners) for i in range(len(owners) + 1)]
        self.pieces = {
            owner: slice(*cut) for owner, *cut in zip(owners, cuts, cuts[1:], strict=False) if cut[0] < cut[1]
        }
        self.basis = dict.fromkeys(self.pieces, 0)
        self.read = dict(self.basis)
        self.under_way: dict[int, Question] = {}
        self.lost: list[slice] = []

    def begin(self) -> None:
        """The parameters as they are become the weights that it knows."""
        self.base.flat.copy_(self.gather())
        self.aside.zero_()
        self.left.zero_()
        self.basis = dict.fromkeys(self.pieces, 0)
        self.read = dict(self.basis)

    def gather(self) -> Tensor:
        """The parameters as they are, flat."""
        torch._foreach_copy_(self.now.places, list(self.params))
        return self.now.flat

    def scatter(self, views: Views) -> None:
        """Sets the parameters."""
        torch._foreach_copy_(list(self.params), views.places)

    @property
    def moved(self) -> bool:
        """Whether the parameters have moved since an update was taken of them."""
        return not torch.equal(self.gather(), self.base.flat if self.still else self.base.flat + self.aside)

    def own(self) -> Tensor:
        """What this worker moved since an update was taken."""
        own = self.gather().sub_(self.base.flat)
        return own if self.still else own.sub_(self.aside)

    def lose(self, owner: int) -> None:
        """Goes on without a piece's owner, which may yet write into what it was asked to fill."""
        piece = self.pieces.pop(owner)
        base = Views(self.params)
        base.flat.copy_(self.base.flat)
        if self.come is self.base.flat:  # half an answer may be in it
            base.flat[piece] = self.gather()[piece]
            self.come = base.flat
        else:
            self.come = self.come.clone()
        self.base = base
        self.lost.append(piece)

    def take_update(self, share: float, factors: Sequence[float] | None) -> None:
        """Fills `sent` with a share of what this worker moved, which counts as added from here on."""
        here = self.params[0].device == self.sent.device
        if here and self.still and not (len(self.left) or factors or self.lost):  # what comes is `base`: two passes
            for place, p, base in zip(self.leaving.places, self.params, self.base.places, strict=True):
                torch.sub(p, base, out=place)
            self.leaving.flat.mul_(share)
            return
        update = self.own().mul_(share)
        if factors:
            torch._foreach_mul_(self.now.places, list(factors))
        for piece in self.lost:
            update[piece] /= share
        if len(self.left):
            self.sent.copy_(update.add_(self.left))
            self.left.copy_(update)
            self.left.sub_(update.copy_(self.sent))
        elif self.still:  # what comes is `base`
            self.sent.copy_(update)
            for piece in self.lost:
                self.base.flat[piece] += update[piece]
            return
        else:
            self.sent.copy_(update)
        self.base.flat.add_(update)
        if not self.still:
            torch.add(self.base.flat, self.aside, out=self.now.flat)
            self.scatter(self.now)

    def take_answer(self, ahead: float) -> None:
        """Adds what came, and goes so many times as far ahead."""
        for piece in self.lost:
            self.come[piece] = 0.0 if len(self.left) else self.base.flat[piece]
        if self.still:
            if len(self.left):
                self.base.flat.add_(self.now.flat.copy_(self.come))
            self.scatter(self.base)
            return
        own = self.own()
        way = self.come if len(self.left) else self.come - self.base.flat
        if len(self.left):
            self.base.flat.add_(way)
        else:
            self.base.flat.copy_(self.come)
        if ahead:
            torch.mul(way, ahead, out=self.aside)
        own.add_(self.base.flat).add_(self.aside)
        self.scatter(self.now)
