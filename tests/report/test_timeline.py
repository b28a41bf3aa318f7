"""The timeline of a few steps: lanes, nested spans, what is left out."""


def test_a_span_inside_another_is_thinner_and_drawn_over_it(figures):
    def span(kind, start, stop, rank=0):
        return {"kind": kind, "name": kind, "start": start, "stop": stop, "rank": rank, "bytes": 0, "stream": "compute"}

    spans = [span("wait", 1, 2), span("forward", 0, 4), span("copy", 1.2, 1.4), span("update", 4, 5)]
    spans.append(span("wait", 0, 1, 1))
    ordered = sorted(spans, key=lambda s: (s["start"], -s["stop"]))
    found = {(s["kind"], s["rank"]): depth for s, depth in zip(ordered, figures.depths(ordered), strict=True)}
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
