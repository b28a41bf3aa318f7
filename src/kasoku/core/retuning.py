"""Settings that are chosen again in a running training, when what they were chosen for has drifted.

Note: no oscillation. Drift is seen in two windows of steps in a row, on the same side. A change is judged by the steps
after it, and taken back if it brought nothing; then the next one waits twice as many windows as the last.
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from kasoku.core.clock import Stopwatch
from kasoku.core.errors import say
from kasoku.core.job import Job

_WINDOW = 15  # steps
_REFERENCE = 3  # windows
_WORTH = 0.98  # of the step before a change: the change stays
_LONGEST_PAUSE = 64  # windows
_STATE = ("reference", "sides", "changes", "judging", "wait", "pause", "before", "step_s")  # plain values


class Adaptive:
    """A setting that all ranks choose again together. A subclass has `name`, `values`, `choose` and `take`; and it may
    have `drift`, beyond which a value is far from its reference, and `expected` values as the reference.

    Attributes: `changes`: what they were, and a step's milliseconds before and after. `before`: the setting before.
    """

    name = ""  # of the setting, in the plural
    drift = 1.15
    expected: Sequence[float] = ()  # empty: those of the first windows after each choice

    def __init__(self, job: Job, device: torch.device) -> None:
        self.job, self.watch = job, Stopwatch(job.clock, device)
        self.moments: list[Any] = []  # the ends of the window's steps, its begin included
        self.reference: list[Sequence[float]] = []  # the values of the first windows since the last choice
        self.sides: list[int] = []  # of each value in the last window: 1 far above the reference, -1 far below
        self.changes: list[dict[str, Any]] = []
        self.judging = self.wait = 0  # windows until the verdict; until the setting may be chosen again
        self.pause = 1  # the next such wait
        self.before: Any = None
        self.step_s = 0.0  # of the last window

    def own(self) -> float:
        """This rank's measurement of a window that ends."""
        return 0.0

    def values(self, step_s: float, owns: Sequence[float]) -> Sequence[float]:
        """What is watched for drift, from the step and all ranks' measurements."""
        raise NotImplementedError

    def choose(self, owns: Sequence[float]) -> None:
        """Chooses again, now or after further steps; then calls `chosen`. Collective."""

    def take(self, setting: Any) -> None:
        """Goes back to a setting, as plain values. Collective."""

    def end_step(self) -> None:
        """After a step; with each 15th a window ends. Collective."""
        self.moments.append(self.watch.moment())
        if self.job.steps % _WINDOW or len(self.moments) < 2:
            return
        self.watch.synchronize()
        own_s = statistics.median(itertools.starmap(self.watch.seconds, itertools.pairwise(self.moments)))
        steps_s, owns = zip(*self.job.comm.gather_objects((own_s, self.own())), strict=True)
        self.moments, self.step_s = self.moments[-1:], statistics.fmean(steps_s)
        values = self.values(self.step_s, owns)
        if self.judging:
            self.judging -= 1
            if not self.judging:
                self._judge()
        elif not self.expected and len(self.reference) < _REFERENCE:
            self.reference.append(values)
        elif self._has_drifted(values) and not self.wait:
            self.choose(owns)
        else:
            self.wait = max(0, self.wait - 1)

    def chosen(self, what: str, before: Any = None) -> None:
        """A new choice was made: in words, and the setting before it; empty words if there is nothing better."""
        self.reference, self.sides, self.moments = [], [], [self.watch.moment()]
        if not what:
            self.wait, self.pause = self.pause, min(_LONGEST_PAUSE, 2 * self.pause)
            return
        self.before, self.judging = before, 2  # the first window settles
        self.changes.append({"what": what, "before_ms": 1000 * self.step_s, "after_ms": None, "kept": None})
        say(f"{self.name}: {what}, since a step takes {1000 * self.step_s:.1f} ms", self.job.comm.rank)

    def _judge(self) -> None:
        change, after_ms = self.changes[-1], 1000 * self.step_s
        kept = after_ms <= _WORTH * change["before_ms"]
        change.update(after_ms=after_ms, kept=kept)
        if kept:
            self.pause = 1
        else:
            self.take(self.before)
            self.chosen("")
        took = f"a step takes {after_ms:.1f} ms with the new {self.name}, {change['before_ms']:.1f} before"
        say(f"{took}: {'they stay' if kept else 'the old ones are back'}", self.job.comm.rank)

    def _has_drifted(self, values: Sequence[float]) -> bool:
        expected = self.expected or [statistics.fmean(column) for column in zip(*self.reference, strict=True)]
        drifts = [math.log(max(x, 1e-9) / max(mean, 1e-9)) for x, mean in zip(values, expected, strict=True)]
        limit, before = math.log(self.drift), self.sides
        self.sides = [(drift > limit) - (drift < -limit) for drift in drifts]
        return any(a == b != 0 for a, b in zip(before, self.sides, strict=False))

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where the state was taken; `moments` begin anew."""
        vars(self).update({name: state[name] for name in _STATE})
        self.moments = [self.watch.moment()]
