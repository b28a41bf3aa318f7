"""`kasoku simulate`: the time and cost of a recipe on a described cluster, item by item, and its scaling.

It writes simulation.json (all figures), report.html (a step, drawn as on the page of a measured run) and, with --sweep,
sweep.html (throughput and efficiency over the number of GPUs).
"""

import json
import re

from kasoku.commands.arguments import SimulateArguments
from kasoku.config import toml
from kasoku.core import InputError, say
from kasoku.core.files import write_text
from kasoku.distributed.ddp.bucket_plan import table
from kasoku.report import print_table
from kasoku.report.html import Panel, RunRecord
from kasoku.simulate import SimulatedStep, timeline
from kasoku.simulate import load as load_cluster
from kasoku.simulate.from_recipe import Scenario, scenario, sizes, sweep
from kasoku.training.run_folder import output_folder


def run(arguments: SimulateArguments) -> int:
    """Simulates; returns the exit code."""
    recipe, cluster = arguments.load(), load_cluster(arguments.cluster, arguments.what_if)
    case = scenario(recipe, cluster, profiles=arguments.profile)
    gpus = arguments.gpus if arguments.gpus is not None else min(cluster.node.gpus, recipe.batch)
    ends = re.fullmatch(r"gpus=(\d+):(\d+)", arguments.sweep)
    if arguments.sweep and not ends:
        raise InputError(f"--sweep {arguments.sweep}: gpus=A:B is wanted, as gpus=1:4096")
    over = sizes(cluster, *map(int, ends.groups()), fits=case.simulator.sharing.fits) if ends else []
    step = case.step(gpus)
    for line in case.remarks(step):
        say(line)
    document = case.document(step)
    print_table(cluster.name, case.table(step, document))
    lines = sweep(case, over, step) if over else {}
    if lines:
        points = {name: [[s.gpus, s.step_s, s.images_per_s] for s in steps] for name, steps in lines.items()}
        parts = case.recipe.parts(step.gpus)
        alone = {name: steps[0].images_per_s / steps[0].gpus for name, steps in lines.items()}
        speedups = {name: [[s.gpus, s.images_per_s / alone[name]] for s in steps] for name, steps in lines.items()}
        each = case.images_each(step)
        document["sweep"] = {"images_a_gpu": each, "parts": parts, "points": points, "speedups": speedups}
    folder = output_folder(arguments.out, arguments.recipe, "simulated")
    write_text(folder / "simulation.json", json.dumps(document, indent=1) + "\n")
    files = ["simulation.json"]
    try:
        from kasoku.report.html.page import draw, page  # plotly and jinja2 may be missing

        write_text(folder / "report.html", page([_record(case, step, arguments.recipe.stem)]))
        files.append("report.html")
        if lines:
            rates = {name: [(s.gpus, s.images_per_s) for s in steps] for name, steps in lines.items()}
            shares = {name: [(n, speedup / n) for n, speedup in line] for name, line in speedups.items()}
            panels = [Panel("images/s", rates, log=True), Panel("efficiency", shares)]
            title = f"{cluster.name}, {each} images a GPU"
            title += f" in {parts} parts" if parts > 1 else ""
            draw(folder / "sweep.html", title, panels, x_label="GPUs", x_log=True)
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
