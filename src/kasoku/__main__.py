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
    _wait_passively_beside_others()
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # otherwise the parent process handles SIGINT
    if ours:
        signal.signal(signal.SIGINT, _exit_at_once)

    def imported() -> None:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    from kasoku.cli import main as command

    code = command(imported=imported)
    from kasoku.distributed.rendezvous import leave  # imports torch, which `kasoku --help` does without

    return leave(code)


def _wait_passively_beside_others() -> None:
    """On a busy machine threads that wait for each other do not spin: those would wait for cores, and take them.

    Measured with one busy neighbour on two cores: a training of 5.4 s takes 27.5 s with threads that spin and 11.7 s
    with threads that sleep. OpenMP reads the variable when torch is imported.
    """
    with suppress(AttributeError, OSError):
        if os.getloadavg()[0] > 0.5 * (os.cpu_count() or 1):
            os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def _exit_at_once(*_: object) -> None:
    with suppress(OSError):
        os.write(2, b"kasoku: interrupted before it began\n")
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
