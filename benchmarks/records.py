"""Measurements as data: records/*.jsonl, and RECORDS.md, which is written from them.

Command: python benchmarks/records.py    (`make records`: writes RECORDS.md)

A line of records/AREA.jsonl is one measurement of one claim, a path such as "overlap/resnet18/balanced/over_bound".
Lines are only appended; the newest of a claim on each machine counts. `text` follows the figure and its unit in a
sentence. `spread` is [least, most] of the n values, `earlier` of earlier runs; `target` with `better` ("lower" or
"higher") decides what fell short; `beside` holds further figures of the same run. A benchmark run with --record appends
its lines through `append`, which takes what describes a claim (DESCRIBING) from the line before. So the first line of a
claim is written by hand.
"""

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER, PAGE = ROOT / "records", ROOT / "RECORDS.md"
LONGEST_PAGE = 130  # lines
INTRODUCTION = """# Records

`make records` writes this page from [records/](records), which also has commits and further figures. A row is a run of
a benchmark with the newest figure of each claim; a claim's key is the words before and after the colon, joined by a
slash. A figure that is not here is not claimed anywhere. `earlier` spans runs on other days and commits. A target is
shown where this run or an earlier one missed it.
"""
DESCRIBING = ("text", "unit", "of", "better", "target")
KEYS = ("claim", "text", "figure", "unit", "spread", "earlier", "n", "of", "better", "target", "beside", "note",
        "machine", "commit", "command", "date")  # fmt: skip
NEEDED = ("claim", "text", "figure", "unit", "better", "machine", "commit", "command", "date")
FEATURES = {"amx_bf16": "amx", "avx512_bf16": "avx512", "avx512f": "avx512f", "avx2": "avx2"}  # the best one counts
AREAS = ("accuracy", "throughput", "distributed", "asynchronous", "input", "memory", "tune", "simulate",
         "robustness", "tests")  # fmt: skip
ANY = "any"  # the machine of figures that do not depend on one
OTHER = ("did_not_help", "not_seen")  # files whose lines are no measurements of claims

Line = dict[str, Any]


def read(name: str) -> list[Line]:
    """The lines of records/NAME.jsonl."""
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]


def machines() -> dict[str, dict[str, str]]:
    return json.loads((FOLDER / "machines.json").read_text())


def newest(lines: Sequence[Line]) -> list[Line]:
    """The last line of each claim on each machine, in the order of their first lines.

    Its `earlier` spans what the lines before it have measured.
    """
    found: dict[tuple[str, str], Line] = {}
    for line in lines:
        key = line["claim"], line["machine"]
        before = found.get(key)
        past = [*before.get("earlier", ()), before["figure"]] if before else []
        past += line.get("earlier", ())
        found[key] = line | ({"earlier": [min(past), max(past)]} if past else {})
    return list(found.values())


def missed(line: Line) -> bool:
    """Whether the figure falls short of its target."""
    if "target" not in line:
        return False
    return bool(line["figure"] > line["target"] if line["better"] == "lower" else line["figure"] < line["target"])


# ---- appending


def machine_key() -> str:
    """The key of this machine in machines.json: KASOKU_MACHINE, else the GPU's name, else by the processor."""
    if "KASOKU_MACHINE" in os.environ:
        return os.environ["KASOKU_MACHINE"]
    import torch  # here, since the page is written without it

    if torch.cuda.is_available():
        return re.sub(r"\W+", "-", f"{torch.cuda.get_device_name(0)} x{torch.cuda.device_count()}".lower())
    info = Path("/proc/cpuinfo")
    return processor_key(info.read_text() if info.exists() else "", os.cpu_count() or 1)


def processor_key(info: str, cores: int) -> str:
    """A processor's key from the text of /proc/cpuinfo: kind, cores, best instructions for matrices."""
    said = dict(re.findall(r"^(flags|model name)\s*: *(.*)$", info, re.M))
    flags, name = said.get("flags", "").split(), said.get("model name", "").lower()
    feature = next((key for flag, key in FEATURES.items() if flag in flags), platform.machine())
    kind = next((kind for kind in ("xeon", "epyc", "core", "ryzen") if kind in name), platform.system().lower())
    return f"{kind}-{cores}c-{feature}"


def commit() -> str:
    """HEAD, with "-dirty" if anything but records has changed since."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!records", ":!RECORDS.md").strip()
    return git("rev-parse", "--short=12", "HEAD").strip() + ("-dirty" if changed else "")


def shown_command(words: Sequence[str]) -> str:
    """A benchmark's command line without --record, and with DIR for absolute paths."""
    script = Path(words[0]).resolve()
    name = str(script.relative_to(ROOT)) if script.is_relative_to(ROOT) else script.name
    rest = [re.sub(r"(^|=)/\S*", r"\1DIR", word) for word in words[1:] if word != "--record"]
    return " ".join([name, *rest])


def value_at(figures: Mapping[str, Any], key: str) -> Any:
    """The value at a key such as "images_per_s.ours", None where there is none."""
    found: Any = figures
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def measured(figures: Mapping[str, Any], key: str) -> Line:
    """The figure at a key, with spread and n if it is of `common.spread` or KEY_spread is there, else n."""
    value = value_at(figures, key)
    is_spread = isinstance(value, Mapping) and "median" in value
    spread = value if is_spread else value_at(figures, f"{key}_spread")
    found = {"figure": value["median"] if is_spread else value}
    if isinstance(spread, Mapping):
        return found | {"spread": [spread["min"], spread["max"]], "n": spread["n"]}
    n = figures.get(f"{key}_n", figures.get("n"))
    return found | ({"n": n} if n else {})


def rounded(value: Any) -> Any:
    """The value with its floats to six digits, those inside it too."""
    if isinstance(value, Mapping):
        return {name: rounded(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(inner) for inner in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def append(
    claims: Mapping[str, str | Sequence[str]], figures: Mapping[str, Any], words: Sequence[str], machine: str
) -> list[Line]:
    """Appends a line for each claim to the file that has the claim; returns the lines.

    `claims` gives the key of a claim's figure in `figures`, or that key and those of the figures beside it; a figure
    that is None is left out. `words` is the command line.
    """
    files = {line["claim"]: area for area in AREAS for line in read(area)}
    before = {line["claim"]: line for area in AREAS for line in read(area)}
    unknown = sorted(set(claims) - set(before))
    if unknown:
        raise SystemExit(f"{', '.join(unknown)}: no such claim in records/; write its first line by hand")
    where = {"commit": commit(), "command": shown_command(words), "date": str(date.today())}
    lines = []
    for claim, keys in claims.items():
        key, *others = [keys] if isinstance(keys, str) else keys
        last = before[claim]
        line = {k: last[k] for k in DESCRIBING if k in last} | {"claim": claim, **where, **measured(figures, key)}
        line["machine"] = last["machine"] if last["machine"] == ANY else machine
        beside = {other.rpartition(".")[2]: value_at(figures, other) for other in others}
        if present := {name: value for name, value in beside.items() if value is not None}:
            line["beside"] = present
        if line["figure"] is not None:
            lines.append({k: rounded(line[k]) for k in KEYS if k in line})
            phrase(line)  # fails here, and not in `make records`, where a figure in the text is missing
    for line in lines:
        with (FOLDER / f"{files[line['claim']]}.jsonl").open("a") as stream:
            stream.write(json.dumps(line, ensure_ascii=False) + "\n")
    if machine not in machines():
        print(f"{machine}: describe this machine in records/machines.json", file=sys.stderr)
    return lines


# ---- the page


def number(value: float) -> str:
    """With thousands commas, rounded to five digits, below 1 to three."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{5 if abs(value) >= 1 else 3}g}"


def phrase(line: Line) -> str:
    """`text`, in which {name} stands for a figure of `beside`."""
    shown = {name: number(x) if isinstance(x, int | float) else x for name, x in line.get("beside", {}).items()}
    return str(line["text"].format_map(shown))


def judged(line: Line) -> str:
    """In brackets: the spread, earlier runs, and the target where the figure or an earlier run falls short of it."""
    said = []
    if "spread" in line:
        said.append(" to ".join(map(number, line["spread"])))
    if any(abs(figure - line["figure"]) > 0.01 * abs(line["figure"]) for figure in line.get("earlier", ())):
        said.append("earlier " + " to ".join(dict.fromkeys(map(number, line["earlier"]))))
    if missed(line):
        said.append(f"**target {number(line['target'])}: missed**")
    elif any(missed(line | {"figure": figure}) for figure in line.get("earlier", ())):
        said.append(f"target {number(line['target'])}")
    return f" ({'; '.join(said)})" if said else ""


def rows(area: str) -> Iterator[str]:
    """A row for the figures that one run gave for one subject; those of other machines stand beside them."""
    letters = {key: machine["letter"] for key, machine in machines().items()}
    claims: dict[str, list[Line]] = {}
    for line in newest(read(area)):
        claims.setdefault(line["claim"], []).append(line)
    runs: dict[tuple[str, ...], list[list[Line]]] = {}
    for lines in claims.values():
        last = max(reversed(lines), key=lambda line: line["date"])
        others = [line for line in lines if line is not last]
        run = tuple(last[key] for key in ("machine", "commit", "command", "date"))
        runs.setdefault((last["claim"].rpartition("/")[0], *run), []).append([last, *others])
    for (parent, machine, _, command, day), group in runs.items():
        names = ", ".join(last["claim"].rpartition("/")[2] for last, *_ in group)
        figures = []
        for last, *others in group:
            figures.append(f"{number(last['figure'])} {last['unit']} {phrase(last)}{judged(last)}")
            for x in others:
                figures[-1] += f", on {letters[x['machine']]} {number(x['figure'])}{judged(x)}"
        n = ", ".join(dict.fromkeys(number(last["n"]) for last, *_ in group if "n" in last))
        where = letters[machine] + (f", n {n}" if n else "")
        command = command.removeprefix("benchmarks/")
        yield f"| {parent}: {names} | {'; '.join(figures)} | {where} | {day[5:]} | `{command}` |"


def page() -> str:
    """RECORDS.md."""
    lines = [
        INTRODUCTION,
        *(f"- {m['letter']} (`{key}`): {m['text']}." for key, m in machines().items()),
        "",
        "| claim | newest figures | machine | day | command, in benchmarks/ |",
        "|---|---|---|---|---|",
        *(row for area in AREAS for row in rows(area)),
        "",
        "## What did not help",
        "",
        *(
            f"- {x['subject']}: {x['what']}: {x['result']}" + (f" ({x['n']})." if "n" in x else ".")
            for x in read(OTHER[0])
        ),
        "",
        "## Not yet seen",
        "",
        *(f"- {x['what']}: {x['state']}." for x in read(OTHER[1])),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    claims = {line["claim"] for area in AREAS for line in read(area)}
    print(f"{PAGE.name}: {len(claims)} claims in {len(page().splitlines())} lines (at most {LONGEST_PAGE})")
