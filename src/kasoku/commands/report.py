"""`kasoku report`: reads run folders, and writes a page of them and a verdict over seeds."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kasoku.commands.arguments import ReportArguments
from kasoku.config.recipe import flat_settings
from kasoku.core import InputError
from kasoku.core.files import write_text
from kasoku.report.html import RunRecord, read_run, read_table
from kasoku.report.significance import compare
from kasoku.training.run_folder import ENSEMBLE, members_of

_NO_RECIPE = ("seed", "origin", "save.")  # settings that make no other recipe

Group = tuple[str, Sequence[RunRecord]]  # a name, and runs of one recipe


def run(arguments: ReportArguments) -> int:
    """Writes the page; returns the exit code."""
    words = arguments.words
    after = len(words) - words.index("--") - 1 if "--" in words else 0  # the number of runs behind it
    expanded = [members_of(path) or [path] for path in arguments.runs]
    ensembles = {str(path): read_table(path / ENSEMBLE, []) for path in arguments.runs if members_of(path)}
    runs = read([path for members in expanded for path in members])
    split = sum(map(len, expanded[:-after])) if after else 0
    groups = [(_label(part[0]), part) for part in (runs[:split], runs[split:])] if split else by_recipe(runs)
    if arguments.compare and len(groups) < 2:
        raise InputError("--compare: these runs are of one recipe; give two groups, as A1 A2 A3 -- B1 B2 B3")
    lines = verdicts(_with_own_names(groups))
    out = arguments.out or ((arguments.runs[0] if len(arguments.runs) == 1 else Path()) / "report.html")
    from kasoku.report.html.page import page  # plotly and jinja2 take 0.4 s, and only this page needs them

    write_text(out, page(runs, lines, ensembles), errors="replace")
    print(*lines, out, sep="\n")
    return 0


def read(paths: Sequence[Path]) -> list[RunRecord]:
    """The runs of these folders. Raises InputError for a folder without a run."""
    names = [path.resolve().name for path in paths]
    unique = len(set(names)) == len(names)
    return [read_run(path, name if unique else str(path)) for path, name in zip(paths, names, strict=True)]


# ---- groups of runs


def by_recipe(runs: Sequence[RunRecord]) -> list[Group]:
    """Groups of runs whose recipes differ in the seed only, each with a name, in order of appearance."""
    groups: dict[str, list[RunRecord]] = {}
    for run in filter(lambda run: run.recipe, runs):  # folders of kasoku tune and profile have none
        groups.setdefault(json.dumps(_settings(run.recipe), sort_keys=True, default=str), []).append(run)
    return [(_label(members[0]), members) for members in groups.values()]


def verdicts(groups: Sequence[Group]) -> list[str]:
    """A sentence for each group against the first one."""
    lines = []
    for name, runs in groups[1:]:
        first_name, first = groups[0]
        line = compare(first, runs, names=(first_name, name))
        machines = {json.dumps([run.machine.get(k) for k in ("cpu", "cores", "gpus")]) for run in (*first, *runs)}
        lines.append(line + ("; these runs were made on different machines" if len(machines) > 1 else ""))
    return lines


def _with_own_names(groups: Sequence[Group]) -> list[Group]:
    """The groups; names that are used twice are completed by the settings that differ."""
    names = [name for name, _ in groups]
    if len(set(names)) == len(names):
        return list(groups)
    each = [_settings(runs[0].recipe) for _, runs in groups]
    keys = sorted({key for settings in each for key in settings})
    differ = [key for key in keys if len({json.dumps(settings.get(key), default=str) for settings in each}) > 1]
    more = [", ".join(f"{key}={settings.get(key, 'none')}" for key in differ[:3]) for settings in each]
    return [(f"{name} ({more[i] or f'group {i + 1}'})", runs) for i, (name, runs) in enumerate(groups)]


def _settings(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of a recipe by their paths, but its seed and what changes no result."""
    return {path: value for path, value in flat_settings(recipe).items() if not path.startswith(_NO_RECIPE)}


def _label(run: RunRecord) -> str:
    """The name of a run's recipe: its file's, or the name of the run folder without its number."""
    command = run.machine.get("command", [])
    file = next((word for word in command if isinstance(word, str) and word.endswith(".toml")), "")
    name = Path(run.name).name
    return Path(file).stem if file else re.sub(r"[-_]?(seed)?[-_]?\d+$", "", name) or name
