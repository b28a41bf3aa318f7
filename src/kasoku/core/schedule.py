"""Schedules: progress in epochs -> value. Rates, weight decay, batch size and resolution all take one.

A rate's schedule is a factor on the optimizer's own `lr`, group by group, so one schedule serves groups of different
rates. Every schedule starts with an optional linear warm-up.

Note: times. A time below 1 (a warm-up, a turn, a milestone) is a share of the training, so that it follows another
number of epochs; from 1 on it is in epochs, and stays. A recipe tells its schedules how long the training is (`over`);
elsewhere a schedule with shares needs its `epochs`.
"""

import math
from dataclasses import dataclass, replace
from typing import Annotated

from kasoku.core.errors import InputError
from kasoku.core.limits import Checked, Range


def epoch_of(time: float, epochs: float, name: str) -> float:
    """The epoch of a time in a training of `epochs` epochs (0: unknown); `name`: of the object that has the time."""
    if not 0 < time < 1:
        return time
    if not epochs:
        raise InputError(f"{name} without epochs: give the epochs of the training, as {name}(epochs=8)")
    return time * epochs


@dataclass(frozen=True)
class Schedule(Checked):
    """Progress in epochs -> factor. Subclasses give `after(epoch)`, the curve without its warm-up.

    Args:
        warmup: the time of a linear warm-up to the curve's value at its end, 0 or more; a share of the training if it
            is smaller than 1, else in epochs.
        start: the factor at which the warm-up starts, 0 or more.
        epochs: the length of the training, 0 or more; 0: the recipe's.

    Ref: linear warm-up, Goyal et al. 2017 (arXiv 1706.02677), 2.2.
    """

    warmup: Annotated[float, Range(at_least=0)] = 0.0
    start: Annotated[float, Range(at_least=0)] = 0.0
    epochs: Annotated[float, Range(at_least=0)] = 0.0

    def __call__(self, epoch: float) -> float:
        """The factor after `epoch` epochs (fractions allowed)."""
        warmup = self.warmup_epochs
        if epoch < warmup:
            top = self.after(warmup)
            return self.start + (top - self.start) * epoch / warmup
        return self.after(epoch)

    def after(self, epoch: float) -> float:
        """The curve once the warm-up is over; `epoch` counts from the start of training."""
        raise NotImplementedError

    @property
    def warmup_epochs(self) -> float:
        return self.epoch_of(self.warmup)

    def epoch_of(self, time: float) -> float:
        """The epoch of a time, which may be a share of the training."""
        return epoch_of(time, self.epochs, type(self).__name__)

    def over(self, epochs: float) -> "Schedule":
        """The schedule in a training of this length; itself, if it has its own `epochs`."""
        return self if self.epochs else replace(self, epochs=epochs)


@dataclass(frozen=True)
class Constant(Schedule):
    """1 throughout (after the warm-up)."""

    def after(self, epoch: float) -> float:
        return 1.0


@dataclass(frozen=True)
class StepDecay(Schedule):
    """Multiplied by `gamma` at each of the `milestones`.

    Args:
        milestones: times; each is a share of the training if it is smaller than 1, else an epoch.
        gamma: the factor of each, any number.

    Ref: Goyal et al. 2017: 30, 60, 80 by 0.1.
    """

    milestones: tuple[float, ...] = ()
    gamma: float = 0.1

    def after(self, epoch: float) -> float:
        return float(self.gamma ** sum(epoch >= self.epoch_of(m) for m in self.milestones))


@dataclass(frozen=True)
class _Until(Schedule):
    """A curve that ends with the training, at `epochs`.

    Args:
        end: the factor from there on, any number.
    """

    end: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epochs and not self.epochs > self.warmup_epochs:
            got = f"epochs={self.epochs:g} is where it ends and must lie beyond warmup={self.warmup:g}"
            raise InputError(f"{type(self).__name__}: {got}: raise epochs or shorten the warm-up")

    def passed(self, epoch: float) -> float:
        """How much of the way from the end of the warm-up to `epochs` lies behind, 0 to 1."""
        warmup, end = self.warmup_epochs, self.epochs or self.epoch_of(0.5)  # raises without epochs
        return min(1.0, max(0.0, (epoch - warmup) / (end - warmup)))


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

    f = d/decay + d^3/1000, where d = epoch - turn, doubled beyond the turn. If the turn is a share of the training, d
    is in 90ths of the training, since the curve was published for 90 epochs.

    Args:
        turn: the time at which the factor is one half, any number; a share of the training if it is smaller than 1,
            else an epoch.
        decay: above 0, in the unit of d; a smaller one falls faster around the turn.

    Ref: [000] 4.1.2; the form of the team's published MLPerf v0.6 code: the printed formula contradicts its own text.
    """

    turn: float = 70 / 90
    decay: Annotated[float, Range(above=0)] = 5.0

    def after(self, epoch: float) -> float:
        d = epoch - self.epoch_of(self.turn)
        if 0 < self.turn < 1:
            d *= 90 / self.epochs
        if d > 0:
            d *= 2
        return 0.5 - math.atan(d / self.decay + d**3 / 1000) / math.pi
