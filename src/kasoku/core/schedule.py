"""Schedules: progress in epochs -> value. Rates, weight decay, batch size and resolution all take one.

A rate's schedule is a factor on the optimizer's own `lr`, group by group, so one schedule serves groups of different
rates. Every schedule starts with an optional linear warm-up of `warmup` epochs from `start` to 1.
"""

import math
from dataclasses import dataclass, replace

from kasoku.core.errors import InputError


@dataclass(frozen=True)
class Schedule:
    """Progress in epochs -> factor. Subclasses give `after(epoch)`, the curve without its warm-up.

    Args:
        warmup: epochs of a linear warm-up to the curve's value at its end, 0 or more.
        start: the factor at which the warm-up starts, 0 or more.

    Ref: linear warm-up, Goyal et al. 2017 (arXiv 1706.02677), 2.2.
    """

    warmup: float = 0.0
    start: float = 0.0

    def __post_init__(self) -> None:
        if self.warmup < 0 or self.start < 0:
            raise InputError(f"warmup={self.warmup}, start={self.start}: neither may be below 0")

    def __call__(self, epoch: float) -> float:
        """The factor after `epoch` epochs (fractions allowed)."""
        if epoch < self.warmup:
            top = self.after(self.warmup)
            return self.start + (top - self.start) * epoch / self.warmup
        return self.after(epoch)

    def after(self, epoch: float) -> float:
        """The curve once the warm-up is over; `epoch` counts from the start of training."""
        raise NotImplementedError

    def over(self, epochs: float) -> "Schedule":
        """The schedule of a training of this length: itself, unless its own settings leave its length open."""
        return self


@dataclass(frozen=True)
class Constant(Schedule):
    """1 throughout (after the warm-up)."""

    def after(self, epoch: float) -> float:
        return 1.0


@dataclass(frozen=True)
class StepDecay(Schedule):
    """Multiplied by `gamma` at each of the `milestones`.

    Args:
        milestones: epochs.
        gamma: the factor of each, any number.

    Ref: Goyal et al. 2017: 30, 60, 80 by 0.1.
    """

    milestones: tuple[float, ...] = ()
    gamma: float = 0.1

    def after(self, epoch: float) -> float:
        return float(self.gamma ** sum(epoch >= m for m in self.milestones))


@dataclass(frozen=True)
class _Until(Schedule):
    """A curve that ends.

    Args:
        epochs: where the curve ends, 0 or more and beyond the warm-up; 0: with the training, in a recipe.
        end: the factor from there on, any number.
    """

    epochs: float = 0.0
    end: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epochs and not self.epochs > self.warmup:
            got = f"epochs={self.epochs} is where it ends and must lie beyond warmup={self.warmup}"
            raise InputError(f"{type(self).__name__}: {got}: raise epochs or shorten the warm-up")

    def over(self, epochs: float) -> Schedule:
        return self if self.epochs else replace(self, epochs=epochs)

    def passed(self, epoch: float) -> float:
        """How much of the way from the end of the warm-up to `epochs` lies behind, 0 to 1."""
        if not self.epochs:
            name = type(self).__name__
            raise InputError(f"{name} without epochs: give the epochs of the training, as {name}(epochs=8)")
        return min(1.0, max(0.0, (epoch - self.warmup) / (self.epochs - self.warmup)))


@dataclass(frozen=True)
class Polynomial(_Until):
    """(1 - end) * (1 - passed)^power + end, until `epochs`.

    Args:
        power: 1 falls in a straight line, 2 faster at first; any number.

    Ref: MLPerf's ResNet reference: power 2, end 1e-4 (absolute: divide it by the rate).
    """

    power: float = 2.0

    def after(self, epoch: float) -> float:
        return float((1 - self.end) * (1 - self.passed(epoch)) ** self.power + self.end)


@dataclass(frozen=True)
class Linear(_Until):
    """Straight from 1 down to `end` at `epochs`."""

    def after(self, epoch: float) -> float:
        return 1 + (self.end - 1) * self.passed(epoch)


@dataclass(frozen=True)
class Cosine(_Until):
    """Half a cosine from 1 down to `end` at `epochs`.

    Ref: Loshchilov and Hutter 2017 (arXiv 1608.03983).
    """

    def after(self, epoch: float) -> float:
        return self.end + (1 - self.end) * (1 + math.cos(math.pi * self.passed(epoch))) / 2


@dataclass(frozen=True)
class ArcCotangent(Schedule):
    """High until near the `turn`, one half at it, then a sharp fall: 1/2 - arctan(f)/pi.

    f = d/decay + d^3/1000, where d = epoch - turn, doubled beyond the turn.

    Args:
        turn: the epoch at which the factor is one half, any number.
        decay: any number but 0; a smaller one falls faster around the turn.

    Ref: [000] 4.1.2; the form is that of the team's published MLPerf v0.6 code, since the printed formula contradicts
    its own text.
    """

    turn: float = 70.0
    decay: float = 5.0

    def after(self, epoch: float) -> float:
        d = epoch - self.turn
        if d > 0:
            d *= 2
        return 0.5 - math.atan(d / self.decay + d**3 / 1000) / math.pi
