"""Plotly figures of runs: curves, where the time went, steps, idle gaps, accuracy by class, confusion.

Note: text. Plotly interprets some HTML in labels, legends and hover texts, and placeholders in hover templates. So
every text that comes from a run goes through `plain`, and reaches a hover text as `customdata`, never as a template.
"""

import html
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kasoku.core import InputError
from kasoku.core.files import is_number
from kasoku.report.html.content import Panel, RunRecord
from kasoku.report.profile_tables import ms, profile_tables

try:
    import plotly.graph_objects as go
except ImportError as error:
    raise InputError('the page needs plotly: pip install "plotly>=6"') from error

# Distinct under each colour blindness (after Okabe and Ito), readable on white and on near-black.
COLOURS = ("#2f86c8", "#d5641c", "#14976f", "#c0659a", "#c98a00", "#58b4e0", "#8b6fc4", "#8a9a2b")
MORE_COLOURS = ("#5b7c99", "#b04a4a", "#9a7b4f", "#7d5a3c")
_ROWS = ("forward", "exposed", "update", "evaluate", "input", "backward", "compile", "save")  # in these colours
_MORE_ROWS = ("transfer", "other", "copy", "transforms")
_ROW_COLOURS = dict(zip((*_ROWS, *_MORE_ROWS), (*COLOURS, *MORE_COLOURS), strict=True))  # the same in all figures
_GREYS = ("#6b7079", "#8a8f98", "#a9adb5", "#c3c6cc")  # rows of the start, before the first step
_GREY = "#8a8f98"
_DASHES = ("solid", "dash", "dot", "dashdot")
SHADES = [[0, "rgba(47,134,200,0)"], [0.02, "rgba(47,134,200,0.25)"], [0.2, "rgba(47,134,200,0.6)"], [1, "#2f86c8"]]
AXIS = {"automargin": True, "zeroline": False, "title_standoff": 8}
HOVER = {"hovertemplate": "%{customdata}<extra></extra>"}
_MAX_POINTS = 2000  # of a curve
_MAX_RANKS = 16  # bars of a ledger
_MAX_LEGEND_RUNS = 6  # more would leave no room for the curves
_MIN_SHARE = 5e-4  # rows with a smaller share of a ledger are not drawn
_MAX_SPANS = 6000  # of a timeline
_STEPS, _RANKS = 5, 8  # whose idle gaps are drawn
_MAX_CLASSES = 40
_MAX_CLASSES_WITH_COUNTS = 14  # more would leave no room for numbers in the cells
_ACCURACY = {"title_text": "accuracy", "tickformat": "~%"}
_BUSY = {"title_text": "device used", "tickformat": "~%", "rangemode": "tozero"}
_MEMORY = {"title_text": "memory", "tickformat": "~s", "ticksuffix": "B", "rangemode": "tozero"}
_RATE = {"title_text": "learning rate", "exponentformat": "power"}
_CURVES = (  # key, title, x axis, the name of each metric in the chart of one run, y axis
    ("loss", "Loss", "epoch", {"loss": "training", "test_loss": "test images"}, {"title_text": "loss"}),
    ("rate", "Learning rate", "epoch", {"lr": ""}, _RATE),
    ("accuracy", "Accuracy", "epoch", {"test_top1": "test images"}, _ACCURACY),
    ("accuracy-time", "Accuracy over time", "seconds from start", {"test_top1": "test images"}, _ACCURACY),
    ("utilization", "Utilization of the device", "seconds from start", {"utilization": ""}, _BUSY),
    ("memory", "Memory", "seconds from start", {"memory_bytes": "in use", "memory_peak_bytes": "at most"}, _MEMORY),
)


@dataclass(frozen=True)
class Chart:
    """A figure with its title and a note below it; `key` tells it from the other figures of its run, or of the page."""

    key: str
    title: str
    figure: go.Figure
    note: str = ""


def plain(text: object, max_letters: int = 0) -> str:
    """Escapes text, so that plotly shows it literally; cuts it to `max_letters` (0: not cut)."""
    letters = str(text)
    cut = 0 < max_letters < len(letters)
    return html.escape(letters[: max_letters - 1] + "…" if cut else letters, quote=False)


def new_figure(
    traces: Sequence[Any], height: int, x: Mapping[str, Any], y: Mapping[str, Any], **layout: Any
) -> go.Figure:
    """A figure in the style of the page: `height` in pixels, as wide as its container, the legend above."""
    legend = {"orientation": "h", "x": 0, "y": 1.02, "xanchor": "left", "yanchor": "bottom"}
    shared = {"template": {}, "height": height, "margin": {"l": 8, "r": 12, "t": 8, "b": 8}, "legend": legend}
    return go.Figure(list(traces), go.Layout(**shared, xaxis={**AXIS, **x}, yaxis={**AXIS, **y}, **layout))


def ticks(names: Sequence[object], max_letters: int = 24) -> dict[str, Any]:
    """An axis with these names at 0, 1, 2, ...; the first one is at the top."""
    shown = [plain(name, max_letters) for name in names]
    return {"tickvals": list(range(len(shown))), "ticktext": shown, "autorange": "reversed"}


def curves(runs: Sequence[RunRecord]) -> list[Chart]:
    """Loss, learning rate and accuracy over epochs; accuracy, utilization and memory over time; as far as known."""
    charts = []
    for key, title, x, metrics, axis in _CURVES:
        if traces := _metric_lines(runs, x, metrics):
            traces += _targets(runs, traces) if axis is _ACCURACY else []
            legend = len(traces) > 1 and len(runs) <= _MAX_LEGEND_RUNS
            charts.append(Chart(key, title, new_figure(traces, 320, {"title_text": x}, axis, showlegend=legend)))
    return charts


def _metric_lines(runs: Sequence[RunRecord], x: str, metrics: Mapping[str, str]) -> list[Any]:
    """A line for each run and each metric of a chart; the second metric is dotted."""
    traces = []
    for i, run in enumerate(runs):
        for number, (metric, name) in enumerate(metrics.items()):
            rows = [r for r in run.metrics if is_number(r.get(metric))]
            if not rows:
                continue
            every = -(-len(rows) // _MAX_POINTS)  # more points cannot be seen
            kept = [*rows[:-1:every], rows[-1]]
            points = [(row["epoch" if x == "epoch" else "seconds"], row[metric]) for row in kept]
            if len(runs) > 1:
                name = f"{plain(run.name, 40)}, {name}" if number else plain(run.name, 40)
            traces.append(line(name, points, i, 5 if len(kept) <= 60 else 0, dash="dot" if number else ""))
    return traces


def line(
    name: str, points: Sequence[tuple[float, float]], number: int, marker_size: int = 0, *, dash: str = ""
) -> go.Scatter:
    """A line whose number gives it one of the colours and, unless `dash` does, a dash; `name`: escaped."""
    dash = dash or _DASHES[number // len(COLOURS) % len(_DASHES)]
    look = {"color": COLOURS[number % len(COLOURS)], "dash": dash, "width": 2}
    mode = "lines+markers" if marker_size or len(points) == 1 else "lines"
    x, y = [x for x, _ in points], [y for _, y in points]
    return go.Scatter(x=x, y=y, name=name, mode=mode, line=look, marker_size=marker_size or None)


def _targets(runs: Sequence[RunRecord], traces: Sequence[Any]) -> list[Any]:
    """A dashed line for each target accuracy, as long as the curves."""
    ends = [f(x for trace in traces for x in trace.x) for f in (min, max)]
    look = {"color": _GREY, "dash": "dash", "width": 1.5}
    return [
        go.Scatter(x=ends, y=[t, t], name=f"target {100 * t:.4g} %", mode="lines", line=look)
        for t in sorted({run.target for run in runs if run.target})
    ]


def panels(charts: Sequence[Panel], x_label: str, *, x_log: bool = False) -> list[Chart]:
    """A chart for each panel; a name has one colour in all of them."""
    order = {name: i for i, name in enumerate(dict.fromkeys(name for panel in charts for name in panel.lines))}
    x_axis = {"title_text": plain(x_label), "type": "log" if x_log else "linear"}
    drawn = []
    for number, panel in enumerate(charts):
        traces = [line(plain(name), points, order[name], 6 * panel.markers) for name, points in panel.lines.items()]
        y_axis = {"title_text": plain(panel.label), "type": "log" if panel.log else "linear", "exponentformat": "power"}
        figure = new_figure(traces, 340, x_axis, y_axis, showlegend=len(traces) > 1)
        drawn.append(Chart(f"panel-{number}", panel.label, figure))
    return drawn


def row_colour(row: str, rows: Sequence[str]) -> str:
    """The colour of a ledger's row or of a kind of span; a grey for rows outside the steps."""
    rest = [other for other in rows if other not in _ROW_COLOURS]
    return _ROW_COLOURS.get(row) or _GREYS[rest.index(row) % len(_GREYS)]


def ledgers(bars: Sequence[tuple[str, Mapping[str, float]]], *, key: str = "ledgers", note: str = "") -> Chart:
    """Where the time went: one bar for each (name, seconds by row), stacked in the order of the rows."""
    totals = [sum(rows.values()) for _, rows in bars]
    parts = [(row, s, total) for (_, rows), total in zip(bars, totals, strict=True) for row, s in rows.items()]
    names = list(dict.fromkeys(row for row, s, total in parts if s > _MIN_SHARE * total))
    traces = []
    for row in names:
        seconds = [float(rows.get(row, 0.0)) for _, rows in bars]
        shares = [s / (total or 1.0) for s, total in zip(seconds, totals, strict=True)]
        of_bars = zip(seconds, shares, totals, strict=True)
        hover = [f"{plain(row)}<br>{s:.3f} s, {share:.1%} of {total:.1f} s" for s, share, total in of_bars]
        traces.append(go.Bar(
            x=seconds, y=[*range(len(bars))], name=plain(row), orientation="h", marker_color=row_colour(row, names),
            text=[f"{share:.0%}" if share > 0.07 else "" for share in shares], textposition="inside",
            insidetextanchor="middle", textangle=0, customdata=hover, **HOVER,
        ))  # fmt: skip
    y = {**ticks([name for name, _ in bars]), "showticklabels": len(bars) > 1}
    layout = {"barmode": "stack", "dragmode": False, "showlegend": False}
    figure = new_figure(traces, 90 + 34 * len(bars), {"title_text": "seconds"}, y, **layout)
    return Chart(key, "Where the time went", figure, note)


def ledger(document: Mapping[str, Any]) -> Chart:
    """The ledger of one run, with a bar for each rank if there are several."""
    ranks = document.get("ranks") or []
    numbers = document.get("facts", {}).get("ranks") or range(len(ranks))
    note = f"{len(ranks) - _MAX_RANKS} more ranks are not drawn." if len(ranks) > _MAX_RANKS else ""
    bars = [(f"rank {int(i)}", rows) for i, rows in zip(numbers, ranks[:_MAX_RANKS], strict=False)]
    return ledgers(bars if len(bars) > 1 else [("", document["rows"])], key="ledger", note=note)


def timeline(document: Mapping[str, Any]) -> Chart:
    """A lane for each rank and stream, in milliseconds; where spans of a lane overlap, it is darker.

    `document`: {"spans": [{"kind", "name", "start", "stop", "rank", "bytes", "stream"}]}, in seconds from the first.
    """
    spans = sorted(document["spans"], key=lambda s: float(s["start"]))
    lanes = sorted(dict.fromkeys(map(_lane_of, spans)), key=lambda lane: lane[0])
    place, drawn = {lane: i for i, lane in enumerate(lanes)}, spans[:_MAX_SPANS]
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for span in drawn:
        kinds.setdefault(str(span["kind"]), []).append(span)

    def hover(span: Mapping[str, Any]) -> str:
        kind, name = plain(span["kind"], 40), plain(span["name"], 60)
        lines = [kind if not name or name == kind else f"{kind}: {name}", f"rank {_lane_of(span)[0]}"]
        lines.append(f"{1e3 * (span['stop'] - span['start']):.3f} ms, from {1e3 * span['start']:.3f} ms on")
        return "<br>".join([*lines, f"{span['bytes'] / 2**20:.2f} MiB"] if span.get("bytes") else lines)

    traces = [
        go.Bar(
            base=[1e3 * s["start"] for s in own], x=[1e3 * (s["stop"] - s["start"]) for s in own],
            y=[place[_lane_of(s)] for s in own], width=0.86, name=plain(kind, 30), orientation="h",
            marker={"color": row_colour(kind, [*kinds]), "line_width": 0, "opacity": 0.8},
            customdata=[hover(s) for s in own], **HOVER,
        )
        for kind, own in kinds.items()
    ]  # fmt: skip
    one_rank = len({rank for rank, _ in lanes}) == 1
    y = {**ticks([stream if one_rank else f"{rank} {stream}" for rank, stream in place]), "fixedrange": True}
    cut = f"The first {len(drawn):,} spans of {len(spans):,} are drawn. " if len(drawn) < len(spans) else ""
    figure = new_figure(traces, 150 + 30 * len(place), {"title_text": "ms"}, y, barmode="overlay", bargap=0)
    return Chart("timeline", "A few steps", figure, f"{cut}Drag to zoom in, double-click to see all again.")


def _lane_of(span: Mapping[str, Any]) -> tuple[int, str]:
    return span["rank"], span["stream"]


def confusion_counts(document: Mapping[str, Any]) -> list[Counter[int]]:
    """For each class, the number of its images that were predicted as each class."""
    counts: list[Counter[int]] = [Counter() for _ in document["classes"]]
    for label, predicted, n in document["confusion"]:
        counts[label][predicted] += n
    return counts


def accuracies(document: Mapping[str, Any]) -> Chart:
    """The accuracy on each class, the worst class first."""
    classes, counts = document["classes"], confusion_counts(document)
    sums = [sum(row.values()) for row in counts]
    order = sorted((k for k in range(len(classes)) if sums[k]), key=lambda k: counts[k][k] / sums[k])
    worst = order[:_MAX_CLASSES]
    shares = [counts[k][k] / sums[k] for k in worst]
    both = zip(worst, shares, strict=True)
    hover = [f"{plain(classes[k], 60)}<br>{counts[k][k]:,} of {sums[k]:,} images: {share:.2%}" for k, share in both]
    bars = go.Bar(
        x=shares, y=list(range(len(worst))), name="accuracy", orientation="h", marker_color=COLOURS[0],
        text=[f"{share:.1%}" for share in shares], textposition="auto", textangle=0, customdata=hover, **HOVER,
    )  # fmt: skip
    x, y = {**_ACCURACY, "range": [0, 1]}, {**ticks([classes[k] for k in worst], 16), "showgrid": False}
    note = f"The {len(worst)} worst of {len(order)}." if len(worst) < len(order) else ""
    figure = new_figure([bars], 90 + 22 * len(worst), x, y, showlegend=False)
    return Chart("accuracies", "Accuracy by class", figure, note)


def confusion(document: Mapping[str, Any]) -> Chart:
    """The predictions for the images of each class: one row a class, shaded by the share of its images."""
    classes, counts = document["classes"], confusion_counts(document)
    mistakes = [0] * len(classes)  # of each class, as the label and as the prediction
    for label, predicted, n in document["confusion"]:
        if label != predicted:
            mistakes[label] += n
            mistakes[predicted] += n
    shown = sorted(sorted(range(len(classes)), key=lambda k: -mistakes[k])[:_MAX_CLASSES])
    sums = [max(1, sum(counts[k].values())) for k in shown]
    places = list(range(len(shown)))

    def hover(k: int, other: int, total: int) -> str:
        what = "correct" if k == other else f"predicted as {plain(classes[other], 40)}"
        n = counts[k][other]
        return f"{plain(classes[k], 40)}<br>{what}: {n:,} of {total:,} ({n / total:.1%})"

    heatmap = go.Heatmap(
        x=places, y=places, name="confusion", zmin=0, zmax=1, colorscale=SHADES, showscale=False, xgap=1, ygap=1,
        z=[[counts[k][other] / total for other in shown] for k, total in zip(shown, sums, strict=True)],
        customdata=[[hover(k, other, total) for other in shown] for k, total in zip(shown, sums, strict=True)], **HOVER,
    )  # fmt: skip
    traces = [heatmap]
    if len(shown) <= _MAX_CLASSES_WITH_COUNTS:  # as a trace of its own: a heatmap's texts ignore the page's colours
        cells = [(j, i, n) for i, k in enumerate(shown) for j, other in enumerate(shown) if (n := counts[k][other])]
        xs, ys, numbers = ([cell[axis] for cell in cells] for axis in range(3))
        traces.append(go.Scatter(x=xs, y=ys, mode="text", text=[str(n) for n in numbers], hoverinfo="skip"))
    last = len(shown) - 0.5
    names = {**ticks([classes[k] for k in shown], 16), "autorange": False, "showgrid": False}
    angle = -90 if any(len(str(classes[k])) > 2 for k in shown) else 0
    x = {**names, "title_text": "predicted", "range": [-0.5, last], "tickangle": angle}
    y = {**names, "title_text": "true class", "range": [last, -0.5]}
    figure = new_figure(traces, min(760, 220 + 26 * len(shown)), x, y, dragmode=False, showlegend=False)
    note = f"The {len(shown)} classes with the most mistakes, of {len(classes)}." if len(shown) < len(classes) else ""
    return Chart("confusion", "Confusion", figure, note)


def profile(document: Mapping[str, Any]) -> dict[str, Any]:
    """The charts and the tables of profile.json, of what was measured."""
    tables = [(title.capitalize(), (head, rows)) for title, head, rows in profile_tables(document)]
    return {"charts": [_gaps(document["ranks"])] if document["blocks"] else [], "tables": tables}


def _gaps(ranks: Sequence[Mapping[str, Any]]) -> Chart:
    """A bar for each step: darker where more of the device is used, empty where it is idle. Ref: [002] Fig. 12."""
    steps = [
        (f"rank {row['rank']}, step {k}" if len(ranks) > 1 else f"step {k}", step)
        for row in ranks[:_RANKS]
        for k, step in enumerate(row["iterations"][:_STEPS], 1)
    ]
    parts = [(at, *part) for at, (_, step) in enumerate(steps) for part in step["used"]]
    hover = [f"{plain(what)}: {ms(b - a)} ms<br>device used {share:.0%}" for _, what, a, b, share in parts]
    rows, _, starts, stops, shares = zip(*parts, strict=True)
    bars = go.Bar(
        base=[1e3 * start for start in starts], x=[1e3 * (b - a) for a, b in zip(starts, stops, strict=True)], y=rows,
        name="device used", orientation="h", customdata=hover, **HOVER,
        marker={"color": shares, "colorscale": SHADES, "cmin": 0, "cmax": 1, "line_color": COLOURS[0]},
    )  # fmt: skip
    y = {**ticks([name for name, _ in steps]), "fixedrange": True}
    idle = sum(step["idle_s"] for _, step in steps) / max(1e-9, sum(step["step_s"] for _, step in steps))
    figure = new_figure([bars], 120 + 26 * len(steps), {"title_text": "ms"}, y, bargap=0.2, showlegend=False)
    return Chart("gaps", "Idle gaps", figure, f"The darker, the more of the device is used. It is idle for {idle:.0%}.")
