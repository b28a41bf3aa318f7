"""`kasoku eval`: top-1 and top-5 of runs, alone and as an ensemble."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kasoku.commands import AllowArguments, argument, option
from kasoku.training.trained_run import print_scores, score_runs


@dataclass(frozen=True, kw_only=True)
class EvaluateArguments(AllowArguments):
    """The arguments of `kasoku eval`."""

    runs: tuple[Path, ...] = argument(nargs="+", metavar="RUN")
    data: Path | None = option(metavar="DIR", help="other test images: a folder with one folder a class")


def run(arguments: EvaluateArguments) -> int:
    """Prints the accuracies; returns the exit code."""
    print_scores(score_runs(arguments.runs, arguments.data))
    return 0
