"""`kasoku data`: downloads the official files of a data set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kasoku.commands import CommandArguments, argument, option
from kasoku.data.datasets.download import download


@dataclass(frozen=True, kw_only=True)
class DataArguments(CommandArguments):
    """The arguments of `kasoku data`."""

    name: str = argument(metavar="NAME", help="cifar10, cifar100, mnist, fashion-mnist or imagenette")
    to: str = option(required=True, metavar="DIR", help="the folder for the data")
    source: str = option(default="", metavar="URL", help="another address of the same files")
    quiet: bool = option(default=False, help="no progress bar")
    if_interrupted: ClassVar[str] = "what was downloaded so far stays, and the same command goes on there"


def run(arguments: DataArguments) -> int:
    """Downloads; returns the exit code."""
    print(download(arguments.name, arguments.to, source=arguments.source, quiet=arguments.quiet))
    return 0
