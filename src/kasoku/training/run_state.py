"""The state of a training: what it trains, how far it is, and its result."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from kasoku.config.recipe import Recipe, dumps
from kasoku.core import InputError, Job
from kasoku.core.files import json_text, read_json
from kasoku.data import Dataset, Loader
from kasoku.device import Chosen
from kasoku.distributed.consensus import run_on_all_ranks
from kasoku.distributed.counting_comm import Activity
from kasoku.distributed.startup import Start
from kasoku.report import environment
from kasoku.training.run_folder import FORMAT, SHARES, RunFolder


class DivergedError(RuntimeError):
    """The loss or the weights are no longer finite."""


class MeetError(RuntimeError):
    """The ranks must form a new group, since newcomers wait."""


@dataclass(frozen=True)
class Training:
    """A recipe that is ready to train: its job with all techniques applied, its data, its device."""

    recipe: Recipe
    job: Job
    dataset: Dataset
    test: Loader
    device_setup: Chosen
    total_steps: int
    start: Start  # the tasks of the start-up, with their times
    outputs: int = 0  # of the network for an image; 0: unknown
    snapshots: Any = None  # Snapshots, if the training can go on without lost ranks

    def describe(self, run: RunFolder, import_folders: Sequence[str] | None) -> None:
        """Writes what a run trains before it starts: its data, its machine, its resolved recipe, unequal shares.

        `import_folders`: those of the user's modules; None: the run is resumed, so only its recipe is written.
        """
        d, shares = self.dataset, self.job.plain_loader.shares
        if import_folders is not None:
            facts = {"name": d.name, "classes": d.classes, "channels": d.channels, "image_size": d.image_size}
            run.write("data.json", json_text({**facts, "mean": d.mean, "std": d.std}))
            more = {"chosen": self.device_setup.summary, "import_folders": [entry for entry in import_folders if entry]}
            run.write("environment.json", json_text({**environment(), **more}))
        elif (known := read_json(run.path / "data.json").get("classes", [*d.classes])) != [*d.classes]:
            unlike = ", ".join(sorted({*known} ^ {*d.classes})[:3]) or "in another order"
            raise InputError(f"{run.path}: trained on other classes than its data has now ({unlike}): bring these back")
        run.write("recipe.toml", FORMAT + dumps(self.recipe))
        if shares and import_folders is not None:
            run.write(SHARES, json.dumps(shares) + "\n")


@dataclass
class Progress:
    """How far a training is, beside its job's state; part of every checkpoint."""

    images: int = 0
    best: float = 0.0
    reached_s: float | None = None  # seconds from process start to the target
    scores: dict[str, float] = field(default_factory=dict)
    spent_s: dict[str, float] = field(default_factory=dict)  # by row of the ledger, before it was resumed
    last_evaluation: float = 0.0  # in epochs; when it was due


class RunState:
    """What the parts of a running training share. `run`: the run folder, locked; None on all ranks but 0."""

    def __init__(self, training: Training, run: RunFolder | None) -> None:
        self.training, self.run = training, run
        self.recipe, self.job = training.recipe, training.job
        self.activity: Activity = self.job.comm.activity or Activity(0.0)
        self.activity.hang_timeout_s = self.recipe.device.hang_timeout_s
        self.activity.stacks_file = run.path / "hang.txt" if run else None
        self.progress = Progress(last_evaluation=self.job.progress)
        self.last_checkpoint = ""  # as messages name it
        self.target_reached = False  # so that the training ends
        self.mark_position()

    @property
    def over(self) -> bool:
        """Whether the last step or the target is reached."""
        return self.target_reached or self.job.steps >= self.training.total_steps

    def mark_position(self) -> None:
        """Notes the loader's position: a step has ended, and no batch of the next one has been taken."""
        loader = self.job.plain_loader
        self.position = {"epoch": loader.epoch, "position": loader.position}

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Times work other than steps, and keeps the failure detector from taking it for a hang."""
        with self.job.trace.span(what), self.activity.busy():
            yield

    def write(self, f: Callable[[RunFolder], object]) -> None:
        """Calls f(folder) on rank 0; if it fails, all ranks raise. Collective."""
        with self.job.trace.span("save"):
            run_on_all_ranks(self.job.comm, lambda: f(self.run) if self.run else None)

    def diverged(self, what: str, step: int) -> DivergedError:
        """The error of a training that diverged, with its likely cause."""
        rates = ", ".join(f"{group['lr']:.3g}" for group in self.job.optimizer.param_groups)
        cause = f"likely the rate is too high (now {rates}): lower it or lengthen the warm-up"
        if self.training.device_setup.precision == "fp16":
            cause += "; or fp16 overflowed: try precision = fp32"
        elif step <= 2:
            cause += "; this early also the loss function or the initial weights may be wrong"
        good = self.last_checkpoint or "none yet"
        return DivergedError(f"{what} at step {step}; last good checkpoint: {good}; {cause}")


@dataclass(frozen=True)
class Result:
    """The result of a training; also result.json. Fractions from 0 to 1; seconds count from process start."""

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

    @classmethod
    def read(cls, folder: Path) -> "Result":
        """The result of a run that has ended."""
        stored = read_json(folder / "result.json")
        return cls(**{each.name: stored[each.name] for each in fields(cls)})

    @property
    def seconds(self) -> float:
        """The whole time from process start."""
        return sum(self.seconds_by.values())

    def rows(self, folder: Path) -> dict[str, str]:
        """The rows of the table that is printed at the end."""
        reached = f"{self.time_to_target_s:.1f} s" if self.time_to_target_s is not None else "not reached"
        where = sorted(self.seconds_by.items(), key=lambda item: -item[1])
        return {
            "test accuracy": f"{self.top1 or 0:.2%} (top-5 {self.top5 or 0:.2%}, best {self.best_top1:.2%})",
            **({f"time to target ({self.target:.1%})": reached} if self.target else {}),
            "time in all": f"{self.seconds:.1f} s: " + ", ".join(f"{k} {s:.1f}" for k, s in where if s >= 0.05),
            "images/s": f"{self.images_per_s:,.0f}",
            "run folder": str(folder),
        }
