"""The spans of a few steps by rank and stream: their lanes and nesting, and a trace for Chrome and Perfetto.

A timeline is {"spans": [{"kind", "name", "start", "stop", "rank", "bytes", "stream"}]}, in seconds from the first span.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

SpanRecord = Mapping[str, Any]


def lane_of(span: SpanRecord) -> tuple[int, str]:
    """The rank and the stream of a span."""
    stream = span.get("stream")
    return int(span.get("rank", 0)), "" if stream is None else str(stream)


def lanes(spans: Sequence[SpanRecord]) -> list[tuple[int, str]]:
    """All lanes, rank by rank; the streams of a rank in the order of their first spans."""
    return sorted(dict.fromkeys(lane_of(span) for span in spans), key=lambda lane: lane[0])


def depths(spans: Sequence[SpanRecord]) -> list[int]:
    """How many spans of its lane enclose each span. The spans come in order of their starts, longer ones first."""
    enclosing: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
    out = []
    for span in spans:
        stops = enclosing[lane_of(span)]
        while stops and stops[-1] <= span["start"] + 1e-9:
            stops.pop()
        out.append(len(stops))
        stops.append(span["stop"])
    return out


def chrome_trace(timeline: Mapping[str, Any]) -> dict[str, Any]:
    """The spans in Chrome's trace event format: microseconds, one process a rank, one thread a stream.

    Source: Trace Event Format (Google, 2016): complete events ("ph": "X") and names as metadata ("ph": "M").
    """
    spans = timeline["spans"]
    ordered = lanes(spans)
    threads = {lane: sum(other[0] == lane[0] for other in ordered[:i]) for i, lane in enumerate(ordered)}
    events = [_name_event("process_name", rank, 0, f"rank {rank}") for rank in dict.fromkeys(r for r, _ in ordered)]
    events += [_name_event("thread_name", rank, thread, name or "main") for (rank, name), thread in threads.items()]
    for span in spans:
        lane = lane_of(span)
        event = {
            "ts": round(1e6 * span["start"], 3),
            "dur": round(max(0.0, 1e6 * (span["stop"] - span["start"])), 3),
            "name": str(span["name"] or span["kind"]),
            "cat": str(span["kind"]),
            "ph": "X",
            "pid": lane[0],
            "tid": threads[lane],
        }
        events.append({**event, "args": {"bytes": span["bytes"]}} if span.get("bytes") else event)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _name_event(kind: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}
