"""`kasoku list`: what a recipe can name, a line each; `kasoku list NAME`: its settings."""

from dataclasses import asdict

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kasoku.commands.arguments import ListArguments
from kasoku.config import describe, trust
from kasoku.config.shipped import RECIPES


def run(arguments: ListArguments) -> int:
    """Prints the names that a recipe can use and the recipes of kasoku, or the settings of a name."""
    console = Console(highlight=False)
    if arguments.name is not None:
        trust.allow_beside(None)
        full, thing = describe.find(arguments.name)
        summary, settings, notes = describe.summary_of(thing), describe.settings_of(thing), describe.notes_of(thing)
        console.print(escape(f"{full}: {summary}"), "")
        table = _table("")
        for setting in settings:
            default = f"= {setting.default}" if setting.default not in ("", "required") else setting.default
            table.add_row(setting.name, escape(setting.type), escape(default), escape(setting.line))
        console.print(table)
        for note, text in notes.items():
            console.print(escape(f"{note}: {text}"))
        arguments.document.update(name=full, summary=summary, settings=[*map(asdict, settings)], notes=notes)
        return 0
    sections = {
        title: {name: describe.summary_of(thing) for name, thing in things.items()}
        for title, things in describe.listed().items()
    }
    # the first line of each is a comment that says what it trains
    sections["recipes"] = {name: file.read_text().partition("\n")[0].lstrip("# ") for name, file in RECIPES.items()}
    arguments.document.update(sections)
    for title, rows in sections.items():
        table = _table(title)
        for name, line in rows.items():
            table.add_row(name, escape(line))
        console.print(table, "")
    console.print("kasoku list NAME shows the settings of a name; kasoku train RECIPE --print shows a recipe.")
    return 0


def _table(title: str) -> Table:
    table = Table(title=title, show_header=False, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    return table
