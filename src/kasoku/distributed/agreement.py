"""Before ranks train together: do all of them hold the same recipe, code, data and model?"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import zip_longest
from pathlib import Path
from typing import Union

import torch
from torch import nn

import kasoku
from kasoku.core import Comm, InputError

Fact = Union[str, Mapping[str, "Fact"]]  # noqa: UP007 - a forward reference
_SHOWN = 3  # ranks named one by one
_CLIP = 80  # characters of a value


def agree(comm: Comm, facts: Mapping[str, Fact]) -> None:
    """Returns where all ranks hold the same facts; called by all together, and all get the same error.

    Digests are compared first; only where they differ does rank 0 send its facts, and each other rank a line.

    Args:
        comm: of the ranks.
        facts: by name: a text, or (nested) texts by key.

    Raises:
        InputError: names the first fact that differs, where it does, and on which ranks.
    """
    if comm.size == 1 or len(set(comm.gather_objects(_digest(sorted(facts.items()))))) == 1:
        return
    wanted = comm.broadcast_object({name: facts[name] for name in facts} if comm.rank == 0 else {})
    lines = comm.gather_objects(_difference(facts, wanted))
    ranks: dict[str, list[int]] = {}
    for rank, line in enumerate(lines):
        if line:
            ranks.setdefault(line, []).append(rank)
    said = [f"{_ranks(who)} {'has' if len(who) == 1 else 'have'} {line}" for line, who in ranks.items()]
    more = f"; and {len(said) - _SHOWN} other differences" if len(said) > _SHOWN else ""
    raise InputError(f"{'; '.join(said[:_SHOWN])}{more}: start all ranks with the same")


def facts_of_model(model: nn.Module) -> dict[str, str]:
    """Name -> type, shape and whether it is frozen, of all parameters."""
    return {
        name: f"{str(p.dtype).removeprefix('torch.')} {tuple(p.shape)}{'' if p.requires_grad else ' frozen'}"
        for name, p in model.named_parameters()
    }


def version_facts() -> dict[str, str]:
    """The versions of kasoku and torch, and a digest of kasoku's source."""
    package = Path(str(kasoku.__file__)).parent
    files = {str(f.relative_to(package)): f.read_text() for f in sorted(package.rglob("*.py"))}
    try:
        number = version("kasoku")
    except PackageNotFoundError:
        number = "not installed"
    return {"kasoku": number, "source": _digest(files)[:16], "torch": torch.__version__}


def _digest(facts: object) -> str:
    return hashlib.sha256(json.dumps(facts, default=dict).encode()).hexdigest()


def _same(here: Fact | None, wanted: Fact | None) -> bool:
    """Equal, and in the same order: that of parameters is the order of their collectives."""
    return _digest(here) == _digest(wanted)


def _difference(facts: Mapping[str, Fact], wanted: Mapping[str, Fact]) -> str:
    """The first fact that is not as wanted, and where; empty when all are."""
    names = [name for name in {**wanted, **facts} if not _same(facts.get(name), wanted.get(name))]
    if not names:
        return ""
    first, *others = names
    also = f" (also another {', '.join(others)})" if others else ""
    return f"another {first}: {_nearest(facts.get(first), wanted.get(first))}{also}"


def _nearest(here: Fact | None, wanted: Fact | None, path: str = "") -> str:
    """Where two facts differ first."""
    if isinstance(here, Mapping) and isinstance(wanted, Mapping):
        for key in {**wanted, **here}:
            if not _same(here.get(key), wanted.get(key)):
                return _nearest(here.get(key), wanted.get(key), f"{path}.{key}" if path else key)
        one, other = next(pair for pair in zip(here, wanted, strict=True) if pair[0] != pair[1])
        return f"{path + ': ' if path else ''}{one} comes where {other} comes on rank 0"
    if isinstance(here, str) and isinstance(wanted, str) and "\n" in here + wanted:
        lines = zip_longest(here.split("\n"), wanted.split("\n"))
        number, (one, other) = next((n, pair) for n, pair in enumerate(lines, 1) if pair[0] != pair[1])
        return _line(one, other, f"{path}, line {number}" if path else f"line {number}")
    start = f"{path} = " if path else ""
    return f"{start}{_value(here)} there, {_value(wanted)} on rank 0"


def _line(here: str | None, wanted: str | None, where: str) -> str:
    """How two lines differ, in short where both set the same key."""
    key, _, value = (here or "").partition(" = ")
    other, _, wanted_value = (wanted or "").partition(" = ")
    if value and wanted_value and key == other:
        return f"{key} = {_value(value)} there, {_value(wanted_value)} on rank 0"
    one, two = (repr(_value(line)) if line is not None else "nothing" for line in (here, wanted))
    return f"{where} is {one} there, {two} on rank 0"


def _value(fact: Fact | None) -> str:
    if fact is None:
        return "nothing"
    text = fact if isinstance(fact, str) else f"{len(fact)} entries"
    return text if len(text) <= _CLIP else f"{text[:_CLIP]}..."


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > _SHOWN + 1:
        return f"ranks {', '.join(map(str, ranks[:_SHOWN]))} and {len(ranks) - _SHOWN} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
