"""Settings that declare what they may be, in the type of their field: `rank: Annotated[int, Range(at_least=1)] = 4`."""

import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, wraps
from inspect import get_annotations, signature
from typing import Any, Literal, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

from kasoku.core.errors import InputError

P = ParamSpec("P")
T = TypeVar("T")
_LIMITS = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le, "below": operator.lt}


class Range:
    """The numbers that a setting, or each item of it, may be: `at_least`, `above`, `at_most`, `below`; not NaN.

    `advice`: the end of the refusal of another number.
    """

    def __init__(self, advice: str = "", **limits: float) -> None:
        self.advice, self.limits = advice, limits

    def __contains__(self, value: float | Sequence[float]) -> bool:
        numbers = value if isinstance(value, tuple | list) else (value,)
        return all(_LIMITS[name](number, limit) for name, limit in self.limits.items() for number in numbers)

    def __str__(self) -> str:
        allowed = " and ".join(f"{name.replace('_', ' ')} {limit:,}" for name, limit in self.limits.items())
        return f"{allowed}; {self.advice}" if self.advice else allowed


class Checked:
    """Base class of dataclasses that refuse a number outside the `Range` of its field, and a word that is no Literal.

    None is not checked. A subclass with a `__post_init__` of its own calls this one first.
    """

    def __post_init__(self) -> None:
        _refuse(_hints(type(self)), vars(self))  # type: ignore[arg-type]


def checked(f: Callable[P, T]) -> Callable[P, T]:
    """A function that refuses arguments as `Checked` refuses settings."""
    names = [*signature(f).parameters]

    @wraps(f)
    def call(*args: P.args, **named: P.kwargs) -> T:
        _refuse(_hints(f), {**dict(zip(names, args, strict=False)), **named})
        return f(*args, **named)

    return call


def _refuse(hints: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Raises InputError for the first of these values that its type does not allow."""
    for name, hint in hints.items():
        value = values.get(name, ...)
        for allowed in getattr(hint, "__metadata__", ()):
            if isinstance(allowed, Range) and value not in (None, ...) and value not in allowed:
                raise InputError(f"{name}={value}: {allowed}")
        if get_origin(hint) is Literal and value not in (*get_args(hint), ...):
            *others, last = (f'"{word}"' for word in get_args(hint))
            raise InputError(f'{name}="{value}": {", ".join(others)} or {last}')


@cache
def _hints(thing: Any) -> dict[str, Any]:
    """The types of a class's fields, or of arguments, but of those that name what only type checkers import."""
    hints: dict[str, Any] = {}
    for base in reversed(thing.__mro__) if isinstance(thing, type) else (thing,):
        for name, hint in get_annotations(base).items():
            alone = type(name, (), {"__module__": base.__module__, "__annotations__": {name: hint}})
            with suppress(*([] if "Annotated[" in str(hint) else [NameError])):  # no number goes unchecked
                hints |= get_type_hints(alone, include_extras=True)
    return hints
