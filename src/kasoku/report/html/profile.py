"""The figures and tables of a folder of `kasoku profile`: idle gaps, ranks, blocks, operators."""

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from kasoku.report.html.figures import COLOURS, HOVER, SHADES, Chart, new_figure, plain, ticks
from kasoku.report.profile_tables import ms, profile_tables

_STEPS, _RANKS = 5, 8  # that are drawn


def profile(document: Mapping[str, Any]) -> dict[str, Any]:
    """The charts and the tables of profile.json, of what was measured."""
    tables = [(title.capitalize(), (head, rows)) for title, head, rows in profile_tables(document)]
    charts = [_gaps(document["ranks"])] if document["blocks"] else []
    return {"charts": charts, "tables": tables}


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
