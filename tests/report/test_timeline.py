"""The timeline of a few steps: lanes, what is left out."""


def test_a_span_is_a_bar_in_the_lane_of_its_rank(figures):
    def span(kind, start, stop, rank=0):
        return {"kind": kind, "name": kind, "start": start, "stop": stop, "rank": rank, "bytes": 0, "stream": "compute"}

    spans = [span("wait", 4, 5), span("forward", 0, 4), span("wait", 0, 1, rank=1)]
    found = figures.timeline({"spans": spans}).figure
    traces = {trace["name"]: trace for trace in found.data}
    assert traces.keys() == {"forward", "wait"}
    assert (traces["forward"]["base"], traces["forward"]["x"], traces["forward"]["y"]) == ((0,), (4000,), (0,))
    assert (traces["wait"]["base"], traces["wait"]["x"], traces["wait"]["y"]) == ((0, 4000), (1000, 1000), (1, 0))
    assert found.layout.yaxis.ticktext == ("0 compute", "1 compute")


def test_a_long_timeline_is_cut_and_the_page_says_so(figures):
    span = {"kind": "forward", "name": "", "rank": 0, "bytes": 0, "stream": "compute"}
    spans = [{**span, "start": i / 1000, "stop": (i + 0.5) / 1000} for i in range(9000)]
    found = figures.timeline({"spans": spans})
    assert sum(len(trace["x"]) for trace in found.figure.data) == 6000
    assert found.note.startswith("The first 6,000 spans of 9,000 are drawn.")
