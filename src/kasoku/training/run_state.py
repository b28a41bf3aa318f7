"""The state of a training: what it trains, how far it is, its result."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kasoku.config.recipe import Recipe
from kasoku.core import Job
from kasoku.data import Dataset
from kasoku.device import Chosen
from kasoku.distributed.startup import Start


class DivergedError(RuntimeError):
    """The loss or the weights are no longer finite."""


@dataclass(frozen=True)
class Training:
    """A recipe made real: the job with its techniques applied, its data, its device."""

    recipe: Recipe
    job: Job
    dataset: Dataset
    test: Any  # yields Batch, re-iterable
    chosen: Chosen
    total_steps: int
    start: Start  # what was done for it, and when


@dataclass
class Progress:
    """What a training knows of itself beside the job; part of every checkpoint."""

    images: int = 0
    best: float = 0.0
    reached_s: float | None = None  # seconds from process start to the target
    scores: dict[str, float] = field(default_factory=dict)
    spent_s: dict[str, float] = field(default_factory=dict)  # by kind, in the earlier parts of a resumed run
    judged: float | None = None  # epochs when it was last due, and made


@dataclass(frozen=True)
class Result:
    """What came out; also result.json. Fractions from 0 to 1; seconds count from process start."""

    top1: float | None  # None: never evaluated
    top5: float | None
    loss: float | None
    best_top1: float
    target: float
    time_to_target_s: float | None
    seconds_by: dict[str, float]
    images_per_s: float
    epochs: float
    stopped: str | None  # the signal that ended it early

    @property
    def seconds(self) -> float:
        """All of it, from process start."""
        return sum(self.seconds_by.values())

    def rows(self, folder: Path) -> dict[str, str]:
        """The table shown at the end."""
        reached = f"{self.time_to_target_s:.1f} s" if self.time_to_target_s is not None else "not reached"
        where = sorted(self.seconds_by.items(), key=lambda item: -item[1])
        return {
            "test accuracy": f"{self.top1 or 0:.2%} (top-5 {self.top5 or 0:.2%}, best {self.best_top1:.2%})",
            **({f"time to target ({self.target:.1%})": reached} if self.target else {}),
            "time in all": f"{self.seconds:.1f} s: " + ", ".join(f"{k} {s:.1f}" for k, s in where if s >= 0.05),
            "images/s": f"{self.images_per_s:,.0f}",
            "run folder": str(folder),
        }
