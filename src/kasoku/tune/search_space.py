"""The space of a search: the settings that its trials vary, and the values that each can have."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kasoku.config.toml import inline, parse, read
from kasoku.core import InputError


@dataclass(frozen=True)
class Between:
    """Numbers from `low` to `high`, both included; integers if `low`, `high` and `step` are.

    Raises InputError for an empty range, and for values that are not finite numbers.
    """

    low: Any
    high: Any
    log: bool = False  # uniform in the logarithm, as for rates
    step: Any = None  # only low + k * step

    def __post_init__(self) -> None:
        numbers = [x for x in (self.low, self.high, self.step) if x is not None]
        if any(type(x) not in (int, float) or not math.isfinite(x) for x in numbers):
            raise InputError(f"low, high and step are finite numbers, these are {', '.join(map(inline, numbers))}")
        if not self.low < self.high:
            raise InputError(f"low={self.low}, high={self.high}: an empty range; low must lie below high")
        if self.log and (self.low <= 0 or self.step is not None):
            raise InputError("log = true: needs low above 0, and no step")
        if self.step is not None and not 0 < self.step <= self.high - self.low:
            raise InputError(f"step={self.step}: above 0, and at most high - low")

    def proposed(self, trial: Any, path: str) -> str:
        """The value proposed by Optuna's trial, as TOML."""
        if all(type(x) is int for x in (self.low, self.high, self.step or 1)):
            return inline(trial.suggest_int(path, self.low, self.high, step=self.step or 1, log=self.log))
        return inline(trial.suggest_float(path, self.low, self.high, step=self.step, log=self.log))

    @property
    def examples(self) -> tuple[str, ...]:
        """Some of its values, as TOML."""
        return inline(self.low), inline(self.high)


@dataclass(frozen=True)
class OneOf:
    """One of several values of any kind: numbers, words, lists, tables. Raises InputError for an empty list."""

    choices: tuple[Any, ...]

    def __post_init__(self) -> None:
        if not self.choices:
            raise InputError("choices = []: an empty range; give at least one value")

    def proposed(self, trial: Any, path: str) -> str:
        return str(trial.suggest_categorical(path, self.examples))

    @property
    def examples(self) -> tuple[str, ...]:
        return tuple(map(inline, self.choices))


Space = Mapping[str, Between | OneOf]


def read_space(path: Path) -> Space:
    """A space file: TOML, path = {low, high, log, step} or path = {choices = [...]}; paths as --set takes them.

    Raises InputError, with the path, for a file that cannot be read and for a table that is not a range.
    """
    document = read(path, wanted="a space file is wanted")
    try:
        space = dict(_flat(document, ""))
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    if not space:
        raise InputError(f"{path}: nothing in it; give such as optimizer.lr = {{low = 0.01, high = 1.0, log = true}}")
    return space


def _flat(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Between | OneOf]]:
    for key, value in table.items():
        path = f"{prefix}.{key}" if prefix else key
        if not isinstance(value, dict):
            raise InputError(f"{path} = {inline(value)}: {{low = ..., high = ...}} or {{choices = [...]}} is wanted")
        if "choices" in value:
            yield path, parse(OneOf, value, path)
        elif {"low", "high"} & value.keys():
            yield path, parse(Between, value, path)
        else:
            yield from _flat(value, path)
