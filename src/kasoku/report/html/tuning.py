"""The figures of tuning.json: images/s over the batch size, and the loss over learning rates of a range test."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from kasoku.report.html.figures import AXIS, COLOURS, HOVER, MORE_COLOURS, Chart, new_figure, plain

_MAX_TICKS = 9


def tuning(document: Mapping[str, Any]) -> Chart:
    """The measured images/s with their intervals over the batch size, the goodput, and the chosen batch."""
    if document["what"] == "lr":
        return _range_test(document)
    samples = sorted(document["samples"], key=lambda s: s["batch"])
    by_batch = {s["batch"]: s for s in samples if not s["failed"]}  # the last one of each size
    good, chosen = [*by_batch.values()], by_batch[document["chosen"]]
    useful = [s for s in good if s["goodput"] is not None]
    failed = [s for s in samples if s["failed"]]
    blue = {"line_color": COLOURS[0], "marker_color": COLOURS[0], "line_width": 2, "marker_size": 6}
    traces = [_throughput("images/s", good, mode="lines+markers", **blue)]
    if useful:
        line = {"color": COLOURS[2], "dash": "dot", "width": 2}
        x, y = [s["batch"] for s in useful], [s["goodput"] for s in useful]
        name, mode = "goodput (right)", "lines+markers"
        traces.append(go.Scatter(x=x, y=y, yaxis="y2", name=name, mode=mode, line=line, marker_size=5))
    star = {"color": COLOURS[1], "size": 13, "symbol": "star"}
    traces.append(_throughput(f"chosen: {chosen['batch']}", [chosen], mode="markers", marker=star))
    if failed:
        hover = [f"batch {s['batch']}<br>{plain(s['failed'])}" for s in failed]
        marker = {"symbol": "x", "size": 9, "color": MORE_COLOURS[1]}
        x, y = [s["batch"] for s in failed], [0] * len(failed)
        style = {"mode": "markers", "marker": marker, "cliponaxis": False}
        traces.append(go.Scatter(x=x, y=y, name="failed", customdata=hover, **style, **HOVER))
    sizes = sorted({s["batch"] for s in samples})
    apart = (sizes[-1] / sizes[0]) ** (1 / _MAX_TICKS)  # the ratio from which on two labels do not overlap
    ticks = [sizes[0]]
    ticks += [size for size in sizes[1:-1] if size >= ticks[-1] * apart and sizes[-1] >= size * apart]
    x_axis = {"title_text": "batch", "type": "log", "tickvals": ticks, "ticktext": [f"{size:,}" for size in ticks]}
    y_axis = {"title_text": "images/s", "rangemode": "tozero"}
    right = {"title_text": "goodput", "rangemode": "tozero", "overlaying": "y", "side": "right", "tickmode": "auto"}
    second = {"yaxis2": {**AXIS, **right, "showgrid": False}} if useful else {}
    drawn = new_figure(traces, 340, x_axis, y_axis, **second)
    speed = f"{chosen['images_per_s']:,.1f} images/s, {_step(chosen)}{_cost(document)}"
    note = f"Chosen by {document['strategy']}: batch {chosen['batch']}, {speed}. {document['why']}."
    return Chart("tuning", "Tuning of the batch", drawn, note)


def _throughput(name: str, samples: Sequence[Mapping[str, Any]], **style: Any) -> Any:
    """A trace of images/s, with intervals that follow from those of the step times."""
    rates = [s["images_per_s"] for s in samples]
    # a low end of 0 s has no rate: no line upwards
    up = [max(0.0, s["batch"] / (s["low_s"] or math.inf) - rate) for s, rate in zip(samples, rates, strict=True)]
    down = [max(0.0, rate - s["batch"] / s["high_s"]) for s, rate in zip(samples, rates, strict=True)]
    error = {"type": "data", "symmetric": False, "array": up, "arrayminus": down, "thickness": 1.5}
    hover = []
    for s, rate in zip(samples, rates, strict=True):
        busy = f"<br>device {s['utilisation']:.0%} busy" if s["utilisation"] is not None else ""
        hover.append(f"batch {s['batch']}: {rate:,.1f} images/s<br>{_step(s)}{busy}")
    x = [s["batch"] for s in samples]
    return go.Scatter(x=x, y=rates, error_y=error, name=name, customdata=hover, **style, **HOVER)


def _step(sample: Mapping[str, Any]) -> str:
    unit, scale = ("s", 1.0) if sample["step_s"] >= 1 else ("ms", 1e3)
    interval = f"{scale * sample['low_s']:.3g} to {scale * sample['high_s']:.3g}"
    return f"{scale * sample['step_s']:.3g} {unit} a step ({interval})"


def _cost(document: Mapping[str, Any]) -> str:
    budget_s = document["budget_s"]
    return f"; tuning took {document['spent_s']:.1f} s" + (f" of {budget_s:g}" if budget_s else "")


def _range_test(document: Mapping[str, Any]) -> Chart:
    """The loss over rising learning rates, and the suggested rate."""
    samples = [s for s in document["samples"] if s["loss"] is not None]
    rates, losses = [s["lr"] for s in samples], [s["loss"] for s in samples]
    traces = [go.Scatter(x=rates, y=losses, name="loss", mode="lines", line={"color": COLOURS[0], "width": 2})]
    chosen, note = document["chosen"], ""
    if chosen is not None:
        note = f"Chosen: a learning rate of {chosen:.4g}{_cost(document)}."
        nearest = min(samples, key=lambda s: abs(math.log(s["lr"] / chosen)))
        star = {"symbol": "star", "size": 13, "color": COLOURS[1]}
        name = f"suggested: {chosen:.4g}"
        traces.append(go.Scatter(x=[chosen], y=[nearest["loss"]], name=name, mode="markers", marker=star))
    x_axis = {"title_text": "learning rate", "type": "log", "exponentformat": "power"}
    return Chart("tuning", "Range test", new_figure(traces, 320, x_axis, {"title_text": "loss"}), note)
