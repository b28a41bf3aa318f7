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
        aside: what of `p` is no update: the prediction.
        left: what rounding took from the last update.
    """

    def __init__(self, params: Sequence[Tensor], owners: Sequence[int], wire: torch.dtype) -> None:
        self.params = params
        self.now, self.base, self.aside = (Views(params) for _ in range(3))
        n = len(self.base.flat)
        self.sent, self.come = torch.zeros(n, dtype=wire), torch.zeros(n, dtype=wire)
        self.left = torch.zeros(n if wire != torch.float32 else 0)
        cuts = [n * i // len(owners) for i in range(len(owners) + 1)]
        self.pieces = {
            owner: slice(*cut) for owner, *cut in zip(owners, cuts, cuts[1:], strict=False) if cut[0] < cut[1]
        }
        self.basis = dict.fromkeys(self.pieces, 0)  # of each piece: when what the next update is computed on was read
        self.read = dict(self.basis)
        self.under_way: dict[int, Question] = {}

    def gather(self) -> Tensor:
        """The parameters as they are, flat."""
        torch._foreach_copy_(self.now.places, list(self.params))
        return self.now.flat

    def scatter(self, views: Views) -> None:
        """Sets the parameters."""
        torch._foreach_copy_(list(self.params), views.places)
