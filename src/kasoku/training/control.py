"""What ranks tell each other between steps."""

from __future__ import annotations

import math

import torch

from kasoku.core import Comm, Work

_EVERY_S = 0.25


class Rounds:
    """What the ranks tell each other between steps: a few numbers, of which all get the largest.

    Note: never in the way. A round is begun after one step, goes by gloo, and is read when the next is due, long
    after it ended; neither the device nor the host waits. All ranks know when that is: each round tells how long the
    slowest rank's steps take, and the next is due after as many of them as fill a quarter of a second. So what one
    rank says is acted on by all after the same step, half a second later, or two steps where steps take longer.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._work: Work | None = None
        self._told = torch.zeros(0)
        self._gap, self._steps, self._since = 1, 0, comm.clock.now()

    def step(self, *mine: float) -> list[float] | None:
        """To be called after each step: what was told in the last round, or None while the next is not due."""
        if self._comm.size == 1:
            return list(mine)
        self._steps += 1
        if self._steps < self._gap:
            return None
        now = self._comm.clock.now()
        taken_s = (now - self._since) / self._steps
        told = self.close() or [0.0] * (len(mine) + 1)
        self._told = torch.tensor([*mine, taken_s], dtype=torch.float64)
        self._work = self._comm.all_reduce(self._told, op="max")
        self._gap = max(1, min(1000, math.floor(_EVERY_S / told[-1]))) if told[-1] else 1
        self._steps, self._since = 0, now
        return told[:-1]

    def close(self) -> list[float] | None:
        """Ends the round under way."""
        if self._work is None:
            return None
        self._work.wait()
        self._work = None
        told: list[float] = self._told.tolist()
        return told
