"""Charts are drawn where the values say, readable, whole, and refused in one sentence when they cannot be."""

import math
import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from kasoku.core import InputError
from kasoku.report import Panel, draw

SVG = "{http://www.w3.org/2000/svg}"
nan, inf = math.nan, math.inf


@pytest.fixture
def chart(tmp_path):
    """Draws and parses."""

    def make(panels, title="t", **settings):
        draw(tmp_path / "chart.svg", title, panels, **settings)
        return ET.parse(tmp_path / "chart.svg").getroot()

    return make


def drawn(root, name, tag):
    """The parts of a line: a group inside its panel's."""
    lines = root.findall(f"{SVG}g/{SVG}g")
    return next(line for line in lines if line.findtext(f"{SVG}title") == name).findall(SVG + tag)


def polylines(root, name):
    found = [line.get("points").split() for line in drawn(root, name, "polyline")]
    return [[tuple(map(float, point.split(","))) for point in line] for line in found]


def texts(root, anchor):
    found = [text for text in root.iter(f"{SVG}text") if text.get("text-anchor") == anchor]
    return {text.text: (float(text.get("x")), float(text.get("y"))) for text in found}


def y_ticks(root):
    return [text.replace("−", "-") for text in texts(root, "end")]


def one(*points, **settings):
    return [Panel("loss", {"a": points}, **settings)]


def test_points_lie_at_the_ticks_of_their_values(chart):
    root = chart([Panel("y", {"a": [(0, -20), (20, 0), (40, 40)]}), Panel("z", {"b": [(10, 1), (30, 1000)]}, log=True)])
    x, y = texts(root, "middle"), texts(root, "end")  # a y tick's text stands 4 below it
    for name, wanted in (("a", [("0", "−20"), ("20", "0"), ("40", "40")]), ("b", [("10", "1"), ("30", "1,000")])):
        for at, (tick_x, tick_y) in zip(polylines(root, name)[0], wanted, strict=True):
            assert at == pytest.approx((x[tick_x][0], y[tick_y][1] - 4), abs=0.02)
    assert y["1"][1] - y["100"][1] == pytest.approx(2 * (y["100"][1] - y["1,000"][1]), abs=0.03)


def test_a_larger_value_lies_higher_and_panels_do_not_overlap(chart):
    root = chart([Panel(label, {label: [(0, -5), (1, 5)]}) for label in "abc"], x_label="step")
    height = float(root.get("height"))
    spans = [sorted(y for _, y in polylines(root, label)[0]) for label in "abc"]
    assert polylines(root, "a")[0][0][1] > polylines(root, "a")[0][1][1]
    assert all(low[1] < high[0] for low, high in pairwise(spans))
    assert 0 < spans[0][0] < spans[-1][1] < height < 3 * 280
    assert len({tuple(x for x, _ in polylines(root, label)[0]) for label in "abc"}) == 1


def test_a_log_x_axis_spaces_powers_evenly(chart):
    points = polylines(chart(one((1, 1), (10, 2), (100, 3)), x_log=True), "a")[0]
    assert points[1][0] - points[0][0] == pytest.approx(points[2][0] - points[1][0], abs=0.02)


@pytest.mark.parametrize(
    ("low", "high", "log", "wanted"),
    [
        (0, 1, False, "0.0 0.2 0.4 0.6 0.8 1.0"),
        (0, 100_000, False, "0 20,000 40,000 60,000 80,000 100,000"),
        (-3, 3, False, "-3 -2 -1 0 1 2 3"),
        (1, 2.1, False, "1.0 1.2 1.4 1.6 1.8 2.0"),
        (0.001, 0.006, False, "0.001 0.002 0.003 0.004 0.005 0.006"),
        (0, 3e9, False, "0 500,000,000 1e9 1.5e9 2e9 2.5e9 3e9"),
        (1e-6, 3e-6, False, "1e-6 1.5e-6 2e-6 2.5e-6 3e-6"),
        (0.001, 10, True, "0.001 0.01 0.1 1 10"),
        (1, 20, True, "1 2 5 10 20"),
        (1e-12, 1e12, True, "1e-12 1e-9 1e-6 0.001 1 1,000 1,000,000 1e9 1e12"),
        (91, 96, True, "91 92 93 94 95 96"),
        (5, 5, False, "4.6 4.8 5.0 5.2 5.4"),
        (0, 0, False, "-1.0 -0.5 0.0 0.5 1.0"),
        (3, 3, True, "1 2 5"),
    ],
)
def test_ticks_are_round_numbers(chart, low, high, log, wanted):
    assert y_ticks(chart(one((0, low), (1, high), log=log))) == wanted.split()


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("size", [1e-200, 3e-150, 1e-9, 0.7, 81920, 1e16, 9e199])
@pytest.mark.parametrize("ratio", [1, 1 + 1e-12, 1 + 2e-7, 1.001, 1.5, 7, 1e4, 1e150])
def test_any_range_has_some_ticks_and_no_text_twice(chart, size, ratio, log):
    high = min(size * ratio, 9e199)
    root = chart(one((0, size), (1, high), log=log))
    assert 2 <= len(set(y_ticks(root))) <= 12
    assert all(16 < y < 300 for line in polylines(root, "a") for _, y in line)
    ticks = [t for t in root.iter(f"{SVG}text") if t.get("text-anchor") == "end"]
    assert len({t.text for t in ticks}) == len(ticks)


def test_thinning_keeps_the_extremes_the_ends_and_the_early_points_of_a_log_axis(chart):
    n = 200_000
    points = [(i + 1, math.sin(i / 9000)) for i in range(n)]
    points[77_777], points[123_456] = (77_778, 9.0), (123_457, -9.0)
    line = polylines(chart([Panel("y", {"all": points, "few": [(1, 9), (77_778, 9), (123_457, -9), (n, 0)]})]), "all")[
        0
    ]
    few = polylines(chart([Panel("y", {"all": points, "few": [(1, 9), (77_778, 9), (123_457, -9), (n, 0)]})]), "few")[0]
    assert len(line) <= 2000
    assert {few[1], few[2]} <= set(line)
    assert (line[0][0], line[-1][0]) == (few[0][0], few[-1][0])
    assert [x for x, _ in line] == sorted(x for x, _ in line)
    early = polylines(chart([Panel("y", {"all": points, "few": points[:50]})], x_log=True), "all")[0]
    assert len({x for x, _ in early[:50]}) == 50


def test_a_line_breaks_at_what_is_not_finite_and_a_lone_point_is_a_dot(chart):
    root = chart(one((0, 1), (1, 2), (2, nan), (3, 3), (4, inf), (5, 2), (6, 1), (nan, 1), (7, -inf)))
    assert [len(line) for line in polylines(root, "a")] == [2, 1, 2]
    assert len(drawn(root, "a", "circle")) == 1
    assert not {"nan", "inf"} & set(re.findall(r"[a-z]+", " ".join(text.text for text in root.iter(f"{SVG}text"))))


def test_marks_draw_each_point(chart):
    root = chart(one((0, 1), (1, 2), (2, 5), marks=True))
    dots = [(float(c.get("cx")), float(c.get("cy"))) for c in drawn(root, "a", "circle")]
    assert dots == polylines(root, "a")[0]


def test_a_single_point_is_drawn(chart):
    root = chart(one((3, -2)))
    assert len(list(root.iter(f"{SVG}circle"))) == 1
    assert "-2.0" in y_ticks(root)


def test_names_and_labels_are_escaped_and_what_xml_lacks_is_replaced(chart):
    name = "<b> & \"quoted\" 'x' é"
    root = chart([Panel(name + "\x1b", {name: [(0, 1)], "other": [(1, 2)]})], title=name, x_label=name)
    found = [text.text for text in root.iter(f"{SVG}text")]
    assert root.findtext(f"{SVG}title") == name
    assert found.count(name) == 3
    assert name + "\ufffd" in found


def test_a_legend_names_the_lines_where_there_are_several_and_covers_none_of_them(chart):
    assert "a" not in texts(chart(one((0, 1), (1, 2))), "start")
    root = chart([Panel("y", {"rises": [(0, 0), (1, 1)], "also": [(0, 0), (1, 0.9)]})])
    assert {"rises", "also"} <= texts(root, "start").keys()
    box = root.find(f"{SVG}g/{SVG}rect")
    left, top, wide, high = (float(box.get(key)) for key in ("x", "y", "width", "height"))
    for (a, b), (c, d) in (polylines(root, name)[0] for name in ("rises", "also")):
        spots = [(a + (c - a) * k / 100, b + (d - b) * k / 100) for k in range(101)]
        assert not any(left <= x <= left + wide and top <= y <= top + high for x, y in spots)


def test_a_name_has_one_look_in_all_panels_and_each_name_its_own(chart):
    names = [f"line {i}" for i in range(20)]
    panels = [Panel(label, {name: [(0, 1), (1, i)] for i, name in enumerate(names)}) for label in ("y", "z")]
    panels.append(Panel("last", {names[7]: [(0, 1)]}))
    looks = {}
    for g in chart(panels).iter(f"{SVG}g"):
        if g.get("stroke"):
            looks.setdefault(g.findtext(f"{SVG}title"), set()).add((g.get("stroke"), g.get("stroke-dasharray")))
    assert all(len(look) == 1 for look in looks.values())
    assert len(set.union(*looks.values())) == len(names)
    assert len({colour for name in names[:8] for colour, _ in looks[name]}) == 8


def test_the_same_values_give_the_same_bytes_and_nothing_else_is_left(tmp_path):
    for name in ("a.svg", "b.svg"):
        draw(tmp_path / name, "t", one((0, 1), (1, 2)))
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.svg", "b.svg"]


@pytest.mark.parametrize(
    ("panels", "settings", "says"),
    [
        ([], {}, r"panels with \[\] lines: give 1 or more"),
        ([Panel("y", {})], {}, r"panels with \[0\] lines"),
        (one(), {}, "line 'a' of 'loss': 0 points, none finite"),
        (one((0, nan), (inf, 1)), {}, "2 points, none finite"),
        (one((0, 1), (1, 0), log=True), {}, r"line 'a' of 'loss' has \(1, 0\): log axes take"),
        (one((0, 1), (1, -2), log=True), {}, r"has \(1, -2\)"),
        (one((0, 1), (1, 2)), {"x_log": True}, r"has \(0, 1\)"),
    ],
)
def test_what_cannot_be_drawn_is_refused_and_nothing_written(tmp_path, panels, settings, says):
    with pytest.raises(InputError, match=says):
        draw(tmp_path / "chart.svg", "t", panels, **settings)
    assert not list(tmp_path.iterdir())


def test_a_path_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(InputError, match=r"none/chart\.svg: cannot be written"):
        draw(tmp_path / "none" / "chart.svg", "t", one((0, 1)))
