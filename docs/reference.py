"""Writes the generated parts of the pages in docs/, between their markers: recipes.md, techniques.md, and others.

Run it after a change of a setting, a docstring or an option; tests/test_docs.py says when that is due.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import Field, fields
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from kasoku.cli import VERBS
from kasoku.commands import arguments
from kasoku.config import describe
from kasoku.core import Technique

DOCS = Path(__file__).parent
sys.path.append(str(DOCS.parent / "benchmarks"))

import claims  # noqa: E402 - after its folder

COMBINING = DOCS.parent / "tests" / "files" / "combining.json"  # written by `make combining`
MARKED = re.compile(r"(<!-- generated: (\w+) ?([\w.]*) -->\n).*?(<!-- end -->)", re.DOTALL)
FIGURE = re.compile(r"\d\.\d|\d ?(%|(us|ms|s|min|times|MB)\b)")  # may look measured
PAPER = re.compile(r"\[(00\d)\]")  # a text that the project began with
SECTION = re.compile(r"^(?:Args|Attributes|Saves|Costs|Maths|Ref|Seen|Raises):", re.MULTILINE)
RANKS = {  # class attribute: when its techniques communicate
    "exchanges_gradients": "`apply` copies rank 0's weights to all ranks; steps and `job.drain()` communicate",
    "groups_span_ranks": "each update communicates, and a forward in which a group of images spans ranks",
    "renews_statistics": "`job.evaluation()` communicates",
    "vetoes_steps": "each step that it decides on communicates (a few numbers of each rank)",
    "exchanges_losses": "each step communicates (the losses of its images)",
    "captures_graph": "each step communicates, if the model has a BatchNorm",
    "saves_memory": "beside Overlap, the backward of a large Linear communicates",
}
USED_BY = 3  # commands that have the same option, so that it is described once


def pages() -> dict[str, str]:
    """The pages with generated parts, as they should be: file name -> text."""
    parts: dict[str, Callable[..., str]] = {
        "recipes": recipes,
        "techniques": techniques,
        "overview": overview,
        "names": names_for_use,
        "combining": combining,
        "document": document,
    }
    parts |= {"commands": commands, "shared": shared_options, "package": package}
    texts = {page.name: page.read_text() for page in sorted(DOCS.glob("*.md"))}
    return {
        name: MARKED.sub(lambda found: f"{found[1]}\n{parts[found[2]](*found[3].split()).strip()}\n\n{found[4]}", text)
        for name, text in texts.items()
        if MARKED.search(text)
    }


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown; empty without rows."""
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join([f"| {' | '.join(head)} |", "|" + "---|" * len(head), *lines]) if lines else ""


def settings(thing: Callable[..., Any]) -> str:
    """The settings of a class or function as a table."""
    rows = [
        (
            f"`{s.name}`",
            s.type,
            f"`{s.default}`" if s.default not in ("", "required") else s.default,
            unmeasured(sentence(s.line), "a setting"),
        )
        for s in describe.settings_of(thing)
    ]
    return table(["setting", "type", "default", "meaning"], rows)


def unmeasured(line: str, reason: str) -> str:
    """A line, with a comment for tests/test_records.py if it has a figure that looks measured."""
    return f"{line} <!-- not measured: {reason} -->" if FIGURE.search(line) else line


def cited(line: str) -> str:
    """A line with links to the papers."""
    return PAPER.sub(r"[\\[\1\\]](techniques.md#papers)", line)


def sentence(line: str) -> str:
    """The same, beginning with a capital letter."""
    return cited(line[:1].upper() + line[1:])


def short(name: str) -> str:
    """The last word of a dotted name."""
    return name.rpartition(".")[2]


def package(name: str) -> str:
    """The public names of a package."""
    return ", ".join(f"`{public}`" for public in import_module(name).__all__) + "."


# ---- techniques


def overview() -> str:
    """All techniques: what each does, and what it saves."""
    rows = []
    for name, thing in describe.listed()["techniques"].items():
        saves = describe.notes_of(thing).get("Saves", "")
        rows.append((f"[{short(name)}](#{short(name).lower()})", describe.summary_of(thing), sentence(saves)))
    return table(["technique", "what it does", "what it saves"], rows)


def techniques() -> str:
    """Each technique: its notes, what it cannot be combined with, its settings."""
    known = describe.listed()["techniques"]
    return "\n\n".join(part for name, thing in known.items() for part in technique(name, thing, known) if part)


def technique(name: str, thing: Any, known: dict[str, Any]) -> Iterator[str]:
    """The section of one technique."""
    yield f"### {short(name)}"
    yield f"`{name}`: {describe.summary_of(thing)}"
    yield cited(SECTION.split((inspect.getdoc(thing) or "").partition("\n")[2])[0].strip())
    notes = describe.notes_of(thing)
    lines = [f"- **{word}:** {sentence(notes[word])}" for word in ("Saves", "Costs") if word in notes]
    lines += [f"- **{word}:** {cited(notes[word])}" for word in ("Maths", "Seen", "Ref") if word in notes]
    others = ", ".join(refused(thing, known))
    told = inspect.getdoc(thing) or ""
    more = "; its settings name exceptions" if re.search(r"\b[Nn]ot with\b", told) else ""
    lines.append(f"- **Combines with:** all others{f' but {others}' if others else ''}{more}.")
    if thing.needs_whole_gradients:
        lines.append("- **Updates:** no parameter before all gradients are there, so Overlap waits for all buckets.")
    if thing.vetoes_steps:
        note = "SavedMemory keeps gradients until the step; Overlap waits for all buckets with a lossy reducer only."
        lines.append(f"- **Updates:** {note}")
    when = [text for attribute, text in RANKS.items() if getattr(thing, attribute)]
    more = "; its settings name exceptions" if "collective" in told and not when else ""
    lines.append(f"- **Ranks:** {'; '.join(when) or 'does not communicate'}{more}.")
    yield "\n".join(lines)
    yield settings(thing)


def refused(technique: type[Technique], known: dict[str, Any]) -> list[str]:
    """The other techniques that cannot be combined with one."""
    return [short(name) for name, other in known.items() if other is not technique and technique.conflict(other)]


# ---- pairs of techniques


def linked(name: str) -> str:
    """The name of a technique as a link to its section, where a recipe can have it."""
    known = map(short, describe.listed()["techniques"])
    return f"[{name}](techniques.md#{name.lower()})" if name in known else f"`{name}`"


def combining() -> str:
    """What became of each pair, from the run of all of them."""
    known = json.loads(COMBINING.read_text())
    others: dict[str, list[tuple[str, str, str]]] = {"refuse": [], "less": [], "not run": []}
    for row in known["others"]:
        others[row["kind"]].append((linked(row["one"]), linked(row["other"]), row["line"].replace("\n", "<br>")))
    refused = [(one, other, *line.partition(": ")[2].split("; ", 1)) for one, other, line in others["refuse"]]
    names = list(known["signs"])
    counts = (
        f"{len(names)} techniques make {known['pairs']} pairs: {known['pairs'] - len(refused) - len(others['not run'])}"
    )
    shown = [f"{counts} train together, {len(refused)} are refused, {len(others['not run'])} were not run."]
    shown += ["## Pairs that are refused", table(["one", "other", "why", "instead"], refused)]
    shown += [
        "## Pairs in which one technique does less, and says so",
        table(["one", "other", "the line"], others["less"]),
    ]
    if others["not run"]:
        shown += ["## Pairs that were not run", table(["one", "other", "why"], others["not run"])]
    if known["stand_ins"]:
        never = [row for row in known["others"] if row["kind"] in ("refuse", "not run")]
        pairs = sum(len(names) - 1 - i for i in range(len(known["stand_ins"])))
        pairs -= sum(not {row["one"], row["other"]}.isdisjoint(known["stand_ins"]) for row in never)
        on_cpu = "; ".join(f"{linked(name)}, by {way}" for name, way in known["stand_ins"].items())
        told = f"Some techniques need a GPU. Their {pairs} pairs ran on a CPU with stand-ins: {on_cpu}."
        shown += ["## Pairs without their device", f"{told}\nNo GPU has seen these pairs."]
    stacks = [
        (cited(sentence(name)), ", ".join(map(linked, row["members"])), row.get("line", "").replace("\n", "<br>"))
        for name, row in known["stacks"].items()
    ]
    told = "Whole stacks pass the same contracts. The last column has the lines of techniques that do less in them."
    shown += ["## More than two", told, table(["stack", "techniques", "does less"], stacks)]
    signs = [(linked(name), sentence(sign)) for name, sign in known["signs"].items()]
    shown += ["## How each technique shows that it worked", table(["technique", "a training with it shows"], signs)]
    return "\n\n".join(part for part in shown if part)


# ---- documents


def document(name: str) -> str:
    """The claims of a document with what was recorded of them, from its description and the recorded results."""
    described = claims.read(name)
    found = claims.rows(described, {}, claims.recorded(name), {})
    parts = [(part["section"], part["title"], part.get("set", ""), part["name"]) for part in described["parts"]]
    head = ["section", "claim", "published", "holds if", "recorded", "verdict recorded", "why"]
    keys = [column.replace(" ", "_") for column in head]
    return "\n\n".join(
        [
            f"## {described['title']}",
            f"{described['source']} ({cited(f'[{name}]')}).",
            f"`kasoku reproduce {name}`; claims: {claims.counts(found)}.",
            table(["section", "experiment", "here on", "`--part`"], parts),
            table(head, [[str(getattr(row, key)) for key in keys] for row in found]),
        ]
    )


# ---- recipes


def recipes() -> str:
    """The tables of a recipe that have a form of their own."""
    titles = {
        "recipe": "Top-level keys",
        **{name: f"[{name}]" for name in ("evaluate", "save", "device", "tune", "faults")},
    }
    return "\n\n".join(f"### {title}\n\n{settings(describe.TABLES[name])}" for name, title in titles.items())


def names_for_use() -> str:
    """What `use` can name, techniques apart; names with the same settings share a table."""
    sections = describe.listed()
    del sections["techniques"]
    sections["tables"] = {name: thing for name, thing in sections["tables"].items() if "." in name}
    out = []
    for title, things in sections.items():
        out.append(f"### {title.capitalize()}")
        alike: dict[str, list[str]] = {}
        for name, thing in things.items():
            lines = [f"- `{name}`: {cited(describe.summary_of(thing))}"]
            notes = describe.notes_of(thing).items() if title != "schedules" else ()
            lines += [
                f"    - **{word}:** {unmeasured(cited(note), 'published') if word == 'Ref' else cited(note)}"
                for word, note in notes
            ]
            alike.setdefault(settings(thing), []).append("\n".join(lines))
        out += [part for keys, lines in alike.items() for part in ("\n".join(lines), keys)]
    return "\n\n".join(part for part in out if part)


# ---- commands


class Argument(NamedTuple):
    """An argument of a command: as it is typed, what it means, how it stands in the usage line (empty: it does not)."""

    written: str
    meaning: str
    usage: str


def argument(field: Field[Any]) -> Argument:
    """The argument that a field of a command's dataclass declares."""
    flag, known = field.metadata["flag"], field.metadata["settings"]
    flag = f"--{field.name.replace('_', '-')}" if flag == "--" else flag
    value = known.get("metavar") or "|".join(map(str, known.get("choices", ()))) or field.name.upper()
    written = value if not flag else flag if known.get("action") == "store_true" else f"{flag} {value}"
    meaning = (known.get("help") or "") % {"default": known.get("default")}
    if known.get("action") == "append":
        meaning += "; may be given several times"
    else:
        meaning = unmeasured(meaning, "a setting")
    many = f"{value}..." if known.get("nargs") in ("+", "*") else value
    free = f"[{many}]" if known.get("nargs") in ("?", "*") else many
    return Argument(f"`{written}`", meaning, written if flag and known.get("required") else "" if flag else free)


def every_command() -> Iterator[tuple[str, str, type, list[Argument]]]:
    """Each command: as it is typed, what it does, the class of its arguments, and these."""
    for verb, (module, line) in VERBS.items():
        places = arguments.PLACES if verb == "launch" else {"": line}
        for place, place_line in places.items():
            kind = getattr(arguments, f"{(place or module).capitalize()}Arguments")
            declared = [argument(field) for field in fields(kind) if field.metadata]
            yield f"kasoku {verb} {place}".strip(), place_line, kind, declared


def shared() -> dict[Argument, list[str]]:
    """The options that several commands have, each with these commands."""
    users: dict[Argument, list[str]] = {}
    for command, _, _, declared in every_command():
        for option in declared:
            users.setdefault(option, []).append(command.removeprefix("kasoku "))
    return {option: names for option, names in users.items() if len(names) >= USED_BY and not option.usage}


def shared_options() -> str:
    """The options that several commands have, as a table."""
    everywhere = len(list(every_command()))
    rows = [
        (option.written, option.meaning, "all" if len(names) == everywhere else ", ".join(names))
        for option, names in shared().items()
    ]
    return table(["option", "meaning", "commands"], rows)


def commands() -> str:
    """Each command with its arguments and its own options."""
    common, out = shared(), []
    for command, line, kind, declared in every_command():
        usage = " ".join([command, *(each.usage for each in declared if each.usage)])
        out.append(f"### {command}\n\n`{usage}`: {line}.")
        out.append(getattr(kind, "description", None) or "")
        own = [each for each in declared if each not in common and each.meaning]
        out.append(table(["argument", "meaning"], [each[:2] for each in own]))
        also = [each.written.split()[0].strip("`") for each in common if each in declared]
        out.append("Also " + ", ".join(f"`{flag}`" for flag in also) + "." if also else "")
    return "\n\n".join(part for part in out if part)


if __name__ == "__main__":
    for name, text in pages().items():
        if (DOCS / name).read_text() != text:
            (DOCS / name).write_text(text)
            print(DOCS / name)
