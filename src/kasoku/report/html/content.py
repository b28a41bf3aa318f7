"""The contents of a page: the record of a run, and line charts. Nothing here needs plotly or jinja2."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RunRecord:
    """The data of one run, or of a folder of `kasoku tune` or `kasoku profile`, which has no recipe.

    Times are in seconds, accuracies from 0 to 1.

    Attributes:
        name: the run's name on the page.
        recipe: its resolved recipe, as a document.
        result: its result.json; empty if there is none yet.
        metrics: the lines of its metrics.jsonl, each with `step`, `epoch` and `time_s`, and mostly `seconds`.
        parts: the contents of ledger.json, timeline.json, tuning.json, profile.json and classes.json, if they exist.
        buckets: its gradient buckets, as text; empty if the run has one rank or kept none.
        machine: the hardware and the device setup.
        damaged: one line for each file that cannot be read.
    """

    name: str
    recipe: Mapping[str, Any]
    result: Mapping[str, Any] = field(default_factory=dict)
    metrics: Sequence[Mapping[str, Any]] = ()
    parts: Mapping[str, Any] = field(default_factory=dict)
    buckets: str = ""
    machine: Mapping[str, Any] = field(default_factory=dict)
    damaged: Sequence[str] = ()

    @property
    def seed(self) -> int:
        return int(self.recipe.get("seed", 0))

    @property
    def target(self) -> float:
        """The target accuracy of the recipe; 0 if it has none."""
        return float(self.recipe.get("evaluate", {}).get("target", 0.0))

    @property
    def time_to_target_s(self) -> float | None:
        return self.result.get("time_to_target_s")

    @property
    def top1(self) -> float | None:
        """The accuracy at the end; None before."""
        return None if self.result.get("stopped") else self.result.get("top1")


@dataclass(frozen=True)
class Panel:
    """One line chart: lines (name -> points (x, y), in order of x).

    A line breaks at values that are not finite, and on a log axis at values <= 0.
    """

    label: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    log: bool = False
    markers: bool = False
