"""What came out of a training."""

from dataclasses import dataclass
from pathlib import Path


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
