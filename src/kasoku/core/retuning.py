"""When a setting that was chosen from measurements is chosen again, and whether the new choice stays."""

import math
import statistics
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

_DRIFT = math.log(1.15)  # of a measured value from its reference
_NOISE = 3  # times the usual distance from the reference is no drift either
_FIRST, _MOST, _RECENT = 3, 8, 16  # windows: of a reference, at least and at most; of the noise
_WORTH = 0.98  # of the step before a change: the change stays
_LONGEST_PAUSE = 64  # windows


@dataclass
class Retuner:
    """Follows values that a setting was chosen for, such as the speed of a link, window by window of some steps.

    Drift: a value is more than 15 % above or below its reference, the mean of the first windows, in two windows in a
    row; where the values are noisy, more than three times their usual distance. Then the owner chooses the setting
    again. The second window after a change, or a later one without drift, judges it: it stays if a step takes at most
    0.98 of the time before. After a change that was taken back, and where nothing better was found, the next choice
    waits for 1 window, then 2, 4, and at most 64; a change that stays ends this.

    Not collective: feed all ranks equal values (means or maxima over ranks), then all decide alike. The values must not
    depend on the setting. All attributes are plain values, for checkpoints.

    Args:
        name: of the setting, in the plural: "buckets".
    """

    name: str
    reference: list[list[float]] = field(default_factory=list)  # the values of windows without drift
    last: list[float] = field(default_factory=list)
    sides: list[int] = field(default_factory=list)  # of each value in the last window: -1, 0, 1
    noise: list[float] = field(default_factory=list)
    step_s: float = 0.0
    windows: int = 0
    judging: int = 0  # windows until the verdict; 0: there is no change to judge
    wait: int = 0  # windows until the setting may be chosen again
    pause: int = 1  # the next such wait
    changes: list[dict[str, Any]] = field(default_factory=list)  # kept: None where no verdict was possible
    line: str = ""  # the last verdict

    def check(self, measured: Sequence[float], step_s: float) -> Literal["", "retune", "keep", "undo"]:
        """Ends a window; returns what its owner should do now. After "retune" the owner calls `changed`."""
        self.windows, self.step_s = self.windows + 1, step_s
        before, self.sides = self.sides, self._sides(measured)
        last, self.last = self.last, list(measured)
        if len(self.reference) < _FIRST or (len(self.reference) < _MOST and not any(self.sides)):
            self.reference.append(self.last)
        if not self.wait and any(a == b != 0 for a, b in zip(before, self.sides, strict=False)):
            self.reference, self.sides, self.judging = [last, self.last], [], 0
            return "retune"
        self.wait = max(0, self.wait - 1)
        if self.judging > 1:
            self.judging -= 1
        elif self.judging and not any(self.sides):
            self.judging = 0
            return self._verdict()
        return ""

    def changed(self, what: str) -> None:
        """The owner has chosen the setting again: in words; empty if it found nothing better."""
        if what:
            change = {"what": what, "window": self.windows, "before_ms": 1000 * self.step_s}
            self.changes.append({**change, "after_ms": None, "kept": None})
            self.judging = 2
        else:
            self._pause()

    def _sides(self, measured: Sequence[float]) -> list[int]:
        """For each value: 1 far above the reference, -1 far below, 0 near it; nothing while there is no reference."""
        if len(self.reference) < _FIRST:
            return []
        means = (statistics.fmean(column) for column in zip(*self.reference, strict=True))
        drifts = [math.log(max(x, 1e-9) / max(mean, 1e-9)) for x, mean in zip(measured, means, strict=True)]
        limit = max(_DRIFT, _NOISE * statistics.median(self.noise or [0.0]))
        sides = [0 if abs(drift) <= limit else 1 if drift > 0 else -1 for drift in drifts]
        if not any(sides):
            self.noise = [*self.noise, max(map(abs, drifts))][-_RECENT:]
        return sides

    def _verdict(self) -> Literal["keep", "undo"]:
        change, after_ms = self.changes[-1], 1000 * self.step_s
        kept = after_ms <= _WORTH * change["before_ms"]
        change.update(after_ms=after_ms, kept=kept)
        ends = f"the new {self.name} stay" if kept else f"the old {self.name} are back"
        self.line = f"a step takes {after_ms:.1f} ms instead of {change['before_ms']:.1f}: {ends}"
        if kept:
            self.pause = 1
            return "keep"
        self._pause()
        return "undo"

    def _pause(self) -> None:
        self.wait, self.pause = self.pause, min(_LONGEST_PAUSE, 2 * self.pause)

    def state_dict(self) -> dict[str, Any]:
        """All of it, as plain values."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state_dict` was called."""
        vars(self).update(deepcopy(state))
