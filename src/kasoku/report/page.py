"""One HTML page of one or more runs: it holds all it shows, and asks no network for anything."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from kasoku.core import InputError
from kasoku.report import classes, timeline
from kasoku.report.charts import COLOURS, Chart, Run, curves, finite, ledger, ledger_of, tuning
from kasoku.report.steps import STEP

# nothing is fetched; plotly builds functions from text and styles of its own
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline' 'unsafe-eval'; img-src data: blob:"
_WANTED = {
    "ledger": "where the time went (ledger.json)",
    "timeline": "a step by rank and stream (timeline.json)",
    "tuning": "tuning of the batch (tuning.json)",
    "classes": "accuracy by class, confusion, worst images (classes.json)",
}


@dataclass(frozen=True)
class _Section:
    """A part of the page: HTML, and the charts that its places are for."""

    html: str
    charts: tuple[Chart, ...] = ()


def page(runs: Sequence[Run], verdicts: Sequence[str] = ()) -> str:
    """The page as HTML.

    Args:
        runs: what is shown of each, in this order; what a run lacks is left out, and said.
        verdicts: sentences about the runs against each other.

    Raises:
        InputError: where plotly is not installed.
    """
    sections = [_overview(runs, verdicts)]
    drawn = curves(runs)
    if drawn:
        sections.append(_Section("<h2>Curves</h2>" + _grid(drawn), tuple(drawn)))
    if len(runs) > 1:
        sections.append(_ledgers(runs))
    for i, run in enumerate(runs):
        sections.append(_run(str(i), run, several=len(runs) > 1))
    charts = [chart for section in sections for chart in section.charts]
    title = escape(runs[0].name if len(runs) == 1 else f"{len(runs)} runs")
    here = Path(__file__)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<link rel="icon" href="data:,">
<title>kasoku: {title}</title>
<style>
{here.with_name("page.css").read_text(encoding="utf-8")}</style>
</head>
<body>
<header><h1>{title}</h1><button id="theme" type="button" title="light or dark" disabled>Dark</button></header>
<main>
{chr(10).join(section.html for section in sections)}
<p class="soft">Made by kasoku report.</p>
</main>
<script type="application/json" id="charts">{_json(charts)}</script>
<script>{_plotly()}</script>
<script>
{here.with_name("page.js").read_text(encoding="utf-8")}</script>
</body>
</html>
"""


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise InputError('the page needs plotly: pip install "plotly>=6"') from error
    return str(get_plotlyjs())


def _json(charts: Sequence[Chart]) -> str:
    """The charts as JSON that ends no script element, whatever is written in it."""
    plain = [{"key": chart.key, "data": chart.data, "layout": chart.layout} for chart in charts]
    return json.dumps(finite(plain), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _overview(runs: Sequence[Run], verdicts: Sequence[str]) -> _Section:
    """What the runs came to, one a row, and how they compare."""
    said = "".join(f'<p class="verdict">{escape(line)}</p>' for line in verdicts)
    columns = ("run", "seed", "batch", "epochs", "accuracy", "best", "target", "time to target", "in all", "images/s")
    links = ""
    if len(runs) > 1:
        colour = {i: COLOURS[i % len(COLOURS)] for i in range(len(runs))}
        items = (
            f'<li><i style="background:{colour[i]}"></i><a href="#run-{i}">{escape(run.name)}</a></li>'
            for i, run in enumerate(runs)
        )
        links = f'<nav><ul class="key">{"".join(items)}</ul></nav>'
    return _Section(links + said + _table(columns, [_row(run) for run in runs]))


def _row(run: Run) -> list[str]:
    r = run.result
    if not r:
        state = "no result yet"
    else:
        state = f"stopped by {r['stopped']}" if r.get("stopped") else ""
    reached = r.get("time_to_target_s")
    return [
        f"{run.name} ({state})" if state else run.name,
        str(run.seed),
        _number(run.recipe.get("batch"), ","),
        _number(r.get("epochs"), ".4g"),
        _number(r.get("top1"), ".2%"),
        _number(r.get("best_top1"), ".2%"),
        _number(run.target or None, ".1%"),
        f"{reached:.1f} s" if isinstance(reached, int | float) else "-",
        _number(r.get("seconds"), ".1f", " s"),
        _number(r.get("images_per_s"), ",.0f"),
    ]


def _ledgers(runs: Sequence[Run]) -> _Section:
    """Where the time went in each of several runs, in one chart."""
    bars = []
    for run in runs:
        rows = run.parts.get("ledger", {}).get("rows") or run.result.get("seconds_by")
        if isinstance(rows, dict) and all(isinstance(s, int | float) for s in rows.values()):
            bars.append((run.name, rows))
    if len(bars) < 2:
        return _Section("")
    chart = ledger("ledgers", bars)
    return _Section(_place(chart, _key(chart, seconds=False)), (chart,))


def _run(number: str, run: Run, *, several: bool) -> _Section:
    """All that is shown of one run alone."""
    builders: dict[str, Callable[[str, Any], _Section]] = {
        "ledger": _ledger,
        "timeline": lambda key, found: _of_charts(timeline.chart(f"timeline-{key}", found)),
        "tuning": lambda key, found: _of_charts(tuning(f"tuning-{key}", found)),
        "classes": _classes,
    }
    made, damaged = [], list(run.damaged)
    for part, build in builders.items():
        if part in run.parts:
            try:
                made.append(build(number, run.parts[part]))
            except (KeyError, TypeError, ValueError, IndexError, AttributeError, ZeroDivisionError) as error:
                damaged.append(f"{part}.json is not as expected ({type(error).__name__}: {error})")
        if part == "timeline" and run.plan:
            text = escape(run.plan)
            made.append(_Section(f'<div class="card wide"><h3>Groups of gradients</h3><pre>{text}</pre></div>'))
    told = " ".join(run.damaged)
    lacks = [said for part, said in _WANTED.items() if part not in run.parts and f"{part}.json" not in told]
    lacks += [] if run.plan else ["groups of gradients (of several ranks)"]
    lacks += [] if run.metrics else ["curves (metrics.jsonl)"]
    notes = [f"Not in this run: {'; '.join(lacks)}."] if lacks else []
    notes += [f"Left out: {'; '.join(damaged)}."] if damaged else []
    head = f'<h2 id="run-{number}">{escape(run.name) if several else "This run"}</h2>'
    end = "".join(f'<p class="soft lacks">{escape(note)}</p>' for note in notes)
    where = f'<p class="soft">{escape(_machine(run.machine))}</p>' if run.machine else ""
    charts = tuple(chart for section in made for chart in section.charts)
    return _Section(f"{head}{where}{''.join(section.html for section in made)}{end}", charts)


def _ledger(number: str, found: Mapping[str, Any]) -> _Section:
    """Bars, the verdict in words, the medians of a step, and the bounds."""
    chart = ledger_of(f"ledger-{number}", found)
    words = "".join(
        f'<p class="verdict"><b>{escape(str(v["cause"]))}</b> ({float(v["share"]):.0%}): {escape(str(v["line"]))}'
        + (f'<br><span class="soft">{escape(str(v["remedy"]))}</span>' if v.get("remedy") else "")
        + "</p>"
        for v in found.get("verdict") or []
    )
    step = found.get("step_s") or {}
    known = [name for name in (*STEP, *(n for n in step if n not in STEP)) if step.get(name) is not None]
    medians = _table(["a step, median", *known], [["ms", *(f"{1e3 * step[n]:.3f}" for n in known)]]) if known else ""
    bounds = found.get("bounds") or {}
    limits = _table(["bound", ""], [[str(k), _value(v)] for k, v in bounds.items()]) if bounds else ""
    beside = found.get("beside") or {}
    said = ", ".join(f"{task} {float(s):.2f} s" for task, s in beside.items())
    aside = f'<p class="soft">Beside others, so not in the bar: {escape(said)}.</p>' if said else ""
    return _Section(_place(chart, f"{_key(chart, seconds=True)}{aside}{words}{medians}{limits}"), (chart,))


def _classes(number: str, found: Mapping[str, Any]) -> _Section:
    """Accuracy by class beside the confusion, then what is mistaken most, then the worst images."""
    drawn = [classes.accuracies(f"accuracies-{number}", found), classes.confusion(f"confusion-{number}", found)]
    rows = [list(row) for row in classes.mistaken(found)]
    more = []
    if rows:
        more.append(f"<h3>Mistaken most</h3>{_table(['class', 'taken for', 'images'], rows)}")
    if found.get("worst"):
        more.append(f"<h3>Worst images</h3>{classes.gallery(found['worst'])}")
    cards = "".join(f'<section class="card">{html}</section>' for html in more)
    return _Section(_grid(drawn) + cards, tuple(drawn))


def _key(chart: Chart, *, seconds: bool) -> str:
    """The colours of a ledger in words, which take the room they need; with the seconds of its first bar."""
    whole = sum(trace["x"][0] for trace in chart.data) or 1.0
    items = []
    for trace in chart.data:
        said = f" {trace['x'][0]:.2f} s ({trace['x'][0] / whole:.0%})" if seconds else ""
        items.append(f'<li><i style="background:{trace["marker"]["color"]}"></i>{trace["name"]}{said}</li>')
    return f'<ul class="key">{"".join(items)}</ul>'


def _of_charts(chart: Chart) -> _Section:
    return _Section(_place(chart), (chart,))


def _grid(charts: Sequence[Chart]) -> str:
    return f'<div class="grid">{"".join(_place(chart) for chart in charts)}</div>'


def _place(chart: Chart, below: str = "") -> str:
    note = f'<p class="soft">{escape(chart.note)}</p>' if chart.note else ""
    high = int(chart.layout["height"])
    name = escape(chart.title)
    drawn = f'<div class="chart" id="{chart.key}" role="img" aria-label="{name}" style="height:{high}px"></div>'
    return f'<section class="card"><h3>{name}</h3>{drawn}{note}{below}</section>'


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _number(value: Any, form: str, unit: str = "") -> str:
    return f"{value:{form}}{unit}" if isinstance(value, int | float) else "-"


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_value(v)}" for k, v in value.items())
    return str(value)


def _machine(machine: Mapping[str, Any]) -> str:
    """What it ran on, in a line."""
    gpus = machine.get("gpus") or []
    each = f"{len(gpus)} x {gpus[0]}" if gpus else ""
    cpu = f"{machine.get('cores', '?')} cores of {machine['cpu']}" if machine.get("cpu") else ""
    return ", ".join(part for part in (each, cpu, str(machine.get("chosen", ""))) if part)
