"""The one exception a user's mistake raises, and what others say in one line."""

import difflib
import re
import sys
from collections.abc import Iterable


class InputError(ValueError):
    """Something the user gave cannot be used: one line that says what we got, what is allowed, what to do.

    The command prints the line without a traceback and exits with 2. `gone`: a source no longer answers; it may be
    back later, so what was trained until then is saved. `resumable`: the training has a checkpoint to go on from.
    """

    gone = resumable = False


class CorruptionError(RuntimeError):
    """A device changed bits without an error. Checkpoints of steps after `trusted` may hold wrong weights."""

    def __init__(self, line: str, *, trusted: int) -> None:
        super().__init__(line)
        self.trusted = trusted


def summary(error: BaseException) -> str:
    """What an exception says, in one line of at most 200 letters; the name of its type if it says nothing."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def one_line(text: str) -> str:
    """The text, with a question mark for each unprintable character, such as the end of a line."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def without_password(text: str) -> str:
    """The text, with addresses such as s3://user:password@host without what is before the @."""
    return re.sub(r"(?<!abfs:)(?<!abfss:)//[^/@\s]*@", "//", text)


def say(line: str) -> None:
    """Prints a line to standard error, as the command `kasoku` does."""
    print(f"kasoku: {line}", file=sys.stderr)


def nearest(name: str, names: Iterable[str]) -> str:
    """The end of a refusal: the name that was probably meant, or all of them if they are few."""
    names = list(names)
    if close := difflib.get_close_matches(name, names, n=1):
        return f": did you mean {close[0]}?"
    return f": one of {', '.join(names)}" if len(names) <= 16 else ""
