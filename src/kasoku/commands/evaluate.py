"""`kasoku eval`: top-1 and top-5 of runs, alone and as an ensemble."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from kasoku.commands import CommandArguments, declare, option
from kasoku.training.trained_run import evaluate_runs


@dataclass(frozen=True, kw_only=True)
class EvaluateArguments(CommandArguments):
    """The arguments of `kasoku eval`."""

    runs: tuple[Path, ...] = option(nargs="+", type=Path, metavar="RUN")
    data: Path | None = option(
        "--data", type=Path, metavar="DIR", help="other test images: a folder with one folder a class"
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `kasoku eval`."""
    declare(parser, EvaluateArguments, run)


def run(arguments: EvaluateArguments) -> int:
    """Prints the accuracies; returns the exit code."""
    return evaluate_runs(arguments.runs, arguments.data)
