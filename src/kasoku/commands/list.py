"""`kasoku list`: what there is, one line each, from the docstrings."""

import inspect
import tomllib
import typing
from pathlib import Path
from types import ModuleType

from rich.console import Console
from rich.table import Table
from torch.optim import Optimizer

from kasoku import core, data, device, memory, models, optim
from kasoku import distributed as parallel
from kasoku.core import Schedule, Technique


def listing() -> None:
    """Prints models, data sources, rules, schedules, techniques and the recipes of the current folder."""
    sections: dict[str, dict[str, str]] = {
        "models": _functions(models, "num_classes"),
        "data sources": _functions(data, returns=data.Dataset),
        "optimizers": _functions(optim, returns=Optimizer),
        "schedules": _classes([core], Schedule),
        "techniques": _classes([models, device, memory, data, optim, parallel], Technique),
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


def _functions(room: ModuleType, parameter: str = "", returns: type | None = None) -> dict[str, str]:
    found = {}
    for name in room.__all__:
        thing = getattr(room, name)
        if inspect.isfunction(thing):
            result = typing.get_type_hints(thing).get("return")
            fits = returns is not None and isinstance(result, type) and issubclass(result, returns)
            if fits or parameter in inspect.signature(thing).parameters:
                found[f"{room.__name__}.{name}"] = _line(thing)
    return found


def _classes(rooms: list[ModuleType], kind: type) -> dict[str, str]:
    return {
        f"{room.__name__}.{name}": _line(thing)
        for room in rooms
        for name in room.__all__
        if inspect.isclass(thing := getattr(room, name)) and issubclass(thing, kind) and thing is not kind
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
