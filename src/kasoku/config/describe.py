"""The names that a recipe can use, and the settings of each: read from signatures and from docstrings' `Args:`."""

import dataclasses
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from kasoku import core, data, device, distributed, memory, models, optim, tracking
from kasoku.config import toml
from kasoku.config.recipe import Evaluate, Faults, Recipe, Save, Tune
from kasoku.config.shipped import RECIPES
from kasoku.core.errors import InputError, nearest

TABLES: dict[str, Callable[..., Any]] = {
    each.__name__.lower(): each for each in (Recipe, Evaluate, Save, Tune, Faults, device.Device)
}
TABLES |= {f"kasoku.optim.{each.__name__}": each for each in (optim.SGDSettings, optim.Trust)}
_SECTIONS = {  # title: what a function returns, or a class is a subclass of; the packages that have them
    "models": (nn.Module, (models,)),
    "data sources": (data.Dataset, (data,)),
    "optimizers": (Optimizer, (optim,)),
    "losses": (Tensor, (optim,)),
    "schedules": (core.Schedule, (core,)),
    "techniques": (core.Technique, (models, device, memory, data, optim, distributed, tracking)),
    "bucket plans": (distributed.Policy, (distributed,)),
    "reducers": (distributed.Reducer, (distributed,)),
}
_WORDS = {bool: "true or false", int: "integer", float: "number", str: "text", tuple: "list", list: "list"}
_GIVEN_BY_KASOKU = (nn.Module, Tensor)  # types of parameters that no recipe sets
_ARGS = re.compile(r"^Args:\n((?:(?: .*)?\n)*)", re.MULTILINE)
_ENTRY = re.compile(r"^    (\w+): (.*(?:\n     .*)*)", re.MULTILINE)
_NOTE = re.compile(r"^(Saves|Costs|Maths|Ref|Seen): (.*(?:\n    .*)*)", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Setting:
    """One key of a table: `type` and `default` are written as in a recipe; `line` has what it does, and its range.

    A `type` that is a table has its class's name. `default` is empty where the key may be left out without one, and
    "required" where it must be there.
    """

    name: str
    type: str
    default: str
    line: str


def listed() -> dict[str, dict[str, Callable[..., Any]]]:
    """The names that kasoku has for recipes, by section: name -> class or function."""
    sections: dict[str, dict[str, Callable[..., Any]]] = {}
    for title, (kind, packages) in _SECTIONS.items():
        things = ((f"{p.__name__}.{name}", getattr(p, name)) for p in packages for name in p.__all__)
        sections[title] = {name: thing for name, thing in things if _is(thing, kind)}
    return {**sections, "tables": TABLES}


def find(name: str) -> tuple[str, Callable[..., Any]]:
    """The full name and the class or function of a name, full or short. Raises InputError for an unknown one."""
    for full, thing in _names().items():
        if name in (full, full.rpartition(".")[2]):
            return full, thing
    if "." in name:
        return name, toml.resolve(name, "NAME")
    if name in RECIPES:
        raise InputError(f'"{name}" is a recipe: kasoku train {name} --print shows it')
    with suppress(ImportError, RuntimeError):  # it may not be installed, or not with this torch
        if name == "timm" or import_module("timm").is_model(name):
            network = "NAME" if name == "timm" else name
            instead = f'model = {{use = "timm.create_model", model_name = "{network}"}}'
            raise InputError(f'"{name}": not of kasoku but of timm: in a recipe write {instead}')
    short = sorted(full.rpartition(".")[2] for full in _names())
    raise InputError(f'"{name}": no such name{nearest(name, short) or ": kasoku list shows all"}')


def name_of(thing: Callable[..., Any], otherwise: str = "") -> str:
    """The name under which recipes use a class or function of kasoku."""
    return next((full for full, each in _names().items() if each is thing), otherwise)


def settings_of(thing: Callable[..., Any]) -> list[Setting]:
    """The keys that a table with this `use` can have, in order."""
    lines = {name: " ".join(line.split()) for args in _args_of(thing) for name, line in _ENTRY.findall(args)}
    made = {f.name: f.default_factory for f in dataclasses.fields(thing)} if dataclasses.is_dataclass(thing) else {}
    hints = toml.hints_of(thing)
    settings = []
    for name, p in toml.parameters_of(thing).items():
        hint = hints.get(name, Any)
        given = isinstance(hint, type) and issubclass(hint, _GIVEN_BY_KASOKU)
        if given or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            continue
        factory = made.get(name, dataclasses.MISSING)
        default = p.default if factory is dataclasses.MISSING else factory()
        shown = "required" if default is p.empty else _as_toml(default)
        settings.append(Setting(name, type_of(hint), shown, lines.get(name, "")))
    return settings


def summary_of(thing: Callable[..., Any]) -> str:
    """The first line of its docstring."""
    return (inspect.getdoc(thing) or "").partition("\n")[0]


def notes_of(thing: Callable[..., Any]) -> dict[str, str]:
    """The notes of its docstring: Saves, Costs, Maths, Ref, Seen."""
    return {name: " ".join(text.split()) for name, text in _NOTE.findall(inspect.getdoc(thing) or "")}


def type_of(hint: Any) -> str:
    """A type in a reader's words."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return " | ".join(map(json.dumps, args))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_of(arg) for arg in args if arg is not type(None))
    if args and origin is not None and issubclass(origin, typing.Collection):
        return "[" + ", ".join("..." if arg is ... else type_of(arg) for arg in args) + "]"
    if hint is toml.Factory or origin is Callable:
        return "table with `use`"
    is_table = isinstance(hint, type) and dataclasses.is_dataclass(hint)
    return _WORDS.get(hint) or (f"table: {hint.__name__}" if is_table else "any")


def _names() -> dict[str, Callable[..., Any]]:
    return {full: thing for section in listed().values() for full, thing in section.items()}


def _is(thing: Any, kind: type) -> bool:
    if inspect.isfunction(thing):
        thing = typing.get_type_hints(thing).get("return")
        return isinstance(thing, type) and issubclass(thing, kind)
    return dataclasses.is_dataclass(thing) and issubclass(thing, kind) and thing is not kind  # type: ignore[arg-type]


def _args_of(thing: Any) -> Iterator[str]:
    """The `Args:` that may explain its settings, its own last: of its base classes, or of the class that it returns."""
    result = typing.get_type_hints(thing).get("return") if inspect.isfunction(thing) else None
    classes = (result or thing).__mro__ if isinstance(result or thing, type) else ()
    docs = [vars(each).get("__doc__") for each in reversed(classes)]
    for doc in [*docs, thing.__doc__]:
        yield from _ARGS.findall(inspect.cleandoc(doc or "") + "\n")


def _as_toml(value: Any) -> str:
    if isinstance(value, toml.Factory):
        return f'{{use = "{value.use}"}}'
    if not dataclasses.is_dataclass(value):
        return "" if value is None else json.dumps(value)
    return "{}" if type(value) in TABLES.values() else f'{{use = "{name_of(type(value))}"}}'
