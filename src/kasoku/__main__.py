"""The door of the command (`kasoku`, `python -m kasoku`): open while what all need is imported, which takes seconds."""

import os
import signal
import sys
from contextlib import suppress


def main() -> int:
    """Runs the command. An interruption while what all commands need is imported ends the process in one line, at once:

    as an exception it would pass through what imports them, and compiled packages make other errors of it.
    """
    begins = _nothing
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else who started it shut this door
        signal.signal(signal.SIGINT, _leave)
        begins = _begins
    from kasoku.cli import main as command
    from kasoku.distributed.rendezvous import leave

    return leave(command(begins=begins))


def _nothing() -> None:
    """The door stays as it is."""


def _begins() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(*_: object) -> None:
    with suppress(OSError):
        os.write(2, b"kasoku: interrupted before it began\n")
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
