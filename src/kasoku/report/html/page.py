"""Renders runs or line charts as one self-contained HTML file, which loads nothing from the network."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kasoku.core import InputError
from kasoku.core.files import is_number, write_text
from kasoku.report.html import figures
from kasoku.report.html.content import Panel, RunRecord
from kasoku.report.html.figures import COLOURS
from kasoku.report.html.tuning import tuning

try:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup
except ImportError as error:
    raise InputError('the page needs jinja2: pip install "jinja2>=3.1"') from error

_MAX_PAIRS = 10  # of true and predicted class, in the table of mistakes
_EMPTY: dict[str, Any] = {"comparisons": [], "summary": None, "prose": False, "shared": None, "runs": []}
_DAMAGED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)


def page(
    runs: Sequence[RunRecord], comparisons: Sequence[str] = (), ensembles: Mapping[str, Mapping[str, Any]] | None = None
) -> str:
    """The page of runs as HTML, in this order, with sentences that compare them; it names parts that are damaged.

    `ensembles`: by name, the ensemble.json of each; its scores are a row below those of the runs.

    Importing this file raises InputError if plotly or jinja2 is not installed.
    """
    bars = []
    for run in runs:
        rows = run.parts.get("ledger", {}).get("rows") or run.result.get("seconds_by")
        if isinstance(rows, dict) and all(map(is_number, rows.values())):
            bars.append((run.name, rows))
    summaries = [_summary(run) for run in runs if run.recipe]
    for name, scores in (ensembles or {}).items():
        own = {column: _number(scores.get(key), ".2%") for column, key in (("accuracy", "top1"), ("top-5", "top5"))}
        summaries.append(dict.fromkeys(summaries[0], "-") | {"run": f"{name} (ensemble)"} | own)
    return render(
        title=f"{len(runs)} runs" if len(runs) > 1 else runs[0].name,
        comparisons=comparisons,
        summary=(list(summaries[0]), [list(row.values()) for row in summaries]) if summaries else None,
        curves=figures.curves(runs),
        shared=figures.ledgers(bars) if len(bars) > 1 else None,
        runs=[view(run) for run in runs],
        named=len(runs) > 1 or not summaries,
    )


def draw(path: Path, title: str, panels: Sequence[Panel], *, x_label: str = "", x_log: bool = False) -> None:
    """Writes a page of line charts."""
    write_text(path, render(title=title, curves=figures.panels(panels, x_label, x_log=x_log)), errors="replace")


def render(**content: Any) -> str:
    """Fills the template, which lists in `charts` each figure that it places, by its key, and ends with their JSON."""
    from plotly.offline import get_plotlyjs

    loader, strict = FileSystemLoader(Path(__file__).parent), StrictUndefined
    environment = Environment(loader=loader, autoescape=True, undefined=strict, trim_blocks=True, lstrip_blocks=True)
    shared = {"colours": COLOURS, "plotly": Markup(get_plotlyjs()), "to_json": _to_json}
    return environment.get_template("template.html.j2").render(_EMPTY | shared | content, charts=[])


def _to_json(charts: Sequence[tuple[str, Any]]) -> Markup:
    # plotly's to_json escapes "<", ">" and "/", so that no text ends the script element
    drawn = ",".join(f'{{"key":"{key}",{figure.to_json()[1:]}' for key, figure in charts)
    return Markup(f"[{drawn}]")


def _summary(run: RunRecord) -> dict[str, str]:
    result = run.result
    stopped = f"stopped by {result['stopped']}" if result.get("stopped") else ""
    state = stopped if result else "no result yet"
    return {
        "run": f"{run.name} ({state})" if state else run.name,
        "seed": str(run.seed),
        "batch": _number(run.recipe.get("batch"), ","),
        "epochs": _number(result.get("epochs"), ".4g"),
        "accuracy": _number(result.get("top1"), ".2%"),
        "top-5": _number(result.get("top5"), ".2%"),
        "best": _number(result.get("best_top1"), ".2%"),
        "target": _number(run.target or None, ".1%"),
        "time to target": _number(result.get("time_to_target_s"), ".1f", " s"),
        "total": _number(result.get("seconds"), ".1f", " s"),
        "images/s": _number(result.get("images_per_s"), ",.0f"),
    }


def view(run: RunRecord) -> dict[str, Any]:
    """The section of one run, as the template takes it; `parts` by the name of their file."""
    gpus = run.machine.get("gpus")
    gpu = f"{len(gpus)} x {gpus[0]}" if isinstance(gpus, list) and gpus else ""
    cpu = f"{run.machine.get('cores', '?')} cores of {run.machine['cpu']}" if run.machine.get("cpu") else ""
    machine = ", ".join(part for part in (gpu, cpu, str(run.machine.get("chosen", ""))) if part)
    parts: dict[str, object] = {}
    damaged = list(run.damaged)
    for part, document in run.parts.items():
        try:
            parts[part] = _PARTS[part](document)
        except _DAMAGED as error:
            damaged.append(f"{part}.json is not as expected ({type(error).__name__}: {error})")
    return {"name": run.name, "machine": machine, "buckets": run.buckets, "parts": parts, "left_out": damaged}


def _ledger(document: Mapping[str, Any]) -> dict[str, Any]:
    step_s, overlapped = document["step_s"], document.get("beside", {})
    return {
        "chart": figures.ledger(document),
        "bottlenecks": [(b["cause"], f"{b['share']:.0%}", b["line"], b["remedy"]) for b in document.get("verdict", [])],
        "medians": (["a step, median", *step_s], [["ms", *(f"{1e3 * s:.3f}" for s in step_s.values())]]),
        "overlapped": ", ".join(f"{task} {float(s):.2f} s" for task, s in overlapped.items()),
    }


def _classes(document: Mapping[str, Any]) -> dict[str, Any]:
    classes, counts = document["classes"], figures.confusion_counts(document)
    pairs = sorted((-n, label, predicted) for label, predicted, n in document["confusion"] if label != predicted)
    mistakes = [
        [str(classes[label]), str(classes[predicted]), f"{-n:,} of {sum(counts[label].values()):,}"]
        for n, label, predicted in pairs[:_MAX_PAIRS]
    ]
    worst = [
        {
            **{name: str(image[name]) for name in ("name", "label", "predicted")},
            "png": image["png"] if re.fullmatch(r"[A-Za-z0-9+/=]+", str(image.get("png") or "")) else "",
            "loss": "" if image.get("loss") is None else f"loss {float(image['loss']):.2f}",
        }
        for image in document.get("worst") or []
    ]
    return {
        "charts": [figures.accuracies(document), figures.confusion(document)],
        "mistakes": (["class", "predicted as", "images"], mistakes) if mistakes else None,
        "worst": worst,
    }


_PARTS: Mapping[str, Callable[[Mapping[str, Any]], object]] = {  # by the name of a file: the function that draws it
    "ledger": _ledger,
    "timeline": figures.timeline,
    "tuning": tuning,
    "profile": figures.profile,
    "classes": _classes,
}


def _number(value: Any, form: str, unit: str = "") -> str:
    return f"{value:{form}}{unit}" if is_number(value) else "-"
