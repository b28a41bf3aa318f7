"""`kasoku data`: downloads the official files of a data set."""

from kasoku.commands.arguments import DataArguments
from kasoku.data.datasets.download import download


def run(arguments: DataArguments) -> int:
    """Downloads; returns the exit code."""
    print(download(arguments.name, arguments.to, source=arguments.source, quiet=arguments.quiet))
    return 0
