"""`kasoku init`: writes a recipe to start from, with a comment on each key."""

import shlex
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from kasoku.commands.arguments import InitArguments
from kasoku.config import describe, toml
from kasoku.config.recipe import Recipe, dumps, load
from kasoku.core import InputError
from kasoku.core.files import write_text

_WIDTH = 100  # of a comment


def run(arguments: InitArguments) -> int:
    """Writes the recipe; returns the exit code."""
    source = arguments.source
    out = arguments.out or Path(f"{source.resolve().name.removesuffix('.toml')}.toml")
    if out.exists():
        raise InputError(f"{out}: is there already: remove it, or give another file, --out FILE")
    if source.is_dir() or source.suffix in (".parquet", ".csv", ".jsonl"):
        from kasoku.config.from_folder import recipe_for

        recipe = recipe_for(source, None)
    else:
        recipe = load(source)
    lines = _commented(tomllib.loads(dumps(recipe)), Recipe)
    write_text(out, "\n".join([f"# Train it: kasoku train {shlex.quote(str(out))}", *lines, ""]))
    print(f"{out}: written; train it with: kasoku train {shlex.quote(str(out))}")
    return 0


def _commented(table: Mapping[str, Any], thing: Callable[..., Any], path: str = "") -> Iterator[str]:
    """The lines of a table: each key with a comment; keys that are left out as comments; then the tables in it."""
    if "use" in table:
        thing = toml.resolve(table["use"], f"{path}use")
        yield from _comment(describe.summary_of(thing))
        yield f'use = "{describe.name_of(thing, table["use"])}"'
    below, known = [], describe.settings_of(thing)
    names = {"use", *(setting.name for setting in known)}
    for setting in [*known, *(describe.Setting(name, "", "", "") for name in table if name not in names)]:
        name, value = setting.name, table.get(setting.name)
        if isinstance(value, dict) or (isinstance(value, list) and value and isinstance(value[0], dict)):
            below.append((setting, value))
        elif name in table and name != "origin":
            yield from (*_comment(setting.line), tomli_w.dumps({name: value}).rstrip())
        elif name not in table and setting.default not in ("", "required"):
            yield from (*_comment(setting.line), f"# {name} = {setting.default}")
    tables = {each.__name__: each for each in describe.TABLES.values()}
    for setting, value in below:
        kind = tables.get(setting.type.removeprefix("table: "), dict)
        head = f"[{path}{setting.name}]" if isinstance(value, dict) else f"[[{path}{setting.name}]]"
        for each in [value] if isinstance(value, dict) else value:
            yield from ("", *_comment(setting.line), head)
            yield from _commented(each, kind, f"{path}{setting.name}.")


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
