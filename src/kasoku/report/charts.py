"""Charts of runs as plain values that plotly draws: curves, where the time went, what tuning measured.

Note: text in charts. Plotly reads a little HTML in every label, legend and hover text, and a template in what is called
one. So whatever a user named goes through `plain`, and never into a template.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# Apart from each other under each colour blindness (after Okabe and Ito), readable on white and on near-black.
COLOURS = ("#2f86c8", "#d5641c", "#14976f", "#c0659a", "#c98a00", "#58b4e0", "#8b6fc4", "#8a9a2b")
_MORE = ("#5b7c99", "#b04a4a", "#3d9b9b", "#9a7b4f")  # for what has more than eight parts
_OF_ROWS = {  # the same in all charts
    "input": COLOURS[4],
    "copy": _MORE[3],
    "forward": COLOURS[0],
    "backward": COLOURS[5],
    "exposed": COLOURS[1],
    "update": COLOURS[2],
    "compile": COLOURS[6],
    "evaluate": COLOURS[3],
    "save": COLOURS[7],
    "other": _MORE[1],
    "other members": _MORE[2],
    "transfer": _MORE[0],
}
_GREYS = ("#6b7079", "#8a8f98", "#a9adb5", "#c3c6cc")  # what is done before the first step
_DASHES = ("solid", "dash", "dot", "dashdot")
_GREY = "#8a8f98"
_POINTS = 2000  # of a curve
_RANKS = 16  # bars of a ledger
_NAMED = 6  # runs in a legend
_SEEN = 5e-4  # of a ledger, at least
_SIZES = 9  # ticks of batches


@dataclass(frozen=True)
class Run:
    """What is known of one run. Seconds; accuracies from 0 to 1.

    Attributes:
        name: what the page calls it.
        recipe: its resolved recipe, as a document.
        result: its result.json; empty where there is none yet.
        metrics: the lines of its metrics.jsonl, each with `step`, `epoch` and `time_s`; `seconds` of the training.
        parts: ledger, timeline, tuning and classes, as their files hold them; only those that are there.
        plan: its groups of gradients, as a text; empty where none was kept.
        machine: what it ran on.
        damaged: files that cannot be read, a line each.
    """

    name: str
    recipe: Mapping[str, Any]
    result: Mapping[str, Any] = field(default_factory=dict)
    metrics: Sequence[Mapping[str, Any]] = ()
    parts: Mapping[str, Any] = field(default_factory=dict)
    plan: str = ""
    machine: Mapping[str, Any] = field(default_factory=dict)
    damaged: Sequence[str] = ()

    @property
    def seed(self) -> int:
        """The recipe's."""
        return int(self.recipe.get("seed", 0))

    @property
    def target(self) -> float:
        """The accuracy it trains to; 0: none."""
        return float(self.recipe.get("evaluate", {}).get("target", 0.0))


@dataclass(frozen=True)
class Chart:
    """One figure: `data` and `layout` as plotly takes them, its `key` in the page, and in words what it shows."""

    key: str
    title: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    note: str = ""


def plain(text: object, most: int = 0) -> str:
    """Text as plotly shows it letter by letter; cut to `most` letters (0: never)."""
    said = str(text)
    if most and len(said) > most:
        said = said[: most - 1] + "…"
    return html.escape(said, quote=False)


def axis(title: str, **more: Any) -> dict[str, Any]:
    """An axis that makes room for its own labels."""
    return {"title": {"text": title, "standoff": 8}, "automargin": True, "zeroline": False, **more}


def layout(height: int, x: dict[str, Any], *, y: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The layout all charts share: as wide as the page lets it, `height` in pixels, the legend above."""
    legend = {"orientation": "h", "x": 0, "y": 1.02, "xanchor": "left", "yanchor": "bottom"}
    margin = {"l": 8, "r": 12, "t": 8, "b": 8}
    return {"height": height, "margin": margin, "legend": legend, "xaxis": x, "yaxis": y, **more}


def curves(runs: Sequence[Run]) -> list[Chart]:
    """Loss, rate and accuracy over epochs, and accuracy over time; those for which there is anything to show."""
    several = len(runs) > 1
    loss = _lines(runs, "epoch", {"loss": "" if several else "training", "test_loss": "test images"})
    rate = _lines(runs, "epoch", {"lr": "" if several else "rate"})
    accuracy = _lines(runs, "epoch", {"test_top1": "" if several else "test images"})
    by_time = _lines(runs, "seconds", {"test_top1": "" if several else "test images"})
    percent = axis("accuracy", tickformat="~%")
    made = [
        ("loss", "Loss", loss, axis("epoch"), axis("loss")),
        ("rate", "Rate", rate, axis("epoch"), axis("rate", exponentformat="power")),
        ("accuracy", "Accuracy", accuracy + _targets(runs, accuracy), axis("epoch"), percent),
        ("accuracy-time", "Accuracy over time", by_time + _targets(runs, by_time), axis("seconds from start"), percent),
    ]
    charts = []
    for key, title, data, x, y in made:
        legend = len(runs) <= _NAMED and len(data) > 1  # a longer one would leave no room for the curves
        charts += [Chart(key, title, data, layout(320, x, y=dict(y), showlegend=legend))] if data else []
    return charts


def _lines(runs: Sequence[Run], x: str, wanted: Mapping[str, str]) -> list[dict[str, Any]]:
    """A trace for each run and each of the values that it has; the second value of a run is dotted."""
    traces = []
    for i, run in enumerate(runs):
        for number, (key, name) in enumerate(wanted.items()):
            xs, ys = _points(run, x, key)
            if not xs:
                continue
            called = ", ".join(text for text in (plain(run.name, 40) if len(runs) > 1 else "", name) if text)
            dash = "dot" if number else _DASHES[i // len(COLOURS) % len(_DASHES)]
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers" if len(xs) <= 60 else "lines",
                    "name": called,
                    "x": xs,
                    "y": ys,
                    "line": {"color": COLOURS[i % len(COLOURS)], "dash": dash, "width": 2},
                    "marker": {"size": 5},
                }
            )
    return traces


def _points(run: Run, x: str, key: str) -> tuple[list[float], list[float]]:
    """The values of one key over epochs or seconds, thinned to what can be seen."""
    lines = [line for line in run.metrics if isinstance(line.get(key), int | float) and math.isfinite(line[key])]
    every = -(-len(lines) // _POINTS)
    kept = [line for i, line in enumerate(lines) if i % every == 0 or i == len(lines) - 1]
    since = run.metrics[0]["time_s"] if run.metrics else 0.0  # of a run from before `seconds` was written
    xs = [line["epoch"] if x == "epoch" else line.get("seconds", line["time_s"] - since) for line in kept]
    return xs, [line[key] for line in kept]


def _targets(runs: Sequence[Run], traces: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A dashed line for each target, as long as the curves."""
    xs = [x for trace in traces for x in trace["x"]]
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "name": f"target {100 * target:.4g} %",
            "x": [min(xs), max(xs)],
            "y": [target, target],
            "line": {"color": _GREY, "dash": "dash", "width": 1.5},
        }
        for target in sorted({run.target for run in runs if run.target})
        if xs
    ]


def ledger(key: str, bars: Sequence[tuple[str, Mapping[str, float]]]) -> Chart:
    """Where the time went: a bar for each (name, seconds by row), stacked in the order of the first one's rows."""
    totals = [sum(rows.values()) for _, rows in bars]
    parts = [(row, s, total) for (_, rows), total in zip(bars, totals, strict=True) for row, s in rows.items()]
    names = list(dict.fromkeys(row for row, s, total in parts if s > _SEEN * total))
    traces = []
    for row in names:
        seconds = [float(rows.get(row, 0.0)) for _, rows in bars]
        shares = [s / total if total else 0.0 for s, total in zip(seconds, totals, strict=True)]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": plain(row),
                "x": seconds,
                "y": list(range(len(bars))),
                "marker": {"color": row_colour(row, names)},
                "text": [f"{share:.0%}" if share > 0.07 else "" for share in shares],
                "textposition": "inside",
                "insidetextanchor": "middle",
                "textangle": 0,
                "customdata": [
                    f"{plain(row)}<br>{s:.3f} s, {share:.1%} of {total:.1f} s"
                    for s, share, total in zip(seconds, shares, totals, strict=True)
                ],
                "hovertemplate": "%{customdata}<extra></extra>",
            }
        )
    y = axis("", tickvals=list(range(len(bars))), ticktext=[plain(name, 24) for name, _ in bars], autorange="reversed")
    y["showticklabels"] = len(bars) > 1
    shape = layout(90 + 34 * len(bars), axis("seconds"), y=y, barmode="stack", dragmode=False, showlegend=False)
    return Chart(key, "Where the time went", traces, shape)


def row_colour(row: str, rows: Sequence[str]) -> str:
    """The colour of a row of the ledger, or of a kind of span; a grey for those that are none of a step's."""
    rest = [other for other in rows if other not in _OF_ROWS]
    return _OF_ROWS.get(row) or _GREYS[rest.index(row) % len(_GREYS)]


def ledger_of(key: str, found: Mapping[str, Any]) -> Chart:
    """The ledger of one run; of several ranks each has a bar."""
    ranks = found.get("ranks") or []
    bars = [(f"rank {i}", rows) for i, rows in enumerate(ranks[:_RANKS])] if len(ranks) > 1 else [("", found["rows"])]
    chart = ledger(key, bars)
    left = len(ranks) - _RANKS
    note = f"{left} more ranks are not drawn." if left > 0 else ""
    return Chart(chart.key, chart.title, chart.data, chart.layout, note)


def tuning(key: str, found: Mapping[str, Any]) -> Chart:
    """What tuning measured: images/s with their intervals over the batch, and the one that was chosen."""
    if found.get("what") == "lr":
        return _range_test(key, found)
    samples = sorted(found["samples"], key=lambda s: float(s["batch"]))
    good = list({s["batch"]: s for s in samples if not s.get("failed")}.values())  # of each size the last one
    bad = [s for s in samples if s.get("failed")]
    chosen = [s for s in good if s["batch"] == found.get("chosen")]
    traces = [_measured("images/s", good, COLOURS[0], size=6, mode="lines+markers")]
    useful = [s for s in good if s.get("goodput") is not None]
    if useful:
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": "goodput (right)",
                "yaxis": "y2",
                "x": [s["batch"] for s in useful],
                "y": [s["goodput"] for s in useful],
                "line": {"color": COLOURS[2], "dash": "dot", "width": 2},
                "marker": {"size": 5},
            }
        )
    if chosen:
        traces.append(_measured(f"chosen: {chosen[0]['batch']}", chosen[:1], COLOURS[1], size=13, mode="markers"))
        traces[-1]["marker"]["symbol"] = "star"
    if bad:
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "failed",
                "x": [s["batch"] for s in bad],
                "y": [0 for _ in bad],
                "marker": {"symbol": "x", "size": 9, "color": _MORE[1]},
                "cliponaxis": False,
                "customdata": [f"batch {s['batch']}<br>{plain(s['failed'])}" for s in bad],
                "hovertemplate": "%{customdata}<extra></extra>",
            }
        )
    sizes = sorted({s["batch"] for s in samples})
    shown = sizes[:: -(-len(sizes) // _SIZES)]
    x = axis("batch", type="log", tickvals=shown, ticktext=[f"{size:,}" for size in shown])
    shape = layout(340, x, y=axis("images/s", rangemode="tozero"))
    if useful:
        shape["yaxis2"] = axis("goodput", overlaying="y", side="right", tickmode="auto", showgrid=False)
        shape["yaxis2"]["rangemode"] = "tozero"
    return Chart(key, "Tuning of the batch", traces, shape, tuned(found))


def _measured(name: str, samples: Sequence[Mapping[str, Any]], colour: str, *, size: int, mode: str) -> dict[str, Any]:
    """Images/s of samples, with the intervals that those of their step times give."""
    rates = [_rate(s) for s in samples]
    up = [max(0.0, s["batch"] / s["low_s"] - r) if s.get("low_s") else 0.0 for s, r in zip(samples, rates, strict=True)]
    down = [
        max(0.0, r - s["batch"] / s["high_s"]) if s.get("high_s") else 0.0 for s, r in zip(samples, rates, strict=True)
    ]
    return {
        "type": "scatter",
        "mode": mode,
        "name": name,
        "x": [s["batch"] for s in samples],
        "y": rates,
        "error_y": {"type": "data", "symmetric": False, "array": up, "arrayminus": down, "thickness": 1.5},
        "line": {"color": colour, "width": 2},
        "marker": {"color": colour, "size": size},
        "customdata": [_said(s) for s in samples],
        "hovertemplate": "%{customdata}<extra></extra>",
    }


def _rate(sample: Mapping[str, Any]) -> float:
    given = sample.get("images_per_s")
    return float(given if given is not None else sample["batch"] / sample["step_s"])


def _said(sample: Mapping[str, Any]) -> str:
    lines = [f"batch {sample['batch']}: {_rate(sample):,.1f} images/s", _step(sample)]
    used = sample.get("utilisation")
    return "<br>".join([*lines, *([f"device {used:.0%} busy"] if used is not None else [])])


def _step(sample: Mapping[str, Any]) -> str:
    low, high = sample.get("low_s"), sample.get("high_s")
    unit, times = ("s", 1.0) if sample["step_s"] >= 1 else ("ms", 1e3)
    between = f" ({times * low:.3g} to {times * high:.3g})" if low is not None and high is not None else ""
    return f"{times * sample['step_s']:.3g} {unit} a step{between}"


def tuned(found: Mapping[str, Any]) -> str:
    """What tuning found, in a line."""
    spent, budget = found.get("spent_s"), found.get("budget_s")
    cost = f"; tuning took {spent:.1f} s" + (f" of {budget:g}" if budget else "") if spent is not None else ""
    if found.get("what") == "lr":
        return f"Chosen: a rate of {found['chosen']:.4g}{cost}." if found.get("chosen") is not None else ""
    chosen = [s for s in found["samples"] if s["batch"] == found.get("chosen") and not s.get("failed")][-1:]
    by = f" by {found['strategy']}" if found.get("strategy") else ""
    at = f", {_rate(chosen[0]):,.1f} images/s, {_step(chosen[0])}" if chosen else ""
    why = f" {found['why']}." if found.get("why") else ""
    return f"Chosen{by}: batch {found.get('chosen')}{at}{cost}.{why}"


def _range_test(key: str, found: Mapping[str, Any]) -> Chart:
    """The loss over rates that rise, and the rate that was suggested."""
    samples = [s for s in found["samples"] if s.get("lr") is not None and s.get("loss") is not None]
    rates, losses = [s["lr"] for s in samples], [s["loss"] for s in samples]
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "loss",
            "x": rates,
            "y": losses,
            "line": {"color": COLOURS[0], "width": 2},
        }
    ]
    chosen = found.get("chosen")
    if chosen is not None and samples:
        near = min(samples, key=lambda s: abs(math.log(s["lr"] / chosen)))
        star = {"symbol": "star", "size": 13, "color": COLOURS[1]}
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": f"suggested: {chosen:.4g}",
                "x": [chosen],
                "y": [near["loss"]],
                "marker": star,
            }
        )
    shape = layout(320, axis("rate", type="log", exponentformat="power"), y=axis("loss"))
    return Chart(key, "Rate range test", traces, shape, tuned(found))


def finite(value: Any) -> Any:
    """The same value as JSON can hold it: what is not a finite number becomes None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [finite(v) for v in value]
    return value
