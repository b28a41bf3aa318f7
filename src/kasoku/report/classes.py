"""Accuracy by class, confusion and the worst images, from the classes.json of a run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from kasoku.report.charts import COLOURS, Chart, axis, layout, plain

_DRAWN = 40  # classes of a chart
_COUNTED = 14  # classes up to which counts are written into the cells
_PAIRS = 10
_SCALE = [[0, "rgba(47,134,200,0)"], [0.02, "rgba(47,134,200,0.25)"], [0.2, "rgba(47,134,200,0.6)"], [1, "#2f86c8"]]


def accuracies(key: str, found: Mapping[str, Any]) -> Chart:
    """The share of each class's images that were told right, the worst class first."""
    classes, counts = found["classes"], _counted(found)
    sums = [sum(row.values()) for row in counts]
    seen = [k for k in range(len(classes)) if sums[k]]
    order = sorted(seen, key=lambda k: counts[k][k] / sums[k])
    shown = order[:_DRAWN]
    shares = [counts[k][k] / sums[k] for k in shown]
    trace = {
        "type": "bar",
        "orientation": "h",
        "name": "accuracy",
        "x": shares,
        "y": list(range(len(shown))),
        "marker": {"color": COLOURS[0]},
        "text": [f"{share:.1%}" for share in shares],
        "textposition": "auto",
        "textangle": 0,
        "customdata": [
            f"{plain(classes[k], 60)}<br>{counts[k][k]:,} of {sums[k]:,} images: {share:.2%}"
            for k, share in zip(shown, shares, strict=True)
        ],
        "hovertemplate": "%{customdata}<extra></extra>",
    }
    y = _of_classes([classes[k] for k in shown], autorange="reversed")
    shape = layout(90 + 22 * len(shown), axis("accuracy", tickformat="~%", range=[0, 1]), y=y, showlegend=False)
    left = len(seen) - len(shown)
    return Chart(key, "Accuracy by class", [trace], shape, f"The {len(shown)} worst of {len(seen)}." if left else "")


def confusion(key: str, found: Mapping[str, Any]) -> Chart:
    """What images of each class were taken for: a row a class, shaded by the share of its images."""
    classes, counts = found["classes"], _counted(found)
    wrong = [0] * len(classes)  # as what it is, and as what it was taken for
    for k, other, n in found["confusion"]:
        if k != other:
            wrong[k] += n
            wrong[other] += n
    shown = sorted(sorted(range(len(classes)), key=lambda k: -wrong[k])[:_DRAWN])
    sums = [max(1, sum(counts[k].values())) for k in shown]
    traces: list[dict[str, Any]] = [
        {
            "type": "heatmap",
            "name": "confusion",
            "x": list(range(len(shown))),
            "y": list(range(len(shown))),
            "z": [[counts[k][other] / total for other in shown] for k, total in zip(shown, sums, strict=True)],
            "zmin": 0,
            "zmax": 1,
            "colorscale": _SCALE,
            "showscale": False,
            "xgap": 1,
            "ygap": 1,
            "customdata": [
                [_cell(classes[k], classes[other], counts[k][other], total) for other in shown]
                for k, total in zip(shown, sums, strict=True)
            ],
            "hovertemplate": "%{customdata}<extra></extra>",
        }
    ]
    if len(shown) <= _COUNTED:
        traces.append(_counts([[counts[k][other] for other in shown] for k in shown]))
    last = len(shown) - 0.5
    names = [classes[k] for k in shown]
    x = {
        **_of_classes(names, title="taken for", range=[-0.5, last]),
        "tickangle": -90 if any(len(str(n)) > 2 for n in names) else 0,
    }
    y = _of_classes(names, title="is", range=[last, -0.5])
    shape = layout(min(760, 220 + 26 * len(shown)), x, y=y, dragmode=False, showlegend=False)
    note = f"The {len(shown)} classes with the most mistakes, of {len(classes)}." if len(shown) < len(classes) else ""
    return Chart(key, "Confusion", traces, shape, note)


def _counts(rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The counts that are not 0, as text in the page's colour: what a heatmap writes ignores what lies behind it."""
    cells = [(i, j, n) for i, row in enumerate(rows) for j, n in enumerate(row) if n]
    return {
        "type": "scatter",
        "mode": "text",
        "x": [j for _, j, _ in cells],
        "y": [i for i, _, _ in cells],
        "text": [str(n) for _, _, n in cells],
        "hoverinfo": "skip",
    }


def mistaken(found: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """What was taken for what most often: (class, taken for, how often)."""
    classes, counts = found["classes"], _counted(found)
    pairs = [(n, k, other) for k, other, n in found["confusion"] if other != k]
    most = sorted(pairs, key=lambda pair: (-pair[0], pair[1:]))[:_PAIRS]
    return [(str(classes[k]), str(classes[other]), f"{n:,} of {sum(counts[k].values()):,}") for n, k, other in most]


def gallery(worst: Sequence[Mapping[str, Any]]) -> str:
    """The worst images as HTML, each with what it is, what it was taken for, and its loss."""
    cards = []
    for image in worst:
        png = str(image.get("png") or "")
        name, label, predicted = (escape(str(image[k])) for k in ("name", "label", "predicted"))
        whole = re.fullmatch(r"[A-Za-z0-9+/=]+", png)
        source = f"data:image/png;base64,{png}"
        picture = f'<img alt="{name}" src="{source}">' if whole else '<div class="none">no picture</div>'
        loss = "" if image.get("loss") is None else f"<br>loss {float(image['loss']):.2f}"
        taken = "told right" if label == predicted else f"taken for <b>{predicted}</b>"
        caption = f'<b>{label}</b> {taken}{loss}<br><span class="soft">{name}</span>'
        cards.append(f"<figure>{picture}<figcaption>{caption}</figcaption></figure>")
    return f'<div class="gallery">{"".join(cards)}</div>'


def _counted(found: Mapping[str, Any]) -> list[Counter[int]]:
    """What the images of each class were taken for."""
    counts: list[Counter[int]] = [Counter() for _ in found["classes"]]
    for k, other, n in found["confusion"]:
        counts[k][other] += n
    return counts


def _of_classes(names: Sequence[object], *, title: str = "", **more: Any) -> dict[str, Any]:
    ticks = {"tickvals": list(range(len(names))), "ticktext": [plain(name, 16) for name in names]}
    return axis(title, showgrid=False, **ticks, **more)


def _cell(label: object, predicted: object, count: int, total: int) -> str:
    taken = "told right" if label == predicted else f"taken for {plain(predicted, 40)}"
    return f"{plain(label, 40)}<br>{taken}: {count:,} of {total:,} ({count / total:.1%})"
