"""`kasoku list`: models, data sources, optimizers, schedules, techniques and recipes, a line each."""

from __future__ import annotations

import inspect
import tomllib
import typing
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
        "models": _functions(models, nn.Module),
        "data sources": _functions(data, data.Dataset),
        "optimizers": _functions(optim, Optimizer),
        "schedules": _classes([core], Schedule),
        "techniques": _classes([models, device, memory, data, optim, distributed], Technique),
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


def _functions(package: ModuleType, returns: type) -> dict[str, str]:
    lines = {}
    for name in package.__all__:
        thing = getattr(package, name)
        result = typing.get_type_hints(thing).get("return") if inspect.isfunction(thing) else None
        if isinstance(result, type) and issubclass(result, returns):
            lines[f"{package.__name__}.{name}"] = _line(thing)
    return lines


def _classes(packages: list[ModuleType], kind: type) -> dict[str, str]:
    return {
        f"{package.__name__}.{name}": _line(thing)
        for package in packages
        for name in package.__all__
        if inspect.isclass(thing := getattr(package, name)) and issubclass(thing, kind) and thing is not kind
    }


def _line(thing: object) -> str:
    return (inspect.getdoc(thing) or "").partition("\n")[0]


def _first_comment(path: Path) -> str:
    try:
        text = path.read_text()
        tomllib.loads(text)
    except (OSError, ValueError) as error:
        return f"cannot be read: {error}"
    first = text.partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""
