"""The figures of tuning.json: speed and utilization over the batch size."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from kasoku.report.html.figures import AXIS, COLOURS, HOVER, MORE_COLOURS, Chart, new_figure, plain

_MAX_TICKS = 9
_FALLING, _RISING = {"color": COLOURS[2], "dash": "dot", "width": 2}, {"color": COLOURS[0], "width": 2}
Samples = Sequence[Mapping[str, Any]]
OfStep = Callable[[int, float], float]  # (batch, seconds of a step) -> what is drawn


def tuning(document: Mapping[str, Any]) -> list[Chart]:
    """Speed and goodput, time per image and utilization over the batch size ([002] Fig. 1, 2); marks the chosen one."""
    samples = sorted(document["samples"], key=lambda s: s["batch"])
    chosen = next((s for s in reversed(samples) if s["batch"] == document["chosen"] and not s["failed"]), None)
    if chosen is None:
        raise ValueError(f"chosen={document['chosen']}: none of its samples")
    spent = f"{document['spent_s']:.1f} s" + (f" of {document['budget_s']:g}" if document["budget_s"] else "")
    speed = f"{chosen['images_per_s']:,.1f} images/s, {_step(chosen)}; tuning took {spent}"
    note = f"Chosen by {document['strategy']}: batch {chosen['batch']}, {speed}. {document['why']}."
    rate = _over_batch(samples, chosen, lambda batch, s: batch / s, "images/s", ("goodput", "goodput", ""))
    busy = ("utilisation", "device used", "~%")
    image = _over_batch(samples, chosen, lambda batch, s: 1e3 * s / batch, "ms per image", busy)
    return [Chart("tuning", "Tuning of the batch", rate, note), Chart("tuning-image", "Time per image", image)]


def _over_batch(
    samples: Samples, chosen: Mapping[str, Any], of: OfStep, label: str, right: tuple[str, str, str]
) -> go.Figure:
    """`of` over the batch size; on the right axis the value of a key, by name and format."""
    good = [*{s["batch"]: s for s in samples if not s["failed"]}.values()]  # the last one of each size
    traces = [_line(label, good, of, mode="lines+markers", line=_RISING)]
    star = {"color": COLOURS[1], "size": 13, "symbol": "star"}
    key, name, tick_format = right
    known = [s for s in good if s[key] is not None]
    if known:
        x, y = [s["batch"] for s in known], [s[key] for s in known]
        traces.append(go.Scatter(x=x, y=y, yaxis="y2", name=f"{name} (right)", line=_FALLING, marker_size=5))
    traces.append(_line(f"chosen: {chosen['batch']}", [chosen], of, mode="markers", marker=star))
    if failed := [s for s in samples if s["failed"]]:
        hover = [f"batch {s['batch']}<br>{plain(s['failed'])}" for s in failed]
        marker = {"symbol": "x", "size": 9, "color": MORE_COLOURS[1]}
        x, y = [s["batch"] for s in failed], [0] * len(failed)
        style = {"mode": "markers", "marker": marker, "cliponaxis": False}
        traces.append(go.Scatter(x=x, y=y, name="failed", customdata=hover, **style, **HOVER))
    sizes = sorted({s["batch"] for s in samples})
    apart = (sizes[-1] / sizes[0]) ** (1 / _MAX_TICKS)  # the ratio from which on two labels do not overlap
    ticks = sizes[-1:]
    for size in reversed(sizes):
        ticks += [size] if size * apart <= ticks[-1] else []
    x_axis = {"title_text": "batch", "type": "log", "tickvals": ticks, "ticktext": [f"{size:,}" for size in ticks]}
    y_axis = {"title_text": label, "rangemode": "tozero"}
    axis = {"title_text": name, "tickformat": tick_format, "overlaying": "y", "side": "right", "tickmode": "auto"}
    second = {"yaxis2": {**AXIS, **y_axis, **axis, "showgrid": False}} if known else {}
    return new_figure(traces, 340, x_axis, y_axis, **second)


def _line(name: str, samples: Samples, of: OfStep, **style: Any) -> Any:
    """A trace of of(batch, step_s), with intervals that follow from those of the step times."""
    middle, *ends = ([of(s["batch"], s[at] or math.nan) for s in samples] for at in ("step_s", "low_s", "high_s"))
    # a low end of 0 s has no rate: no line upwards
    gaps = [[end - y for end in pair if math.isfinite(end)] for y, *pair in zip(middle, *ends, strict=True)]
    up, down = [max([0.0, *each]) for each in gaps], [-min([0.0, *each]) for each in gaps]
    error = {"type": "data", "symmetric": False, "array": up, "arrayminus": down, "thickness": 1.5}
    hover = []
    for s in samples:
        busy = f"<br>device {s['utilisation']:.0%} busy" if s["utilisation"] is not None else ""
        hover.append(f"batch {s['batch']}: {s['images_per_s']:,.1f} images/s<br>{_step(s)}{busy}")
    x = [s["batch"] for s in samples]
    return go.Scatter(x=x, y=middle, error_y=error, name=name, customdata=hover, **style, **HOVER)


def _step(sample: Mapping[str, Any]) -> str:
    unit, scale = ("s", 1.0) if sample["step_s"] >= 1 else ("ms", 1e3)
    interval = f"{scale * sample['low_s']:.3g} to {scale * sample['high_s']:.3g}"
    return f"{scale * sample['step_s']:.3g} {unit} a step ({interval})"
