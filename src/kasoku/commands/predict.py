"""`kasoku predict`: the five likeliest classes of images, as CSV."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from kasoku.commands import CommandArguments, declare, option
from kasoku.training.trained_run import predict


@dataclass(frozen=True, kw_only=True)
class PredictArguments(CommandArguments):
    """The arguments of `kasoku predict`."""

    trained: Path = option(type=Path, metavar="RUN")
    images: tuple[Path, ...] = option(nargs="+", type=Path, metavar="IMAGE|DIR")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `kasoku predict`."""
    declare(parser, PredictArguments, run)


def run(arguments: PredictArguments) -> int:
    """Prints the classes; returns the exit code."""
    return predict(arguments.trained, arguments.images)
