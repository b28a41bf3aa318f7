"""Decisions that all ranks share: an error on one rank ends all of them, and ranks that differ do not start."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from kasoku import __version__
from kasoku.core import Comm, InputError, attributed

T = TypeVar("T")
_NAMED = 3  # ranks and differences named one by one
_CLIP = 80  # characters of a value in a message


class SharedInputError(InputError):
    """A user's mistake that all ranks know of; this rank prints the message."""


class ReportedElsewhereError(InputError):
    """A user's mistake that another rank reports, so this rank prints nothing."""


SHARED_ERRORS = (SharedInputError, ReportedElsewhereError)  # raised on all ranks at the same point


def run_on_all_ranks(comm: Comm, f: Callable[[], T]) -> T:
    """Returns f(); if f fails on one rank, all ranks raise as `raise_on_all_ranks` says. Collective; does not drain.

    f must not call collectives itself, unless it fails on all ranks alike.
    """
    failure: Exception | None = None
    try:
        result = f()
    except Exception as error:
        failure = attributed(error)
        if not isinstance(failure, InputError | OSError):
            raise
    raise_on_all_ranks(comm, failure)
    return result


def raise_on_all_ranks(comm: Comm, failure: Exception | None) -> None:
    """Raises on all ranks if one of them has a failure. Collective; does not drain.

    Rank 0 raises SharedInputError with the message, the other ranks ReportedElsewhereError.
    """
    own = None
    if failure and not isinstance(failure, ReportedElsewhereError):
        line = str(failure)
        if isinstance(failure, OSError) and not isinstance(failure, InputError):
            line = f"{failure.filename or 'input or output'}: {failure.strerror or failure}"
        own = (line, getattr(failure, "gone", False), getattr(failure, "resumable", False))
    failures = {rank: theirs for rank, theirs in enumerate(comm.gather_objects(own)) if theirs}
    if failure and (comm.size == 1 or not failures):
        raise failure
    if not failures:
        return
    rank, (line, *_) = next(iter(failures.items()))
    if rank > 0 and len(failures) < comm.size:
        line = f"rank {rank}: {line}"
    shared = SharedInputError(line) if comm.rank == 0 else ReportedElsewhereError(line)
    shared.gone = any(gone for _, gone, _ in failures.values())
    shared.resumable = any(resumable for *_, resumable in failures.values())
    raise shared from failure


def iterate_on_all_ranks(comm: Comm, batches: Iterable[T]) -> Iterator[T]:
    """Yields the batches; if they fail on one rank, all ranks raise once their own have ended.

    Collective at the end only, so the ranks must not communicate in between.
    """
    failure: Exception | None = None
    try:
        yield from batches
    except Exception as error:
        failure = attributed(error)
        if not isinstance(failure, InputError):
            raise
    raise_on_all_ranks(comm, failure)


def assert_same_on_all_ranks(comm: Comm, facts: Mapping[str, object]) -> None:
    """Raises on all ranks, as `raise_on_all_ranks` does, if their facts differ. Collective; does not drain.

    Digests are compared first. Only if they differ, rank 0 sends its facts and each other rank one line. `facts`: by
    name a text or a number, or (nested) lists and mappings of them. The message names the first one that differs, the
    place in it, and the ranks.
    """
    if comm.size == 1 or len(set(comm.gather_objects(_digest(sorted(facts.items()))))) == 1:
        return
    wanted = comm.broadcast_object(dict(facts) if comm.rank == 0 else {})
    line, names = "", [name for name in {**wanted, **facts} if _digest(facts.get(name)) != _digest(wanted.get(name))]
    if names:
        first, *rest = names
        also = f" (also another {', '.join(rest)})" if rest else ""
        line = f"another {first}: {_first_place(facts.get(first), wanted.get(first))}{also}"
    lines = comm.gather_objects(line)
    ranks = {line: [r for r, other in enumerate(lines) if other == line] for line in dict.fromkeys(lines) if line}
    parts = [f"{name_ranks(same)} {'has' if len(same) == 1 else 'have'} {line}" for line, same in ranks.items()]
    more = f"; and {len(parts) - _NAMED} other differences" if len(parts) > _NAMED else ""
    kind = SharedInputError if comm.rank == 0 else ReportedElsewhereError
    raise kind(f"{'; '.join(parts[:_NAMED])}{more}: start all ranks with the same")


def model_facts(model: nn.Module) -> dict[str, str]:
    """The type, shape and frozen state of each parameter, by name."""
    return {
        name: f"{str(p.dtype).removeprefix('torch.')} {tuple(p.shape)}{'' if p.requires_grad else ' frozen'}"
        for name, p in model.named_parameters()
    }


def version_facts() -> dict[str, str]:
    """The versions of kasoku and torch, and a digest of kasoku's source."""
    package = Path(__file__).parents[1]
    files = {str(f.relative_to(package)): f.read_text(encoding="utf-8") for f in sorted(package.rglob("*.py"))}
    return {"kasoku": __version__, "source": _digest(files)[:16], "torch": torch.__version__}


def _digest(facts: object) -> str:
    """Equal for equal facts in the same order: that of parameters is the order of their collectives."""
    return hashlib.sha256(json.dumps(facts, default=dict).encode()).hexdigest()


def _first_place(here: object, wanted: object, path: str = "") -> str:
    """The first place where two facts differ."""
    here, wanted = (dict(enumerate(fact)) if isinstance(fact, list) else fact for fact in (here, wanted))
    if isinstance(here, Mapping) and isinstance(wanted, Mapping):
        for key in {**wanted, **here}:
            if _digest(here.get(key)) != _digest(wanted.get(key)):
                return _first_place(here.get(key), wanted.get(key), f"{path}.{key}" if path else str(key))
        mine, theirs = next(pair for pair in zip(here, wanted, strict=True) if pair[0] != pair[1])
        return f"{path + ': ' if path else ''}{mine} comes where {theirs} comes on rank 0"
    start = f"{path} = " if path else ""
    return f"{start}{_value(here)} there, {_value(wanted)} on rank 0"


def _value(fact: object) -> str:
    if fact is None:
        return "nothing"
    if isinstance(fact, Mapping):
        return f"{len(fact)} entries"
    text = fact if isinstance(fact, str) else json.dumps(fact)
    return text if len(text) <= _CLIP else f"{text[:_CLIP]}..."


def name_ranks(ranks: Sequence[int], name: Callable[[int], str] = str) -> str:
    """Such as "rank 4" or "ranks 0, 2, 5 and 3 more"."""
    *first, last = map(name, ranks)
    if not first:
        return f"rank {last}"
    if len(first) > _NAMED:
        first, last = first[:_NAMED], f"{len(ranks) - _NAMED} more"
    return f"ranks {', '.join(first)} and {last}"
