"""Line charts as a page: the points given, and one colour a name."""

import json
import math
import re

import pytest

from kasoku.core import InputError
from kasoku.report.html import Panel

nan, inf = math.nan, math.inf


@pytest.fixture
def draw(figures):
    from kasoku.report.html.page import draw

    return draw


@pytest.fixture
def drawn(draw, tmp_path):
    """Draws panels; returns the data and the layout of each."""

    def make(panels, title="t", **settings):
        draw(tmp_path / "page.html", title, panels, **settings)
        charts = json.loads(re.search(r'id="charts">(.*?)</script>', (tmp_path / "page.html").read_text(), re.S)[1])
        return [(chart["data"], chart["layout"]) for chart in charts]

    return make


def one(*points, **settings):
    return [Panel("loss", {"a": points}, **settings)]


def test_each_panel_has_its_points_labels_and_axes(drawn):
    panels = [Panel("y", {"a": [(1, -20), (20, 40)]}), Panel("z", {"b": [(10, 1), (30, 1000)]}, log=True)]
    (first, y), (second, z) = drawn(panels, x_label="step", x_log=True)
    assert (first[0]["x"], first[0]["y"]) == ([1, 20], [-20, 40])
    assert (second[0]["x"], second[0]["y"]) == ([10, 30], [1, 1000])
    assert [layout["yaxis"]["type"] for layout in (y, z)] == ["linear", "log"]
    assert {layout["xaxis"]["type"] for layout in (y, z)} == {"log"}
    assert {layout["xaxis"]["title"]["text"] for layout in (y, z)} == {"step"}


def test_a_line_breaks_at_values_that_are_not_finite(drawn):
    ((data, _),) = drawn(one((0, 1), (1, 2), (2, nan), (3, 3), (4, inf), (nan, 1)))
    assert data[0]["y"] == [1, 2, None, 3, None, 1]
    assert data[0]["x"] == [0, 1, 2, 3, 4, None]


def test_a_single_point_and_a_line_with_markers_show_their_points(drawn):
    assert drawn(one((3, -2)))[0][0][0]["mode"] == "lines+markers"
    assert drawn(one((0, 1), (1, 2), markers=True))[0][0][0]["mode"] == "lines+markers"
    assert drawn(one((0, 1), (1, 2)))[0][0][0]["mode"] == "lines"


def test_names_and_titles_are_escaped(drawn, tmp_path):
    name = "</script><b> & 'x' é"
    ((data, layout),) = drawn([Panel(name, {name: [(0, 1)], "other": [(1, 2)]})], title=name, x_label=name)
    wanted = "&lt;/script&gt;&lt;b&gt; &amp; 'x' é"
    assert data[0]["name"] == layout["xaxis"]["title"]["text"] == layout["yaxis"]["title"]["text"] == wanted
    assert "<h1>&lt;/script&gt;&lt;b&gt; &amp; &#39;x&#39; é</h1>" in (tmp_path / "page.html").read_text()


def test_a_name_has_one_look_in_all_panels_and_each_name_its_own(drawn):
    names = [f"line {i}" for i in range(20)]
    panels = [Panel(label, {name: [(0, 1), (1, i)] for i, name in enumerate(names)}) for label in ("y", "z")]
    panels.append(Panel("last", {names[7]: [(0, 1)]}))
    looks = {}
    for data, _ in drawn(panels):
        for trace in data:
            looks.setdefault(trace["name"], set()).add((trace["line"]["color"], trace["line"]["dash"]))
    assert all(len(look) == 1 for look in looks.values())
    assert len(set.union(*looks.values())) == len(names)
    assert len({colour for name in names[:8] for colour, _ in looks[name]}) == 8


def test_the_same_values_give_the_same_bytes_and_no_other_file(draw, tmp_path):
    for name in ("a.html", "b.html"):
        draw(tmp_path / name, "t", one((0, 1), (1, 2)))
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.html", "b.html"]


def test_a_path_that_cannot_be_written_is_named(draw, tmp_path):
    with pytest.raises(InputError, match=r"none/chart\.html: cannot be written"):
        draw(tmp_path / "none" / "chart.html", "t", one((0, 1)))
