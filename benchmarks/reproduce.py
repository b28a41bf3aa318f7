"""The program of `kasoku reproduce`: the experiments of a document, scaled to this machine, beside its figures.

Each part runs commands: benchmarks of the checkout, and kasoku's own. Written into the folder, for each command, under
short/PART, long/PART or full/PART: COMMAND.json (its result, and how it was run), COMMAND.log (its output, as it comes)
and COMMAND/ (its files); and report.html, with the document's figures and one row a claim.
"""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

import claims
from kasoku.commands.arguments import ReproduceArguments
from kasoku.core.errors import InputError, nearest, say
from kasoku.core.files import read_json, write_text
from kasoku.report import environment
from kasoku.report.html import read_run
from kasoku.training.run_folder import free_folder

_RESULTS = ("ensemble.json", "result.json", "tuning.json", "profile.json", "simulation.json", "search.json")


def _images(folder: str, how: str) -> tuple[Callable[[], bool], str]:
    """The need of a folder of images, and how to get it."""
    need = f"it needs $KASOKU_DATA/{folder}: {how}"
    return lambda: bool(os.environ.get("KASOKU_DATA")) and Path(os.environ["KASOKU_DATA"], folder).is_dir(), need


NEEDS: Mapping[str, tuple[Callable[[], object], str]] = {  # of a part: (is it here?, why the part is left out)
    "root": (lambda: not os.geteuid() and all(map(which, ("ip", "tc", "taskset"))), "it needs root, ip, tc, taskset"),
    "taskset": (partial(which, "taskset"), "it needs taskset, of util-linux"),
    "tun": (partial(os.access, "/dev/net/tun", os.R_OK | os.W_OK), "it needs /dev/net/tun"),
    "cgroup1": (Path("/sys/fs/cgroup/cpu").is_dir, "it needs the cpu controller of cgroup v1"),
    "cc": (partial(which, "cc"), "it needs a C compiler, cc"),
    "onnx": (partial(find_spec, "onnxruntime"), "it needs pip install -e '.[onnx]'"),
    "search": (partial(find_spec, "optuna"), "it needs pip install -e '.[search]'"),
    "data:fashion_mnist": _images("fashion_mnist", "kasoku data fashion-mnist --to DIR; export KASOKU_DATA=DIR"),
    "data:cifar10": _images("cifar10", "kasoku data cifar10 --to DIR/cifar10; export KASOKU_DATA=DIR"),
    "data:cifar100": _images("cifar100", "kasoku data cifar100 --to DIR/cifar100; export KASOKU_DATA=DIR"),
    "data:imagenette224": _images("imagenette224", "photos of a few classes, in train/CLASS and val/CLASS"),
    "data:imagenet": _images("imagenet", "ImageNet, in train/CLASS and val/CLASS"),
    "data:imagenet_fullsize": _images("imagenet_fullsize", "photos of any size, as files *.JPEG in any folders"),
}


def run(arguments: ReproduceArguments) -> int:
    """Runs the parts; returns 0, or 1 if a command did not end well. A claim that does not hold is a result."""
    name = arguments.document
    document = _check(arguments)
    if arguments.list:
        print(*(f"{part['name']}: {part['title']}" for part in document["parts"]), sep="\n")
        return 0
    from claims_page import document_page  # plotly and jinja2: told before hours of measuring

    folder = (arguments.out or free_folder(f"reproduce-{name}")).absolute()
    length = "full" if arguments.full else "long" if arguments.long else "short"
    here: dict[str, dict[str, Any]] = {part["name"]: {} for part in document["parts"]}
    lacks: dict[tuple[str, str], str] = {}
    runs, failed = [], False
    if images := os.environ.get("KASOKU_DATA"):  # commands run in folders of their own
        os.environ["KASOKU_DATA"] = str(Path(images).expanduser().absolute())
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{document['title']}, in {folder}", flush=True)
    for part in document["parts"]:
        title = part["name"]
        for key, texts in part.get("commands", {}).items():
            place = folder / length / title / key
            if why := _left_out(part, texts, length, arguments.part):
                lacks[title, key] = why
                continue
            try:
                done = _outcome(place, texts[length])
                claims.check_values(part, {key: done["result"]})
            except InputError as error:
                failed = True
                lacks[title, key] = f"{key} {'stopped' if str(error).startswith('stopped') else 'crashed'}"
                say(f"{title}/{key}: {error}")
                continue
            here[title][key] = done["result"]
            if any((place / file).is_file() for file in ("tuning.json", "profile.json")):
                runs.append(read_run(place, f"{title}/{key}"))
            if arguments.record:
                _record(name, title, key, done)
    long = claims.recorded(name)
    rows = claims.rows(document, here, long, lacks)
    write_text(folder / "report.html", document_page(document, rows, here, long, runs), errors="replace")
    _print(rows)
    print(folder / "report.html")
    return int(failed)


def _check(arguments: ReproduceArguments) -> claims.Document:
    """The document that is asked for. Raises InputError for options that do not fit it."""
    name = arguments.document
    if name not in claims.DOCUMENTS:
        raise InputError(f"{name}: no such document; there are {', '.join(claims.DOCUMENTS)}")
    if arguments.record and not arguments.long:
        raise InputError("--record keeps long results: give --long too")
    document = claims.read(name)
    names = [part["name"] for part in document["parts"]]
    for asked in arguments.part:
        if asked not in names:
            raise InputError(f"--part {asked}: [{name}] has {', '.join(names)}{nearest(asked, names)}")
    return document


def _left_out(part: Mapping[str, Any], texts: Mapping[str, Any], length: str, asked: Sequence[str]) -> str:
    """Why a command of a part does not run; empty if it does. With --full, its `full_needs` stand for its `needs`."""
    if asked and part["name"] not in asked:
        return "left out by --part"
    if length not in texts:
        others = [f"--{other}" for other in ("long", "full") if other in texts]
        return f"it runs only with {' or '.join(others)}" if length == "short" else f"this part has no --{length} form"
    needs = [*part.get("needs", ()), *texts.get(f"{length}_needs", texts.get("needs", ()))]
    return next((why for is_here, why in map(NEEDS.__getitem__, needs) if not is_here()), "")


def _outcome(place: Path, text: str) -> dict[str, Any]:
    """Runs a command, unless its result is there from the same words; returns the contents of its COMMAND.json."""
    kept = place.with_suffix(".json")
    if kept.is_file() and (done := read_json(kept)).get("command") == text:
        print(f"{place.parent.name}/{place.name}: done before", flush=True)
        return done
    place.mkdir(parents=True, exist_ok=True)
    fill = {"out": place, "benchmarks": claims.CHECKOUT / "benchmarks"}
    words = [os.path.expandvars(word.format(**fill)) for word in shlex.split(text)]
    own = words[0] == "kasoku"
    start = [sys.executable, "-u", *(["-m", "kasoku"] if own else [claims.CHECKOUT / words[0]]), *words[1:]]
    began, log, output = time.perf_counter(), place.with_suffix(".log"), b""
    print(f"{place.parent.name}/{place.name}: {text}\n  its output: {log}", flush=True)
    with (
        log.open("wb", buffering=0) as file,
        subprocess.Popen(start, cwd=place, stdout=subprocess.PIPE, stderr=file) as process,
    ):
        for line in process.stdout or ():
            file.write(line)
            output = line.strip() or output
    seconds = time.perf_counter() - began
    if process.returncode == 75:
        raise InputError(f"stopped by a signal after {seconds:.0f} s: repeat with --out to go on; its output: {log}")
    if process.returncode:
        last = (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
        raise InputError(f"exit code {process.returncode} after {seconds:.0f} s: {last}; all it said is in {log}")
    result = _files(place) if own else _last_line(output)
    where = environment()
    machine = {"machine": where["machine"]["cpu"], "cores": where["machine"]["cores"], "commit": where["kasoku_commit"]}
    done = {"command": text, "seconds": round(seconds, 1), "date": f"{date.today()}", **machine, "result": result}
    write_text(kept, json.dumps(done, indent=1) + "\n")
    print(f"  {seconds:.0f} s", flush=True)
    return done


def _files(place: Path) -> dict[str, Any]:
    """The result of one of kasoku's own commands, with lines for figures of a training and of a profile."""
    result = next(filter(None, (read_json(place / name) for name in _RESULTS)), {})
    metrics = place / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []
    top1 = [[line["epoch"], line["test_top1"]] for line in lines if "test_top1" in line]
    return result | {"top1_by_epoch": top1, "use_by_second": claims.use_by_second(result.get("iterations", ()))}


def _last_line(output: bytes) -> dict[str, Any]:
    try:
        result: dict[str, Any] = json.loads(output)
    except ValueError as error:
        raise InputError("its last line is no JSON") from error
    return result


def _record(name: str, part: str, command: str, done: Mapping[str, Any]) -> None:
    file = claims.recorded_file(name)
    kept = read_json(file) if file.is_file() else {}
    kept.setdefault(part, {})[command] = dict(done)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps(kept, indent=1, sort_keys=True) + "\n")


def _print(rows: Sequence[claims.ClaimRow]) -> None:
    """A line a claim, and how many hold."""
    for row in rows:
        published = row.published if row.published == claims.OURS else f"published: {row.published}"
        told = [published] * bool(row.published) + [f"holds if {row.holds_if}"] * bool(row.holds_if)
        recorded = f"recorded {row.recorded}" + (f" ({row.verdict_recorded})" if row.here else "")
        found = [f"here {row.here}"] * bool(row.here) + [recorded] * bool(row.recorded)
        why = row.why if row.verdict in (claims.FAILS, claims.NOT_SHOWN) else ""
        claim = f"{row.claim} ({'; '.join(told)})" if told else row.claim
        print(": ".join(filter(None, [row.verdict.upper(), claim, ", ".join(found), why])))
    print(claims.counts(rows))
