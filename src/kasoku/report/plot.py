"""Line charts as self-contained SVG files: for papers, web pages and the folder of a run."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from xml.sax.saxutils import escape

from kasoku.core import InputError
from kasoku.core.run import write_atomically

# Okabe and Ito's colours, with a dark red for their yellow, which is pale on white: apart under each colour blindness.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#882255")
_DASHES = ("none", "8 4", "2 3", "10 3 2 3")
_STYLES = [f"stroke='{colour}' fill='{colour}' stroke-dasharray='{dash}'" for dash in _DASHES for colour in _COLOURS]
_WIDTH, _PITCH, _GAP, _LETTER = 900, 240, 20, 7  # pixels: all, from panel to panel, between them, a letter


@dataclass(frozen=True)
class Panel:
    """One chart: lines (name -> points (x, y), in order of x) over the x axis that all panels of a drawing share.

    A line breaks where a value is not finite. A log axis refuses values <= 0: to drop them would hide them.
    """

    label: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    log: bool = False
    marks: bool = False


@dataclass(frozen=True)
class _Axis:  # values low..high (their logarithms when log) on the pixels start..stop; ticks: value -> text
    low: float
    high: float
    log: bool
    start: float
    stop: float
    ticks: Mapping[float, str]

    def at(self, value: float) -> float:
        part = ((math.log10(value) if self.log else value) - self.low) / (self.high - self.low)
        return self.start + part * (self.stop - self.start)


def draw(path: Path, title: str, panels: Sequence[Panel], *, x_label: str = "", x_log: bool = False) -> None:
    """Writes the panels, one below the other, as SVG; a name keeps its colour. InputError for what is not drawable."""
    if not panels or not all(panel.lines for panel in panels):
        raise InputError(f"panels with {[len(panel.lines) for panel in panels]} lines: give 1 or more, each 1 or more")
    points = [_checked(panel, x_log) for panel in panels]
    tops = [(44 if title else 16) + _PITCH * i for i in range(len(panels))]
    bottom = tops[-1] + _PITCH - _GAP
    ys = [_axis([y for _, y in points[i]], panels[i].log, t + _PITCH - _GAP, t, 7) for i, t in enumerate(tops)]
    left = 52 + _LETTER * max(len(text) for y in ys for text in y.ticks.values())
    x = _axis([x for some in points for x, _ in some], x_log, left, _WIDTH - 24, 9)
    styles = {name: _STYLES[i % 32] for i, name in enumerate(dict.fromkeys(n for p in panels for n in p.lines))}
    body = [part for panel, y in zip(panels, ys, strict=True) for part in _panel(panel, x, y, styles)]
    body += [_text(x.at(value), bottom + 17, text, "middle") for value, text in x.ticks.items()]
    body += [_text((x.start + x.stop) / 2, bottom + 40, x_label, "middle", "font-size='13'")] if x_label else []
    body += [_text(x.start, 27, title, "start", "font-size='16' font-weight='bold'")] if title else []
    high = bottom + (50 if x_label else 30)
    head = f"<svg xmlns='http://www.w3.org/2000/svg' width='{_WIDTH}' height='{high}' viewBox='0 0 {_WIDTH} {high}'"
    head += " role='img' fill='#222' style='max-width:100%;height:auto' font-size='12' font-family='Helvetica, Arial, "
    head += f"DejaVu Sans, sans-serif'><title>{escape(title or ', '.join(panel.label for panel in panels))}</title>"
    text = "\n".join([head, "<rect width='100%' height='100%' fill='#fff'/>", *body, "</svg>\n"])
    text = re.sub("[\0-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]", "\ufffd", text)  # XML does not have these
    write_atomically(path, lambda part: part.write_text(text, encoding="utf-8"))


def _checked(panel: Panel, x_log: bool) -> list[tuple[float, float]]:  # the finite points of all lines
    for name, points in panel.lines.items():
        if not any(map(_finite, points)):
            raise InputError(f"line {name!r} of {panel.label!r}: {len(points)} points, none finite: give 1 or more")
        for x, y in filter(_finite, points):
            if (panel.log and y < 1e-200) or (x_log and x < 1e-200):
                raise InputError(f"line {name!r} of {panel.label!r} has ({x:g}, {y:g}): log axes take 1e-200 and more")
    return [point for points in panel.lines.values() for point in filter(_finite, points)]


def _finite(point: tuple[float, float]) -> bool:  # nan is not less; beyond 1e200 the ticks could overflow
    return abs(point[0]) < 1e200 and abs(point[1]) < 1e200


def _axis(values: Sequence[float], log: bool, start: float, stop: float, count: int) -> _Axis:
    """An axis with 10 pixels beside the values and about `count` ticks."""
    scaled = [math.log10(value) if log else value for value in values]
    low, high = min(scaled), max(scaled)
    size, room = max(abs(low), abs(high)), (high - low) / (abs(stop - start) / 10 - 2)
    if high - low <= max(1e-7 * size, 1e-300):  # a constant
        room = 0.5 if log else max(0.1 * size, 1e-300) if size else 1.0
    low, high = low - room, high + room
    return _Axis(low, high, log, start, stop, _ticks(low, high, log, count))


def _ticks(low: float, high: float, log: bool, count: int) -> dict[float, str]:
    """Multiples of 1, 2 or 5 times a power of ten. Log: the powers, with 2 and 5 when few, as linear when still few."""
    values, decimals = [], 0
    if log:
        powers = range(math.floor(low), math.floor(high) + 1)
        tens = [p for p in powers if p >= low]
        few = [d * 10.0**p for p in powers for d in (1, 2, 5) if low <= math.log10(d) + p <= high]
        values = [10.0**p for p in tens if p % math.ceil(len(tens) / (count + 3)) == 0] if len(tens) > 2 else few
    if len(values) < 3:
        low, high = (10**low, 10**high) if log else (low, high)
        unit = 10.0 ** math.floor(math.log10((high - low) / count))
        step = next((d * unit for d in (1, 2, 5) if d * unit * count >= high - low), 10 * unit)
        values = [k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1)]
        decimals = -math.floor(math.log10(step) + 1e-9)
    short = (re.sub(r"e\+?(-?)0*", r"e\1", f"{value:,.9g}") for value in values)  # 3e9, not 3e+09
    texts = [f"{value:,.{decimals}f}" for value in values] if 0 < decimals < 5 else short
    return {value: text.replace("-", "−") for value, text in zip(values, texts, strict=True)}


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f"<text x='{x:.2f}' y='{y:.2f}' text-anchor='{anchor}' {more}>{escape(text)}</text>"


def _panel(panel: Panel, x: _Axis, y: _Axis, styles: Mapping[str, str]) -> list[str]:
    """Grid, frame, label, lines and legend; a piece of one point is a dot."""
    grid = "".join(f"M{x.at(v):.2f},{y.start}V{y.stop}" for v in x.ticks)
    grid += "".join(f"M{x.start:.2f},{y.at(v):.2f}H{x.stop}" for v in y.ticks)
    parts = [f"<g><title>{escape(panel.label)}</title><path d='{grid}' stroke='#e4e4e4'/>"]
    parts.append(f"<path d='M{x.start:.2f},{y.stop}V{y.start}H{x.stop}' fill='none' stroke='#555'/>")
    parts += [_text(x.start - 7, y.at(value) + 4, text, "end") for value, text in y.ticks.items()]
    middle = (y.start + y.stop) / 2
    parts.append(_text(20, middle, panel.label, "middle", f"transform='rotate(-90 20 {middle})' font-size='13'"))
    path: list[tuple[float, float]] = []  # spots along the lines
    for name, points in panel.lines.items():
        parts.append(f"<g stroke-width='1.8' stroke-linejoin='round' {styles[name]}><title>{escape(name)}</title>")
        pieces = enumerate(groupby(points, _finite))
        pixels = _thin([(x.at(a), y.at(b), i) for i, (finite, piece) in pieces if finite for a, b in piece])
        for _, run in groupby(pixels, lambda pixel: pixel[2]):
            spots = [(f"{a:.2f}", f"{b:.2f}") for a, b, _ in run]
            parts.append(f"<polyline fill='none' points='{' '.join(map(','.join, spots))}'/>")
            dots = spots if panel.marks or len(spots) == 1 else []
            parts += [f"<circle cx='{a}' cy='{b}' r='3' stroke='none'/>" for a, b in dots]
        parts.append("</g>")
        between = pairwise([pixels[0], *pixels])
        path += [(a + (c - a) * k / 8, b + (d - b) * k / 8) for (a, b, _), (c, d, _) in between for k in range(9)]
    return [*parts, *(_legend({name: styles[name] for name in panel.lines}, path, x, y)), "</g>"]


def _thin(pixels: list[tuple[float, float, int]]) -> list[tuple[float, float, int]]:
    """Of more than 2,000 pixels (x, y, piece) in each 2 of x the first, the last, the lowest and the highest."""
    kept = []
    for _, run in groupby(pixels, lambda pixel: int(pixel[0] / 2)):
        part = list(run)
        ends = {part[0], part[-1], min(part, key=lambda pixel: pixel[1]), max(part, key=lambda pixel: pixel[1])}
        kept += list(dict.fromkeys(pixel for pixel in part if pixel in ends))
    return kept if len(pixels) > 2000 else pixels


def _legend(styles: Mapping[str, str], path: list[tuple[float, float]], x: _Axis, y: _Axis) -> list[str]:
    """The names, in columns of at most 6, in the corner or middle that covers least of the lines."""
    columns = math.ceil(len(styles) / 6)
    rows = math.ceil(len(styles) / columns)
    longest = max(1, min(40, max(map(len, styles)), int(((x.stop - x.start) / columns - 56) / _LETTER)))
    wide, high = columns * (50 + _LETTER * longest), rows * 17 + 8
    lefts = (x.stop - wide - 6, x.start + 8, (x.start + x.stop - wide) / 2)
    places = [(a, b) for b in (y.stop + 6, y.start - high - 6) for a in lefts]
    left, top = min(places, key=lambda p: sum(0 <= a - p[0] <= wide and 0 <= b - p[1] <= high for a, b in path))
    parts = [f"<rect x='{left:.2f}' y='{top}' width='{wide}' height='{high}' fill='#fff' opacity='.9' stroke='#ddd'/>"]
    for i, (name, style) in enumerate(styles.items()):
        a, b = left + i // rows * wide / columns + 8, top + i % rows * 17 + 12
        parts.append(f"<path d='M{a:.2f},{b:.2f}h26' stroke-width='2.2' {style}/>")
        parts.append(_text(a + 33, b + 4, name if len(name) <= longest else name[: longest - 1] + "…", "start"))
    return parts if len(styles) > 1 else []
