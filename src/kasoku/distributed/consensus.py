"""Decisions that all ranks share: an error on one rank ends all of them, and ranks that differ do not start.

Only one rank prints the message of a shared error; the other ranks raise ReportedElsewhereError.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import zip_longest
from pathlib import Path
from typing import TypeVar, Union

import torch
from torch import nn

from kasoku.core import Comm, InputError

T = TypeVar("T")
Fact = Union[str, Mapping[str, "Fact"]]  # noqa: UP007 - a forward reference
_NAMED = 3  # ranks and differences named one by one
_CLIP = 80  # characters of a value in a message


class SharedInputError(InputError):
    """A user's mistake that all ranks know of; this rank prints the message."""


class ReportedElsewhereError(InputError):
    """A user's mistake that another rank reports, so this rank prints nothing."""


SHARED_ERRORS = (SharedInputError, ReportedElsewhereError)  # raised on all ranks at the same point


def run_on_all_ranks(comm: Comm, f: Callable[[], T]) -> T:
    """Returns f(); if f fails on one rank, all ranks raise. Collective; does not drain.

    Rank 0 raises SharedInputError with the message, the other ranks ReportedElsewhereError. f must not call
    collectives itself, unless it fails on all ranks alike.
    """
    if comm.size == 1:
        return f()
    result: list[T] = []
    failure: Exception | None = None
    try:
        result.append(f())
    except (InputError, OSError) as error:
        failure = error
    new = failure and not isinstance(failure, ReportedElsewhereError)
    own = (_message(failure), getattr(failure, "gone", False)) if failure and new else None
    failures = {rank: theirs for rank, theirs in enumerate(comm.gather_objects(own)) if theirs}
    if not failures:
        if failure:
            raise failure
        return result[0]
    rank, (line, _) = next(iter(failures.items()))
    if rank > 0 and len(failures) < comm.size:
        line = f"rank {rank}: {line}"
    shared = SharedInputError(line) if comm.rank == 0 else ReportedElsewhereError(line)
    shared.gone = any(gone for _, gone in failures.values())
    raise shared from failure


def iterate_on_all_ranks(comm: Comm, batches: Iterable[T]) -> Iterator[T]:
    """Yields the batches; if they fail on one rank, all ranks raise once their own have ended.

    Collective at the end only, so the ranks must not communicate in between.
    """
    failure: InputError | None = None
    try:
        yield from batches
    except InputError as error:
        failure = error
    run_on_all_ranks(comm, lambda: raise_if(failure))


def raise_if(failure: InputError | None) -> None:
    """Raises `failure`, if there is one."""
    if failure:
        raise failure


def assert_same_on_all_ranks(comm: Comm, facts: Mapping[str, Fact]) -> None:
    """Raises the same InputError on all ranks if their facts differ. Collective; does not drain.

    Digests are compared first. Only if they differ, rank 0 sends its facts and each other rank one line.

    Args:
        comm: of the ranks.
        facts: by name: a text, or (nested) texts by key.

    Raises:
        InputError: names the first fact that differs, the place in it, and the ranks.
    """
    if comm.size == 1 or len(set(comm.gather_objects(_digest(sorted(facts.items()))))) == 1:
        return
    wanted = comm.broadcast_object({name: facts[name] for name in facts} if comm.rank == 0 else {})
    lines = comm.gather_objects(_difference(facts, wanted))
    ranks: dict[str, list[int]] = {}
    for rank, line in enumerate(lines):
        if line:
            ranks.setdefault(line, []).append(rank)
    parts = [f"{_ranks(same)} {'has' if len(same) == 1 else 'have'} {line}" for line, same in ranks.items()]
    more = f"; and {len(parts) - _NAMED} other differences" if len(parts) > _NAMED else ""
    raise InputError(f"{'; '.join(parts[:_NAMED])}{more}: start all ranks with the same")


def model_facts(model: nn.Module) -> dict[str, str]:
    """The type, shape and frozen state of each parameter, by name."""
    return {
        name: f"{str(p.dtype).removeprefix('torch.')} {tuple(p.shape)}{'' if p.requires_grad else ' frozen'}"
        for name, p in model.named_parameters()
    }


def version_facts() -> dict[str, str]:
    """The versions of kasoku and torch, and a digest of kasoku's source."""
    package = Path(__file__).parents[1]
    files = {str(f.relative_to(package)): f.read_text() for f in sorted(package.rglob("*.py"))}
    try:
        number = version("kasoku")
    except PackageNotFoundError:
        number = "not installed"
    return {"kasoku": number, "source": _digest(files)[:16], "torch": torch.__version__}


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and not isinstance(error, InputError):
        return f"{error.filename or 'input or output'}: {error.strerror or error}"
    return str(error)


def _digest(facts: object) -> str:
    return hashlib.sha256(json.dumps(facts, default=dict).encode()).hexdigest()


def _same(here: Fact | None, wanted: Fact | None) -> bool:
    """Equal, and in the same order: that of parameters is the order of their collectives."""
    return _digest(here) == _digest(wanted)


def _difference(facts: Mapping[str, Fact], wanted: Mapping[str, Fact]) -> str:
    """The first fact that differs, and the place in it; empty if none differs."""
    names = [name for name in {**wanted, **facts} if not _same(facts.get(name), wanted.get(name))]
    if not names:
        return ""
    first, *rest = names
    also = f" (also another {', '.join(rest)})" if rest else ""
    return f"another {first}: {_first_place(facts.get(first), wanted.get(first))}{also}"


def _first_place(here: Fact | None, wanted: Fact | None, path: str = "") -> str:
    """The first place where two facts differ."""
    if isinstance(here, Mapping) and isinstance(wanted, Mapping):
        for key in {**wanted, **here}:
            if not _same(here.get(key), wanted.get(key)):
                return _first_place(here.get(key), wanted.get(key), f"{path}.{key}" if path else key)
        mine, theirs = next(pair for pair in zip(here, wanted, strict=True) if pair[0] != pair[1])
        return f"{path + ': ' if path else ''}{mine} comes where {theirs} comes on rank 0"
    if isinstance(here, str) and isinstance(wanted, str) and "\n" in here + wanted:
        lines = zip_longest(here.split("\n"), wanted.split("\n"))
        number, (mine, theirs) = next((n, pair) for n, pair in enumerate(lines, 1) if pair[0] != pair[1])
        return _line_difference(mine, theirs, f"{path}, line {number}" if path else f"line {number}")
    start = f"{path} = " if path else ""
    return f"{start}{_value(here)} there, {_value(wanted)} on rank 0"


def _line_difference(here: str | None, wanted: str | None, place: str) -> str:
    """How two lines differ; shorter if both set the same key."""
    key, _, value = (here or "").partition(" = ")
    wanted_key, _, wanted_value = (wanted or "").partition(" = ")
    if value and wanted_value and key == wanted_key:
        return f"{key} = {_value(value)} there, {_value(wanted_value)} on rank 0"
    mine, theirs = (repr(_value(line)) if line is not None else "nothing" for line in (here, wanted))
    return f"{place} is {mine} there, {theirs} on rank 0"


def _value(fact: Fact | None) -> str:
    if fact is None:
        return "nothing"
    text = fact if isinstance(fact, str) else f"{len(fact)} entries"
    return text if len(text) <= _CLIP else f"{text[:_CLIP]}..."


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > _NAMED + 1:
        return f"ranks {', '.join(map(str, ranks[:_NAMED]))} and {len(ranks) - _NAMED} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
