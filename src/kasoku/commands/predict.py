"""`kasoku predict`: the five likeliest classes of images, as CSV."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kasoku.commands import CommandArguments, argument
from kasoku.training.trained_run import predict


@dataclass(frozen=True, kw_only=True)
class PredictArguments(CommandArguments):
    """The arguments of `kasoku predict`."""

    trained: Path = argument(metavar="RUN")
    images: tuple[Path, ...] = argument(nargs="+", metavar="IMAGE|DIR")


def run(arguments: PredictArguments) -> int:
    """Prints the classes; returns the exit code."""
    return predict(arguments.trained, arguments.images)
