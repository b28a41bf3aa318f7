"""Settings that are chosen again in a running training, when what they were chosen for has drifted.

Note: no oscillation. Drift must last, on the same side, for some windows of steps in a row: for two at first, and for
half as many again with each choice and each return, since noise that lasts as long makes as many changes as it undoes.
A change is judged by the steps after it, and taken back if it brought nothing.
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
_PATIENCE = (2, 64)  # windows, at first and at most


class Adaptive:
    """A setting that all ranks choose again together. A subclass has `name`, `values`, `choose` and `take`; and it may
    have `drift`, beyond which a value is far from its reference, and `expected` values as the reference.

    Attributes: `changes`: what each was, a step's milliseconds before and after, and whether it was kept; the last two
        are None until it is judged. `before`: the setting before.
    """

    name = ""  # of the setting, in the plural
    drift = 1.15
    expected: Sequence[float] = ()  # empty: those of the first windows after each choice
    saved: tuple[str, ...] = ("reference", "lasting", "changes", "judging", "patience", "before", "step_s")

    def __init__(self, job: Job, device: torch.device) -> None:
        self.job, self.watch = job, Stopwatch(job.clock, device)
        self.moments: list[Any] = []  # the ends of the window's steps, its begin included
        self.reference: list[Sequence[float]] = []  # the values of the first windows since the last choice
        self.lasting: list[int] = []  # of each value: the last windows far above the reference; negative: far below
        self.changes: list[dict[str, Any]] = []
        self.judging = 0  # windows until the verdict
        self.patience: float = _PATIENCE[0]  # for as many windows drift must last
        self.before: Any = None
        self.step_s = 0.0  # of the last window

    def own(self) -> float:
        """This rank's measurement of a window that ends."""
        return 0.0

    def values(self, step_s: float, owns: Sequence[float]) -> Sequence[float]:
        """The numbers that are watched for drift, from the seconds of a step and all ranks' measurements."""
        raise NotImplementedError

    def choose(self, owns: Sequence[float]) -> None:
        """Chooses again, now or after further steps; then calls `chosen`. Collective."""

    def take(self, setting: Any) -> None:
        """Goes back to a setting, as plain values. Collective."""

    def end_step(self) -> None:
        """After a step. With each 15th a window ends: collective."""
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
        elif self._has_drifted(values):
            self.choose(owns)

    def chosen(self, what: str, before: Any = None) -> None:
        """Ends a choice. `what`: the change in words; empty if the setting stays. `before`: the setting before."""
        self.reference, self.lasting, self.moments = [], [], [self.watch.moment()]
        self.patience = min(_PATIENCE[1], 1.5 * self.patience)
        if what:
            self.before, self.judging = before, 2  # the first window settles
            self.changes.append({"what": what, "before_ms": 1000 * self.step_s, "after_ms": None, "kept": None})
            say(f"{self.name}: {what}, since a step takes {1000 * self.step_s:.1f} ms", self.job.comm.rank)

    def _judge(self) -> None:
        change, after_ms = self.changes[-1], 1000 * self.step_s
        kept = after_ms <= _WORTH * change["before_ms"]
        change.update(after_ms=after_ms, kept=kept)
        if not kept:
            self.take(self.before)
            self.chosen("")
        took = f"a step takes {after_ms:.1f} ms with the new {self.name}, {change['before_ms']:.1f} before"
        say(f"{took}: {'they stay' if kept else 'the old ones are back'}", self.job.comm.rank)

    def _has_drifted(self, values: Sequence[float]) -> bool:
        expected = self.expected or [statistics.fmean(column) for column in zip(*self.reference, strict=True)]
        drifts = [math.log(max(x, 1e-9) / max(mean, 1e-9)) for x, mean in zip(values, expected, strict=True)]
        limit, before = math.log(self.drift), self.lasting or [0] * len(drifts)
        sides = [(drift > limit) - (drift < -limit) for drift in drifts]
        self.lasting = [side + run * (side * run > 0) for side, run in zip(sides, before, strict=True)]
        return any(abs(run) >= self.patience for run in self.lasting)

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where the state was taken; `moments` begin anew."""
        vars(self).update({name: state[name] for name in self.saved})
        self.moments = [self.watch.moment()]
