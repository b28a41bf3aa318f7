"""The door of the command (`kasoku`, `python -m kasoku`): open while its packages are imported, which takes seconds."""

import os
import signal
import sys


def main() -> int:
    """Runs the command. An interruption while its packages are imported ends the process in one line, and at once:

    as an exception it would pass through what imports them, and compiled packages make other errors of it.
    """
    open_door = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # shut where who started it shut it
    if open_door:
        signal.signal(signal.SIGINT, _leave)
    from kasoku.cli import main as command
    from kasoku.ranks import leave

    if open_door:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return leave(command())


def _leave(*_: object) -> None:
    os.write(2, b"kasoku: interrupted before it began\n")
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
