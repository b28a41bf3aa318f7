"""Holds the claims of the documents against results: reads recipes/documents/NNN.toml as rows and figures.

A part of a document has commands, claims and figures. A claim names a value in the results of its part's commands, as
"COMMAND.KEY", a ratio or a difference of two ("a.x / b.x", "a.x - b.x"), and what the document says of it; `own` marks
a claim of kasoku's. `needs` are those of reproduce.py; `null_because` of a result: why its values are null.
"""

import operator
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kasoku.config import shipped, toml
from kasoku.core import InputError
from kasoku.core.files import read_json
from kasoku.report.html import Panel

DOCUMENTS = shipped.DOCUMENTS
CHECKOUT = Path(__file__).parents[1]
VERDICTS = HOLDS, FAILS, UNDECIDED, NOT_SHOWN, PRINTED = (
    "holds", "does not hold", "undecided", "not shown here", "figure only"
)  # fmt: skip
LEGEND = (
    f"{PRINTED}: printed, no bound; {UNDECIDED}: the bound is inside the 95 % interval; "
    f"{NOT_SHOWN}: nothing was measured, the last column says why"
)
OURS = "ours"  # stands for the published value of a claim of kasoku's own
_COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_VALUE = re.compile(r"(\S+)(?: ([-/]) (\S+))?")
_GAP_S = 1e-6  # times are rounded to less

Document = Mapping[str, Any]
Results = Mapping[str, Mapping[str, Any]]  # by part and command; a command that did not run is not there
Lacks = Mapping[tuple[str, str], str]  # by part and command: why it did not run


@dataclass(frozen=True)
class ClaimRow:
    """A claim of a document, or one of kasoku's own, and what was found; all as text."""

    section: str
    claim: str
    published: str
    holds_if: str
    here: str
    verdict_here: str
    recorded: str
    verdict_recorded: str
    why: str
    own: bool

    @property
    def verdict(self) -> str:
        """The verdict on this run's value, or on the recorded one where this run has none."""
        return self.verdict_here if self.here else self.verdict_recorded


def read(name: str) -> Document:
    """The description of a document."""
    return toml.read(DOCUMENTS[name])


def recorded_file(name: str) -> Path:
    """Where a checkout keeps the long results of a document."""
    return CHECKOUT / "records" / "documents" / f"{name}.json"


def recorded(name: str) -> dict[str, dict[str, Any]]:
    """The long results of a document, by part and command."""
    file = recorded_file(name)
    runs = read_json(file) if file.is_file() else {}
    return {part: {command: run["result"] for command, run in each.items()} for part, each in runs.items()}


def rows(document: Document, here: Results, long: Results, lacks: Lacks) -> list[ClaimRow]:
    """The claims of a document in its order, held against this run (`here`) and against the recorded results."""
    found = []
    for part in document["parts"]:
        for claim in part.get("claims", ()):
            title, value, own = part["name"], claim.get("value", ""), claim.get("own", False)
            unit, holds = claim.get("unit", ""), claim.get("holds", "")
            now, hours = (value_of(value, results.get(title, {})) for results in (here, long))
            ends, long_ends = (_interval(value, results.get(title, {})) for results in (here, long))
            commands = [] if now is not None else [key.partition(".")[0] for key in value.split()[::2]]
            nulls = {command: result.get("null_because") for command, result in here.get(title, {}).items()}
            reasons = [*(lacks.get((title, each)) or nulls.get(each) for each in commands), claim.get("why")]
            found.append(
                ClaimRow(
                    section=claim.get("section", part["section"]),
                    claim=claim["claim"],
                    published=claim.get("published") or OURS * own,
                    holds_if=holds,
                    here=_text(now, unit, ends),
                    verdict_here=_verdict(now, holds, ends),
                    recorded=_text(hours, unit, long_ends),
                    verdict_recorded=_verdict(hours, holds, long_ends),
                    why="; ".join(dict.fromkeys(filter(None, reasons))),
                    own=own,
                )
            )
    return found


def counts(found: Sequence[ClaimRow]) -> str:
    """How many claims have each verdict; kasoku's own are counted apart."""
    sides = [Counter(row.verdict for row in found if row.own is own) for own in (False, True)]
    return f"; {OURS}: ".join(", ".join(f"{verdict} {side[verdict]}" for verdict in VERDICTS) for side in sides if side)


def panels(document: Document, here: Results, long: Results) -> list[tuple[str, Panel, str, bool]]:
    """The figures of a document that have lines: title, lines, label of the x axis, whether that is logarithmic."""
    drawn = []
    for part in document["parts"]:
        for figure in part.get("figures", ()):
            lines = {f"published: {name}": points for name, points in figure.get("published", {}).items()}
            own = {
                f"{label}, {source}": points
                for source, results in (("here", here), ("recorded", long))
                for label, key in figure["lines"].items()
                if (points := value_of(key, results.get(part["name"], {})))
            }
            if own:
                panel = Panel(figure["y"], own | lines, figure.get("y_log", False), markers=True)
                drawn.append((figure["title"], panel, figure["x"], figure.get("x_log", False)))
    return drawn


def check_values(part: Document, results: Mapping[str, Any]) -> None:
    """Raises InputError for a claim or a line of a figure whose value the results of the part's commands lack."""
    for claim in part.get("claims", ()):
        value_of(claim.get("value", ""), results)
    for figure in part.get("figures", ()):
        for value in figure["lines"].values():
            value_of(value, results)


def value_of(text: str, results: Mapping[str, Any]) -> Any:
    """The value that a claim names; None if a command that it needs did not run, or had no value for it.

    Raises InputError if a result lacks the key, or the text is no value.
    """
    if not text:
        return None
    if not (named := _VALUE.fullmatch(text)):
        raise InputError(f'"{text}" is no value: COMMAND.KEY, or two of them with " / " or " - " between')
    values = [_look_up(key, results) for key in (named[1], named[3]) if key]
    if None in values:
        return None
    if named[2]:
        return values[0] / values[1] if named[2] == "/" else values[0] - values[1]
    return values[0]


def use_by_second(iterations: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """The iterations of a profile as [seconds, share of the device used] at each change; 0 in the gaps."""
    points, begin_s = list[list[float]](), 0.0
    for each in iterations:
        last_s = 0.0
        for start_s, stop_s, share in [*(row[1:] for row in each["used"]), (each["step_s"], each["step_s"], 0.0)]:
            if start_s - last_s > _GAP_S:
                points += [[begin_s + last_s, 0.0], [begin_s + start_s, 0.0]]
            points += [[begin_s + start_s, share], [begin_s + stop_s, share]] if stop_s > start_s else []
            last_s = stop_s
        begin_s += each["step_s"]
    return points


def _look_up(key: str, results: Mapping[str, Any]) -> Any:
    command, *path = key.split(".")
    value: Any = results.get(command)
    for step in path:
        if value is None:
            break
        try:
            value = value[int(step) if isinstance(value, list) else step]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise InputError(f"{key}: the result of {command} has no {step}") from error
    return value


def _interval(text: str, results: Mapping[str, Any]) -> list[float]:
    """The interval of the value that a claim names: what its key with "_interval" has; empty where there is none."""
    command, _, name = text.partition(".")
    return (results.get(command) or {}).get(f"{name}_interval") or []


def _verdict(value: Any, holds: str, ends: Sequence[float] = ()) -> str:
    if len({_verdict(end, holds) for end in ends}) > 1:
        return UNDECIDED
    if value is None:
        return NOT_SHOWN
    if not holds:
        return PRINTED
    if holds in ("true", "false"):
        return HOLDS if value is (holds == "true") else FAILS
    first, *rest = holds.split()
    within = float(first) <= value <= float(rest[1]) if rest[0] == "to" else _COMPARE[first](value, float(rest[0]))
    return HOLDS if within else FAILS


def _text(value: Any, unit: str, ends: Sequence[float] = ()) -> str:
    if value is None:
        return ""
    values: Sequence[Any] = value if isinstance(value, list) else [value]
    shown = " to ".join(f"{v:,.4g}" if isinstance(v, float) else str(v) for v in values)
    between = f"({ends[0]:.4g} to {ends[1]:.4g})" if ends else ""
    return " ".join(filter(None, [shown, unit, between]))
