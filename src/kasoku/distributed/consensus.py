"""What ranks do together: where it fails on one of them, it fails on all, and is said once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from kasoku.core import Comm, InputError

T = TypeVar("T")


class ToldElsewhereError(InputError):
    """A user's mistake that another rank tells: said once, not once a rank."""


class AgreedError(InputError):
    """A user's mistake that all ranks know of; this one tells it."""


SHARED = (AgreedError, ToldElsewhereError)  # what all ranks raise together


def together(comm: Comm, f: Callable[[], T]) -> T:
    """f() on every rank; where it fails on one, all raise: one rank its message, the others ToldElsewhereError.

    f has no collectives of its own, unless all ranks fail in it alike.
    """
    if comm.size == 1:
        return f()
    result: list[T] = []
    failure: Exception | None = None
    try:
        result.append(f())
    except (InputError, OSError) as error:
        failure = error
    told = isinstance(failure, ToldElsewhereError)
    mine = (_line(failure), getattr(failure, "gone", False)) if failure and not told else None
    failures = {rank: theirs for rank, theirs in enumerate(comm.gather_objects(mine)) if theirs}
    if not failures:
        if failure:
            raise failure
        return result[0]
    rank, (line, _) = next(iter(failures.items()))
    if rank > 0 and len(failures) < comm.size:
        line = f"rank {rank}: {line}"
    shared = AgreedError(line) if comm.rank == 0 else ToldElsewhereError(line)
    shared.gone = any(gone for _, gone in failures.values())
    raise shared from failure


def in_the_end(comm: Comm, batches: Iterable[T]) -> Iterator[T]:
    """Gives what `batches` gives; where that fails on one rank, all raise when theirs have ended.

    For ranks that do nothing together meanwhile.
    """
    failure: InputError | None = None
    try:
        yield from batches
    except InputError as error:
        failure = error
    together(comm, lambda: raised(failure))


def raised(failure: InputError | None) -> None:
    """Raises it, if there is one."""
    if failure:
        raise failure


def _line(error: Exception) -> str:
    if isinstance(error, OSError) and not isinstance(error, InputError):
        return f"{error.filename or 'input or output'}: {error.strerror or error}"
    return str(error)
