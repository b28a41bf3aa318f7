"""kasoku plan: how many GPUs and which batch for a deadline, a budget, or the least time, and a script for it.

It writes the recipe with the chosen batch, groups and reducer; launch.sbatch, which trains it; and plan.json with the
times that are expected, item by item. `kasoku plan --compare RUN` compares them with a run of that recipe.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kasoku.core import InputError

if TYPE_CHECKING:
    from kasoku.simulate.planner import Choice

_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def add_parser(commands: Any) -> None:
    """Adds `plan` to the command's parsers."""
    plan = commands.add_parser("plan", help="GPUs, batch and groups for a deadline or a budget; a recipe and a script")
    plan.add_argument("recipe", nargs="?", type=Path, help="a recipe file (TOML)")
    plan.add_argument("--cluster", metavar="NAME|FILE", help="abci, mn2, dgx-a100, ..., or a file")
    goal = plan.add_mutually_exclusive_group()
    goal.add_argument("--deadline", default="", metavar="TIME", help="the cheapest within 90s, 10min, 2h")
    goal.add_argument("--budget", default="", metavar="USD", help="the fastest within 100USD")
    goal.add_argument("--fastest", action="store_true", help="the fastest, whatever it costs")
    plan.add_argument("--compare", type=Path, metavar="RUN", help="what was expected of a run against what it took")
    plan.add_argument("--noise-scale", type=float, metavar="B", help="of gradients, by kasoku tune")
    plan.add_argument(
        "--profile", action="append", default=[], metavar="DIR:IMAGES", help="times of kasoku profile at a batch"
    )
    plan.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="change a setting")
    plan.add_argument("--out", type=Path, metavar="DIR", help="the folder for it all (default: runs/NAME-plan-N)")
    plan.set_defaults(run=_plan, stays="nothing was written")


def _plan(arguments: argparse.Namespace) -> int:
    from kasoku.commands.plan_report import compare
    from kasoku.config.recipe import own_folders
    from kasoku.report import print_table
    from kasoku.simulate import load as load_cluster
    from kasoku.simulate import planner, profile_of
    from kasoku.simulate.cluster import Costs
    from kasoku.training.run_folder import own_folder

    if arguments.compare:
        return compare(arguments.compare)
    _check(arguments)
    sys.path.extend(own_folders(arguments.recipe))
    deadline_s, budget_usd = _seconds(arguments.deadline), _usd(arguments.budget)
    recipes, remark = planner.candidates(arguments.recipe, arguments.set, arguments.noise_scale)
    if remark:
        print(f"kasoku: {remark}", file=sys.stderr)
    cluster = load_cluster(arguments.cluster)
    tried = planner.choices(recipes, cluster, [profile_of(given) for given in arguments.profile])
    chosen = planner.with_searched_groups(planner.best(tried, deadline_s, budget_usd))
    folder = own_folder(arguments.out, arguments.recipe, "plan", written=[f"{arguments.recipe.stem}.toml"])
    for line in chosen.scenario.remarks(chosen.step):
        print(f"kasoku: {line}", file=sys.stderr)
    if cluster.costs == Costs():
        print(f"kasoku: {cluster.name} has no [costs]: 0 s are expected before the first step", file=sys.stderr)
    print_table(f"the best of {len(tried)} ways", _rows(chosen))
    _write(chosen, folder, arguments.recipe)
    print(f"{folder}: {arguments.recipe.stem}.toml, launch.sbatch, plan.json")
    return 0


def _check(arguments: argparse.Namespace) -> None:
    if not arguments.recipe or not arguments.cluster:
        raise InputError("kasoku plan: RECIPE and --cluster are wanted, or --compare RUN")
    if not (arguments.deadline or arguments.budget or arguments.fastest):
        raise InputError("kasoku plan: what for? one of --deadline TIME, --budget USD, --fastest")
    if arguments.noise_scale is not None and not 0 < arguments.noise_scale < math.inf:
        raise InputError(f"--noise-scale {arguments.noise_scale:g}: images, above 0 and finite")


def _seconds(given: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|min|h|d)", given)
    if given and (not match or float(match[1]) <= 0):
        raise InputError(f"--deadline {given}: a number with s, min, h or d is wanted, as 10min")
    return float(match[1]) * _SECONDS[match[2]] if match else 0.0


def _usd(given: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)USD", given)
    if given and (not match or float(match[1]) <= 0):
        raise InputError(f"--budget {given}: an amount is wanted, as 100USD")
    return float(match[1]) if match else 0.0


def _rows(chosen: Choice) -> dict[str, str]:
    from kasoku.config import updates as course
    from kasoku.simulate.planner import LEAST, MOST

    asked, step = chosen.scenario, chosen.step
    recipe, device = asked.recipe, asked.simulator.cluster.device
    nodes = asked.simulator.cluster.nodes_for(step.gpus)
    largest = max(step.inputs.sizes(), default=0.0)
    sent = "exchange" if step.inputs.asynchronous else "all-reduce"
    cost = (
        f"{chosen.usd:,.2f} USD ({chosen.usd * LEAST:,.2f} to {chosen.usd * MOST:,.2f}), {device.usd_hour:.2f} an "
        "hour a GPU"
        if chosen.usd
        else "no price"
    )
    return {
        "GPUs": f"{step.gpus:,} {device.name} in {nodes:,} nodes",
        "batch": f"{recipe.batch:,}, {step.images / step.gpus:g} a GPU"
        + (f" ({recipe.origin})" if recipe.origin else ""),
        "epochs": f"{recipe.epochs:g}, {course.updates(recipe, asked.facts.images):,} updates",
        "rates": f"x {recipe.rate_scale:.4g}, after a warm-up of {recipe.course.warmup:g} epochs",
        "groups": f"{len(step.inputs.plan.groups)} ({step.inputs.plan.policy})",
        sent: str(getattr(step.inputs.link, "choice", lambda _: "")(largest)) + _reducer(chosen),
        "step": f"{1e3 * step.step_s:.2f} ms, {1e3 * step.exposed_s:.2f} ms of it exposed communication",
        "throughput": f"{step.images_per_s:,.0f} images/s",
        "time to the end": f"{chosen.seconds:,.1f} s ({chosen.seconds * LEAST:,.1f} to {chosen.late_s:,.1f})",
        "cost": cost,
        "ranges": f"{LEAST} to {MOST} times: what the steps of three published runs of ResNet-50 took of those "
        "simulated; how epochs scatter is not known",
        "source": device.source or "the cluster's file",
    }


def _reducer(chosen: Choice) -> str:
    """What the recipe has for it, where ranks average more than in one all-reduce of fp32."""
    from kasoku.distributed import Hierarchical, Mean
    from kasoku.simulate.compressed import flat

    reducer = chosen.scenario.simulator.sharing.reducer
    if reducer is None or chosen.step.gpus == 1:
        return ""
    alike = "" if isinstance(flat(reducer), Mean) else type(flat(reducer)).__name__
    if isinstance(reducer, Hierarchical):
        row = f", node={reducer.node}" if reducer.node else ""
        return f"; reducer Hierarchical{row}" + (f", across={alike}" if alike else "")
    return f"; reducer {alike}" if alike else ""


def _write(chosen: Choice, folder: Path, original: Path) -> None:
    """Writes the planned recipe, the script that trains it, and the figures that are expected."""
    from kasoku.config.recipe import dumps, own_folders
    from kasoku.core.files import write_text
    from kasoku.simulate.planner import LEAST, MOST, planned_recipe

    expected = {**chosen.scenario.document(chosen.step), "least": LEAST, "most": MOST, "shown": _rows(chosen)}
    expected["import_folders"] = own_folders(original)
    file = folder / f"{original.stem}.toml"
    text, script = dumps(planned_recipe(chosen)), _script(file, chosen)  # raise before anything is written
    write_text(file, text)
    write_text(folder / "launch.sbatch", script)
    write_text(folder / "plan.json", json.dumps(expected, indent=1) + "\n")


def _script(recipe: Path, chosen: Choice) -> str:
    """As `kasoku launch slurm` writes it; its limit is twice what may be needed."""
    from kasoku.distributed.cluster_jobs import SlurmSpec, sbatch

    nodes = chosen.scenario.simulator.cluster.nodes_for(chosen.step.gpus)
    minutes = max(10, round(2 * chosen.late_s / 60))
    limit = f"{minutes // 1440}-{minutes // 60 % 24:02}:{minutes % 60:02}:00"
    plain = re.sub(r"[^a-z0-9]+", "-", recipe.stem.lower()).strip("-")
    name = (plain if plain[:1].isalpha() else f"kasoku-{plain}")[:63].strip("-")  # a job's begins with a letter
    each, on_gpus = chosen.step.gpus // nodes, chosen.scenario.recipe.device.kind != "cpu"
    return sbatch(SlurmSpec(name=name, recipe=recipe, nodes=nodes, each=each, on_gpus=on_gpus, time=limit))
