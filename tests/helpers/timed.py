"""Ranks in one process on a virtual clock: each takes its own time to compute, and goes on in the order of time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from helpers.virtual_comm import VirtualClock
from kasoku.core import Comm, Threads, local_threads

T = TypeVar("T")


class _Timed(local_threads._Shared):
    """The turn goes to who can go on now; where nobody can, time passes until the first one has computed."""

    clock: VirtualClock

    def next_turn(self, rank: int) -> None:
        asleep = {r: until for r, until in self.clock.asleep.items() if r not in self.ended}
        order = [(rank + step) % self.size for step in range(1, self.size + 1)]
        ready = [r for r in order if r not in self.ended and r not in asleep]
        free = [r for r in ready if r not in self.waiting or self.waiting[r][1]()]
        if not free and asleep and not self.failure:
            first = min(asleep, key=lambda r: (asleep[r], r))
            self.clock.until(asleep[first])
            del self.clock.asleep[first]
            self.turns[first].release()
            return
        super().next_turn(rank)


def compute(comm: Comm, seconds: float) -> None:
    """Lets this rank compute for so long, while the others go on."""
    comm.clock.asleep[comm.rank] = comm.clock.now() + seconds
    comm.block(f"its computing, {seconds} s", lambda: comm.rank not in comm.clock.asleep)


def timed(size: int, f: Callable[[Comm], T]) -> list[T]:
    """Results of f(comm) on so many ranks of one virtual clock, in rank order."""
    clock: Any = VirtualClock()
    clock.asleep = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Timed, "clock", clock, raising=False)
        patch.setattr(local_threads, "_Shared", _Timed)
        return Threads(size, clock).run(f)
