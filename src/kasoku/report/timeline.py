"""The spans of a few steps, by rank and stream: as a chart, and as a trace that Chrome and Perfetto open.

A timeline is {"spans": [{"kind", "name", "start", "stop", "rank", "bytes", "stream"}]}; seconds from the first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from kasoku.report.charts import Chart, axis, layout, plain, row_colour

_SPANS = 6000  # that are drawn
_LANES = 48
_MIB = 2**20

Span = Mapping[str, Any]


def chart(key: str, timeline: Mapping[str, Any]) -> Chart:
    """A lane for each rank and stream; a span inside another is drawn thinner. Milliseconds; drag to zoom in."""
    spans = sorted(timeline["spans"], key=lambda s: (float(s["start"]), -float(s["stop"])))
    lanes = _lanes(spans)
    drawn = set(lanes[:_LANES])
    shown = [s for s in spans if _lane(s) in drawn][:_SPANS]
    place = {lane: i for i, lane in enumerate(lanes)}
    depth = depths(shown)
    kinds: defaultdict[str, list[int]] = defaultdict(list)
    for i, span in enumerate(shown):
        kinds[str(span["kind"])].append(i)
    # outer ones first, so that what lies inside them is drawn over them
    ordered = sorted(kinds, key=lambda kind: sum(depth[i] for i in kinds[kind]) / len(kinds[kind]))
    colour = {kind: row_colour(kind, [*kinds]) for kind in kinds}
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": plain(kind, 30),
            "base": [1e3 * shown[i]["start"] for i in kinds[kind]],
            "x": [1e3 * (shown[i]["stop"] - shown[i]["start"]) for i in kinds[kind]],
            "y": [place[_lane(shown[i])] for i in kinds[kind]],
            "width": [max(0.2, 0.86 * 0.7 ** depth[i]) for i in kinds[kind]],
            "marker": {"color": colour[kind], "line": {"width": 0}},
            "customdata": [_said(shown[i]) for i in kinds[kind]],
            "hovertemplate": "%{customdata}<extra></extra>",
        }
        for kind in ordered
    ]
    names = _names(lanes[:_LANES])
    y = axis("", tickvals=list(range(len(names))), ticktext=[plain(n, 24) for n in names], autorange="reversed")
    y["fixedrange"] = True
    left = len(spans) - len(shown)
    note = f"The first {len(shown):,} spans of {len(spans):,} are drawn. " if left else ""
    shape = layout(150 + 30 * len(names), axis("ms"), y=y, barmode="overlay", bargap=0)
    return Chart(key, "A few steps", traces, shape, f"{note}Drag to zoom in, double-click to see all again.")


def chrome(timeline: Mapping[str, Any]) -> dict[str, Any]:
    """The same spans in Chrome's trace event format: microseconds, a process a rank, a thread a stream.

    Source: Trace Event Format (Google, 2016): complete events ("ph": "X") and names as metadata ("ph": "M").
    """
    spans = timeline["spans"]
    lanes = _lanes(spans)
    threads = {lane: sum(other[0] == lane[0] for other in lanes[:i]) for i, lane in enumerate(lanes)}
    events: list[dict[str, Any]] = []
    for rank in dict.fromkeys(rank for rank, _ in lanes):
        events.append(_named("process_name", rank, 0, f"rank {rank}"))
    for (rank, stream), thread in threads.items():
        events.append(_named("thread_name", rank, thread, stream or "main"))
    for span in spans:
        rank, _ = lane = _lane(span)
        begins, takes = 1e6 * span["start"], 1e6 * (span["stop"] - span["start"])
        event = {"name": str(span["name"] or span["kind"]), "cat": str(span["kind"]), "ph": "X"}
        moved = {"args": {"bytes": span["bytes"]}} if span.get("bytes") else {}
        where = {"ts": round(begins, 3), "dur": round(max(0.0, takes), 3), "pid": rank, "tid": threads[lane]}
        events.append({**event, **where, **moved})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def depths(spans: Sequence[Span]) -> list[int]:
    """In how many others of its lane each span lies; the spans in order of their starts, longer ones first."""
    open_: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
    out = []
    for span in spans:
        around = open_[_lane(span)]
        while around and around[-1] <= span["start"] + 1e-9:
            around.pop()
        out.append(len(around))
        around.append(span["stop"])
    return out


def _named(what: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}


def _lane(span: Span) -> tuple[int, str]:
    stream = span.get("stream")
    return int(span.get("rank", 0)), "" if stream is None else str(stream)


def _lanes(spans: Sequence[Span]) -> list[tuple[int, str]]:
    """Rank by rank; the streams of a rank in the order in which they begin."""
    found = list(dict.fromkeys(_lane(span) for span in spans))
    return sorted(found, key=lambda lane: lane[0])


def _names(lanes: Sequence[tuple[int, str]]) -> list[str]:
    one_rank = len({rank for rank, _ in lanes}) == 1
    return [(stream or "main") if one_rank else f"{rank} {stream}".rstrip() for rank, stream in lanes]


def _said(span: Span) -> str:
    kind, name = plain(span["kind"], 40), plain(span["name"], 60)
    lines = [kind if not name or name == kind else f"{kind}: {name}", f"rank {_lane(span)[0]}"]
    lines.append(f"{1e3 * (span['stop'] - span['start']):.3f} ms, from {1e3 * span['start']:.3f} ms on")
    size = span.get("bytes")
    return "<br>".join([*lines, *([f"{size / _MIB:.2f} MiB"] if size else [])])
