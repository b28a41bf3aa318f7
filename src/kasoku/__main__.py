"""The entry point of the command: `kasoku`, `python -m kasoku`.

Note: Ctrl-C during the imports. They take seconds, and a KeyboardInterrupt inside the import of a compiled package
surfaces as an unrelated error. So until the command has imported its packages, SIGINT ends the process with one line.
"""

import os
import signal
import sys
from contextlib import suppress


def main() -> int:
    """Runs the command; returns its exit code."""
    with suppress(OSError):
        if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
            del sys.path[0]  # `python -m` would take a random.py or a missing package from here
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # otherwise the parent process handles SIGINT
    if ours:
        signal.signal(signal.SIGINT, _exit_at_once)

    def imported() -> None:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    from kasoku.cli import main as command

    try:
        code = command(imported=imported)
    except ModuleNotFoundError as error:
        if error.name != "fcntl":  # a system that is not supported
            raise
        print(error, file=sys.stderr)
        return 2
    from kasoku.distributed.membership import leave  # imports torch, which `kasoku --help` does without

    return leave(code)


def _exit_at_once(*_: object) -> None:
    with suppress(OSError):
        os.write(2, b"kasoku: interrupted before it began\n")
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
