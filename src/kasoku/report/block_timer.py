"""Which block of a model is under way, in forward and in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kasoku.core import Job
from kasoku.core.blocks import blocks
from kasoku.core.hooks import ignores_values


def follow_blocks(job: Job, enter: Callable[[str], None], due: Callable[[], bool]) -> None:
    """Calls enter(name) where forward or backward of a block begins, and where it ends with what was before it or "".

    The backward of a block begins when the gradient of its output has come, and lasts until that of another one has;
    blocks that give anything but one tensor, and those that nothing is learnt in, are left out there.

    Args:
        job: whose model is followed, in training only, until the job is closed.
        enter: is told.
        due: whether it is to be told in the step under way.
    """
    follower = _Follower(enter, due)
    job.undo(job.model.register_forward_pre_hook(lambda m, _: follower.anew(m)).remove)
    for name, block in blocks(job.model):
        before = ignores_values(lambda m, _, name=name: follower.begins(name, m))
        after = ignores_values(lambda m, _, out, name=name: follower.ends(name, m, out))
        job.undo(block.register_forward_pre_hook(before).remove)
        job.undo(block.register_forward_hook(after).remove)


class _Follower:
    def __init__(self, enter: Callable[[str], None], due: Callable[[], bool]) -> None:
        self.enter, self.due = enter, due
        self.now = ""
        self.outer: list[str] = []  # what forward interrupts: backward, where it needs something to be computed again

    def anew(self, model: nn.Module) -> None:
        """The model's forward begins."""
        if self._follows(model):
            self.outer.clear()
            self._to("")

    def begins(self, name: str, block: nn.Module) -> None:
        """A block's forward begins."""
        if self._follows(block):
            self.outer.append(self.now)
            self._to(name)

    def ends(self, name: str, block: nn.Module, out: object) -> None:
        """A block's forward ends; its backward begins with the gradient of what it gave."""
        if self._follows(block):
            self._to(self.outer.pop() if self.outer else "")
            if isinstance(out, Tensor) and out.requires_grad:
                hook: Any = out.register_hook
                hook(lambda _: self._to(name))

    def _to(self, name: str) -> None:
        self.now = name
        self.enter(name)

    def _follows(self, module: nn.Module) -> bool:
        return module.training and torch.is_grad_enabled() and self.due()
