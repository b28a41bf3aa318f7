"""`kasoku simulate`: the time and cost of a recipe on a described cluster, item by item, and its scaling."""

import re

from kasoku.commands.arguments import SimulateArguments
from kasoku.config import toml
from kasoku.core import InputError, say
from kasoku.core.files import json_text, write_text
from kasoku.distributed.ddp.bucket_plan import table
from kasoku.report import print_table
from kasoku.report.html import Panel, RunRecord
from kasoku.simulate import SimulatedStep, timeline
from kasoku.simulate import load as load_cluster
from kasoku.simulate.from_recipe import AXES, Scenario, scenario, sizes, spaced, sweep, ways
from kasoku.training.run_folder import output_folder

_LARGEST = 1_000_000  # of a sweep
_LABELS = {"gpus": "GPUs", "strong": "GPUs", "images": "images a GPU", "bucket_mib": "MiB a bucket"}  # of its axes


def run(arguments: SimulateArguments) -> int:
    """Simulates; returns the exit code."""
    recipe, cluster = arguments.load(), load_cluster(arguments.cluster, arguments.what_if)
    case = scenario(recipe, cluster, profiles=arguments.profile)
    gpus = arguments.gpus if arguments.gpus is not None else min(cluster.node.gpus, recipe.batch)
    ends = re.fullmatch(rf"({'|'.join(AXES)})=([1-9]\d*):([1-9]\d*)", arguments.sweep)
    if arguments.sweep and not (ends and int(ends[2]) <= int(ends[3]) <= _LARGEST):
        wanted = f"AXIS=A:B is wanted, 1 <= A <= B <= {_LARGEST:,}, as gpus=1:4096; axes: {', '.join(AXES)}"
        raise InputError(f"--sweep {arguments.sweep}: {wanted}")
    axis, low, high = (ends[1], int(ends[2]), int(ends[3])) if ends else ("", 1, 1)
    of_gpus, fits = axis in ("gpus", "strong"), case.simulator.sharing.fits
    values = sizes(cluster, low, high, fits=fits) if of_gpus else spaced(range(low, high + 1))
    step = case.step(gpus)
    for line in case.remarks(step):
        say(line)
    document = case.document(step)
    print_table(cluster.name, case.table(step, document))
    if axis:
        parts, each = case.recipe.parts(step.gpus), case.images_each(step)
        lines = sweep(ways(case, step), axis, values, gpus=gpus, batch=gpus * each, parts=parts)
        points = {name: [(x, s.step_s, s.images_per_s, s.exposed_s) for x, s in line] for name, line in lines.items()}
        alone = {name: line[0][1].images_per_s / line[0][1].gpus for name, line in lines.items()}
        lines = lines if of_gpus else {}
        speedups = {name: [(x, s.images_per_s / alone[name]) for x, s in line] for name, line in lines.items()}
        document["sweep"] = {"axis": axis, "images_a_gpu": each, "parts": parts, "points": points, "speedups": speedups}
    folder = output_folder(arguments.out, arguments.recipe, "simulated")
    write_text(folder / "simulation.json", json_text(document))
    files = ["simulation.json"]
    try:
        from kasoku.report.html.page import draw, page  # plotly and jinja2 may be missing

        write_text(folder / "report.html", page([_record(case, step, arguments.recipe.stem)]))
        files.append("report.html")
        if axis:
            rates, late = ({name: [(row[0], row[i]) for row in rows] for name, rows in points.items()} for i in (2, 3))
            panels = [Panel("images/s", rates, log=True), Panel("exposed communication, s", late)]
            if of_gpus:
                panels[1] = Panel("efficiency", {k: [(n, speed / n) for n, speed in v] for k, v in speedups.items()})
            held = {"gpus": f"{each:,} images a GPU", "strong": f"{gpus * each:,} images"}.get(axis, f"{gpus:,} GPUs")
            title = f"{cluster.name}, {held}" + (f" in {parts} parts" if parts > 1 else "")
            draw(folder / "sweep.html", title, panels, x_label=_LABELS.get(axis, axis), x_log=True)
            files.append("sweep.html")
    except InputError as error:
        say(f"no page: {error}")
    print(f"{folder}: {', '.join(files)}")
    arguments.document.update(folder=str(folder), **document)
    return 0


def _record(case: Scenario, step: SimulatedStep, name: str) -> RunRecord:
    """The simulated training as a run, whose page shows a step."""
    kinds = ("forward", "backward", "exposed")
    rows = case.rows(step)
    whole = sum(rows[kind] for kind in kinds)
    step_s = {kind: rows[kind] / whole * step.step_s for kind in kinds}
    cluster, what = case.simulator.cluster, "updates" if step.inputs.asynchronous else "gradients"
    drawn = {} if step.inputs.asynchronous else {"timeline": timeline(step)}
    return RunRecord(
        f"{name} on {step.gpus:,} {cluster.device.name}, simulated",
        toml.table(case.recipe),
        result={"images_per_s": step.images_per_s, "seconds": sum(rows.values()), "epochs": case.recipe.epochs},
        parts={"ledger": {"rows": rows, "step_s": step_s}, **drawn},
        buckets=table(step.inputs.plan, step.inputs.tensors, what=what),
        machine={"chosen": f"{cluster.name}, simulated"},
    )
