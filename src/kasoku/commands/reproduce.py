"""`kasoku reproduce`: the experiments of one of the five documents, scaled to this machine, beside what it published.

Each part runs commands: benchmarks of the checkout, and kasoku's own. Written into the folder, for each command:
PART/COMMAND.json (its result, and how it was run), PART/COMMAND.log (its output) and PART/COMMAND/ (its files); and
report.html, with the document's figures and one row a claim.
"""

import importlib.util
import json
import os
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from kasoku.commands.arguments import ReproduceArguments
from kasoku.config.toml import nearest
from kasoku.core import InputError, say
from kasoku.core.files import read_json, write_text
from kasoku.report import documents, environment
from kasoku.training.run_folder import free_folder

_RESULTS = ("ensemble.json", "result.json", "tuning.json", "profile.json", "simulation.json", "search.json")
NEEDS: Mapping[str, tuple[Callable[[], bool], str]] = {  # what a part may need: (is it here?, why the part is left out)
    "root": (lambda: os.geteuid() == 0, "it needs root, for hosts in network namespaces"),
    "data": (lambda: bool(os.environ.get("KASOKU_DATA")), "it needs real images: set KASOKU_DATA to their folder"),
    "onnx": (lambda: importlib.util.find_spec("onnxruntime") is not None, 'it needs pip install "kasoku[onnx]"'),
    "search": (lambda: importlib.util.find_spec("optuna") is not None, 'it needs pip install "kasoku[search]"'),
}


def run(arguments: ReproduceArguments) -> int:
    """Runs the parts; returns 0, or 1 if a command crashed. A claim that does not hold is a result."""
    name = arguments.document
    document = _check(arguments)
    from kasoku.report.html.claims import document_page  # plotly and jinja2: told before hours of measuring

    folder = (arguments.out or free_folder(f"reproduce-{name}")).absolute()
    length = "full" if arguments.full else "long" if arguments.long else "short"
    here: dict[str, dict[str, Any]] = {}
    lacks: dict[str, str] = {}
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{document['title']}, in {folder}", flush=True)
    for part in document["parts"]:
        title, commands = part["name"], _chosen(part, length, arguments.part)
        if isinstance(commands, str):
            lacks[title] = commands
            continue
        found = here[title] = {}
        for key, text in commands.items():
            try:
                done = _outcome(folder / title / key, text)
                documents.check_values(part, {key: done["result"]})
            except InputError as error:
                lacks[title] = f"{key} crashed"
                say(f"{title}/{key}: {error}")
                continue
            found[key] = done["result"]
            if arguments.record:
                _record(name, title, key, done)
    long = here if length == "long" else documents.recorded(name)
    rows = documents.rows(name, document, here, long, lacks)
    write_text(folder / "report.html", document_page(document, rows, here, long), errors="replace")
    _print(rows)
    print(folder / "report.html")
    return int(any(why.endswith(" crashed") for why in lacks.values()))


def _check(arguments: ReproduceArguments) -> documents.Document:
    """The document that is asked for. Raises InputError for options that do not fit it."""
    name = arguments.document
    if name not in documents.DOCUMENTS:
        raise InputError(f"{name}: no such document; there are {', '.join(documents.DOCUMENTS)}")
    if not documents.IN_CHECKOUT:
        remedy = "clone the repository, and pip install -e . there"
        raise InputError(f"kasoku reproduce runs benchmarks, which kasoku's package does not hold: {remedy}")
    if arguments.record and not arguments.long:
        raise InputError("--record keeps long results: give --long too")
    document = documents.read(name)
    names = [part["name"] for part in document["parts"]]
    for asked in arguments.part:
        if asked not in names:
            raise InputError(f"--part {asked}: [{name}] has {', '.join(names)}{nearest(asked, names)}")
    return document


def _chosen(part: Mapping[str, Any], length: str, asked: Sequence[str]) -> dict[str, str] | str:
    """The commands of a part, or why it does not run."""
    if asked and part["name"] not in asked:
        return "left out by --part"
    for need in part.get("needs", ()):
        is_here, why = NEEDS[need]
        if not is_here():
            return why
    commands = part.get("commands", {})
    chosen = {key: texts[length] for key, texts in commands.items() if length in texts}
    if commands and not chosen:
        lengths = {f"--{length}" for texts in commands.values() for length in texts}
        return f"no command of this length, but {', '.join(sorted(lengths))}"
    return chosen


def _outcome(place: Path, text: str) -> dict[str, Any]:
    """What a command has found, as PART/COMMAND.json holds it; runs it unless that is there from the same words."""
    kept = place.with_suffix(".json")
    if kept.is_file() and (done := read_json(kept)).get("command") == text:
        print(f"{place.parent.name}/{place.name}: done before", flush=True)
        return done
    place.mkdir(parents=True, exist_ok=True)
    fill = {"out": place, "benchmarks": documents.CHECKOUT / "benchmarks"}
    words = [os.path.expandvars(word.format(**fill)) for word in shlex.split(text)]
    own = words[0] == "kasoku"
    start = ["-m", "kasoku", *words[1:]] if own else [str(documents.CHECKOUT / words[0]), *words[1:]]
    print(f"{place.parent.name}/{place.name}: {text}", flush=True)
    began, log = time.perf_counter(), place.with_suffix(".log")
    with log.open("w") as errors:
        process = subprocess.run(
            [sys.executable, *start], cwd=place, stdout=subprocess.PIPE, stderr=errors, text=True, check=False
        )
    seconds = time.perf_counter() - began
    with log.open("a") as file:
        file.write(process.stdout)
    if process.returncode:
        last = (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
        raise InputError(f"exit code {process.returncode} after {seconds:.0f} s: {last}; all it said is in {log}")
    result = _files(place) if own else _last_line(process.stdout)
    where = environment()
    machine = {"machine": where["machine"]["cpu"], "cores": where["machine"]["cores"], "commit": where["kasoku_commit"]}
    done = {"command": text, "seconds": round(seconds, 1), "date": f"{date.today()}", **machine, "result": result}
    write_text(kept, json.dumps(done, indent=1) + "\n")
    print(f"  {seconds:.0f} s", flush=True)
    return done


def _files(place: Path) -> dict[str, Any]:
    """The result of one of kasoku's own commands, with lines for figures of a training and of a profile."""
    result: dict[str, Any] = {}
    for name in _RESULTS:
        if (place / name).is_file():
            result = read_json(place / name)
            break
    metrics = place / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []
    top1 = [[line["epoch"], line["test_top1"]] for line in lines if "test_top1" in line]
    return result | {"top1_by_epoch": top1, "use_by_second": documents.use_by_second(result.get("iterations", ()))}


def _last_line(output: str) -> dict[str, Any]:
    try:
        result: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    except (IndexError, ValueError) as error:
        raise InputError("its last line is no JSON") from error
    return result


def _record(name: str, part: str, command: str, done: Mapping[str, Any]) -> None:
    file = documents.recorded_file(name)
    kept = read_json(file) if file.is_file() else {}
    kept.setdefault(part, {})[command] = dict(done)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps(kept, indent=1, sort_keys=True) + "\n")


def _print(rows: Sequence[documents.ClaimRow]) -> None:
    """A paragraph a claim, and how many hold."""
    for row in rows:
        published = f" (published: {row.published})" if row.published else ""
        found = [f"here {row.here}"] * bool(row.here) + [f"recorded {row.recorded}"] * bool(row.recorded)
        print(f"{row.verdict.upper()}: {row.claim}{published}: {', '.join(found) or row.why}")
    counts = Counter(row.verdict for row in rows)
    print(", ".join(f"{counts[verdict]} {verdict}" for verdict in documents.VERDICTS))
