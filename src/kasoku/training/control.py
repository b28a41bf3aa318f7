"""Signals, and the requests that ranks make of each other between steps."""

import math
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

import torch

from kasoku.core import Comm, Work

_EVERY_S = 0.25
_SAME_S = 0.3  # a parent that is killed signals its children once for each of its threads: that is one signal


class Request(NamedTuple):
    """What a rank, or all ranks together, request between steps; the maxima over ranks are the request of them all.

    Fields: `save`: a checkpoint is due; `stop`: the number of the signal that was caught, or 0; `failed`: the rank
    cannot go on, so the ranks must meet; `join`: a newcomer waits for them.
    """

    save: bool = False
    stop: int = 0
    failed: bool = False
    join: bool = False

    @classmethod
    def merge(cls, requests: "Iterable[Request]") -> "Request":
        return cls(*map(max, zip(*requests, strict=True)))


class ControlChannel:
    """Carries the requests of all ranks between steps.

    Note: it delays no step. An exchange starts after one step, runs by gloo, and is read when the next one is due, long
    after it ended; neither the device nor the host waits. All ranks know when that is: each exchange includes how long
    the slowest rank's steps take, and the next is due after as many of them as fill a quarter of a second. So all ranks
    act on a request after the same step, half a second later, or two steps where steps take longer.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._work: Work | None = None
        self._values = torch.zeros(0)
        self._gap, self._steps, self._since = 1, 0, comm.clock.now()

    def exchange(self, request: Request) -> Request | None:
        """To be called after each step: the result of the last exchange, or None while the next is not due.

        Collective: all ranks call it after the same steps.
        """
        if self._comm.size == 1:
            return request
        self._steps += 1
        if self._steps < self._gap:
            return None
        now = self._comm.clock.now()
        step_s = (now - self._since) / self._steps
        *values, slowest_s = self.close() or (*Request(), 0.0)
        self._values = torch.tensor([*map(float, request), step_s], dtype=torch.float64)
        self._work = self._comm.all_reduce(self._values, op="max")
        self._gap = max(1, min(1000, math.floor(_EVERY_S / slowest_s))) if slowest_s else 1
        self._steps, self._since = 0, now
        save, stop, failed, join = map(int, values)
        return Request(bool(save), stop, bool(failed), bool(join))

    def close(self) -> list[float] | None:
        if self._work is None:
            return None
        self._work.wait()
        self._work = None
        return [*self._values.tolist()]


@contextmanager
def signals(caught: list[str] | None = None) -> Iterator[list[str]]:
    """Collects SIGINT and SIGTERM, so that the step is finished and saved; the second one interrupts at once.

    `caught`: earlier ones, to which later ones are added.
    """
    caught = [] if caught is None else caught
    since_s = 0.0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal since_s
        now_s = time.monotonic()
        if caught and now_s - since_s > _SAME_S:
            raise KeyboardInterrupt
        if not caught:
            since_s = now_s
            caught.append(signal.Signals(number).name)

    try:
        old = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread, so signals are the caller's
        old = {}
    try:
        yield caught
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
