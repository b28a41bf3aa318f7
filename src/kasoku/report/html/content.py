"""The contents of a page: the record of a run, read from its folder, and line charts. It needs no plotly or jinja2."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kasoku.config import toml
from kasoku.core import InputError
from kasoku.core.files import check_regular, is_number, read_json

_PARTS = ("ledger", "timeline", "tuning", "profile", "classes")


@dataclass(frozen=True)
class RunRecord:
    """The data of one run, or of a folder of `kasoku tune` or `kasoku profile`, which has no recipe.

    Times are in seconds, accuracies from 0 to 1.
    """

    name: str  # on the page
    recipe: Mapping[str, Any]  # resolved, as a document
    result: Mapping[str, Any] = field(default_factory=dict)  # its result.json; empty if there is none yet
    metrics: Sequence[Mapping[str, Any]] = ()  # the lines of its metrics.jsonl, each with `step`, `epoch` and `seconds`
    parts: Mapping[str, Any] = field(default_factory=dict)  # by name: other documents that exist, such as ledger.json
    buckets: str = ""  # of its gradients, as text; empty if the run has one rank or kept none
    machine: Mapping[str, Any] = field(default_factory=dict)  # the hardware and the device setup
    damaged: Sequence[str] = ()  # one line for each file that cannot be read

    @property
    def seed(self) -> int:
        return int(self.recipe.get("seed", 0))

    @property
    def target(self) -> float:
        """The target accuracy of the recipe; 0 if it has none."""
        return float(self.recipe.get("evaluate", {}).get("target", 0.0))

    @property
    def time_to_target_s(self) -> float | None:
        seconds: Any = self.result.get("time_to_target_s")
        return seconds if is_number(seconds) and seconds > 0 else None

    @property
    def top1(self) -> float | None:
        """The accuracy at the end; None before."""
        top1: Any = self.result.get("top1")
        return top1 if is_number(top1) and not self.result.get("stopped") else None


@dataclass(frozen=True)
class Panel:
    """One line chart: lines (name -> points (x, y), in order of x).

    A line breaks at values that are not finite, and on a log axis at values <= 0.
    """

    label: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    log: bool = False
    markers: bool = False


def read_run(path: Path, name: str) -> RunRecord:
    """The run of a folder, under a name. Raises InputError for a folder without one."""
    damaged: list[str] = []
    is_run = (path / "recipe.toml").is_file()
    if not is_run and not any((path / name).is_file() for name in ("tuning.json", "profile.json")):
        wanted = "the folder of a training, of kasoku tune or of kasoku profile is wanted"
        raise InputError(f"{path}: no run there (no recipe.toml): {wanted}")
    check_regular(path)
    recipe = toml.read(path / "recipe.toml") if is_run else {}
    parts = {part: read_table(path / f"{part}.json", damaged) for part in _PARTS}
    environment = read_table(path / "environment.json", damaged)
    machine = environment.get("machine")
    machine = machine if isinstance(machine, dict) else {}
    machine |= {key: environment[key] for key in ("chosen", "command") if isinstance(environment.get(key), list | str)}
    return RunRecord(
        name,
        recipe,
        result=read_table(path / "result.json", damaged),
        metrics=_metrics(path / "metrics.jsonl"),
        parts={part: document for part, document in parts.items() if document},
        buckets=str(read_table(path / "buckets.json", damaged).get("text", "")),
        machine=machine,
        damaged=damaged,
    )


def read_table(file: Path, damaged: list[str]) -> dict[str, Any]:
    """The table of a file; empty if there is none, or if it is damaged, which is noted."""
    try:
        return read_json(file)
    except InputError as error:
        damaged.append(str(error).removeprefix(f"{file.parent}/"))
        return {}


def _metrics(file: Path) -> list[dict[str, Any]]:
    """The complete lines of the file."""
    lines = []
    for line in file.read_text(errors="replace").splitlines() if file.is_file() else ():
        with suppress(ValueError, RecursionError):  # half written, or damaged
            values = json.loads(line)
            if isinstance(values, dict) and all(is_number(values.get(key)) for key in ("step", "epoch", "seconds")):
                lines.append(values)
    return lines
