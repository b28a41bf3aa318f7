"""The door of the command (`kasoku`, `python -m kasoku`): open while its packages are imported, which takes seconds."""

import sys


def main() -> int:
    """Runs the command; an interruption while its packages are imported ends it in one line, too."""
    try:
        from kasoku.cli import main as command
        from kasoku.ranks import leave

        return leave(command())
    except KeyboardInterrupt:
        print("kasoku: interrupted before it began", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
