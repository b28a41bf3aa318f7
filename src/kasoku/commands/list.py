"""`kasoku list`: models, data sources, optimizers, schedules, techniques and recipes, a line each."""

from __future__ import annotations

import inspect
import tomllib
import typing
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from rich.console import Console
from rich.table import Table
from torch import nn
from torch.optim import Optimizer

from kasoku import core, data, device, distributed, memory, models, optim
from kasoku.commands import CommandArguments
from kasoku.core import Schedule, Technique


def run(arguments: CommandArguments) -> int:
    """Prints the public names, and the recipes of the current folder; returns the exit code."""
    sections: dict[str, dict[str, str]] = {
        "models": _public(inspect.isfunction, nn.Module, models),
        "data sources": _public(inspect.isfunction, data.Dataset, data),
        "optimizers": _public(inspect.isfunction, Optimizer, optim),
        "schedules": _public(inspect.isclass, Schedule, core),
        "techniques": _public(inspect.isclass, Technique, models, device, memory, data, optim, distributed),
        "recipes": {str(path): _first_comment(path) for path in sorted(Path("recipes").glob("*.toml"))},
    }
    console = Console(highlight=False)
    for title, rows in sections.items():
        table = Table(title=title, show_header=False, title_justify="left", box=None, padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        table.add_column()
        for name, line in rows.items():
            table.add_row(name, line)
        console.print(table, "")
    return 0


def _public(sought: Callable[[object], bool], kind: type, *packages: ModuleType) -> dict[str, str]:
    """The public functions that return this kind, or its classes, each with the first line of its docstring."""
    lines = {}
    for package in packages:
        for name in package.__all__:
            thing = getattr(package, name)
            result_type = typing.get_type_hints(thing).get("return") if inspect.isfunction(thing) else thing
            if sought(thing) and isinstance(result_type, type) and issubclass(result_type, kind) and thing is not kind:
                lines[f"{package.__name__}.{name}"] = (inspect.getdoc(thing) or "").partition("\n")[0]
    return lines


def _first_comment(path: Path) -> str:
    try:
        text = path.read_text()
        tomllib.loads(text)
    except (OSError, ValueError) as error:
        return f"cannot be read: {error}"
    first = text.partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""
