"""The timeline of a few steps: nested spans, and the trace that Chrome and Perfetto open."""

import json

import pytest

from helpers import shown
from kasoku.cli import main
from kasoku.report.html.timeline import chrome_trace, depths


def test_the_trace_file_is_one_that_chrome_and_perfetto_take(tmp_path, capsys):
    run = shown.run_folder(tmp_path / "a-1")
    shown.write(run, timeline=shown.timeline(ranks=2, steps=2))
    out = tmp_path / "trace.json"
    assert main(["report", str(run), "--trace", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert not (run / "report.html").exists()
    trace = json.loads(out.read_text())
    spans = shown.timeline(ranks=2, steps=2)["spans"]
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(complete) == len(spans)
    for event, span in zip(complete, spans, strict=True):
        assert (event["name"], event["cat"], event["pid"]) == (span["name"], span["kind"], span["rank"])
        assert event["ts"] == pytest.approx(1e6 * span["start"], abs=1e-3)
        assert event["dur"] == pytest.approx(1e6 * (span["stop"] - span["start"]), abs=1e-3)
        assert type(event["tid"]) is int
    sent = next(event for event in complete if event["name"] == "group 0")
    assert sent["args"] == {"bytes": 2**20}
    told = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    assert told["process_name", 1, 0] == "rank 1"
    assert [told["thread_name", 1, tid] for tid in range(3)] == ["input", "compute", "link"]


def test_streams_may_be_numbers_or_missing():
    span = {"kind": "forward", "name": "", "start": 0.0, "stop": 1e-3}
    events = chrome_trace({"spans": [{**span, "stream": 7, "rank": 3}, span]})["traceEvents"]
    assert [(e["pid"], e["tid"], e["name"]) for e in events if e["ph"] == "X"] == [(3, 0, "forward"), (0, 0, "forward")]
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {"7", "main"}


def test_a_span_inside_another_is_thinner_and_drawn_over_it(figures):
    def span(kind, start, stop, rank=0):
        return {"kind": kind, "name": kind, "start": start, "stop": stop, "rank": rank, "bytes": 0, "stream": "compute"}

    spans = [span("wait", 1, 2), span("forward", 0, 4), span("copy", 1.2, 1.4), span("update", 4, 5)]
    spans.append(span("wait", 0, 1, 1))
    ordered = sorted(spans, key=lambda s: (s["start"], -s["stop"]))
    found = {(s["kind"], s["rank"]): depth for s, depth in zip(ordered, depths(ordered), strict=True)}
    assert found == {("forward", 0): 0, ("wait", 0): 1, ("copy", 0): 2, ("update", 0): 0, ("wait", 1): 0}
    traces = figures.timeline({"spans": spans}).figure.data
    names = [trace["name"] for trace in traces]
    assert names.index("forward") < names.index("wait") < names.index("copy")
    widths = {trace["name"]: trace["width"][0] for trace in traces}
    assert widths["forward"] > widths["copy"]
    assert traces[names.index("forward")]["base"] == (0,)
    assert traces[names.index("forward")]["x"] == (4000,)


def test_a_long_timeline_is_cut_and_the_page_says_so(figures):
    span = {"kind": "forward", "name": "", "rank": 0, "bytes": 0, "stream": "compute"}
    spans = [{**span, "start": i / 1000, "stop": (i + 0.5) / 1000} for i in range(9000)]
    found = figures.timeline({"spans": spans})
    assert sum(len(trace["x"]) for trace in found.figure.data) == 6000
    assert found.note.startswith("The first 6,000 spans of 9,000 are drawn.")


def test_without_a_timeline_or_with_two_runs_there_is_no_trace(tmp_path, capsys):
    runs = [str(shown.run_folder(tmp_path / name)) for name in ("a-1", "a-2")]
    assert main(["report", runs[0], "--trace", str(tmp_path / "t.json")]) == 2
    assert "a-1 has no timeline.json" in capsys.readouterr().err
    assert main(["report", *runs, "--trace", str(tmp_path / "t.json")]) == 2
    assert "the timeline of one run is written; 2 are given" in capsys.readouterr().err
    shown.write(tmp_path / "a-1", timeline={"spans": [{"kind": 1}]})
    assert main(["report", runs[0], "--trace", str(tmp_path / "t.json")]) == 2
    assert "timeline.json of a-1 is damaged (KeyError: 'start')" in capsys.readouterr().err
