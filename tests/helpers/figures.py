"""Holds the figures of a Markdown page against the records.

A line that shows a measured figure names its records: `<!-- record: overlap/resnet18/balanced/over_best_ddp -->`, or
several with commas between them; a path such as overlap/resnet18 stands for all claims below it. A line whose figures
are no measurement of ours says why: `<!-- not measured: of the paper -->`.

Measured figures are
- numbers with one of UNITS: 408 s, 2.5 %, 1.85 times, 0.3 points, 16.67 images/s, and both ends of "25 to 29 times";
- decimals from 0 to 2 with at least two places, such as 0.87 and 1.03: ratios.
Code is not read: fenced blocks, code spans, links' addresses. So settings are written as code. Numbers that follow the
name of a setting (a code span such as `save.every_s`, --steps or `norm_batch`) or one of SETTING are settings too.
Versions (2.13.0, Python 3.11), years and counts (3 seeds) are no measured figures.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

UNITS = {
    "%": "%", "s": "s", "second": "s", "seconds": "s", "ms": "ms", "us": "us", "µs": "us", "min": "min",
    "minute": "min", "minutes": "min", "hour": "hours", "hours": "hours", "point": "points", "points": "points",
    "times": "times", "x": "times", "×": "times", "images/s": "images/s", "images a second": "images/s",
    "crops/s": "crops/s", "exchanges/s": "exchanges/s", "MB": "MB", "GB": "GB", "TFLOP/s": "TFLOP/s",
}  # fmt: skip
RATIOS = ("times", "of", "relative error", "")
ANY = "any unit"
NUMBER = r"(?<![\w./,-])(?P<number>-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?)"
UNIT = rf"(?P<unit>{'|'.join(sorted(map(re.escape, UNITS), key=len, reverse=True))})(?![\w/])"
FIGURE = re.compile(rf"{NUMBER}(?!\.\d|,\d)(?:[ \u00a0]?{UNIT}|(?![\w%]))")
RANGE = re.compile(rf"\s*(?:to|and|-|–)\s*-?[\d.,]+[ \u00a0]?{UNIT}")
RATIO = re.compile(r"-?[01]\.\d{2,}")
SETTING = re.compile(
    r"\b(?:every|default|limit|decay|momentum|rate|lr|eta|epsilon|smoothing|python|torch|version)"
    r"(?: is| of| at)?[\s=:(]*$",
    re.IGNORECASE,
)
CODE, NAMED = re.compile(r"(`+)(.+?)\1"), "\0"  # NAMED stands for a code span that names a setting
NAME = re.compile(r"(?:--[a-z].*|[a-z]+(?:[._][a-z]+)+(?<!\.py)(?<!\.md)(?<!\.toml)(?<!\.json)|[\w.]+=.*)")
COMMENT = re.compile(r"<!--\s*(record|not measured):\s*(.*?)\s*-->")


def _plain(line: str) -> str:
    """The line without comments, code and addresses of links."""
    line = re.sub(r"<!--.*?-->", " ", line)
    line = CODE.sub(lambda found: NAMED if NAME.fullmatch(found[2]) else "code", line)
    return re.sub(r"\]\([^)]*\)|<?https?://\S+", " ", line)


def figures_in(line: str) -> Iterator[tuple[str, str, bool]]:
    """(number, unit, whether it looks measured) of each decimal, and of each number with a unit, but settings."""
    plain = _plain(line)
    for found in FIGURE.finditer(plain):
        before = plain[: found.start()]
        if SETTING.search(before) or re.search(rf"{NAMED}[\s,:=(|]*$", before):
            continue
        unit = found["unit"] or ""
        if not unit and (to := RANGE.match(plain, found.end())):
            unit = to["unit"]
        looks_measured = bool(unit or RATIO.fullmatch(found["number"]))
        if unit or "." in found["number"]:
            yield found["number"], UNITS.get(unit, ""), looks_measured


def _values(found: Any, unit: str) -> Iterator[tuple[float, str]]:
    """All numbers of a JSON value, and those in its texts, with a unit."""
    if isinstance(found, Mapping):
        for inner in found.values():
            yield from _values(inner, unit)
    elif isinstance(found, str):
        yield from ((float(n.replace(",", "")), unit) for n in re.findall(r"-?\d[\d,]*(?:\.\d+)?", found))
    elif isinstance(found, Iterable):
        for inner in found:
            yield from _values(inner, unit)
    elif isinstance(found, int | float):
        yield float(found), unit


def values_of(record: Mapping[str, Any], figures: Sequence[tuple[str, str]]) -> Iterator[tuple[float, str]]:
    """What a line with these figures may show of a record, with units; ANY unit for what stands beside its figure.

    The ends of a range only together, and the target only beside the figure, since one alone could be kinder than it.
    """
    unit = record.get("unit", ANY)

    def shown(value: float) -> set[str]:
        return {number for number, its_unit in figures if shows(number, its_unit, value, unit)}

    if "figure" in record:
        figure = record["figure"]
        yield figure, unit
        if "target" in record and shown(figure):
            yield record["target"], unit
        runs = [figure, *record.get("earlier", ())]
        spans = [record[key] for key in ("spread", "earlier") if key in record]
        for low, high in (*spans, (min(runs), max(runs))):
            if shown(low) and shown(high) and len(shown(low) | shown(high)) > 1:
                yield from ((low, unit), (high, unit))
    for key in ("text", "beside", "note", "what", "result"):
        yield from _values(record.get(key, ()), ANY)


def shows(number: str, unit: str, value: float, of: str) -> bool:
    """Whether a number with a unit is the value, rounded as shown. A ratio may be shown in %, also as more or less."""
    step = 10.0 ** -len(number.partition(".")[2])
    same = of in (unit, ANY) or not unit or (unit in RATIOS and of in RATIOS)
    forms = [abs(value)] if same else []
    if unit == "%" and of in (*RATIOS, ANY):
        forms += [100 * abs(value), 100 * abs(value - 1)]
    shown = abs(float(number.replace(",", "")))
    return any(abs(form - shown) <= 0.5 * step + 1e-9 for form in forms)


def unproven(text: str, lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is wrong with the measured figures of a page: a sentence for each, with the number of the line.

    The claims of a document are written from records/documents, and a test compares them with it.
    """
    text = re.sub(
        r"<!-- generated: document .*?<!-- end -->", lambda found: "\n" * found[0].count("\n"), text, flags=re.S
    )
    wrong, fence = [], ""
    for number, line in enumerate(text.splitlines(), 1):
        mark = re.match(r"\s*(```+|~~~+)", line)
        if mark and (not fence or mark[1].startswith(fence)):
            fence = "" if fence else mark[1]
        if not fence and not mark:
            wrong += [f"line {number}: {what}" for what in _unproven_line(line, lines)]
    return wrong


def _unproven_line(line: str, lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    figures, comments = list(figures_in(line)), COMMENT.findall(line)
    claims = [claim.strip() for kind, names in comments if kind == "record" for claim in names.split(",")]
    if not comments:
        for number, unit, looks_measured in figures:
            if looks_measured:
                yield f"{number} {unit}".strip() + ": of which record? <!-- record: CLAIM -->, or not measured: REASON"
    if any(not reason for kind, reason in comments if kind == "not measured"):
        yield "not measured: why not?"
    if not claims:
        return
    named = [record for record in lines for claim in claims if f"{record['claim']}/".startswith(f"{claim}/")]
    for claim in claims:
        if not any(f"{record['claim']}/".startswith(f"{claim}/") for record in named):
            yield f"no claim {claim} in records/"
    shown = [(number, unit) for number, unit, _ in figures]
    values = [value for record in named for value in values_of(record, shown)]
    for number, unit, _ in figures if named else ():
        if not any(shows(number, unit, value, of) for value, of in values):
            yield f"{number} {unit}".strip() + f" is no figure of {', '.join(claims)}"
