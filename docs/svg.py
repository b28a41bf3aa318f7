"""Line charts as SVG files, by matplotlib: the figures of docs/."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "kasoku"  # equal values give equal bytes

from cycler import cycler  # noqa: E402 - after the choice of the backend
from matplotlib import pyplot  # noqa: E402
from matplotlib.ticker import FuncFormatter  # noqa: E402

from kasoku.report.html import Panel  # noqa: E402

# Okabe and Ito's colours, with a dark red for their yellow, which is pale on white
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#882255")


def draw(path: Path, title: str, panels: Sequence[Panel], *, x_label: str = "", x_log: bool = False) -> None:
    """Writes the panels one below the other, with one x axis; a name has one colour in all of them."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    styles = dict(zip(names, cycler(linestyle=["-", "--", ":", "-."]) * cycler(color=COLOURS), strict=False))
    height = 0.6 + 2.4 * len(panels)
    figure, axes = pyplot.subplots(len(panels), sharex=True, squeeze=False, figsize=(9, height), layout="constrained")
    for axis, panel in zip(axes[:, 0], panels, strict=True):
        for name, points in panel.lines.items():
            marker = "o" if panel.markers or len(points) == 1 else ""
            axis.plot(*zip(*points, strict=True), label=name, marker=marker, markersize=4, **styles[name])
        axis.set(ylabel=panel.label, yscale="log" if panel.log else "linear", xscale="log" if x_log else "linear")
        axis.grid(color="#e4e4e4")
        axis.spines[["top", "right"]].set_visible(False)
        for scale in [axis.xaxis] * x_log + [axis.yaxis] * panel.log:
            scale.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.9g}"))
        if len(panel.lines) > 1:
            axis.legend(fontsize="small")
    axes[-1, 0].set_xlabel(x_label)
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
