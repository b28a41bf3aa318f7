"""Options of commands: fields of frozen dataclasses, each declared once together with the way it is written."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from kasoku.config.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class CommandArguments:
    """The arguments of a command. `if_interrupted` tells the user what an interruption leaves behind."""

    words: tuple[str, ...] = ()  # of the command line, after `kasoku`
    started: float = 0.0  # when the command was typed, on the clock of time.perf_counter
    if_interrupted: ClassVar[str] = "nothing was written"


def option(*flags: str, **settings: Any) -> Any:
    """A field that is read from the command line; `settings` are those of argparse's `add_argument`.

    Without flags it is a positional argument of the field's name.
    """
    action, optional = settings.get("action"), flags or settings.get("nargs") == "?"
    if settings.get("required") or not optional:
        default: Any = MISSING
    else:
        default = {"append": (), "store_true": False}.get(action or "", settings.get("default"))
    return field(default=default, metadata={"flags": flags, "settings": settings})


def set_option() -> Any:
    """`--set`, which all commands that read a recipe have."""
    return option("--set", action="append", metavar="PATH=VALUE", help="change a setting of the recipe")


@dataclass(frozen=True, kw_only=True)
class RecipeArguments(CommandArguments):
    """The arguments of a command that reads a recipe."""

    recipe: Path = option(type=Path, help="a recipe file (TOML)")
    set: tuple[str, ...] = set_option()

    def load(self, *settings: str) -> Recipe:
        """The recipe with the settings of the command line, and these over them; its own modules can be imported."""
        from kasoku.config.recipe import load, own_folders  # torch: `kasoku --help` does without

        sys.path.extend(folder for folder in own_folders(self.recipe) if folder not in sys.path)
        return load(self.recipe, [*self.set, *settings])


def declare(parser: argparse.ArgumentParser, kind: type[Any], run: Callable[[Any], int]) -> None:
    """Has a parser read the fields of `kind`, whose instances are the arguments of `run`."""
    for each in fields(kind):
        if each.metadata:
            flags, settings = each.metadata["flags"], each.metadata["settings"]
            if flags:
                parser.add_argument(*flags, dest=each.name, **settings)
            else:
                parser.add_argument(each.name, **settings)
    parser.set_defaults(kind=kind, run=run)


def arguments_of(parsed: argparse.Namespace, words: Sequence[str], started: float) -> CommandArguments:
    """The dataclass of what a parser read."""
    kind: type[CommandArguments] = parsed.kind
    values = {each.name: getattr(parsed, each.name) for each in fields(kind) if each.metadata}
    known = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    lists = {
        each.name for each in fields(kind) if each.metadata and each.metadata["settings"].get("action") == "append"
    }
    known |= {name: () for name in lists if known[name] is None}
    return kind(**known, words=tuple(words), started=started)
