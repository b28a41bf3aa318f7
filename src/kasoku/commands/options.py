"""Options of commands: fields of frozen dataclasses, each declared once together with the way it is written."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, dataclass_transform, get_args, get_type_hints

from kasoku.config.shipped import locate

if TYPE_CHECKING:
    from kasoku.config.recipe import Recipe

_RECIPE = "a recipe file (TOML), or the name of a recipe that comes with kasoku (kasoku list)"


def argument(**settings: Any) -> Any:
    """A field that is a positional argument; `settings` are those of argparse's `add_argument`."""
    default: Any = None if settings.get("nargs") == "?" else MISSING
    return field(default=default, metadata={"flag": "", "settings": settings})


def option(flag: str = "", *, default: Any = None, **settings: Any) -> Any:
    """A field that is an option, called `flag` or as the field; `settings` are those of argparse's `add_argument`.

    Its default says how it is written: False is a switch, and () an option that may be given several times.
    """
    if settings.get("required"):
        default = MISSING
    elif default is False:
        settings["action"] = "store_true"
    elif default == ():
        settings |= {"action": "append", "default": []}
    else:
        settings["default"] = default
    return field(default=default, metadata={"flag": flag or "--", "settings": settings})


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True, kw_only=True)
class CommandArguments:
    """The arguments of a command: its options are fields. `if_interrupted`: what an interruption leaves behind.

    It and all classes below it are frozen dataclasses, whose fields are given by name.
    """

    traceback: bool = option(default=False, help="also show where an error came from")
    words: tuple[str, ...] = ()  # of the command line, after `kasoku`
    started: float = 0.0  # when the command was typed, on the clock of time.perf_counter
    if_interrupted: ClassVar[str] = "nothing was written"
    description: ClassVar[str | None] = None  # at the head of its help

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)


class JsonArguments(CommandArguments):
    """The arguments of a command that can answer programs; it fills `document`, which --json prints."""

    json: bool = option(default=False, help="print one JSON object and nothing else")
    document: dict[str, Any] = field(default_factory=dict)


class AllowArguments(CommandArguments):
    """The arguments of a command that builds what a recipe or a run names."""

    allow: tuple[str, ...] = option(default=(), metavar="NAME", help="your module or package that the recipe may use")


class OptionalRecipe(AllowArguments):
    """The arguments of a command that can do without a recipe."""

    recipe: Path | None = argument(nargs="?", type=locate, help=_RECIPE)
    set: tuple[str, ...] = option(default=(), metavar="PATH=VALUE", help="change a setting of the recipe")


class RecipeArguments(OptionalRecipe):
    """The arguments of a command that reads a recipe."""

    recipe: Path = argument(type=locate, help=_RECIPE)

    def load(self, *settings: str) -> Recipe:
        """The recipe with the settings of the command line, and these over them; its own modules can be imported."""
        from kasoku.config.recipe import load  # torch: `kasoku --help` does without
        from kasoku.config.trust import allow_beside

        allow_beside(self.recipe)
        return load(self.recipe, [*self.set, *settings])


@contextmanager
def only_json(document: Mapping[str, Any]) -> Iterator[None]:
    """Prints the document of a command, also of one that fails with a part of it, and nothing else."""
    from kasoku.core.files import json_text  # torch: `kasoku --help` does without

    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            yield
    finally:
        if document:  # of several ranks, the first one has it
            print(json_text(document), end="")


def declare(parser: argparse.ArgumentParser, kind: type[CommandArguments]) -> None:
    """Has a parser read the fields of a dataclass; their annotations say of which type they are."""
    types = get_type_hints(kind)
    parser.description = kind.description
    for each in fields(kind):
        if not each.metadata:
            continue
        flag, settings = each.metadata["flag"], dict(each.metadata["settings"])
        known = [t for t in (get_args(types[each.name]) or (types[each.name],)) if t in (int, float, Path)]
        if known:
            settings.setdefault("type", known[0])
        if flag == "--":
            flag += each.name.replace("_", "-")
        parser.add_argument(*([flag] if flag else []), dest=each.name, **settings)
    parser.set_defaults(kind=kind)


def arguments_of(parsed: argparse.Namespace, words: Sequence[str], started: float) -> CommandArguments:
    """The dataclass of what a parser read."""
    kind: type[CommandArguments] = parsed.kind
    read = {each.name: getattr(parsed, each.name) for each in fields(kind) if each.metadata}
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in read.items()}
    return kind(**given, words=tuple(words), started=started)
