"""A device whose steps take a planted time, and the exhaustive sweep that searches are held against."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from contracts import Net
from kasoku.tune.measurement import BRIEF, STEPS, Measurement, SizeSearch, interval

WARM = 1  # steps thrown away at each look
SWEEP_STEPS = 30

# name: seconds of a step
CURVES: dict[str, Callable[[int], float]] = {
    "a line": lambda b: 10.0 + b,
    "launches for long": lambda b: 200.0 + b,
    "the input alone": lambda b: 0.5 + b,
    "a cliff at 94": lambda b: (10.0 + b) * (1.2 if b > 93 else 1.0),
    "a cliff at 300": lambda b: (30.0 + b) * (1.15 if b > 300 else 1.0),
    "a cache that is full at 64": lambda b: 10.0 + b + 0.3 * max(0, b - 64),
    "tiles of 32": lambda b: 20.0 + 32 * math.ceil(b / 32),
}


class Hand:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> float:
        return self.now_s

    def __deepcopy__(self, memo: object) -> Hand:
        return self  # copies of a model share it


class Slow(Net):
    """A network whose forward takes the planted seconds for so many images, on a clock that is moved by hand."""

    def __init__(self, clock: Hand, seconds: Callable[[int], float]) -> None:
        super().__init__(norm=False, dropout=0)
        self.clock, self.seconds = clock, seconds

    def forward(self, x_NCHW: Tensor) -> Tensor:
        self.clock.now_s += self.seconds(len(x_NCHW))
        return super().forward(x_NCHW)


@dataclass
class Planted:
    """Measures sizes by a curve of seconds a step; `tried` tells which. `brief`: a look takes four steps.

    `noise`: the gradient noise scale, by which branches learn; None: they do not. `trained` tells which.

    `jitter`: of each step, normally distributed, as a share; drawn anew for each `seed`. `halts`: the share of steps
    that take half as long again.
    """

    step_s: Callable[[int], float]
    usage: Callable[[int], float] = lambda batch: 0.5
    noise: float | None = None
    fits: float = math.inf
    jitter: float = 0.0
    halts: float = 0.0
    seed: int = 0
    brief: bool = False
    tried: list[int] = field(default_factory=list)
    trained: list[tuple[int, float, int]] = field(default_factory=list)
    clock: Hand = field(default_factory=Hand)

    def __call__(self, batch: int) -> Measurement:
        self.tried.append(batch)
        if batch > self.fits:
            return Measurement(batch, failed="out of memory")
        step_s, dice, looks = self.step_s(batch), random.Random(f"{self.seed} {batch}"), self.tried.count(batch)
        steps = BRIEF if self.brief else STEPS
        seen = steps * looks if self.brief else steps
        taken_s = [step_s * (1 + dice.gauss(0, self.jitter)) for _ in range(seen)]
        if self.halts:
            taken_s = [s * (1.5 if dice.random() < self.halts else 1.0) for s in taken_s]
        self.clock.now_s += WARM * step_s + sum(taken_s[-steps:])
        times = interval(taken_s)
        return Measurement(batch, *times, utilisation=self.usage(batch), steps=seen)

    def branch(self, batch: int, rate: float, images: int) -> list[float]:
        """Losses that fall as exp(-progress), where an image is worth 1 / (1 + batch / noise); the trunk ends at 1."""
        trunk = not self.trained
        self.trained.append((batch, rate, images))
        self.clock.now_s += images / batch * self.step_s(batch)
        worth = 1 / (1 + batch / self.noise) if self.noise else 0.0
        losses = [math.exp(-0.1 * quarter * worth) for quarter in (1, 2, 3, 4)]
        return [] if batch > self.fits else [loss / losses[-1] for loss in losses] if trunk else losses

    def tries(
        self, start: int = 32, *, least: int = 8, most: int = 512, multiple: int = 1, until_s: float = math.inf
    ) -> SizeSearch:
        return SizeSearch(self, start, least, most, multiple, 50_000, until_s, self.clock, self.branch)

    def sweep(self, most: int) -> tuple[list[int], float]:
        """Sizes 8 x 1.25^k up to `most` and to what fits, and the seconds of 30 steps of each."""
        sizes, k = [], 0
        while round(8 * 1.25**k) <= min(most, self.fits):
            sizes.append(round(8 * 1.25**k))
            k += 1
        return sizes, sum(SWEEP_STEPS * self.step_s(b) * (1 + self.halts / 2) for b in sizes)
