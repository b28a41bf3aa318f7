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
    imported = _nothing
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # otherwise the parent process handles SIGINT
        signal.signal(signal.SIGINT, _exit_at_once)
        imported = _handle_interrupts
    from kasoku.cli import main as command

    code = command(imported=imported)
    from kasoku.distributed.rendezvous import leave  # imports torch, which `kasoku --help` does without

    return leave(code)


def _nothing() -> None:
    pass


def _handle_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit_at_once(*_: object) -> None:
    with suppress(OSError):
        os.write(2, b"kasoku: interrupted before it began\n")
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
