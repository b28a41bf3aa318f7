"""Frozen dataclasses map one to one to strict TOML; a table's `use` names a class or function by dotted name.

Its other keys are that thing's signature. In a field typed `Factory` the thing is checked now, bound, and called
later with what only the run knows; in a field typed as a class (Technique, Schedule) it is built now.
"""

import dataclasses
import importlib
import inspect
import json
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import distributions
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar

from kasoku.config import trust
from kasoku.core.errors import InputError, attributed, nearest, summary

T = TypeVar("T")
_LEVELS = 30  # of a document
_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


@dataclass(frozen=True)
class Factory:
    """A function or class by dotted name with some of its arguments; call it with the rest.

    Raises InputError on a name that does not exist, or a key that is not in its signature.
    """

    use: str
    keys: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", _arguments(resolve(self.use, "use"), self.keys, self.use))

    @property
    def name(self) -> str:
        """The name of a network for messages: in its library, or `use`."""
        return str(self.keys.get("model_name", self.use))

    def __call__(self, *args: Any, **more: Any) -> Any:
        """Calls it; of `more`, what its signature lacks or the keys have set already is left out."""
        known = parameters_of(_lookup(self.use, "use"))
        return self.call(*args, **{**{k: v for k, v in more.items() if k in known}, **self.keys})

    def call(self, *args: Any, **arguments: Any) -> Any:
        """Calls it with these arguments in place of its keys."""
        thing = _lookup(self.use, "use")  # `use` was checked when this was made; a loss is called at each step
        try:
            inspect.signature(thing).bind(*args, **arguments)
        except TypeError as error:
            raise InputError(f"{self.use}: {error}: give it as a key beside use") from error
        except ValueError:
            pass  # a builtin without a signature
        try:
            return thing(*args, **arguments)
        except InputError:
            raise
        except ValueError as error:  # torch's way to refuse a setting
            failure = attributed(error)
            raise failure if failure is not error else InputError(f"{self.use}: {error}") from error


def resolve(dotted: str, path: str) -> Callable[..., Any]:
    """The class or function of a dotted name. Raises InputError that names the nearest right name."""
    parts = dotted.split(".")
    if len(parts) < 2 or not all(parts):
        raise InputError(f'{path} = "{dotted}": a dotted name such as kasoku.models.resnet50 is wanted')
    trust.check_name(dotted, path)
    thing = _lookup(dotted, path)
    trust.check_callable(thing, dotted, path)
    return thing


def _lookup(dotted: str, path: str) -> Callable[..., Any]:
    """What a dotted name stands for, which a recipe may use. Raises InputError as `resolve`."""
    parts = dotted.split(".")
    for end in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:end])
        try:
            thing: Any = importlib.import_module(name)
            break
        except ModuleNotFoundError as error:
            if error.name != name and not name.startswith(f"{error.name}."):
                raise InputError(f'{path} = "{dotted}": {error}: install it') from error
        except (ImportError, RuntimeError, OSError) as error:
            if parts[0] not in trust.EXTRAS:
                raise
            # timm imports torchvision too
            has = "; ".join(f"{d.name} {d.version}" for d in distributions() if d.name in ("torch", "torchvision"))
            advice = "install the torchvision built for this torch: see its version table, with the same +cpu or +cuXXX"
            raise InputError(f'{path} = "{dotted}": {summary(error)} ({has}): {advice}') from error
    else:
        install = f"pip install 'kasoku[{parts[0]}]'" if parts[0] in trust.EXTRAS else "install it"
        raise InputError(f'{path} = "{dotted}": there is no module {parts[0]} on the import path: {install}')
    for part in parts[end:]:
        if not hasattr(thing, part):
            public = [name for name in dir(thing) if not name.startswith("_")]
            raise InputError(f'{path} = "{dotted}": no such name{nearest(part, public)}')
        thing = getattr(thing, part)
    if not callable(thing):
        raise InputError(f'{path} = "{dotted}": a class or function is wanted, this is {type(thing).__name__}')
    return typing.cast("Callable[..., Any]", thing)


def read(path: Path, settings: Sequence[str] = (), *, wanted: str = "a TOML file is wanted") -> dict[str, Any]:
    """A TOML document, with `path=value` settings over it. Raises InputError for a file that cannot be read."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}): {wanted}") from error
    except (ValueError, RecursionError) as error:  # TOML's, of letters, of a number of 4,300 digits
        raise InputError(f"{path}: not TOML ({error})") from error
    for setting in settings:
        override(document, setting)
    if _is_deeper(document, _LEVELS):
        raise InputError(f"{path}: more than {_LEVELS} tables or lists in each other: {wanted}")
    return document


def _is_deeper(thing: Any, levels: int) -> bool:
    below = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, list) else ()
    return any(levels == 0 or _is_deeper(item, levels - 1) for item in below)


def parse(thing: Callable[..., T], table: Mapping[str, Any], path: str = "") -> T:
    """Builds what a table describes: calls a dataclass, another class or a function with the table's values.

    Raises InputError on the first unknown, mistyped or missing key, by its path.
    """
    values = _arguments(thing, table, path)
    for name, p in parameters_of(thing).items():
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and name not in values:
            raise InputError(f"{_join(path, name)}: missing, and it has no default")
    try:
        return thing(**values)
    except InputError as error:
        raise InputError(f"{path}: {error}" if path else str(error)) from error


def table(thing: Any, *, use: bool = False) -> Any:
    """The plain TOML value of a dataclass, back to what `parse` takes; None is left out.

    `use`: with the name of its class. It is written where the field's type does not tell the class.
    """
    if isinstance(thing, list | tuple):
        return [table(item, use=True) for item in thing]
    if isinstance(thing, Factory):
        extends = {k: any(map(dataclasses.is_dataclass, type(v).__mro__[1:])) for k, v in thing.keys.items()}
        return {"use": thing.use, **{k: table(v, use=extends[k]) for k, v in thing.keys.items() if v is not None}}
    if not dataclasses.is_dataclass(thing) or isinstance(thing, type):
        return thing
    hints = typing.get_type_hints(type(thing))
    named = {"use": f"{type(thing).__module__}.{type(thing).__qualname__}"} if use else {}
    values = {f.name: getattr(thing, f.name) for f in dataclasses.fields(thing) if f.init}
    return named | {k: table(v, use=type(v) is not hints[k]) for k, v in values.items() if v is not None}


def override(document: dict[str, Any], setting: str) -> None:
    """Sets one `path=value` in a TOML document (TOML; a bare word is a string). Lists take an index; the next adds."""
    path, equals, text = setting.partition("=")
    if not equals or not path.strip():
        raise InputError(f"--set {setting}: path=value is wanted, such as --set batch=256")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = {"True": True, "False": False}.get(text, text)  # as Python writes them
    if not isinstance(value, bool | int | float | str | list | dict):
        value = text  # a folder named like a date
    at: Any = document
    keys = path.strip().split(".")
    for key, following in pairwise(keys):
        at = at[_index(at, key, path)] if isinstance(at, list) else at.setdefault(key, [] if following == "0" else {})
        if not isinstance(at, dict | list):
            raise InputError(f"--set {setting}: {key} is a value, not a table")
    if isinstance(at, dict) and keys[-1] == "use":
        _check_replaced(at, value, path.strip())
    at[_index(at, keys[-1], path) if isinstance(at, list) else keys[-1]] = value


def _check_replaced(table: Mapping[str, Any], use: Any, path: str) -> None:
    """Raises InputError where a table would name something else, and keep arguments that only the old one has."""
    if not isinstance(use, str) or table.get("use", use) == use:
        return
    parameters = parameters_of(resolve(use, path))
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    if old := [name for name in table if name != "use" and name not in parameters]:
        whole = path.removesuffix(".use")
        got = f"{', '.join(old)} in [{whole}] {'is' if len(old) == 1 else 'are'} of {table['use']}"
        advice = f"with the arguments that you want: --set '{whole}={{use = \"{use}\"}}'"
        raise InputError(f"--set {path}={use}: {got}: replace the whole table, {advice}")


def _index(items: list[Any], key: str, path: str) -> int:
    if not key.isdecimal() or int(key) > len(items):
        raise InputError(f"--set {path}: {key} is no index of a list of {len(items)}: 0 to {len(items)}; that adds one")
    if int(key) == len(items):
        items.append({})
    return int(key)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def parameters_of(thing: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of a class or function; none for a builtin without a signature."""
    with suppress(TypeError, ValueError):
        return dict(inspect.signature(thing).parameters)
    return {}


def hints_of(thing: Callable[..., Any]) -> dict[str, Any]:
    """The types of the parameters of a class or function, as far as it has annotations."""
    annotated = thing.__init__ if isinstance(thing, type) and not dataclasses.is_dataclass(thing) else thing  # type: ignore[misc]
    with suppress(NameError, TypeError, AttributeError):
        return typing.get_type_hints(annotated)
    return {}


def _arguments(thing: Callable[..., Any], keys: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The keys, checked against the signature: their names, and their types where it has annotations."""
    trust.check_keys(thing, keys, path)
    parameters = parameters_of(thing)
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        known = [name for name, p in parameters.items() if p.kind is not p.VAR_POSITIONAL]
        for name in keys:
            if name not in known:
                raise InputError(f"{_join(path, name)}: no such key{nearest(name, sorted(known))}")
    hints = hints_of(thing)
    return {k: _convert(hints.get(k, Any), v, _join(path, k)) for k, v in keys.items()}


def _convert(hint: Any, value: Any, path: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or isinstance(hint, TypeVar):
        return value
    if origin in (typing.Union, types.UnionType):
        return _convert_union(args, value, path)
    if origin is Callable and isinstance(value, Mapping):
        return _build(Factory, value, path)
    if origin is Literal:
        if value not in args or isinstance(value, bool) != any(isinstance(a, bool) for a in args if a == value):
            raise InputError(f"{path} = {inline(value)}: one of {', '.join(inline(a) for a in args)}")
        return value
    if origin in (tuple, list) or hint in (tuple, list):
        return _convert_list(args, value, path)
    if hint in _NAMES:
        good = isinstance(value, int | float) if hint is float else isinstance(value, hint)
        if not good or (isinstance(value, bool) and hint is not bool):
            raise InputError(f"{path} = {inline(value)}: {_NAMES[hint]} is wanted, this is {_kind(value)}")
        return float(value) if hint is float else value
    return _build(hint, value, path) if isinstance(hint, type) else value


def _convert_union(args: tuple[Any, ...], value: Any, path: str) -> Any:
    errors = []
    for hint in args:
        if hint is not type(None):
            try:
                return _convert(hint, value, path)
            except InputError as error:
                errors.append(error)
    raise errors[0]


def _convert_list(args: tuple[Any, ...], value: Any, path: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise InputError(f"{path} = {inline(value)}: a list is wanted, this is {_kind(value)}")
    any_length = len(args) < 2 or args[-1] is Ellipsis
    if not any_length and len(args) != len(value):
        raise InputError(f"{path}: {len(args)} items are wanted, there are {len(value)}")
    hints = [args[0] if args else Any] * len(value) if any_length else args
    return tuple(_convert(h, v, f"{path}[{i}]") for i, (h, v) in enumerate(zip(hints, value, strict=True)))


def _build(cls: type, value: Any, path: str) -> Any:
    if isinstance(value, cls):
        return value
    if not isinstance(value, Mapping):
        raise InputError(f"{path} = {inline(value)}: a table is wanted, this is {_kind(value)}")
    if "use" not in value and dataclasses.is_dataclass(cls) and cls is not Factory and not cls.__subclasses__():
        return parse(cls, value, path)
    if not isinstance(value.get("use"), str):
        raise InputError(f'{path}.use: missing; it names what to use, such as use = "kasoku.models.resnet50"')
    keys = {k: v for k, v in value.items() if k != "use"}
    thing = resolve(value["use"], f"{path}.use")
    if cls is Factory:
        return Factory(value["use"], _arguments(thing, keys, path))
    wrong = f'{path}.use = "{value["use"]}": a {cls.__name__} is wanted, this is '
    if isinstance(thing, type) and not issubclass(thing, cls):
        raise InputError(f"{wrong}{thing.__name__}")
    instance = parse(thing, keys, path)
    if not isinstance(instance, cls):
        raise InputError(f"{wrong}{type(instance).__name__}")
    return instance


def _kind(value: Any) -> str:
    return _NAMES.get(type(value), "a list" if isinstance(value, list) else "a table")


def inline(value: Any) -> str:
    """A value as TOML, in one line."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(inline, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{inline(str(key))} = {inline(item)}' for key, item in value.items())}}}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, bool | str) else str(value)
